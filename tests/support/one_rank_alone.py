"""A rank of a context parallel call without the other ranks: nothing is sent, and received tensors have arbitrary values. For
tests of the memory that a rank takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from math import prod
from typing import Any

import pytest
import torch
from libflash._torch_context import ContextParallel, make_plan, read_arguments
from libflash._torch_context_group import Axis
from libflash._torch_context_transport import Copied

from libflash import _torch_context as calls
from libflash import _torch_context_schedule as schedules


def stop_sending(patch: pytest.MonkeyPatch) -> None:
    """Disable the communication of torch.distributed, and use calls on parts of the problem, as on GPUs."""
    for name in ("all_gather", "all_to_all_single", "P2POp"):
        patch.setattr(torch.distributed, name, lambda *given, **options: None)
    patch.setattr(torch.distributed, "batch_isend_irecv", lambda operations: [])
    for module in (schedules, calls):
        patch.setattr(module, "serves", lambda *given: True)


class OwnMemory:
    """Replaces symmetric memory: the memory of this rank is used in place of that of every rank."""

    size = 0

    def reserve(self, axis: Axis, size: int) -> OwnMemory:
        del axis
        if self.size < size:
            self.block = torch.zeros(size, dtype=torch.uint8)
            self.size = size
        return self

    def view(self, rank: int, begin: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        del rank
        return self.block[begin : begin + prod(shape) * dtype.itemsize].view(dtype).view(tuple(shape))

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Copied:
        for to, source in pairs:
            to.copy_(source)
        return Copied()

    def nothing(self) -> None:
        pass

    begin = end = barrier = nothing


def step(
    x: list[torch.Tensor], scheme: str, order: str, mesh: tuple[int, ...], rank: int, causal: bool, backward: bool,
    memory: OwnMemory | None = None,
) -> Any:  # fmt: skip
    """Results of rank `rank`, with the gradients if `backward`."""
    given = read_arguments(scheme, order, None, causal, (-1, -1), {})
    where = (rank,) if len(mesh) == 1 else divmod(rank, mesh[1])
    axes = tuple(Axis(None, mine, size) for mine, size in zip(where, mesh, strict=True))
    plan = dataclasses.replace(make_plan(*x, given, axes, None), memory=memory)
    if not backward:
        with torch.no_grad():
            return ContextParallel.apply(plan, *x, None)[0]
    leaves = [y.detach().requires_grad_() for y in x]
    out = ContextParallel.apply(plan, *leaves, None)[0]
    return [out.detach(), *torch.autograd.grad(out, leaves, out.detach())]
