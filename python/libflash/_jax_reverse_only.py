"""Operations with custom_vjp have no forward mode. Their inputs pass through `reverse_only`, which refuses forward mode by name.

The tangent of an input is a primitive. Reverse mode transposes it, which removes it. Forward mode evaluates or compiles it, which
raises the error.
"""

from __future__ import annotations

from typing import Any, NoReturn

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ._errors import UnsupportedError

NO_FORWARD_MODE = (
    "libflash.jax.context_parallel_attention has no forward-mode derivative (jvp, linearize, jacfwd) with scheme {}; it has one "
    "with scheme 'heads' and without dropout_p only: call it so, or use reverse mode (grad, vjp, jacrev)"
)
INPUT = Primitive("libflash_reverse_only")  # (x) -> x
TANGENT = Primitive("libflash_reverse_only_tangent")  # (tangent) -> tangent


def reverse_only(scheme: str, x: Any) -> Any:
    """x, whose derivatives exist in reverse mode only. `scheme` says with what, for the error text."""
    return INPUT.bind(x, scheme=scheme)  # type: ignore[no-untyped-call]


def same(x: Any, *, scheme: str) -> Any:
    return x


def with_tangent(primals: Any, tangents: Any, *, scheme: str) -> tuple[Any, Any]:
    return reverse_only(scheme, *primals), TANGENT.bind(*tangents, scheme=scheme)  # type: ignore[no-untyped-call]


def batch(operands: Any, axes: Any, *, scheme: str) -> tuple[Any, Any]:
    return reverse_only(scheme, *operands), axes[0]


def transpose(cotangent: Any, tangent: Any, *, scheme: str) -> list[Any]:
    return [cotangent]


def refuse(*arguments: Any, scheme: str, **others: Any) -> NoReturn:
    raise UnsupportedError(NO_FORWARD_MODE.format(scheme))


INPUT.def_impl(same)  # type: ignore[no-untyped-call]
INPUT.def_abstract_eval(same)  # type: ignore[no-untyped-call]
mlir.register_lowering(INPUT, mlir.lower_fun(same, multiple_results=False))
ad.primitive_jvps[INPUT] = with_tangent
batching.primitive_batchers[INPUT] = batch

TANGENT.def_impl(refuse)  # type: ignore[no-untyped-call]
TANGENT.def_abstract_eval(same)  # type: ignore[no-untyped-call]
mlir.register_lowering(TANGENT, refuse)
ad.primitive_jvps[TANGENT] = refuse
ad.primitive_transposes[TANGENT] = transpose
batching.primitive_batchers[TANGENT] = refuse
