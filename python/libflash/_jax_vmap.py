"""Rules of jax.vmap: the new axis is folded into the batch. Calls that cannot be folded run one after another: cache_write;
packed arrays, pages, trees and shared keys, which number all batch entries; scales and rope parts of caches; mapped sinks and
rotary tables, which have no batch axis; and dropout, whose mask must not depend on other entries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import batching

from ._jax_axes import operand_labels, result_labels
from ._jax_calls import CACHE_WRITE, Call, Shape
from ._jax_primitives import PRIMITIVES, bind


def rule(operands: Sequence[Any], axes: Sequence[int | None], *, call: Call, program: Any) -> tuple[list[Any], list[int]]:
    """The results for all entries of the mapped axis, and the position of this axis in each result."""
    batched = [axis is not None for axis in axes]
    first = [jnp.moveaxis(x, axis, 0) if mapped else x for x, axis, mapped in zip(operands, axes, batched, strict=True)]
    size = next(x.shape[0] for x, mapped in zip(first, batched, strict=True) if mapped)
    results = folded(call, size, batched, first) if foldable(call, batched) else one_by_one(call, batched, first)
    return results, [0] * len(results)


for _primitive in PRIMITIVES.values():
    batching.primitive_batchers[_primitive] = rule


def foldable(call: Call, batched: Sequence[bool]) -> bool:
    given = dict(zip((*call.fixed, *call.names), batched, strict=True))
    shared = ("learnable_sink", "rotary_cos", "rotary_sin")
    if call.operation == CACHE_WRITE or any(name in call.names for name in ("k_scale", "v_scale", "k_rope_cache")):
        return False
    return (
        not any(name.startswith("cu_seqlens") for name in call.names)
        and call.options.dropout_p == 0
        and not any(name in call.names for name in ("block_table", "cache_batch_idx", "tree_mask", "shared_groups"))
        and not any(given.get(name, False) for name in shared)
    )


def one_by_one(call: Call, batched: Sequence[bool], operands: Sequence[Any]) -> list[Any]:
    def one(mapped: list[Any]) -> list[Any]:
        mapped_now = iter(mapped)
        return bind(call, *(next(mapped_now) if is_mapped else x for x, is_mapped in zip(operands, batched, strict=True)))

    return jax.lax.map(one, [x for x, is_mapped in zip(operands, batched, strict=True) if is_mapped])  # type: ignore[no-any-return]


def folded(call: Call, size: int, batched: Sequence[bool], operands: Sequence[Any]) -> list[Any]:
    bodies = [Shape(x.shape[1:] if is_mapped else x.shape, x.dtype) for x, is_mapped in zip(operands, batched, strict=True)]
    labels = operand_labels(call, bodies)
    q = call.fixed.index("q")
    batch = bodies[q].shape[labels[q].index("b")]
    biases = ("bias", "tbias", "ubias")  # they have one shape; if one of them, or a gradient, is mapped, each entry needs its own
    own_bias = call.options.need_dbias or not {"tbias", "ubias"}.isdisjoint(call.names)
    flat = []
    for name, x, label, is_mapped in zip((*call.fixed, *call.names), operands, labels, batched, strict=True):
        needs_batch = is_mapped or (name in biases and own_bias)
        flat.append(fold(x, label, size, batch, is_mapped, needs_batch))
    results = bind(call, *flat)
    unfolded = []
    for x, label in zip(results, result_labels(call, bodies), strict=True):
        axis = label.lower().index("b")
        split = jnp.moveaxis(x.reshape((*x.shape[:axis], batch, size, *x.shape[axis + 1 :])), axis + 1, 0)
        unfolded.append(split.sum(axis + 1, keepdims=True, dtype=split.dtype) if "B" in label else split)
    return unfolded


def fold(x: Any, label: str, size: int, batch: int, is_mapped: bool, needs_batch: bool) -> Any:
    """x, (size, ...) if it is mapped, with a batch axis that is `size` times as long; x itself if it has no batch axis and needs
    none. The batch is the outer part of the new axis, so that shards of the batch stay on their devices."""
    if not needs_batch and "b" not in label:
        return x
    if not is_mapped:
        x = jnp.broadcast_to(x, (size, *x.shape))
    if "b" not in label.lower():  # alibi_slopes that are the same for all batch entries
        x, label = x[:, None], "B" + label
    axis = label.lower().index("b")
    if "B" in label:
        x = jnp.broadcast_to(x, (*x.shape[: axis + 1], batch, *x.shape[axis + 2 :]))
    x = jnp.moveaxis(x, 0, axis + 1)
    return x.reshape((*x.shape[:axis], batch * size, *x.shape[axis + 2 :]))
