"""Rules of JAX's transformations: vmap folds the new axis into the batch; unsupported derivatives raise UnsupportedError."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from ._errors import UnsupportedError
from ._jax_axes import operand_labels, result_labels
from ._jax_calls import BACKWARD, DECODE, Call, Shape
from ._jax_sharding import partitioned


@functools.lru_cache(maxsize=1024)
def vectorised(call: Call) -> Callable[..., list[Any]]:
    """The operation under jax.vmap. Calls that cannot be folded into the batch run one after another: packed arrays, pages,
    mapped sinks, and dropout, whose mask must not depend on other entries."""

    @custom_vmap
    def run_batched(*operands: Any) -> list[Any]:
        return partitioned(call, *operands)

    @run_batched.def_vmap
    def rule(size: int, batched: list[bool], *operands: Any) -> tuple[list[Any], list[bool]]:
        fold_all = foldable(call, batched)
        outs = folded(call, size, batched, operands) if fold_all else one_by_one(call, batched, operands)
        return outs, [True] * len(outs)

    return without_derivative(call.operation, run_batched)


NO_DERIVATIVE = {
    DECODE: "libflash.jax.decode has no gradient: use libflash.jax.attention to train, "
    "or call jax.lax.stop_gradient on what is given to decode",
    BACKWARD: "the gradient of libflash.jax.attention has no derivative of its own (jax.grad of jax.grad, jax.hessian, "
    "jax.jvp of jax.grad): write attention in jax.numpy where second derivatives are needed, "
    "or call jax.lax.stop_gradient on what is given to the first",
}


def without_derivative(operation: int, function: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """The function, which raises UnsupportedError when JAX differentiates it."""
    if operation not in NO_DERIVATIVE:  # forward: differentiated as a whole in jax.py
        return function
    guarded = jax.custom_jvp(function)

    @guarded.defjvp
    def refuse(primals: Any, tangents: Any) -> Any:
        raise UnsupportedError(NO_DERIVATIVE[operation])

    return guarded


def foldable(call: Call, batched: Sequence[bool]) -> bool:
    given = dict(zip((*call.fixed, *call.names), batched, strict=True))
    shared = ("learnable_sink", "rotary_cos", "rotary_sin")
    return (
        not any(name.startswith("cu_seqlens") for name in call.names)
        and call.options.dropout_p == 0
        and not any(name in call.names for name in ("block_table", "cache_batch_idx", "tree_mask"))
        and not any(given.get(name, False) for name in shared)
    )


def one_by_one(call: Call, batched: Sequence[bool], operands: Sequence[Any]) -> list[Any]:
    def one(mapped: list[Any]) -> list[Any]:
        mapped_now = iter(mapped)
        return vectorised(call)(*(next(mapped_now) if is_mapped else x for x, is_mapped in zip(operands, batched, strict=True)))

    return jax.lax.map(one, [x for x, is_mapped in zip(operands, batched, strict=True) if is_mapped])  # type: ignore[no-any-return]


def folded(call: Call, size: int, batched: Sequence[bool], operands: Sequence[Any]) -> list[Any]:
    bodies = [Shape(x.shape[1:] if is_mapped else x.shape, x.dtype) for x, is_mapped in zip(operands, batched, strict=True)]
    labels = operand_labels(call, bodies)
    q = call.fixed.index("q")
    batch = bodies[q].shape[labels[q].index("b")]
    flat = []
    for name, x, label, is_mapped in zip((*call.fixed, *call.names), operands, labels, batched, strict=True):
        apart = is_mapped or (name == "bias" and call.options.need_dbias)  # one gradient for each
        flat.append(fold(x, label, size, batch, is_mapped, apart))
    results = vectorised(call)(*flat)
    unfolded = []
    for x, label in zip(results, result_labels(call, bodies), strict=True):
        axis = label.lower().index("b")
        split = jnp.moveaxis(x.reshape((*x.shape[:axis], size, batch, *x.shape[axis + 1 :])), axis, 0)
        unfolded.append(split.sum(axis + 1, keepdims=True, dtype=split.dtype) if "B" in label else split)
    return unfolded


def fold(x: Any, label: str, size: int, batch: int, is_mapped: bool, apart: bool) -> Any:
    """x, (size, ...) if it is mapped, with a batch axis that is `size` times as long."""
    if not apart and "b" not in label:
        return x
    if not is_mapped:
        x = jnp.broadcast_to(x, (size, *x.shape))
    if "b" not in label.lower():  # alibi_slopes for all entries of a batch alike
        x, label = x[:, None], "B" + label
    axis = label.lower().index("b")
    if "B" in label:
        x = jnp.broadcast_to(x, (*x.shape[: axis + 1], batch, *x.shape[axis + 2 :]))
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape((*x.shape[:axis], size * batch, *x.shape[axis + 2 :]))
