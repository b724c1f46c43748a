"""The types of libflash.torch for type checkers."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("mypy")

PROGRAM = """
import torch

import libflash.torch as lt

q = torch.ones(1, 2, 1, 8)
out: torch.Tensor = lt.attention(q, q, q, causal=True)
both: tuple[torch.Tensor, torch.Tensor] = lt.attention(q, q, q, return_lse=True, layout="bhsd")
step: torch.Tensor = lt.decode(q, q, q, num_splits=2)
merged: tuple[torch.Tensor, torch.Tensor] = lt.merge([q], [q])
"""
WRONG = ("lt.attention(q, q, q, casual=True)", 'lt.attention(q, q, q, layout="hbsd")', "wrong: torch.Tensor = lt.merge([q], [q])")


def test_results_and_options_have_types(tmp_path: pathlib.Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM + "\n".join(WRONG) + "\n")
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--follow-imports=silent",
        "--config-file=",
        "--cache-dir",
        str(tmp_path / "cache"),
    ]
    text = subprocess.run([*command, str(program)], capture_output=True, text=True, check=False).stdout
    first = PROGRAM.count("\n") + 1
    lines = {int(line.split(":")[1]) for line in text.splitlines() if ": error:" in line}
    assert lines == {first, first + 1, first + 2}, text
