"""The calls of libflash that the functions of flash_attn.py make, for arrays of any library."""

from __future__ import annotations

from typing import Any

from . import _core
from . import _flash_attn_three as three
from ._errors import InvalidError
from ._flash_attn_arguments import check_flags, contiguous_rows, numpy_seed, window_of

Array = Any


def run_decode(
    q: Array, k_cache: Array, v_cache: Array, options: dict[str, Any], names: dict[str, str],
    table_rows: tuple[Array, int] | None = None,
) -> Any:  # fmt: skip
    if three.is_tensor(q):
        import torch

        from .torch import decode

        with torch.no_grad():
            if torch.compiler.is_compiling():
                return decode(contiguous_rows(q), k_cache, v_cache, **options)
            with three.own_names(names, table_rows):
                return decode(contiguous_rows(q), k_cache, v_cache, **options)
    with three.own_names(names, table_rows):
        if three.is_instance(q, "jax", "Array"):
            from .jax import decode as decode_jax

            if table_rows is not None and three.has_unknown_row(q, *table_rows):
                return three.run_at_once(decode_jax, q, k_cache, v_cache, **options)
            return decode_jax(q, k_cache, v_cache, **options)
        return _core.decode(q, k_cache, v_cache, **options)


def run_attention(
    q: Array,
    k: Array,
    v: Array,
    lengths: dict[str, Any],
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Any,
    softcap: float,
    alibi_slopes: Array | None,
    deterministic: bool,
    return_attn_probs: bool,
    learnable_sink: Array | None = None,
) -> Any:
    check_flags(causal=causal, deterministic=deterministic, return_attn_probs=return_attn_probs)
    three.check_numbers(dropout_p=dropout_p)
    options = dict(
        lengths, softmax_scale=softmax_scale, causal=causal, window_size=window_of(window_size), softcap=softcap,
        alibi_slopes=alibi_slopes, learnable_sink=learnable_sink, return_lse=return_attn_probs,
    )  # fmt: skip
    if three.is_tensor(q):
        from . import _flash_attn_probabilities as probabilities
        from .torch import attention

        q, k, v = contiguous_rows(q), contiguous_rows(k), contiguous_rows(v)
        if dropout_p:
            probabilities.refuse_dtensors(q, dropout_p)
            if return_attn_probs:
                probabilities.require_maxima(lengths)
            options |= {"dropout_p": dropout_p, "seed": probabilities.random_state()}
        result: Any = attention(q, k, v, deterministic=deterministic, **options)
        if not return_attn_probs:
            return result
        return *result, probabilities.dropped_and_kept(q, k, options) if dropout_p else q.new_empty(0)
    if three.is_instance(q, "jax", "Array"):
        from .jax import attention as attention_jax

        if dropout_p:
            raise InvalidError("dropout_p: JAX has no generator of its own; call libflash.jax.attention with a PRNG key as seed")
        result = attention_jax(q, k, v, deterministic=deterministic, **options)
    else:
        if dropout_p:
            options |= {"dropout_p": dropout_p, "seed": numpy_seed(q)}
        result = _core.attention(q, k, v, **options)
    return (*result, None) if return_attn_probs else result


def can_read_pages(*given: Any) -> bool:
    """Whether decode can serve the call, because it needs no derivatives. JAX decides later, and is then refused."""
    tensors = [x for x in given if three.is_tensor(x)]
    if not tensors:
        return True
    from ._torch_options import may_be_differentiated

    return not any(map(may_be_differentiated, tensors))


def read_pages(
    q: Array,
    k: Array,
    v: Array,
    block_table: Array,
    cu_seqlens_q: Array,
    used: Array,
    softmax_scale: float | None,
    causal: bool,
    window_size: Any,
    softcap: float,
    alibi_slopes: Array | None,
    deterministic: bool,
    return_attn_probs: bool,
    learnable_sink: Array | None,
    names: dict[str, str],
    qv: Array | None = None,
    **more: Any,
) -> Any:
    check_flags(causal=causal, deterministic=deterministic, return_attn_probs=return_attn_probs)
    options = dict(
        block_table=block_table, cache_seqlens=used, cu_seqlens_q=cu_seqlens_q, softmax_scale=softmax_scale, causal=causal,
        window_size=window_of(window_size), softcap=softcap, alibi_slopes=alibi_slopes, learnable_sink=learnable_sink,
        return_lse=return_attn_probs, **more,
    )  # fmt: skip
    rows, keys, values = q, k, v
    if qv is not None:
        names = names | {"k_cache": "v", "k_rope_cache": "k"}
        rows, keys, values, options = three.with_qv(q, k, v, qv, options)
    else:
        names = names | three.NAMES_OF_PAGES
    result = run_decode(rows, keys, values, options, names)
    if not return_attn_probs:
        return result
    return *result, q.new_empty(0) if three.is_tensor(q) else None
