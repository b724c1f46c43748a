"""Random block masks for the benchmarks, and a check of the results of calls with them."""

from __future__ import annotations

import torch
from _gpu_contenders import Problem
from gpu_attention import agree

BLOCK = 128


def block_mask(density: float, seqlen: int) -> torch.Tensor:
    """(1, 1, rows, columns): keeps the diagonal, and in each row as many other blocks, at random, as the density requires."""
    count = seqlen // BLOCK
    kept = max(1, round(density * count))
    order = torch.rand((count, count), generator=torch.Generator().manual_seed(0))
    order.fill_diagonal_(-1.0)
    mask = torch.zeros((count, count), dtype=torch.bool).scatter_(1, order.argsort(dim=1)[:, :kept], value=True)
    return mask[None, None]


def compare(p: Problem, mask: torch.Tensor, results: tuple[torch.Tensor, ...]) -> None:
    """Compare the first head with plain attention in float32; of the gradients only dq, to which every key tile adds."""
    q, k, v, dout = (x[0, :, 0].float() for x in (p.q, p.k, p.v, p.dout))
    scale = p.cell.head_dim**-0.5
    hidden = ~mask[0, 0].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    weights = (q @ k.T * scale).masked_fill_(hidden, -torch.inf).softmax(dim=-1)
    exact = weights @ v
    if p.cell.direction == "backward":
        dweights = dout @ v.T
        dscores = weights * (dweights - (dout * exact).sum(dim=-1, keepdim=True))
        exact = dscores @ k * scale
    where = f"block mask, {p.cell.direction} d={p.cell.head_dim}"
    agree(where, p.cell.direction, p.cell.dtype, results[0][:1, :, :1], exact[None, :, None])
