"""PyTorch's own context_parallel with libflash.torch.enable(): what one device gives, or a refusal; two processes."""

from __future__ import annotations

import pathlib

import pytest
from two_processes import run_in_two_processes

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
