"""Requests for the weights of attention, which libflash does not store.

A request reaches the attention function as a keyword, in the configuration, or through transformers' hooks around the model. Some
models (Pix2Struct, BridgeTower) hand nothing down and collect what attention modules return. So models are watched, too.
"""

from __future__ import annotations

from typing import Any

import torch

from ._errors import UnsupportedError

NAMES = ("lf_attention", "lf_flash_paged")


def refuse_weights(module: torch.nn.Module, others: dict[str, Any], own: str) -> None:
    """Refuse a request in a call of an attention module; `own`: the name of the attention function."""
    requested = others.get("output_attentions") or getattr(getattr(module, "config", None), "output_attentions", False)
    if not requested and not torch.compiler.is_compiling():
        requested = any(name.endswith("attentions") for name in recorded())
    if requested:
        raise refusal(own)


def refusal(own: str) -> UnsupportedError:
    return UnsupportedError(
        f'output_attentions is True; {own} does not store the weights of attention; use attn_implementation="eager"'
    )


def recorded() -> list[str]:
    """The outputs that transformers records during this call of a model."""
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:
        return []
    return list(_active_collector.get() or ())


def watch(model: torch.nn.Module) -> Any:
    """Refuse requests in calls of this model. Returns the hook."""
    return model.register_forward_pre_hook(refuse_request, with_kwargs=True)


def watched(model: torch.nn.Module) -> bool:
    return refuse_request in model._forward_pre_hooks.values()


def refuse_request(model: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    own = model.config._attn_implementation
    if options.get("output_attentions") and own in NAMES:
        raise refusal(own)
