"""gpu_shapes.py: its cells, its arithmetic, and its calls with the CPU in place of a GPU."""

from __future__ import annotations

import importlib
import json
import pathlib
import sys
import types
from collections.abc import Callable

import pytest
from benchmark_program import FOLDER, cells_on_the_cpu, make_up_times, program

SMALL = {
    "TOKENS": 512,
    "WIDTH": 1024,  # eight heads of 128: the fewest that share one key head
    "SEQUENCES": 3,
    "LONGEST": 100,
    "DENSE_SEQLEN": 64,
    "HEADS_SEQLENS": (32, 64),
    "SIDE": 32,
    "PRODUCT_SEQLENS": (32, 64, 128),
    "FP16_SEQLEN": 64,
    "BLOCKS_SEQLEN": 512,
    "OPTIONS_SEQLEN": 64,
    "SHARED_HEAD_DIMS": (64, 128),  # with eight heads or more
    "SHARED_SHAPES": ((1, 32), (1, 64), (2, 48)),
    "FEW_SHAPES": ((2, 16), (1, 16), (1, 32)),
}


@pytest.fixture
def benchmark() -> types.ModuleType:
    pytest.importorskip("torch")
    return program("gpu_shapes")


@pytest.fixture
def shapes(benchmark: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Small cells on the CPU."""
    return cells_on_the_cpu(monkeypatch, "_shapes", SMALL)


def test_every_cell_is_there_once(benchmark: types.ModuleType, shapes: types.ModuleType) -> None:
    counts = {"packed": 8, "heads": 8, "product": 12, "fp16": 4, "blocks": 5, "options": 30, "shared": 12, "few": 36}
    quick = {"packed": 2, "heads": 2, "product": 4, "fp16": 2, "blocks": 1, "options": 10, "shared": 2, "few": 4}
    for section in benchmark.SECTIONS:
        names = [contest.name for contest in shapes.contests(section, quick=False)]
        assert len(set(names)) == len(names) == counts[section]
        some = [contest.name for contest in shapes.contests(section, quick=True)]
        assert set(some) < set(names)
        assert len(some) == quick[section]


def test_operations_are_counted_exactly(benchmark: types.ModuleType) -> None:
    shapes = sys.modules["_shapes"]
    full, causal = (shapes.cell(128, 3, mask, batch=1) for mask in (False, True))
    assert shapes.exact_gflop([3, 2], full) == pytest.approx(4 * 16 * 128 * (9 + 4) / 1e9)
    assert shapes.exact_gflop([3, 2], causal) == pytest.approx(4 * 16 * 128 * (6 + 3) / 1e9)


def test_the_dense_call_has_about_as_many_operations(benchmark: types.ModuleType) -> None:
    """The nearest with a whole number of sequences."""
    shapes = sys.modules["_shapes"]
    lengths = [4096, 4096, 2048, 2048, 1024]
    assert shapes.nearest_batch(lengths) == 3
    assert shapes.nearest_batch([1, 2]) == 1


def test_figures(benchmark: types.ModuleType) -> None:
    """A ratio of times; of times per operation if operations are counted."""
    calls = {"a": lambda: None, "b": lambda: None}
    plain = sys.modules["_shapes"].Contest("x", calls, {"blocks": ("a", "b")})
    assert benchmark.figures(plain, {"a": 3.0, "b": 4.0}) == {"ms": {"a": 3.0, "b": 4.0}, "tflops": {}, "ratio": {"blocks": 0.75}}
    counted = sys.modules["_shapes"].Contest("x", calls, {"packed": ("a", "b")}, {"a": 600.0, "b": 1000.0})
    made = benchmark.figures(counted, {"a": 3.0, "b": 4.0})
    assert made == {"ms": {"a": 3.0, "b": 4.0}, "tflops": {"a": 200.0, "b": 250.0}, "ratio": {"packed": 1.25}}


def test_summaries_and_lines(benchmark: types.ModuleType) -> None:
    cells = [{"ratio": {"fp16": 0.5, "fp16 product": 1.0}}, {"ratio": {"fp16": 2.0}}, {"ratio": {"mask": 3.0}}]
    sums = benchmark.summaries(cells)
    assert list(sums) == ["fp16", "fp16 product", "mask"]
    assert sums["fp16"] == {"geometric_mean": 1.0, "smallest": 0.5, "largest": 2.0}
    assert benchmark.conclusion("fp16", sums["fp16"]) == "fp16: 0.500 to 2.000, geometric mean 1.000 (wanted: 0.97 or more)"
    assert benchmark.conclusion("mask", sums["mask"]) == "mask: 3.000 to 3.000, geometric mean 3.000"
    cell = {"section": "heads", "name": "d=64 S=1024 full", "ms": {"gqa": 1.5, "mha": 2.0}, "ratio": {"heads": 0.75}}
    words = " ".join(benchmark.line(cell | {"spread": 0.01}).split())
    assert words == "heads d=64 S=1024 full heads 0.750 0.010 gqa 1.5, mha 2.0"


@pytest.fixture
def run_program(
    benchmark: types.ModuleType, shapes: types.ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> Callable[..., dict]:
    """Run the program, with one call of each contender and made-up times; returns what it writes."""
    make_up_times(monkeypatch, benchmark)

    def run(*arguments: str) -> dict:
        out = tmp_path / "shapes.json"
        monkeypatch.setattr(sys, "argv", ["gpu_shapes.py", "--json", str(out), *arguments])
        assert benchmark.main() == 0
        return json.loads(out.read_text())

    return run


PEERS = {"bias": (" cudnn",), "mask": (" cudnn",), "dropout": (" fa2", " cudnn")}


def test_the_program_on_the_cpu(
    run_program: Callable[..., dict], shapes: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    data = run_program()
    assert data["setting"] == {"rounds": 5}
    assert len(data["cells"]) == 115
    assert list(data["summary"]) == [
        *("packed", "heads", "product d=128", "product d=256", "fp16", "fp16 product", "blocks"),
        *(
            f"{direction} {option}{peer}"
            for direction in ("forward", "backward")
            for option in shapes.OPTIONS
            for peer in ("", *PEERS.get(option, ()))
        ),
        *("shared", "few forward", "few backward"),
    ]
    assert data["summary"]["heads"] == {"geometric_mean": 0.5, "smallest": 0.5, "largest": 0.5}
    assert all(set(cell) == {"section", "name", "ms", "tflops", "ratio", "spread"} for cell in data["cells"])
    printed = capsys.readouterr().out
    assert "heads: 0.500 to 0.500" in printed
    assert len(printed.splitlines()) == 2 + 115 + 28


def test_some_sections_of_the_quick_set(run_program: Callable[..., dict]) -> None:
    data = run_program("--quick", "--only", "blocks", "packed")
    assert [cell["section"] for cell in data["cells"]] == ["blocks", "packed", "packed"]


def test_the_tables_have_a_line_for_each_figure(run_program: Callable[..., dict], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER.parent / "evidence")
    figures = [name for name in importlib.import_module("tables").SHAPES if not name.endswith(" fa3")]
    assert figures == list(run_program("--quick")["summary"])


@pytest.mark.parametrize("section", ["packed", "heads", "blocks", "options", "shared", "few"])
def test_a_wrong_result_is_not_timed(shapes: types.ModuleType, monkeypatch: pytest.MonkeyPatch, section: str) -> None:
    def wrong(right: Callable) -> Callable:
        def made(p: object, kernel: str | None, backend: str | None = None, **more: object) -> Callable:
            call = right(p, kernel, backend, **more)
            return call if backend else lambda: tuple(x * 1.1 for x in call())

        return made

    for contest in shapes.contests(section, quick=True):
        contest.check()
    for name in ("forward_libflash", "backward_libflash"):
        monkeypatch.setattr(shapes, name, wrong(getattr(shapes, name)))
    for direction, ours in shapes.OWN_CALLS.items():
        monkeypatch.setitem(shapes.OWN_CALLS, direction, wrong(ours))
    for contest in shapes.contests(section, quick=True):
        with pytest.raises(SystemExit, match="a row differs"):
            contest.check()


def test_one_wrong_sequence_is_seen(shapes: types.ModuleType) -> None:
    """The shortest and the longest sequence are compared, wherever they are."""
    lengths = [40, 7, 90]
    p, cu_seqlens = shapes.packed_problem(lengths, 64, True)
    assert cu_seqlens.tolist() == [0, 40, 47, 137]
    out = shapes.libflash.attention(p.q, p.k, p.v, causal=True, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
    shapes.compare_sequences("packed", p, lengths, out)
    for row, which in ((46, 1), (100, 2)):
        broken = out.clone()
        broken[row, 3] = 0
        with pytest.raises(SystemExit, match=f"packed, sequence {which}: a row differs"):
            shapes.compare_sequences("packed", p, lengths, broken)
