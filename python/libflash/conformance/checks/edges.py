"""Special values and their defined results: empty rows and sizes, equal and extreme logits, ends of options, subnormals."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..reference import forward
from .check import Check, Run, assert_right, assert_zero, checks_of, only, qkv, random, wide

HIDDEN: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},  # more queries than keys: the first see no key
    "window": {"window_size": (3, 0)},
    "mask": {"mask": np.zeros((1, 1, 60, 1), bool)},
    "block_mask": {"block_mask": np.zeros((1, 1, 1, 1), bool)},
    "seqused_k": {"seqused_k": np.zeros(1, np.int32)},
    "bias": {"bias": np.full((1, 1, 60, 1), -np.inf)},
}
EMPTY: dict[str, dict[str, int]] = {
    "no-keys": {"sk": 0},
    "no-queries": {"sq": 0},
    "no-batch": {"batch": 0},
    "no-heads": {"hq": 0, "hk": 0},
    "nothing": {"sq": 0, "sk": 0},
}


def row_without_visible_key(run: Run, dtype: np.dtype, hidden: dict[str, Any], sink: bool) -> None:
    """o = +0, lse = -inf or the sink, no gradient, no NaN."""
    q, k, v = qkv(sq=60, sk=41, dtype=dtype)
    options = dict(hidden)
    if "bias" in options:
        options["bias"] = options["bias"].astype(dtype)
    if sink:
        options["learnable_sink"] = random(4, seed=9)
    dout = random(*q.shape, seed=3, dtype=dtype)
    got = run(q, k, v, dout, **options)
    _, lse = forward(q, k, v, **options)
    wanted = np.broadcast_to(options["learnable_sink"][None, :, None], lse.shape) if sink else np.full_like(lse, -np.inf)
    empty = lse == wanted
    rows = np.moveaxis(empty, 1, 2)
    assert empty.any()
    assert not wide(got["o"])[rows].any(), f"o must be 0 where no key is visible, has {np.abs(wide(got['o'])[rows]).max():.3g}"
    assert not np.signbit(wide(got["o"])[rows]).any(), "o must be +0 where no key is visible"
    if "dq" in got:
        assert not wide(got["dq"])[rows].any(), "dq must be 0 where no key is visible"
    if "lse" in got:
        np.testing.assert_array_equal(got["lse"][empty], wanted[empty], "lse where no key is visible")
    assert_right(got, q, k, v, dout, **options)


def empty_sizes(run: Run, dtype: np.dtype, shape: dict[str, int]) -> None:
    q, k, v = qkv(**shape, dtype=dtype)
    got = run(q, k, v, np.ones_like(q))
    assert got["o"].shape == q.shape, f"o has shape {got['o'].shape}"
    assert_zero(got, "o", "dq", "dk", "dv")
    if "lse" in got:
        assert (got["lse"] == -np.inf).all(), "lse must be -inf"


def logits_far_below_zero(run: Run, dtype: np.dtype) -> None:
    """Every logit is between -3e5 and -5e4: an implementation with a finite number in place of minus infinity would be wrong."""
    q, k, v = qkv(sq=9, sk=70, d=8, dtype=dtype)
    q[:], k[:] = 200.0, -np.linspace(100, 180, 70)[None, :, None, None]
    _, lse = forward(q, k, v, softmax_scale=1.0)
    assert (lse < -5e4).all()
    assert_right(run(q, k, v, softmax_scale=1.0), q, k, v, softmax_scale=1.0)


def one_logit_far_above(run: Run, dtype: np.dtype) -> None:
    """o is the value of that key, bit for bit."""
    q, k, v = (random(1, n, 1, 8, seed=seed, dtype=dtype) for seed, n in enumerate((5, 80, 80)))
    q[:], k[:] = 0, 0
    q[..., 0], k[0, 37, 0, 0] = 1, 105
    dout = random(1, 5, 1, 8, seed=3, dtype=dtype)
    got = run(q, k, v, dout, softmax_scale=1.0)
    np.testing.assert_array_equal(wide(got["o"]), np.broadcast_to(wide(v)[:, 37:38], got["o"].shape), "o is one row of v")
    assert_right(got, q, k, v, dout, softmax_scale=1.0)


def scale_zero(run: Run, dtype: np.dtype, masked: dict[str, Any]) -> None:
    """Uniform over the visible keys; no NaN from 0 * inf, even with huge values."""
    q, k, v = qkv(sq=50, sk=50, dtype=dtype)
    huge = (wide(q) * 1e30).astype(dtype)
    got = run(huge, k, v, random(*q.shape, seed=3, dtype=dtype), softmax_scale=0.0, **masked)
    assert_zero(got, "dq", "dk")
    assert_right({name: got[name] for name in ("o", "lse") if name in got}, huge, k, v, softmax_scale=0.0, **masked)


def negative_scale(run: Run, dtype: np.dtype) -> None:
    q, k, v = qkv(dtype=dtype)
    dout = random(*q.shape, seed=3, dtype=dtype)
    assert_right(run(q, k, v, dout, softmax_scale=-3.0), q, k, v, dout, softmax_scale=-3.0)


def softcap_ends(run: Run, dtype: np.dtype, softcap: float) -> None:
    """With 1e-3 the probabilities are almost uniform and the scores have almost no gradient; 1e30 is like no softcap."""
    q, k, v = qkv(dtype=dtype)
    dout = random(*q.shape, seed=3, dtype=dtype)
    got = run(q, k, v, dout, softcap=softcap)
    assert_right(got, q, k, v, dout, softcap=softcap)
    if softcap > 1:
        assert_right(got, q, k, v, dout)


def subnormal_values(run: Run, dtype: np.dtype) -> None:
    """Subnormal fp16 inputs count, and fp16 outputs may be subnormal. bf16 is not tested: its subnormal numbers are below 2^-126,
    and the dot product instruction of a processor may treat them as 0.
    """
    smallest = 2.0**-24
    v = (np.random.default_rng(0).integers(1, 100, (1, 50, 1, 16)) * smallest).astype(dtype)
    q, k = (np.zeros((1, n, 1, 16), dtype) for n in (3, 50))
    o = run(q, k, v)["o"]
    error = np.abs(wide(o)[0, 0, 0] - wide(v)[0, :, 0].mean(axis=0)).max()
    assert error <= smallest, f"o is not the mean of subnormal values: error {error / smallest:.3g} units"
    q[..., 0], k[..., 0] = smallest, np.arange(50)[:, None]
    assert_right(run(q, k, v, softmax_scale=2.0**24), q, k, v, softmax_scale=2.0**24)


def tiny_and_huge_values(run: Run, dtype: np.dtype, size: float) -> None:
    """Scores of ordinary size from tiny queries and a huge scale, outputs as tiny or huge as v."""
    q, k = (np.zeros((1, n, 1, 16), dtype) for n in (3, 50))
    q[..., 0], k[..., 0] = 2.0**-90, np.arange(50)[:, None]
    v = (np.random.default_rng(0).integers(1, 100, (1, 50, 1, 16)) * size).astype(dtype)
    assert_right(run(q, k, v, softmax_scale=2.0**90), q, k, v, softmax_scale=2.0**90)


def sink_of_minus_infinity(run: Run, dtype: np.dtype) -> None:
    """It has no effect."""
    q, k, v = qkv(dtype=dtype)
    assert_right(run(q, k, v, learnable_sink=np.full(4, -np.inf, np.float32)), q, k, v)


def sink_far_above(run: Run, dtype: np.dtype) -> None:
    """It takes all the weight."""
    q, k, v = qkv(dtype=dtype)
    got = run(q, k, v, learnable_sink=np.full(4, 500, np.float32))
    assert_zero(got, "o")
    lse = only(got, "lse")
    np.testing.assert_array_equal(lse, np.full_like(lse, 500), "lse is the sink")


def checks() -> list[Check]:
    types, wide_range = ("fp32", "fp16", "bf16"), ("fp32", "bf16")
    masked = {"free": {}, "causal": {"causal": True}, "mask": {"mask": np.tri(50, 50, dtype=bool)[None, None]}}
    return [
        *checks_of(row_without_visible_key, wide_range, HIDDEN, {"no-sink": False, "sink": True}),
        *checks_of(empty_sizes, wide_range, EMPTY),
        *checks_of(logits_far_below_zero, types),
        *checks_of(one_logit_far_above, types),
        *checks_of(scale_zero, wide_range, masked),
        *checks_of(negative_scale, types),
        *checks_of(softcap_ends, types, {"tiny": 1e-3, "huge": 1e30}),
        *checks_of(subnormal_values, ("fp16",)),
        *checks_of(tiny_and_huge_values, wide_range, {"tiny": 2.0**-100, "huge": 2.0**120}),
        *checks_of(sink_of_minus_infinity, types),
        *checks_of(sink_far_above, types),
    ]
