"""DTensors on two processes with gloo: batch and heads stay sharded, everything else is gathered, refusals name the DTensor."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed.tensor")

PROGRAM = pathlib.Path(__file__).parent / "support" / "torch_shards.py"


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch has no gloo")
def test_two_processes(tmp_path: pathlib.Path) -> None:
    command = [sys.executable, "-W", "ignore", str(PROGRAM)]
    both = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(2)
    ]
    try:
        texts = [process.communicate(timeout=300)[0] for process in both]
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [0, 0], "\n".join(texts)[-4000:]
