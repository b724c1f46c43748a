"""The report as text."""

from __future__ import annotations

import textwrap
from typing import Any

SHOWN = 5  # failures of a group
WIDTH = 130


def text(run: dict[str, Any], *, everything: bool = False) -> str:
    """`run`: what command.record made. `everything`: every failure, with every finding."""
    parts = [heading(run), group_table(run["groups"]), tensor_table(run["tensors"])]
    parts += [failure_list(run["failures"], everything), lacking(run["not_offered"]), verdict(run)]
    return "\n\n".join(part for part in parts if part)


def heading(run: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    left_out = f"; without {', '.join(run['types_left_out'])}, for which NumPy needs ml_dtypes" if run["types_left_out"] else ""
    return (
        f"Conformance of {run['target']} ({versions}) on {run['device']}: {run['ran']} of {run['chosen']} checks "
        f"in {run['seconds']:.0f} s, {', '.join(run['types'])}{left_out}"
    )


def group_table(groups: dict[str, dict[str, Any]]) -> str:
    lines = [f"{'':<20}{'holds':>8}{'fails':>8}{'not offered':>13}{'not run':>9}{'vacuous':>9}{'error/limit':>13}"]
    for name, counts in groups.items():
        cells = (counts["holds"], counts["fails"], counts["not offered"], counts["not run"], counts["vacuous"])
        numbers = "".join(f"{cell or '-':>{width}}" for cell, width in zip(cells, (8, 8, 13, 9, 9), strict=True))
        lines.append(f"{name:<20}{numbers}{ratio(counts['worst']):>13}")
    return "\n".join(lines)


def tensor_table(tensors: dict[str, dict[str, Any]]) -> str:
    """Largest ratios to the limits."""
    if not tensors:
        return ""
    lines = [f"{'error/limit':<12}{'problems':>9}{'outside':>9}{'element':>10}{'row':>10}{'tensor':>10}{'bias':>10}"]
    for name, entry in tensors.items():
        ratios = "".join(f"{ratio(entry[key]):>10}" for key in ("t1", "t2_row", "t2", "t3"))
        lines.append(f"{name:<12}{entry['problems']:>9}{entry['outside'] or '-':>9}{ratios}")
    return "\n".join(lines)


def ratio(x: float) -> str:
    return f"{x:.3g}" if x else "-"


def failure_list(failures: list[dict[str, Any]], everything: bool) -> str:
    lines: list[str] = []
    for group in dict.fromkeys(failure["group"] for failure in failures):
        members = [failure for failure in failures if failure["group"] == group]
        shown = members if everything else members[:SHOWN]
        lines.append(f"{group}: {len(members)} fail")
        for failure in shown:
            findings = failure["findings"] if everything else failure["findings"][:1]
            lines += [f"  {failure['name']}", *(one_line(finding, everything) for finding in findings)]
        if len(shown) < len(members):
            lines.append(f"  ... and {len(members) - len(shown)} more (--all)")
    return "\n".join(lines)


def one_line(finding: str, everything: bool) -> str:
    words = " ".join(finding.split())
    return "    " + (words if everything else textwrap.shorten(words, WIDTH - 4, placeholder=" ..."))


def lacking(words: dict[str, int]) -> str:
    if not words:
        return ""
    listed = ", ".join(f"{word} ({count})" for word, count in words.items())
    return textwrap.fill(f"Not offered, with the number of checks: {listed}", WIDTH, subsequent_indent="  ")


def verdict(run: dict[str, Any]) -> str:
    fails = len(run["failures"])
    applied = run["held"] + fails
    words = f"{fails} of {applied} checks that apply fail" if fails else f"all {applied} checks that apply hold"
    not_run = run["chosen"] - run["ran"]
    lost = run["lost_after"]
    why = f", because after {lost} every call on the GPU fails" if lost else " for lack of time (--seconds)"
    return f"{run['target']}: {words}" + (f"; {not_run} were not run{why}" if not_run else "")
