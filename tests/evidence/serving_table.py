"""The table of tests/benchmark/gpu_serving.py: calls of an inference engine's step."""

from __future__ import annotations

import statistics

KINDS = {
    "chunk": "a prefill chunk over pages",
    "mixed": "chunks beside decodes",
    "lengths": "decodes of unequal lengths",
    "tree": "trees of speculative decoding",
    "codes": "8-bit caches",
    "mla": "MLA",
    "invariant": "`invariant=True`",
    "append": "decodes that append",
    "prefix": "a hint of shared keys",
}


def serving_table(data: dict) -> str:
    """A line for each cell; nothing if they were not measured."""
    cells = [cell for cell in data.get("serving", {}).get("cells", []) if "figure" in cell]
    if not cells:
        return ""
    setting = data["serving"]["setting"]
    lines = [
        f"Calls of an inference engine's step on {data['gpu']}, bf16, 32 query heads and 8 key heads of 128 channels, lengths "
        "and block table on the device (`tests/benchmark/gpu_serving.py`): microseconds of the call and of what it is compared "
        "with in the same run, and the figure that has a target. Device time, inputs rotated beyond the L2 cache, medians of "
        f"{setting['rounds']} rounds, {data['stages']['serving']['date']}.",
        "",
        "| | case | microseconds | figure | what it is, and the target |",
        "|---|---|---|---:|---|",
    ]
    for cell in cells:
        us = ", ".join(f"{name} {time}" for name, time in cell["us"].items())
        lines.append("| " + " | ".join([KINDS[cell["kind"]], cell["name"], us, f"{cell['figure']:.2f}", cell["target"]]) + " |")
    return "\n".join([*lines, "", *means(cells)])


def means(cells: list[dict]) -> list[str]:
    found = {kind: [cell["figure"] for cell in cells if cell["kind"] == kind] for kind in KINDS}
    return [
        f"{said}: geometric mean {statistics.geometric_mean(figures):.2f}, {min(figures):.2f} to {max(figures):.2f}.  "
        for kind, said in KINDS.items()
        if len(figures := found[kind]) > 1 and min(figures) > 0
    ]
