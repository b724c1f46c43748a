"""The chart: time, memory and correct guesses against the number of words."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

from libflash.demo.measure import Measurement
from libflash.demo.model import HEADS
from libflash.demo.standard import scores_bytes
from libflash.demo.table import Comparison, bytes_text, measurements, time_text

STANDARD, LIBFLASH, INK, GRID = "#c2542d", "#1f5fa8", "#222222", "#dddddd"
NAMES = {"standard": "standard attention (NumPy)", "libflash": "libflash"}
LABEL = {"textcoords": "offset points", "fontsize": 9}


def save(comparisons: list[Comparison], distance: int | None, title: str, path: pathlib.Path) -> None:
    """Draw and write a PNG. ModuleNotFoundError without matplotlib, OSError where the file cannot be written."""
    from matplotlib.figure import Figure  # only this needs it; no pyplot: no window system, no global state

    figure = Figure(figsize=(12, 4.2), dpi=130, layout="constrained")
    figure.suptitle(title, fontsize=12, color=INK)
    time_axes, memory_axes, guess_axes = axes = figure.subplots(1, 3)
    growth(time_axes, comparisons, lambda m: m.seconds, time_text)
    growth(memory_axes, comparisons, lambda m: m.memory_bytes, bytes_text)
    not_run(memory_axes, comparisons)
    guesses(guess_axes, comparisons, distance)
    for panel, name in zip(axes, ("Time of one call", "Memory of one call", "Next words guessed right"), strict=True):
        finish(panel, comparisons, name)
    figure.savefig(path, format="png")


def growth(axes: Any, comparisons: list[Comparison], value: Callable[[Measurement], float], text: Callable[[float], str]) -> None:
    """One line for each method on logarithmic axes; its last point is labelled with its value."""
    for method, color, offset, side in (("standard", STANDARD, (-8, 4), "right"), ("libflash", LIBFLASH, (7, -3), "left")):
        points = [(m.seqlen, value(m)) for m in measurements(comparisons, method) if value(m) > 0]
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color=color, label=NAMES[method], linewidth=2, markersize=5)
            axes.annotate(text(points[-1][1]), points[-1], xytext=offset, ha=side, color=color, **LABEL)
    axes.set_yscale("log")
    axes.set_xlim(comparisons[0].seqlen / 1.4, comparisons[-1].seqlen * 3.5)  # space for the label
    axes.yaxis.set_major_formatter(lambda y, _: text(y).replace(".00", "").replace(".0", ""))


def not_run(axes: Any, comparisons: list[Comparison]) -> None:
    """Where standard attention did not run: a hollow point at the memory of its scores alone."""
    missing = [
        (comparison.seqlen, scores_bytes(comparison.seqlen, HEADS))
        for comparison in comparisons
        if isinstance(comparison.standard, str)
    ]
    if not missing:
        return
    last = [(m.seqlen, m.memory_bytes) for m in measurements(comparisons, "standard")[-1:]]
    axes.plot(*zip(*last, *missing, strict=True), ":", color=STANDARD, linewidth=1.5)
    axes.plot(*zip(*missing, strict=True), "o", color=STANDARD, markerfacecolor="white", label="not run: scores alone")
    axes.annotate(bytes_text(missing[-1][1]), missing[-1], xytext=(7, -3), ha="left", color=STANDARD, **LABEL)


def guesses(axes: Any, comparisons: list[Comparison], distance: int | None) -> None:
    for method, color, width in (("libflash", LIBFLASH, 3.0), ("standard", STANDARD, 1.2)):
        points = [(m.seqlen, 100 * m.guessed) for m in measurements(comparisons, method)]
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color=color, label=NAMES[method], linewidth=width, markersize=4)
            axes.annotate(f"{points[-1][1]:.0f} %", points[-1], xytext=(-4, 7), ha="right", color=color, **LABEL)
    if distance is not None and comparisons[0].seqlen < distance < comparisons[-1].seqlen:
        axes.axvline(distance, color=INK, linewidth=1, linestyle=":")
        note = f"the same passage,\n{distance:,} words earlier"
        axes.annotate(note, (distance, 55), xytext=(-6, 0), ha="right", va="center", color=INK, **LABEL)
    axes.set_ylim(0, 100)
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:.0f} %")


def finish(axes: Any, comparisons: list[Comparison], title: str) -> None:
    axes.set_title(title, fontsize=10, color=INK, loc="left")
    axes.set_xscale("log", base=2)
    axes.set_xticks([comparison.seqlen for comparison in comparisons])
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:.0f}" if x % 1024 else f"{x / 1024:.0f}k")
    axes.minorticks_off()
    axes.set_xlabel("words read", fontsize=9)
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, colors=INK, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8, loc="upper left")
