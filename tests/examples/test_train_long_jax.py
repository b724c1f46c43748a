"""The JAX example of long contexts in its small configuration."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("jax")

HERE = pathlib.Path(__file__).resolve().parent


def test_the_loss_of_four_devices_is_that_of_one(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "long.json"
    command = [sys.executable, HERE / "train_long_jax.py", "--small", "--scheme", "ring", "--json", path]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("good\n")
    one, four = json.loads(path.read_text()).values()
    assert one[0] - one[-1] > 1
    assert four == pytest.approx(one, abs=1e-4)
    assert four != one


def test_files_are_checked_before_work_begins(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, HERE / "train_long_jax.py", "--small", "--json", tmp_path]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 2
    assert f"--json is {tmp_path}; it must be a file, not a folder" in done.stderr
