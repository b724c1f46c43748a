"""The targets by name; each adapter imports its framework when it is made."""

from __future__ import annotations

import importlib

from ..target import Target

# Name, or what comes before a colon: module and class of the adapter, and what may come after the colon.
ADAPTERS = {
    "libflash": ("own", "Own", "the CPU kernels of one instruction set, for instance scalar"),
    "libflash.torch": ("own_torch", "OwnTorch", ""),
    "libflash.jax": ("own_jax", "OwnJax", ""),
    "libflash.flash_attn": ("flash_attn", "DropIn", ""),
    "flash_attn": ("flash_attn", "FlashAttn", ""),
    "torch.sdpa": ("torch_sdpa", "TorchSdpa", "math, flash, efficient or cudnn: this backend alone"),
    "jax": ("jax_sdpa", "JaxSdpa", "xla or cudnn: this implementation"),
}


def make(name: str, device: str, arrays: str = "numpy") -> Target:
    """The target of that name; `arrays`: what a module:function takes. ValueError: no such target, or not on that device."""
    adapter, colon, detail = name.partition(":")
    if adapter in ADAPTERS:
        module, made, details = ADAPTERS[adapter]
        if colon and not details:
            raise ValueError(f"--target {adapter} takes nothing after a colon, not {detail!r}")
        found: type[Target] = getattr(importlib.import_module(f"{__name__}.{module}"), made)
    elif colon:
        from .function import Function

        return Function(name, device, arrays)
    else:
        raise ValueError(f"--target must be {', '.join(ADAPTERS)} or module:function, not {name!r}")
    return found(detail or None, device)  # type: ignore[call-arg]
