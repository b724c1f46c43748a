"""Judgements that the examples share: of curves of the loss, and of a whole run."""

from __future__ import annotations

import statistics
import sys


def root_mean_square(a: list[float], b: list[float]) -> float:
    """Of the difference of two curves."""
    return statistics.fmean((x - y) ** 2 for x, y in zip(a, b, strict=True)) ** 0.5


def falls(losses: list[float]) -> bool:
    """Whether the last quarter is below the first. With NaN it is not."""
    quarter = max(1, len(losses) // 4)
    return statistics.fmean(losses[-quarter:]) < statistics.fmean(losses[:quarter])


def exit_code(wrong: list[str]) -> int:
    """Prints what is wrong, and the verdict."""
    for complaint in wrong:
        print(complaint, file=sys.stderr)
    print("good" if not wrong else "WRONG")
    return 1 if wrong else 0
