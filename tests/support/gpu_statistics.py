"""Forward with statistics of rows on a GPU, and their errors against float64. `device` is for tests of these helpers."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from case import Case
from convert import owned
from gpu_case import Problem, full_of_nan, problem, to_numpy, wide_type
from reference_statistics import statistics
from tolerance import Report

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


def check(case: Case, made: dict[str, np.ndarray], *, heads: bool = False) -> dict[str, Report]:
    """The errors of max_logit and entropy, as parts of their limits. `heads`: max_logit is that of heads."""
    x = case.inputs()
    rows, largest, entropy = statistics(x.q, x.k, x.v, **x.options)
    scale = 1 + np.abs(rows[np.isfinite(rows)]).max(initial=0)
    limit = scale * (1e-12 if x.q.dtype == np.float64 else 3e-5)
    wanted = {"max_logit": largest if heads else rows, "entropy": entropy}
    return {name: compared(case, name, made[name], wanted[name], limit) for name in wanted if name in made}


def compared(case: Case, name: str, got: np.ndarray, wanted: np.ndarray, limit: float) -> Report:
    if wanted.ndim > 1:
        got, wanted = (owned(case, {"lse": y})["lse"] for y in (got, wanted))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=limit, err_msg=f"{case}: {name}")
    finite = np.isfinite(wanted)
    error, exact = got[finite] - wanted[finite], wanted[finite]
    return Report(t1=np.abs(error).max(initial=0) / limit, rms=float(np.sqrt((error**2).sum() / max((exact**2).sum(), 1e-300))))


@dataclasses.dataclass(frozen=True)
class StatisticsCase:
    """A case whose statistics are wanted, too."""

    case: Case

    def __str__(self) -> str:
        return f"{self.case}, statistics"

    def check(self, *, two_times: bool = False, **result: np.ndarray) -> dict[str, Report]:
        reports = self.case.check(o=result["o"], lse=result["lse"], two_times=two_times)
        return reports | check(self.case, result)
