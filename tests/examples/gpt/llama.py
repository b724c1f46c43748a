"""A decoder of Llama's shape: RMSNorm, rotary embedding, grouped-query attention, SwiGLU, no biases.

Each rank has some tokens of a sequence; all of the model but `attend` works on tokens one by one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from . import rotary

# q (batch, tokens, heads, head_dim), k, v (batch, tokens, key_heads, head_dim) -> like q
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class LlamaShape:
    vocabulary: int
    blocks: int
    heads: int
    key_heads: int
    head_dim: int
    hidden: int  # channels of the SwiGLU

    @property
    def channels(self) -> int:
        return self.heads * self.head_dim


class Block(nn.Module):
    def __init__(self, shape: LlamaShape, attend: Attend, *, recompute: bool) -> None:
        super().__init__()
        self.shape, self.attend, self.recompute = shape, attend, recompute
        self.norm1, self.norm2 = nn.RMSNorm(shape.channels), nn.RMSNorm(shape.channels)
        self.qkv = nn.Linear(shape.channels, (shape.heads + 2 * shape.key_heads) * shape.head_dim, bias=False)
        self.out = nn.Linear(shape.channels, shape.channels, bias=False)
        self.gate_up = nn.Linear(shape.channels, 2 * shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.channels, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        if self.recompute:
            return checkpoint(self.computed, x, cos, sin, use_reentrant=False)
        return self.computed(x, cos, sin)

    def computed(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        heads, key_heads = self.shape.heads, self.shape.key_heads
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (-1, self.shape.head_dim))
        q, k, v = qkv.split([heads, key_heads, key_heads], dim=2)
        x = x + self.out(self.attend(rotary.rotated(q, cos, sin), rotary.rotated(k, cos, sin), v).flatten(-2))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    def __init__(self, shape: LlamaShape, attend: Attend, *, recompute: bool = False) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocabulary, shape.channels)
        self.blocks = nn.ModuleList(Block(shape, attend, recompute=recompute) for _ in range(shape.blocks))
        self.norm = nn.RMSNorm(shape.channels)
        self.logits = nn.Linear(shape.channels, shape.vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                deep = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * shape.blocks) ** 0.5 if deep else 0.02)
        nn.init.normal_(self.tokens.weight)  # else the first steps, of equal size in all weights, change x by more than its size

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits of the token after each of `tokens` (batch, tokens) at `positions` (tokens,)."""
        cos, sin = (table[None, :, None] for table in rotary.tables_at(positions, self.shape.head_dim))
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.logits(self.norm(x))
