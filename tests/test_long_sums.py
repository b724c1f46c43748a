"""Sums over a million keys or queries: the rounding errors of single precision do not add up.

All terms of a sum are equal or nearly equal, so that the rounding errors of adding one after the other have the same sign.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from harness import cpu_kernels, random
from long_sums import LONG, SCORES, check, expected, problem, ulps, values

import libflash

DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}


@pytest.mark.parametrize("isa", cpu_kernels())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scores", SCORES)
def test_forward(isa: str, dtype: str, scores: str) -> None:
    q, k = problem(scores, DTYPES[dtype], 3, LONG)
    v = values(LONG, DTYPES[dtype])
    out, lse = libflash.attention(q, k, v, softmax_scale=1.0, num_splits=1, return_lse=True, kernel=f"forward_cpu_{isa}")
    check(out, lse, expected(scores, DTYPES[dtype], 3, LONG))


@pytest.mark.parametrize("splits", [0, 1])
@pytest.mark.parametrize("isa", cpu_kernels())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("rows", [2, 20], ids=["few rows", "many rows"])
def test_decode(isa: str, dtype: str, scores: str, splits: int, rows: int) -> None:
    keys = LONG if rows == 2 and isa != "scalar" else LONG >> 3
    q, k = problem(scores, DTYPES[dtype], rows, keys)
    v = values(keys, DTYPES[dtype])
    out, lse = libflash.decode(
        q, k, v, softmax_scale=1.0, causal=False, num_splits=splits, return_lse=True, kernel=f"decode_cpu_{isa}"
    )
    check(out, lse, expected(scores, DTYPES[dtype], rows, keys))


@pytest.mark.parametrize("isa", [isa for isa in cpu_kernels() if isa != "scalar"])
@pytest.mark.parametrize("keys", [4095, 4096, 4097, 8192, 10_000])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window_size": (4200, 10)}, {"softcap": 3.0, "learnable_sink": True}], ids=str
)
def test_where_sums_are_cut(isa: str, keys: int, options: dict[str, Any]) -> None:
    """The scalar kernel adds in double precision, without partial sums."""
    given = tuple(options.items())
    for one, other in zip(few_heads(isa, keys, given), by_scalar(keys, given), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


def few_heads(isa: str, keys: int, given: tuple[tuple[str, Any], ...]) -> tuple[np.ndarray, np.ndarray]:
    q, k, v, options = random(1, 70, 2, 8), random(1, keys, 2, 8, seed=1), random(1, keys, 2, 5, seed=2), dict(given)
    if "learnable_sink" in options:
        options["learnable_sink"] = random(2, seed=3)
    return libflash.attention(q, k, v, return_lse=True, kernel=f"forward_cpu_{isa}", **options)


@lru_cache(maxsize=4)
def by_scalar(keys: int, given: tuple[tuple[str, Any], ...]) -> tuple[np.ndarray, np.ndarray]:
    return few_heads("scalar", keys, given)


@pytest.mark.parametrize("isa", cpu_kernels())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 4])
def test_key_and_value_gradients(isa: str, dtype: str, heads: int) -> None:
    """Two keys that a million query rows see, all with the same probability."""
    rows, step = LONG // heads, 2.0**-8
    q, k = np.zeros((1, rows, heads, 8), DTYPES[dtype]), np.zeros((1, 2, 1, 8), DTYPES[dtype])
    v, dout = np.zeros((1, 2, 1, 1), DTYPES[dtype]), np.full((1, rows, heads, 1), step, DTYPES[dtype])
    q[..., 0], k[0, 0, 0, 0], v[0, 0] = 1, 1, 1
    out, lse = libflash.attention(q, k, v, softmax_scale=1.0, return_lse=True)
    _, dk, dv = libflash.attention_backward(dout, q, k, v, out, lse, softmax_scale=1.0, kernel=f"backward_cpu_{isa}")
    p = np.exp(np.array([1.0, 0.0]) - np.float64(lse[0, 0, 0]))
    ds = p * (step * np.array([1.0, 0.0]) - step * np.float64(out[0, 0, 0, 0]))
    most = 1.01 if dtype != "float32" else 40
    assert ulps(dv[0, :, 0, 0], LONG * step * p) <= most
    assert ulps(dk[0, :, 0, 0], LONG * ds) <= most
