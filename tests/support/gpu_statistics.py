"""Forward with statistics of rows on a GPU. `device` is for tests of these helpers, without a GPU."""

from __future__ import annotations

import numpy as np
import torch
from gpu_case import Problem, full_of_nan, problem, to_numpy, wide_type
from statistics_case import StatisticsCase

import libflash

Tensors = dict[str, torch.Tensor]


def run(p: Problem, kernel: str | None = None, *, heads: bool = False, entropy: bool = True) -> Tensors:
    """o, lse, max_logit and entropy; NaN in rows that belong to no sequence."""
    *batch, rows, count, _ = p.q.shape
    number = wide_type(p.q)
    made = {"o": full_of_nan((*p.q.shape[:-1], p.v.shape[-1]), p.q), "lse": full_of_nan((*batch, count, rows), p.q, number)}
    made["max_logit"] = full_of_nan((count,) if heads else (*batch, count, rows), p.q, number)
    if entropy:
        made["entropy"] = full_of_nan((*batch, count, rows), p.q, number)
    given = {name: made[name] for name in ("max_logit", "entropy") if name in made}
    libflash.attention(p.q, p.k, p.v, out=made["o"], lse=made["lse"], return_lse=True, kernel=kernel, **given, **p.options)
    return made


def run_statistics(case: StatisticsCase, kernel: str | None, device: str = "cuda") -> dict[str, np.ndarray]:
    """The results that `case.check` needs."""
    p = problem(case.case, device)
    return {name: to_numpy(x, p.inputs.q.dtype) for name, x in run(p, kernel).items()}
