"""The tables of RESULTS.md and the README's summary."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import record
import summary
import tables
from made_up import evidence

CPU_CELL = {"direction": "forward", "dtype": "float32", "head_dim": 64, "seqlen": 512, "causal": False}
CPU = {
    "setting": {"cpu": "EPYC", "torch": "2.13"},
    "cells": [
        CPU_CELL | {"torch_gflops": 10.0, "libflash_gflops": 40.0},
        CPU_CELL | {"torch_gflops": 10.0, "libflash_gflops": 20.0, "causal": True},
    ],
}


def test_rows_of_the_speed_tables() -> None:
    """libflash's choice against cuDNN, sm80 kernels against FlashAttention-2; not for float32."""
    made = tables.contents({"a.json": evidence()})
    own, held = made["gpu-forward-table"].split("Forward held to FlashAttention-2")
    assert "| bf16 | 64 | yes | 300 (-) |" in own
    assert "| bf16 | 64 | yes | 300 (2.00) |" in held
    assert "| bf16 | 128 | yes | 600 (1.20) |" in own
    assert "| bf16 | 128 | yes | 275 (1.10) |" in held
    assert "Geometric mean against cuDNN: 1.20, smallest 1.20." in own
    assert "Geometric mean against FlashAttention-2: 1.48, smallest 1.10." in held
    assert "fp32" not in own + held
    own, held = made["gpu-backward-table"].split("Backward held to FlashAttention-2")
    assert own.startswith("Backward on NVIDIA H200: TFLOP/s")
    assert "| type | head_dim | causal | S = 512 | S = 1024 |" in own
    assert "| bf16 | 64 | yes | 200 (0.50) | 100 (-) |" in own
    assert "| bf16 | 64 | yes | 200 (1.00) | 100 (4.00) |" in held
    assert "| fp16 | 64 | yes | - | 50 (-) |" in held
    assert "Geometric mean against FlashAttention-2: 2.00, smallest 1.00." in held
    assert "Geometric mean against cuDNN: 0.50, smallest 0.50." in own
    assert tables.contents({}) == {}


def test_a_peer_that_computed_nothing_is_not_summed_up() -> None:
    data = evidence()
    del data["benchmark"]["cells"][1]
    made = tables.contents({"a.json": data})["gpu-forward-table"]
    assert "Geometric mean against FlashAttention-2: 2.00, smallest 2.00." in made
    assert "against cuDNN" not in made


def test_rows_of_the_float_table() -> None:
    made = tables.contents({"a.json": evidence()})["gpu-float-table"]
    assert "| 64 | 512 | yes | 20.0 | 30.1 | 1.50 | 10.0 | 12.5 | 1.25 |" in made
    assert "| 64 | 512 | no | - | 40.0 | - | - | - | - |" in made
    assert "Forward. Geometric mean against PyTorch's memory-efficient attention: 1.50, smallest 1.50." in made
    assert "Backward. Geometric mean against PyTorch's memory-efficient attention: 1.25, smallest 1.25." in made


def test_what_was_not_measured() -> None:
    data = evidence()
    data["benchmark"]["cells"] = data["benchmark"]["cells"][:1]
    data["accuracy"]["entries"] = data["accuracy"]["entries"][:1]
    made = tables.contents({"a.json": data})
    assert made["gpu-backward-table"] == "Backward on NVIDIA H200: not measured."
    assert made["gpu-float-table"] == "float32 on NVIDIA H200: not measured."
    assert "dq" not in made["gpu-accuracy-table"]
    assert "entropy" not in made["gpu-accuracy-table"]


def test_rows_of_the_accuracy_table() -> None:
    made = tables.contents({"a.json": evidence()})["gpu-accuracy-table"]
    assert "| bf16 | randn | 2.0e-03 | 0.50 | 0.25 | 0.00 | 0.00 |" in made
    assert "| bf16 | randn | 3.0e-03 | 3.0e-03 | 3.0e-03 | 0.60 | 0.70 | 0.80 | 0.50 | 0.00 |" in made
    assert "| type | values | rms error of to | tdq | tdk | tdv | worst / limit: max_logit | entropy | to | tlse | tdq |" in made
    assert "| bf16 | randn | 4.0e-03 | - | - | - | 0.12 | 0.25 | 0.38 | 0.50 | - | - | - |" in made
    assert "3 passed, 0 failed, 1 skipped" in made
    assert "clean: memcheck." in made


def test_what_is_said_of_the_same_bits() -> None:
    def said(*kernels: dict, status: str = "passed") -> str:
        data = evidence(repeats={"repeats": 1000, "kernels": list(kernels)})
        data["stages"]["repeats"]["status"] = status
        return tables.tested(data)

    forward, backward = {"differing": {"o": 0}}, {"differing": {"dq": 0}, "default": {"dq": 3}}
    assert "every kernel 1000 times with the same bits; compute" in said(forward)
    assert "1000 times with the same bits (backward: all with `deterministic=True`" in said(forward, backward)
    assert "the same bits again: not shown" in said(forward, backward, status="failed")


def test_rows_of_the_decode_table() -> None:
    made = tables.contents({"a.json": evidence()})["gpu-decode-table"]
    assert "| 32/8 | 1 | 8192 | 12.5 | 3.10 | 2.00 / 0.90 | 12.9 | 13.1 | 14.2 |" in made
    assert "reads 4.4 TB/s" in made
    assert "Geometric mean against cuDNN: 0.90, smallest 0.90." in made


def test_rows_of_the_context_table() -> None:
    made = tables.contents({"a.json": evidence()})["gpu-context-table"]
    assert "| causal | forward, backward | 32/8 | 32768 | 10.0 | 1.000 | 1.000 | 0.625 | +5.0% | 0.62 |" in made
    assert "| error | 16 GPUs |" in made
    assert "for these 2 GPUs; the last columns: the rates that it predicts for 16 GPUs with the same link" in made
    assert "| full | forward | 32/8 | 32768 | 10.0 | 1.000 | 1.000 | 0.500 | +0.0% |" in made
    assert "Times include the host, medians of at most 3 rounds" in made
    assert "among as many back to back as take 250 ms, medians of at most 2 rounds" in made
    assert made.endswith("Peak memory of a GPU beyond q, k and v, over that of its model: ring 1.05 to 1.05.")
    assert made.count("Peak memory") == 1
    without = {name: value for name, value in evidence().items() if name not in tables.OF_SEVERAL}
    assert tables.contents({"a.json": without})["gpu-context-table"] == ""


def test_errors_of_what_two_gpus_predicted_for_four() -> None:
    data = evidence()
    (two,), (four,) = (data[stage]["cells"] for stage in tables.OF_SEVERAL)
    assert tables.prediction_line(data) == ""
    two |= {"causal": four["causal"], "backward": four["backward"], "predicted_ms": {"2": 5.0, "4": 2.0}}
    assert tables.prediction_line(data) == (
        "The model in the run on 2 GPUs predicted the ring on 4 GPUs in 1 of these cells, with errors of -20.0% to -20.0%."
    )


def test_rows_of_the_serving_table() -> None:
    """A cell that failed has no figure, and a kind with one cell no mean."""
    made = tables.contents({"a.json": evidence()})["gpu-serving-table"]
    rows = [line for line in made.splitlines() if line.startswith("| trees")]
    assert rows[1] == "| trees of speculative decoding | nodes=64 | call 11.5, one row 10.0 | 1.21 | <= 1.05 |"
    assert len(rows) == 2
    assert "rows=512" not in made
    assert made.splitlines()[-1].strip() == "trees of speculative decoding: geometric mean 1.10, 1.00 to 1.21."
    without = {name: value for name, value in evidence().items() if name != "serving"}
    assert tables.contents({"a.json": without})["gpu-serving-table"] == ""


def test_rows_of_the_shapes_table() -> None:
    """A line for each figure that was measured; nothing if there is none."""
    made = tables.contents({"a.json": evidence()})["gpu-shapes-table"]
    assert made.startswith("Forward on NVIDIA H200, what the tables above do not show")
    assert "medians of 5 rounds, 2026-01-01." in made
    assert "| bf16: time over that of fp16 | 2 | 0.50 | 1.00 | 2.00 |" in made
    assert "| forward, mask: the same | 1 | 1.23 | 1.23 | 1.23 |" in made
    assert made.count("\n| ") == 1 + 3
    without = {name: value for name, value in evidence().items() if name != "shapes"}
    assert tables.contents({"a.json": without})["gpu-shapes-table"] == ""
    assert tables.contents({"a.json": without, "b.json": evidence()})["gpu-shapes-table"] == made


def run_tables(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, record.FOLDER / "tables.py", *arguments]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)


def test_results_and_readme_are_written_and_then_checked(tmp_path: pathlib.Path) -> None:
    results, readme, cpu = (tmp_path / name for name in ("RESULTS.md", "README.md", "cpu.json"))
    where = ("--results", results, "--readme", readme, "--evidence", tmp_path / "evidence", "--cpu", cpu)
    sections = "".join(f"<!-- {name} -->\nold\n<!-- /{name} -->\n" for name in tables.TABLES)
    results.write_text(f"before\n{sections}after\n")
    readme.write_text("<!-- performance-table -->\nold\n<!-- /performance-table -->\n")
    cpu.write_text(json.dumps(CPU))
    (tmp_path / "evidence").mkdir()
    assert run_tables(*where, "--check").returncode == 0  # no evidence, no tables
    record.write(tmp_path / "evidence" / "nvidia-h200.json", evidence())
    failed = run_tables(*where, "--check")
    assert failed.returncode == 1
    assert ", ".join(tables.TABLES) in failed.stderr
    assert "performance-table" in failed.stderr
    assert results.read_text().count("old") == len(tables.TABLES) == 8
    assert run_tables(*where).returncode == 0
    assert run_tables(*where, "--check").returncode == 0
    written = results.read_text()
    assert written.startswith("before\n<!-- gpu-forward-table -->\nForward on NVIDIA H200")
    assert written.endswith("after\n")
    assert "| NVIDIA H200: decode, bf16 | cuDNN |" in readme.read_text()
    results.write_text(written.replace("300 (2.00", "300 (3.00"))
    assert run_tables(*where, "--check").returncode == 1
    assert run_tables(*where).returncode == 0
    readme.write_text(readme.read_text().replace("cuDNN", "nobody"))
    assert run_tables(*where, "--check").returncode == 1
    results.write_text("no markers")
    missing = run_tables(*where)
    assert missing.returncode != 0
    assert "gpu-forward-table" in missing.stderr


def test_the_summary_has_the_best_typical_and_worst_cell() -> None:
    made = summary.table([evidence()], CPU)
    best_and_worst = (
        "2.40 (bf16, d=128, S=512, causal) | 2.19 | 2.00 (bf16, d=64, S=512, causal)"  # libflash's choice, not the sm80 kernel
    )
    assert f"| NVIDIA H200: forward, fp16, bf16 | FlashAttention-2 of PyTorch | 2 | {best_and_worst} |" in made
    assert "| NVIDIA H200: forward, fp32 | memory-efficient attention of PyTorch | 1 | 1.50" in made
    assert "| NVIDIA H200: decode, bf16 | cuDNN | 1 | 1.12 (32/8 heads, 1 x 8192 keys) | 1.12 |" in made
    assert "| EPYC: forward, fp32, bf16 | PyTorch 2.13 | 2 | 4.00 (fp32, d=64, S=512, full) | 2.83 | 2.00" in made
    assert "NVIDIA H200: backward, fp16, bf16 | cuDNN" not in made  # no such cell


def test_the_summary_leaves_out_a_gpu_whose_benchmarks_did_not_end(tmp_path: pathlib.Path) -> None:
    cpu = tmp_path / "cpu.json"
    cpu.write_text(json.dumps(CPU))
    passed = {"benchmark": {"status": "passed"}, "decode": {"status": "passed"}}
    whole = evidence() | {"gpu": "Whole", "stages": passed}
    part = evidence() | {"gpu": "Part", "stages": passed | {"decode": {"status": "timed out"}}}
    made = tables.summed_up({"a.json": whole, "b.json": part}, cpu)[summary.NAME]
    assert "Whole: " in made
    assert "Part: " not in made
    assert "Part: " in tables.summed_up({"b.json": part}, cpu)[summary.NAME]
