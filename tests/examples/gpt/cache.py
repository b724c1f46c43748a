"""KV caches for generation: one with libflash.decode and two in plain PyTorch.

A cache is the `attend` of a model that first gets a prompt and then a token per sequence and step. All sequences have the same
length, which the PyTorch versions need; libflash accepts any lengths.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

import libflash

from . import rotary
from .attention import Attention
from .model import Shape


class Cache:
    """Keys and values of each sequence and block, up to `capacity`, and their number."""

    def __init__(
        self, shape: Shape, batch: int, capacity: int, attention: Attention, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.attention = attention  # of the prompt
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self.angles = rotary.tables(capacity, shape.head_dim, device) if shape.positions == "rotary" else None
        self.keys = [self.room(batch, capacity, shape).to(device, dtype) for _ in range(shape.blocks)]
        self.values = [self.room(batch, capacity, shape).to(device, dtype) for _ in range(shape.blocks)]

    def room(self, batch: int, capacity: int, shape: Shape) -> torch.Tensor:
        return torch.zeros(batch, capacity, shape.heads, shape.head_dim)

    def __call__(self, number: int, qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = qkv.unbind(2)
        return self.step(number, q, k, v) if q.shape[1] == 1 else self.prompt(number, q, k, v)

    def prompt(self, number: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of the prompts; their keys and values are the cache's first."""
        seqlen = q.shape[1]
        if self.angles is not None:
            cos, sin = (table[None, :seqlen, None] for table in self.angles)
            q, k = rotary.rotated(q, cos, sin), rotary.rotated(k, cos, sin)
        self.rows(self.keys[number], seqlen).copy_(k)
        self.rows(self.values[number], seqlen).copy_(v)
        return self.attention(q, k, v)

    def rows(self, room: torch.Tensor, seqlen: int) -> torch.Tensor:
        """Its first rows, (batch, seqlen, heads, head_dim)."""
        return room[:, :seqlen]

    def step(self, number: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def restart(self, length: int) -> None:
        """Go back to the first `length` keys."""
        self.lengths.fill_(length)

    def advance(self) -> None:
        """Count one more token, on the device, so that a CUDA graph can capture it."""
        self.lengths += 1


class LibflashCache(Cache):
    """One call per step and block rotates q and k, appends k and v, and computes attention over all keys."""

    def step(self, number: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        cos, sin = self.angles or (None, None)
        return libflash.decode(
            q, self.keys[number], self.values[number], k=k, v=v, cache_seqlens=self.lengths, rotary_cos=cos, rotary_sin=sin,
            rotary_interleaved=False,
        )  # fmt: skip


class PyTorchCache(Cache):
    """The parts of the step one by one. Heads come before keys in memory, the best order for scaled_dot_product_attention."""

    def room(self, batch: int, capacity: int, shape: Shape) -> torch.Tensor:
        return torch.zeros(batch, shape.heads, capacity, shape.head_dim)

    def rows(self, room: torch.Tensor, seqlen: int) -> torch.Tensor:
        return room[:, :, :seqlen].transpose(1, 2)

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        if self.angles is None:
            return x
        cos, sin = (table[self.lengths][:, None, None] for table in self.angles)
        return rotary.rotated(x, cos, sin)


class SlicedCache(PyTorchCache):
    """The valid rows as a slice: no work for empty rows, but their number must be known on the host. Not possible in a CUDA
    graph.
    """

    def restart(self, length: int) -> None:
        super().restart(length)
        self.length = length

    def advance(self) -> None:
        super().advance()
        self.length += 1

    def step(self, number: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = (room[number][:, :, : self.length + 1] for room in (self.keys, self.values))
        keys[:, :, -1], values[:, :, -1] = self.rotated(k)[:, 0], v[:, 0]
        return F.scaled_dot_product_attention(self.rotated(q).transpose(1, 2), keys, values).transpose(1, 2)


class MaskedCache(PyTorchCache):
    """All rows with a mask of the valid ones: the lengths stay on the device, as a CUDA graph needs."""

    def __init__(self, shape: Shape, batch: int, capacity: int, *rest: Any) -> None:
        super().__init__(shape, batch, capacity, *rest)
        self.places = torch.arange(capacity, dtype=torch.int32, device=self.lengths.device)
        self.mask = torch.zeros(batch, 1, 1, capacity, dtype=torch.bool, device=self.lengths.device)

    def restart(self, length: int) -> None:
        super().restart(length)
        self.see()

    def advance(self) -> None:
        super().advance()
        self.see()

    def see(self) -> None:
        """Mask of the rows so far and of the row that the next step writes; updated in place for captured graphs."""
        torch.le(self.places, self.lengths[:, None], out=self.mask[:, 0, 0])

    def step(self, number: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = self.keys[number], self.values[number]
        place = self.lengths[:1].long()
        keys.index_copy_(2, place, self.rotated(k).transpose(1, 2))
        values.index_copy_(2, place, v.transpose(1, 2))
        q = self.rotated(q).transpose(1, 2)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=self.mask).transpose(1, 2)
