"""Memory against length: peak of PyTorch's allocator in one forward and one backward pass, tensors and workspaces together."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import _baselines
import torch
from _cells import Cell
from _gpu_contenders import OURS, Problem, forward_sdpa, problem, swapped
from _paper_contenders import kernel
from torch.nn.attention import SDPBackend

import libflash

BATCH, HEADS, HEAD_DIM = 1, 16, 64
SEQLENS = tuple(1024 << i for i in range(8))  # to 131072
QUICK_SEQLENS = SEQLENS[:5]


def standard(p: Problem) -> None:
    _, weights = _baselines.standard_forward(p.q, p.k, p.v, p.cell.causal)
    _baselines.standard_backward(p.dout, p.q, p.k, p.v, weights, p.cell.causal)


def flash1(p: Problem) -> None:
    out, statistics = _baselines.flash1_forward(p.q, p.k, p.v, p.cell.causal)
    _baselines.flash1_backward(p.dout, p.q, p.k, p.v, out, statistics, p.cell.causal)


def fa2(p: Problem) -> None:
    inputs = tuple(x.requires_grad_() for x in swapped(p.q.detach(), p.k.detach(), p.v.detach()))
    with torch.enable_grad():
        (out,) = forward_sdpa(Problem(p.cell, *swapped(*inputs), p.dout), SDPBackend.FLASH_ATTENTION)()
    torch.autograd.grad(out, inputs, p.dout)


def ours(p: Problem) -> None:
    names = {direction: kernel(direction, HEAD_DIM) for direction in ("forward", "backward")}
    out, lse = libflash.attention(p.q, p.k, p.v, return_lse=True, kernel=names["forward"])
    libflash.attention_backward(p.dout, p.q, p.k, p.v, out, lse, kernel=names["backward"])


METHODS: dict[str, tuple[Callable[[Problem], None], int]] = {  # the method, and its longest sequence
    "standard": (standard, _baselines.LONGEST_STANDARD),
    "flash1": (flash1, 16384),  # one thread block per head: longer sequences take too long, not too much memory
    "fa2": (fa2, SEQLENS[-1]),
    OURS: (ours, SEQLENS[-1]),
}


def peak_bytes(step: Callable[[Problem], None], seqlen: int) -> int:
    before = torch.cuda.memory_allocated()
    p = problem(Cell("forward", "bfloat16", HEAD_DIM, seqlen, False, BATCH, HEADS))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step(p)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure(quick: bool) -> Iterator[dict]:
    for seqlen in QUICK_SEQLENS if quick else SEQLENS:
        found = {name: peak_bytes(step, seqlen) for name, (step, longest) in METHODS.items() if seqlen <= longest}
        torch.cuda.empty_cache()
        yield {"seqlen": seqlen, "bytes": found}
