"""The paper benchmark's own arithmetic, tables and charts, on made-up results."""

from __future__ import annotations

import copy
import json
import pathlib
import re
import subprocess
import sys

import pytest
from benchmark_program import FOLDER, program

ROOT = pathlib.Path(__file__).resolve().parents[1]
METHODS = ("standard", "torch_plain", "flash1", "flash1_split", "fa2", "libflash")


report = program("_paper_report")


def speed_cell(direction: str, seqlen: int, causal: bool, ms: dict[str, float]) -> dict:
    return {"direction": direction, "head_dim": 64, "seqlen": seqlen, "causal": causal, "batch": 2, "heads": 8, "ms": dict(ms)}


def made_up() -> dict:
    """Results of every section; libflash is twice as fast as the faster FlashAttention-1, 1.5 times in backward."""
    forward = dict(zip(METHODS, (10.0, 12.0, 8.0, 4.0, 2.5, 2.0), strict=True))
    backward = dict(zip(METHODS, (30.0, 40.0, 20.0, 9.0, 6.5, 6.0), strict=True))
    speed = [
        speed_cell(direction, seqlen, causal, ms)
        for causal in (False, True)
        for seqlen in (1024, 4096)
        for direction, ms in (("forward", forward), ("backward", backward))
    ]
    traffic = [
        {"method": "standard", "gflop": 800.0, "gb_counted": 25.0, "gb_measured": 24.0, "ms": 20.0},
        {"method": "flash1", "gflop": 900.0, "gb_counted": 12.0, "gb_measured": None, "ms": 8.0},
        {"method": "libflash", "gflop": 900.0, "gb_counted": 9.0, "gb_measured": 1.5, "ms": 4.0},
    ]
    memory = [{"seqlen": n, "bytes": {"standard": 100 * n * n, "libflash": 5000 * n}} for n in (1024, 2048, 4096)]
    blocks = [
        {"direction": direction, "density": density, "ms": ms}
        for direction in ("forward", "backward")
        for density, ms in ((None, 4.0), (0.1, 0.5), (1.0, 4.2))
    ]
    decode = [
        {"seqlen": n, "us": {"unsplit": n / 100, "split": 10 + n / 1000}, "gb_per_s": {"unsplit": 10, "split": 900}}
        for n in (1024, 524288)
    ]
    setting = {"date": "2026-01-01", "gpu": "a GPU", "torch": "2", "libflash": "0", "traffic_shape": "batch 64"}
    return {"setting": setting, "speed": speed, "traffic": traffic, "memory": memory, "blocks": blocks, "decode": decode}


def test_both_passes_together_take_the_sum_of_their_times():
    speed = made_up()["speed"]
    work = 4 * 2 * 8 * 1024**2 * 64 / 1e9
    both = report.tflops(speed, "forward + backward")[64, False, 1024]
    assert both["libflash"] == pytest.approx(3.5 * work / 8.0)
    assert both["standard"] == pytest.approx(3.5 * work / 40.0)
    assert report.tflops(speed, "forward")[64, True, 1024]["libflash"] == pytest.approx(work / 2 / 2.0)


def test_a_method_without_one_of_the_passes_is_left_out_of_both():
    speed = made_up()["speed"]
    del speed[1]["ms"]["torch_plain"]
    assert "torch_plain" not in report.tflops(speed, "forward + backward")[64, False, 1024]
    assert "torch_plain" in report.tflops(speed, "forward")[64, False, 1024]


def test_ratios_and_verdict():
    """Against the faster of the two FlashAttention-1, and only where S is 2048 or more."""
    speed = made_up()["speed"]
    assert report.ratios(speed, "forward", "flash1")[64, False, 4096] == pytest.approx(4.0)
    text = report.verdict(speed)
    assert "forward: 2.00 times as fast as the faster FlashAttention-1 in the mean, 2.00 at least, 1.7 or more in 2 of 2" in text
    assert "backward: 1.50 times" in text
    assert "1.7 or more in 0 of 2" in text
    for cell in speed:
        if cell["seqlen"] == 1024:
            cell["ms"]["flash1"] = 0.1  # does not count
    assert report.verdict(speed) == text


def test_tables():
    texts = report.sections(made_up())
    assert list(texts) == ["speed", "traffic", "memory", "blocks", "decode"]
    assert "| d = 64, causal: FlashAttention-1 |" in texts["speed"]
    assert "| forward, against FlashAttention-1, heads shared | 2.0 to 2.0 | 2.0 to 2.0 |" in texts["speed"]
    assert "| standard attention | 800 | 25.0 | 24.0 | 20.00 | 1.0 |" in texts["traffic"]
    assert "| FlashAttention-1 | 900 | 12.0 | - | 8.00 | 2.5 |" in texts["traffic"]
    assert "| 4096 | 1678 | 20 |" in texts["memory"]
    assert texts["memory"].endswith("libflash's memory is linear in S.")
    assert "| forward | 0.50 (8.0x) | 4.20 (1.0x) | 4.00 |" in texts["blocks"]
    assert "| 524288 | 5242.9 | 534.3 | 9.8 | 900 |" in texts["decode"]


def test_quadratic_memory_is_called_so():
    data = made_up()
    for row in data["memory"]:
        row["bytes"]["libflash"] = row["bytes"]["standard"]
    assert not report.is_linear(data["memory"])
    assert "NOT linear" in report.sections(data)["memory"]
    assert "is not linear" in report.section(data, "charts")


def test_what_was_not_measured_is_left_out():
    data = made_up() | {"decode": [], "traffic": []}
    assert list(report.sections(data)) == ["speed", "memory", "blocks"]
    assert "decode" not in report.section(data, "charts")


def test_charts_are_drawn_and_small(tmp_path):
    pytest.importorskip("matplotlib")
    charts = program("_paper_charts")
    data = made_up()
    names = ["speed-forward", "speed-backward", "speed-forward-backward", "memory", "blocks", "decode"]
    drawn = charts.draw(data, tmp_path)
    assert [path.stem for path in drawn] == names
    for path in drawn:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size <= charts.LARGEST_BYTES
    figure = charts.speed(data["speed"], "forward")
    panels = [axes for axes in figure.axes if axes.get_title(loc="left")]
    assert [axes.get_title(loc="left") for axes in panels] == [
        "forward, head_dim 64, not causal",
        "forward, head_dim 64, causal",
    ]
    written = [text.get_text() for text in panels[0].texts]
    assert len(written) == 2 * len(METHODS)
    assert f"{report.tflops(data['speed'], 'forward')[64, False, 4096]['libflash']:.0f}" in written


def test_a_chart_that_is_too_large_is_refused(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    charts = program("_paper_charts")
    monkeypatch.setattr(charts, "LARGEST_BYTES", 100)
    with pytest.raises(ValueError, match=r"memory\.png has"):
        charts.save(charts.memory(made_up()["memory"]), tmp_path / "memory.png")


def run_paper(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, FOLDER / "paper.py", *arguments]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)


def test_results_are_written_once_and_then_checked(tmp_path):
    results, data = tmp_path / "RESULTS.md", tmp_path / "paper.json"
    results.write_text("before\n<!-- paper-tables -->\nold\n<!-- /paper-tables -->\nafter\n")
    data.write_text(json.dumps(made_up()))
    assert run_paper("--from", data, "--into", results, "--check").returncode == 1
    assert run_paper("--from", data, "--into", results).returncode == 0
    assert run_paper("--from", data, "--into", results, "--check").returncode == 0
    assert "charts/memory.png" in results.read_text()
    other = copy.deepcopy(made_up())
    other["speed"][0]["ms"]["libflash"] = 1.0
    data.write_text(json.dumps(other))
    assert run_paper("--from", data, "--into", results, "--check").returncode == 1
    results.write_text("no place")
    assert "paper-tables" in run_paper("--from", data, "--into", results).stderr


@pytest.fixture(scope="module")
def traffic():
    pytest.importorskip("torch")
    return program("_paper_traffic")


def test_traffic_is_counted(traffic):
    """The bytes for one head, by hand: S and P written and read once each, four tensors; for the others passes over key tiles."""
    cell = program("_cells").Cell("forward", "bfloat16", head_dim=64, seqlen=1024, causal=False, batch=1, heads=1)
    tensor, statistics = 1024 * 64, 4 * 1024
    assert traffic.standard_bytes(cell) == 2 * (4 * 1024**2 + 4 * tensor)
    assert traffic.flash1_bytes(cell) == 2 * 3 * tensor + 4 * (2 * tensor + 4 * statistics) + 3 * 8 * tensor
    assert traffic.libflash_bytes(cell) == 2 * 2 * tensor + statistics + 8 * 4 * tensor
    assert traffic.gflop("standard", cell) == pytest.approx(cell.gflop)
    both = [program("_cells").Cell(d, "bfloat16", 64, 1024, False, 1, 1) for d in ("forward", "backward")]
    assert sum(traffic.gflop("libflash", c) for c in both) == pytest.approx(3.5 * cell.gflop)
    assert sum(traffic.gflop("standard", c) for c in both) == pytest.approx(3 * cell.gflop)


def test_what_ncu_says_is_read(traffic):
    text = "\n".join(
        [
            "==PROF== Connected",
            '"ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum"',
            '"","","Mbyte","byte"',
            '"0","void standard_scores_kernel<64>(int)","1,000.5","500"',
            '"1","flash1_delta_kernel","2","0"',
            '"2","void forward_kernel<forward_sm80_bf16_d64>","3","1"',
            '"3","void standard_softmax_kernel","1","0"',
        ]
    )
    found = traffic.by_method(text)
    assert found == pytest.approx({"standard": 1001.5e6 + 500, "flash1": 2e6, "libflash": 3e6 + 1})


def test_every_speed_cell_is_there_once_and_has_both_baselines():
    pytest.importorskip("torch")
    speed = program("_paper_speed")
    cells = speed.cells(quick=False)
    assert len(set(cells)) == len(cells) == 2 * 2 * 6 * 2
    assert {c.batch * c.seqlen for c in cells} == {16384}
    assert set(speed.cells(quick=True)) < set(cells)
    contenders = program("_paper_contenders")
    registry = (ROOT / "libflash/cuda/kernels.table").read_text()
    for cell in cells:
        row = contenders.kernel(cell.direction, cell.head_dim)
        assert row.startswith(f"{cell.direction}_sm80_")  # FlashAttention-2, whatever libflash chooses
        assert re.search(rf"^{cell.direction} +sm80 +bf16 +{cell.head_dim} ", registry, re.MULTILINE)
        names = list(contenders.contenders(cell))
        assert names[-1] == "libflash"
        assert {"standard", "flash1", "flash1_split", "fa2"} < set(names)
        assert set(names) <= set(report.NAMES)


def test_block_masks_have_their_density_and_the_diagonal():
    pytest.importorskip("torch")
    masks, blocks = program("_block_masks"), program("_paper_blocks")
    for density in blocks.DENSITIES:
        mask = masks.block_mask(density, blocks.SEQLEN)[0, 0]
        assert mask.diagonal().all()
        assert mask.float().mean().item() == pytest.approx(density, abs=1 / (blocks.SEQLEN // masks.BLOCK))


@pytest.mark.parametrize("seqlen", [100, 1000])
def test_decode_is_compared_and_runs_on_the_cpu(monkeypatch, seqlen):
    """The CPU in place of a GPU: both calls exist, and a wrong one is not timed."""
    torch = pytest.importorskip("torch")
    decode = program("_paper_decode")
    monkeypatch.setattr(decode, "DEVICE", "cpu")
    made = decode.calls(seqlen)
    assert list(made) == ["unsplit", "split"]
    assert torch.equal(made["unsplit"]().isnan(), torch.zeros_like(made["unsplit"](), dtype=torch.bool))
    right = decode.libflash.decode
    monkeypatch.setattr(decode.libflash, "decode", lambda *args, **options: right(*args, **options) * 1.1)
    with pytest.raises(SystemExit, match="a row differs"):
        decode.calls(seqlen)


def test_without_a_decode_kernel_the_table_is_left_out(monkeypatch, capsys):
    pytest.importorskip("torch")
    decode = program("_paper_decode")
    monkeypatch.setattr(decode, "DEVICE", "cpu")

    def refused(*_, **__):
        raise decode.libflash.UnsupportedError("no kernel for decode")

    monkeypatch.setattr(decode.libflash, "decode", refused)
    assert list(decode.measure(quick=True)) == []
    assert "no CUDA decode kernel in this build: no kernel for decode" in capsys.readouterr().err


def test_without_a_gpu_it_is_said():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = run_paper("--quick")
    assert done.returncode != 0
    assert done.stderr.strip().endswith("no GPU")
