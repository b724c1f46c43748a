"""Run by test_sdpa_context.py in a fresh process: libflash is imported inside PyTorch's context_parallel, of one rank."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from two_processes import leave


def main() -> None:
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
    x = torch.randn(1, 4, 64, 32)
    layer = torch.nn.Module()
    layer.is_causal = True
    with context_parallel(init_device_mesh("cpu", (1,)), buffers=[x], buffer_seq_dims=[2]):
        assert not any(name.startswith("libflash") for name in sys.modules)
        from libflash._torch_hf import forward as lf_attention

        import libflash

        with pytest.raises(libflash.UnsupportedError, match="context_parallel"):
            lf_attention(layer, x, x, x, None)
    lf_attention(layer, x, x, x, None)
    dist.destroy_process_group()
    leave()


main()
