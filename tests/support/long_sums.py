"""Problems whose sums have a million terms, all equal or nearly equal, so that their rounding errors have the same sign."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
from harness import random

LONG = 1 << 20
SCORES = ("equal", "one larger", "random")


def problem(scores: str, dtype: np.dtype[Any], sq: int, keys: int) -> tuple[np.ndarray, np.ndarray]:
    """q and k whose first score is larger than all others, or equal to them, or whose scores are random."""
    if scores == "random":
        return random(1, sq, 1, 8, dtype=dtype), random(1, keys, 1, 8, seed=1, dtype=dtype)
    q, k = np.zeros((1, sq, 1, 8), dtype), np.zeros((1, keys, 1, 8), dtype)
    q[..., 0] = 1
    k[:, 0, :, 0] = scores == "one larger"
    return q, k


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray, visible: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """out and lse of each row, in double precision, with softmax_scale 1. `visible`: how many keys each row sees, else all."""
    s = np.einsum("qd,kd->qk", q[0, :, 0].astype(np.float64), k[0, :, 0].astype(np.float64))
    if visible is not None:
        s[np.arange(s.shape[1]) >= visible[:, None]] = -np.inf
    p = np.exp(s - s.max(axis=1, keepdims=True))
    lse = s.max(axis=1) + np.log(p.sum(axis=1))
    return (p @ v[0, :, 0].astype(np.float64)) / p.sum(axis=1, keepdims=True), lse


@lru_cache(maxsize=32)
def expected(scores: str, dtype: np.dtype[Any], sq: int, keys: int, channels: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """exact() of problem() and values(), the same read-only arrays for every kernel and split."""
    out, lse = exact(*problem(scores, dtype, sq, keys), values(keys, dtype, channels))
    out.flags.writeable = lse.flags.writeable = False
    return out, lse


def ulps(got: np.ndarray, expected: np.ndarray) -> float:
    """Largest distance, in units of the last place of the type of `got`."""
    wide = got.astype(np.float64)
    unit = ml_dtypes.finfo(got.dtype).eps * 2.0 ** np.floor(np.log2(np.abs(expected)))
    return float((np.abs(wide - expected) / unit).max())


def check(out: np.ndarray, lse: np.ndarray, wanted: tuple[np.ndarray, np.ndarray]) -> None:
    ones = out[0, :, 0, 0].astype(np.float64)
    assert np.abs(ones - 1).max() <= ml_dtypes.finfo(out.dtype).eps, f"out of values 1: {ones}"
    most = 1.01 if out.dtype != np.float32 else 60
    assert ulps(out[0, :, 0], wanted[0]) <= most
    assert np.abs(lse[0, 0] - wanted[1]).max() <= 8e-6


def values(keys: int, dtype: np.dtype[Any], channels: int = 3) -> np.ndarray:
    """The first channel 1, the others between 0.5 and 1.5: a new array."""
    return _values(keys, dtype, channels).copy()


@lru_cache(maxsize=8)
def _values(keys: int, dtype: np.dtype[Any], channels: int) -> np.ndarray:
    v = (random(1, keys, 1, channels, seed=2) % 1 + 0.5).astype(dtype)
    v[..., 0] = 1
    return v
