"""The summary of the outcomes of a run: counts by group, errors by tensor, failures, what was not offered."""

from __future__ import annotations

from collections import Counter
from typing import Any

from .outcome import FAILS, GROUPS, HOLDS, NOT_OFFERED, NOT_RUN, Outcome, worst_ratio

RATIOS = ("t1", "t2_row", "t2", "t3")


def groups(outcomes: list[Outcome]) -> dict[str, dict[str, Any]]:
    """For each group the number of outcomes by status, of vacuous ones among those that hold, and the largest ratio."""
    found: dict[str, dict[str, Any]] = {}
    for name in GROUPS:
        members = [outcome for outcome in outcomes if outcome.group == name]
        counts = Counter(outcome.status for outcome in members)
        found[name] = {status: counts[status] for status in (HOLDS, FAILS, NOT_OFFERED, NOT_RUN)}
        found[name]["vacuous"] = sum(outcome.vacuous for outcome in members if outcome.status == HOLDS)
        found[name]["worst"] = number(max((outcome.worst for outcome in members), default=0.0))
    return {name: counts for name, counts in found.items() if any(counts.values())}


def tensors(outcomes: list[Outcome]) -> dict[str, dict[str, Any]]:
    """For each tensor the largest ratios, and how many problems were outside a limit."""
    found: dict[str, dict[str, Any]] = {}
    for outcome in outcomes:
        for name, report in outcome.reports.items():
            entry = found.setdefault(name, {"problems": 0, "outside": 0, **dict.fromkeys(RATIOS, 0.0)})
            entry["problems"] += 1
            entry["outside"] += worst_ratio(report) > 1
            for ratio in RATIOS:
                entry[ratio] = max(entry[ratio], getattr(report, ratio))
    return {name: {key: number(value) for key, value in entry.items()} for name, entry in found.items()}


def failures(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    bad = [outcome for outcome in outcomes if outcome.status == FAILS]
    bad.sort(key=lambda outcome: (GROUPS.index(outcome.group), -outcome.worst, outcome.name))
    return [
        {"group": outcome.group, "name": outcome.name, "worst": number(outcome.worst), "findings": outcome.findings}
        for outcome in bad
    ]


def not_offered(outcomes: list[Outcome]) -> dict[str, int]:
    """For each word that was not offered, the number of items that need it; an item counts for its first such word."""
    counts = Counter(outcome.lacks.split(", ")[0] for outcome in outcomes if outcome.status == NOT_OFFERED)
    return dict(counts.most_common())


def number(x: Any) -> Any:
    """Rounded as it is printed; an integer unchanged."""
    return float(f"{x:.3g}") if isinstance(x, float) else x
