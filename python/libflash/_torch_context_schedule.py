"""Attention of the rows of a rank over the keys of all ranks of an axis: keys are passed from rank to rank, or gathered.

ring: in step t rank r computes with the keys of rank r - t, which that rank sends to it directly. Pairs of ranks without a
visible pair of row and key send nothing, so with a window only neighbours send. In backward, each step computes, from out and lse
of the whole rows, its part of dq, and dk and dv of its keys; dk and dv are sent back to the keys' rank and added in the order of
the steps. The keys of the next step are sent during the computation.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from . import _torch_context_group as groups
from ._context_layout import Layout, LocalTokens, chunks_by_position
from ._torch_context_group import Chunks, Ranks
from ._torch_context_parts import Part, PartBackward, PartForward, Sum, keys_used, parts_of, serves
from ._torch_context_positions import PositionBackward, PositionForward
from ._torch_context_transport import Arrival, Memory, Partners, Transport, opened

ALL = -1  # in place of the number of a rank: the keys of all ranks together

Tensor = torch.Tensor


@dataclass
class Schedule:
    """`options`: of libflash.attention, the same in all steps. `window`: keys that a row sees to the left and right; -1: all.
    `memory`: the symmetric memory of the ring, if it has some.
    """

    ranks: Ranks
    layout: Layout
    window: tuple[int, int]
    gathered: bool
    options: dict[str, Any]
    sink: Tensor | None = None
    memory: Memory | None = None

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

    def partners(self, step: int) -> Partners:
        ring = self.ranks.ring
        user, owner = (ring.rank + step) % ring.size, (ring.rank - step) % ring.size
        return Partners(step, user if self.sees(user, ring.rank) else None, owner if self.sees(ring.rank, owner) else None,
                        _anyone_sees(self.layout, self.ranks.heads.size, ring.size, self.window, step))  # fmt: skip

    def parts(self, rows: int, columns: int) -> tuple[Part, ...]:
        return parts_of(self.layout, self.members(rows), self.members(columns), self.options["causal"])

    def cut(self, rows: int, columns: int, x: Tensor) -> Tensor:
        """The part of the keys or values x of the rank `columns` that the rank `rows` needs."""
        return x[:, : keys_used(self.parts(rows, columns))] if self.in_parts(x) else x

    def opened(
        self, k: Tensor, v: Tensor, gradient_types: tuple[torch.dtype, torch.dtype] | None = None
    ) -> AbstractContextManager[Transport]:
        return opened(self.ranks.ring, self.memory, (k, v), gradient_types)

    def send_keys(self, transport: Transport, step: int, k: Tensor, v: Tensor) -> Arrival | None:
        """Send the keys of a step. Returns None after the last step."""
        ring = self.ranks.ring
        if step >= ring.size:
            return None
        partners = self.partners(step)
        user, owner = partners.user, partners.owner
        sent = () if user is None else tuple(self.cut(user, ring.rank, x) for x in (k, v))
        return transport.keys(partners, sent, () if owner is None else tuple(self.cut(ring.rank, owner, x) for x in (k, v)))

    def send_gradients(self, transport: Transport, step: int, made: tuple[Tensor, ...], like: tuple[Tensor, ...]) -> Arrival:
        """Send the gradients of a step. `like`: shape and type of the gradients of all keys of this rank."""
        partners = self.partners(step)
        user = partners.user
        return transport.gradients(
            partners, made, () if user is None else tuple(self.cut(user, self.ranks.ring.rank, x) for x in like)
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        calls = self.forward_calls(q, v)
        with self.opened(k, v) as transport:
            if self.gathered:
                gathered = transport.gather(self.chunks(), self.token_dim())
                calls.add(*gathered, ALL)
                del gathered
            else:
                self.forward_steps(calls, transport, k, v)
        return calls.finish()

    def forward_steps(self, calls: PositionForward | PartForward, transport: Transport, k: Tensor, v: Tensor) -> None:
        following = self.send_keys(transport, 1, k, v)
        calls.add(k, v, self.ranks.ring.rank, beside_kernels=following is not None and transport.takes_multiprocessors)
        for step in range(1, self.ranks.ring.size):
            keys = following.wait() if following else ()
            following = self.send_keys(transport, step + 1, k, v)
            if keys:
                beside = following is not None and transport.takes_multiprocessors
                calls.add(keys[0], keys[1], self.owner(step), beside_kernels=beside)

    def owner(self, step: int) -> int:
        return (self.ranks.ring.rank - step) % self.ranks.ring.size

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None,
                 dsink: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        calls = self.backward_calls((dout, q, out, lse), dlse, dsink)
        if self.gathered:
            with self.opened(k, v) as transport:
                gathered = transport.gather(self.chunks(), self.token_dim())
            gradients = calls.add(*gathered, ALL)
            del gathered
            dk, dv = (self.scatter_sum(x).to(k.dtype) for x in gradients)
            return calls.finish(), dk, dv
        with self.opened(k, v, (calls.gradient_type(k), calls.gradient_type(v))) as transport:
            dk, dv = self.backward_steps(calls, transport, k, v)
        return calls.finish(), dk, dv

    def backward_steps(self, calls: PositionBackward | PartBackward, transport: Transport, k: Tensor,
                       v: Tensor) -> tuple[Tensor, ...]:  # fmt: skip
        gradients = GradientsOfKeys(k.shape[1])
        following = self.send_keys(transport, 1, k, v)
        gradients.add(calls.begin(k, v))
        like = tuple(x.new_empty((), dtype=calls.gradient_type(x)).expand(x.shape) for x in (k, v))
        arriving: Arrival | None = None
        for step in range(1, self.ranks.ring.size):
            keys = following.wait() if following else ()
            following = self.send_keys(transport, step + 1, k, v)
            made: tuple[Tensor, ...] = ()
            if keys:
                made = calls.add(keys[0], keys[1], self.owner(step), into=transport.gradient_memory(keys))
            gradients.add(arriving.wait() if arriving else ())
            arriving = None  # frees its memory before more arrives
            arriving = self.send_gradients(transport, step, made, like)
        gradients.add(calls.end())
        gradients.add(arriving.wait() if arriving else ())
        return gradients.finish(k.dtype, v.dtype)

    # -- all keys at once

    def token_dim(self) -> int:
        return 0 if self.layout.cu_seqlens is not None else 1

    def chunks(self) -> Chunks:
        return chunks_by_position(self.layout.order, tuple(range(self.ranks.ring.size)), self.ranks.size)

    def scatter_sum(self, x: Tensor) -> Tensor:
        """The sum over the ranks. x has the first tokens; the gradients of the other tokens are zeros."""
        missing = self.layout.tokens - x.shape[self.token_dim()]
        if missing > 0:
            x = torch.cat((x, x.new_zeros((x.shape[0], missing, *x.shape[2:]))), 1)
        return groups.sum_over_ranks(self.ranks.ring, groups.split_chunks(x, self.chunks(), self.token_dim()))


@cache
def _anyone_sees(layout: Layout, heads: int, ring: int, window: tuple[int, int], step: int) -> bool:
    """Whether any rank uses keys in a step; `heads`, `ring`: the number of ranks of each axis."""
    members = [tuple(rank * heads + n for n in range(heads)) for rank in range(ring)]
    return any(layout.sees(members[rank], members[rank - step], window) for rank in range(ring))


class GradientsOfKeys:
    """dk and dv of this rank's keys: the sum of its own part and the parts of other ranks, in the order of the steps."""

    def __init__(self, size: int) -> None:
        self.sums = Sum(size), Sum(size)

    def add(self, made: tuple[Tensor, ...]) -> None:
        """Add gradients of the first keys, or nothing. Packed gradients, without a batch dimension, always have all keys."""
        for total, x in zip(self.sums, made, strict=False):
            total.add(slice(0, x.shape[1]), x)

    def finish(self, *dtypes: torch.dtype) -> tuple[Tensor, ...]:
        return tuple(total.finish(dtype) for total, dtype in zip(self.sums, dtypes, strict=True))
