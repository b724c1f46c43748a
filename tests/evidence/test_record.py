"""The file: its name and shape, how runs are merged into it, and when it is no evidence."""

from __future__ import annotations

import json
import pathlib

import pytest
import record
from made_up import evidence


def test_current_evidence_needs_no_excuse() -> None:
    assert record.problems({"a.json": evidence()}, "aaa", None) == []
    (text,) = record.problems({"a.json": evidence()}, "aaa", "a reason of more than ten words that names the file a.json itself")
    assert "delete" in text


def one_stage(**changes: object) -> dict:
    """A file of stage `context` only."""
    whole = evidence(**changes)
    return {name: whole[name] for name in ("gpu", "sources", "quick", "setting", "context")} | {
        "stages": {"context": whole["stages"]["context"]}
    }


def test_beside_a_complete_file_another_gpu_may_have_some_stages() -> None:
    assert record.problems({"a.json": evidence(), "b.json": one_stage()}, "aaa", None) == []
    (text,) = record.problems({"a.json": evidence(), "b.json": one_stage(sources="bbb")}, "aaa", None)
    assert text.startswith("b.json is about other sources")
    assert any("tests: not run" in text for text in record.problems({"b.json": one_stage()}, "aaa", None))


def failed_stage() -> dict:
    stages = evidence()["stages"]
    return evidence(stages=stages | {"accuracy": {"status": "failed", "why": "3 entries"}})


@pytest.mark.parametrize(
    ("files", "word"),
    [
        ({}, "no evidence file"),
        ({"a.json": evidence(sources="bbb")}, "a.json is about other sources"),
        ({"a.json": evidence(quick=True)}, "quick"),
        ({"a.json": failed_stage()}, "accuracy: failed: 3 entries"),
        ({"a.json": {k: v for k, v in evidence().items() if k != "sanitizer"}}, "sanitizer: not run"),
        ({"a.json": {k: v for k, v in evidence().items() if k != "shapes"}}, "shapes: not run"),
        ({"a.json": evidence(stages=evidence()["stages"] | {"context": {"status": "failed", "why": "x"}})}, "context: failed: x"),
        ({"a.json": evidence(), "b.json": evidence(sources="bbb")}, "b.json"),
    ],
)
def test_what_is_missing_is_a_failure_or_excused(files: dict, word: str) -> None:
    (text,) = record.problems(files, "aaa", None)
    assert word in text
    reason = "The kernels were changed, and there was no GPU to run them on: missing is {}.json"
    assert record.problems(files, "aaa", reason.format("b" if "b.json" in files else "a")) == []
    assert record.problems(files, "aaa", "")
    assert record.problems(files, "aaa", "a.json b.json")
    assert record.problems(files, "aaa", "A long text that says much and names no file at all, which is not enough.")
    if files:
        assert record.problems(files, "aaa", reason.format("other"))


def test_a_stage_is_merged_into_the_file_of_the_same_sources() -> None:
    old = evidence()
    new = {name: old[name] for name in ("gpu", "sources", "quick")} | {"setting": {"toolkit": "13.0", "driver": "2"}}
    new |= {"stages": {"tests": {"status": "failed"}}, "tests": {"passed": 0}}
    made = record.merged(old, new)
    assert made["tests"] == {"passed": 0}
    assert made["stages"]["tests"] == {"status": "failed"}
    assert made["stages"]["accuracy"]["status"] == "passed"
    assert made["benchmark"] == old["benchmark"]
    assert made["setting"]["driver"] == "2"
    assert record.merged(None, new) is new
    for change in ({"sources": "bbb"}, {"gpu": "other"}, {"quick": True}, {"setting": {"toolkit": "12.9", "driver": "1"}}):
        with pytest.raises(ValueError, match=next(iter(change)) if "setting" not in change else "toolkit"):
            record.merged(old, new | change)


def test_the_file_is_json_in_short_lines_and_stable_order(tmp_path: pathlib.Path) -> None:
    data = evidence()
    record.write(tmp_path / "x.json", dict(reversed(data.items())))
    text = (tmp_path / "x.json").read_text()
    assert json.loads(text) == data
    assert list(json.loads(text)) == ["gpu", "sources", "quick", "setting", "stages", *record.STAGES]
    assert max(map(len, text.splitlines())) <= record.WIDTH + 40
    assert len(text.splitlines()) < 160


def test_names_of_files() -> None:
    assert record.file_name("NVIDIA H200") == "nvidia-h200.json"
    assert record.file_name("NVIDIA GeForce RTX 4090 (Laptop)") == "nvidia-geforce-rtx-4090-laptop.json"
