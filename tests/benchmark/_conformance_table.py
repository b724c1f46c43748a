"""The conformance table of RESULTS.md, from what `python -m libflash conformance --json` wrote for each target."""

from __future__ import annotations

from collections import Counter

NAME = "conformance-table"
GROUPS = {
    "accuracy": "results inside the error bounds",
    "rows without a key": "rows without a visible key",
    "exact answers": "known answers, exactly",
    "edge values": "edge values",
    "NaN and infinity": "NaN and infinity stay in their place",
    "tangents": "tangents of both passes (JVP, second order)",
    "decode": "decode",
    "same bits again": "equal calls, equal bits",
    "bad input": "bad input is refused",
}
TENSORS = ("o", "lse", "dq", "dk", "dv", "dbias", "dsink")
RATIOS = ("t1", "t2_row", "t2", "t3")


def table(runs: list[dict]) -> str:
    """Markdown: how it was run, a column for each target, and what fails."""
    return "\n".join([caption(runs), "", *rows(runs), "", *(failing(run) for run in runs if run["failures"])])


def caption(runs: list[dict]) -> str:
    named = "; ".join(f"{column(run)}: {versions(run)}, {run['date']}" for run in runs)
    return f"How many of the checks that apply hold ({named})."


def column(run: dict) -> str:
    return run["target"] + ("" if run["device"] == "cpu" else f" on {run['device']}")


def versions(run: dict) -> str:
    return ", ".join(f"{name} {version}" for name, version in run["versions"].items())


def rows(runs: list[dict]) -> list[str]:
    if unknown := {group for run in runs for group in run["groups"]} - GROUPS.keys():
        raise ValueError(f"groups of checks without a row: {', '.join(sorted(unknown))}")
    lines = ["| | " + " | ".join(map(column, runs)) + " |", "|---|" + "---:|" * len(runs)]
    for group, words in GROUPS.items():
        lines.append(line(words, [held(run["groups"].get(group)) for run in runs]))
    for tensor in TENSORS:
        lines.append(line(f"largest error over its limit: {tensor}", [worst(run["tensors"].get(tensor)) for run in runs]))
    lines.append(line("checks not offered", [str(sum(run["not_offered"].values())) for run in runs]))
    lines.append(line("checks not run", [str(run["chosen"] - run["ran"]) for run in runs]))
    lines.append(line("seconds", [f"{run['seconds']:.0f}" for run in runs]))
    return lines


def line(words: str, cells: list[str]) -> str:
    return f"| {words} | " + " | ".join(cells) + " |"


def held(counts: dict | None) -> str:
    if counts is None:
        return "-"
    applies = counts["holds"] + counts["fails"]
    return f"{counts['holds']} of {applies}" if applies else "not run" if counts["not run"] else "not offered"


def worst(entry: dict | None) -> str:
    if not entry:
        return "-"
    largest = max(entry[ratio] for ratio in RATIOS)
    return f"{largest:.2f}" if largest < 100 else f"{largest:.1e}"


def failing(run: dict) -> str:
    """One line: the checks that fail, those of one kind together, with the largest error over its limit where there is one."""
    counts: Counter[str] = Counter()
    largest: dict[str, float] = {}
    for failure in run["failures"]:
        kind = kind_of(failure)
        counts[kind] += 1
        largest[kind] = max(largest.get(kind, 0.0), failure["worst"])
    parts = [f"{kind} ({count}{f', up to {largest[kind]:.3g}' if largest[kind] > 1 else ''})" for kind, count in counts.items()]
    lost = run.get("lost_after")
    after = f" After {lost} every call on the GPU failed, so the rest was not run." if lost else ""
    return f"- {column(run)} fails: {', '.join(parts)}.{after}"


def kind_of(failure: dict) -> str:
    """The name of a check without the values that it ran with; for a case, the name of its group."""
    if failure["group"] == "bad input":
        return failure["name"].rpartition(" (")[0]
    word = failure["name"].partition("-")[0]
    return word.replace("_", " ") if "_" in word else GROUPS[failure["group"]]
