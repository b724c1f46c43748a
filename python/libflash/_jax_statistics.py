"""Statistics of rows as results of libflash.jax.attention: they have no derivatives, but must not be silently treated as
constants in a loss.

Their tangent is a primitive that depends on the tangents of the inputs. Reverse mode transposes this primitive, which raises an
error if a gradient reaches it. If no gradient reaches it, for example after jax.lax.stop_gradient, nothing happens. In forward
mode its value is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ._arguments import described
from ._errors import InvalidError, UnsupportedError
from ._jax_calls import STATISTICS

DEPEND_ON = {"max_logit": ("q", "k", "bias"), "entropy": ("q", "k", "bias", "learnable_sink")}
NO_DERIVATIVE = "{} has no derivative: call jax.lax.stop_gradient on it where libflash.jax.attention returns it"
TANGENT = Primitive("libflash_statistics_tangent")  # (the statistic, *tangents) -> NaN, shaped like the statistic


def check(return_stats: Any) -> tuple[str, ...]:
    """The names of the requested statistics, each once."""
    if not isinstance(return_stats, (tuple, list)):
        raise TypeError(f"return_stats must be a tuple of names, not {described(return_stats)}")
    for name in return_stats:
        if not isinstance(name, str) or name not in STATISTICS:
            raise InvalidError(f"return_stats has {name!r}; it may have {' and '.join(map(repr, STATISTICS))}")
    if len(set(return_stats)) < len(return_stats):
        raise InvalidError(f"return_stats is {return_stats}; each name may be there once")
    return tuple(return_stats)


def in_order(names: Sequence[str]) -> tuple[str, ...]:
    """The names in the order of the primitive's results."""
    return tuple(name for name in STATISTICS if name in names)


def tangent(name: str, value: Any, moved: dict[str, Any]) -> Any:
    """The tangent of a statistic; `moved` are the tangents of the inputs that are not zero."""
    causes = [moved[source] for source in DEPEND_ON[name] if source in moved]
    return not_computed(value, causes, name) if causes else zero(value)


def not_computed(value: Any, tangents: Sequence[Any], name: str) -> Any:
    return TANGENT.bind(value, *tangents, name=name)  # type: ignore[no-untyped-call]


def zero(x: Any) -> Any:
    """A zero tangent for x."""
    return ad.Zero(jax.typeof(x).to_tangent_aval())


def nan_like(value: Any, *tangents: Any, name: str) -> Any:
    return value * jnp.nan


def abstract(value: Any, *tangents: Any, name: str) -> Any:
    return value


def tangent_of_tangent(primals: Sequence[Any], tangents: Sequence[Any], *, name: str) -> Any:
    made = not_computed(primals[0], primals[1:], name)
    moved = [t for t in tangents if not isinstance(t, ad.Zero)]
    return made, not_computed(primals[0], moved, name) if moved else zero(made)


def transpose(cotangent: Any, *operands: Any, name: str) -> list[Any]:
    if not isinstance(cotangent, ad.Zero):
        raise UnsupportedError(NO_DERIVATIVE.format(name))
    return [None for _ in operands]


def batch(operands: Sequence[Any], axes: Sequence[Any], *, name: str) -> Any:
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    value, *tangents = (x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(operands, axes, strict=True))
    if axes[0] is None:
        value = jnp.broadcast_to(value, (size, *value.shape))
    return not_computed(value, tangents, name), 0


TANGENT.def_impl(nan_like)  # type: ignore[no-untyped-call]
TANGENT.def_abstract_eval(abstract)  # type: ignore[no-untyped-call]
mlir.register_lowering(TANGENT, mlir.lower_fun(nan_like, multiple_results=False))
ad.primitive_jvps[TANGENT] = tangent_of_tangent
ad.primitive_transposes[TANGENT] = transpose
batching.primitive_batchers[TANGENT] = batch
