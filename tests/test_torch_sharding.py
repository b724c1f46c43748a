"""DTensors on two processes with gloo: batch and heads stay sharded, everything else is gathered, refusals name the DTensor."""

from __future__ import annotations

import pathlib

import pytest
from two_processes import run_in_two_processes

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed.tensor")


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch has no gloo")
def test_two_processes(tmp_path: pathlib.Path) -> None:
    run_in_two_processes("torch_shards.py", tmp_path)
