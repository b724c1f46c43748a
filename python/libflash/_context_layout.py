"""Which tokens each rank of a context-parallel group has, and their positions.

`contiguous`: the tokens are divided into one chunk per rank; rank r has chunk r. `zigzag`: the tokens are divided into two chunks
per rank; rank r has chunk r and the r-th chunk from the end, so that all ranks have the same work under a causal mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ._arguments import one_of
from ._errors import InvalidError

ORDERS = ("contiguous", "zigzag")


def chunks_of(order: str, rank: int, ranks: int) -> tuple[int, ...]:
    """The numbers of the chunks of a rank, in its order of tokens."""
    return (rank,) if order == "contiguous" else (rank, 2 * ranks - 1 - rank)


@cache
def chunks_by_position(order: str, members: tuple[int, ...], ranks: int) -> tuple[tuple[int, int], ...]:
    """The chunks of the ranks `members`, in the order of their tokens: (index in `members`, which of that rank's chunks)."""
    numbered = [(c, (m, n)) for m, rank in enumerate(members) for n, c in enumerate(chunks_of(order, rank, ranks))]
    return tuple(chunk for _, chunk in sorted(numbered))


def check_order(order: str) -> None:
    one_of(order, ORDERS, "order")


def chunk_count(order: str, ranks: int) -> int:
    return ranks if order == "contiguous" else 2 * ranks


@cache
def tokens_of(order: str, tokens: int, rank: int, ranks: int) -> np.ndarray:
    """The tokens of a rank, in ascending order."""
    size = tokens // chunk_count(order, ranks)
    made = np.concatenate([np.arange(c * size, (c + 1) * size) for c in chunks_of(order, rank, ranks)])
    made.setflags(write=False)
    return made


@dataclass(frozen=True)
class LocalTokens:
    """Some tokens: their sequences (documents) and their positions in these."""

    tokens: np.ndarray  # ascending
    counts: np.ndarray  # of each sequence
    positions: np.ndarray  # of each token in its sequence

    @property
    def cu_seqlens(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int32)


@dataclass(frozen=True)
class Layout:
    """All tokens of a group of ranks. `cu_seqlens`: the documents, or None for one sequence."""

    order: str
    tokens: int
    ranks: int
    cu_seqlens: tuple[int, ...] | None = None

    def local_tokens(self, ranks: tuple[int, ...]) -> LocalTokens:
        """The tokens of several ranks together."""
        return _local_tokens(self, ranks)

    def sees(self, rows: tuple[int, ...], columns: tuple[int, ...], window: tuple[int, int]) -> bool:
        """Whether a token of the ranks `rows` sees a token of the ranks `columns`. window: keys left and right; -1: all."""
        return _sees(self, rows, columns, window)


@cache
def _local_tokens(layout: Layout, ranks: tuple[int, ...]) -> LocalTokens:
    tokens = np.sort(np.concatenate([tokens_of(layout.order, layout.tokens, rank, layout.ranks) for rank in ranks]))
    bounds = np.array(layout.cu_seqlens if layout.cu_seqlens is not None else (0, layout.tokens))
    document = np.searchsorted(bounds, tokens, side="right") - 1
    counts = np.bincount(document, minlength=len(bounds) - 1)
    return LocalTokens(tokens, counts, (tokens - bounds[document]).astype(np.int32))


@cache
def _sees(layout: Layout, rows: tuple[int, ...], columns: tuple[int, ...], window: tuple[int, int]) -> bool:
    mine, others = layout.local_tokens(rows), layout.local_tokens(columns)
    row_ends, column_ends = mine.cu_seqlens, others.cu_seqlens
    left, right = (layout.tokens if size < 0 else size for size in window)
    for d in range(len(mine.counts)):
        row = mine.positions[row_ends[d] : row_ends[d + 1]].astype(np.int64)
        column = others.positions[column_ends[d] : column_ends[d + 1]].astype(np.int64)
        if len(row) == 0 or len(column) == 0:
            continue
        first = np.searchsorted(column, row - left)  # the first key at or after the left end of each row's window
        if ((first < len(column)) & (column[np.minimum(first, len(column) - 1)] <= row + right)).any():
            return True
    return False


# -- for users: shards of tensors, and positions


def check_tokens(tokens: int, order: str, ranks: int) -> None:
    if tokens < 0:
        raise InvalidError(f"tokens is {tokens}; it must not be negative")
    if tokens % chunk_count(order, ranks) != 0:
        raise InvalidError(
            f"the sequence has {tokens} tokens; order {order!r} needs a multiple of {chunk_count(order, ranks)} for {ranks} ranks"
        )


def take_shard(x: Any, dim: int, order: str, rank: int, ranks: int) -> Any:
    """The part of a tensor with all tokens along `dim` that belongs to a rank."""
    check_order(order)
    check_tokens(x.shape[dim], order, ranks)
    pieces = x.chunk(chunk_count(order, ranks), dim) if x.shape[dim] else [x] * chunk_count(order, ranks)
    return pieces[rank].contiguous() if order == "contiguous" else _cat([pieces[c] for c in chunks_of(order, rank, ranks)], dim)


def join_shards(shards: list[Any], dim: int, order: str) -> Any:
    """The inverse of take_shard: all tokens, from the shards of all ranks."""
    check_order(order)
    ranks = len(shards)
    pieces: dict[int, Any] = {}
    for rank, part in enumerate(shards):
        chunks = chunks_of(order, rank, ranks)
        for chunk, piece in zip(chunks, part.chunk(len(chunks), dim), strict=True):
            pieces[chunk] = piece
    return _cat([pieces[n] for n in range(len(pieces))], dim)


def _cat(pieces: list[Any], dim: int) -> Any:
    import torch

    return torch.cat(pieces, dim)
