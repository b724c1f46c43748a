"""Rotary position embedding, channels paired (0, d/2), (1, d/2 + 1), ..."""

from __future__ import annotations

import torch


def tables(positions: int, head_dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, (positions, head_dim / 2) float32, the tables of libflash.decode."""
    return tables_at(torch.arange(positions, device=device), head_dim)


def tables_at(positions: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of the tables for positions (n,): (n, head_dim / 2)."""
    frequencies = 10000.0 ** -(torch.arange(0, head_dim, 2, device=positions.device) / head_dim)
    angles = torch.outer(positions, frequencies)
    return angles.cos(), angles.sin()


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x (batch, seqlen, heads, head_dim), rotated by the angles of (batch or 1, seqlen, 1, head_dim / 2)."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)
