"""gpu_scan.py: its problems, and its calls with the CPU in place of a GPU."""

from __future__ import annotations

import contextlib
import itertools
import json
import pathlib
import sys
import types
from collections.abc import Callable

import pytest
from benchmark_program import cells_on_the_cpu, program

SMALL = {"LENGTHS": (4, 90), "BATCHES": (1, 3), "HEADS": (1, 2, 4), "FEWEST_GFLOP": 0.0, "MOST_GFLOP": 0.05}


@pytest.fixture
def benchmark() -> types.ModuleType:
    pytest.importorskip("torch")
    return program("gpu_scan")


@pytest.fixture
def problems(benchmark: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Small problems on the CPU."""
    return cells_on_the_cpu(monkeypatch, "_scan", SMALL)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_problems_are_of_their_family_and_within_the_bounds(benchmark: types.ModuleType, direction: str) -> None:
    scan = sys.modules["_scan"]
    drawn = {family: list(itertools.islice(scan.shapes(family, direction, 0), 200)) for family in scan.FAMILIES}
    for shape in itertools.chain(*drawn.values()):
        assert scan.FEWEST_GFLOP <= shape.gflop <= scan.MOST_GFLOP
        assert shape.direction == direction
        assert shape.heads % shape.key_heads == 0
        assert not shape.causal or shape.seqlen <= shape.keys
    assert all(shape.seqlen == shape.keys for family in ("same", "head_dims", "fp16") for shape in drawn[family])
    assert any(shape.seqlen < shape.keys for shape in drawn["lengths"])
    assert any(shape.seqlen > shape.keys for shape in drawn["lengths"])
    assert {shape.dtype for shape in drawn["fp16"]} == {"float16"}
    assert {shape.head_dim for shape in drawn["same"]} == {64, 128, 256}
    assert len({shape.head_dim for shape in drawn["head_dims"]}) > 20
    assert {shape.causal for shape in drawn["same"]} == {False, True}


def test_a_seed_gives_the_same_problems(benchmark: types.ModuleType) -> None:
    scan = sys.modules["_scan"]
    first, again, other = (list(itertools.islice(scan.shapes("same", "forward", seed), 20)) for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_operations(benchmark: types.ModuleType) -> None:
    """Three rows that see five keys, or with a causal mask 3, 4 and 5 of them."""
    scan = sys.modules["_scan"]
    shape = scan.Shape("forward", "bfloat16", 64, 3, False, 2, 8, 5, 4)
    assert shape.gflop == pytest.approx(4 * 2 * 8 * 64 * 15 / 1e9)
    causal = scan.Shape("backward", "bfloat16", 64, 3, True, 2, 8, 5, 4)
    assert causal.gflop == pytest.approx(2.5 * 4 * 2 * 8 * 64 * 12 / 1e9)
    assert causal.name == "bfloat16 d=64 2 x 3 keys 5 heads 8/4 causal"


def test_peers_with_another_causal_mask_are_left_out(problems: types.ModuleType) -> None:
    made = problems.Shape("forward", "bfloat16", 64, 3, True, 1, 2, 5, 2)
    assert set(problems.contenders(made)) == {"libflash"}
    square = problems.Shape("forward", "bfloat16", 64, 5, True, 1, 2, 5, 1)
    assert set(problems.contenders(square)) == {"libflash", "cudnn"}


@pytest.fixture
def run_program(
    benchmark: types.ModuleType, problems: types.ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> Callable[..., dict]:
    """Run the program on the CPU, with made-up times and a clock that counts problems; returns what it writes."""
    torch = pytest.importorskip("torch")
    times = {"cudnn": 1.0, "libflash": 2.0}

    def medians(calls: dict[str, Callable], rounds: int, replay_ms: float) -> tuple[dict[str, float], float]:
        return {name: times[name] for name in calls}, 0.01

    monkeypatch.setattr(benchmark, "medians", medians)
    monkeypatch.setattr(benchmark, "time", types.SimpleNamespace(monotonic=itertools.count().__next__))
    monkeypatch.setattr(benchmark, "setting", lambda rounds, kernel: {"rounds": rounds})
    monkeypatch.setattr(benchmark.gc, "freeze", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)

    def run(*arguments: str, code: int = 0) -> dict:
        out = tmp_path / "scan.json"
        monkeypatch.setattr(sys, "argv", ["gpu_scan.py", "--json", str(out), *arguments])
        assert benchmark.main() == code
        return json.loads(out.read_text())

    return run


def test_the_program_on_the_cpu(run_program: Callable[..., dict], capsys: pytest.CaptureFixture[str]) -> None:
    data = run_program("--seconds", "5", "--only", "same", "lengths")
    assert data["setting"] == {"rounds": 3, "seed": 0}
    assert [(p["family"], p["direction"]) for p in data["problems"]] == [
        kind for kind in itertools.product(("same", "lengths"), ("forward", "backward")) for _ in range(5)
    ]
    assert all(p["ratio"] == {"cudnn": 0.5} for p in data["problems"] if p["family"] == "same")
    assert "same backward, over cudnn:" in capsys.readouterr().out


def test_a_wrong_result_is_not_timed(
    run_program: Callable[..., dict], problems: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_calls = sys.modules["_gpu_contenders"].OWN_CALLS
    right = own_calls["forward"]

    def wrong(*arguments: object) -> Callable:
        call = right(*arguments)
        return lambda: tuple(1.1 * x for x in call())

    monkeypatch.setitem(own_calls, "forward", wrong)
    (problem,) = run_program("--seconds", "0", "--only", "same", "--directions", "forward", code=1)["problems"]
    assert "a row differs from cudnn's" in problem["differs"]
    assert problem["ratio"] == {}
