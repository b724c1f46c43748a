"""libflash.jax.decode and cache_write: caches of keys and values, 8-bit codes among them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ._arguments import integer, one_of, plainly
from ._errors import InvalidError
from ._jax_calls import CACHE_WRITE, DECODE, INTERLEAVED, INVARIANT_ROWS, Options
from ._jax_options import (
    array,
    arrays_among,
    arrays_of,
    flags,
    known,
    lengths,
    operands,
    scale_array,
    signed_integer,
    slot_numbers,
    static_options,
    switch,
    text,
)  # fmt: skip
from ._jax_primitives import bind, call_of

Array = jax.Array


def decode(
    q: Array,
    k_cache: Array,
    v_cache: Array | None = None,
    *,
    cache_seqlens: Array | None = None,
    block_table: Array | None = None,
    cache_batch_idx: Array | None = None,
    cache_leftpad: Array | None = None,
    k: Array | None = None,
    v: Array | None = None,
    rotary_cos: Array | None = None,
    rotary_sin: Array | None = None,
    rotary_interleaved: bool = True,
    causal: bool = True,
    window_size: tuple[int | None, int | None] | None = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float | None = 0.0,
    alibi_slopes: Array | None = None,
    learnable_sink: Array | None = None,
    num_splits: int = 0,
    split_size: int = 0,
    k_scale: float | Array | None = None,
    v_scale: float | Array | None = None,
    k_rope_cache: Array | None = None,
    k_rope: Array | None = None,
    head_dim_v: int | None = None,
    cache_dtype: str | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_new: Array | None = None,
    q_positions: Array | None = None,
    tree_mask: Array | None = None,
    cu_seqlens_tree: Array | None = None,
    shared_groups: Array | None = None,
    shared_lens: Array | None = None,
    shard: tuple[int, int, int] = (1, 0, 1),
    invariant: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
    kernel: str | None = None,
) -> Array | tuple[Array, ...]:
    """A few query rows per sequence against a cache of keys and values. Forward only.

    Arguments and errors are those of `libflash.decode`; numbers and texts are static, lengths and tables may be int64 or lists.
    There is no gradient: jax.grad raises UnsupportedError. Arrays are immutable in JAX, so with k and v the call returns the new
    caches: donate the old caches to your jitted step (donate_argnums), and XLA writes in place instead of copying. Rows of packed
    arrays that belong to no sequence are 0 (lse: -inf).

    Returns
    -------
    out or (out, lse). With k, followed by the arrays that are written: k_cache, v_cache (if given), then k_scale and v_scale, if
    they have more than 2 dimensions, and k_rope_cache
    """
    given = dict(locals())
    return_lse = switch(return_lse, "return_lse")
    caches = arrays_of(k_cache=k_cache) if v_cache is None else arrays_of(k_cache=k_cache, v_cache=v_cache)
    check_new_rows(k, v, v_cache, head_dim_v, caches[0])
    options = Options(
        flags=flags(causal, "bottom_right", window_size, softmax_scale)
        | (INTERLEAVED if switch(rotary_interleaved, "rotary_interleaved") and rotary_cos is not None else 0)
        | (INVARIANT_ROWS if switch(invariant, "invariant") else 0),
        **static_options("decode", given),
        **shard_options(shard),
    )
    extras = arrays_among("decode", given)
    one_of(cache_dtype, (*CODES, None), "cache_dtype")
    results = _decode(options, cache_dtype, array(q, "q"), caches, extras)
    kept = [results[0], *([results[1]] if return_lse else []), *results[2:]]
    return tuple(kept) if len(kept) > 1 else kept[0]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _decode(options: Options, cache_dtype: str | None, q: Array, caches: list[Array], extras: dict[str, Array]) -> list[Array]:
    call, operands = call_of(DECODE, options, extras)
    results = bind(call, q, *(as_codes(x, cache_dtype) for x in caches), *operands)
    return [*results[:2], *as_given(results[2:], caches)]


def shard_options(shard: Any) -> dict[str, Any]:
    """The options for a shard of the keys, whose results are float32, as in libflash.decode."""
    if not isinstance(known(shard, "shard"), (tuple, list)) or len(shard) != 3:
        raise TypeError(f"shard must be a triple (count, index, keys), not {plainly(shard)}")
    count, index, keys = (signed_integer(x, f"shard[{i}]") for i, x in enumerate(shard))
    if (count, index, keys) == (1, 0, 1):
        return {}
    return {"shard_count": count, "shard_index": index, "shard_keys": keys, "wide": count > 1}


CODES = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}


def as_codes(cache: Array, cache_dtype: str | None) -> Array:
    """A uint8 cache as a cache of codes, with the same bytes."""
    if cache_dtype is None or cache.dtype == CODES[cache_dtype]:
        return cache
    if cache.dtype != jnp.uint8:
        raise InvalidError(f"cache_dtype is {cache_dtype!r}, but a cache is {cache.dtype.name}, not that or uint8")
    return jax.lax.bitcast_convert_type(cache, CODES[cache_dtype])


def as_given(results: list[Array], caches: list[Array]) -> list[Array]:
    """The new caches, which are the first results, with the types of the old caches."""
    pairs = zip(results, caches, strict=False)
    made = [x if x.dtype == old.dtype else jax.lax.bitcast_convert_type(x, old.dtype) for x, old in pairs]
    return [*made, *results[len(made) :]]


def check_new_rows(k: Any, v: Any, v_cache: Any, head_dim_v: Any, k_cache: Any) -> None:
    if v_cache is not None and (k is None) != (v is None):
        raise InvalidError(f"k and v must be given together ({'k' if k is None else 'v'} is None)")
    if v_cache is None and v is not None:
        raise InvalidError("v is given without v_cache: the values are channels of k_cache, to which k is appended")
    if v_cache is None and head_dim_v is None:
        raise InvalidError(
            "head_dim_v is None; without v_cache it must be given: the values are the first head_dim_v channels of k_cache"
        )
    if v_cache is not None and head_dim_v is not None:
        raise InvalidError(
            f"head_dim_v is {head_dim_v}; it is given only without v_cache: then the values are the first head_dim_v channels of "
            "k_cache"
        )
    if head_dim_v is not None and not 1 <= integer(head_dim_v, "head_dim_v") <= k_cache.shape[-1]:
        raise InvalidError(
            f"head_dim_v is {head_dim_v}; it must be at least 1 and at most the channels of k_cache, {k_cache.shape[-1]}"
        )


def cache_write(
    k: Array,
    v: Array | None,
    k_cache: Array,
    v_cache: Array | None,
    slots: Array,
    *,
    k_scale: float | Array | None = None,
    v_scale: float | Array | None = None,
    k_rope_cache: Array | None = None,
    k_rope: Array | None = None,
    rotary_cos: Array | None = None,
    rotary_sin: Array | None = None,
    rotary_interleaved: bool = True,
    positions: Array | None = None,
    cache_dtype: str | None = None,
    backend: str | None = None,
    kernel: str | None = None,
) -> Array | tuple[Array, ...]:
    """Write new rows of keys and values to slots of a cache.

    Arguments and errors are those of `libflash.cache_write`: errors of shapes and types are raised while JAX traces, errors of
    the contents of slots and positions when the program runs. Both may be lists. Arrays are immutable in JAX, so the call returns
    the new arrays. Donate the old arrays to your jitted step (donate_argnums), and XLA writes in place instead of copying.

    Returns
    -------
    k_cache, v_cache (if given), then k_scale and v_scale, if they have more than 2 dimensions, and k_rope_cache. A single array
    is not returned as a tuple.
    """
    options = Options(
        flags=INTERLEAVED if switch(rotary_interleaved, "rotary_interleaved") else 0,
        backend=text(backend, "backend"),
        kernel=text(kernel, "kernel"),
    )
    if (v is None) != (v_cache is None):
        raise InvalidError(f"v and v_cache must be given together ({'v' if v is None else 'v_cache'} is None)")
    one_of(cache_dtype, (*CODES, None), "cache_dtype")
    extras = operands(
        dict(
            v=v,
            k_scale=scale_array(k_scale, "k_scale"),
            v_scale=scale_array(v_scale, "v_scale"),
            k_rope_cache=k_rope_cache,
            k_rope=k_rope,
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
            positions=None if positions is None else lengths(positions, "positions"),
        )
    )
    caches = arrays_of(k_cache=k_cache) if v_cache is None else arrays_of(k_cache=k_cache, v_cache=v_cache)
    results = _cache_write(options, cache_dtype, array(k, "k"), caches, slot_numbers(slots), extras)
    return tuple(results) if len(results) > 1 else results[0]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _cache_write(
    options: Options, cache_dtype: str | None, k: Array, caches: list[Array], slots: Array, extras: dict[str, Array]
) -> list[Array]:
    codes = [as_codes(x, cache_dtype) for x in caches]
    given = extras if len(codes) == 1 else extras | {"v_cache": codes[1]}
    call, operands = call_of(CACHE_WRITE, options, given)
    return as_given(bind(call, k, codes[0], slots, *operands), caches)
