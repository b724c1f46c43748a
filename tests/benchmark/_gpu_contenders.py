"""Who is timed on a GPU: PyTorch's FlashAttention-2, its cuDNN, and libflash, each as a call that a CUDA graph can capture.

Backward is the gradient of q, k and v alone: what comes before it is done once, when the call is made. PyTorch runs it on the
stream that its forward ran on, which must therefore be the stream of the capture.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from _cells import Cell
from torch.nn.attention import SDPBackend, sdpa_kernel

import libflash

DEVICE = "cuda"  # the tests of this program put "cpu" here
OURS = "libflash"
RESULTS = {"forward": ("out",), "backward": ("dq", "dk", "dv")}

Call = Callable[[], tuple[torch.Tensor, ...]]  # tensors of (batch, seqlen, heads, head_dim), named in RESULTS


@dataclasses.dataclass(frozen=True)
class Problem:
    """One cell's tensors, (batch, seqlen, heads, head_dim)."""

    cell: Cell
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor


def problem(cell: Cell) -> Problem:
    generator = torch.Generator(DEVICE).manual_seed(0)
    shape = (cell.batch, cell.seqlen, cell.heads, cell.head_dim)
    dtype = getattr(torch, cell.dtype)
    return Problem(cell, *(torch.randn(shape, generator=generator, device=DEVICE).to(dtype) for _ in range(4)))


def swapped(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """PyTorch's order of dimensions, in the same memory; and back."""
    return tuple(x.transpose(1, 2) for x in tensors)


def forward_sdpa(p: Problem, backend: SDPBackend) -> Call:
    q, k, v = swapped(p.q, p.k, p.v)

    def call() -> tuple[torch.Tensor, ...]:
        with sdpa_kernel(backend):
            return swapped(torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=p.cell.causal))

    return call


def backward_sdpa(p: Problem, backend: SDPBackend) -> Call:
    inputs = tuple(x.requires_grad_() for x in swapped(p.q.detach(), p.k.detach(), p.v.detach()))
    (dout,) = swapped(p.dout)
    with torch.enable_grad(), sdpa_kernel(backend):
        out = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=p.cell.causal)
    return lambda: swapped(*torch.autograd.grad(out, inputs, dout, retain_graph=True))


def forward_libflash(p: Problem, kernel: str | None) -> Call:
    out = torch.empty_like(p.q)
    return lambda: (libflash.attention(p.q, p.k, p.v, causal=p.cell.causal, out=out, kernel=kernel),)


def backward_libflash(p: Problem, kernel: str | None) -> Call:
    options = {"causal": p.cell.causal}
    out, lse = libflash.attention(p.q, p.k, p.v, return_lse=True, **options)
    made = {name: torch.empty_like(p.q) for name in RESULTS["backward"]}
    return lambda: libflash.attention_backward(p.dout, p.q, p.k, p.v, out, lse, kernel=kernel, **made, **options)


def contenders(direction: str, kernel: str | None) -> dict[str, Callable[[Problem], Call]]:
    """Peers first, libflash last."""
    sdpa, ours = {"forward": (forward_sdpa, forward_libflash), "backward": (backward_sdpa, backward_libflash)}[direction]
    return {
        "fa2": lambda p: sdpa(p, SDPBackend.FLASH_ATTENTION),
        "cudnn": lambda p: sdpa(p, SDPBackend.CUDNN_ATTENTION),
        OURS: lambda p: ours(p, kernel),
    }
