"""Checks that the ranks of a context-parallel call agree. Every rank raises the same error, before any tensor is sent."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ._errors import InvalidError
from ._torch_context_group import Axis

_CALL, _ERROR = "call", "error"


def text_of(x: torch.Tensor) -> str:
    """Type and shape."""
    return f"{str(x.dtype)[6:]} {tuple(x.shape)}"


def agree(axes: tuple[Axis, ...], device: torch.device, describe: Callable[[], dict[str, str]]) -> None:
    """Compare the results of `describe` on all ranks, name by name. If `describe` raises an error, all ranks raise that error."""
    error: Exception | None = None
    try:
        mine = describe()
    except Exception as raised:  # any error: the other ranks wait for this one
        mine, error = {_ERROR: str(raised)}, raised
    for axis in axes:
        if axis.size > 1:
            error = _compare(axis, device, mine, error)
            if error is not None:
                mine = {_ERROR: str(error)}  # sent along the other axis of the mesh, too
    if error is not None:
        raise error


def _compare(axis: Axis, device: torch.device, mine: dict[str, str], error: Exception | None) -> Exception | None:
    digest = hashlib.blake2b(repr(sorted(mine.items())).encode(), digest_size=8).digest()
    number = torch.tensor([int.from_bytes(digest, "little", signed=True)], dtype=torch.int64, device=device)
    found = [torch.empty_like(number) for _ in range(axis.size)]
    dist.all_gather(found, number, group=axis.group)
    if error is None and all(int(other) == int(number) for other in found):
        return None
    if all(int(other) == int(number) for other in found):
        return error
    texts: list[Any] = [None] * axis.size
    dist.all_gather_object(texts, mine, group=axis.group)
    for rank, text in enumerate(texts):
        if _ERROR in text:
            return error if error is not None and rank == axis.rank else InvalidError(f"rank {rank}: {text[_ERROR]}")
    for name in texts[0]:
        for rank, text in enumerate(texts):
            if text.get(name) != texts[0][name]:
                return InvalidError(
                    f"{name} must be the same on all ranks of the group: it is {texts[0][name]} on rank 0 and {text.get(name)} "
                    f"on rank {rank}"
                )
    return InvalidError("the ranks of the group gave different options")
