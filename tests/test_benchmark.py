"""The benchmark programs' own arithmetic, and the table they make for the README."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from collections.abc import Callable

import pytest
from benchmark_program import FOLDER, program

import libflash


def cell(direction: str, ratio: float, **changes) -> dict:
    values = {"dtype": "float32", "head_dim": 64, "seqlen": 512, "causal": False, "batch": 2, "heads": 8}
    figures = {"torch_ms": 10.0, "libflash_ms": 5.0, "torch_gflops": 50.4, "libflash_gflops": 100.6, "ratio": ratio}
    return {"direction": direction} | values | figures | changes


def results(cells: list[dict]) -> dict:
    setting = {"date": "2026-01-01", "cpu": "a CPU", "isa": "avx2", "threads": 2, "rounds": 3, "torch": "2", "libflash": "0"}
    mean = {"all": 1.414, "forward float32": 2.0, "backward float32": 1.0}
    return {"setting": setting, "summary": {"geometric_mean": mean, "worst": {"ratio": 1.0, "cell": ""}}, "cells": cells}


def test_work_is_counted_as_in_the_papers():
    cells = program("_cells")
    forward = cells.Cell("forward", "float32", head_dim=64, seqlen=1000, causal=False, batch=2, heads=3)
    assert forward.gflop == pytest.approx(4 * 2 * 3 * 1000 * 1000 * 64 / 1e9)
    backward = cells.Cell("backward", "float32", head_dim=64, seqlen=1000, causal=True, batch=2, heads=3)
    assert backward.gflop == pytest.approx(forward.gflop * 2.5 / 2)


def test_every_cell_of_the_table_is_there_once():
    cells = program("_cells").cells(quick=False)
    assert len(set(cells)) == len(cells) == 2 * 2 * 3 * 2 * 2
    assert {c.heads * c.head_dim for c in cells if c.seqlen < 8192} == {512}
    assert min(c.heads for c in cells) >= 2


def test_summary():
    pytest.importorskip("torch")
    made = program("cpu_attention").summary([cell("forward", 2.0), cell("forward", 8.0), cell("backward", 0.5)])
    assert made["geometric_mean"] == {"all": 2.0, "forward float32": 4.0, "backward float32": 0.5}
    assert made["worst"]["ratio"] == 0.5
    assert made["worst"]["cell"].startswith("backward")


def test_a_wrong_result_is_not_timed():
    torch = pytest.importorskip("torch")
    benchmark = program("cpu_attention")
    one = program("_cells").Cell("forward", "float32", head_dim=8, seqlen=4, causal=False, batch=1, heads=2)
    right = benchmark.contest(one)
    benchmark.compare(one, right)
    wrong = benchmark.Contest(torch=right.torch, libflash=lambda: [torch.zeros(1, 4, 2, 8)])
    with pytest.raises(SystemExit, match="differs"):
        benchmark.compare(one, wrong)


def test_both_contenders_compute_the_same_gradients():
    pytest.importorskip("torch")
    benchmark = program("cpu_attention")
    for causal in (False, True):
        one = program("_cells").Cell("backward", "float32", head_dim=16, seqlen=40, causal=causal, batch=2, heads=3)
        assert benchmark.run(one, rounds=1)["ratio"] > 0


def gpu_cell(ratio: dict[str, float], **changes) -> dict:
    values = {"direction": "forward", "dtype": "bfloat16", "head_dim": 64, "seqlen": 512, "causal": False, "batch": 2, "heads": 8}
    return values | {"ratio": ratio} | changes


def test_gpu_cells_have_the_same_number_of_tokens_and_channels():
    cells = program("_cells")
    found = cells.gpu_cells(["bfloat16"], ["forward"], quick=False)
    assert len(set(found)) == len(found) == 3 * 2 * 6
    assert {c.batch * c.seqlen for c in found} == {16384}
    assert {c.heads * c.head_dim for c in found} == {2048}
    assert set(cells.gpu_cells(["bfloat16"], ["forward"], quick=True)) < set(found)
    floats = cells.gpu_cells(["float32"], ["forward", "backward"], quick=False)
    problems = {(c.direction, c.head_dim, c.seqlen, c.causal) for c in floats}
    assert len(problems) == len(floats) == 16
    assert {(c.head_dim, c.seqlen) for c in floats} == {(64, 1024), (64, 4096), (128, 1024), (128, 4096)}
    assert set(cells.gpu_cells(["float32"], ["forward"], quick=True)) < set(floats)
    assert {(c.batch * c.seqlen, c.heads * c.head_dim) for c in floats} == {(16384, 2048)}


def test_gpu_summaries_are_over_the_cells_that_the_peer_knows():
    pytest.importorskip("torch")
    sums = program("gpu_attention").summaries(
        [gpu_cell({"fa2": 2.0, "cudnn": 0.5}), gpu_cell({"fa2": 8.0}, head_dim=256), gpu_cell({"fa2": 4.0, "cudnn": 2.0})]
    )
    assert sums["fa2"]["geometric_mean"]["all"] == 4.0
    assert sums["fa2"]["geometric_mean"]["forward bfloat16 d=256"] == 8.0
    assert sums["cudnn"]["geometric_mean"]["all"] == 1.0
    assert sums["cudnn"]["worst"]["ratio"] == 0.5


def test_gpu_figures():
    pytest.importorskip("torch")
    one = program("_cells").Cell("forward", "bfloat16", head_dim=100, seqlen=1000, causal=True, batch=5, heads=2)
    benchmark = program("gpu_attention")
    made = benchmark.figures(one, {"fa2": 4.0, "libflash": 2.0})
    assert made == {"ms": {"fa2": 4.0, "libflash": 2.0}, "tflops": {"fa2": 0.5, "libflash": 1.0}, "ratio": {"fa2": 2.0}}
    held = benchmark.figures(one, {"fa2": 4.0, "cudnn": 3.0, "libflash sm80": 4.0, "libflash": 2.0})
    assert held["ratio"] == {"fa2": 1.0, "cudnn": 1.5}
    assert held["tflops"]["libflash sm80"] == 0.5
    alone = benchmark.figures(one, {"efficient": 3.0, "libflash": 2.0})
    assert alone["ratio"] == {"efficient": 1.5}
    cell = {"direction": "forward", "dtype": "float32", "head_dim": 64, "seqlen": 1000, "causal": True, "batch": 5, "heads": 2}
    assert benchmark.line(cell | alone | {"spread": 0.1}).split()[-11:] == [
        *("-", "-", "0.7", "-", "-", "1.0"),
        *("-", "-", "1.5", "-", "0.1"),
    ]
    third = benchmark.figures(one, {"fa3": 3.0, "libflash sm80": 4.0, "libflash": 2.0})
    assert third["ratio"] == {"fa3": 1.5}


def test_gpu_results_are_compared_row_by_row():
    """One wrong row among rows of very different norms, and NaN."""
    torch = pytest.importorskip("torch")
    benchmark = program("gpu_attention")
    one = program("_cells").Cell("forward", "bfloat16", head_dim=64, seqlen=50, causal=True, batch=1, heads=2)
    sizes = torch.logspace(0, -4, 50).reshape(1, 50, 1, 1)
    right = (sizes * torch.randn(1, 50, 2, 64, generator=torch.Generator().manual_seed(0))).bfloat16()
    benchmark.compare(one, {"fa2": lambda: (right,), "libflash": lambda: (right * 1.004,)})
    for value in (right[0, 48, 1], torch.nan):
        wrong = right.clone()
        wrong[0, 49, 1] = value
        with pytest.raises(SystemExit, match="out: a row differs from fa2"):
            benchmark.compare(one, {"fa2": lambda: (right,), "libflash": lambda wrong=wrong: (wrong,)})


@pytest.fixture
def on_the_cpu(monkeypatch):
    """The GPU benchmark with the CPU in place of a GPU: PyTorch has only its flash kernel there."""
    torch = pytest.importorskip("torch")
    benchmark = program("gpu_attention")
    contenders = sys.modules["_gpu_contenders"]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(contenders, "DEVICE", "cpu")
    monkeypatch.setattr(contenders, "FAMILY", "cpu")
    monkeypatch.setitem(contenders.SDPA, "efficient", contenders.SDPA["fa2"])
    return benchmark


def calls_of(benchmark: types.ModuleType, cell: object) -> dict[str, Callable]:
    return benchmark.calls_that_work(benchmark.contenders(benchmark.problem(cell), None))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_gpu_contenders_compute_the_same(on_the_cpu, capsys, direction, dtype, causal):
    """The calls work repeatedly and do not change their inputs."""
    one = program("_cells").Cell(direction, dtype, head_dim=64, seqlen=300, causal=causal, batch=2, heads=4)
    calls = calls_of(on_the_cpu, one)
    assert list(calls) == ["fa2", "libflash"]
    assert "cudnn: left out" in capsys.readouterr().err
    for _ in range(2):
        on_the_cpu.compare(one, calls)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_gpu_contenders_in_float32(on_the_cpu, direction, causal):
    """PyTorch's memory-efficient attention only; a result with the errors of tf32 is not timed."""
    torch = pytest.importorskip("torch")
    one = program("_cells").Cell(direction, "float32", head_dim=64, seqlen=300, causal=causal, batch=2, heads=4)
    calls = calls_of(on_the_cpu, one)
    assert list(calls) == ["efficient", "libflash"]
    on_the_cpu.compare(one, calls)
    noise = torch.Generator().manual_seed(0)
    wrong = tuple(x * (1 + 2**-11 * torch.randn(x.shape, generator=noise)) for x in calls["libflash"]())
    with pytest.raises(SystemExit, match="a row differs from efficient"):
        on_the_cpu.compare(one, calls | {"libflash": lambda: wrong})


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_gpu_contenders_where_libflash_chooses_other_rows(on_the_cpu, monkeypatch, direction):
    """libflash is timed twice: with its choice, and restricted to the sm80 kernels; once if a kernel is named."""
    module = sys.modules["_gpu_contenders"]
    one = program("_cells").Cell(direction, "bfloat16", head_dim=64, seqlen=100, causal=True, batch=2, heads=4)
    p = module.problem(one)
    assert module.own_choice(p) == "cpu"
    monkeypatch.setattr(module, "own_choice", lambda _: "sm90")
    calls = calls_of(on_the_cpu, one)
    assert list(calls) == ["fa2", "libflash sm80", "libflash"]
    on_the_cpu.compare(one, calls)
    wrong = tuple(-x for x in calls["libflash"]())
    with pytest.raises(SystemExit, match="a row differs from libflash sm80"):
        on_the_cpu.compare(one, {name: calls[name] for name in ("libflash sm80",)} | {"libflash": lambda: wrong})
    assert "libflash sm80" not in module.contenders(p, f"{direction}_cpu_generic")
    monkeypatch.setattr(module, "FAMILY", "sm80")
    with pytest.raises(libflash.UnsupportedError, match="sm80"):  # libflash must support the cell
        calls_of(on_the_cpu, one)


@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
def test_gpu_gradients_are_compared_row_by_row(on_the_cpu, name):
    one = program("_cells").Cell("backward", "bfloat16", head_dim=64, seqlen=300, causal=True, batch=2, heads=4)
    calls = calls_of(on_the_cpu, one)
    right = dict(zip(("dq", "dk", "dv"), (x.clone() for x in calls["libflash"]()), strict=True))
    for change in (lambda x: x.neg_(), lambda x: x.mul_(1.1), lambda x: x.fill_(float("nan"))):
        wrong = right | {name: right[name].clone()}
        change(wrong[name][1, 150, 3])
        with pytest.raises(SystemExit, match=f"{name}: a row differs from fa2"):
            on_the_cpu.compare(one, calls | {"libflash": lambda wrong=wrong: tuple(wrong.values())})


@pytest.mark.parametrize(("error", "refused"), [(1e-5, False), (1e-3, True)])
def test_gpu_gradients_that_are_nothing_are_held_against_the_usual_row(on_the_cpu, error, refused):
    """The first row of a causal dq is 0, and the computed one a rounding error, for which there is no relative tolerance."""
    torch = pytest.importorskip("torch")
    one = program("_cells").Cell("backward", "float32", head_dim=64, seqlen=50, causal=True, batch=1, heads=2)
    right = torch.randn(1, 50, 2, 64, generator=torch.Generator().manual_seed(0))
    right[:, 0] *= 1e-6
    wrong = right.clone()
    wrong[0, 0, 1] += error
    calls = {"efficient": lambda: (right,) * 3, "libflash": lambda: (wrong, right, right)}
    if refused:
        with pytest.raises(SystemExit, match="dq: a row differs from efficient"):
            on_the_cpu.compare(one, calls)
    else:
        on_the_cpu.compare(one, calls)


def test_gpu_cells_that_are_timed(on_the_cpu, monkeypatch):
    """By default all of bf16 and some of fp16 and fp32, both directions."""

    def kinds(*arguments: str) -> tuple[int, set[str], set[str]]:
        monkeypatch.setattr(sys, "argv", ["gpu_attention.py", *arguments])
        cells = on_the_cpu.wanted(on_the_cpu.parse())
        assert len(set(cells)) == len(cells)
        return len(cells), {cell.direction for cell in cells}, {cell.dtype for cell in cells}

    both, types = {"forward", "backward"}, {"bfloat16", "float16", "float32"}
    assert kinds() == (2 * (36 + 8 + 8), both, types)
    assert kinds("--quick") == (2 * (8 + 8 + 4), both, types)
    assert kinds("--dtype", "fp32") == (2 * 8, both, {"float32"})
    assert kinds("--dtype", "fp16") == (2 * 36, both, {"float16"})
    assert kinds("--dtype", "bf16", "--direction", "backward") == (36, {"backward"}, {"bfloat16"})
    assert kinds("--dtype", "bf16", "--kernel", "backward_sm80_bf16_d64") == (36, {"backward"}, {"bfloat16"})


def test_table_puts_forward_and_backward_side_by_side():
    text = program("table").table(results([cell("forward", 2.0), cell("backward", 1.0), cell("forward", 1.5, causal=True)]))
    rows = [line for line in text.splitlines() if line.startswith("| fp32")]
    assert rows == [
        "| fp32 | 64 | 512 | no | 50 | 101 | 2.00 | 50 | 101 | 1.00 |",
        "| fp32 | 64 | 512 | yes | 50 | 101 | 1.50 | - | - | - |",
    ]
    assert "1.41 (forward fp32 2.00, backward fp32 1.00)" in text


def run_table(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, FOLDER / "table.py", *arguments]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)


def test_results_are_written_once_and_then_checked(tmp_path):
    document, data = tmp_path / "RESULTS.md", tmp_path / "cpu.json"
    document.write_text("before\n<!-- cpu-table -->\nold\n<!-- /cpu-table -->\nafter\n")
    data.write_text(json.dumps(results([cell("forward", 2.0)])))
    assert run_table(data, "--into", document, "--check").returncode == 1
    assert "old" in document.read_text()
    assert run_table(data, "--into", document).returncode == 0
    assert run_table(data, "--into", document, "--check").returncode == 0
    written = document.read_text()
    assert written.startswith("before\n<!-- cpu-table -->\nGFLOP/s on a CPU")
    assert written.endswith("<!-- /cpu-table -->\nafter\n")
    document.write_text(written.replace("2.00", "3.00"))
    assert run_table(data, "--into", document, "--check").returncode == 1


def test_derivatives_have_a_table_of_their_own(tmp_path):
    document, data = tmp_path / "RESULTS.md", tmp_path / "cpu-derivatives.json"
    document.write_text("<!-- cpu-derivatives-table -->\n<!-- /cpu-derivatives-table -->\n")
    setting = {"date": "2026-01-02", "cpu": "a CPU", "isa": "avx2", "threads": 1, "rounds": 5}
    cells = [{"cell": "float32 d=64 S=512 full", "ms": {}, "ratio": {"jvp": 2.5, "second": 3.25}}]
    data.write_text(json.dumps({"setting": setting, "summary": {"jvp": 2.5, "second": 3.25}, "cells": cells}))
    assert run_table(data, "--into", document).returncode == 0
    text = document.read_text()
    assert "| float32 d=64 S=512 full | 2.50 | 3.25 |" in text
    assert "tangent / forward 2.50 (at most 3.1), both tangents / backward 3.25 (at most 3.2)." in text
    document.write_text(text.replace("3.25", "3.15"))
    assert run_table(data, "--into", document, "--check").returncode == 1


def conformance_run(target: str, held: int, *failures: dict) -> dict:
    counts = {"holds": held, "fails": len(failures), "not offered": 3, "not run": 0, "vacuous": 0, "worst": 0.9}
    ratios = {"problems": held, "outside": 0, "t1": 0.5, "t2_row": 0.9, "t2": 0.25, "t3": 0.0}
    about = {"conformance": 1, "target": target, "versions": {"x": "1.0"}, "device": "cpu", "date": "2026-01-02"}
    found = {"groups": {"accuracy": counts}, "tensors": {"o": ratios}, "failures": list(failures), "not_offered": {"bias": 3}}
    return about | found | {"chosen": held + 5, "ran": held + 4, "seconds": 12.6}


def test_conformance_has_a_column_for_each_target(tmp_path):
    document = tmp_path / "RESULTS.md"
    document.write_text("<!-- conformance-table -->\n<!-- /conformance-table -->\n")
    leak = [{"group": "NaN and infinity", "name": f"hidden_keys-{n}", "worst": 0.0, "findings": ["o: changed"]} for n in range(2)]
    far = {"group": "accuracy", "name": "size-3x3", "worst": 2.5, "findings": ["o: T1"]}
    files = []
    for run in (conformance_run("right", 7), conformance_run("wrong", 4, far, *leak)):
        files.append(tmp_path / f"{run['target']}.json")
        files[-1].write_text(json.dumps(run))
    assert run_table(*files, "--into", document).returncode == 0
    assert run_table(*files, "--into", document, "--check").returncode == 0
    lines = document.read_text().splitlines()
    assert "| | right | wrong |" in lines
    assert "| results inside the error bounds | 7 of 7 | 4 of 7 |" in lines
    assert "| decode | - | - |" in lines
    assert "| seconds | 13 | 13 |" in lines
    assert "| largest error over its limit: o | 0.90 | 0.90 |" in lines
    assert "- wrong fails: results inside the error bounds (1, up to 2.5), hidden keys (2)." in lines
    assert not any(line.startswith("- right") for line in lines)
    assert run_table(files[0], "--into", document, "--check").returncode == 1


@pytest.mark.parametrize("text", ["", "<!-- cpu-table -->", "<!-- /cpu-table --><!-- cpu-table -->", "<!-- cpu-table -->" * 2])
def test_a_readme_without_the_place_is_refused(tmp_path, text):
    (tmp_path / "RESULTS.md").write_text(text)
    (tmp_path / "cpu.json").write_text(json.dumps(results([cell("forward", 2.0)])))
    done = run_table(tmp_path / "cpu.json", "--into", tmp_path / "RESULTS.md")
    assert done.returncode != 0
    assert "<!-- cpu-table -->" in done.stderr
    assert (tmp_path / "RESULTS.md").read_text() == text


def test_decode_cells_and_their_bytes():
    pytest.importorskip("torch")
    benchmark = program("gpu_decode")
    found = benchmark.cells(quick=False)
    assert len(set(found)) == len(found) == 3 * 7
    assert set(benchmark.cells(quick=True)) < set(found)
    cell = benchmark.DecodeCell(32, 8, 2, 1000)
    assert cell.bytes == 2 * 2 * 1000 * 8 * 128 * 2
    made = benchmark.figures(cell, {"libflash": 0.004, "paged": 0.005, "cudnn": 0.006})
    assert made["us"] == {"libflash": 4.0, "paged": 5.0, "cudnn": 6.0}
    assert made["tb_per_s"]["libflash"] == 2.05
    assert made["ratio"] == {"cudnn": 1.5}


def test_decode_is_compared_before_it_is_timed(monkeypatch: pytest.MonkeyPatch):
    """On the CPU all calls give the same result; a wrong one stops the program."""
    torch = pytest.importorskip("torch")
    benchmark = program("gpu_decode")
    monkeypatch.setattr(benchmark, "DEVICE", "cpu")
    cell = benchmark.DecodeCell(4, 2, 2, 64)
    calls = benchmark.calls_of(cell, None)
    assert {"libflash", "lengths", "paged", "append"} <= set(calls)
    benchmark.compare(cell, calls)
    wrong = calls["paged"]() + 0.1
    with pytest.raises(SystemExit, match="paged differs"):
        benchmark.compare(cell, calls | {"paged": lambda: wrong})
    assert torch.is_tensor(wrong)


def test_serving_cells_and_their_work():
    pytest.importorskip("torch")
    benchmark = program("gpu_serving")
    found = benchmark.cells()
    assert {cell.kind for cell in found} == set(benchmark.KINDS)
    assert len({(cell.kind, cell.name) for cell in found}) == len(found)
    parts = sys.modules["_serving_cells"]
    chunk = parts.Cell("chunk", "", (parts.Sequence(3, 10),))
    assert chunk.operations == 4 * 32 * 128 * (8 + 9 + 10)
    assert chunk.bytes == 2 * 2 * 8 * 128 * 10
    latent = parts.Cell("mla", "", parts.decodes(2, 10), heads=16)
    assert latent.operations == 2 * 2 * 16 * (576 + 512) * 10
    assert latent.bytes == 2 * 2 * 576 * 10
    assert parts.Cell("prefix", "", parts.decodes(3, 10), shared=8).bytes == 2 * 2 * 8 * 128 * (8 + 3 * 2)
    lengths = [s.keys for s in parts.log_uniform(256, 100, 100_000)]
    assert 100 <= min(lengths) < 110
    assert 90_000 < max(lengths) <= 100_000


SERVING_ROWS = {"chunk": (20,), "mixed": (20, 1), "tree": (9, 9), "invariant": (20, 1)}


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch):
    """The program with the CPU in place of a GPU, two copies of each input."""
    pytest.importorskip("torch")
    benchmark = program("gpu_serving")
    monkeypatch.setattr(sys.modules["_serving_cells"], "DEVICE", "cpu")
    monkeypatch.setattr(sys.modules["_serving_cells"], "copies_of", lambda cell: 2)
    return benchmark


def serving_cell(kind: str, code: str = ""):
    parts = sys.modules["_serving_cells"]
    rows = SERVING_ROWS.get(kind, (1, 1))
    sequences = tuple(parts.Sequence(n, 50) for n in rows)
    return parts.Cell(kind, "small", sequences, code=code, shared=32 if kind == "prefix" else 0, wanted_ms=0.25)


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        *(("chunk", ""), ("mixed", ""), ("lengths", ""), ("tree", ""), ("codes", "e4m3"), ("codes", "int8"), ("mla", "")),
        *(("invariant", ""), ("append", ""), ("append", "e4m3"), ("append", "int8"), ("prefix", "")),
    ],
)
def test_serving_calls_agree_on_the_cpu(serving, kind: str, code: str):
    """Small cells: every contender runs, and what can be compared has the same result."""
    torch = pytest.importorskip("torch")
    one = serving_cell(kind, code)
    calls, failed = serving.that_work(serving.contenders(one))
    assert set(failed) <= {"efficient", "cudnn"}  # of PyTorch, not on a CPU
    serving.compare(one, calls)
    results = {name: [call() for call in copies] for name, copies in calls.items()}
    assert all(bool(torch.isfinite(x.float()).all()) for found in results.values() for x in found)
    assert serving.verdict(one, {name: 2.0**-i for i, name in enumerate(calls)})[1] > 0
    for peer in serving.SAME_RESULT.get(kind, ()):
        if peer in calls:
            wrong = [lambda peer=peer: results[peer][0] + 0.1]
            with pytest.raises(SystemExit, match="differs"):
                serving.compare(one, calls | {"call": wrong})
    if kind == "codes":
        assert torch.allclose(results["call"][0].float(), results["bf16"][0].float(), atol=0.1)


def test_serving_goes_on_after_a_refusal(serving, monkeypatch: pytest.MonkeyPatch):
    """A peer's is left out; the call's own is the result of the cell."""
    one = serving_cell("append")
    monkeypatch.setattr(serving, "medians", lambda calls, rounds: ({name: 0.5**i for i, name in enumerate(calls)}, 0.01))
    done = serving.attempt(one, 1)
    assert done["figure"] == 500.0
    assert "us more than the plain call, <= 2" in serving.lines(done)[0]

    def refuse():
        raise libflash.UnsupportedError("no\nmore")

    monkeypatch.setitem(sys.modules["_serving_cells"].CALLS, "append", lambda cell, steps: {"call": [refuse]})
    refused = serving.attempt(one, 1)
    assert " ".join(serving.lines(refused)[0].split()) == "append small call left out: UnsupportedError: no"
    latent = serving.attempt(serving_cell("mla"), 1)
    assert latent["figure"] == 1.0
    assert len(serving.lines(latent)) == 1 + len(latent["failed"])


def test_serving_conclusion_and_choice_of_cells(serving):
    results = [{"kind": "invariant", "figure": 1.0}, {"kind": "invariant", "figure": 4.0}, {"kind": "invariant"}]
    assert serving.conclusion(results) == ["invariant: geometric mean 2.000 (<= 1.05)"]
    assert serving.conclusion([{"kind": "tree", "figure": 2.0}]) == []
    some = [cell for cell in serving.cells() if serving.has(cell, ["mla", "prefix"])]
    assert [cell.kind for cell in some] == ["mla", "mla", "prefix"]
    assert {cell.kind for cell in serving.cells() if serving.has(cell, ["chunk", "append", "B=8"])} == {"append"}
