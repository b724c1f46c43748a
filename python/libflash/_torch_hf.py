"""The attention function that Hugging Face transformers calls under the name "lf_attention".

transformers requires two functions: attention, and one that makes the mask for it. Both follow the contract of its "sdpa"
implementation, and the result is that of its "eager" implementation, except in rows that see no key (padding), which are 0. The
name must not contain "flash": transformers takes such names for packages of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Set
from typing import Any

import torch
import torch.nn.functional as F

from . import _torch_hf_tables
from ._errors import InvalidError, UnsupportedError
from ._torch_hf_interface import refuse_without_interface
from ._torch_hf_weights import refuse_weights
from ._torch_sdpa_operators import rows_contiguous

NAME = "lf_attention"

Tensor = torch.Tensor

SDPA = torch._C._nn.scaled_dot_product_attention  # not F's, which context_parallel may have replaced before this import
# The modules in which versions of PyTorch have context_parallel.
CONTEXT_PARALLEL = (
    "torch.distributed.tensor.experimental._context_parallel._attention", "torch.distributed.tensor.experimental._attention",
)  # fmt: skip

# Keywords that reach the attention function and have no effect on it: they affect other parts of the model, or the mask and the
# rotary embedding, which are computed before.
HARMLESS = {
    "cache_position", "grid_thw", "input_ids", "inputs_embeds", "interpolate_pos_encoding", "labels", "logits_to_keep",
    "mm_token_type_ids", "num_items_in_batch", "output_hidden_states", "output_router_logits", "position_embeddings",
    "position_ids", "return_dict", "return_loss", "seq_idx", "token_type_ids", "use_cache",
}  # fmt: skip

# Model types whose attention modules have no is_causal, or a wrong one in some versions of transformers. forward() could not know
# what None for a mask means, so their masks are always computed.
ALWAYS_MASKED = {
    "aimv2_text_model", "align_text_model", "clap_text_model", "pegasus_x", "phi4_multimodal_vision", "splinter", "umt5",
    "videoprism_text_model",
}  # fmt: skip

# Model types (or classes of configurations without a type) with code besides the attention function that reads the mask, and
# expects that of "eager", 0 or the most negative number: modules without transformers' interface (bigbird_pegasus, gemma4_audio,
# git, PPDocLayoutV2ReadingOrder, informer, which also drops rows), modules that add a bias to it (beit) or append scores
# (deepseek_v4), a router (nllb-moe). And bridgetower_text_model: the layers that join text and pictures have its configuration
# and is_causal = True, although they are not causal, and pictures never have a mask.
EAGER_MASKED = {
    "PPDocLayoutV2ReadingOrderConfig", "beit", "bigbird_pegasus", "bridgetower_text_model", "deepseek_v4", "gemma4_audio", "git",
    "informer", "nllb-moe",
}  # fmt: skip

# Model types that hand only the last rows to layers which share keys with earlier layers, unless the implementation is called
# "sdpa": row i no longer sees keys 0 to i.
DROPPING_ROWS = {"gemma4_text", "gemma4_unified_text"}

# Model types whose modules that are not causal pass the window of their cache, which holds no more keys than the window allows:
# all queries see these keys and each other.
WINDOWED_BY_CACHE = {"diffusion_gemma_text"}


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
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    deterministic: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query (batch, heads, seqlen, head_dim), key and value with their own number of heads; out (batch, seqlen, heads, head_dim).

    attention_mask : bool, True for keys to keep, or floating-point and added to the scores
        It contains causality, padding, sliding window and packed sequences. None, as transformers defines it for "sdpa":
        full attention if the module is not causal or there is one query; else query i sees keys 0 to i. For models whose
        masks are made as for "eager", None is full attention.
    position_bias : (batch or 1, heads or 1, seqlen, keys)
        Added to the scores, with a gradient.
    s_aux : (heads,)
        A learnable sink.
    cu_seq_lens_q, cu_seq_lens_k : (sequences + 1,), of self-attention over packed sequences
        Tokens see only tokens of their own sequence that the mask also allows.

    Raises UnsupportedError for any other keyword, unless its value is None or it is known not to change the result.
    """
    from .torch import attention

    refuse_context_parallel()
    refuse_unknown(module, others)
    refuse_weights(module, others, NAME)
    if s_aux is None and getattr(module, "sinks", None) is not None:
        raise UnsupportedError(f"{type(module).__name__} has sinks and passes no s_aux")
    causal = top_left = False
    if attention_mask is None:
        causal = query.shape[2] > 1 and causality(module, is_causal)
        if causal and key.shape[2] > query.shape[2]:  # a static cache, the rest of which is empty
            key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
            position_bias = None if position_bias is None else position_bias[..., : query.shape[2]]
        top_left = causal and key.shape[2] < query.shape[2]
        if sliding_window is not None and key.shape[2] > sliding_window and not windowed_by_cache(module, is_causal):
            raise UnsupportedError(
                f"{type(module).__name__} passes sliding_window={sliding_window} for {key.shape[2]} keys and no attention_mask; "
                "the mask must contain the window"
            )
    options: dict[str, Any] = {"softmax_scale": scaling, "softcap": softcap or 0.0}
    if module.training:
        options["dropout_p"] = dropout
    if top_left:
        options["causal_align"] = "top_left"
    if s_aux is not None:
        options["learnable_sink"] = in_accepted_type(query, s_aux)
    if deterministic:
        options["deterministic"] = True

    q, k, v = (rows_contiguous(x).transpose(1, 2) for x in (query, key, value))
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        check_packed(query, key, cu_seq_lens_q, cu_seq_lens_k)
        if attention_mask is None and position_bias is None:
            options |= lengths(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
            out = attention(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), causal=causal, **options)
            assert isinstance(out, Tensor)
            return out.unflatten(0, q.shape[:2]), None
        same = same_sequence(query, cu_seq_lens_q, cu_seq_lens_k)
        attention_mask = same if attention_mask is None else narrowed(attention_mask, same)
    options |= score_options(query, attention_mask, position_bias)
    out = attention(q, k, v, causal=causal, **options)
    assert isinstance(out, Tensor)
    return out, None


def causality(module: torch.nn.Module, is_causal: bool | None) -> bool:
    """Whether None for a mask means causal attention."""
    if model_type(getattr(module, "config", None)) in EAGER_MASKED:
        return False
    if is_causal is None:
        is_causal = getattr(module, "is_causal", None)
    if is_causal is None:
        raise UnsupportedError(
            f"{type(module).__name__} passes no attention_mask and does not say whether it is causal; set its attribute is_causal"
        )
    return is_causal


def windowed_by_cache(module: torch.nn.Module, is_causal: bool | None) -> bool:
    return model_type(getattr(module, "config", None)) in WINDOWED_BY_CACHE and not causality(module, is_causal)


def score_options(query: Tensor, attention_mask: Tensor | None, position_bias: Tensor | None) -> dict[str, Tensor]:
    """mask and bias of libflash.torch.attention."""
    options = {}
    bias = position_bias
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        options["mask"] = attention_mask
    elif attention_mask is not None:
        if not attention_mask.is_floating_point():
            raise InvalidError(f"attention_mask is {attention_mask.dtype}; it must be bool or floating-point")
        bias = attention_mask if bias is None else bias + attention_mask
    if bias is not None:
        options["bias"] = in_accepted_type(query, bias)
    return options


def in_accepted_type(query: Tensor, x: Tensor) -> Tensor:
    """x in a type that the library accepts together with the query's type."""
    return x if x.dtype in (torch.float32, query.dtype) else x.float()


# -- packed sequences


def check_packed(query: Tensor, key: Tensor, cu_seq_lens_q: Tensor | None, cu_seq_lens_k: Tensor | None) -> None:
    if cu_seq_lens_q is None or cu_seq_lens_k is None:
        raise InvalidError("cu_seq_lens_q and cu_seq_lens_k must be given together")
    if query.shape[2] != key.shape[2]:
        raise UnsupportedError(
            f"cu_seq_lens_q and cu_seq_lens_k are given for {query.shape[2]} queries and {key.shape[2]} keys; "
            "packed sequences are served in self-attention without a cache"
        )


def lengths(cu_seq_lens_q: Tensor, cu_seq_lens_k: Tensor, max_length_q: int | None, max_length_k: int | None) -> dict[str, Any]:
    options: dict[str, Any] = {"cu_seqlens_q": cu_seq_lens_q.to(torch.int32), "cu_seqlens_k": cu_seq_lens_k.to(torch.int32)}
    if max_length_q is not None and max_length_k is not None:
        options |= {"max_seqlen_q": int(max_length_q), "max_seqlen_k": int(max_length_k)}
    return options


def same_sequence(query: Tensor, *cu_seq_lens: Tensor) -> Tensor:
    """(batch, 1, seqlen, seqlen): whether a query and a key belong to the same packed sequence; cu_seq_lens: those of queries and
    of keys. The rows of the batch are consecutive."""
    batch, seqlen = query.shape[0], query.shape[2]
    tokens = torch.arange(batch * seqlen, device=query.device, dtype=torch.int64)
    rows, keys = (torch.searchsorted(x.to(tokens.dtype), tokens, right=True).view(batch, 1, seqlen) for x in cu_seq_lens)
    return rows.unsqueeze(-1) == keys.unsqueeze(-2)


def narrowed(attention_mask: Tensor, same: Tensor) -> Tensor:
    if attention_mask.dtype == torch.bool:
        return attention_mask & same
    return attention_mask.masked_fill(~same, -float("inf"))


# -- what is refused


def refuse_unknown(module: torch.nn.Module, others: dict[str, Any], own: str = NAME, harmless: Set[str] = frozenset()) -> None:
    """Refuse unknown keywords. `harmless`: allowed in addition to HARMLESS; `own`: the name of the attention function."""
    for name, given in others.items():
        if given is not None and name not in HARMLESS and name not in harmless and name != "output_attentions":
            raise UnsupportedError(
                f"{type(module).__name__} passes {name}, which {own} does not know and which may change the result; "
                'use attn_implementation="eager"'
            )


def refuse_context_parallel() -> None:
    """Refuse PyTorch's context_parallel: it replaces only scaled_dot_product_attention; here a rank would see only its tokens."""
    if F.scaled_dot_product_attention is not SDPA and any(
        F.scaled_dot_product_attention in getattr(sys.modules.get(name), "_replaced_functions", ()) for name in CONTEXT_PARALLEL
    ):
        raise UnsupportedError(
            f"{NAME} inside torch.distributed.tensor.experimental.context_parallel would see the tokens of this rank alone; use "
            'attn_implementation="sdpa" there, with libflash.torch.enable(), or libflash.torch.context_parallel_attention'
        )


# -- transformers' registries


def mask(*args: Any, **options: Any) -> Tensor | None:
    """transformers' mask for "sdpa", or for "eager" where the model needs that; None if is_causal of the module means the
    same.

    Raises UnsupportedError if the model does not use transformers' attention interface: transformers lets every model have the
    name of an implementation, and calls this function, but such a model computes attention by itself.
    """
    from transformers.masking_utils import eager_mask, sdpa_mask

    config = options.get("config")
    refuse_without_interface(config, NAME)
    if model_type(config) in EAGER_MASKED:
        return eager_mask(*args, **options)  # type: ignore[no-any-return]
    if always_masked(config):
        options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    made: Tensor | None = sdpa_mask(*args, **options)
    return made


def model_type(config: Any) -> str | None:
    """Its type, or the name of its class if it has none: some parts of models have none."""
    return getattr(config, "model_type", None) or (None if config is None else type(config).__name__)


def always_masked(config: Any) -> bool:
    """Whether the mask must be computed: if transformers left it out, forward() would take None for another mask."""
    kind = model_type(config)
    if kind in DROPPING_ROWS and getattr(config, "num_kv_shared_layers", None):
        return True
    # Gemma, Gemma 2, PaliGemma: the modules have is_causal = False, but the mask is causal, so None would mean full attention.
    bidirectional = getattr(config, "use_bidirectional_attention", None) is True and getattr(config, "is_causal", True)
    return kind in ALWAYS_MASKED or bidirectional


def register() -> None:
    """Register the name in transformers; repeated calls change nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, forward)
    AttentionMaskInterface.register(NAME, mask)
    _torch_hf_tables.register(NAME)
