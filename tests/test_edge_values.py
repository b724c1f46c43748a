"""Special values and their defined results: empty rows and sizes, equal and extreme logits, NaN, inf, subnormals."""

from __future__ import annotations

import numpy as np
import pytest
from harness import BFLOAT16, assert_same_bits, attention, cpu_kernels, gradients, qkv, random
from reference import backward, forward

ISAS = pytest.mark.parametrize("isa", cpu_kernels())


def assert_no_nan(got: dict[str, np.ndarray]) -> None:
    for name, x in got.items():
        assert not np.isnan(x.astype(np.float64)).any(), name


@ISAS
@pytest.mark.parametrize(
    "hidden",
    [
        {"causal": True},  # more queries than keys: the first see no key
        {"window_size": (3, 0)},
        {"mask": np.zeros((1, 1, 60, 1), bool)},
        {"block_mask": np.zeros((1, 1, 1, 1), bool)},
        {"seqused_k": np.zeros(1, np.int32)},
        {"bias": np.full((1, 1, 60, 1), -np.inf, np.float32)},
    ],
    ids=lambda hidden: next(iter(hidden)),
)
@pytest.mark.parametrize("sink", [False, True])
def test_row_without_visible_key(isa: str, hidden: dict, sink: bool) -> None:
    q, k, v = qkv(sq=60, sk=41)
    options = dict(hidden)
    if sink:
        options["learnable_sink"] = random(4, seed=9)
    got = gradients(q, k, v, random(*q.shape, seed=3), isa, **options)
    o, lse = forward(q, k, v, **options)
    empty = (lse == -np.inf) if not sink else (lse == options["learnable_sink"][None, :, None])
    assert empty.any()
    rows = np.moveaxis(empty, 1, 2)
    assert not got["o"][rows].any()
    assert not np.signbit(got["o"][rows]).any(), "+0"
    assert not got["dq"][rows].any()
    wanted = -np.inf if not sink else np.broadcast_to(options["learnable_sink"][None, :, None], lse.shape)[empty]
    np.testing.assert_array_equal(got["lse"][empty], wanted)
    assert_no_nan({name: x for name, x in got.items() if name != "lse"})
    np.testing.assert_allclose(got["o"], o, atol=1e-5)
    exact = backward(random(*q.shape, seed=3), q, k, v, **options)
    for name in ("dq", "dk", "dv", *(["dsink"] if sink else [])):
        np.testing.assert_allclose(got[name], getattr(exact, name), atol=1e-4, err_msg=name)


@ISAS
@pytest.mark.parametrize("shape", [{"sk": 0}, {"sq": 0}, {"batch": 0}, {"hq": 0, "hk": 0}, {"sq": 0, "sk": 0}], ids="-".join)
def test_empty_sizes(isa: str, shape: dict) -> None:
    q, k, v = qkv(**shape)
    got = gradients(q, k, v, np.ones_like(q), isa)
    assert got["o"].shape == q.shape
    assert not got["o"].any()
    assert (got["lse"] == -np.inf).all()
    for name in ("dq", "dk", "dv"):
        assert not got[name].any(), name


@ISAS
def test_logits_far_below_zero(isa: str) -> None:
    """Every logit between -3e5 and -5e4: a finite value in place of minus infinity would lose them."""
    q, k, v = qkv(sq=9, sk=70, d=8)
    q[:], k[:] = 200.0, -np.linspace(100, 180, 70)[None, :, None, None]
    o, lse = attention(q, k, v, isa, softmax_scale=1.0)
    exact_o, exact_lse = forward(q, k, v, softmax_scale=1.0)
    assert (exact_lse < -5e4).all()
    np.testing.assert_allclose(o, exact_o, atol=1e-6)
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-6)


@ISAS
def test_one_logit_far_above(isa: str) -> None:
    q, k, v = (random(1, n, 1, 8, seed=i) for i, n in enumerate((5, 80, 80)))
    q[:], k[:] = 0, 0
    q[..., 0], k[0, 37, 0, 0] = 1, 105
    dout = random(1, 5, 1, 8, seed=3)
    got = gradients(q, k, v, dout, isa, softmax_scale=1.0)
    np.testing.assert_array_equal(got["o"], np.broadcast_to(v[:, 37:38], got["o"].shape))
    np.testing.assert_allclose(got["dv"][0, 37], dout.sum(axis=1)[0], rtol=1e-5)
    assert np.abs(got["dq"]).max() < 105 * 3e-6, "the key's size times a few roundings of dP - D"
    assert np.abs(got["dk"]).max() < 3e-6


@ISAS
@pytest.mark.parametrize("masked", [{}, {"causal": True}, {"mask": np.tri(50, 50, dtype=bool)}], ids=["free", "causal", "mask"])
def test_scale_zero(isa: str, masked: dict) -> None:
    """Uniform over the visible keys; no NaN from 0 * inf, even with huge values."""
    q, k, v = qkv(sq=50, sk=50)
    q *= 1e30
    got = gradients(q, k, v, random(*q.shape, seed=3), isa, softmax_scale=0.0, **masked)
    o, lse = forward(np.zeros_like(q), k, v, **masked)
    np.testing.assert_allclose(got["o"], o, atol=1e-6)
    np.testing.assert_allclose(got["lse"], lse, rtol=1e-6)
    assert not got["dq"].any()
    assert not got["dk"].any()


@ISAS
def test_negative_scale(isa: str) -> None:
    q, k, v = qkv()
    dout = random(*q.shape, seed=3)
    got = gradients(q, k, v, dout, isa, softmax_scale=-3.0)
    o, lse = forward(q, k, v, softmax_scale=-3.0)
    exact = backward(dout, q, k, v, softmax_scale=-3.0)
    np.testing.assert_allclose(got["o"], o, atol=2e-5)
    np.testing.assert_allclose(got["lse"], lse, rtol=1e-5)
    for name in ("dq", "dk", "dv"):
        np.testing.assert_allclose(got[name], getattr(exact, name), atol=2e-4, err_msg=name)


@ISAS
def test_softcap_ends(isa: str) -> None:
    """1e-3: uniform, with almost no gradient of the scores. 1e30: like no softcap."""
    q, k, v = qkv()
    dout = random(*q.shape, seed=3)
    tiny = gradients(q, k, v, dout, isa, softcap=1e-3)
    mean = np.repeat(v.mean(axis=1, keepdims=True), 2, axis=2)
    np.testing.assert_allclose(tiny["o"], np.broadcast_to(mean, tiny["o"].shape), atol=3e-3)
    assert np.abs(tiny["dq"]).max() < 0.1
    huge, none = gradients(q, k, v, dout, isa, softcap=1e30), gradients(q, k, v, dout, isa)
    for name in none:
        np.testing.assert_allclose(huge[name], none[name], atol=1e-4, err_msg=name)


@ISAS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("what", [np.nan, np.inf])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_broken_value_stays_where_it_belongs(isa: str, dtype: str, what: float, which: str) -> None:
    """Row 20 of one head is NaN or inf. Rows that cannot see it (causal), and other heads, keep every bit."""
    q, k, v = qkv(sq=70, sk=70, hq=4, hk=2, dtype=dtype)
    clean, clean_lse = attention(q, k, v, isa, causal=True)
    arrays = {"q": q, "k": k, "v": v}
    arrays[which][0, 20, 1] = what
    o, lse = attention(q, k, v, isa, causal=True)
    affected = np.zeros(o.shape[:3], bool)
    if which == "q":
        affected[0, 20, 1] = True
    else:
        affected[0, 20:, 2:] = True  # heads 2 and 3 read key head 1
    assert_same_bits(o[~affected], clean[~affected])
    assert_same_bits(np.moveaxis(lse, 1, 2)[~affected], np.moveaxis(clean_lse, 1, 2)[~affected])
    if np.isnan(what):
        assert np.isnan(o[affected].astype(np.float32)).all()
        if which != "v":
            assert np.isnan(np.moveaxis(lse, 1, 2)[affected]).all()


@ISAS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dirt_outside_of_sequences(isa: str, dtype: str) -> None:
    """NaN in rows that no sequence uses changes no bit, forward or backward."""
    q, k, v = qkv(batch=3, sq=40, sk=60, dtype=dtype)
    dout = np.ones_like(q)
    lengths = {"seqused_q": np.array([40, 0, 13], np.int32), "seqused_k": np.array([7, 60, 33], np.int32)}
    results = []
    for dirt in (0, np.nan, np.inf, -np.inf):
        for x, used in (
            (q, lengths["seqused_q"]),
            (dout, lengths["seqused_q"]),
            (k, lengths["seqused_k"]),
            (v, lengths["seqused_k"]),
        ):
            for b, n in enumerate(used):
                x[b, n:] = dirt
        results.append(gradients(q, k, v, dout, isa, causal=True, **lengths))
    for other in results[1:]:
        assert_same_bits(other, results[0])
    for name, used in {"o": "seqused_q", "dq": "seqused_q", "dk": "seqused_k", "dv": "seqused_k"}.items():
        for b, n in enumerate(lengths[used]):
            assert not results[0][name][b, n:].any(), f"{name} is 0 past the used length"


@ISAS
@pytest.mark.parametrize("hide", ["causal", "window", "block_mask", "mask"])
def test_hidden_keys_do_not_leak(isa: str, hide: str) -> None:
    """NaN or inf in masked keys, in tiles without a key that the first rows see."""
    q, k, v = qkv(sq=300, sk=600, hq=2, hk=2)
    block_mask = np.ones((1, 1, 3, 5), bool)
    block_mask[..., 2:] = False
    options = {
        "causal": {"causal": True, "causal_align": "top_left"},
        "window": {"window_size": (-1, 0), "causal_align": "top_left"},
        "block_mask": {"block_mask": block_mask},
        "mask": {"mask": np.arange(600)[None, :] < 300},
    }[hide]
    clean = attention(q, k, v, isa, **options)
    v[:, 500:] = np.nan
    k[:, 500:] = np.nan
    dirty = attention(q, k, v, isa, **options)
    assert_same_bits(dirty[0], clean[0])
    assert_same_bits(dirty[1], clean[1])


@ISAS
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16], ids=["fp32", "fp16", "bf16"])
def test_logits_that_overflow(isa: str, dtype: np.dtype) -> None:
    """Infinite logits may give NaN in their row, but not in another."""
    q, k, v = qkv(sq=33, sk=44, hq=1, hk=1)
    big = {np.dtype(np.float16): 6e4}.get(np.dtype(dtype), 3e38)
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    clean, _ = attention(q, k, v, isa, softmax_scale=1e5 if dtype == np.float16 else 1.0)
    q[0, 7] = big
    o, _ = attention(q, k, v, isa, softmax_scale=1e5 if dtype == np.float16 else 1.0)
    others = np.arange(33) != 7
    assert_same_bits(o[0, others], clean[0, others])


@ISAS
def test_subnormal_values(isa: str) -> None:
    """Subnormal fp16 inputs count, and fp16 outputs may be subnormal. (bf16 ones are below 2^-126: the dot instruction of the
    processor takes them for 0.)"""
    smallest = 2.0**-24
    v = (np.random.default_rng(0).integers(1, 100, (1, 50, 1, 16)) * smallest).astype(np.float16)
    q, k = (np.zeros((1, n, 1, 16), np.float16) for n in (3, 50))
    o, _ = attention(q, k, v, isa)
    assert np.abs(o[0, 0, 0].astype(np.float64) - v[0, :, 0].astype(np.float64).mean(axis=0)).max() <= smallest
    q[..., 0], k[..., 0] = smallest, np.arange(50)[:, None]
    _, lse = attention(q, k, v, isa, softmax_scale=2.0**24)
    np.testing.assert_allclose(lse[0, 0], np.log(np.exp(np.arange(50.0)).sum()), rtol=1e-6)


@ISAS
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16], ids=["fp32", "bf16"])
def test_tiny_and_huge_values(isa: str, dtype: np.dtype) -> None:
    """Scores of ordinary size from tiny queries and a huge scale, outputs as tiny or huge as v."""
    q, k = (np.zeros((1, n, 1, 16), dtype) for n in (3, 50))
    q[..., 0], k[..., 0] = 2.0**-90, np.arange(50)[:, None]
    for size in (2.0**-100, 2.0**120):
        v = (np.random.default_rng(0).integers(1, 100, (1, 50, 1, 16)) * size).astype(dtype)
        o, lse = attention(q, k, v, isa, softmax_scale=2.0**90)
        exact, _ = forward(q, k, v, softmax_scale=2.0**90)
        np.testing.assert_allclose(lse[0, 0], np.log(np.exp(np.arange(50.0)).sum()), rtol=1e-6)
        np.testing.assert_allclose(o.astype(np.float64), exact, rtol=1e-5 if dtype == np.float32 else 0.01)


@ISAS
def test_sink_ends(isa: str) -> None:
    """A sink of -inf has no effect; one far above the scores takes all the weight."""
    q, k, v = qkv()
    none, _ = attention(q, k, v, isa)
    off, _ = attention(q, k, v, isa, learnable_sink=np.full(4, -np.inf, np.float32))
    np.testing.assert_allclose(off, none, atol=1e-6)
    all_of_it, lse = attention(q, k, v, isa, learnable_sink=np.full(4, 500, np.float32))
    assert not all_of_it.any()
    np.testing.assert_array_equal(lse, np.full_like(lse, 500))
