"""Run by test_sdpa_context.py in each of two processes: PyTorch's own context_parallel while libflash is enabled."""

from __future__ import annotations

import contextlib
import itertools
import sys

import libflash.torch
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # context_parallel replaces its attribute
from libflash._torch_hf import forward as lf_attention
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard
from two_processes import leave

import libflash

TOKENS = 2  # the dimension that is divided


def results(tensors: list[torch.Tensor], causal: bool, gradient: bool) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_(gradient) for x in tensors]
    out = F.scaled_dot_product_attention(*leaves, is_causal=causal)
    return [out.detach(), *(torch.autograd.grad(out.square().sum(), leaves) if gradient else ())]


def divided(tensors: list[torch.Tensor], causal: bool, gradient: bool, enabled: bool) -> list[torch.Tensor] | str:
    """The results of the shards, put together; or the text of PyTorch's refusal."""
    mesh = init_device_mesh(tensors[0].device.type, (dist.get_world_size(),))
    shards = [x.clone() for x in tensors]
    try:
        with (
            libflash.torch.enable() if enabled else contextlib.nullcontext(),
            context_parallel(mesh, buffers=shards, buffer_seq_dims=[TOKENS] * 3),
        ):
            made = results(shards, causal, gradient)
            return context_parallel_unshard(mesh, made, [TOKENS] * len(made))
    except NotImplementedError as refused:
        return str(refused)


def check(device: str, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(3)
    tensors = [torch.randn(2, 4, 256, 32, device=device, dtype=dtype) for _ in range(3)]
    for causal, gradient in itertools.product((False, True), repeat=2):
        where = f"causal={causal} gradient={gradient}"
        plain, enabled = (divided(tensors, causal, gradient, on) for on in (False, True))
        if isinstance(plain, str):
            assert isinstance(enabled, str), f"{where}: PyTorch refuses with {plain!r}; with libflash it does not"
            assert plain in enabled, f"{where}: PyTorch refuses with {plain!r}; with libflash: {enabled!r}"
            assert "sharding strategy" not in plain or "use libflash.torch.context_parallel_attention" in enabled, enabled
            print(f"{where}: refused by PyTorch: {plain}")
            continue
        assert not isinstance(enabled, str), f"{where}: {enabled}"
        for name, got, wanted in zip(("out", "dq", "dk", "dv"), enabled, results(tensors, causal, gradient), strict=False):
            text = f"{where}: {name} is not that of one device"
            torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance, msg=lambda more, text=text: f"{text}: {more}")
        print(f"{where}: as on one device")


def check_models_are_refused(device: str) -> None:
    """context_parallel does not replace the attention function of a model, so libflash must refuse the call."""
    mesh = init_device_mesh(torch.device(device).type, (dist.get_world_size(),))
    x = torch.randn(1, 4, 64, 32, device=device)
    layer = torch.nn.Module()
    layer.is_causal = True
    lf_attention(layer, x, x, x, None)
    with (
        context_parallel(mesh, buffers=[x], buffer_seq_dims=[TOKENS]),
        pytest.raises(libflash.UnsupportedError, match="context_parallel"),
    ):
        lf_attention(layer, x, x, x, None)
    lf_attention(layer, x, x, x, None)


def main() -> None:
    rank, store, device = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    dist.init_process_group("gloo" if device == "cpu" else "nccl", init_method=f"file://{store}", rank=rank, world_size=2)
    if device == "cpu":
        check(device, torch.float32, 1e-5)
    else:
        torch.cuda.set_device(rank)
        check(f"cuda:{rank}", torch.bfloat16, 0.03)
    check_models_are_refused(device if device == "cpu" else f"cuda:{rank}")
    dist.destroy_process_group()
    leave()


main()
