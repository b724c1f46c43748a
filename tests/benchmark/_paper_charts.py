"""The paper benchmark's results as charts, like those of the papers: bars by length with TFLOP/s on them, lines on log axes."""

from __future__ import annotations

import io
import pathlib
from typing import Any

from _paper_report import DIRECTIONS, NAMES, tflops

COLORS = {
    "standard": "#b9b9b9",
    "torch_plain": "#7f7f7f",
    "flash1": "#f0b27a",
    "flash1_split": "#d3692b",
    "fa2": "#8fb8de",
    "libflash": "#1f5fa8",
}
INK, GRID = "#222222", "#dddddd"
LARGEST_BYTES = 60_000


def figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure  # imported here, because only charts need it; not pyplot, which has global state

    return Figure(figsize=(width, height), dpi=110, layout="constrained")


def save(made: Any, path: pathlib.Path) -> None:
    """Reduced to few colours, so that the file is small."""
    from PIL import Image  # a dependency of matplotlib

    drawn = io.BytesIO()
    made.savefig(drawn, format="png")
    Image.open(drawn).convert("RGB").quantize(48).save(path, optimize=True)
    size = path.stat().st_size
    if size > LARGEST_BYTES:
        raise ValueError(f"{path} has {size} bytes, more than {LARGEST_BYTES}")


def length(seqlen: float) -> str:
    return f"{seqlen:.0f}" if seqlen < 1024 else f"{seqlen / 1024:.0f}k"


def finish(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=10, color=INK, loc="left")
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, colors=INK, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def speed(cells: list[dict], direction: str) -> Any:
    """One panel per head_dim and mask, one group of bars per length."""
    found = tflops(cells, direction)
    kinds = list(dict.fromkeys(problem[:2] for problem in found))
    seqlens = sorted({problem[2] for problem in found})
    methods = [name for name in NAMES if any(name in values for values in found.values())]
    made = figure(13, 3.1 * -(-len(kinds) // 2))
    panels = made.subplots(-(-len(kinds) // 2), 2, squeeze=False).flat
    for axes, kind in zip(panels, kinds, strict=False):
        width = 0.86 / len(methods)
        for i, method in enumerate(methods):
            bars = [
                (at + (i - (len(methods) - 1) / 2) * width, found[*kind, seqlen][method])
                for at, seqlen in enumerate(seqlens)
                if method in found.get((*kind, seqlen), {})
            ]
            axes.bar(*zip(*bars, strict=True), width, color=COLORS[method], label=NAMES[method])
            for at, value in bars:
                axes.annotate(f"{value:.0f}", (at, value), xytext=(0, 1), textcoords="offset points", ha="center", fontsize=5)
        axes.set_xticks(range(len(seqlens)), [length(seqlen) for seqlen in seqlens])
        finish(axes, f"{direction}, head_dim {kind[0]}, {'causal' if kind[1] else 'not causal'}", "sequence length", "TFLOP/s")
    handles, labels = made.axes[0].get_legend_handles_labels()
    made.legend(handles, labels, loc="outside lower center", ncols=len(methods), frameon=False, fontsize=8)
    return made


def lines(axes: Any, points: dict[str, list[tuple[float, float]]], colors: dict[str, str]) -> None:
    """Earlier lines are wider, so that lines that coincide stay visible."""
    drawn = {name: values for name, values in points.items() if values}
    for i, (name, values) in enumerate(drawn.items()):
        width = 2 + 1.2 * (len(drawn) - 1 - i)
        axes.plot(*zip(*values, strict=True), "o-", color=colors[name], label=name, linewidth=width, markersize=width + 2)
    axes.legend(frameon=False, fontsize=8)


def by_length(axes: Any, seqlens: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(seqlens)
    axes.xaxis.set_major_formatter(lambda x, _: length(x))
    axes.minorticks_off()


def memory(entries: list[dict]) -> Any:
    made = figure(6, 3.6)
    axes = made.subplots()
    methods = [name for name in NAMES if any(name in entry["bytes"] for entry in entries)]
    points = {NAMES[m]: [(entry["seqlen"], entry["bytes"][m] / 1e6) for entry in entries if m in entry["bytes"]] for m in methods}
    lines(axes, points, {NAMES[m]: COLORS[m] for m in methods})
    by_length(axes, [entry["seqlen"] for entry in entries])
    finish(axes, "Memory of forward + backward", "sequence length", "MB")
    return made


def blocks(entries: list[dict]) -> Any:
    made = figure(6, 3.6)
    axes = made.subplots()
    colors = {"forward": COLORS["libflash"], "backward": COLORS["flash1_split"]}
    kept = [entry for entry in entries if entry["density"] is not None]
    points = {name: [(100 * entry["density"], entry["ms"]) for entry in kept if entry["direction"] == name] for name in colors}
    lines(axes, points, colors)
    for entry in entries:
        if entry["density"] is None:
            axes.axhline(entry["ms"], color=colors[entry["direction"]], linestyle=":", linewidth=1)
    axes.set_xlim(0, 102)
    axes.set_ylim(bottom=0)
    finish(axes, "Block-sparse (dotted: no mask)", "blocks kept, %", "ms")
    return made


def decode(entries: list[dict]) -> Any:
    made = figure(6, 3.6)
    axes = made.subplots()
    colors = {"unsplit": COLORS["flash1_split"], "split": COLORS["libflash"]}
    lines(axes, {name: [(entry["seqlen"], entry["us"][name]) for entry in entries] for name in colors}, colors)
    by_length(axes, [entry["seqlen"] for entry in entries])
    finish(axes, "Decode, batch 1", "keys in the cache", "us")
    return made


def draw(data: dict, folder: pathlib.Path) -> list[pathlib.Path]:
    """Draw a chart of each section that has results. Raises ModuleNotFoundError without matplotlib."""
    made = {}
    if data["speed"]:
        made |= {f"speed-{direction.replace(' + ', '-')}": speed(data["speed"], direction) for direction in DIRECTIONS}
    for name, drawn in {"memory": memory, "blocks": blocks, "decode": decode}.items():
        if data[name]:
            made[name] = drawn(data[name])
    folder.mkdir(parents=True, exist_ok=True)
    for name, chart in made.items():
        save(chart, folder / f"{name}.png")
    return [folder / f"{name}.png" for name in made]
