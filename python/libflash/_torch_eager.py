"""Whether a call can reach the library without PyTorch's dispatcher, which takes longer than a small call."""

from __future__ import annotations

import sys

import torch
from torch._C._functorch import is_batchedtensor

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


def has_values(x: Tensor) -> bool:
    """Whether Python can read the values of x. True also at a level of torch.func and under the profiler, where eager() is false.
    False for a tensor that vmap maps, and where a mode or tracer would record the read."""
    return not (
        torch.compiler.is_compiling()
        or type(x) not in _plain
        or is_batchedtensor(x)
        or torch._C._len_torch_dispatch_stack()
        or torch._C._is_tracing()
        or torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PreDispatch)
    )
