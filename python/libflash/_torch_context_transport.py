"""How keys, values and gradients are sent between the ranks of a ring during a call: two transports with one interface.

messages          of torch.distributed. On GPUs kernels of NCCL send and receive them: beside attention these wait for
                  multiprocessors, or take them away.
symmetric_memory  each rank copies its keys and values once to memory that all ranks can read, and every rank copies from there
                  what it needs; likewise gradients. On GPUs copy engines do that, which need no multiprocessors. Barriers of the
                  ring say when memory may be read and when it may be written again.

Both give the same bits: the order of the sums is that of the steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch

from . import _torch_context_group as groups
from ._torch_context_group import Axis, Chunks, Exchange

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]
ALIGNMENT = 1024  # bytes, of each tensor in symmetric memory
SLOTS = 2  # for gradients: those of a step are read while those of the next one are written


@dataclass(frozen=True)
class Partners:
    """The partners of one rank in a step: `user` is the rank that uses its keys, `owner` the rank whose keys it uses; None if no
    key is visible. `anyone`: whether any rank uses keys in this step.
    """

    step: int
    user: int | None
    owner: int | None
    anyone: bool


class Arrival(Protocol):
    def wait(self) -> tuple[Tensor, ...]:
        """The received tensors. The current stream waits for them, not the host."""


class Transport(Protocol):
    """The transport of one call on one rank. It has the rank's keys and values."""

    takes_multiprocessors: bool

    def keys(self, partners: Partners, sent: tuple[Tensor, ...], like: tuple[Tensor, ...]) -> Arrival:
        """Receive keys and values of the owner, with the shapes of `like`. `sent`: the keys and values for the user."""

    def gradient_memory(self, keys: tuple[Tensor, ...]) -> Pair | None:
        """Memory for gradients of these keys from which they can be sent without a copy, or None."""

    def gradients(self, partners: Partners, made: tuple[Tensor, ...], like: tuple[Tensor, ...]) -> Arrival:
        """Receive the gradients that the user has computed for keys of this rank, with the shapes of `like`. `made`: the
        gradients for the owner's keys. The caller has waited for earlier arrivals. All ranks call it in every step.
        """

    def gather(self, chunks: Chunks, dim: int) -> tuple[Tensor, ...]:
        """Keys and values of all ranks in the order of their tokens, along `dim`."""


class Messages:
    """The transport by messages of torch.distributed."""

    takes_multiprocessors = True

    def __init__(self, axis: Axis, keys: Pair) -> None:
        self.axis = axis
        self.own = keys

    def keys(self, partners: Partners, sent: tuple[Tensor, ...], like: tuple[Tensor, ...]) -> Exchange:
        return Exchange(self.axis, 4 * partners.step, partners.user, sent, partners.owner, like)

    def gradient_memory(self, keys: tuple[Tensor, ...]) -> None:
        return None

    def gradients(self, partners: Partners, made: tuple[Tensor, ...], like: tuple[Tensor, ...]) -> Exchange:
        return Exchange(self.axis, 4 * partners.step + 2, partners.owner, made, partners.user, like)

    def gather(self, chunks: Chunks, dim: int) -> tuple[Tensor, ...]:
        k, v = self.own
        return self.gathered(k, chunks, dim), self.gathered(v, chunks, dim)

    def gathered(self, x: Tensor, chunks: Chunks, dim: int) -> Tensor:
        return groups.join_chunks(groups.gather(self.axis, x), chunks, dim)


class Pending(Protocol):
    def wait(self) -> None:
        """The current stream waits for the copies."""


class Peers(Protocol):
    """Symmetric memory of all ranks of an axis, of the same size on each. Its contents are not kept from call to call."""

    size: int

    def begin(self) -> None:
        """Begin a call: its work is ordered after all earlier calls, including those on other streams."""

    def end(self) -> None:
        """End a call, or clean up after a failed call: no copy is in flight afterwards."""

    def view(self, rank: int, begin: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The memory of a rank, from byte `begin` on, as a contiguous tensor."""

    def barrier(self) -> None:
        """The current stream waits until the streams of all ranks have reached the barrier. Earlier writes are then visible."""

    def copy(self, pairs: Sequence[Pair]) -> Pending:
        """Copy (to, from) pairs of contiguous tensors on another stream, after the work so far of the current stream."""


class Memory(Protocol):
    def reserve(self, axis: Axis, size: int) -> Peers | None:
        """At least `size` bytes on each rank. All ranks call it. None if there is no such memory."""


@dataclass(frozen=True)
class Region:
    """A tensor in symmetric memory."""

    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def end(self) -> int:
        return self.begin + -(-prod(self.shape) * self.dtype.itemsize // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Regions:
    """The regions of a call: K and V of the rank, and slots for the dK and dV that it computes for other ranks."""

    keys: tuple[Region, Region]
    slots: tuple[tuple[Region, Region], ...]
    size: int


def regions_of(ranks: int, keys: Pair, gradient_types: tuple[torch.dtype, torch.dtype] | None) -> Regions:
    """The layout of the memory. `gradient_types`: the types of dK and dV, in backward of a ring."""
    end = 0

    def placed(types: Sequence[torch.dtype]) -> tuple[Region, Region]:
        nonlocal end
        first = Region(end, tuple(keys[0].shape), types[0])
        second = Region(first.end, tuple(keys[1].shape), types[1])
        end = second.end
        return first, second

    own = placed([x.dtype for x in keys])
    slots = tuple(placed(gradient_types) for _ in range(min(SLOTS, ranks - 1))) if gradient_types else ()
    return Regions(own, slots, end)


class Copied:
    def __init__(self, received: tuple[Tensor, ...] = (), pending: Pending | None = None) -> None:
        self.received = received
        self.pending = pending

    def wait(self) -> tuple[Tensor, ...]:
        if self.pending is not None:
            self.pending.wait()
        return self.received


class Copies:
    """The transport through symmetric memory.

    Gradients: the gradients of a step are written to a slot; after a barrier each rank reads the slot of its user during the next
    step. The slot is written again two steps later: before that, all ranks wait for their reads and pass another barrier.
    """

    takes_multiprocessors = False

    def __init__(self, axis: Axis, peers: Peers, regions: Regions, keys: Pair) -> None:
        self.axis, self.peers, self.regions = axis, peers, regions
        self.gradient_steps = 0  # steps so far in which gradients were sent
        peers.begin()
        peers.barrier()  # no rank still reads data of an earlier call
        for region, x in zip(regions.keys, keys, strict=True):
            self.view(axis.rank, region).copy_(x)
        peers.barrier()

    def view(self, rank: int, region: Region, shape: Sequence[int] | None = None) -> Tensor:
        """A region of a rank. With another shape: as much of the region as the shape needs."""
        return self.peers.view(rank, region.begin, region.shape if shape is None else shape, region.dtype)

    def keys(self, partners: Partners, sent: tuple[Tensor, ...], like: tuple[Tensor, ...]) -> Copied:
        del sent  # the user copies the keys itself
        if partners.owner is None:
            return Copied()
        sources = []
        for region, x in zip(self.regions.keys, like, strict=True):
            whole = self.view(partners.owner, region)
            sources.append(whole if whole.shape == x.shape else whole[:, : x.shape[1]])
        return self.copied(sources, like)

    def copied(self, sources: Sequence[Tensor], like: tuple[Tensor, ...]) -> Copied:
        received = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in like)
        pairs = [pair for to, source in zip(received, sources, strict=True) for pair in pieces(to, source)]
        return Copied(received, self.peers.copy(pairs))

    def slot(self) -> tuple[Region, Region]:
        return self.regions.slots[self.gradient_steps % len(self.regions.slots)]

    def gradient_memory(self, keys: tuple[Tensor, ...]) -> Pair:
        dk, dv = (self.view(self.axis.rank, region, x.shape) for region, x in zip(self.slot(), keys, strict=True))
        return dk, dv

    def gradients(self, partners: Partners, made: tuple[Tensor, ...], like: tuple[Tensor, ...]) -> Copied:
        if not partners.anyone:
            return Copied()
        slot = self.slot()
        for region, x in zip(slot, made, strict=False):
            mine = self.view(self.axis.rank, region, x.shape)
            if mine.data_ptr() != x.data_ptr():
                mine.copy_(x)
        self.peers.barrier()
        self.gradient_steps += 1
        user = partners.user
        if user is None:
            return Copied()
        return self.copied([self.view(user, region, x.shape) for region, x in zip(slot, like, strict=True)], like)

    def gather(self, chunks: Chunks, dim: int) -> tuple[Tensor, ...]:
        made = []
        pairs: list[tuple[int, Pair]] = []
        for region in self.regions.keys:
            shape = list(region.shape)
            size = shape[dim] * self.axis.size // len(chunks)
            shape[dim] *= self.axis.size
            joined = self.view(self.axis.rank, region).new_empty(shape)
            made.append(joined)
            for position, (rank, n) in enumerate(chunks):
                source = self.view(rank, region).narrow(dim, n * size, size)
                away = (rank - self.axis.rank) % self.axis.size  # each rank begins with a different rank
                pairs += [(away, pair) for pair in pieces(joined.narrow(dim, position * size, size), source)]
        pairs.sort(key=lambda pair: pair[0])
        self.peers.copy([pair for _, pair in pairs]).wait()
        return tuple(made)


def pieces(to: Tensor, source: Tensor) -> list[Pair]:
    """Pairs of contiguous tensors: other copies would be kernels instead of work for a copy engine."""
    if to.numel() == 0:
        return []
    if to.is_contiguous() and source.is_contiguous():
        return [(to, source)]
    return list(zip(to.unbind(0), source.unbind(0), strict=True))  # of each entry of the batch


@contextmanager
def opened(
    axis: Axis, memory: Memory | None, keys: Pair, gradient_types: tuple[torch.dtype, torch.dtype] | None = None
) -> Iterator[Transport]:
    """The transport for one call of all ranks of the axis: through their symmetric memory, or by messages."""
    regions = regions_of(axis.size, keys, gradient_types)
    peers = memory.reserve(axis, regions.size) if memory is not None and axis.size > 1 else None
    if peers is None:
        yield Messages(axis, keys)
        return
    try:
        yield Copies(axis, peers, regions, keys)
    finally:
        peers.end()
