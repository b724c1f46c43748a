"""libflash.jax.merge: combines the results of several ranges of keys."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ._arguments import check_parts, one_of
from ._errors import InvalidError
from ._jax_calls import LAYOUTS, as_out, lse_dtype
from ._jax_options import array, switch

Array = jax.Array


def merge(outs: Any, lses: Any, *, return_lse: bool = True, layout: str = "bshd") -> Array | tuple[Array, Array]:
    """Merge the results of several disjoint ranges of keys; differentiable any number of times, in outs and lses.

    Arguments, results and errors are those of `libflash.merge`. It is written in jax.numpy, so that XLA fuses its few operations
    with the operations before and after them.
    """
    return_lse = switch(return_lse, "return_lse")
    one_of(layout, LAYOUTS, "layout")
    check_parts(outs, lses)
    outs, lses = ([array(x, f"{name}[{i}]") for i, x in enumerate(given)] for name, given in (("outs", outs), ("lses", lses)))
    return _merge(outs, lses, return_lse, layout)  # type: ignore[no-any-return]


@functools.partial(jax.jit, static_argnums=(2, 3))
def _merge(outs: Any, lses: Any, return_lse: bool, layout: str) -> Array | tuple[Array, Array]:
    for i, (out, given) in enumerate(zip(outs, lses, strict=True)):
        rows = lse_rows(out.shape, layout)
        if out.shape != outs[0].shape or given.shape != rows:
            raise InvalidError(
                f"outs[{i}] has shape {out.shape} and lses[{i}] {given.shape}; "
                f"all outs must be alike, {outs[0].shape}, and lses {rows}"
            )
        check_types(i, out, given)
    wide = lse_dtype(outs[0].dtype)
    stacked = jnp.stack([x.astype(wide) for x in lses])
    largest = jax.lax.stop_gradient(stacked.max(0))
    largest = jnp.where(largest == -jnp.inf, 0.0, largest)
    # A part with lse = -inf contributes nothing, even if its out holds NaN, and gets no gradient: select before every product.
    counts = stacked != -jnp.inf  # also where it is NaN, as in libflash.merge
    weights = jnp.where(counts, jnp.exp(jnp.where(counts, stacked, 0.0) - largest[None]), 0.0)
    total = weights.sum(0)
    seen = total != 0
    total = jnp.where(seen, total, 1.0)
    lse = jnp.where(seen, largest + jnp.log(total), -jnp.inf)
    parts = [
        as_out(weight / total, layout) * jnp.where(as_out(part_counts, layout), part.astype(wide), 0.0)
        for weight, part_counts, part in zip(weights, counts, outs, strict=True)
    ]
    out = functools.reduce(jnp.add, parts).astype(outs[0].dtype)
    return (out, lse) if return_lse else out


def check_types(i: int, out: Array, lse: Array) -> None:
    if out.dtype not in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64):
        raise InvalidError(f"outs[{i}]: dtype must be float16, bfloat16, float32 or float64 (it is {out.dtype})")
    if lse.dtype != lse_dtype(out.dtype):
        raise InvalidError(f"lses[{i}]: dtype must be {lse_dtype(out.dtype)} (it is {lse.dtype})")


def lse_rows(out: tuple[int, ...], layout: str) -> tuple[int, ...]:
    if len(out) == 3:
        return out[1], out[0]
    if len(out) != 4:
        raise InvalidError(f"outs[0] has {len(out)} dimensions; it needs 4, or 3 if packed")
    return tuple(out[layout.index(axis)] for axis in "bhs")
