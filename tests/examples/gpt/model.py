"""A GPT like GPT-2: pre-norm blocks, GELU, biases, output weights tied to the token embedding.

The model calls `attend` with its fused projection. Training and the caches have different `attend` functions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from . import rotary
from .attention import Attention

# (number of the block, qkv (batch, seqlen, 3, heads, head_dim)) -> (batch, seqlen, heads, head_dim)
Attend = Callable[[int, torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Shape:
    vocabulary: int
    context: int
    blocks: int = 12
    heads: int = 12
    head_dim: int = 64
    positions: str = "learned"  # or "rotary"

    @property
    def channels(self) -> int:
        return self.heads * self.head_dim


class Block(nn.Module):
    def __init__(self, shape: Shape, number: int) -> None:
        super().__init__()
        self.number, self.heads = number, shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(shape.channels), nn.LayerNorm(shape.channels)
        self.qkv = nn.Linear(shape.channels, 3 * shape.channels)
        self.out = nn.Linear(shape.channels, shape.channels)
        self.up = nn.Linear(shape.channels, 4 * shape.channels)
        self.down = nn.Linear(4 * shape.channels, shape.channels)

    def forward(self, x: torch.Tensor, attend: Attend) -> torch.Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        x = x + self.out(attend(self.number, qkv).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocabulary, shape.channels)
        self.positions = nn.Embedding(shape.context, shape.channels) if shape.positions == "learned" else None
        self.blocks = nn.ModuleList(Block(shape, number) for number in range(shape.blocks))
        self.norm = nn.LayerNorm(shape.channels)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                deep = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * shape.blocks) ** 0.5 if deep else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Logits of the token after each of `tokens` (batch, seqlen) at `positions` (batch or 1, seqlen)."""
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions(positions)
        for block in self.blocks:
            x = block(x, attend)
        return F.linear(self.norm(x), self.tokens.weight)


class WholeSequences:
    """The `attend` of training: whole sequences, without a cache. q, k and v are slices of the projection."""

    def __init__(self, shape: Shape, attention: Attention, device: torch.device) -> None:
        self.attention = attention
        self.angles = None
        if shape.positions == "rotary":
            self.angles = rotary.tables(shape.context, shape.head_dim, device)

    def __call__(self, number: int, qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = qkv.unbind(2)
        if self.angles is not None:
            cos, sin = (table[None, : q.shape[1], None] for table in self.angles)
            q, k = rotary.rotated(q, cos, sin), rotary.rotated(k, cos, sin)
        return self.attention(q, k, v)
