"""merge in PyTorch's own operators, and the order of axes of lse and out."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Tensor = torch.Tensor


def as_out(lse: Tensor, layout: str) -> Tensor:
    """lse with the axes of out and one more."""
    if lse.dim() == 2:
        return lse.t().unsqueeze(-1)
    order = {"bshd": (0, 2, 1), "bhsd": (0, 1, 2), "sbhd": (2, 0, 1)}[layout]
    return lse.permute(order).unsqueeze(-1)


def as_lse(x: Tensor, layout: str) -> Tensor:
    """The inverse of as_out."""
    x = x.squeeze(-1)
    if x.dim() == 2:
        return x.t()
    return x.permute({"bshd": (0, 2, 1), "bhsd": (0, 1, 2), "sbhd": (1, 2, 0)}[layout])


def merge_of_operators(outs: Sequence[Tensor], lses: Sequence[Tensor], layout: str) -> tuple[Tensor, Tensor]:
    """merge if a part carries a tangent: PyTorch's own operators have derivatives in every mode and of every order. Parts with
    lse = -inf contribute nothing, even if they hold NaN."""
    stacked = torch.stack(tuple(lses))
    counts = stacked != -float("inf")  # also where it is NaN, as in libflash.merge
    largest = stacked.amax(0).detach()
    largest = torch.where(largest != -float("inf"), largest, 0.0)
    weights = torch.where(counts, (torch.where(counts, stacked, 0.0) - torch.where(counts, largest, 0.0)).exp(), 0.0)
    total = weights.sum(0)
    seen = total != 0
    safe = torch.where(seen, total, 1.0)
    lse = torch.where(seen, largest + safe.log(), -float("inf"))
    weights = weights / safe
    out = torch.zeros_like(outs[0], dtype=stacked.dtype)
    for weight, part_counts, part in zip(weights, counts, outs, strict=True):
        out = out + as_out(weight, layout) * torch.where(as_out(part_counts, layout), part, 0.0)
    return out.to(outs[0].dtype), lse
