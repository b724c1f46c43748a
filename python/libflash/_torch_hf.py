"""The attention function that Hugging Face transformers calls under the name "lf_attention".

transformers asks for two things: the function, and how to make the mask for it. Without the second, padded batches would be
silently wrong. The name must not contain "flash": transformers takes such names for packages of its own.
"""

from __future__ import annotations

from typing import Any

import torch

NAME = "lf_attention"

Tensor = torch.Tensor


def forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """query (batch, heads, seqlen, head_dim), key and value with their own number of heads; out (batch, seqlen, heads, head_dim).

    The mask, bool and true for keys to keep or else additive, says everything: causality, padding and sliding window. It is None
    where plain causality suffices. `s_aux` is a learnable sink. `sliding_window` is in the mask already.
    """
    from .torch import attention

    causal = attention_mask is None and query.shape[2] > 1
    if causal:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    options: dict[str, Any] = {}
    if attention_mask is not None:
        visible = attention_mask[..., : key.shape[2]]
        options["mask" if visible.dtype == torch.bool else "bias"] = visible
    if s_aux is not None:
        options["learnable_sink"] = s_aux
    out = attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        causal=causal,
        softmax_scale=scaling,
        softcap=softcap or 0.0,
        dropout_p=dropout,
        **options,
    )
    assert isinstance(out, Tensor)
    return out, None


def register() -> None:
    """Enter the name into transformers; again and again is fine."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)
