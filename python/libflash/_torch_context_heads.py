"""The exchange of heads for tokens (DeepSpeed-Ulysses, arXiv 2309.14509): from some tokens with all heads to the tokens of
several ranks with a share of the heads, and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import _torch_context_group as groups
from ._torch_context_group import Axis, Chunks

Tensor = torch.Tensor


@dataclass(frozen=True)
class HeadExchange:
    """`chunks`: the chunks of all ranks of the axis in the order of their tokens, as from chunks_by_position. Tensors have tokens
    at `token_dim` and heads at `head_dim`. Each direction makes one copy before the exchange and one after it.
    """

    axis: Axis
    chunks: Chunks

    def to_heads(self, x: Tensor, token_dim: int, head_dim: int, repeat: int = 1) -> Tensor:
        if self.axis.size == 1:
            return x
        if repeat > 1:
            x = x.repeat_interleave(repeat, head_dim)
        received = groups.swap(self.axis, torch.stack(x.chunk(self.axis.size, head_dim)))
        return groups.join_chunks(list(received), self.chunks, token_dim)

    def to_tokens(self, x: Tensor, token_dim: int, head_dim: int, repeat: int = 1) -> Tensor:
        """The inverse of to_heads; sums over repeated heads."""
        if self.axis.size == 1:
            return x
        received = groups.swap(self.axis, groups.split_chunks(x, self.chunks, token_dim))
        joined = torch.cat(list(received), head_dim)
        if repeat == 1:
            return joined
        shape = list(joined.shape)
        shape[head_dim : head_dim + 1] = [shape[head_dim] // repeat, repeat]
        return joined.reshape(shape).sum(head_dim + 1)

    def share(self, x: Tensor, head_dim: int = -1) -> Tensor:
        """This rank's part of a tensor with one number for each head."""
        return x if self.axis.size == 1 else x.chunk(self.axis.size, head_dim)[self.axis.rank].contiguous()
