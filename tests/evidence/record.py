"""The evidence file: its name, its fields, how runs are merged into it, and why it is no evidence.

    gpu, sources, quick      which GPU, the hash of the sources (sources.py), whether a smaller set was run
    setting                  library, toolkit, driver and frameworks, see machine.py
    stages                   for each stage: status, seconds, date, driver, and `why` unless it passed
    tests, accuracy, ...     the results of the stage of that name; `serving` takes minutes, `context` needs two GPUs,
                             `context_all` more: they may be absent

A status is "passed", "failed", "timed out" or "unproven": nothing was found, but the tool did not find the planted faults either.
"""

from __future__ import annotations

import json
import pathlib
import re

STAGES = ("tests", "accuracy", "repeats", "benchmark", "decode", "shapes", "sanitizer", "serving", "context", "context_all")
OF_SEVERAL = ("context", "context_all")  # stages that need two GPUs, and more than two
MAY_BE_ABSENT = ("serving", *OF_SEVERAL)
FOLDER = pathlib.Path(__file__).resolve().parent
WIDTH = 150  # a value that fits on one line is written on one line, so that a line of a table is a line of the file
MAY_DIFFER = {"driver", "python"}  # between runs merged into one file; each stage has its driver


def file_name(gpu: str) -> str:
    """NVIDIA H200: nvidia-h200.json."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".json"


def read_all(folder: pathlib.Path = FOLDER) -> dict[str, dict]:
    """Every evidence file by name."""
    return {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def merged(old: dict | None, new: dict) -> dict:
    """`old` with its stages replaced by those of `new`; raises an exception if GPU, sources or settings differ."""
    if old is None:
        return new
    for name in ("gpu", "sources", "quick"):
        if old[name] != new[name]:
            raise ValueError(f"the file there is about another {name}: {old[name]!r}, now {new[name]!r}")
    for name in sorted((old["setting"].keys() | new["setting"].keys()) - MAY_DIFFER):
        was, now = old["setting"].get(name), new["setting"].get(name)
        if was != now:
            raise ValueError(f"the file there was made with {name} {was!r}, this is {now!r}")
    return old | new | {"stages": old["stages"] | new["stages"]}


def ordered(data: dict) -> dict:
    """Stages in the order of STAGES."""
    head = {name: data[name] for name in ("gpu", "sources", "quick", "setting")}
    head["stages"] = {name: data["stages"][name] for name in STAGES if name in data["stages"]}
    return head | {name: data[name] for name in STAGES if name in data}


def dumps(data: object, indent: int = 0) -> str:
    """JSON with small objects and lines of tables on one line each."""
    line = json.dumps(data, ensure_ascii=False)
    fits = indent > 0 and len(line) + indent <= WIDTH
    if fits or not data or not isinstance(data, dict | list):
        return line
    inside, pad = indent + 1, "\n" + " " * (indent + 1)
    if isinstance(data, dict):
        parts = [f"{json.dumps(key)}: {dumps(value, inside)}" for key, value in data.items()]
    else:
        parts = [dumps(value, inside) for value in data]
    left, right = "{}" if isinstance(data, dict) else "[]"
    return f"{left}{pad}{(',' + pad).join(parts)}\n{' ' * indent}{right}"


def write(path: pathlib.Path, data: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dumps(ordered(data)) + "\n")


def shortcomings(data: dict, sources: str, all_stages: bool = True) -> list[str]:
    """Why the file is no evidence for the present sources; empty if it is. Without `all_stages`, of those that it has."""
    found = []
    if data["sources"] != sources:
        found.append(f"is about other sources: {data['sources'][:12]}, now {sources[:12]}")
    if data["quick"]:
        found.append("is of a quick run")
    for name in STAGES:
        stage = data["stages"].get(name)
        if stage is None or name not in data:
            if all_stages and name not in MAY_BE_ABSENT:
                found.append(f"{name}: not run")
        elif stage["status"] != "passed":
            found.append(f"{name}: {stage['status']}: {stage.get('why', '')}".rstrip(": "))
    return found


def problems(files: dict[str, dict], sources: str, stale: str | None) -> list[str]:
    """The complaints of CI. `stale` is the text of STALE.md, None if there is no such file.

    Without STALE.md one file must have all stages, others may have some, and all must be evidence. With it, its text must name
    each file that is not, and STALE.md must be deleted when every file is evidence.
    """
    lacking = {name: shortcomings(data, sources) for name, data in files.items()}
    if not all(lacking.values()):
        lacking = {name: shortcomings(data, sources, all_stages=False) for name, data in files.items()}
    wrong = [f"{name} {text}" for name, texts in lacking.items() for text in texts]
    if not files:
        wrong = ["there is no evidence file"]
    if stale is None:
        return wrong
    if not wrong:
        return ["all evidence is current: delete STALE.md"]
    unnamed = [name for name, texts in lacking.items() if texts and name not in stale]
    if len(stale.split()) < 10 or not re.search(r"[\w-]+\.json", stale):
        return ["STALE.md must say why evidence is missing, and which file", *wrong]
    return [f"STALE.md does not name {name}, which {'; '.join(lacking[name])}" for name in unnamed]
