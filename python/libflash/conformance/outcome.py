"""The outcome of one item."""

from __future__ import annotations

import dataclasses

from .tolerance import Report

GROUPS = (
    "accuracy",
    "rows without a key",
    "exact answers",
    "edge values",
    "NaN and infinity",
    "tangents",
    "decode",
    "same bits again",
    "bad input",
)
HOLDS, FAILS, NOT_OFFERED, NOT_RUN = "holds", "fails", "not offered", "not run"
LOST = "after it every call on the GPU fails"  # a finding after which no other item is run


@dataclasses.dataclass
class Outcome:
    group: str
    name: str
    status: str = HOLDS
    findings: list[str] = dataclasses.field(default_factory=list)
    lacks: str = ""  # what the target does not offer
    reports: dict[str, Report] = dataclasses.field(default_factory=dict)

    @property
    def worst(self) -> float:
        """The largest ratio of an error to its limit."""
        return max((worst_ratio(report) for report in self.reports.values()), default=0.0)

    @property
    def vacuous(self) -> bool:
        return any(report.vacuous for report in self.reports.values())


def worst_ratio(report: Report) -> float:
    return max(report.t1, report.t2_row, report.t2, report.t3)
