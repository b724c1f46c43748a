"""Hugging Face models that are requested by name, as in from_pretrained(..., attn_implementation="lf_attention").

transformers accepts the name for every model. The layers of some models choose their attention class from a table of their own,
{"eager": SamVisionAttention, ...}, and would find no such name there. So the tables get the name, right before such a model is
built; the layers then have the class of their model.
"""

from __future__ import annotations

import functools
import sys
import warnings
from typing import Any

import torch

from ._torch_hf_interface import classes_without_interface, not_served, refuse_without_interface
from ._torch_hf_weights import watch, watched


def register(name: str) -> None:
    """Look at models requested by this name, before transformers builds them. Does nothing the second time."""
    from transformers import PreTrainedModel

    check = getattr(PreTrainedModel, "get_correct_attn_implementation", None)  # called at the start of PreTrainedModel.__init__
    if check is None or hasattr(check, "_libflash"):
        return

    @functools.wraps(check)
    def checked(self: Any, requested: str | None, *args: Any, **options: Any) -> Any:
        if requested == name:
            warn_without_interface(self, name)
            add_to_tables(type(self), name)
            if not watched(self):
                watch(self)
        return check(self, requested, *args, **options)

    checked._libflash = True  # type: ignore[attr-defined]
    setattr(PreTrainedModel, "get_correct_attn_implementation", checked)  # noqa: B010 - its type differs


def warn_without_interface(model: Any, name: str) -> None:
    """The model may be a part of another; if it makes a mask with transformers' functions, its first call is refused."""
    classes = classes_without_interface(type(model.config))
    if classes:
        warnings.warn(f'attn_implementation="{name}": {not_served(type(model).__name__, classes)}', stacklevel=3)


def add_to_tables(model: type, name: str) -> None:
    """Add the name to all tables in the Python modules of this class of models."""
    for module in {kind.__module__ for kind in model.__mro__}:
        for table in list(vars(sys.modules.get(module, sys)).values()):
            if is_table(table) and name not in table:
                table[name] = functools.partial(build, table, name)


def is_table(x: Any) -> bool:
    if not isinstance(x, dict) or "eager" not in x:
        return False
    return all(isinstance(kind, type) and issubclass(kind, torch.nn.Module) for kind in x.values())


def build(table: dict[str, type], name: str, config: Any, *args: Any, **options: Any) -> torch.nn.Module:
    """An attention module of the model's own class, as in a model that libflash.torch.enable(model) has switched.

    Raises UnsupportedError if no model with this configuration uses transformers' attention interface.
    """
    refuse_without_interface(config, name)
    own = table.get("sdpa", table["eager"])
    warnings.warn(
        f'attn_implementation="{name}" (model type {config.model_type}): {own.__name__} does not use transformers\' attention '
        "interface, so libflash does not serve it; the other parts of the model run on libflash",
        stacklevel=2,
    )
    module: torch.nn.Module = own(config, *args, **options)
    return module
