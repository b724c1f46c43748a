"""Sums over a million keys or queries: the rounding errors of single precision do not add up.

All terms of a sum are equal or nearly equal, so that the rounding errors of adding one after the other have the same sign.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from harness import cpu_kernels, random

import libflash

LONG = 1 << 20
DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}
SCORES = ("equal", "one larger", "random")


def problem(scores: str, dtype: np.dtype[Any], sq: int, keys: int) -> tuple[np.ndarray, np.ndarray]:
    """q and k whose first score is larger than all others, or equal to them, or whose scores are random."""
    if scores == "random":
        return random(1, sq, 1, 8, dtype=dtype), random(1, keys, 1, 8, seed=1, dtype=dtype)
    q, k = np.zeros((1, sq, 1, 8), dtype), np.zeros((1, keys, 1, 8), dtype)
    q[..., 0] = 1
    k[:, 0, :, 0] = scores == "one larger"
    return q, k


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """out and lse of each row, in double precision, with softmax_scale 1."""
    s = np.einsum("qd,kd->qk", q[0, :, 0].astype(np.float64), k[0, :, 0].astype(np.float64))
    p = np.exp(s - s.max(axis=1, keepdims=True))
    lse = s.max(axis=1) + np.log(p.sum(axis=1))
    return (p @ v[0, :, 0].astype(np.float64)) / p.sum(axis=1, keepdims=True), lse


def ulps(got: np.ndarray, expected: np.ndarray) -> float:
    """Largest distance, in units of the last place of the type of `got`."""
    wide = got.astype(np.float64)
    unit = ml_dtypes.finfo(got.dtype).eps * 2.0 ** np.floor(np.log2(np.abs(expected)))
    return float((np.abs(wide - expected) / unit).max())


def check(out: np.ndarray, lse: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
    expected, expected_lse = exact(q, k, v)
    ones = out[0, :, 0, 0].astype(np.float64)
    assert np.abs(ones - 1).max() <= ml_dtypes.finfo(out.dtype).eps, f"out of values 1: {ones}"
    most = 1.01 if out.dtype != np.float32 else 60
    assert ulps(out[0, :, 0], expected) <= most
    assert np.abs(lse[0, 0] - expected_lse).max() <= 8e-6


def values(keys: int, dtype: np.dtype[Any]) -> np.ndarray:
    """The first channel 1, the others between 0.5 and 1.5."""
    v = (random(1, keys, 1, 3, seed=2) % 1 + 0.5).astype(dtype)
    v[..., 0] = 1
    return v


@pytest.mark.parametrize("isa", cpu_kernels())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scores", SCORES)
def test_forward(isa: str, dtype: str, scores: str) -> None:
    q, k = problem(scores, DTYPES[dtype], 3, LONG)
    v = values(LONG, DTYPES[dtype])
    out, lse = libflash.attention(q, k, v, softmax_scale=1.0, num_splits=1, return_lse=True, kernel=f"forward_cpu_{isa}")
    check(out, lse, q, k, v)


@pytest.mark.parametrize("isa", cpu_kernels())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("splits", [0, 1])
@pytest.mark.parametrize("rows", [2, 20], ids=["few rows", "many rows"])
def test_decode(isa: str, dtype: str, scores: str, splits: int, rows: int) -> None:
    keys = LONG if rows == 2 and isa != "scalar" else LONG >> 3
    q, k = problem(scores, DTYPES[dtype], rows, keys)
    v = values(keys, DTYPES[dtype])
    out, lse = libflash.decode(
        q, k, v, softmax_scale=1.0, causal=False, num_splits=splits, return_lse=True, kernel=f"decode_cpu_{isa}"
    )
    check(out, lse, q, k, v)


@pytest.mark.parametrize("isa", [isa for isa in cpu_kernels() if isa != "scalar"])
@pytest.mark.parametrize("keys", [4095, 4096, 4097, 8192, 10_000])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window_size": (4200, 10)}, {"softcap": 3.0, "learnable_sink": True}], ids=str
)
def test_where_sums_are_cut(isa: str, keys: int, options: dict[str, Any]) -> None:
    """The scalar kernel adds in double precision, without partial sums."""
    q, k, v = random(1, 70, 2, 8), random(1, keys, 2, 8, seed=1), random(1, keys, 2, 5, seed=2)
    if "learnable_sink" in options:
        options = {**options, "learnable_sink": random(2, seed=3)}
    got = libflash.attention(q, k, v, return_lse=True, kernel=f"forward_cpu_{isa}", **options)
    expected = libflash.attention(q, k, v, return_lse=True, kernel="forward_cpu_scalar", **options)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


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
