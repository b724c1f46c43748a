"""Standard attention in NumPy, with all scores in memory, and the float64 reference for both methods."""

from __future__ import annotations

import numpy as np


def scores_bytes(seqlen: int, heads: int) -> int:
    """Memory of the matrix of scores in float32, which standard attention needs."""
    return heads * seqlen * seqlen * 4


def standard_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, softmax_scale: float) -> np.ndarray:
    """Causal attention over (1, seqlen, heads, head_dim) as in a textbook, with as little memory as NumPy allows.

    NumPy's BLAS computes the two matrix products. The softmax is in place, so there is one matrix of scores.
    """
    q, k, v = (x[0].transpose(1, 0, 2) for x in (q, k, v))
    scores = np.matmul(q * np.float32(softmax_scale), k.transpose(0, 2, 1))
    for i in range(scores.shape[1]):
        scores[:, i, i + 1 :] = -np.inf
    scores -= scores.max(axis=2, keepdims=True)
    np.exp(scores, out=scores)
    row_sum = scores.sum(axis=2, keepdims=True)
    out = np.matmul(scores, v)
    out /= row_sum
    return np.ascontiguousarray(out.transpose(1, 0, 2))[None]


def exact_rows(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, softmax_scale: float, positions: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(o, bound) of some rows, in float64: the result of causal attention, and the largest error of float32 arithmetic.

    q holds the rows at `positions` (n, heads, head_dim); k and v hold the whole text (seqlen, heads, head_dim). The bound of
    an element is the sum of the rounding errors of the products and their sums, of the exponential, and of the result.
    """
    o = np.empty((*q.shape[:2], v.shape[-1]))
    bound = np.empty_like(o)
    hidden = np.arange(len(k)) > positions[:, None]
    for head in range(q.shape[1]):
        q_h, k_h, v_h = (x[:, head].astype(np.float64) for x in (q, k, v))
        s = np.where(hidden, -np.inf, softmax_scale * (q_h @ k_h.T))
        row_max = s.max(axis=1, keepdims=True)
        p = np.exp(s - row_max)
        p /= p.sum(axis=1, keepdims=True)
        o[:, head] = p @ v_h
        score_error = accumulation(q_h.shape[1]) * softmax_scale * (np.abs(q_h) @ np.abs(k_h).T)
        score_error += 2**-22 * (np.abs(np.where(hidden, 0.0, s)) + np.abs(row_max)) + 2**-21
        score_error += np.where(hidden, 0.0, score_error).max(axis=1, keepdims=True)
        weight_error = p * (2**-24 + accumulation(len(k)) + score_error)
        bound[:, head] = 2**-24 * np.abs(o[:, head]) + weight_error @ np.abs(v_h)
    return o, bound


def accumulation(terms: int) -> float:
    """Relative error of a float32 sum of this many products."""
    return float(2**-21 * np.sqrt(terms) + terms * 2**-28)
