"""PyTorch's own context_parallel with libflash.torch.enable(): what one device gives, or a refusal; two processes."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
from two_processes import FOLDER, run_in_two_processes

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed.tensor.experimental")

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch has no gloo")),
    pytest.param("cuda", marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")),
]


@pytest.mark.parametrize("device", DEVICES)
def test_two_processes(device: str, tmp_path: pathlib.Path) -> None:
    said = run_in_two_processes("sdpa_context.py", tmp_path, device)[0]
    assert said.count("causal=") == 4, said
    assert "causal=False gradient=False: as on one device" in said


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch has no gloo")
def test_libflash_imported_inside_context_parallel(tmp_path: pathlib.Path) -> None:
    program = [sys.executable, str(FOLDER / "context_before_import.py"), str(tmp_path / "store")]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
