"""enable() and disable() of libflash.torch, which let existing models run on libflash.

PyTorch keeps a registry of flash-attention implementations (torch.nn.attention). libflash registers itself there under the name
"libflash" without activating itself. enable() activates it; closing the switch restores the previous implementation.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

import torch.nn.attention as registry

from . import _torch_hf_models, _torch_sdpa
from ._errors import InvalidError, UnsupportedError
from ._torch_options import flag

NAME = "libflash"
# Part of the error text with which DTensor refuses PyTorch's operator before any kernel runs, for example in PyTorch's
# context_parallel.
NOT_DIVIDED = ("_scaled_dot_product_flash_attention_for_cpu", "sharding strategy")

registry.register_flash_attention_impl(NAME, register_fn=_torch_sdpa.install)

_switches: list[Switch] = []


class _Activation:
    """libflash's entry in PyTorch's registry, active while a switch is open. Not changed if it was active before, or if
    another implementation was activated since."""

    def __init__(self) -> None:
        self.users = 0
        self.before: str | None = None

    def acquire(self) -> None:
        current = registry.current_flash_attention_impl()
        if self.users == 0 or current != NAME:
            self.before = current
        if current != NAME:
            registry.activate_flash_attention_impl(NAME)
        self.users += 1

    def release(self) -> None:
        self.users -= 1
        if self.users or self.before == NAME or registry.current_flash_attention_impl() != NAME:
            return
        registry.restore_flash_attention_impl()
        if self.before is not None:
            registry.activate_flash_attention_impl(self.before)


_activation = _Activation()


class Switch:
    """The changes that enable() made. close(), or the end of a with statement, undoes them."""

    def __init__(self, sdpa: bool, models: tuple[Any, ...], paged: bool) -> None:
        self.sdpa = sdpa
        self.models = _torch_hf_models.switch(models, paged)
        self._left_before = _torch_sdpa.left.copy()
        if sdpa:
            _activation.acquire()
        _switches.append(self)

    def left(self) -> dict[str, dict[str, int]]:
        """What libflash left to PyTorch since this switch was opened.

        Returns
        -------
        dict from the name of PyTorch's operator to a dict from each reason to the number of calls. An operator that is not
        replaced at all has its reason and 0 calls, because its calls are not counted.
        """
        result: dict[str, dict[str, int]] = {}
        for name, reason in _torch_sdpa.not_taken().items():
            result[name] = {reason: 0}
        for (name, reason), calls in (_torch_sdpa.left - self._left_before).items():
            result.setdefault(name, {})[reason] = calls
        return result

    def close(self) -> None:
        """Undo the changes. The previous implementation is restored when the last switch that activated libflash is closed."""
        if self not in _switches:
            return
        _switches.remove(self)
        _torch_hf_models.restore(self.models)
        if self.sdpa:
            _activation.release()

    def __enter__(self) -> Switch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
        if self.sdpa and isinstance(error, NotImplementedError) and all(part in str(error) for part in NOT_DIVIDED):
            raise UnsupportedError(
                f"PyTorch cannot divide scaled_dot_product_attention among processes on the CPU ({error}); use "
                "libflash.torch.context_parallel_attention for shards of the tokens, and libflash.torch.attention for DTensors "
                "that are sharded by batch or heads"
            ) from error


def enable(*models: Any, sdpa: bool = True, paged: bool = False) -> Switch:
    """Let existing models run on libflash.

        with libflash.torch.enable():
            model(x)                       # every scaled_dot_product_attention that would take a fused kernel

        libflash.torch.enable(model)       # a Hugging Face model, grouped queries and sinks included

        with libflash.torch.enable(model, paged=True):
            model.generate_batch(prompts)      # its continuous batching

    Parameters
    ----------
    models : Hugging Face models (transformers), or modules that contain some
        Their attention implementation becomes "lf_attention". A warning names parts that do not use
        transformers' attention interface. If transformers is loaded, the name is registered in any case, for
        `attn_implementation=` when a model is loaded. A warning then names models and parts that do not use the interface; such a
        model is refused when it is built, if its layers look the name up in a table of their own, or in its first call, if it
        makes its masks with transformers' functions. Others compute attention as without libflash.
    sdpa : bool
        Replace torch.nn.functional.scaled_dot_product_attention where PyTorch would choose a fused kernel: its flash kernel on
        the CPU; flash, cuDNN or memory-efficient attention on CUDA. Masks keep PyTorch's meaning, and PyTorch still makes the
        choice: a call for which PyTorch chooses its math path stays there. A call that libflash does not support runs on
        PyTorch's own kernel, with one warning for each reason; Switch.left() lists these calls and reasons. Dropout draws its
        seed from PyTorch's default generator; the mask differs from PyTorch's.
        Derivatives are those of PyTorch's operator: first derivatives in reverse mode. PyTorch refuses others; for these a model
        must call libflash.torch.attention.

    paged : bool
        The models run only in transformers' continuous batching (generate_batch and its managers): their attention implementation
        becomes "lf_flash_paged". On the CPU the pages of layers with full attention are read in place.

    Returns
    -------
    Switch, with close(), and a context manager

    Raises
    ------
    TypeError if an argument is not a Hugging Face model, or a model does not use transformers' attention interface. InvalidError
    without a model, if paged=True, or if sdpa=False and transformers is not loaded. UnsupportedError with paged=True, if
    transformers is too old. Then nothing is switched. UnsupportedError at the end of a with statement that fails because PyTorch
    cannot divide attention among processes on the CPU, as in PyTorch's context_parallel with causal attention.
    """
    sdpa, paged = flag(sdpa, "sdpa"), flag(paged, "paged")
    if paged and not models:
        raise InvalidError("paged is True and no model is given: enable(model, paged=True) switches the models that it gets")
    if not sdpa and not models and "transformers" not in sys.modules:
        raise InvalidError(
            "sdpa is False and no model is given, so nothing would be switched; and transformers, in which enable() registers "
            "the names of libflash, is not loaded"
        )
    return Switch(sdpa, models, paged)


def disable() -> None:
    """Close every switch."""
    for switch in list(_switches):
        switch.close()
