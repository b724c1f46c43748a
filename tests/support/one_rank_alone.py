"""A rank of a context parallel call without the others: nothing is sent, and what would arrive has arbitrary values. For the
memory that a rank takes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from libflash._torch_context import ContextParallel, make_plan, read_arguments
from libflash._torch_context_group import Axis

from libflash import _torch_context as calls
from libflash import _torch_context_schedule as schedules


def stop_sending(patch: pytest.MonkeyPatch) -> None:
    """Of torch.distributed; and calls on parts, as on GPUs."""
    for name in ("all_gather", "all_to_all_single", "P2POp"):
        patch.setattr(torch.distributed, name, lambda *given, **options: None)
    patch.setattr(torch.distributed, "batch_isend_irecv", lambda operations: [])
    for module in (schedules, calls):
        patch.setattr(module, "serves", lambda *given: True)


def step(x: list[torch.Tensor], scheme: str, order: str, mesh: tuple[int, ...], rank: int, causal: bool, backward: bool) -> Any:
    """Results of rank `rank`, with the gradients if `backward`."""
    given = read_arguments(scheme, order, None, causal, (-1, -1), {})
    where = (rank,) if len(mesh) == 1 else divmod(rank, mesh[1])
    axes = tuple(Axis(None, mine, size) for mine, size in zip(where, mesh, strict=True))
    plan = make_plan(*x, given, axes, None)
    if not backward:
        with torch.no_grad():
            return ContextParallel.apply(plan, *x, None)[0]
    leaves = [y.detach().requires_grad_() for y in x]
    out = ContextParallel.apply(plan, *leaves, None)[0]
    return [out.detach(), *torch.autograd.grad(out, leaves, out.detach())]
