"""autograd_cost.py on the CPU: its figures, and that the steps of a call are those of the Function it names."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest
from benchmark_program import FOLDER, program

pytest.importorskip("torch")


def test_figures(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.json"
    command = [sys.executable, str(FOLDER / "autograd_cost.py"), "--rounds", "1", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    made = json.loads(path.read_text())
    assert set(made["calls"]) == {"libflash", "SDPA", "direct", "empty"}
    assert set(made["steps"]) == {"libflash", "direct", "empty"}
    assert made["steps"]["empty"]["backward"] < made["steps"]["direct"]["backward"]
    for figures in (*made["calls"].values(), *made["steps"].values()):
        assert all(0 < x < 1e6 for x in figures.values())
        assert all(f"{x:.1f}" in done.stdout for x in figures.values())


def test_a_function_is_watched_only_inside() -> None:
    benchmark = program("autograd_cost")
    one = benchmark.contenders("cpu")["libflash"]
    plain, seen = one.function.backward, []
    with benchmark.watched(one.function, seen):
        one.call()
    assert len(seen) == 2
    assert seen[0] < seen[1]
    assert one.function.backward is plain
    one.call()
    assert len(seen) == 2
