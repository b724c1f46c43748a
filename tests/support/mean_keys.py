"""Second derivatives where keys, values and their tangents have the mean 2, and how exact they must be in 16 bits.

Errors of delta and tdelta, which are the same for all keys of a row, then multiply large sums. The rule is that of
conformance/tolerance.py for dq (T2): the root mean square of the errors of tdq is at most twice what is predicted from
roundings of P, P (ts - mu), dS, tdS and of the result. delta and tdelta come from sums that were not rounded: no rounding of out
and of its tangent is counted. With the names of conformance/reference_tangent.py, w the mean square of the relative error of a
rounding, squares by element, and P' = P (ts - mu):

    v_o   = w P^2 v^2                           v_to  = w (P'^2 v^2 + P^2 tv^2)
    v_D   = rowsum(dout^2 v_o)                  v_tD  = rowsum(tdout^2 v_o + dout^2 v_to)
    v_tdq = w tdq^2 + scale^2 (w (tdS^2 k^2 + dS^2 tk^2) + v_D (P' k + P tk)^2 + v_tD (P k)^2)
"""

from __future__ import annotations

import dataclasses

import numpy as np
from rounding import DTYPES, ROUNDING, stored

SEQLEN, HEADS, HEAD_DIM, MEAN = 256, 2, 64, 2.0
SHAPE = (1, SEQLEN, HEADS, HEAD_DIM)
Array = np.ndarray


@dataclasses.dataclass(frozen=True)
class MeanKeys:
    """q, k, v, dout and their tangents, (1, seqlen, heads, head_dim), in float64 with values that `dtype` has."""

    dtype: str
    inputs: tuple[Array, ...]  # q, k, v, dout
    direction: tuple[Array, ...]

    @classmethod
    def of(cls, dtype: str) -> MeanKeys:
        rng = np.random.default_rng(7)

        def random(mean: float) -> Array:
            return stored(rng.standard_normal(SHAPE) + mean, DTYPES[dtype]).astype(np.float64)

        means = (0.0, MEAN, MEAN, 0.0)
        return cls(dtype, tuple(map(random, means)), tuple(map(random, means)))

    def ratio(self, tdq: Array, *, moves_dout: bool) -> float:
        """The root mean square of the errors of tdq, as a part of what is predicted."""
        tdout = self.direction[3] if moves_dout else np.zeros(SHAPE)
        square_sum = variance = 0.0
        for head in range(HEADS):
            inputs = (x[0, :, head] for x in (*self.inputs, *self.direction[:3], tdout))
            exact, predicted = of_head(*inputs, w=ROUNDING[DTYPES[self.dtype]].mean_square)
            square_sum += ((tdq[0, :, head] - exact) ** 2).sum()
            variance += predicted.sum()
        return float(np.sqrt(square_sum / variance))


def of_head(
    q: Array, k: Array, v: Array, dout: Array, tq: Array, tk: Array, tv: Array, tdout: Array, *, w: float
) -> tuple[Array, Array]:
    """tdq of one head and the predicted mean squares of its errors."""
    scale = HEAD_DIM**-0.5
    p = np.exp(scale * (q @ k.T))
    p /= p.sum(1, keepdims=True)
    ts = scale * (tq @ k.T + q @ tk.T)
    tp = p * (ts - (p * ts).sum(1, keepdims=True))
    out, tout = p @ v, tp @ v + p @ tv
    delta, tdelta = (dout * out).sum(1, keepdims=True), (tdout * out + dout * tout).sum(1, keepdims=True)
    excess = dout @ v.T - delta
    ds, tds = p * excess, tp * excess + p * (tdout @ v.T + dout @ tv.T - tdelta)
    tdq = scale * (tds @ k + ds @ tk)

    v_o, v_to = w * p**2 @ v**2, w * (tp**2 @ v**2 + p**2 @ tv**2)
    v_delta = (dout**2 * v_o).sum(1, keepdims=True)
    v_tdelta = (tdout**2 * v_o + dout**2 * v_to).sum(1, keepdims=True)
    of_rows = v_delta * (tp @ k + p @ tk) ** 2 + v_tdelta * (p @ k) ** 2
    return tdq, w * tdq**2 + scale**2 * (w * (tds**2 @ k**2 + ds**2 @ tk**2) + of_rows)
