"""The methods that the papers' claims are about, each as a call that a CUDA graph can capture.

`flash1` is FlashAttention-1 with one thread block per head, as in the paper; `flash1_split` distributes a head over thread blocks
if the heads do not fill the GPU, as its later releases did. Both and `standard` are the kernels of baselines/. `torch_plain`
is standard attention written in PyTorch, which the papers compare with.
"""

from __future__ import annotations

from collections.abc import Callable

import _baselines
import torch
from _cells import Cell
from _gpu_contenders import OURS, Call, Problem, backward_libflash, backward_sdpa, forward_libflash, forward_sdpa, swapped
from torch.nn.attention import SDPBackend

PLAIN_LONGEST = 8192  # several matrices of 2 * seqlen * seqlen bytes a head
SLACK = {"standard": 2.0, "torch_plain": 2.0}  # scores and P in 16 bits
STANDARD_LONGEST = _baselines.LONGEST_STANDARD


def kernel(direction: str, head_dim: int) -> str:
    """libflash's sm80 kernel: the instructions of the baselines, so that the comparison shows the gain of the algorithm."""
    return f"{direction}_sm80_bf16_d{head_dim}"


def forward_standard(p: Problem) -> Call:
    return lambda: _baselines.standard_forward(p.q, p.k, p.v, p.cell.causal)[:1]


def backward_standard(p: Problem) -> Call:
    _, weights = _baselines.standard_forward(p.q, p.k, p.v, p.cell.causal)
    return lambda: _baselines.standard_backward(p.dout, p.q, p.k, p.v, weights, p.cell.causal)


def forward_flash1(p: Problem, splits: int) -> Call:
    return lambda: _baselines.flash1_forward(p.q, p.k, p.v, p.cell.causal, splits)[:1]


def backward_flash1(p: Problem, splits: int) -> Call:
    out, statistics = _baselines.flash1_forward(p.q, p.k, p.v, p.cell.causal, splits)
    return lambda: _baselines.flash1_backward(p.dout, p.q, p.k, p.v, out, statistics, p.cell.causal, splits)


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
    """(batch, heads, seqlen, head_dim)"""
    scores = (q * q.shape[-1] ** -0.5) @ k.mT
    if hidden is not None:
        scores = scores.masked_fill_(hidden, -torch.inf)
    return torch.softmax(scores, dim=-1) @ v


def plain_inputs(p: Problem) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
    hidden = torch.ones((p.cell.seqlen,) * 2, dtype=torch.bool, device=p.q.device).triu(1) if p.cell.causal else None
    return tuple(x.contiguous() for x in swapped(p.q, p.k, p.v)), hidden


def forward_plain(p: Problem) -> Call:
    inputs, hidden = plain_inputs(p)
    return lambda: swapped(plain(*inputs, hidden))


def backward_plain(p: Problem) -> Call:
    inputs, hidden = plain_inputs(p)
    for x in inputs:
        x.requires_grad_()
    dout = p.dout.transpose(1, 2).contiguous()
    with torch.enable_grad():
        out = plain(*inputs, hidden)
    return lambda: swapped(*torch.autograd.grad(out, inputs, dout, retain_graph=True))


def contenders(cell: Cell) -> dict[str, Callable[[Problem], Call]]:
    """The methods that can run the cell, libflash last."""
    forward = cell.direction == "forward"
    standard, plain_of, flash1, sdpa, ours = (
        (forward_standard, forward_plain, forward_flash1, forward_sdpa, forward_libflash)
        if forward
        else (backward_standard, backward_plain, backward_flash1, backward_sdpa, backward_libflash)
    )
    found: dict[str, Callable[[Problem], Call]] = {}
    if cell.seqlen <= STANDARD_LONGEST:
        found["standard"] = standard
    if cell.seqlen <= PLAIN_LONGEST:
        found["torch_plain"] = plain_of
    return found | {
        "flash1": lambda p: flash1(p, 1),
        "flash1_split": lambda p: flash1(p, _baselines.splits_that_fill(p.q)),
        "fa2": lambda p: sdpa(p, SDPBackend.FLASH_ATTENTION),
        OURS: lambda p: ours(p, kernel(cell.direction, cell.head_dim)),
    }
