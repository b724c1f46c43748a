"""PyTorch's scaled_dot_product_attention on libflash: the kernels of _torch_sdpa_operators.py in PyTorch's dispatcher.

An operator is replaced together with its backward operator, and only if both have the schemas that the functions here were
written for. A call that libflash does not support runs on PyTorch's own kernel, and `left` counts it.
"""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from . import _torch_sdpa_random as random
from ._errors import InvalidError, NoDeviceError, UnsupportedError
from ._torch_sdpa_mask import fill_mask
from ._torch_sdpa_operators import NOT_SERVED, PAIRS

left: Counter[tuple[str, str]] = Counter()  # (operator, reason) -> calls since the process began
_warned: set[str] = set()


class _Operator:
    """An operator of PyTorch: its name, its dispatch key, and the function that replaces its kernel."""

    def __init__(self, name: str, key: str, function: Callable[..., Any]) -> None:
        self.name, self.key, self.function = name, key, function

    def refusal(self) -> str | None:
        """Why this PyTorch's operator differs from the one that the function was written for; None if it does not."""
        packet = getattr(torch.ops.aten, self.name, None)
        if packet is None:
            return f"this PyTorch ({torch.__version__}) has no such operator"
        schema, parameters = packet.default._schema, inspect.signature(self.function).parameters
        known = list(parameters)
        for kind, kw_only in (("positional", False), ("keyword", True)):
            has = [x.name for x in schema.arguments if x.kwarg_only == kw_only]
            wants = [x for x in known if (parameters[x].kind == inspect.Parameter.KEYWORD_ONLY) == kw_only]
            unknown = [x for x in has if x not in wants]
            if unknown:
                return f"its {kind} argument {unknown[0]} is not known to libflash"
            missing = [x for x in wants if x not in has and parameters[x].default is inspect.Parameter.empty]
            if missing:
                return f"it has no {kind} argument {missing[0]}"
            if not kw_only and has != wants[: len(has)]:
                return f"its arguments come in the order {', '.join(has)}"
        return None

    def original(self) -> Any:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{self.name}", self.key):
            return None
        return torch.library.get_kernel(f"aten::{self.name}", self.key)

    def install(self, library: Any, kernel: Callable[..., Any]) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")  # the warning that a kernel is overridden
            library.impl(self.name, kernel, self.key, with_keyset=True, allow_override=True)


def _with_fallback(name: str, function: Callable[..., Any], original: Any) -> Callable[..., Any]:
    """A kernel that calls the function, and PyTorch's own kernel for a call that libflash refuses."""

    def call(keyset: Any, *args: Any, **keywords: Any) -> Any:
        try:
            # PyTorch has handled autograd and subclasses of Tensor before it calls these kernels; libflash must not handle them
            # again.
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                return function(*map(_plain, args), **{name: _plain(x) for name, x in keywords.items()})
        except (UnsupportedError, InvalidError, NoDeviceError) as refusal:
            if original is None:
                raise
            _count_left(name, str(refusal))
        return original.call_boxed(keyset, *args, **keywords)

    return call


def _plain(x: Any) -> Any:
    return x.as_subclass(torch.Tensor) if isinstance(x, torch.Tensor) and type(x) is not torch.Tensor else x


def _count_left(name: str, reason: str) -> None:
    left[name, reason] += 1
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(f"scaled_dot_product_attention stays with PyTorch's kernel: {reason}", stacklevel=3)


def not_taken() -> dict[str, str]:
    """The operators of this PyTorch that are not replaced: name -> reason."""
    reasons = {}
    for forward, backward in _operators():
        refusal = forward.refusal() or backward.refusal()
        if refusal is not None:
            reasons[forward.name] = refusal
    for name, reason in NOT_SERVED.items():
        packet, _, overload = name.partition(".")
        if hasattr(getattr(torch.ops.aten, packet, None), overload or "default"):
            reasons[name] = reason
    return reasons


def _operators() -> list[tuple[_Operator, _Operator]]:
    pairs = []
    for name, key, forward, backward in PAIRS:
        suffix = "_forward" if name == "_flash_attention" else ""
        pairs.append((_Operator(name + suffix, key, forward), _Operator(name + "_backward", key, backward)))
    return pairs


class _BackwardKernels:
    """The backward operators in PyTorch's dispatcher.

    Once libflash has drawn a dropout mask, these operators stay installed when libflash is switched off, because a later backward
    pass needs the same mask, which only libflash can draw. They then serve only such calls.
    """

    def __init__(self) -> None:
        self.library: Any = None
        self.active = False

    def start(self, operators: list[_Operator]) -> None:
        self.active = True
        if self.library is None:
            self.library = torch.library.Library("aten", "IMPL")
            for operator in operators:
                operator.install(self.library, self.kernel(operator))

    def stop(self) -> None:
        self.active = False
        if not random.masks["drawn"]:
            self.library._destroy()
            self.library = None

    def kernel(self, operator: _Operator) -> Callable[..., Any]:
        original = operator.original()
        kernel = _with_fallback(operator.name, operator.function, original)
        state = [
            i for i, name in enumerate(inspect.signature(operator.function).parameters) if name in ("philox_offset", "unused")
        ]

        def call(keyset: Any, *args: Any, **keywords: Any) -> Any:
            if self.active or (state and random.is_ours(args[state[0]])):
                return kernel(keyset, *args, **keywords)
            return original.call_boxed(keyset, *args, **keywords)

        return call


_backward_kernels = _BackwardKernels()


class Override:
    """The operators in PyTorch's dispatcher, until remove()."""

    def __init__(self) -> None:
        taken = [pair for pair in _operators() if all(operator.refusal() is None for operator in pair)]
        self.library: Any = torch.library.Library("aten", "IMPL")
        for forward, _ in taken:
            forward.install(self.library, _with_fallback(forward.name, forward.function, forward.original()))
        mask = _Operator("_fill_mem_eff_dropout_mask_", "CUDA", fill_mask)
        if mask.refusal() is None:
            mask.install(self.library, _with_fallback(mask.name, mask.function, mask.original()))
        _backward_kernels.start([backward for _, backward in taken])

    def remove(self) -> None:
        if self.library is not None:
            self.library._destroy()
            self.library = None
            _backward_kernels.stop()


def install() -> Override:
    return Override()
