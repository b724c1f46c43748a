"""Whether a call can reach the library without PyTorch's dispatcher, which takes longer than a small call."""

from __future__ import annotations

import sys

import torch

from . import _core

Tensor = torch.Tensor

_profiling = torch._C._autograd._profiler_enabled
_plain = (Tensor, torch.nn.Parameter)
_unobserved = _core.torch_is_plain


def register_sharding() -> None:
    """Register the rules for DTensors once PyTorch's module for them is imported. It is slow to import."""
    if "torch.distributed.tensor" in sys.modules:
        from . import _torch_sharding  # noqa: F401


def eager(*tensors: Tensor | None) -> bool:
    """True if the library can be called without an operator: plain tensors, no compiling, transform, mode, tracer or profiler."""
    if torch.compiler.is_compiling():
        return False
    for x in tensors:
        if type(x) not in _plain and x is not None:
            register_sharding()
            return False
    return _unobserved() and not _profiling() and not (tensors[0] is not None and tensors[0].is_meta)
