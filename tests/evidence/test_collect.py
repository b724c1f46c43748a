"""How stages run and fail, and how that is recorded."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pathlib
from collections.abc import Callable

import collect
import limited
import pytest
import record
import sources


def test_where_the_file_goes_and_what_it_is_merged_into(tmp_path: pathlib.Path) -> None:
    assert collect.target(None, "NVIDIA H200") == record.FOLDER / "nvidia-h200.json"
    assert collect.target(tmp_path, "NVIDIA H200") == tmp_path / "nvidia-h200.json"
    path = collect.target(tmp_path / "x.json", "NVIDIA H200")
    assert path == tmp_path / "x.json"
    assert collect.earlier(path, ["tests"]) is None
    path.write_text('{"gpu": "x"}')
    assert collect.earlier(path, ["tests"]) == {"gpu": "x"}
    assert collect.earlier(path, list(collect.STAGES)) is None


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


def test_the_tests_with_a_time_or_place_of_their_own_are_there() -> None:
    assert collect.ON_HOST
    files = [name.partition("::") for name in collect.WAITING + collect.ON_HOST + collect.ON_ALL + collect.ALSO_ON_ALL]
    for name, _, test in files:
        assert f"def {test}" in (sources.ROOT / "tests/cuda" / name).read_text()


def test_a_stage_by_a_program(tmp_path: pathlib.Path) -> None:
    """A result, a failure with its reason, an incomplete result, and a time limit."""
    run = collect.Run(quick=False, logs=tmp_path, arch=90)
    body = "import json, pathlib, sys, time\nout = pathlib.Path(sys.argv[-1])\n"
    script = tmp_path / "stage.py"

    def outcome(code: str) -> tuple[str, str, dict]:
        script.write_text(body + code)
        return collect.by_json("accuracy", script, run)

    assert outcome("out.write_text(json.dumps({'entries': [1], 'failures': []}))") == ("passed", "", {"entries": [1]})
    status, why, data = outcome("out.write_text(json.dumps({'entries': [], 'failures': ['k: T1\\nmore']})); sys.exit(1)")
    assert (status, why, data["entries"]) == ("failed", "k: T1", [])
    assert outcome("raise RuntimeError('no kernel')")[:2] == ("failed", "RuntimeError: no kernel")
    assert outcome("pass")[0] == "failed"  # no result, so nothing is proved
    run.begin("accuracy")
    run.stage_end = 0
    assert outcome("time.sleep(60)")[0] == "timed out"


@pytest.mark.parametrize("stage", ["accuracy", "repeats"])
def test_stages_beside_others_use_one_thread_of_numpy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, stage: str
) -> None:
    given: dict[str, str] = {}
    monkeypatch.setattr(
        collect, "run_limited", lambda command, limit, log, environment: given.update(environment) or limited.Done(0, "", 0.1)
    )
    collect.STAGES[stage](collect.Run(quick=False, logs=tmp_path, arch=90))
    assert given["OPENBLAS_NUM_THREADS"] == "1"


def test_two_gpus_share_the_stages() -> None:
    """What is timed has the second GPU to itself; only the last stage sees both."""
    names = list(collect.STAGES)
    lanes, both = collect.phases(names, 2)
    *checks, timed = lanes
    assert checks == [(["tests"], (0,)), (["sanitizer"], (0,)), (["repeats"], (0,))]
    assert timed == (["benchmark", "decode", "shapes", "serving", "accuracy"], (1,))  # one after the other
    assert both == [(["context"], None)]
    checks, _ = collect.phases(["sanitizer", "repeats"], 2)
    assert [lane for lane in checks if lane[0]] == [(["sanitizer"], (0,)), (["repeats"], (1,))]  # nothing is timed


def test_of_four_gpus_the_tests_have_two() -> None:
    lanes, all_of_them = collect.phases(list(collect.STAGES), 4)
    assert [gpus for _, gpus in lanes] == [(0, 3), (2,), (2,), (1,)]
    assert lanes[-1] == (["benchmark", "decode", "shapes", "serving", "accuracy"], (1,))
    assert all_of_them == [(["context", "context_all"], None)]


def test_on_one_gpu_nothing_is_beside_what_is_timed() -> None:
    checks, timed = collect.phases(list(collect.STAGES), 1)
    assert checks == [(["tests"], None), (["sanitizer"], None), (["repeats"], None)]
    assert timed == [(["benchmark", "decode", "shapes", "serving", "accuracy"], None)]
    assert collect.phases(["accuracy"], 1) == [[([], None), ([], None), ([], None)], [(["accuracy"], None)]]


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_every_stage_runs_once(gpus: int) -> None:
    found = [name for phase in collect.phases(list(collect.STAGES), gpus) for names, _ in phase for name in names]
    assert sorted(found) == sorted(set(collect.STAGES) - set(record.OF_SEVERAL[{1: 0, 2: 1, 4: 2}[gpus] :]))


@pytest.mark.parametrize(("given", "seen"), [(None, "1"), ("2,5", "5")])
def test_a_lane_sees_its_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, given: str | None, seen: str) -> None:
    """The second of the visible GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    run = collect.Run(quick=False, logs=tmp_path, arch=90, lane_gpus=(1,), gpus=2)
    assert run.program("seen", ["-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"]).text == f"{seen}\n"


@pytest.mark.parametrize(("lane_gpus", "gpus"), [((0, 3), "0,3"), ((0,), None)])
def test_processes_of_the_tests_share_the_gpus_of_the_lane(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, lane_gpus: tuple[int, ...], gpus: str | None
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    given: dict[str, str] = {}
    monkeypatch.setattr(
        collect, "run_limited", lambda command, limit, log, environment: given.update(environment) or limited.Done(0, "", 0.1)
    )
    collect.tests(collect.Run(quick=False, logs=tmp_path, arch=90, lane_gpus=lane_gpus, gpus=4))
    assert given.get("LIBFLASH_TEST_GPUS") == gpus


@pytest.mark.parametrize(("gpus", "worker", "seen"), [("0,3", "gw0", "0"), ("0,3", "gw5", "3"), ("", "gw5", "7")])
def test_a_process_of_the_tests_sees_one_gpu(monkeypatch: pytest.MonkeyPatch, gpus: str, worker: str, seen: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    spec = importlib.util.spec_from_file_location("conftest_of_tests", collect.ROOT / "tests/conftest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.one_gpu_of(gpus, worker)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen


def test_phases_have_one_end(tmp_path: pathlib.Path) -> None:
    """All stages together end at the run's limit."""
    run = collect.Run(quick=False, logs=tmp_path, arch=90, end=collect.time.monotonic() + 5)
    run.begin("tests")
    assert run.left() <= 5


def test_the_limits_fit_the_total() -> None:
    assert set(collect.LIMITS) == set(collect.QUICK_LIMITS) == set(collect.STAGES) == set(record.STAGES)
    assert collect.TOTAL <= 540  # leaves a minute for the build within ten minutes
    assert list(collect.STAGES) == list(record.STAGES)


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Callable[..., tuple[int, dict]]:
    """Run collect with stages that do nothing, as if on a GPU; returns the exit code and the file."""
    known = {"gpu": "NVIDIA H200", "gpus": 2, "setting": {"arch": 90, "driver": "1", "toolkit": "13.0"}}
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
        options = argparse.Namespace(logs=tmp_path, out=tmp_path / "out", only=list(only), quick=False, racecheck_build=None)
        code = collect.collect(options)
        return code, json.loads((tmp_path / "out/nvidia-h200.json").read_text())

    return run


def test_all_stages_make_evidence(collected: Callable) -> None:
    code, data = collected()
    assert code == 0
    assert record.shortcomings(data, sources.digest()) == []
    assert data["tests"] == {"by": "tests"}


def test_a_failing_stage_is_recorded_and_repeated_alone(collected: Callable) -> None:
    code, data = collected(accuracy=ValueError("half a file"), sanitizer=("unproven", "blind", {}))
    assert code == 1
    assert data["stages"]["accuracy"]["why"] == "ValueError: half a file"
    assert data["stages"]["benchmark"]["status"] == "passed"
    assert len(record.shortcomings(data, sources.digest())) == 2
    assert collected("accuracy")[0] == 0  # every stage that ran passed
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
