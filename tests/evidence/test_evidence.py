"""The evidence is about the present sources, the README says what it says, and the machinery that makes it can fail."""

from __future__ import annotations

import argparse
import importlib.util
import json
import pathlib
import shutil
import subprocess
import sys
import types
from collections.abc import Callable

import pytest
from case import Case

import libflash

FOLDER = pathlib.Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]


def program(name: str) -> types.ModuleType:
    """A file of tests/evidence as a module; its neighbours are found as when it is run."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    before = list(sys.path)
    sys.path.insert(0, str(FOLDER))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = before
    return module


record, sources, junit, sanitizer, limited, facts, collect, tables = (
    program(name) for name in ("record", "sources", "junit", "sanitizer", "limited", "facts", "collect", "tables")
)


# What CI is here for.


def test_the_evidence_is_about_these_sources() -> None:
    stale = FOLDER / "STALE.md"
    wrong = record.problems(record.read_all(), sources.digest(), stale.read_text() if stale.exists() else None)
    assert not wrong, "\n".join(["run tests/evidence/collect.py on a GPU, or say in STALE.md why not:", *wrong])


def test_the_readme_has_the_tables_of_the_evidence() -> None:
    done = subprocess.run([sys.executable, FOLDER / "tables.py", "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_files_are_named_after_their_gpu_and_small() -> None:
    for name, data in record.read_all().items():
        assert name == record.file_name(data["gpu"])
        assert (FOLDER / name).stat().st_size < 100_000
        assert (FOLDER / name).read_text() == record.dumps(record.ordered(data)) + "\n"


# The hash of the sources.


@pytest.fixture
def tree(tmp_path: pathlib.Path) -> pathlib.Path:
    """A small copy of the layout, not a git checkout."""
    for path in ("libflash/cuda/a.cuh", "libflash/plan/b.cpp", "libflash/cpu/c.cpp", "include/d.h", "tests/e.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(path)
    return tmp_path


def test_the_hash_notices_what_matters(tree: pathlib.Path) -> None:
    seen = {sources.digest(tree)}
    (tree / "libflash/cuda/a.cuh").write_text("libflash/cuda/a.cuH")  # a byte
    seen.add(sources.digest(tree))
    (tree / "libflash/cuda/new.cuh").touch()
    seen.add(sources.digest(tree))
    (tree / "libflash/cuda/new.cuh").rename(tree / "libflash/plan/new.cuh")
    seen.add(sources.digest(tree))
    (tree / "include/d.h").unlink()
    seen.add(sources.digest(tree))
    assert len(seen) == 5
    assert sources.files(tree) == ["libflash/cuda/a.cuh", "libflash/plan/b.cpp", "libflash/plan/new.cuh"]


def test_the_hash_ignores_the_rest(tree: pathlib.Path) -> None:
    before = sources.digest(tree)
    (tree / "libflash/cpu/c.cpp").write_text("changed")
    (tree / "libflash/cpu/more.h").touch()
    (tree / "tests/e.py").write_text("changed")
    for path in ("include/.clang-format", "libflash/__pycache__/x.py", "libflash/x.so"):
        (tree / path).parent.mkdir(exist_ok=True)
        (tree / path).touch()
    assert sources.digest(tree) == before


@pytest.mark.skipif(not shutil.which("git"), reason="no git")
def test_git_and_no_git_give_the_same_hash(tree: pathlib.Path) -> None:
    walked = sources.digest(tree)
    (tree / ".gitignore").write_text("*.log\n")
    subprocess.run(["git", "init", "-q", tree], check=True)
    subprocess.run(["git", "-C", tree, "add", "libflash/cuda", "include"], check=True)
    assert sources.listed_by_git(tree) is not None
    assert sources.digest(tree) == walked  # plan/b.cpp is not tracked yet: it counts all the same
    (tree / "libflash/build.log").touch()
    assert sources.digest(tree) == walked
    (tree / "include/d.h").unlink()
    assert sources.files(tree) == ["libflash/cuda/a.cuh", "libflash/plan/b.cpp"]  # tracked, but gone
    inner = tree / "libflash"  # an archive unpacked inside a checkout
    assert sources.listed_by_git(inner) is None


def test_the_hash_of_this_repository() -> None:
    found = sources.files()
    assert {"include/libflash.h", "libflash/cuda/kernels.table"} <= set(found)
    assert not [path for path in found if path.startswith("libflash/cpu/")]
    done = subprocess.run([sys.executable, FOLDER / "sources.py"], capture_output=True, text=True, check=True)
    assert done.stdout == sources.digest() + "\n"


# The file.


def evidence(**changes: object) -> dict:
    stages = {name: {"status": "passed", "seconds": 1.0, "date": "2026-01-01", "driver": "1"} for name in record.STAGES}
    cell = {"direction": "forward", "dtype": "bfloat16", "head_dim": 64, "seqlen": 512, "causal": True}
    cell |= {"tflops": {"libflash": 300.4, "fa2": 150.2}, "ratio": {"fa2": 2.0}}
    data = {
        "gpu": "NVIDIA H200",
        "sources": "aaa",
        "quick": False,
        "setting": {"toolkit": "13.0", "driver": "1"},
        "stages": stages,
        "tests": {"passed": 3, "failed": 0, "skipped": 1},
        "accuracy": {"rows": [{"dtype": "bf16", "fill": "randn", "o": {"t1": 0.5, "rms": 2e-3}, "lse": {"t1": 0.25}}]},
        "repeats": {"repeats": 1000},
        "sanitizer": {"runs": {"memcheck": {"status": "clean"}, "racecheck": {"status": "found"}}},
        "benchmark": {
            "setting": {"torch": "2", "cudnn": 9, "rounds": 5},
            "summary": {"fa2": {"geometric_mean": {"all": 2.0}, "worst": {"ratio": 2.0}}},
            "cells": [cell],
        },
    }
    return data | changes


def test_current_evidence_needs_no_excuse() -> None:
    assert record.problems({"a.json": evidence()}, "aaa", None) == []
    (text,) = record.problems({"a.json": evidence()}, "aaa", "a reason of more than ten words that names the file a.json itself")
    assert "delete" in text


def failed_stage() -> dict:
    stages = evidence()["stages"]
    return evidence(stages=stages | {"accuracy": {"status": "failed", "why": "3 rows"}})


@pytest.mark.parametrize(
    ("files", "word"),
    [
        ({}, "no evidence file"),
        ({"a.json": evidence(sources="bbb")}, "a.json is about other sources"),
        ({"a.json": evidence(quick=True)}, "quick"),
        ({"a.json": failed_stage()}, "accuracy: failed: 3 rows"),
        ({"a.json": {k: v for k, v in evidence().items() if k != "sanitizer"}}, "sanitizer: not run"),
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
    assert len(text.splitlines()) < 80


def test_names_of_files() -> None:
    assert record.file_name("NVIDIA H200") == "nvidia-h200.json"
    assert record.file_name("NVIDIA GeForce RTX 4090 (Laptop)") == "nvidia-geforce-rtx-4090-laptop.json"


def test_where_the_file_goes_and_what_it_is_merged_into(tmp_path: pathlib.Path) -> None:
    assert collect.target(None, "NVIDIA H200") == FOLDER / "nvidia-h200.json"
    assert collect.target(tmp_path, "NVIDIA H200") == tmp_path / "nvidia-h200.json"
    path = collect.target(tmp_path / "x.json", "NVIDIA H200")
    assert path == tmp_path / "x.json"
    assert collect.earlier(path, ["tests"]) is None
    path.write_text('{"gpu": "x"}')
    assert collect.earlier(path, ["tests"]) == {"gpu": "x"}
    assert collect.earlier(path, list(collect.STAGES)) is None


# The stages.

JUNIT = """<?xml version="1.0" encoding="utf-8"?><testsuites><testsuite name="pytest" errors="1" failures="1" skipped="2" tests="6">
<testcase classname="tests.cuda.test_merge" name="test_a[1]" time="0.1" />
<testcase classname="tests.cuda.test_merge" name="test_a[2]" time="0.1"><failure message="AssertionError: o: T1 worst">long</failure></testcase>
<testcase classname="tests.cuda.test_merge.TestB" name="test_b" time="0.1"><skipped type="pytest.skip" message="no CuPy">x</skipped></testcase>
<testcase classname="tests.cuda.test_forward" name="test_c" time="0.1"><skipped message="no CuPy">x</skipped></testcase>
<testcase classname="tests.cuda.test_forward" name="test_d" time="0.1"><error message="boom">x</error></testcase>
<testcase classname="tests.cuda.test_forward" name="test_e" time="0.1"><system-out>text</system-out></testcase>
</testsuite></testsuites>"""  # noqa: E501


def test_counts_of_a_junit_report() -> None:
    found = junit.counts(JUNIT)
    assert {kind: found[kind] for kind in ("passed", "failed", "skipped")} == {"passed": 2, "failed": 2, "skipped": 2}
    assert found["files"]["tests/cuda/test_merge.py"] == {"failed": 1, "passed": 1, "skipped": 1}
    assert found["skipped_because"] == {"no CuPy": 2}
    assert found["failures"]["tests/cuda/test_merge.py::test_a[2]"] == "AssertionError: o: T1 worst"
    assert found["failures"]["tests/cuda/test_forward.py::test_d"] == "boom"
    assert junit.counts(JUNIT, JUNIT)["passed"] == 4


def test_counts_of_pytest_itself(tmp_path: pathlib.Path) -> None:
    """The real report, not only my picture of one: a test that fails in its body and again behind it counts once."""
    (tmp_path / "test_x.py").write_text(
        "import pytest\n@pytest.fixture\ndef late():\n    yield\n    raise ValueError('late')\n"
        "def test_both(late): assert 0\ndef test_fine(): pass\ndef test_skipped(): pytest.skip('why')\n"
        "@pytest.mark.xfail\ndef test_known(): assert 0\n"
    )
    report = tmp_path / "junit.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={report}", f"--rootdir={tmp_path}"]
    subprocess.run([*command, "-c", "/dev/null", tmp_path], capture_output=True, check=False)
    found = junit.counts(report.read_text())
    assert (found["passed"], found["skipped"]) == (1, 2)
    assert list(found["failures"]) == ["test_x.py::test_both"]
    assert found["skipped_because"]["why"] == 1


@pytest.mark.parametrize(
    ("codes", "data", "status"),
    [
        ([0, 0], {"passed": 5, "failed": 0, "skipped": 1}, "passed"),
        ([1, 0], {"passed": 5, "failed": 1, "skipped": 0}, "failed"),
        ([0, 0], {"passed": 0, "failed": 0, "skipped": 9}, "failed"),
        ([0, 3], {"passed": 5, "failed": 0, "skipped": 0}, "failed"),
        ([0, 0], {"passed": 5, "failed": 0, "skipped": 2, "skipped_because": {"Skipped: no CUDA device": 2}}, "failed"),
        ([4, 4], {}, "failed"),
        ([0, None], {}, "timed out"),
    ],
)
def test_verdict_of_the_tests(codes: list[int | None], data: dict, status: str) -> None:
    assert collect.tests_verdict(codes, data)[0] == status


def test_the_tests_that_look_at_the_clock_are_there() -> None:
    assert all((ROOT / "tests/cuda" / name).exists() for name in collect.TIMED)


def test_a_stage_by_a_program(tmp_path: pathlib.Path) -> None:
    """Its result, its failure with the reason, its half a result, its time limit."""
    run = collect.Run(quick=False, logs=tmp_path, arch=90)
    body = "import json, pathlib, sys, time\nout = pathlib.Path(sys.argv[-1])\n"
    script = tmp_path / "stage.py"

    def outcome(code: str) -> tuple[str, str, dict]:
        script.write_text(body + code)
        return collect.by_json("accuracy", script, run)

    assert outcome("out.write_text(json.dumps({'rows': [1], 'failures': []}))") == ("passed", "", {"rows": [1]})
    status, why, data = outcome("out.write_text(json.dumps({'rows': [], 'failures': ['k: T1\\nmore']})); sys.exit(1)")
    assert (status, why, data["rows"]) == ("failed", "k: T1", [])
    assert outcome("raise RuntimeError('no kernel')")[:2] == ("failed", "RuntimeError: no kernel")
    assert outcome("pass")[0] == "failed"  # no result: nothing was shown
    run.begin("accuracy")
    run.stage_end = 0
    assert outcome("time.sleep(60)")[0] == "timed out"


def test_the_limits_fit_the_total() -> None:
    assert set(collect.LIMITS) == set(collect.QUICK_LIMITS) == set(collect.STAGES) == set(record.STAGES)
    assert collect.TOTAL <= 360
    assert list(collect.STAGES) == list(record.STAGES)


def test_what_runs_too_long_is_ended_with_all_it_started(tmp_path: pathlib.Path) -> None:
    note = tmp_path / "note"
    child = f"import time, pathlib; time.sleep(2); pathlib.Path({str(note)!r}).touch()"
    code = "import subprocess, sys, time; print('begun', flush=True)\n"
    code += f"subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(9)"
    done = limited.run_limited([sys.executable, "-c", code], 1.0, tmp_path / "log")
    assert done.code is None
    assert done.text == "begun\n"
    assert done.seconds < 5
    assert limited.run_limited([sys.executable, "-c", "import time; time.sleep(2.5)"], 9, tmp_path / "log").code == 0
    assert not note.exists()


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Callable[..., tuple[int, dict]]:
    """Runs collect with stages that do nothing, as if on a GPU; gives the exit code and the file."""
    known = {"gpu": "NVIDIA H200", "setting": {"arch": 90, "driver": "1", "toolkit": "13.0"}}
    monkeypatch.setattr(collect, "run_limited", lambda *_: limited.Done(0, f"a warning\n{json.dumps(known)}\n", 0.1))

    def run(*only: str, **outcomes: object) -> tuple[int, dict]:
        def stage(name: str) -> Callable:
            def made(_: object) -> tuple[str, str, dict]:
                found = outcomes.get(name, ("passed", "", {"by": name}))
                if isinstance(found, Exception):
                    raise found
                return found() if callable(found) else found

            return made

        monkeypatch.setattr(collect, "STAGES", {name: stage(name) for name in record.STAGES})
        options = argparse.Namespace(logs=tmp_path, out=tmp_path / "out", only=list(only), quick=False)
        code = collect.collect(options)
        return code, json.loads((tmp_path / "out/nvidia-h200.json").read_text())

    return run


def test_all_stages_make_evidence(collected: Callable) -> None:
    code, data = collected()
    assert code == 0
    assert record.shortcomings(data, sources.digest()) == []
    assert data["tests"] == {"by": "tests"}


def test_a_failing_stage_is_recorded_and_made_good_alone(collected: Callable) -> None:
    code, data = collected(accuracy=ValueError("half a file"), sanitizer=("unproven", "blind", {}))
    assert code == 1
    assert data["stages"]["accuracy"]["why"] == "ValueError: half a file"
    assert data["stages"]["benchmark"]["status"] == "passed"
    assert len(record.shortcomings(data, sources.digest())) == 2
    assert collected("accuracy")[0] == 0  # all that ran passed
    code, data = collected("sanitizer", sanitizer=("passed", "", {"by": "another machine"}))
    assert record.shortcomings(data, sources.digest()) == []
    assert (data["tests"]["by"], data["sanitizer"]["by"]) == ("tests", "another machine")


def test_other_sources_begin_a_new_file(collected: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    collected()
    monkeypatch.setattr(sources, "digest", lambda: "other")
    assert list(collected("tests")[1]["stages"]) == ["tests"]


def test_sources_that_change_meanwhile_are_no_evidence(collected: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    def change() -> tuple[str, str, dict]:
        monkeypatch.setattr(sources, "digest", lambda: "other")
        return "passed", "", {}

    code, data = collected(tests=change)
    assert code == 1
    assert {stage["status"] for stage in data["stages"].values()} == {"failed"}


def test_accuracy_rows_and_failures() -> None:
    """On a CPU kernel in a GPU's place, and on one whose results are wrong."""
    accuracy = program("accuracy")
    kernel = {"name": "k", "dtype": "bf16", "head_dim": 64, "head_dim_v": 32}

    def right(case: Case, _: str) -> dict:
        x = case.inputs()
        assert (case.head_dim, case.head_dim_v) == (64, 32)
        o, lse = libflash.attention(x.q, x.k, x.v, return_lse=True, **x.options)
        return {"o": o, "lse": lse}

    def wrong(case: Case, name: str) -> dict:
        return right(case, name) | ({"o": 1.01 * right(case, name)["o"]} if case.causal else {})

    (row,), failures = accuracy.table([kernel], ("randn",), right)
    assert not failures
    assert (row["kernel"], row["cases"]) == ("k", 3)
    assert 1e-3 < row["o"]["rms"] < 4e-3
    assert row["o"]["t1"] <= 1
    assert row["o"]["two_times"] <= 1
    (row,), failures = accuracy.table([kernel], ("randn",), wrong)
    assert len(failures) == 2
    assert "T1" in failures[0] or "T2" in failures[0]
    assert "o" in row  # of the case that was right


def test_rows_of_the_kernel_table() -> None:
    table = "# operation room dtype\nmerge any any - - - dev\nforward sm80 bf16 128 128x64 1 -\nforward sm90 f16 192x128 - 2 -\n"
    built = ["merge_any", "forward_sm80_bf16_d128"]
    assert facts.table_rows(table) == {"merge_any": "any", "forward_sm80_bf16_d128": "sm80", "forward_sm90_f16_d192x128": "sm90"}
    assert facts.missing_kernels(table, built, 89) == []
    assert facts.missing_kernels(table, built, 90) == ["forward_sm90_f16_d192x128"]
    assert facts.missing_kernels(table, built[:1], 80) == ["forward_sm80_bf16_d128"]


def test_the_kernel_table_of_this_repository() -> None:
    assert "merge_any" in facts.table_rows((ROOT / "libflash/cuda/kernels.table").read_text())


# The sanitizer: what it says where it works, and where it does not.

CLEAN = "========= COMPUTE-SANITIZER\ncanary clean: no error\n========= ERROR SUMMARY: 0 errors\n"
MEMORY = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at planted_write(int *)+0x70 in canary.cu:22
=========     by thread (127,0,0) in block (0,0,0)
=========     Access at 0x7f6510c00200 is out of bounds
canary memory: unspecified launch failure
========= Target application returned an error
========= ERROR SUMMARY: 1 error
"""
RACE_CLEAN = CLEAN.replace("ERROR SUMMARY: 0 errors", "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)")
RACE = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at planted_race(int *)+0x90 in canary.cu:26
=========     and Read access at planted_race(int *)+0x100 in canary.cu:27 [384 hazards]
=========
canary race: no error
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
BARRIER = """========= COMPUTE-SANITIZER
========= Barrier error detected. Invalid arguments.
=========     at planted_barrier(int *)+0xb0 in canary.cu:32
========= ERROR SUMMARY: 16 errors
========= ERROR SUMMARY: 5 errors were not printed. Use --print-limit option to adjust the number of printed errors
"""
REFUSED = """========= COMPUTE-SANITIZER
========= Error: Device not supported. Please refer to the "Supported Devices" section of the sanitizer documentation
=========
canary memory: unknown error
"""
LIBRARY = MEMORY.replace(
    "planted_write(int *)", "void libflash::cuda::sm80::forward_kernel<forward_sm80_bf16_d64, (bool)0>(Params)"
)


def test_summaries_are_read() -> None:
    texts = (CLEAN, MEMORY, RACE_CLEAN, RACE, BARRIER, REFUSED, "")
    assert [sanitizer.said(text).found for text in texts] == [0, 1, 0, 1, 16, None, None]


@pytest.mark.parametrize(
    ("tool", "clean", "planted", "word"),
    [
        ("memcheck", CLEAN, MEMORY, ""),
        ("racecheck", RACE_CLEAN, RACE, ""),
        ("synccheck", CLEAN, BARRIER, ""),
        ("memcheck", CLEAN, CLEAN, "does not report the planted memory"),
        ("memcheck", CLEAN, MEMORY.replace("planted_write", "other"), "does not report"),
        ("memcheck", MEMORY, MEMORY, "innocent"),
        ("memcheck", REFUSED, REFUSED, "Device not supported"),
        ("racecheck", RACE_CLEAN, RACE_CLEAN, "does not report the planted race"),
        ("racecheck", RACE_CLEAN, "killed", "came to no result"),
        ("synccheck", CLEAN, CLEAN, "does not report the planted barrier"),
    ],
)
def test_verdict_of_the_canary(tool: str, clean: str, planted: str, word: str) -> None:
    verdict = sanitizer.canary_verdict(tool, sanitizer.said(clean), sanitizer.said(planted))
    assert word in verdict
    assert bool(verdict) == bool(word)


def test_memcheck_must_see_the_library_too() -> None:
    assert sanitizer.library_verdict(sanitizer.said(LIBRARY)) == ""
    assert "kernel of the library" in sanitizer.library_verdict(sanitizer.said(CLEAN))
    assert "kernel of the library" in sanitizer.library_verdict(sanitizer.said(MEMORY))
    assert "no result" in sanitizer.library_verdict(sanitizer.said(REFUSED))


def test_results_of_the_runs() -> None:
    ran = "ran: 49 problems, 13 kernels\n"

    def status(text: str, code: int | None) -> str:
        return sanitizer.tool_result("memcheck", limited.Done(code, text, 1.0))["status"]

    assert status(ran + CLEAN, 0) == "clean"
    assert sanitizer.tool_result("memcheck", limited.Done(0, ran + CLEAN, 1.0))["problems"] == 49
    assert status(ran + LIBRARY, sanitizer.FOUND) == "found"
    assert status(CLEAN, 0) == "failed"  # it did not say that it ran
    assert status(ran + CLEAN, 1) == "failed"  # a wrong result
    assert status(ran, 0) == "failed"  # the tool did not say that it watched
    assert status(ran, None) == "timed out"


def test_the_sanitizer_stage_passes_only_where_it_could_have_failed() -> None:
    sees = dict.fromkeys(sanitizer.TOOLS, "")
    clean = {name: {"status": "clean"} for name in sanitizer.TOOLS}
    assert sanitizer.judged(sees, clean)[0] == "passed"
    assert sanitizer.judged(sees, clean | {"racecheck": {"status": "found"}})[0] == "failed"
    status, why, data = sanitizer.judged(sees | {"racecheck": "racecheck does not report"}, {"memcheck": clean["memcheck"]})
    assert (status, why) == ("unproven", "racecheck does not report")
    assert data["canary"]["racecheck"].startswith("proves nothing")
    assert sanitizer.judged(sees | {"synccheck": "blind"}, {k: clean[k] for k in ("memcheck", "racecheck")})[0] == "passed"


# The README's tables.


def test_rows_of_the_tables() -> None:
    made = tables.contents({"a.json": evidence()})
    assert "| bf16 | 64 | yes | 300 (2.00 / -) |" in made["gpu-forward-table"]
    assert "Geometric mean against FlashAttention-2: 2.00" in made["gpu-forward-table"]
    assert "| bf16 | randn | 2.0e-03 | 0.50 | 0.25 | 0.00 | 0.00 |" in made["gpu-accuracy-table"]
    assert "3 passed, 0 failed, 1 skipped" in made["gpu-accuracy-table"]
    assert "clean: memcheck." in made["gpu-accuracy-table"]
    assert tables.contents({}) == {}


def run_tables(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, FOLDER / "tables.py", *arguments]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)


def test_the_readme_is_written_and_then_checked(tmp_path: pathlib.Path) -> None:
    readme = tmp_path / "README.md"
    where = ("--into", readme, "--evidence", tmp_path)
    places = "".join(f"<!-- {name} -->\nold\n<!-- /{name} -->\n" for name in tables.TABLES)
    readme.write_text(f"before\n{places}after\n")
    assert run_tables(*where, "--check").returncode == 0  # no evidence, nothing to say
    record.write(tmp_path / "nvidia-h200.json", evidence())
    failed = run_tables(*where, "--check")
    assert failed.returncode == 1
    assert "gpu-forward-table, gpu-accuracy-table" in failed.stderr
    assert readme.read_text().count("old") == 2
    assert run_tables(*where).returncode == 0
    assert run_tables(*where, "--check").returncode == 0
    written = readme.read_text()
    assert written.startswith("before\n<!-- gpu-forward-table -->\nForward on NVIDIA H200")
    assert written.endswith("after\n")
    readme.write_text(written.replace("300 (2.00", "300 (3.00"))
    assert run_tables(*where, "--check").returncode == 1
    readme.write_text("no places")
    missing = run_tables(*where)
    assert missing.returncode != 0
    assert "gpu-forward-table" in missing.stderr
