"""Attention of the rows of a rank over the keys of all ranks of an axis: passed on from rank to rank, or gathered.

ring: in step t the rank with number r computes with the keys of rank r - t, which that rank sends to it directly; pairs of ranks
without a visible pair of row and key send nothing, so with a window only neighbours talk. In backward, out and lse of the whole
rows give each step its part of dq, and dk and dv of its keys, which go home and are added in the order of the steps. The keys of
the next step are on their way during the computation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from . import _torch_context_group as groups
from ._context_layout import Layout, LocalTokens, chunks_by_position
from ._torch_context_group import Chunks, Exchange, Ranks
from ._torch_context_parts import Part, PartBackward, PartForward, Sum, keys_used, parts_of, serves
from ._torch_context_positions import PositionBackward, PositionForward

ALL = -1  # in place of the number of a rank: the keys of all ranks together

Tensor = torch.Tensor


@dataclass
class Schedule:
    """`options`: of libflash.attention, the same in all steps. `window`: keys that a row sees to the left and right; -1: all."""

    ranks: Ranks
    layout: Layout
    window: tuple[int, int]
    gathered: bool
    options: dict[str, Any]
    sink: Tensor | None = None

    # -- one call

    def members(self, ring_rank: int) -> tuple[int, ...]:
        return tuple(range(self.ranks.size)) if ring_rank == ALL else self.ranks.members(ring_rank)

    def local_tokens(self, ring_rank: int) -> LocalTokens:
        return self.layout.local_tokens(self.members(ring_rank))

    @property
    def one_call(self) -> bool:
        return self.gathered or self.ranks.ring.size == 1

    def forward_calls(self, q: Tensor, v: Tensor) -> PositionForward | PartForward:
        return (PartForward if self.in_parts(q) else PositionForward)(self, q, v)

    def backward_calls(self, given: tuple[Tensor, ...], dlse: Tensor | None,
                       dsink: Tensor | None) -> PositionBackward | PartBackward:  # fmt: skip
        return (PartBackward if self.in_parts(given[1]) else PositionBackward)(self, given, dlse, dsink)

    def in_parts(self, q: Tensor) -> bool:
        packed, options = self.layout.cu_seqlens is not None, self.options
        return self.ranks.ring.size > 1 and serves(q, packed, self.window, options["causal"], options)

    # -- the steps

    def sees(self, rows: int, columns: int) -> bool:
        return self.layout.sees(self.ranks.members(rows), self.ranks.members(columns), self.window)

    def partner(self, step: int) -> tuple[int, int]:
        """The rank that uses this rank's keys in a step, and the rank whose keys this rank uses."""
        ring = self.ranks.ring
        return (ring.rank + step) % ring.size, (ring.rank - step) % ring.size

    def parts(self, rows: int, columns: int) -> tuple[Part, ...]:
        return parts_of(self.layout, self.members(rows), self.members(columns), self.options["causal"])

    def cut(self, rows: int, columns: int, x: Tensor) -> Tensor:
        """Of keys or values of the rank `columns`: those that `rows` needs."""
        return x[:, : keys_used(self.parts(rows, columns))] if self.in_parts(x) else x

    def send_keys(self, step: int, k: Tensor, v: Tensor) -> Exchange:
        ring = self.ranks.ring
        to, source = self.partner(step)
        sent = tuple(self.cut(to, ring.rank, x) for x in (k, v))
        return Exchange(ring, 4 * step, to if self.sees(to, ring.rank) else None, sent,
                        source if self.sees(ring.rank, source) else None,
                        tuple(self.cut(ring.rank, source, x) for x in (k, v)))  # fmt: skip

    def send_gradients(self, step: int, made: tuple[Tensor, ...], like: tuple[Tensor, ...]) -> Exchange:
        ring = self.ranks.ring
        user, owner = self.partner(step)
        return Exchange(ring, 4 * step + 2, owner if made else None, made,
                        user if self.sees(user, ring.rank) else None, like)  # fmt: skip

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        ring, calls = self.ranks.ring, self.forward_calls(q, v)
        if self.gathered:
            calls.add(self.gather(k), self.gather(v), ALL)
            return calls.finish()
        following = self.send_keys(1, k, v) if ring.size > 1 else None
        calls.add(k, v, ring.rank, transfers=ring.size > 1)
        keys: tuple[Tensor, ...] = ()
        for step in range(1, ring.size):
            keys = following.wait() if following else ()
            following = self.send_keys(step + 1, k, v) if step + 1 < ring.size else None
            if keys:
                calls.add(keys[0], keys[1], self.partner(step)[1], transfers=following is not None)
        keys = ()  # their memory is free when the results are merged
        return calls.finish()

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None,
                 dsink: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        ring, calls = self.ranks.ring, self.backward_calls((dout, q, out, lse), dlse, dsink)
        if self.gathered:
            gathered = self.gather(k), self.gather(v)
            gradients = calls.add(*gathered, ALL)
            del gathered
            dk, dv = (self.scatter_sum(x).to(k.dtype) for x in gradients)
            return calls.finish(), dk, dv
        home = GradientsOfKeys(k.shape[1])
        following = self.send_keys(1, k, v) if ring.size > 1 else None
        home.add(calls.begin(k, v))
        arriving: Exchange | None = None
        for step in range(1, ring.size):
            keys = following.wait() if following else ()
            following = self.send_keys(step + 1, k, v) if step + 1 < ring.size else None
            made: tuple[Tensor, ...] = calls.add(*keys, self.partner(step)[1]) if keys else ()
            home.add(arriving.wait() if arriving else ())
            user = self.partner(step)[0]
            arriving = self.send_gradients(step, made, tuple(calls.like_gradients(self.cut(user, ring.rank, x)) for x in (k, v)))
        home.add(calls.end())
        home.add(arriving.wait() if arriving else ())
        dk, dv = home.finish(k.dtype, v.dtype)
        return calls.finish(), dk, dv

    # -- all keys at once

    def token_dim(self) -> int:
        return 0 if self.layout.cu_seqlens is not None else 1

    def chunks(self) -> Chunks:
        return chunks_by_position(self.layout.order, tuple(range(self.ranks.ring.size)), self.ranks.size)

    def gather(self, x: Tensor) -> Tensor:
        return groups.join_chunks(groups.gather(self.ranks.ring, x), self.chunks(), self.token_dim())

    def scatter_sum(self, x: Tensor) -> Tensor:
        """Of the first tokens; the gradients of the others are zeros."""
        missing = self.layout.tokens - x.shape[self.token_dim()]
        if missing > 0:
            x = torch.cat((x, x.new_zeros((x.shape[0], missing, *x.shape[2:]))), 1)
        return groups.sum_over_ranks(self.ranks.ring, groups.split_chunks(x, self.chunks(), self.token_dim()))


class GradientsOfKeys:
    """dk and dv of this rank's keys: its own calls', and those of other ranks in the order of the steps."""

    def __init__(self, size: int) -> None:
        self.sums = Sum(size), Sum(size)

    def add(self, made: tuple[Tensor, ...]) -> None:
        """Of the first keys, or nothing. Those of packed sequences, without a dimension before the tokens, are always whole."""
        for total, x in zip(self.sums, made, strict=False):
            total.add(slice(0, x.shape[1]), x)

    def finish(self, *dtypes: torch.dtype) -> tuple[Tensor, ...]:
        return tuple(total.finish(dtype) for total, dtype in zip(self.sums, dtypes, strict=True))
