"""libflash for JAX: the same functions under jit, grad, vmap and shard_map, through XLA's foreign function interface.

    import libflash.jax
    out = libflash.jax.attention(q, k, v, causal=True)

`libflash.attention`, `decode` and `merge` call these functions by themselves for traced arrays, and for arrays of JAX on a GPU.

Wrong shapes and values raise libflash's own exceptions while JAX traces. Gradients: reverse mode, once. A second derivative
raises UnsupportedError, and forward mode (jax.jvp, jacfwd, linearize, hessian) JAX's TypeError. vmap folds the new axis into the
batch. On sharded arrays jit keeps shards of batch and heads in place; inside shard_map each device does its part.

jax.export requires a statement that libflash keeps its custom calls compatible. Dimensions may be symbolic; then shapes are
checked when the program runs. Where the program is loaded, import libflash.jax first.

    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in libflash.jax.CUSTOM_CALLS]
    exported = jax.export.export(jax.jit(step), disabled_checks=checks)(q, k, v)

Inputs are row-major to XLA: a transposed view is copied. The number of threads on the CPU is LIBFLASH_NUM_THREADS from the
environment, else all processors; set_num_threads does not reach compiled programs.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ._block_mask import BlockMask
from ._errors import InvalidError, UnsupportedError
from ._jax_calls import (
    ATTENTION_OPERANDS,
    BACKWARD,
    DECODE,
    DECODE_OPERANDS,
    FORWARD,
    INTERLEAVED,
    LAYOUTS,
    TARGETS,
    Call,
    Options,
    lse_dtype,
    vary,
    varying_axes,
)
from ._jax_options import arrays_of, flags, integer, one_of, operands, random_state, real, switch, text, window
from ._jax_vmap import vectorised

__all__ = ["CUSTOM_CALLS", "attention", "decode", "merge"]

CUSTOM_CALLS = TARGETS

Array = jax.Array


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    causal_align: str = "bottom_right",
    window_size: tuple[int | None, int | None] | None = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float | None = 0.0,
    alibi_slopes: Array | None = None,
    bias: Array | None = None,
    mask: Array | None = None,
    learnable_sink: Array | None = None,
    block_mask: Array | None = None,
    dropout_p: float = 0.0,
    seed: int | Array = 0,
    offset: int = 0,
    layout: str = "bshd",
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Array | None = None,
    seqused_k: Array | None = None,
    num_splits: int = 0,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
    kernel: str | None = None,
) -> Array | tuple[Array, Array]:
    """Exact attention with gradients for q, k, v, bias and learnable_sink, through out and through lse.

    Arguments, results and errors are those of `libflash.attention`, but for these:

    Numbers and texts are static: part of the compiled program, as with jit's static arguments.
    seed : int, integer array of no dimensions, PRNG key (jax.random.key or PRNGKey), or uint32 array (4,)
        A Python number is static: give a key or an array for a mask that is new in each step of one compiled program. An integer
        array counts modulo 2**64. The array (4,) holds seed and offset, low words first; with it, or with a key, offset stays 0.
    offset : int, or integer array of no dimensions
    block_mask : the dense form
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k : int32 or int64 arrays, or lists
    deterministic : the gradients have the same bits in every run. On the CPU they always do.
    Rows of packed arrays that belong to no sequence are 0 (lse: -inf), in results and gradients.
    There are no out, lse and stream: XLA owns memory and streams. There is no gradient for alibi_slopes.
    """
    return_lse = switch(return_lse, "return_lse")
    if isinstance(block_mask, BlockMask):
        raise InvalidError("block_mask must be the dense bool array in JAX, not a BlockMask")
    q, k, v = arrays_of(q=q, k=k, v=v)
    options = Options(
        flags=flags(causal, causal_align, window_size, softmax_scale, deterministic),
        layout=one_of(layout, LAYOUTS, "layout"),
        **window(window_size),
        softmax_scale=0.0 if softmax_scale is None else real(softmax_scale, "softmax_scale"),
        softcap=0.0 if softcap is None else real(softcap, "softcap"),
        dropout_p=real(dropout_p, "dropout_p"),
        max_seqlen_q=0 if max_seqlen_q is None else integer(max_seqlen_q, "max_seqlen_q"),
        max_seqlen_k=0 if max_seqlen_k is None else integer(max_seqlen_k, "max_seqlen_k"),
        num_splits=integer(num_splits, "num_splits"),
        backend=text(backend, "backend"),
        kernel=text(kernel, "kernel"),
    )
    extras = operands(
        dict(
            alibi_slopes=alibi_slopes,
            bias=bias,
            mask=mask,
            learnable_sink=learnable_sink,
            block_mask=block_mask,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            seqused_q=seqused_q,
            seqused_k=seqused_k,
        )
    )
    if options.dropout_p:
        numbers, words = random_state(seed, offset)
        options = options._replace(**numbers)
        if words is not None:
            extras["rng"] = words
    out, lse = _compiled(options, q, k, v, extras)
    return (out, lse) if return_lse else out


def call_of(operation: int, options: Options, extras: dict[str, Array]) -> tuple[Any, list[Array]]:
    """The operation, and its optional operands in their order."""
    known = DECODE_OPERANDS if operation == DECODE else ATTENTION_OPERANDS
    names = tuple(name for name in (*known, "rng") if name in extras)
    return vectorised(Call(operation, options, names)), [extras[name] for name in names]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options: Options, q: Array, k: Array, v: Array, extras: dict[str, Array]) -> tuple[Array, Array]:
    operation, operands = call_of(FORWARD, options, extras)
    out, lse = operation(q, k, v, *operands)
    return out, lse


def _forward(options: Options, q: Any, k: Any, v: Any, extras: dict[str, Any]) -> tuple[Any, Any]:
    """`perturbed` is true of the inputs that need a gradient. The backward pass gets it as the length of an empty array: JAX
    may keep the structure of what is saved from another trace of the same function, but never its shapes."""
    wanted = {name for name, x in extras.items() if x.perturbed}
    if "alibi_slopes" in wanted:
        raise UnsupportedError("there is no gradient for alibi_slopes; pass jax.lax.stop_gradient(alibi_slopes)")
    values = {name: x.value for name, x in extras.items()}
    out, lse = _attention(options, q.value, k.value, v.value, values)
    marks = {name: jnp.zeros((name in wanted, 0), bool) for name in ("bias", "learnable_sink")}
    return (out, lse), (q.value, k.value, v.value, values, out, lse, marks)


def _backward(options: Options, saved: Any, cotangents: Any) -> tuple[Any, ...]:
    q, k, v, extras, out, lse, marks = saved
    dout, dlse = cotangents
    zero = jax.custom_derivatives.SymbolicZero
    dout = jnp.zeros_like(out) if isinstance(dout, zero) else dout
    given = extras if isinstance(dlse, zero) else extras | {"dlse": dlse}
    wanted = {name for name, mark in marks.items() if mark.shape[0]}
    operation, operands = call_of(BACKWARD, options._replace(need_dbias="bias" in wanted), given)
    dq, dk, dv, *dbias = operation(dout, q, k, v, out, lse, *operands)
    gradients = dict.fromkeys(extras)
    if "bias" in wanted:
        gradients["bias"] = dbias[0]
    if "learnable_sink" in wanted:
        gradients["learnable_sink"] = sink_gradient(options.layout, extras["learnable_sink"], dout, out, lse, given.get("dlse"))
    return dq, dk, dv, gradients


_attention.defvjp(_forward, _backward, symbolic_zeros=True)


@functools.partial(jax.jit, static_argnums=0)
def _compiled(options: Options, q: Array, k: Array, v: Array, extras: dict[str, Array]) -> tuple[Array, Array]:
    arrays = (q, k, v, extras)
    return _attention(options, *vary(arrays, varying_axes(arrays)))  # type: ignore[no-any-return]


def sink_gradient(layout: str, sink: Array, dout: Array, out: Array, lse: Array, dlse: Array | None) -> Array:
    """The sink is a key without a value: dsink = sum over rows of exp(sink - lse) (dlse - dout . out)."""
    slope = -as_lse((dout.astype(lse.dtype) * out.astype(lse.dtype)).sum(-1), layout)
    if dlse is not None:
        slope = slope + dlse
    column = sink.astype(lse.dtype)[:, None]
    sees = lse > -jnp.inf
    weight = jnp.where(sees, jnp.exp(column - jnp.where(sees, lse, 0.0)), 0.0)
    heads_last = jnp.moveaxis(weight * slope, -2, -1)
    return heads_last.reshape(-1, sink.shape[0]).sum(0).astype(sink.dtype)


def as_lse(x: Array, layout: str) -> Array:
    """From out's order of axes, head_dim gone, to lse's."""
    if x.ndim == 2:
        return x.T
    return x.transpose([layout.index(axis) for axis in "bhs"])


def as_out(lse: Array, layout: str) -> Array:
    """lse in out's order of axes, and one more."""
    if lse.ndim == 2:
        return lse.T[..., None]
    return lse.transpose(["bhs".index(axis) for axis in layout if axis != "d"])[..., None]


def decode(
    q: Array,
    k_cache: Array,
    v_cache: Array,
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
    cu_seqlens_q: Array | None = None,
    cu_seqlens_new: Array | None = None,
    q_positions: Array | None = None,
    tree_mask: Array | None = None,
    cu_seqlens_tree: Array | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    kernel: str | None = None,
) -> Array | tuple[Array, ...]:
    """A few query rows per sequence against a cache of keys and values. Forward only.

    Arguments and errors are those of `libflash.decode`; numbers and texts are static, lengths and tables may be int64 or lists.
    There is no gradient: jax.grad raises UnsupportedError. Arrays are immutable in JAX, so with k and v the new caches are
    returned: donate the old ones to your jitted step (donate_argnums), and XLA writes in place instead of copying. Rows of packed
    arrays that belong to no sequence are 0 (lse: -inf).

    Returns
    -------
    out, (out, lse), (out, k_cache, v_cache) or (out, lse, k_cache, v_cache)
    """
    return_lse = switch(return_lse, "return_lse")
    if (k is None) != (v is None):
        raise InvalidError("k and v must be given together")
    options = Options(
        flags=flags(causal, "bottom_right", window_size, softmax_scale)
        | (INTERLEAVED if switch(rotary_interleaved, "rotary_interleaved") and rotary_cos is not None else 0),
        **window(window_size),
        softmax_scale=0.0 if softmax_scale is None else real(softmax_scale, "softmax_scale"),
        softcap=0.0 if softcap is None else real(softcap, "softcap"),
        num_splits=integer(num_splits, "num_splits"),
        split_size=integer(split_size, "split_size"),
        backend=text(backend, "backend"),
        kernel=text(kernel, "kernel"),
    )
    extras = operands(
        dict(
            cache_seqlens=cache_seqlens,
            block_table=block_table,
            cache_batch_idx=cache_batch_idx,
            cache_leftpad=cache_leftpad,
            k=k,
            v=v,
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
            alibi_slopes=alibi_slopes,
            learnable_sink=learnable_sink,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_new=cu_seqlens_new,
            q_positions=q_positions,
            tree_mask=tree_mask,
            cu_seqlens_tree=cu_seqlens_tree,
        )
    )
    arrays = arrays_of(q=q, k_cache=k_cache, v_cache=v_cache)
    results = _decode(options, *arrays, extras)
    kept = [results[0], *([results[1]] if return_lse else []), *results[2:]]
    return tuple(kept) if len(kept) > 1 else kept[0]


@functools.partial(jax.jit, static_argnums=0)
def _decode(options: Options, q: Array, k_cache: Array, v_cache: Array, extras: dict[str, Array]) -> list[Array]:
    operation, operands = call_of(DECODE, options, extras)
    return operation(q, k_cache, v_cache, *operands)  # type: ignore[no-any-return]


def merge(outs: Any, lses: Any, *, return_lse: bool = True, layout: str = "bshd") -> Array | tuple[Array, Array]:
    """Attention over several disjoint ranges of keys, put together; differentiable in any order, in outs and lses.

    Arguments, results and errors are those of `libflash.merge`. Written in jax.numpy: XLA fuses these few operations with what
    precedes and follows them.
    """
    return _merge(outs, lses, switch(return_lse, "return_lse"), layout)  # type: ignore[no-any-return]


@functools.partial(jax.jit, static_argnums=(2, 3))
def _merge(outs: Any, lses: Any, return_lse: bool, layout: str) -> Array | tuple[Array, Array]:
    one_of(layout, LAYOUTS, "layout")
    if len(outs) != len(lses):
        raise InvalidError(f"outs has {len(outs)} arrays and lses {len(lses)}; they must be as many")
    if not outs:
        raise InvalidError("outs has 0 arrays; it needs at least 1")
    for i, (out, given) in enumerate(zip(outs, lses, strict=True)):
        rows = lse_rows(out.shape, layout)
        if out.shape != outs[0].shape or given.shape != rows:
            raise InvalidError(
                f"outs[{i}] has shape {out.shape} and lses[{i}] {given.shape}; "
                f"all outs must be alike, {outs[0].shape}, and lses {rows}"
            )
    wide = lse_dtype(outs[0].dtype)
    stacked = jnp.stack([x.astype(wide) for x in lses])
    largest = jax.lax.stop_gradient(stacked.max(0))
    largest = jnp.where(largest == -jnp.inf, 0.0, largest)
    # A part with lse = -inf contributes nothing, whatever its out holds, and gets no gradient: select before every product.
    counts = stacked > -jnp.inf
    weights = jnp.where(counts, jnp.exp(jnp.where(counts, stacked, 0.0) - largest), 0.0)
    total = weights.sum(0)
    seen = total > 0
    total = jnp.where(seen, total, 1.0)
    lse = jnp.where(seen, largest + jnp.log(total), -jnp.inf)
    parts = [
        as_out(weight / total, layout) * jnp.where(as_out(part_counts, layout), part.astype(wide), 0.0)
        for weight, part_counts, part in zip(weights, counts, outs, strict=True)
    ]
    out = functools.reduce(jnp.add, parts).astype(outs[0].dtype)
    return (out, lse) if return_lse else out


def lse_rows(out: tuple[int, ...], layout: str) -> tuple[int, ...]:
    if len(out) == 3:
        return out[1], out[0]
    if len(out) != 4:
        raise InvalidError(f"outs[0] has {len(out)} dimensions; it needs 4, or 3 if packed")
    return tuple(out[layout.index(axis)] for axis in "bhs")
