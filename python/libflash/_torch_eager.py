"""Whether a call can reach the library without PyTorch's dispatcher, which takes longer than a small call."""

from __future__ import annotations

import sys

import torch

from . import _core

Tensor = torch.Tensor

_plain = (Tensor, torch.nn.Parameter, type(None))


def register_sharding() -> None:
    """Register the rules for DTensors once PyTorch's module for them is imported. It is slow to import."""
    if "torch.distributed.tensor" in sys.modules:
        from . import _torch_sharding  # noqa: F401


def eager(*tensors: Tensor | None) -> bool:
    """True if the library can be called without an operator: plain tensors, no compiling, transform, mode, tracer or profiler."""
    if torch.compiler.is_compiling():
        return False
    if _core.needs_no_operator(tensors):
        return True
    if not all(type(x) in _plain for x in tensors):
        register_sharding()
    return False
