"""The functions of the flash-attn package (version 2), on libflash: a program changes one import to use them.

    from libflash.flash_attn import flash_attn_func             # was: from flash_attn import flash_attn_func

Signatures, the order of arguments and returned values are those of flash-attn 2.8, https://github.com/Dao-AILab/flash-attention,
with learnable_sink of flash-attn 4 as the last argument of the functions that have it there. Arguments that flash-attn 3 added
follow it, by name: s_aux (learnable_sink), page_table (block_table), seqused_q, seqused_k, k_descale, v_descale, num_splits and
qv are supported; scheduler_metadata, pack_gqa and sm_margin are hints to flash-attn's kernels and have no effect here;
attention_chunk and q_descale are refused. With rotary_cos, rotary_seqlens must be the tensor given as cache_seqlens.
flash_attn_combine and get_scheduler_metadata are those of flash-attn 3. Differences:

- Any device, type, head_dim and page size that libflash supports; head_dim_v may differ from head_dim.
- softmax_lse of a row that sees no key is -inf, not +inf, and it is differentiable.
- PyTorch tensors are differentiable; dropout draws from PyTorch's default generator. Arrays of other libraries are accepted by
  the same functions, forward only.
"""

from __future__ import annotations

from numbers import Integral
from typing import Any

from . import _flash_attn_splits as splits
from . import _flash_attn_three as three
from ._errors import InvalidError, UnsupportedError
from ._flash_attn_arguments import (
    NO_WINDOW,
    check_flags,
    contiguous_rows,
    full_lengths,
    splits_option,
    unpack,
    window_of,
)
from ._flash_attn_calls import can_read_pages, read_pages, run_attention, run_decode
from ._flash_attn_pages import gather_pages, used_keys

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

Array = Any
Window = Any  # (left, right): a tuple, a list, or an array of two integers


def flash_attn_func(
    q: Array,
    k: Array,
    v: Array,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    learnable_sink: Array | None = None,
    *,
    s_aux: Array | None = None,
    qv: Array | None = None,
    q_descale: Array | None = None,
    k_descale: Array | None = None,
    v_descale: Array | None = None,
    attention_chunk: int = 0,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Any:
    """Attention of q (batch, seqlen_q, heads, head_dim) over k, v (batch, seqlen_k, heads_k, head_dim).

    heads must be a multiple of heads_k. causal and window_size (left, right; inclusive, -1: unbounded; two integers in a tuple, a
    list or an array) are aligned bottom-right. alibi_slopes is (heads,) or (batch, heads). dropout_p should be 0 in evaluation.
    deterministic applies to the gradients. learnable_sink, (heads,), is one more score in each row whose key has no value; it is
    an argument of flash-attn 4, and s_aux is its name in flash-attn 3. qv, k_descale and v_descale are refused, because they are
    for caches.

    Returns
    -------
    out, or with return_attn_probs (out, softmax_lse, S_dmask): softmax_lse is (batch, heads, seqlen_q). S_dmask, for tests only,
    holds the probabilities of each query and key, negative where dropout dropped them, (batch, heads, seqlen_q and seqlen_k
    rounded up to 128); it is empty without dropout, and None for arrays that are not PyTorch's.
    """
    three.refuse(attention_chunk, q_descale)
    three.refuse_without_pages(qv=qv, k_descale=k_descale, v_descale=v_descale)
    three.check_hints(pack_gqa, sm_margin)
    learnable_sink = three.either(("learnable_sink", "s_aux"), learnable_sink, s_aux)
    return run_attention(
        q, k, v, splits_option(num_splits), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, learnable_sink,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Array,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_func of qkv (batch, seqlen, 3, heads, head_dim)."""
    q, k, v = unpack(qkv, 3, "qkv", 5)
    return run_attention(
        q, k, v, {}, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q: Array,
    kv: Array,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_func of q and kv (batch, seqlen_k, 2, heads_k, head_dim)."""
    k, v = unpack(kv, 2, "kv", 5)
    return run_attention(
        q, k, v, {}, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Array | None = None,
    learnable_sink: Array | None = None,
    *,
    s_aux: Array | None = None,
    seqused_q: Array | None = None,
    seqused_k: Array | None = None,
    qv: Array | None = None,
    q_descale: Array | None = None,
    k_descale: Array | None = None,
    v_descale: Array | None = None,
    attention_chunk: int = 0,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    page_table: Array | None = None,
    scheduler_metadata: Array | None = None,
) -> Any:
    """flash_attn_func of packed sequences: q (total_q, heads, head_dim), k and v (total_k, heads_k, head_dim).

    cu_seqlens_q and cu_seqlens_k, (batch + 1,) int32, are prefix sums of the lengths. max_seqlen_q and max_seqlen_k are needed
    only for S_dmask (None or 0: not known). On the CPU one that is below a length is refused; on a GPU, where the lengths are not
    read on the host, it gives undefined results, as in flash-attn, which computes no rows past it. softmax_lse is (heads,
    total_q).

    block_table, (batch, columns) int32 (int64 on the CPU: converted): k and v are pages (num_pages, page_size, heads_k, head_dim)
    of a cache. They are read in place; with dropout, with seqused_q, and where a derivative is asked for, PyTorch's are gathered
    into new memory first.
    With pages, seqused_k (batch,) may replace cu_seqlens_k, which is then None; if the pages are read in place, they may have
    k_descale, v_descale and qv as in flash_attn_with_kvcache.
    """
    three.refuse(attention_chunk, q_descale)
    three.check_hints(pack_gqa, sm_margin)
    three.check_numbers(dropout_p=dropout_p)
    names = three.names_of(s_aux, page_table, qv)
    learnable_sink = three.either(("learnable_sink", "s_aux"), learnable_sink, s_aux)
    block_table = three.either(("block_table", "page_table"), block_table, page_table)
    used = {name: x for name, x in (("seqused_q", seqused_q), ("seqused_k", seqused_k)) if x is not None}
    lengths = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
        **used,
        **splits_option(num_splits),
    }
    if block_table is not None:
        differentiable = (q, k, v, softmax_scale, softcap, alibi_slopes, learnable_sink, qv, k_descale, v_descale)
        if not dropout_p and seqused_q is None and can_read_pages(*differentiable):
            three.check_bound("max_seqlen_q", max_seqlen_q, cu_seqlens_q)
            three.check_bound("max_seqlen_k", max_seqlen_k, cu_seqlens_k if seqused_k is None else None)
            names["cache_seqlens"] = "cu_seqlens_k" if seqused_k is None else "seqused_k"
            return read_pages(
                q, k, v, block_table, cu_seqlens_q, used_keys(cu_seqlens_k, seqused_k), softmax_scale, causal, window_size,
                softcap, alibi_slopes, deterministic, return_attn_probs, learnable_sink, names,
                num_splits=num_splits, k_scale=k_descale, v_scale=v_descale, qv=qv,
            )  # fmt: skip
        if qv is not None or k_descale is not None or v_descale is not None:
            raise UnsupportedError(
                "qv, k_descale and v_descale need pages that are read in place: without gradients, tangents, dropout, seqused_q"
            )
        k, v, lengths = gather_pages(q, k, v, block_table, lengths)
    else:
        three.refuse_without_pages(qv=qv, k_descale=k_descale, v_descale=v_descale)
        if cu_seqlens_k is None:
            raise InvalidError("cu_seqlens_k is None; only keys in pages (block_table) may have seqused_k in its place")
    return run_attention(
        q, k, v, lengths, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
        learnable_sink,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Array,
    cu_seqlens: Array,
    max_seqlen: int | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_varlen_func of qkv (total, 3, heads, head_dim)."""
    lengths = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "max_seqlen_q": max_seqlen, "max_seqlen_k": max_seqlen}
    q, k, v = unpack(qkv, 3, "qkv", 4)
    return run_attention(
        q, k, v, lengths, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: Array,
    kv: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_varlen_func of q and kv (total_k, 2, heads_k, head_dim)."""
    lengths = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
    }
    k, v = unpack(kv, 2, "kv", 4)
    return run_attention(
        q, k, v, lengths, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    k: Array | None = None,
    v: Array | None = None,
    rotary_cos: Array | None = None,
    rotary_sin: Array | None = None,
    cache_seqlens: Array | int | None = None,
    cache_batch_idx: Array | None = None,
    cache_leftpad: Array | None = None,
    block_table: Array | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Array | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    q_descale: Array | None = None,
    k_descale: Array | None = None,
    v_descale: Array | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k_new: Array | None = None,
    max_seqlen_q: int | None = None,
    learnable_sink: Array | None = None,
    s_aux: Array | None = None,
    *,
    qv: Array | None = None,
    page_table: Array | None = None,
    rotary_seqlens: Array | None = None,
    attention_chunk: int = 0,
    scheduler_metadata: Array | None = None,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Any:
    """A few query rows (batch, seqlen_q, heads, head_dim) against a cache; `libflash.decode` explains each argument.

    k and v, (batch, seqlen_new, heads_k, head_dim), are first appended to the cache, in place, after the valid rows.
    cache_seqlens is an int or (batch,) int32. block_table is int32; int64 is converted on the CPU and refused on CUDA. No
    gradients.

    The arguments of flash-attn 3 and 4 come last. Caches may be of float8_e4m3fn, float8_e5m2 or int8;
    a cached value is its element times k_descale or v_descale, (batch, heads_k) float32, or of the other shapes that k_scale of
    `libflash.decode` may have. q has no scale: q_descale must be None. With cu_seqlens_q, (batch + 1,) int32, q is packed,
    (total_q, heads, head_dim), and so are k and v by cu_seqlens_k_new, default cu_seqlens_q.
    max_seqlen_q is not needed: all rows are computed, also those past it, which flash-attn leaves out. Where the lengths are
    known on the host, one below a length is refused. learnable_sink, (heads,), is also called s_aux, and block_table page_table.

    qv, of q's shape with the channels of v_cache: the scores are q k + qv v, as in multi-head latent attention, where v_cache has
    the latent vectors and k_cache the rope parts of keys. rotary_cos rotates q and k, not qv. With qv only v_cache may have 8
    bits. On CUDA both caches together have at most 576 channels, v_cache at most 512, and k_cache beside 8 bits at most 144.

    Returns
    -------
    out, or (out, softmax_lse) with softmax_lse (batch, heads, seqlen_q); packed (heads, total_q)
    """
    check_flags(causal=causal, rotary_interleaved=rotary_interleaved, return_softmax_lse=return_softmax_lse)
    three.refuse(attention_chunk, q_descale)
    three.check_rotary_seqlens(rotary_seqlens, cache_seqlens, rotary_cos)
    three.check_hints(pack_gqa, sm_margin)
    names = three.names_of(s_aux, page_table, qv)
    learnable_sink = three.either(("learnable_sink", "s_aux"), learnable_sink, s_aux)
    block_table = three.either(("block_table", "page_table"), block_table, page_table)
    three.require_arrays(q=q, k_cache=k_cache, v_cache=v_cache)
    three.check_bound("max_seqlen_q", max_seqlen_q, cu_seqlens_q, q.shape[1] if cu_seqlens_q is None and q.ndim == 4 else None)
    table_rows = None
    if block_table is not None and cache_batch_idx is not None:
        rows = three.rows_of_table(block_table, cache_batch_idx)
        table_rows = cache_batch_idx, block_table.shape[0]
        block_table, cache_batch_idx = rows, None
    if isinstance(cache_seqlens, Integral) or three.is_symbolic(cache_seqlens):  # of Python, NumPy or PyTorch's tracing
        cache_seqlens = full_lengths(q, cache_seqlens, q.shape[0] if cu_seqlens_q is None else three.sequences(cu_seqlens_q))
    options = dict(
        k=contiguous_rows(k),
        v=contiguous_rows(v),
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        block_table=block_table,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_of(window_size),
        softcap=softcap,
        rotary_interleaved=rotary_interleaved,
        alibi_slopes=alibi_slopes,
        num_splits=num_splits,
        return_lse=return_softmax_lse,
        k_scale=k_descale,
        v_scale=v_descale,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_new=cu_seqlens_k_new,
        learnable_sink=learnable_sink,
    )
    if qv is not None:
        q, k_cache, v_cache, options = three.with_qv(q, k_cache, v_cache, qv, options)
    if k is not None and three.is_instance(q, "jax", "Array"):
        raise UnsupportedError("k: JAX arrays are immutable; libflash.jax.decode appends and returns the new caches")
    return run_decode(q, k_cache, v_cache, options, names, table_rows)


def flash_attn_combine(
    out_partial: Array, lse_partial: Array, out: Array | None = None, out_dtype: Any = None
) -> tuple[Array, Array]:
    """Combine the results of disjoint splits of the keys, as `libflash.merge` does.

    out_partial is (num_splits, batch, seqlen, heads, head_dim_v), lse_partial (num_splits, batch, seqlen, heads), both float32. A
    split whose lse is -inf contributes nothing. out_dtype is float32 (default), float16 or bfloat16; out, if given, is written,
    and its type is the default of out_dtype.

    Returns
    -------
    (out, softmax_lse): (batch, seqlen, heads, head_dim_v), and (batch, seqlen, heads) in float32
    """
    return splits.combine(out_partial, lse_partial, out, out_dtype)


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Array,
    qkv_dtype: Any = None,
    headdim_v: int | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k_new: Array | None = None,
    cache_leftpad: Array | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Window = NO_WINDOW,
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Array:
    """What flash_attn_with_kvcache takes as scheduler_metadata: an int32 array with one 0, on the device of cache_seqlens.

    libflash plans in the call itself, from the lengths on the device, so there is nothing to prepare: a call has the same bits
    with this array, with one of an earlier step, and without any. The arguments are checked as far as shapes and numbers are
    known. qkv_dtype None is bfloat16, flash-attn's default. What layers can share is libflash.decode_schedule(), which needs the
    arrays of the call.
    """
    three.refuse(attention_chunk, None)
    three.check_hints(pack_gqa, sm_margin)
    check_flags(causal=causal, has_softcap=has_softcap)
    window_of(window_size)
    sizes = {
        "batch_size": batch_size,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
        "num_heads_q": num_heads_q,
        "num_heads_kv": num_heads_kv,
        "headdim": headdim,
        "max_seqlen_k_new": max_seqlen_k_new,
        "num_splits": num_splits,
    }
    if headdim_v is not None:
        sizes["headdim_v"] = headdim_v
    lengths = {
        "cache_seqlens": (cache_seqlens, 0),
        "cu_seqlens_q": (cu_seqlens_q, 1),
        "cu_seqlens_k_new": (cu_seqlens_k_new, 1),
        "cache_leftpad": (cache_leftpad, 0),
    }
    three.require_arrays(cache_seqlens=cache_seqlens)
    splits.check_problem(sizes, page_size, qkv_dtype, lengths)
    return full_lengths(cache_seqlens, 0, 1)
