"""libflash for JAX: the same functions under jit, grad, vmap and shard_map, through XLA's foreign function interface.

    import libflash.jax
    out = libflash.jax.attention(q, k, v, causal=True)

`libflash.attention`, `decode` and `merge` call these functions for traced arrays, and for JAX arrays on a GPU.

Wrong shapes and values raise libflash's own exceptions while JAX traces. Derivatives: reverse mode (grad, vjp, jacrev), forward
mode (jvp, linearize, jacfwd) and second derivatives (hessian, grad of grad, jvp of grad, grad of jvp). A tangent of a tangent
(jacfwd of jacfwd) and third derivatives raise UnsupportedError. vmap folds the new axis into the batch; calls with packed arrays,
pages or dropout and cache_write run one after another. On sharded arrays jit keeps shards of batch and heads in place; inside
shard_map each device computes its part. Entries of vmap and devices of shard_map that have the same seed have the same dropout
mask: map the seed too, or fold jax.lax.axis_index into the key.

jax.export requires a statement that libflash keeps its custom calls compatible. Dimensions may be symbolic; then shapes are
checked when the program runs. Where the program is loaded, import libflash.jax first. A program for CUDA that is exported where
JAX has no GPU has no scratch memory: gradients are refused, and other calls raise an error when they run on a GPU if they need
scratch memory (as with seqused_q, seqused_k or packed arrays). In a program for several devices call attention and decode inside
shard_map: their rules for arrays that jit shards cannot be exported, and UnsupportedError says so.

    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in libflash.jax.CUSTOM_CALLS]
    exported = jax.export.export(jax.jit(step), disabled_checks=checks)(q, k, v)

Inputs are row-major to XLA: a transposed view is copied. The number of threads on the CPU is LIBFLASH_NUM_THREADS from the
environment, else all processors; set_num_threads does not affect compiled programs.
"""

from __future__ import annotations

import functools

import jax

from . import _jax_version  # noqa: F401  refuses versions that are too old for the modules below

# isort: split

from . import _jax_statistics
from ._arguments import one_of
from ._block_mask import BlockMask
from ._errors import InvalidError
from ._jax_cache import cache_write, decode
from ._jax_calls import FORWARD, LAYOUTS, TARGETS, Options
from ._jax_context import context_parallel_attention, explain_context_parallel, positions, shard, unshard
from ._jax_merge import merge
from ._jax_options import (
    arrays_among,
    arrays_of,
    check_bounds,
    checked_random_state,
    flags,
    random_state,
    static_options,
    switch,
)
from ._jax_primitives import bind, call_of
from ._jax_vmap import rule as _rule_of_vmap  # noqa: F401  importing it makes the primitives known to jax.vmap

__all__ = [
    "CUSTOM_CALLS",
    "attention",
    "cache_write",
    "context_parallel_attention",
    "decode",
    "explain_context_parallel",
    "merge",
    "positions",
    "shard",
    "unshard",
]

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
    return_stats: tuple[str, ...] = (),
    backend: str | None = None,
    kernel: str | None = None,
) -> Array | tuple[Array, ...]:
    """Exact attention with gradients for q, k, v, bias and learnable_sink, through out and through lse.

    Arguments, results and errors are those of `libflash.attention`, except for these:

    Numbers and texts are static: part of the compiled program, as with jit's static arguments.
    seed : int, integer array of no dimensions, PRNG key (jax.random.key or PRNGKey), or uint32 array (4,)
        A Python number is static: pass a key or an array for a new mask in each step of one compiled program. An integer array is
        taken modulo 2**64. The array (4,) holds seed and offset, low words first; with it, or with a key, offset stays 0.
    offset : int, or integer array of no dimensions
    block_mask : the dense form
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k : int32 or int64 arrays, or lists
    deterministic : the gradients have the same bits in every run. On the CPU they always do.
    Rows of packed arrays that belong to no sequence are 0 (lse: -inf), in results and gradients.
    return_stats : a subset of "max_logit" and "entropy", static
        Further results after out and lse, in this order, each with shape and type of lse: the largest score and the entropy of
        each row. The maximum of a head, for QK-clip, is max_logit.max((0, 2)), packed max_logit.max(1). They have no
        derivative: call jax.lax.stop_gradient on them; a gradient through them raises UnsupportedError, their tangent is NaN.
    There are no arguments out, lse, max_logit, entropy and stream, because XLA owns memory and streams. There is no gradient for
    alibi_slopes.
    """
    given = dict(locals())
    return_lse = switch(return_lse, "return_lse")
    asked = _jax_statistics.check(return_stats)
    if isinstance(block_mask, BlockMask):
        raise InvalidError("block_mask must be the dense bool array in JAX, not a BlockMask")
    q, k, v = arrays_of(q=q, k=k, v=v)
    options = Options(
        flags=flags(causal, causal_align, window_size, softmax_scale, deterministic),
        layout=one_of(layout, LAYOUTS, "layout"),
        **static_options("attention", given),
        statistics=_jax_statistics.in_order(asked),
    )
    check_bounds(q, k, options, given)
    extras = arrays_among("attention", given)
    if options.dropout_p:
        numbers, words = random_state(seed, offset)
        options = options._replace(**numbers)
        if words is not None:
            extras["rng"] = words
    else:
        checked_random_state(seed, offset)
    out, lse, *statistics = _compiled(options, q, k, v, extras)
    made = dict(zip(options.statistics, statistics, strict=True))
    results = (out, *([lse] if return_lse else ()), *(made[name] for name in asked))
    return results if len(results) > 1 else out


@functools.partial(jax.jit, static_argnums=0)
def _compiled(options: Options, q: Array, k: Array, v: Array, extras: dict[str, Array]) -> tuple[Array, ...]:
    call, operands = call_of(FORWARD, options, extras)
    return tuple(bind(call, q, k, v, *operands))
