"""Inputs whose exact result is known, which shows wrong masks, indices and tiles without a tolerance.

The fills of structured.py also run with the other cases in test_attention; here are longer rows, more masks, and lengths
at every tile boundary.
"""

from __future__ import annotations

import numpy as np
import pytest
from harness import BFLOAT16, attention, cpu_kernels, gradients, random
from visibility import visible_keys

ISAS = pytest.mark.parametrize("isa", cpu_kernels())
DTYPES = pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16], ids=["fp32", "fp16", "bf16"])
MASKS = [
    {},
    {"causal": True},
    {"causal": True, "causal_align": "top_left"},
    {"window_size": (7, 3)},
    {"window_size": (64, 0)},
    {"window_size": (-1, 5), "causal_align": "top_left"},
    {"window_size": (0, 0)},
    {"causal": True, "window_size": (100, -1)},
]
LENGTHS = [(1, 1), (1, 300), (300, 1), (63, 64), (64, 65), (127, 129), (200, 333), (333, 200), (257, 256)]


@ISAS
@pytest.mark.parametrize(("sq", "sk"), LENGTHS)
def test_counting(isa: str, sq: int, sk: int) -> None:
    """With q = 0 all visible keys have the same weight: exp(lse) is their number, and the columns of v show which they are."""
    count = max(sk - 1, 1).bit_length()
    q, k = np.zeros((1, sq, 1, count), np.float32), random(1, sk, 1, count)
    v = ((np.arange(sk)[:, None] >> np.arange(count)) & 1).astype(np.float32)[None, :, None, :]
    for mask in MASKS:
        visible = visible_keys(sq, sk, **mask)
        o, lse = attention(q, k, v, isa, **mask)
        n = visible.sum(axis=1)
        np.testing.assert_array_equal(np.rint(np.exp(lse[0, 0].astype(np.float64))), n, str(mask))
        np.testing.assert_array_equal(np.rint(o[0, :, 0] * n[:, None]), visible @ v[0, :, 0], str(mask))


@ISAS
@DTYPES
def test_selection(isa: str, dtype: np.dtype) -> None:
    """A query that copies a key's code of +-8 gets that key's value alone: the next score is 128 lower."""
    rng = np.random.default_rng(3)
    sq, sk, heads, dim = 150, 270, 2, 16
    code = 16.0 * ((np.arange(sk)[:, None] >> np.arange(dim)) & 1) - 8
    chosen = rng.integers(0, sk, (heads, sq))
    q = np.stack([code[chosen[h]] for h in range(heads)], axis=1)[None].astype(dtype)
    k = np.ascontiguousarray(np.broadcast_to(code[None, :, None], (1, sk, heads, dim))).astype(dtype)
    v = rng.integers(-3, 4, (1, sk, heads, dim)).astype(dtype)
    dout = rng.integers(-3, 4, (1, sq, heads, dim)).astype(dtype)
    got = gradients(q, k, v, dout, isa, softmax_scale=1.0)
    dv = np.zeros((1, sk, heads, dim))
    for h in range(heads):
        np.testing.assert_array_equal(got["o"][0, :, h], v[0, chosen[h], h])
        np.add.at(dv[0, :, h], chosen[h], dout[0, :, h].astype(np.float64))
    np.testing.assert_array_equal(got["dv"].astype(np.float64), dv)
    assert not got["dq"].any()
    assert not got["dk"].any()


@ISAS
@DTYPES
@pytest.mark.parametrize("sk", [1, 1000, 5001])
def test_ones(isa: str, dtype: np.dtype, sk: int) -> None:
    """The weights of a row sum to 1 at any length: v = 1 gives 1 within one unit in the last place."""
    q, k = random(1, 3, 2, 32, dtype=dtype), random(1, sk, 2, 32, seed=1, dtype=dtype)
    o, _ = attention(q, k, np.ones((1, sk, 2, 32), dtype), isa)
    ulp = {np.dtype(np.float32): 2.0**-21 * np.sqrt(sk), np.dtype(np.float16): 2.0**-10}.get(np.dtype(dtype), 2.0**-7)
    assert np.abs(o.astype(np.float64) - 1).max() <= ulp


@ISAS
@DTYPES
@pytest.mark.parametrize("magnitude", [1.0, 1e3, 1e10])
def test_equal_keys(isa: str, dtype: np.dtype, magnitude: float) -> None:
    """All logits equal, however large: o is the mean of v."""
    if dtype == np.float16 and magnitude > 1e4:
        magnitude = 2.0**15
    k = np.full((1, 77, 1, 8), np.float32(2.0) ** np.floor(np.log2(magnitude) / 2), np.float32).astype(dtype)
    q = np.full((1, 5, 1, 8), np.float32(2.0) ** np.floor(np.log2(magnitude) / 2), np.float32).astype(dtype)
    v = np.random.default_rng(0).integers(-4, 5, (1, 77, 1, 8)).astype(dtype)
    got = gradients(q, k, v, random(1, 5, 1, 8, dtype=dtype), isa, softmax_scale=1.0)
    mean = v[0, :, 0].astype(np.float64).mean(axis=0)
    rounding = {np.dtype(np.float32): 2.0**-20, np.dtype(np.float16): 2.0**-10}.get(np.dtype(dtype), 2.0**-7)
    assert np.abs(got["o"][0, :, 0].astype(np.float64) - mean).max() <= 4 * rounding
    assert all(np.isfinite(got[name].astype(np.float64)).all() for name in ("dq", "dk", "dv"))


@ISAS
@DTYPES
def test_zero_in_zero_out(isa: str, dtype: np.dtype) -> None:
    q, k, v, dout = (random(1, n, 2, 24, seed=i, dtype=dtype) for i, n in enumerate((50, 90, 90, 50)))
    got = gradients(q, k, v, np.zeros_like(dout), isa, causal=True)
    assert not got["dq"].any()
    assert not got["dk"].any()
    assert not got["dv"].any()
    got = gradients(q, k, np.zeros_like(v), dout, isa, causal=True)
    assert not got["o"].any()
    assert not got["dq"].any()
    assert not got["dk"].any()
    assert got["dv"].any()


@ISAS
def test_every_key_counts_once(isa: str) -> None:
    """Long rows, lengths next to powers of two: the count is exact: no key is dropped or counted twice."""
    for sk in (1023, 1024, 1025, 2049, 4097):
        q, k, v = np.zeros((1, 2, 1, 8), np.float32), random(1, sk, 1, 8), np.ones((1, sk, 1, 8), np.float32)
        _, lse = attention(q, k, v, isa)
        np.testing.assert_array_equal(np.rint(np.exp(lse.astype(np.float64))), sk)


@ISAS
def test_identity(isa: str) -> None:
    """A window of (0, 0) in a square: every query sees its own key alone, so o is v, bit for bit; dv is dout up to
    the rounding of lse."""
    for dtype in (np.float32, np.float16, BFLOAT16, np.float64):
        q, k, v, dout = (random(2, 131, 2, 40, seed=i, dtype=dtype) for i in range(4))
        got = gradients(q, k, v, dout, isa, window_size=(0, 0))
        np.testing.assert_array_equal(got["o"].view("u1"), v.view("u1"))
        rounding = {np.dtype(np.float16): 2.0**-10, BFLOAT16: 2.0**-7}.get(np.dtype(dtype), 2.0**-20)
        np.testing.assert_allclose(got["dv"].astype(np.float64), dout.astype(np.float64), rtol=rounding, atol=2.0**-24)
