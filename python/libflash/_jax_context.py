"""Attention over a sequence that is divided among the devices of a mesh axis, inside jax.shard_map: each device has some tokens.

The result is the same as on one device, within the error bound of a merge; so are gradients and the dropout mask. The collectives
are XLA's ppermute, all_gather and all_to_all.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import _context_layout as layouts
from ._arguments import described, integer, is_traced, plainly, real, shown
from ._context_choice import Sizes, can_share_heads, check_scheme, choose, explanation, key_heads_repeated
from ._context_layout import Layout
from ._context_shapes import check_shapes, check_tokens, documents_of, refuse_others, sizes_of
from ._errors import InvalidError, UnsupportedError
from ._jax_calls import Options, vary, varying_axes
from ._jax_context_heads import Heads
from ._jax_context_ring import Ring, gathered_attention, ring_attention
from ._jax_derivatives import NO_GRADIENT_OF_SLOPES
from ._jax_options import (
    array,
    arrays_among,
    arrays_of,
    checked_random_state,
    flags,
    known,
    random_state,
    static_options,
    switch,
    window,
)

Array = jax.Array
Axes = str | tuple[str, str]


class Given(NamedTuple):
    """The arguments that determine what the devices send."""

    scheme: str
    order: str
    cu_seqlens: tuple[int, ...] | None
    window: tuple[int, int]  # keys that a row sees to the left and right; -1: all


def context_parallel_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    axis_name: Axes,
    scheme: str = "auto",
    order: str = "zigzag",
    cu_seqlens: Any = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] | None = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float | None = 0.0,
    alibi_slopes: Array | None = None,
    learnable_sink: Array | None = None,
    dropout_p: float = 0.0,
    seed: int | Array | None = None,
    offset: int = 0,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
    **others: Any,
) -> Array | tuple[Array, Array]:
    """Exact attention of this device's rows over the keys of all devices of a mesh axis, with gradients for q, k, v and
    learnable_sink. Call it inside jax.shard_map. Names and meanings are those of `attention`.

    Parameters
    ----------
    q, k, v : (batch, tokens, heads, head_dim), or with cu_seqlens (tokens, heads, head_dim): this device's tokens. Before
        shard_map, `shard` puts the tokens of the whole sequence in the order of the shards.
    axis_name : the mesh axis; or two, (heads, ring), for arrays whose tokens are sharded by PartitionSpec((ring, heads))
    scheme : "ring" (keys are sent during the computation), "halo" (a ring for windows: only neighbours send), "all_gather" (the
        keys of all devices in one call), "heads" (all tokens, a share of the heads: all-to-all), "heads_ring" (two axes), or
        "auto": see explain_context_parallel
    order : "zigzag" or "contiguous": which tokens a device has; see `shard`. Of n devices, device r has the chunks r and 2n-1-r
        of 2n (zigzag: equal work with a causal mask), or chunk r of n (contiguous)
    cu_seqlens : (documents + 1,) integers known while JAX traces: the prefix sums of the documents' lengths, over the tokens of
        all devices
    alibi_slopes, learnable_sink : of all query heads, the same on every device
    seed : required with dropout_p, and the same on all devices: the mask is the same as on one device
    deterministic : the gradients have the same bits in every run. On the CPU they always do.

    Returns
    -------
    out : shape of q with v's head_dim; and lse : (batch, heads, tokens) or (heads, tokens), if return_lse; both differentiable

    Derivatives: gradients, once, in reverse mode; with scheme "heads" and without dropout_p all derivatives of `attention`, in
    reverse and forward mode.

    Raises
    ------
    As attention. UnsupportedError for bias, mask, block_mask and other options of attention that are not named here; on GPUs also
    for alibi_slopes, except with scheme "heads".
    """
    arguments = dict(locals())
    refuse_others(arguments.pop("others"))
    return_lse = switch(return_lse, "return_lse")
    q, k, v = arrays_of(q=q, k=k, v=v)
    sizes_of_axes = tuple(map(axis_size, axis_names(axis_name)))
    given = read_given(scheme, order, cu_seqlens, causal, window_size)
    sizes = check_arrays(q, k, v, given, sizes_of_axes)
    scheme = chosen_scheme(given, sizes)[0]
    if seed is None and real(dropout_p, "dropout_p"):
        raise InvalidError("seed is None; with dropout_p it must be given, and be the same on all devices")
    options = Options(
        flags=flags(causal, "bottom_right", window_size, softmax_scale, deterministic),
        **static_options("attention", arguments),
    )
    extras = arrays_among("attention", arguments)
    if "alibi_slopes" in extras:
        extras["alibi_slopes"] = without_gradient(extras["alibi_slopes"])
    check_heads(extras, q.shape[-2])
    if options.dropout_p:
        numbers, words = random_state(seed, offset)
        options = options._replace(**numbers)  # type: ignore[arg-type]
        if words is not None:
            extras["rng"] = words
    elif seed is not None:
        checked_random_state(seed, offset)
    out, lse = divided(q, k, v, extras, options, given, scheme, axis_names(axis_name))
    return (out, lse) if return_lse else out


def divided(
    q: Array, k: Array, v: Array, extras: dict[str, Array], options: Options, given: Given, scheme: str, axes: tuple[str, ...]
) -> tuple[Array, Array]:
    """The axes of the exchange of heads and of the attention over all keys; either may have only one device."""
    along_heads, along_ring = axes if len(axes) == 2 else (axes[0], None) if scheme == "heads" else (None, axes[0])
    heads_size = 1 if along_heads is None else jax.lax.axis_size(along_heads)
    ring_size = 1 if along_ring is None else jax.lax.axis_size(along_ring)
    ranks = heads_size * ring_size
    layout = Layout(given.order, q.shape[-3] * ranks, ranks, given.cu_seqlens)
    heads = Heads(along_heads, heads_size, q.shape[-2], k.shape[-2], layout)
    ring = Ring(along_ring, ring_size, heads, layout, given.window, scheme)
    arrays = (q, k, v, extras)
    q, k, v, extras = vary(arrays, tuple(dict.fromkeys((*varying_axes(arrays), *axes))))
    extras = {name: heads.share(x) if name in ("alibi_slopes", "learnable_sink") else x for name, x in extras.items()}
    inner = (heads.to_heads(q), heads.to_heads(k, heads.repeat), heads.to_heads(v, heads.repeat))

    whole = scheme == "all_gather" or ring_size == 1
    out, lse = (gathered_attention if whole else ring_attention)(ring, options, *inner, extras)
    return heads.to_tokens(out), heads.lse_to_tokens(lse)


@jax.custom_jvp
def without_gradient(alibi_slopes: Array) -> Array:
    return alibi_slopes


@without_gradient.defjvp
def _refuse(primals: Any, tangents: Any) -> Any:
    raise UnsupportedError(NO_GRADIENT_OF_SLOPES)


# -- arguments


def axis_names(axis_name: Any) -> tuple[str, ...]:
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if len(names) not in (1, 2) or not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise InvalidError(
            f"axis_name is {shown(axis_name)}; it must be the name of one mesh axis, or a tuple of two names, (heads, ring)"
        )
    return names


def axis_size(name: str) -> int:
    try:
        return int(jax.lax.axis_size(name))
    except NameError:
        raise InvalidError(
            f"axis_name has {name!r}, which is no mesh axis here; call context_parallel_attention inside jax.shard_map, on a "
            "mesh with this axis"
        ) from None


def read_given(scheme: Any, order: Any, cu_seqlens: Any, causal: Any, window_size: Any) -> Given:
    layouts.check_order(order)
    if any(is_traced(x) for x in jax.tree.leaves(cu_seqlens)):
        raise UnsupportedError("cu_seqlens is traced, and decides what the devices send; it must be known while JAX traces")
    documents = documents_of(cu_seqlens)
    sides = window(window_size)
    left, right = sides.get("window_left", -1), sides.get("window_right", -1)
    return Given(scheme, order, documents, (left, 0 if switch(causal, "causal") else right))


def check_arrays(q: Array, k: Array, v: Array, given: Given, mesh: tuple[int, ...]) -> Sizes:
    check_shapes(q, k, v, packed=given.cu_seqlens is not None)
    sizes = sizes_of(q, k, v, mesh)
    check_scheme(given.scheme, sizes, given.order, given.window)
    check_tokens(sizes, given.order, given.cu_seqlens)
    if chosen_scheme(given, sizes)[0] in ("heads", "heads_ring"):
        key_heads_repeated(sizes.heads_q, sizes.heads_k, mesh[0], given.scheme)
    return sizes


def check_heads(extras: dict[str, Array], heads_q: int) -> None:
    for name in ("alibi_slopes", "learnable_sink"):
        if name in extras and extras[name].shape != (heads_q,):
            raise InvalidError(f"{name} has shape {extras[name].shape}; it must be ({heads_q},), the heads of q")


def chosen_scheme(given: Given, sizes: Sizes) -> tuple[str, str]:
    if given.scheme != "auto":
        return given.scheme, "requested"
    if jax.default_backend() == "gpu" and len(sizes.mesh) == 1 and sizes.mesh[0] > 1 and can_share_heads(sizes):
        return "heads", "on GPUs a ring needs the kernels that know positions, which are slower than those of whole sequences"
    return choose(sizes, given.order, given.window)


def explain_context_parallel(
    q: Any, k: Any, v: Any, *, ranks: tuple[int, ...], scheme: str = "auto", order: str = "zigzag", cu_seqlens: Any = None,
    causal: bool = False, window_size: Any = (-1, -1),
) -> str:  # fmt: skip
    """Explain which scheme context_parallel_attention uses for these shards (arrays or shapes with a dtype) and options on a mesh
    axis of `ranks` = (n,) devices, or (heads, ring), why, and how many bytes a device sends. Other options do not affect the
    choice."""
    given = read_given(scheme, order, cu_seqlens, causal, window_size)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not hasattr(x, "ndim"):
            raise TypeError(f"{name} must be an array or a jax.ShapeDtypeStruct, not {described(x)}")
    if not isinstance(known(ranks, "ranks"), (tuple, list)) or len(ranks) not in (1, 2):
        raise TypeError(f"ranks must be a tuple (n,) or (heads, ring), not {plainly(ranks)}")
    sizes = check_arrays(q, k, v, given, tuple(positive(n, f"ranks[{i}]") for i, n in enumerate(ranks)))
    return explanation(*chosen_scheme(given, sizes), sizes, order)


# -- the order of tokens


def shard(x: Array, ranks: int, *, dim: int = 1, order: str = "zigzag") -> Array:
    """x with its tokens in the order of the shards: if x is divided into `ranks` equal parts along `dim`, as by a PartitionSpec,
    part r is the shard of device r in context_parallel_attention."""
    return _moved(x, ranks, dim, order, inverse=False)


def unshard(x: Array, ranks: int, *, dim: int = 1, order: str = "zigzag") -> Array:
    """The inverse of `shard`."""
    return _moved(x, ranks, dim, order, inverse=True)


def positions(tokens: int, ranks: int, *, order: str = "zigzag") -> np.ndarray:
    """The numbers (int64) of the tokens in the order of the shards, for rotary embedding and labels."""
    layouts.check_order(order)
    tokens, ranks = integer(tokens, "tokens"), positive(ranks, "ranks")
    layouts.check_tokens(tokens, order, ranks)
    return np.concatenate([layouts.tokens_of(order, tokens, rank, ranks) for rank in range(ranks)])


def positive(x: Any, name: str) -> int:
    value = integer(x, name)
    if value < 1:
        raise InvalidError(f"{name} is {value}; it must be at least 1")
    return value


def _moved(x: Array, ranks: int, dim: int, order: str, *, inverse: bool) -> Array:
    x, dim = array(x, "x"), integer(dim, "dim")
    if not -x.ndim <= dim < x.ndim:
        raise InvalidError(f"dim is {dim}; it must be an axis of x, which has {x.ndim} dimensions")
    tokens = positions(x.shape[dim], ranks, order=order)
    return jnp.take(x, np.argsort(tokens) if inverse else tokens, axis=dim, unique_indices=True)
