"""Which classes of Hugging Face transformers use its attention interface, the table of attention functions by name."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

from ._errors import UnsupportedError

TABLE = "ALL_ATTENTION_FUNCTIONS"


def uses_interface(kind: type) -> bool:
    """True if a function of this class of modules refers to transformers' table of attention functions."""
    if issubclass(kind, sys.modules["transformers"].PreTrainedModel):  # it refers to the table; only its parts use it
        return False
    functions = (function for base in kind.__mro__ if base is not torch.nn.Module for function in vars(base).values())
    return any(TABLE in names_in(function) for function in functions)


def names_in(function: Any) -> Iterator[str]:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    code = getattr(function, "__code__", None)
    if isinstance(code, CodeType):
        yield from code.co_names


def named_attention(kind: type) -> bool:
    return "Attention" in kind.__name__


def not_served(model: str, classes: list[str]) -> str:
    """Why libflash cannot serve a model; `classes`: its attention classes, which do not use the interface."""
    return (
        f"{model} does not use transformers' attention interface (it computes attention in "
        f"{', '.join(classes) or 'its layers'}), so libflash cannot serve it"
    )


# -- known from the class of a configuration alone, which is all that a mask function sees of a model


_passed: weakref.WeakSet[type] = weakref.WeakSet()  # configurations for which classes_without_interface has found none


def classes_without_interface(config: type) -> list[str]:
    """The attention classes of the models with this class of configurations, if none of these models uses the interface. Empty
    otherwise, and if that is not known: for models whose attention is in other Python modules."""
    if config in _passed:
        return []
    files = next(filter(None, map(files_of_models, config.__mro__)), [])
    if not any(map(may_use_interface, files)):
        classes = sorted({kind.__name__ for file in files for kind in torch_modules_in(file) if named_attention(kind)})
        if classes:
            return classes
    _passed.add(config)
    return []


# torch.compile cannot trace classes_without_interface(). With this mark it calls the function while it traces, and takes the
# result for a constant.
classes_without_interface._dynamo_marked_constant = True  # type: ignore[attr-defined]


def refuse_without_interface(config: Any, name: str) -> None:
    """Refuse the name of an attention function for the models with this configuration, if none of them uses the interface."""
    classes = classes_without_interface(type(config))
    if classes:
        raise UnsupportedError(
            f'attn_implementation="{name}": {not_served(f"the model of {type(config).__name__}", classes)}; use '
            'attn_implementation="eager"'
        )


def files_of_models(config: type) -> list[ModuleType]:
    """The Python modules that define models with this class of configurations, and the models that these are derived from.
    Models derived from them elsewhere do not count."""
    base = sys.modules["transformers"].PreTrainedModel
    names: dict[str, None] = {}
    for kind in below(base):
        if has_config(kind, config) and not any(has_config(parent, config) for parent in kind.__bases__):
            names |= {parent.__module__: None for parent in kind.__mro__ if parent is not base and issubclass(parent, base)}
    return [sys.modules[name] for name in names if name in sys.modules]


def below(kind: type) -> Iterator[type]:
    """The classes derived from this one."""
    subclasses: list[type] = kind.__subclasses__()
    for derived in subclasses:
        yield derived
        yield from below(derived)


def has_config(kind: type, config: type) -> bool:
    return getattr(kind, "config_class", None) is config


def torch_modules_in(file: ModuleType) -> list[type]:
    """The classes of torch modules that a Python module defines or imports."""
    return [kind for kind in vars(file).values() if isinstance(kind, type) and issubclass(kind, torch.nn.Module)]


def may_use_interface(file: ModuleType) -> bool:
    """Whether classes of this Python module use the interface, or it imports classes or functions from one that knows the
    table."""
    if any(map(uses_interface, torch_modules_in(file))):
        return True
    modeling = sys.modules["transformers.modeling_utils"]  # it defines the table, and what every model imports
    known = (x for x in vars(file).values() if isinstance(x, (type, FunctionType)))
    others = {x.__module__ for x in known} - {modeling.__name__}
    tables = (modeling.ALL_ATTENTION_FUNCTIONS, modeling.AttentionInterface)  # under whatever name they are imported
    return any(x is table for x in vars(file).values() for table in tables) or any(
        hasattr(sys.modules.get(name), TABLE) for name in others
    )
