"""DTensors: tensors that a call makes beside them, and refusals by the names that the caller knows. The sharding rules are in
_torch_sharding.py."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ._errors import InvalidError, UnsupportedError

Tensor = torch.Tensor


def is_dtensor(x: Any) -> bool:
    return hasattr(x, "placements")


def beside(x: Any, made: Tensor) -> Tensor:
    """`made`, which has the same values on all ranks; as a DTensor if x is one."""
    if not is_dtensor(x):
        return made
    from torch.distributed.tensor import DTensor, Replicate

    mesh = x.device_mesh
    return DTensor.from_local(made, mesh, [Replicate()] * mesh.ndim, run_check=False)


def refuse_plain(given: dict[str, Any]) -> None:
    """Refuse plain tensors beside DTensors, unless PyTorch replicates them: those of one element, and within its
    implicit_replication(). PyTorch's own error names no argument. Not checked inside torch.compile, which cannot trace this."""
    if torch.compiler.is_compiling():
        return
    distributed = next((name for name, x in given.items() if is_dtensor(x)), None)
    if distributed is None or replicates_plain():
        return
    for name, x in given.items():
        if isinstance(x, Tensor) and not is_dtensor(x) and x.numel() != 1:
            raise InvalidError(
                f"{name} is a plain tensor, and {distributed} is a DTensor; make {name} a DTensor too, on the same mesh: "
                "distribute_tensor() of the whole tensor, or DTensor.from_local() of each rank's part"
            )


def refuse_written(operator: str, name: str, x: Any) -> None:
    """Refuse to write to a DTensor."""
    if is_dtensor(x):
        raise UnsupportedError(
            f"{name} is a DTensor, and {operator} writes to it and has no sharding rule: PyTorch might write to a gathered copy; "
            f"call it with each rank's part, {name}.to_local()"
        )


def replicates_plain() -> bool:
    """Whether the call is within implicit_replication(). True if this version of PyTorch does not say: then PyTorch itself
    refuses plain tensors."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    dispatcher = getattr(getattr(module, "DTensor", None), "_op_dispatcher", None)
    return bool(getattr(dispatcher, "_allow_implicit_replication", True))
