"""Counts from pytest's JUnit report."""

from __future__ import annotations

import collections
import pathlib
import xml.etree.ElementTree as ET

KINDS = {"failure": "failed", "error": "failed", "skipped": "skipped"}
KEPT, KEPT_CHARACTERS = 20, 300
ROOT = pathlib.Path(__file__).resolve().parents[2]


def counts(*reports: str) -> dict[str, object]:
    """Counts over all reports: passed, failed and skipped, total and by file; why tests were skipped; the first failures."""
    by_file: dict[str, collections.Counter[str]] = {}
    reasons: collections.Counter[str] = collections.Counter()
    failures: dict[str, str] = {}
    for case in (case for xml in reports for case in ET.fromstring(xml).iter("testcase")):
        file = file_of(case.get("classname", ""))
        outcomes = {KINDS[child.tag]: child for child in case if child.tag in KINDS}
        outcome = "failed" if "failed" in outcomes else next(iter(outcomes), "passed")
        by_file.setdefault(file, collections.Counter())[outcome] += 1
        message = outcomes[outcome].get("message", "") if outcome in outcomes else ""
        message = message.replace(f"{ROOT}/", "")[:KEPT_CHARACTERS]  # paths in the repository, wherever that is
        if outcome == "skipped":
            reasons[message] += 1
        elif outcome == "failed":
            failures.setdefault(f"{file}::{case.get('name')}", message)
    total = sum(by_file.values(), collections.Counter())
    result: dict[str, object] = {kind: total[kind] for kind in ("passed", "failed", "skipped")}
    result["files"] = {name: dict(sorted(by_file[name].items())) for name in sorted(by_file)}
    if reasons:
        result["skipped_because"] = dict(sorted(reasons.items()))
    if failures:
        result["failures"] = dict(list(failures.items())[:KEPT])
    return result


def file_of(classname: str) -> str:
    """tests.cuda.test_merge.TestX: tests/cuda/test_merge.py."""
    parts = classname.split(".")
    last = next((i for i, part in enumerate(parts) if part.startswith("test_")), len(parts) - 1)
    return "/".join(parts[: last + 1]) + ".py"
