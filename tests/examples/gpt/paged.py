"""The paged KV cache of a serving engine: one call of libflash.decode per block appends the rows of all requests and attends."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

import libflash

from . import rotary
from .model import Shape

CODES = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclasses.dataclass
class Rows:
    """The rows of one step. Sequence b has rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1; rows after those of the last sequence
    are padding."""

    lengths: torch.Tensor  # keys before the step
    table: torch.Tensor
    cu_seqlens_q: torch.Tensor
    positions: torch.Tensor
    tree_mask: torch.Tensor | None
    cu_seqlens_tree: torch.Tensor | None
    shared_groups: torch.Tensor
    shared_lens: torch.Tensor


class PagedCache:
    """The `attend` of a model whose tokens (1, total) are those of several requests."""

    def __init__(self, shape: Shape, pages: int, page_size: int, kind: str, dtype: torch.dtype, invariant: bool) -> None:
        """kind: "same" as the model, "int8" with a scale for each key and head, or "e4m3" or "e5m2" with the scale 1. invariant:
        the bits of a row do not depend on the other rows of the call."""
        size = (pages, page_size, shape.heads, shape.head_dim)
        self.page_size, self.kind, self.invariant = page_size, kind, invariant
        self.caches = [[torch.zeros(size, dtype=CODES.get(kind, dtype)) for _ in "kv"] for _ in range(shape.blocks)]
        self.scales = [[torch.zeros(size[:3]) for _ in "kv"] if kind == "int8" else [None, None] for _ in range(shape.blocks)]
        self.angles: tuple[Any, Any] = (None, None)
        if shape.positions == "rotary":
            self.angles = rotary.tables(shape.context, shape.head_dim, torch.device("cpu"))
        self.rows: Rows | None = None

    def __call__(self, number: int, qkv: torch.Tensor) -> torch.Tensor:
        assert self.rows is not None
        q, k, v = qkv[0].unbind(1)
        rows, (cos, sin), (k_scale, v_scale) = self.rows, self.angles, self.scales[number]
        return libflash.decode(
            q, *self.caches[number], k=k, v=v, cache_seqlens=rows.lengths, block_table=rows.table, cu_seqlens_q=rows.cu_seqlens_q,
            q_positions=rows.positions, tree_mask=rows.tree_mask, cu_seqlens_tree=rows.cu_seqlens_tree, rotary_cos=cos,
            rotary_sin=sin, rotary_interleaved=False, k_scale=k_scale, v_scale=v_scale, shared_groups=rows.shared_groups,
            shared_lens=rows.shared_lens, invariant=self.invariant,
        )[None]  # fmt: skip

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copy rows of the cache, numbered page * page_size + row of the page, with their scales."""
        for tensors in (*self.caches, *self.scales):
            for x in tensors:
                if x is not None:
                    flat = x.view(torch.uint8).flatten(0, 1)
                    flat[targets] = flat[sources]
