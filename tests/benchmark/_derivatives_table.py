"""The table of derivatives on the CPU in RESULTS.md, from what cpu_derivatives.py --json wrote."""

from __future__ import annotations

NAME = "cpu-derivatives-table"
LIMITS = {"jvp": 3.1, "second": 3.2}  # of the geometric means
TITLES = {"jvp": "forward with its tangent / forward", "second": "both tangents / backward"}


def is_run(data: dict) -> bool:
    return LIMITS.keys() == data.get("summary", {}).keys()


def table(data: dict) -> str:
    """Markdown: how it was measured, a row for each cell, and what is wanted."""
    setting = data["setting"]
    head = [
        f"Times on {setting['cpu']} ({setting['isa']}, threads: {setting['threads']}) over those of forward and backward in the "
        f"same process; best processor times of {setting['rounds']} rounds in turn, {setting['date']}.",
        "",
        "| | " + " | ".join(TITLES[name] for name in LIMITS) + " |",
        "|---" + "|---:" * len(LIMITS) + "|",
    ]
    rows = [f"| {cell['cell']} | " + " | ".join(f"{cell['ratio'][name]:.2f}" for name in LIMITS) + " |" for cell in data["cells"]]
    means = ", ".join(f"{TITLES[name]} {mean:.2f} (at most {LIMITS[name]})" for name, mean in data["summary"].items())
    return "\n".join([*head, *rows, "", f"Geometric means: {means}."])
