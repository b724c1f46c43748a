"""Hugging Face models switched to "lf_attention" or "lf_flash_paged" and back.

A model may have several configurations, one for each of its parts, sometimes copies of one another. Each attention module reads
the name of its implementation from its own, so this sets the name in every one that matters.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from . import _torch_hf, _torch_hf_paged, _torch_hf_weights
from ._arguments import described
from ._errors import UnsupportedError
from ._torch_hf_interface import named_attention, not_served, uses_interface
from ._versions import too_old


@dataclass(eq=False)
class Change:
    """The name in one configuration, the one that was there before, and hooks of the models with this configuration."""

    config: Any
    name: str
    before: str | None
    hooks: list[Any]


_changes: list[Change] = []


def switch(models: tuple[Any, ...], paged: bool = False) -> list[Change]:
    """Let these models use libflash, all or none of them; `paged`: in continuous batching.

    Raises TypeError for what is no Hugging Face model, and for a model without a module that uses transformers' attention
    interface. Warns if some modules do not use it.
    """
    if paged and (transformers := sys.modules.get("transformers")) is not None:
        text = too_old("transformers", transformers.__version__, "enable(model, paged=True)")
        if text is not None:
            raise UnsupportedError(text)
    if "transformers" in sys.modules:
        _torch_hf.register()
        _torch_hf_paged.register()
    name = _torch_hf_paged.NAME if paged else _torch_hf.NAME
    found: dict[int, tuple[Any, list[Any]]] = {}
    for model in models:
        found |= configurations(model)
    changes = []
    for config, parts in found.values():
        hooks = [_torch_hf_weights.watch(part) for part in parts]
        changes.append(Change(config, name, config._attn_implementation, hooks))
        set_implementation(config, name)
    _changes.extend(changes)
    return changes


def restore(changes: list[Change]) -> None:
    """Undo the switch. A model that a later open switch covers stays as the later switch set it."""
    for change in changes:
        later = _changes[_changes.index(change) + 1 :]
        _changes.remove(change)
        for hook in change.hooks:
            hook.remove()
        next_one = next((other for other in later if other.config is change.config), None)
        if next_one is None:
            if change.config._attn_implementation == change.name:
                set_implementation(change.config, change.before)
        elif next_one.before == change.name:
            next_one.before = change.before


def set_implementation(config: Any, name: str | None) -> None:
    """In this configuration alone: its attribute _attn_implementation would copy names to configurations inside others."""
    config._attn_implementation_internal = name


def configurations(model: Any) -> dict[int, tuple[Any, list[Any]]]:
    """The configurations of the modules that use transformers' attention interface, and of the models that contain them, each
    with these models. The keys are ids."""
    if isinstance(model, (list, tuple)):
        raise TypeError(f"models are given one by one, enable(a, b), not in a {type(model).__name__}")
    kind = described(model) if isinstance(model, (str, bool, int, float, type(None))) else type(model).__name__
    transformers = sys.modules.get("transformers")
    if transformers is None:
        raise TypeError(f"{kind} is no Hugging Face model: transformers is not loaded")
    if not isinstance(model, torch.nn.Module) or not any(
        isinstance(part, transformers.PreTrainedModel) for part in model.modules()
    ):
        raise TypeError(f"{kind} is no Hugging Face model: neither it nor a part of it is a transformers.PreTrainedModel")
    served = [part for part in model.modules() if uses_interface(type(part))]
    alone = sorted({type(part).__name__ for part in without_interface(model)})
    if not served:
        raise TypeError(f"{not_served(kind, alone)}; enable() without it serves its calls of scaled_dot_product_attention")
    if alone:
        warnings.warn(
            f"{kind} runs on libflash except {', '.join(alone)}, which do not use transformers' attention interface",
            stacklevel=5,  # the caller of enable()
        )
    inside = set(map(id, served))
    found: dict[int, tuple[Any, list[Any]]] = {}
    for part in model.modules():
        around = isinstance(part, transformers.PreTrainedModel) and any(id(inner) in inside for inner in part.modules())
        if (around or id(part) in inside) and getattr(part, "config", None) is not None:
            parts = found.setdefault(id(part.config), (part.config, []))[1]
            parts += [part] if around else []
    return found


def without_interface(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The innermost modules with "Attention" in their name that do not use the interface, nor contain a module that does."""
    return [
        part
        for part in model.modules()
        if named_attention(type(part))
        and not any(named_attention(type(inner)) for inner in part.modules() if inner is not part)
        and not any(uses_interface(type(inner)) for inner in part.modules())
    ]
