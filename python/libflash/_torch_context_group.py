"""The ranks of a context-parallel call and the messages between them, on process groups of torch.distributed only.

A mesh of two dimensions is (heads, ring): ranks along the first dimension exchange heads for tokens, ranks along the second keep
their heads and pass keys. Token shards are numbered ring first: shard = ring rank * heads ranks + heads rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ._errors import InvalidError

Tensor = torch.Tensor


@dataclass(frozen=True)
class Axis:
    """One dimension of the mesh; `group` is None if it has one rank."""

    group: Any
    rank: int
    size: int

    def global_rank(self, rank: int) -> int:
        return rank if self.group is dist.group.WORLD else dist.get_global_rank(self.group, rank)


@dataclass(frozen=True)
class Ranks:
    heads: Axis
    ring: Axis
    world: Any  # a group of all ranks, or None if there is none (mesh of two dimensions)

    @property
    def size(self) -> int:
        return self.heads.size * self.ring.size

    @property
    def shard(self) -> int:
        return self.ring.rank * self.heads.size + self.heads.rank

    def members(self, ring_rank: int) -> tuple[int, ...]:
        """The shards of the ranks that have ring rank `ring_rank`."""
        return tuple(ring_rank * self.heads.size + u for u in range(self.heads.size))


ALONE = Axis(None, 0, 1)


def axis_of(group: Any) -> Axis:
    rank = dist.get_rank(group)
    if rank < 0:
        raise InvalidError("group does not have this rank; call only on the ranks that are its members")
    return Axis(group, rank, dist.get_world_size(group))


def groups_of(group: Any, mesh: Any) -> tuple[Axis, ...]:
    """The axes of the caller's group or mesh."""
    if not dist.is_available() or not dist.is_initialized():
        raise InvalidError("context parallelism needs torch.distributed.init_process_group() first")
    if group is not None and mesh is not None:
        raise InvalidError("group and mesh are given; one of them says which ranks take part")
    if mesh is None:
        return (axis_of(dist.group.WORLD if group is None else group),)
    if not hasattr(mesh, "get_group"):
        raise InvalidError(f"mesh is of type {type(mesh).__name__}; it must be a DeviceMesh")
    if mesh.ndim not in (1, 2):
        raise InvalidError(f"mesh has {mesh.ndim} dimensions; it must have one, (ring,), or two, (heads, ring)")
    if mesh.get_coordinate() is None:
        raise InvalidError(
            f"mesh has the ranks {mesh.mesh.tolist()}, and not this one, {dist.get_rank()}; call only on its ranks"
        )
    return tuple(axis_of(mesh.get_group(n)) for n in range(mesh.ndim))


def ranks_of(axes: tuple[Axis, ...], scheme: str) -> Ranks:
    """Which axis exchanges heads and which passes keys."""
    if len(axes) == 2:
        return Ranks(*axes, None)
    (axis,) = axes
    return Ranks(axis, ALONE, axis.group) if scheme == "heads" else Ranks(ALONE, axis, axis.group)


_connected: weakref.WeakSet[Any] = weakref.WeakSet()


def connect(axis: Axis, device: torch.device) -> None:
    """Make all ranks of a group of GPUs communicate once, so that NCCL connects them. NCCL needs all ranks for this, but in a
    step of a ring some ranks may have nothing to send.
    """
    group = dist.group.WORLD if axis.group is None else axis.group
    if axis.size == 1 or group in _connected:
        return
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    _connected.add(group)


class Exchange:
    """Messages in flight between this rank and two others of an axis: tensors sent to one, tensors received from the other."""

    def __init__(self, axis: Axis, tag: int, to: int | None, sent: tuple[Tensor, ...], source: int | None,
                 like: tuple[Tensor, ...]) -> None:  # fmt: skip
        self.received = (
            tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in like) if source is not None else ()
        )
        self.kept = tuple(x.contiguous() for x in sent) if to is not None else ()
        operations = []
        for n, x in enumerate(self.kept):
            operations.append(dist.P2POp(dist.isend, x, axis.global_rank(to), axis.group, tag + n))
        for n, x in enumerate(self.received):
            operations.append(dist.P2POp(dist.irecv, x, axis.global_rank(source), axis.group, tag + n))
        self.work = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> tuple[Tensor, ...]:
        for work in self.work:
            work.wait()
        return self.received


def gather(axis: Axis, x: Tensor) -> list[Tensor]:
    """The tensors of all ranks of the axis, which have the same shape."""
    if axis.size == 1:
        return [x]
    made = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(axis.size)]
    dist.all_gather(made, x.contiguous(), group=axis.group)
    return made


def swap(axis: Axis, sent: Tensor) -> Tensor:
    """sent[n] goes to rank n; returns what the ranks sent to this one, in their order."""
    if axis.size == 1:
        return sent
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=axis.group)
    return received


Chunks = tuple[tuple[int, int], ...]  # as from chunks_by_position


def join_chunks(parts: Sequence[Tensor], chunks: Chunks, dim: int) -> Tensor:
    """The tokens of all ranks in their order, from the parts of the ranks."""
    size = parts[0].shape[dim] * len(parts) // len(chunks)
    return torch.cat([parts[rank].narrow(dim, n * size, size) for rank, n in chunks], dim)


def split_chunks(x: Tensor, chunks: Chunks, dim: int) -> Tensor:
    """The inverse of join_chunks: the parts of the ranks, along a new first dimension."""
    size = x.shape[dim] // len(chunks)
    pieces: dict[int, list[Tensor]] = {}
    for position, (rank, _) in enumerate(chunks):  # the chunks of a rank ascend
        pieces.setdefault(rank, []).append(x.narrow(dim, position * size, size))
    shape = list(x.shape)
    shape[dim] //= len(pieces)
    made = x.new_empty((len(pieces), *shape))
    for rank, own in pieces.items():
        torch.cat(own, dim, out=made[rank])
    return made


def sum_over_ranks(axis: Axis, x: Tensor) -> Tensor:
    """On rank n, the sum of x[n] over all ranks: at least in float32, and in the order of the ranks, so the same in every run."""
    parts = swap(axis, x)
    total = parts[0].to(torch.promote_types(x.dtype, torch.float32), copy=True)  # a copy: a view would keep all parts in memory
    for part in parts[1:]:
        total += part
    return total
