"""Errors of the statistics of rows that forward computes, against float64."""

from __future__ import annotations

import dataclasses

import numpy as np
from case import Case
from convert import owned
from reference_statistics import statistics
from tolerance import Report


def check(case: Case, made: dict[str, np.ndarray], *, heads: bool = False) -> dict[str, Report]:
    """The errors of max_logit and entropy, as parts of their limits. `heads`: max_logit is one number per head."""
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
    """A case of forward that is checked together with its statistics."""

    case: Case

    def __str__(self) -> str:
        return f"{self.case}, statistics"

    def check(self, *, two_times: bool = False, **result: np.ndarray) -> dict[str, Report]:
        reports = self.case.check(o=result["o"], lse=result["lse"], two_times=two_times)
        return reports | check(self.case, result)
