"""gpu_derivatives.py: its cells, its verdicts, and its calls with the CPU in place of a GPU; cpu_derivatives.py."""

from __future__ import annotations

import json
import pathlib
import sys
import types
from collections.abc import Callable

import pytest
from benchmark_program import cells_on_the_cpu, make_up_times, program

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # in torch.func.jvp
COUNTS = {"jvp": 24, "double": 12, "math": 6, "float64": 6, "wide": 2, "stats": 12, "triton": 6}
SMALL = {
    "TOKENS": 64,
    "WIDTH": 512,
    "JVP_SEQLENS": (16, 32),
    "LONG": 32,
    "DOUBLE_SEQLENS": (16, 32),
    "MATH_TOKENS": 64,
    "MATH_SEQLEN": 32,
    "DOUBLES_TOKENS": 32,
    "DOUBLES_SEQLEN": 32,
    "SIDE": 32,
    "WIDE_SEQLEN": 32,
    "STATISTICS_SEQLENS": (32, 64),
}


@pytest.fixture
def benchmark() -> types.ModuleType:
    pytest.importorskip("torch")
    return program("gpu_derivatives")


@pytest.fixture
def cells(benchmark: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Small cells on the CPU, with another function in place of the Triton kernel, which is not installed."""
    module = cells_on_the_cpu(monkeypatch, "_derivatives", SMALL)
    package, kernel = (types.ModuleType(name) for name in ("jvp_flash_attention", "jvp_flash_attention.jvp_attention"))
    kernel.JVPAttn = types.SimpleNamespace(fwd_dual=module.plain)
    for x in (package, kernel):
        monkeypatch.setitem(sys.modules, x.__name__, x)
    monkeypatch.setitem(module.SECTIONS, "triton", module.triton_kernel)
    return module


def test_every_cell_is_there_once(benchmark: types.ModuleType) -> None:
    for section in benchmark.SECTIONS:
        names = [name for name, _ in benchmark.makers(section, False)]
        assert len(set(names)) == len(names) == COUNTS[section]
        assert {name for name, _ in benchmark.makers(section, True)} <= set(names)


def test_operations_are_counted_exactly(benchmark: types.ModuleType) -> None:
    module = sys.modules["_derivatives"]
    full, causal = (module.cell(128, 3, mask, tokens=6) for mask in (False, True))
    assert module.exact_gflop(full, 2) == pytest.approx(4 * 2 * 16 * 128 * 9 / 1e9)
    assert module.exact_gflop(causal, 5) == pytest.approx(10 * 2 * 16 * 128 * 6 / 1e9)


def test_conclusions(benchmark: types.ModuleType) -> None:
    sums = {"geometric_mean": 3.0, "smallest": 2.5, "largest": 3.4}
    assert benchmark.conclusion("double", sums) == "double: 2.500 to 3.400, geometric mean 3.000 (wanted: at most 3.3; missed)"
    assert benchmark.verdict("double", sums | {"largest": 3.3}) == "met"
    assert benchmark.verdict("math", sums) == "missed"
    assert benchmark.verdict("math", sums | {"smallest": 5.0}) == "met"
    assert benchmark.conclusion("double, both", sums) == "double, both: 2.500 to 3.400, geometric mean 3.000"


@pytest.fixture
def run_program(
    benchmark: types.ModuleType, cells: types.ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> Callable[..., tuple[int, dict]]:
    """Run the program, with one call of each contender and made-up times; returns its status and what it writes."""
    make_up_times(monkeypatch, benchmark)

    def run(*arguments: str) -> tuple[int, dict]:
        out = tmp_path / "derivatives.json"
        monkeypatch.setattr(sys, "argv", ["gpu_derivatives.py", "--json", str(out), *arguments])
        return benchmark.main(), json.loads(out.read_text())

    return run


def test_the_program_on_the_cpu(
    benchmark: types.ModuleType, run_program: Callable[..., tuple[int, dict]], capsys: pytest.CaptureFixture[str]
) -> None:
    status, data = run_program("--quick")
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert data["setting"] == {"rounds": 5}
    assert all(cell["spread"] == 0.012 for cell in data["cells"])
    assert {cell["section"] for cell in data["cells"]} == set(benchmark.SECTIONS)
    assert set(benchmark.WANTED) - set(data["summary"]) == {"jvp S<2048"}
    assert "double / sm80: " in printed


def test_a_refused_call_does_not_hide_the_others(
    cells: types.ModuleType,
    run_program: Callable[..., tuple[int, dict]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A call of a cell is refused; and all of a cell."""
    right = cells.forward_libflash

    def refusing(p: object, kernel: str | None, backend: str | None = None, **more: object) -> Callable:
        def refuse() -> None:
            raise cells.libflash.UnsupportedError("no entropy\nat all")

        return refuse if "entropy" in more else right(p, kernel, backend, **more)

    def broken(causal: bool) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(cells, "forward_libflash", refusing)
    monkeypatch.setitem(cells.SECTIONS, "wide", broken)
    status, data = run_program("--quick", "--only", "wide", "stats")
    assert status == 1
    assert [set(cell["ratio"]) for cell in data["cells"]][:3] == [set(), set(), {"row maxima d=64", "head maxima d=64"}]
    assert data["cells"][2]["failed"] == {"rows, entropy": "UnsupportedError: no entropy"}
    assert "all left out: RuntimeError: out of memory" in capsys.readouterr().out


@pytest.mark.parametrize("section", COUNTS)
def test_a_wrong_result_is_not_timed(
    cells: types.ModuleType, run_program: Callable[..., tuple[int, dict]], monkeypatch: pytest.MonkeyPatch, section: str
) -> None:
    right = cells.compare

    def wrong(what: str, mine: tuple, wanted: tuple, tolerance: float) -> None:
        right(what, [x * 1.1 for x in mine], wanted, tolerance)

    monkeypatch.setattr(cells, "compare", wrong)
    status, data = run_program("--quick", "--only", section)
    assert status == 1
    assert all("differs by 0.1" in cell["failed"]["all"] for cell in data["cells"])


def test_the_program_for_the_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its figures are ratios of times; what is above a limit is missed; a wrong result is not timed."""
    torch, benchmark, out = pytest.importorskip("torch"), program("cpu_derivatives"), tmp_path / "derivatives.json"
    some = [sys.modules["_cells"].Cell("forward", dtype, 16, 24, True, 1, 2) for dtype in ("float32", "bfloat16")]
    monkeypatch.setattr(benchmark, "cells", lambda quick: some)
    monkeypatch.setattr(benchmark, "LIMITS", {"jvp": 1e9, "second": 0.0})
    monkeypatch.setattr(sys, "argv", ["cpu_derivatives.py", "--rounds", "1", "--json", str(out)])
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(benchmark.libflash, "set_num_threads", lambda threads: None)
    ticks = iter(range(10**6))
    monkeypatch.setattr(benchmark.time, "process_time", lambda: float(next(ticks)))
    assert benchmark.main() == 1
    printed = capsys.readouterr().out
    assert "jvp: geometric mean 1.00, largest 1.00 (wanted: at most 1000000000.0; met)" in printed
    assert "second: geometric mean 1.00, largest 1.00 (wanted: at most 0.0; missed)" in printed
    assert [row["ratio"] for row in json.loads(out.read_text())["cells"]] == [{"jvp": 1.0, "second": 1.0}] * 2
    right = benchmark.plain
    monkeypatch.setattr(benchmark, "plain", lambda *x: 1.2 * right(*x))
    with pytest.raises(AssertionError, match="tangent: a row of result"):
        benchmark.main()
