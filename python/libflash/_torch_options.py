"""The options that a call of libflash.torch passes on to the operators, and the signatures that help() shows."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import (
    get_dynamic_layer_stack_depth,
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
)
from torch.autograd import forward_ad

from . import _core
from ._arguments import described, plainly, refuse_bool
from ._arguments import integer as integer_of
from ._block_mask import BlockMask
from ._errors import InvalidError, UnsupportedError
from ._option_list import BLOCKS, INTEGER, NUMBER, OPTIONS, SHARD, WINDOW, Option
from ._torch_dtensor import refuse_plain
from ._torch_kernels import BLOCK_LISTS
from ._torch_tangents import tangent_of

F = TypeVar("F", bound=Callable[..., Any])


def options_of(function: str) -> list[Option]:
    return [option for option in OPTIONS if function in option.functions and option.torch]


def signed_as(function: str, **types: str) -> Callable[[F], F]:
    """Decorator: help() and inspect show every option, even those that the function only passes on as keywords. `types`: the
    types that differ from libflash's; such an option has the default None."""

    def set_signature(f: F) -> F:
        written = inspect.signature(f)
        parameters = [p for p in written.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        for option in options_of(function):
            default = None if option.name in types else option.default
            annotation = types.get(
                option.name, option.type.replace("Array", "Tensor").replace("Window", "tuple[int | None, int | None]")
            )
            parameters.append(
                inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            )
        f.__signature__ = written.replace(parameters=parameters)  # type: ignore[attr-defined]
        return f

    return set_signature


def known_options(function: str) -> dict[str, tuple[str, str, Any]]:
    """For each option that a call passes on: its form, the operator's name for it, and its default."""
    names = {"kernel": "kernel_name"}  # PyTorch's compiler reserves the argument name `kernel`
    return {
        option.name: (form_of(option), names.get(option.name, option.name), option.default) for option in options_of(function)
    }


# Options of attention() that libflash.torch handles differently: a BlockMask holds four tensors, packed results are filled, lse
# without out is refused, libflash.attention has no `deterministic`, and dropout draws a seed.
NOT_DIRECT = ("block_mask", "cu_seqlens_q", "lse", "deterministic", "dropout_p", "seed", "offset")


def direct_options(function: str) -> dict[str, bool]:
    """The options that mean the same in libflash.torch and in libflash, and whether None is one of their values."""
    known = {option.name: option.default is None or option.nullable for option in options_of(function)}
    return {
        name: nullable
        for name, nullable in known.items()
        if name not in NOT_DIRECT or (function == "decode" and name != "cu_seqlens_q")
    }


def form_of(option: Option) -> str:
    """How given_options() compares the option with its default and converts it."""
    if option.kind in (BLOCKS, WINDOW):
        return "blocks" if option.kind is BLOCKS else "window"
    if option.kind is SHARD:
        return "shard"
    if option.kind.array:
        return "tensor"
    if type(option.default) is bool:
        return "flag"
    if option.kind is INTEGER:
        return "integer"
    if option.kind is NUMBER:
        return "number"
    return "value"


def flag(x: Any, name: str) -> bool:
    """The value of a flag. _core.flag(), which torch.compile cannot trace, is called only for other types than bool."""
    return x if type(x) is bool else _core.flag(x, name)


def integer(x: Any, name: str) -> int | torch.SymInt:
    """An int of Python from any integer: NumPy's integers do not hold 2**64."""
    return x if isinstance(x, torch.SymInt) else integer_of(x, name)


def may_be_symbolic(x: Any) -> bool:
    """Whether a number may be symbolic, so that a comparison with its default may fix its value. In torch.compile it looks like a
    float."""
    return torch.compiler.is_compiling() or isinstance(x, torch.SymFloat)


def require_tensors(**given: Any) -> None:
    """Refuse other arrays: PyTorch's own error would be a RuntimeError about the arguments of an operator. torch.compile converts
    NumPy arrays to tensors."""
    for name, x in given.items():
        if x is not None and not isinstance(x, Tensor) and not torch.compiler.is_compiling():
            raise TypeError(f"{name} must be a torch.Tensor, not {described(x)}")


def require_inputs(**given: Any) -> None:
    """Refuse None, for tensors that every call has, and nested tensors."""
    for name, x in given.items():
        if x is None:
            raise TypeError(f"{name} must be a torch.Tensor, not None")
        refuse_nested(x, name)


def refuse_nested(x: Any, name: str) -> None:
    if getattr(x, "is_nested", False):
        _core.refuse_nested(x, name)


def check_dispatched(given: dict[str, Any]) -> None:
    """Refuse, by the names that the caller knows, what PyTorch's dispatcher would refuse without a name."""
    for name, x in given.items():
        if isinstance(x, Tensor):  # a scale may be a number, or an array of NumPy inside torch.compile
            refuse_nested(x, name)
    refuse_plain(given)


def constant(x: Any, name: str) -> Any:
    """A number; also from a tensor with one element, with respect to which nothing is differentiated."""
    if not isinstance(x, Tensor):
        return x
    recorded = torch.is_grad_enabled() and x.requires_grad
    if recorded or (not torch.compiler.is_compiling() and may_be_differentiated(x)):
        raise UnsupportedError(f"{name} requires a gradient, and there is none for it; pass float({name})")
    if not torch.compiler.is_compiling() and is_batchedtensor(x):
        raise UnsupportedError(f"{name} is mapped by vmap, and it is one number of a call; call once for each value")
    return x.item() if x.numel() == 1 else x


def real(x: Any, name: str) -> Any:
    """A real number or None. torch.compile cannot trace refuse_bool() for a float or an int, which needs no check."""
    if type(x) is not float and type(x) is not int:
        refuse_bool(x, name)
    return constant(x, name)


def may_be_differentiated(x: Tensor) -> bool:
    """Whether a gradient of x is recorded, x carries a tangent, or a level of torch.func differentiates with respect to it.
    Inside vmap the tensor itself shows neither: the levels below do. torch.compile cannot trace how they are read, so there every
    level counts."""
    if torch.compiler.is_compiling():
        levels = get_dynamic_layer_stack_depth() > 0
        return forward_ad._current_level >= 0 or (torch.is_grad_enabled() and (levels or x.requires_grad))
    while is_functorch_wrapped_tensor(x):
        if x.requires_grad or (not is_batchedtensor(x) and tangent_of(x) is not None):  # vmap cannot unpack a dual
            return True
        x = get_unwrapped(x)
    return (torch.is_grad_enabled() and x.requires_grad) or tangent_of(x) is not None


def given_options(
    function: str, known: dict[str, tuple[str, str, Any]], options: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The options that are not at their defaults, as the operators take them: numbers and texts, and tensors."""
    numbers: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for option, value in options.items():
        if option not in known:
            raise TypeError(f"{function}() got an unexpected keyword argument '{option}'")
        form, name, default = known[option]
        if value is default:
            continue
        if form == "tensor":
            require_tensors(**{option: value})
            tensors[name] = value
        elif form == "flag":
            if flag(value, option) is not default:
                numbers[name] = not default
        elif form == "integer":  # None means the default
            if (number := constant(value, option)) is not None:
                number = integer(number, option)
            if number or default is None:
                numbers[name] = number
        elif form == "number":  # None means the default
            number = real(value, option)
            if default is None or (number is not None and (may_be_symbolic(number) or number)):
                numbers[name] = number
        elif form == "value":
            if type(default) is str and not isinstance(value, str):
                raise InvalidError(f"{option} is {value!r}; it must be a string")
            if type(value) is not str or value != default:
                numbers[name] = constant(value, option)
        elif form == "window":
            if value is not None:
                numbers[name] = window(value)
        elif form == "shard":
            numbers[name] = shard(value)
        elif isinstance(value, BlockMask):
            tensors |= {part: as_tensor(getattr(value, part)) for part in BLOCK_LISTS}
        elif value is not None:
            require_tensors(**{option: value})
            tensors[name] = value
    return numbers, tensors


def as_tensor(x: Any) -> Tensor:
    """A list of a BlockMask, which may be an array of another library."""
    return x if isinstance(x, Tensor) else torch.utils.dlpack.from_dlpack(x)


def window(window_size: Any) -> list[int | torch.SymInt]:
    """(left, right) with -1 for None, as the operators take it."""
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"window_size must be a pair (left, right), not {plainly(window_size)}")
    return [-1 if size is None else integer(size, f"window_size[{i}]") for i, size in enumerate(window_size)]


def shard(triple: Any) -> list[int | torch.SymInt]:
    """(count, index, keys), as the operators take it."""
    if not isinstance(triple, (tuple, list)) or len(triple) != 3:
        raise TypeError(f"shard must be a triple (count, index, keys), not {plainly(triple)}")
    return [integer(x, f"shard[{i}]") for i, x in enumerate(triple)]
