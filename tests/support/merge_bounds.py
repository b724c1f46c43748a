"""Exact results and limits of merge, for `tolerance.check`, as o and lse.

    wr  = |w| (2 e_x + 2^-22 (|lse_n| + |lse|)): error of a part's share, two exponentials and their difference
    bO  = sum_n (wr + a(N) w)|o_n|,  vO = w (O^2) + (2^-20 sum_n w|o_n|)^2
    bLSE = 2^-21 (1 + |LSE|) + max_n 2^-22 |lse_n|

for N parts. The parts are inputs; their errors do not count.
"""

from __future__ import annotations

import numpy as np
from error_bounds import Model
from reference import NEG_INF
from reference_decode import merge, merge_weights, weighted
from rounding import DTYPES
from tolerance import Expected, tensor


@np.errstate(all="ignore")
def expect_merge(outs: np.ndarray, lses: np.ndarray, dtype: np.dtype | None = None) -> Expected:
    """Parts stacked on axis 0; dtype is that of the merged o, by default the parts' own."""
    outs, lses = np.asarray(outs), np.asarray(lses)
    model = Model(np.dtype(DTYPES["fp64"] if lses.dtype == np.float64 else DTYPES["fp32"]))
    weights, _ = merge_weights(lses)
    exact, exact_lse = merge(outs, lses)
    o, lse = tensor(exact, dtype or outs.dtype), tensor(exact_lse, lses.dtype)
    finite = np.where(lses == NEG_INF, 0.0, np.abs(lses.astype(np.float64)))
    size = np.where(exact_lse == NEG_INF, 0.0, np.abs(exact_lse))
    share = 2 * model.exp_error + model.unit * (finite + size) + model.sum_error(len(outs))
    rows, shares = (np.swapaxes(x, -1, -2)[..., None] for x in (weights, share))
    parts = np.abs(outs.astype(np.float64))
    o.limit = weighted(rows, shares * parts).sum(axis=0)
    noise = model.noise + np.swapaxes(model.unit / 2 * (finite + size), -1, -2)[..., None]
    o.variance = weighted(rows, noise * parts).sum(axis=0) ** 2
    lse.limit = np.where(exact_lse == NEG_INF, 0.0, 2 * model.unit * (1 + size) + model.unit * finite.max(axis=0))
    o.zero = np.swapaxes(exact_lse == NEG_INF, -1, -2)
    return Expected({"o": o, "lse": lse}, {}, False, False, False, int((lses > NEG_INF).sum()))
