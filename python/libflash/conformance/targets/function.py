"""A function of the user, module:function, with the meaning of libflash.attention and some or all of its options.

    function(q, k, v, *, causal, window_size, softmax_scale, ..., return_lse)

q, k, v are (batch, seqlen, heads, head_dim) arrays, or (total, heads, head_dim) with cu_seqlens_q. The options that the function
offers are read from its signature: those that it names, or all if it takes any keyword. If it has the option return_lse, it
returns (out, lse), else out alone. Gradients come from the framework of the arrays. The function refuses a shape, type or
combination that it does not support with NotImplementedError.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from .. import needs
from ..case import Inputs
from ..convert import jax_results, named, torch_results
from ..target import Results, Target

ARRAYS = ("numpy", "torch", "jax")
OPTIONS = {*needs.OPTIONS, *needs.ALIGNED}


class Function(Target):
    def __init__(self, name: str, device: str, arrays: str) -> None:
        self.name, self.device, self.arrays = name, device, arrays
        self.function = load(name)
        parameters = inspect.signature(self.function).parameters.values()
        self.any_option = any(p.kind == inspect.Parameter.VAR_KEYWORD for p in parameters)
        self.options = {p.name for p in parameters}
        self.offers = frozenset(self.read_offers())
        self.versions = {arrays: importlib.import_module(arrays).__version__}
        if arrays == "numpy" and device != "cpu":
            raise ValueError(f"NumPy's arrays are on the CPU, not on {device}")

    def has(self, option: str) -> bool:
        return self.any_option or option in self.options

    def read_offers(self) -> set[str]:
        found = {*needs.TYPES, *needs.SHAPES, *filter(self.has, OPTIONS)}
        aligns = ("bottom_right", "top_left") if self.has("causal_align") else ("bottom_right",)
        found |= {f"{name} {align}" for name in needs.ALIGNED if self.has(name) for align in aligns}
        if self.arrays != "numpy":
            found |= {"gradients", *(["dlse"] if self.has("return_lse") else [])}
        return found - {"fp64"} if self.arrays == "jax" else found  # JAX has it with jax_enable_x64 only

    def results(self, x: Inputs) -> Results:
        if self.arrays == "torch":
            return torch_results(x, self.attention, self.device)
        if self.arrays == "jax":
            import jax

            from .jax_device import on_device

            with jax.default_device(on_device(self.device)):
                return jax_results(x, self.attention)
        return named(["o", "lse"], self.attention(x.q, x.k, x.v, return_lse=True, **x.options))

    def attention(self, q: Any, k: Any, v: Any, *, return_lse: bool, **options: Any) -> Any:
        given = {name: value for name, value in options.items() if self.has(name)}
        if self.has("return_lse"):
            return self.function(q, k, v, return_lse=return_lse, **given)
        return self.function(q, k, v, **given), None


def load(name: str) -> Any:
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--target {name}: {error}") from error
