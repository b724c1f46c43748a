"""Inputs whose exact result is known: they show wrong masks, indices and tiles without a tolerance.

The fills of structured.py do the same for the cases; here are longer rows, more masks, and lengths at every tile boundary.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..rounding import ROUNDING
from ..visibility import visible_keys
from .check import Check, Run, assert_zero, bits, checks_of, only, random, wide

MASKS: dict[str, dict[str, Any]] = {
    "all": {},
    "causal": {"causal": True},
    "causal-top-left": {"causal": True, "causal_align": "top_left"},
    "window-7-3": {"window_size": (7, 3)},
    "window-64-0": {"window_size": (64, 0)},
    "window-right-5-top-left": {"window_size": (-1, 5), "causal_align": "top_left"},
    "window-0-0": {"window_size": (0, 0)},
    "causal-window-100": {"causal": True, "window_size": (100, -1)},
}
LENGTHS = [(1, 1), (1, 300), (300, 1), (63, 64), (64, 65), (127, 129), (200, 333), (333, 200), (257, 256), (200, 200)]


def counting(run: Run, dtype: np.dtype, lengths: tuple[int, int], mask: dict[str, Any]) -> None:
    """With q = 0 all visible keys have the same weight: exp(lse) is their number, and the columns of o show which keys."""
    sq, sk = lengths
    count = max(sk - 1, 1).bit_length()
    q, k = np.zeros((1, sq, 1, count), dtype), random(1, sk, 1, count, dtype=dtype)
    v = ((np.arange(sk)[:, None] >> np.arange(count)) & 1).astype(dtype)[None, :, None, :]
    visible = visible_keys(sq, sk, **mask)
    got = run(q, k, v, **mask)
    n = visible.sum(axis=1)
    if "lse" in got and got["lse"].itemsize >= 4:  # a half type does not resolve the numbers
        np.testing.assert_array_equal(np.rint(np.exp(wide(got["lse"])[0, 0])), n, "keys seen")
    counts = visible @ wide(v)[0, :, 0]
    resolved = counts * ROUNDING[dtype].u < 0.5  # larger counts are not exact in the storage type
    seen = np.rint(wide(got["o"])[0, :, 0] * n[:, None])
    np.testing.assert_array_equal(seen[resolved], counts[resolved], "keys seen, by bit of their index")


def selection(run: Run, dtype: np.dtype) -> None:
    """A query that copies a key's code of +-8 gets that key's value alone: the next score is 128 lower."""
    rng = np.random.default_rng(3)
    sq, sk, heads, dim = 150, 270, 2, 16
    code = 16.0 * ((np.arange(sk)[:, None] >> np.arange(dim)) & 1) - 8
    chosen = rng.integers(0, sk, (heads, sq))
    q = np.stack([code[chosen[h]] for h in range(heads)], axis=1)[None].astype(dtype)
    k = np.ascontiguousarray(np.broadcast_to(code[None, :, None], (1, sk, heads, dim))).astype(dtype)
    v = rng.integers(-3, 4, (1, sk, heads, dim)).astype(dtype)
    dout = rng.integers(-3, 4, (1, sq, heads, dim)).astype(dtype)
    got = run(q, k, v, dout, softmax_scale=1.0)
    dv = np.zeros((1, sk, heads, dim))
    for h in range(heads):
        np.testing.assert_array_equal(wide(got["o"])[0, :, h], wide(v)[0, chosen[h], h], "o is the selected rows of v")
        np.add.at(dv[0, :, h], chosen[h], wide(dout)[0, :, h])
    if "dv" in got:
        np.testing.assert_array_equal(wide(got["dv"]), dv, "dv sums integers")
    assert_zero(got, "dq", "dk")


def ones(run: Run, dtype: np.dtype, sk: int) -> None:
    """The weights of a row sum to 1 at any length: v = 1 gives 1 within one unit in the last place, or the sum's error."""
    q, k = random(1, 3, 2, 32, dtype=dtype), random(1, sk, 2, 32, seed=1, dtype=dtype)
    o = wide(run(q, k, np.ones((1, sk, 2, 32), dtype))["o"])
    limit = max(2 * ROUNDING[dtype].u, 2.0**-21 * np.sqrt(sk) if dtype == np.float32 else 0)
    worst = np.abs(o - 1).max()
    assert worst <= limit, f"v = 1 gave {o.min()} .. {o.max()}, {worst / limit:.3g} times the limit"


def equal_keys(run: Run, dtype: np.dtype, magnitude: float) -> None:
    """All logits equal, however large: o is the mean of v."""
    if dtype == np.float16:
        magnitude = min(magnitude, 2.0**15)
    entry = np.float32(2.0) ** np.floor(np.log2(magnitude) / 2)
    k, q = np.full((1, 77, 1, 8), entry, np.float32).astype(dtype), np.full((1, 5, 1, 8), entry, np.float32).astype(dtype)
    v = np.random.default_rng(0).integers(-4, 5, (1, 77, 1, 8)).astype(dtype)
    got = run(q, k, v, random(1, 5, 1, 8, dtype=dtype), softmax_scale=1.0)
    error = np.abs(wide(got["o"])[0, :, 0] - wide(v)[0, :, 0].mean(axis=0)).max()
    limit = 4 * max(2 * ROUNDING[dtype].u, 2.0**-20)
    assert error <= limit, f"o is not the mean of v: error {error:.3g}, {error / limit:.3g} times the limit"
    for name in ("dq", "dk", "dv"):
        assert name not in got or np.isfinite(wide(got[name])).all(), f"{name} is not finite"


def zero_gradient(run: Run, dtype: np.dtype) -> None:
    """dout = 0 gives exactly zero gradients."""
    q, k, v = (random(1, 90, 2, 24, seed=seed, dtype=dtype) for seed in range(3))
    got = run(q, k, v, np.zeros_like(q), causal=True)
    only(got, "dq")
    assert_zero(got, "dq", "dk", "dv")


def zero_values(run: Run, dtype: np.dtype) -> None:
    """v = 0 gives o = 0 and no gradient of q and k, but one of v."""
    q, k, dout = (random(1, 90, 2, 24, seed=seed, dtype=dtype) for seed in range(3))
    got = run(q, k, np.zeros_like(k), dout, causal=True)
    assert_zero(got, "o", "dq", "dk")
    assert got.get("dv", dout).any(), "dv is 0"


def every_key_counts_once(run: Run, dtype: np.dtype, sk: int) -> None:
    """Long rows, with lengths next to powers of two. The number of keys is exact: no key is dropped or counted twice."""
    q, k, v = np.zeros((1, 2, 1, 8), dtype), random(1, sk, 1, 8, dtype=dtype), np.ones((1, sk, 1, 8), dtype)
    np.testing.assert_array_equal(np.rint(np.exp(wide(only(run(q, k, v), "lse")))), sk, "keys seen")


def identity(run: Run, dtype: np.dtype) -> None:
    """A window of (0, 0) in a square: every query sees its own key alone, so o is v, bit for bit; dv is dout up to
    the rounding of lse.
    """
    q, k, v, dout = (random(2, 131, 2, 40, seed=seed, dtype=dtype) for seed in range(4))
    got = run(q, k, v, dout, window_size=(0, 0))
    np.testing.assert_array_equal(bits(got["o"]), bits(v), "o is v")
    if "dv" in got:
        rounding = max(2 * ROUNDING[dtype].u, 2.0**-20)
        np.testing.assert_allclose(wide(got["dv"]), wide(dout), rtol=rounding, atol=2.0**-24, err_msg="dv is dout")


def checks() -> list[Check]:
    types = ("fp32", "fp16", "bf16")
    lengths = {f"{sq}x{sk}": (sq, sk) for sq, sk in LENGTHS}
    return [
        *checks_of(counting, ("fp32", "bf16"), lengths, MASKS),
        *checks_of(selection, types),
        *checks_of(ones, types, {str(sk): sk for sk in (1, 1000, 5001)}),
        *checks_of(equal_keys, types, {f"{size:g}": size for size in (1.0, 1e3, 1e10)}),
        *checks_of(zero_gradient, types),
        *checks_of(zero_values, types),
        *checks_of(every_key_counts_once, ("fp32",), {str(sk): sk for sk in (1023, 1024, 1025, 2049, 4097)}),
        *checks_of(identity, ("fp32", "fp16", "bf16", "fp64")),
    ]
