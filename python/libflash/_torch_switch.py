"""Models switched over without a change: enable() and disable() of libflash.torch.

PyTorch keeps a registry of flash-attention implementations (torch.nn.attention). libflash enters itself there under the name
"libflash" and never activates itself; enable() does, and puts back what was active before when it ends.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

import torch.nn.attention as registry

from . import _torch_hf, _torch_sdpa

NAME = "libflash"

registry.register_flash_attention_impl(NAME, register_fn=_torch_sdpa.install)

_switches: list[Switch] = []


class Switch:
    """What enable() did, to be undone by close() or at the end of a with statement."""

    def __init__(self, sdpa: bool, models: tuple[Any, ...]) -> None:
        self.sdpa = sdpa
        self.models = [(model, model.config._attn_implementation) for model in models]
        self.before: str | None = None
        if "transformers" in sys.modules:
            _torch_hf.register()
        elif models:
            raise TypeError(f"{type(models[0]).__name__} is no Hugging Face model: transformers is not loaded")
        for model in models:
            model.set_attn_implementation(_torch_hf.NAME)
        if sdpa and registry.current_flash_attention_impl() != NAME:
            self.before = registry.current_flash_attention_impl()
            registry.activate_flash_attention_impl(NAME)
        _switches.append(self)

    def close(self) -> None:
        """Undo it. PyTorch's own attention comes back when the last switch that wants libflash is closed."""
        if self not in _switches:
            return
        _switches.remove(self)
        for model, implementation in self.models:
            model.set_attn_implementation(implementation)
        heirs = [other for other in _switches if other.sdpa]
        if self.sdpa and heirs:
            heirs[0].before = heirs[0].before or self.before
        elif self.sdpa and registry.current_flash_attention_impl() == NAME:
            registry.restore_flash_attention_impl()
            if self.before is not None:
                registry.activate_flash_attention_impl(self.before)

    def __enter__(self) -> Switch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def enable(*models: Any, sdpa: bool = True) -> Switch:
    """Let existing models run on libflash.

        with libflash.torch.enable():
            model(x)                       # every scaled_dot_product_attention that would take PyTorch's flash kernel

        libflash.torch.enable(model)       # a Hugging Face model, grouped queries and sinks included

    Parameters
    ----------
    models : Hugging Face models (transformers)
        Their attention implementation becomes "lf_attention". If transformers is loaded, that name is registered in any case, for
        `attn_implementation=` when a model is loaded.
    sdpa : bool
        Take over torch.nn.functional.scaled_dot_product_attention, where PyTorch would choose its flash kernel: on the CPU for
        floating-point tensors, on CUDA for float16 and bfloat16. A call that libflash has no kernel for runs on PyTorch's own,
        with one warning for each reason. Masks and their meaning stay PyTorch's.

    Returns
    -------
    Switch, with close(), and a context manager
    """
    return Switch(sdpa, models)


def disable() -> None:
    """Close every switch."""
    for switch in list(_switches):
        switch.close()
