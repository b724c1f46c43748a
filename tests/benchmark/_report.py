"""Shared by the benchmark programs: names of cells, selection of cells, summaries."""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Callable

from _cells import Cell


def mask_name(causal: bool) -> str:
    return "causal" if causal else "full"


def name_of(cell: dict) -> str:
    return (
        f"{cell['direction']} {cell['dtype']} d={cell['head_dim']} S={cell['seqlen']} {mask_name(cell['causal'])} "
        f"B={cell['batch']} H={cell['heads']}"
    )


def chosen(cells: list[Cell], only: str | None) -> list[Cell]:
    """The cells whose names contain every word of `only`, separated by commas; "full" is the opposite of "causal"."""
    words = only.split(",") if only else []
    found = [c for c in cells if all(word in name_of(dataclasses.asdict(c)).split() for word in words)]
    if not found:
        sys.exit(f"no cell has all of: {only}; a cell is, for one: {name_of(dataclasses.asdict(cells[0]))}")
    return found


def direction_and_dtype(cell: dict) -> list[str]:
    return [f"{cell['direction']} {cell['dtype']}"]


def summary(
    results: list[dict],
    ratio: Callable[[dict], float] = lambda cell: cell["ratio"],
    kinds: Callable[[dict], list[str]] = direction_and_dtype,
) -> dict[str, object]:
    """Geometric means of the ratios, together and by kind, and the worst cell."""
    groups = {"all": results}
    for cell in results:
        for kind in kinds(cell):
            groups.setdefault(kind, []).append(cell)
    worst = min(results, key=ratio)
    return {
        "geometric_mean": {name: round(statistics.geometric_mean(map(ratio, group)), 3) for name, group in groups.items()},
        "worst": {"ratio": ratio(worst), "cell": name_of(worst)},
    }


def reason(failure: BaseException) -> str:
    """Why a call was left out: the beginning of the first line."""
    return f"{type(failure).__name__}: {next(iter(str(failure).splitlines()), '')}"[:160]
