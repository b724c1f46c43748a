"""Small problems as PyTorch tensors, and attention in PyTorch's own operators."""

from __future__ import annotations

import torch


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, grad: bool = True) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(map(sum, shapes)))
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_(grad) for shape in shapes]


def qkv(dtype: torch.dtype = torch.float32, *, grad: bool = True) -> list[torch.Tensor]:
    return tensors((2, 7, 4, 8), (2, 9, 2, 8), (2, 9, 2, 5), dtype=dtype, grad=grad)


def eager(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, bias: torch.Tensor | None = None, causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in PyTorch's own operators."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    s = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    if bias is not None:
        s = s + bias
    if causal:
        visible = torch.ones(s.shape[-2:], dtype=torch.bool).tril(s.shape[-1] - s.shape[-2])
        s = s.masked_fill(~visible, -torch.inf)
    lse = s.logsumexp(-1)
    return torch.einsum("bhij,bjhd->bihd", (s - lse[..., None]).exp(), v), lse
