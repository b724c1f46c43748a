"""Derivatives of the primitives: jvp and transpose rules, from which JAX composes every derivative up to the second.

    attention F(x) -> out, lse       tangent  FT(x | tx)
    FT(x | tx), linear in tx         tangent  FT(x | dtx) + SECOND(x, tx | dx)               transpose  B
    backward B(x | dout, dlse)       tangent  BT(x, dout, dlse | tx, tdout, tdlse)           transpose  FT
    BT, linear in tx, tdout, tdlse   tangent  in these only                                  transpose  BT and FT (in one call)
    SECOND(x, tx | dx)               exists for its transpose, which is BT; it cannot be computed

F and FT are two primitives, although one pass could compute both: linearize and checkpoint evaluate F and keep FT, and cannot
separate the results of one primitive.

x are q, k, v and bias. `out` and `lse`, which are inputs of the last four operations, are those of F(x): derivatives are total
derivatives, so the tangents of `out` and `lse` are ignored. The Hessian is symmetric: the transpose of BT with respect to tx is
BT itself.

learnable_sink. If a sink changes by ts, all p of a row are multiplied by 1 - a, a = exp(sink - lse) ts. Hence

    F:   tout = -a out,               tlse = a
    FT:  -a tout + a tlse out,        -a tlse
    B:   B(x | -a dout, a (rowsum(dout * out) - dlse))

These are XLA operations: JAX knows their derivatives, and XLA sums them over the batch, even if it is sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.interpreters import ad

from . import _jax_statistics
from ._errors import UnsupportedError
from ._jax_calls import (
    BACKWARD,
    BACKWARD_TANGENT,
    CACHE_WRITE,
    DECODE,
    DIRECTION,
    FIXED,
    FORWARD,
    FORWARD_TANGENT,
    POSITIONS,
    SECOND_DIRECTION,
    SECOND_TANGENT,
    Call,
    as_lse,
    as_out,
    of_heads,
)
from ._jax_primitives import PRIMITIVES, bind, call_of

NO_GRADIENT = {
    DECODE: "libflash.jax.decode has no gradient: use libflash.jax.attention to train, or call jax.lax.stop_gradient on what is "
    "given to decode",
    CACHE_WRITE: "libflash.jax.cache_write has no gradient: call jax.lax.stop_gradient on what is given to it",
}
NO_GRADIENT_OF_SLOPES = "there is no gradient for alibi_slopes; pass jax.lax.stop_gradient(alibi_slopes)"
NO_THIRD = (
    "libflash.jax.attention has no third derivative, and no forward-mode derivative of a forward-mode derivative: use reverse "
    "mode for one of two (jax.hessian), or call jax.lax.stop_gradient where a derivative is not needed"
)
NO_SECOND_OF_SHARDS = (
    "libflash.jax.context_parallel_attention has no second derivative, but with scheme 'heads' and without dropout_p: call it "
    "so, or jax.lax.stop_gradient on the first gradient"
)
GRADIENTS = ("q", "k", "v", "bias")  # the inputs with a result of BACKWARD and of BACKWARD_TANGENT
COTANGENTS = {"dout": "tdout", "dlse": "tdlse"}
Arrays = dict[str, Any]


class Point:
    """Where an operation is differentiated: its call and its operands by name."""

    def __init__(self, call: Call, operands: Sequence[Any]) -> None:
        self.call = call
        self.given: Arrays = dict(zip((*call.fixed, *call.names), operands, strict=True))

    def named(self, values: Sequence[Any]) -> Arrays:
        return dict(zip(self.given, values, strict=True))

    def run(self, operation: int, drop: Sequence[str] = (), **change: Any) -> list[Any]:
        """Run an operation with the options and operands of this call, without `drop` and with `change`."""
        of_shards = self.call.options.flags & POSITIONS or self.call.options.heads_total
        if of_shards and operation in (FORWARD_TANGENT, BACKWARD_TANGENT):
            raise UnsupportedError(NO_SECOND_OF_SHARDS)
        options = self.call.options._replace(
            kernel="",  # the option names a forward kernel
            need_dbias=change.pop("need_dbias", False),
            need_tangents=change.pop("need_tangents", False),
            statistics=(),
        )
        fixed = FIXED[operation]
        given = {name: x for name, x in self.given.items() if name not in drop} | change
        extras = {name: x for name, x in given.items() if name not in EVERY_FIXED and x is not None}
        call, rest = call_of(operation, options, extras)
        return bind(call, *(given[name] for name in fixed), *rest)


EVERY_FIXED = ("dout", "q", "k", "v", "out", "lse")
LINEAR = (*DIRECTION.values(), *COTANGENTS.values(), *SECOND_DIRECTION.values())


# -- nonzero tangents


def moving(point: Point, tangents: Sequence[Any]) -> Arrays:
    """The tangents that are not zero, by the names of the operands."""
    moved = {name: t for name, t in point.named(tangents).items() if not isinstance(t, ad.Zero)}
    if "alibi_slopes" in moved:
        raise UnsupportedError(NO_GRADIENT_OF_SLOPES)
    return moved


def along(moved: Arrays, names: dict[str, str]) -> Arrays:
    """The tangents of the inputs `names`, by their operand names."""
    return {names[name]: t for name, t in moved.items() if name in names}


def total(parts: list[list[Any]], like: Sequence[Any]) -> list[Any]:
    """The sum of several contributions to the tangents; zero if there is none."""
    if not parts:
        return [_jax_statistics.zero(x) for x in like]
    sums = [sum(terms[1:], terms[0]) for terms in zip(*parts, strict=True)]
    return [x.astype(y.dtype) for x, y in zip(sums, like, strict=True)]


# -- the sink


def sink_weight(point: Point, tangent: Any) -> Any:
    """a = exp(sink - lse) tsink, shaped like lse. It is selected last: the transpose ignores gradients of rows that see nothing,
    which may be NaN."""
    lse = point.given["lse"]
    sink = of_heads(point.given["learnable_sink"], lse)
    sees = lse != -jnp.inf  # NaN comes through
    weight = jnp.where(sees, jnp.exp(jnp.where(sees, sink - lse, 0.0)), 0.0)
    return jnp.where(sees, weight * of_heads(tangent, lse), 0.0)


def times(layout: str, rows: Any, x: Any) -> Any:
    """`rows`, a number for each row, shaped like lse, times x, which is out or dout; not rounded."""
    return as_out(rows, layout) * x.astype(rows.dtype)


# -- jvp rules: (primals, tangents) -> (results, their tangents)


def tangent_of_forward(primals: Any, tangents: Any, *, call: Call, program: Any) -> Any:
    point = Point(call, primals)
    moved = moving(point, tangents)
    out, lse, *statistics = bind(call, *primals)
    parts = []
    if direction := along(moved, DIRECTION):
        parts.append(point.run(FORWARD_TANGENT, out=out, lse=lse, **direction))
    if "learnable_sink" in moved:
        point.given["lse"] = lse
        a = sink_weight(point, moved["learnable_sink"])
        parts.append([-times(call.options.layout, a, out), a])
    further = [_jax_statistics.tangent(*x, moved) for x in zip(call.options.statistics, statistics, strict=True)]
    return (out, lse, *statistics), (*total(parts, (out, lse)), *further)


def tangent_of_tangent(primals: Any, tangents: Any, *, call: Call, program: Any) -> Any:
    point = Point(call, primals)
    moved = moving(point, tangents)
    tout, tlse = made = bind(call, *primals)
    parts = []
    linear = {name: moved[name] for name in LINEAR if name in moved}
    if linear:
        parts.append(point.run(FORWARD_TANGENT, LINEAR, **linear))
    if second := along(moved, SECOND_DIRECTION):
        parts.append(point.run(SECOND_TANGENT, **second))
    if "learnable_sink" in moved:
        layout, a = call.options.layout, sink_weight(point, moved["learnable_sink"])
        parts.append([times(layout, a * tlse, point.given["out"]) - times(layout, a, tout), -a * tlse])
    return made, total(parts, made)


def tangent_of_backward(primals: Any, tangents: Any, *, call: Call, program: Any) -> Any:
    point = Point(call, primals)
    moved = moving(point, tangents)
    made = bind(call, *primals)
    parts = []
    need: Arrays = {"need_dbias": call.options.need_dbias}
    if direction := along(moved, DIRECTION):
        parts.append(point.run(BACKWARD_TANGENT, **direction, **along(moved, COTANGENTS), **need))
    elif "dout" in moved or "dlse" in moved:
        parts.append(backward_along(point, moved.get("dout"), moved.get("dlse"), need))
    if "learnable_sink" in moved:
        layout, a = call.options.layout, sink_weight(point, moved["learnable_sink"])
        dout, out, dlse = point.given["dout"], point.given["out"], point.given.get("dlse")
        delta = as_lse((dout.astype(a.dtype) * out.astype(a.dtype)).sum(-1), layout)
        delta = delta if dlse is None else delta - dlse
        parts.append(backward_along(point, -times(layout, a, dout).astype(dout.dtype), a * delta, need))
    return made, total(parts, made)


def backward_along(point: Point, dout: Any, dlse: Any, need: Arrays) -> list[Any]:
    """BACKWARD with other gradients of out and lse; None is zero."""
    dout = jnp.zeros_like(point.given["out"]) if dout is None else dout
    return point.run(BACKWARD, LINEAR, dout=dout, dlse=dlse, **need)


def tangent_of_backward_tangent(primals: Any, tangents: Any, *, call: Call, program: Any) -> Any:
    point = Point(call, primals)
    moved = moving(point, tangents)
    if any(name not in (*LINEAR, "out", "lse") for name in moved):
        raise UnsupportedError(NO_THIRD)
    made = bind(call, *primals)
    along_x = {name: moved[name] for name in DIRECTION.values() if name in moved}
    along_y = {name: moved[name] for name in COTANGENTS.values() if name in moved}
    need = {"need_dbias": call.options.need_dbias}
    if along_x:
        parts = [point.run(BACKWARD_TANGENT, LINEAR, **along_x, **along_y, **need)]
    else:
        parts = [backward_along(point, along_y.get("tdout"), along_y.get("tdlse"), need)] if along_y else []
    return made, total(parts, made)


def tangent_of_second_tangent(primals: Any, tangents: Any, *, call: Call, program: Any) -> Any:
    point = Point(call, primals)
    moved = moving(point, tangents)
    linear = SECOND_DIRECTION.values()
    if any(name not in (*linear, "out", "lse") for name in moved):
        raise UnsupportedError(NO_THIRD)
    made = bind(call, *primals)
    along_x = {name: t for name, t in moved.items() if name in linear}
    parts = [point.run(SECOND_TANGENT, tuple(linear), **along_x)] if along_x else []
    return made, total(parts, made)


def refuse(primals: Any, tangents: Any, *, call: Call, program: Any) -> Any:
    raise UnsupportedError(NO_GRADIENT[call.operation])


# -- transpose rules: (cotangents of the results, operands) -> cotangents of the operands, None for those that are constants


def known(point: Point) -> tuple[Point, set[str]]:
    """The point without the operands with respect to which JAX transposes, and the names of these operands."""
    wanted = {name for name, x in point.given.items() if ad.is_undefined_primal(x)}  # type: ignore[no-untyped-call]
    found = Point(point.call, list(point.given.values()))
    found.given = {name: x for name, x in point.given.items() if name not in wanted}
    return found, wanted


def cotangents_of(names: Sequence[str], cotangents: Sequence[Any]) -> Arrays:
    return {name: x for name, x in zip(names, cotangents, strict=True) if not isinstance(x, ad.Zero)}


def by_operand(point: Point, wanted: set[str], found: Arrays) -> list[Any]:
    return [found.get(name) if name in wanted else None for name in (*point.call.fixed, *point.call.names)]


def transpose_of_tangent(cotangents: Any, *operands: Any, call: Call, program: Any) -> list[Any]:
    point, wanted = known(Point(call, operands))
    given = cotangents_of(("dout", "dlse"), cotangents)
    names = [name for name in GRADIENTS if name != "bias" or "tbias" in wanted]
    made = backward_along(point, given.get("dout"), given.get("dlse"), {"need_dbias": "bias" in names})
    return by_operand(point, wanted, {DIRECTION[name]: x for name, x in zip(names, made, strict=True)})


def transpose_of_second_tangent(cotangents: Any, *operands: Any, call: Call, program: Any) -> list[Any]:
    point, wanted = known(Point(call, operands))
    given = cotangents_of(("dout", "dlse"), cotangents)
    names = [name for name in GRADIENTS if name != "bias" or "ubias" in wanted]
    dout = given["dout"] if "dout" in given else jnp.zeros_like(point.given["out"])
    drop = tuple(SECOND_DIRECTION.values())
    made = point.run(BACKWARD_TANGENT, drop, dout=dout, dlse=given.get("dlse"), need_dbias="bias" in names)
    return by_operand(point, wanted, {SECOND_DIRECTION[name]: x for name, x in zip(names, made, strict=True)})


def transpose_of_backward(cotangents: Any, *operands: Any, call: Call, program: Any) -> list[Any]:
    point, wanted = known(Point(call, operands))
    direction = along(cotangents_of(results_of(call), cotangents), DIRECTION)
    tout, tlse = point.run(FORWARD_TANGENT, ("dout", "dlse"), **direction)
    return by_operand(point, wanted, {"dout": tout, "dlse": tlse})


def transpose_of_backward_tangent(cotangents: Any, *operands: Any, call: Call, program: Any) -> list[Any]:
    point, wanted = known(Point(call, operands))
    direction = along(cotangents_of(results_of(call), cotangents), DIRECTION)
    if wanted <= set(COTANGENTS.values()):
        tout, tlse = point.run(FORWARD_TANGENT, ("dout", "dlse", *LINEAR), **direction)
        return by_operand(point, wanted, {"tdout": tout, "tdlse": tlse})
    names = [name for name in GRADIENTS if name != "bias" or "tbias" in wanted]
    need = {"need_dbias": "bias" in names, "need_tangents": not wanted.isdisjoint(COTANGENTS.values())}
    made = point.run(BACKWARD_TANGENT, LINEAR, **direction, **need)
    results = [DIRECTION[name] for name in names] + (["tdout", "tdlse"] if need["need_tangents"] else [])
    return by_operand(point, wanted, dict(zip(results, made, strict=True)))


def results_of(call: Call) -> list[str]:
    return [name for name in GRADIENTS if name != "bias" or call.options.need_dbias]


TANGENTS: dict[int, Callable[..., Any]] = {
    FORWARD: tangent_of_forward,
    BACKWARD: tangent_of_backward,
    DECODE: refuse,
    CACHE_WRITE: refuse,
    FORWARD_TANGENT: tangent_of_tangent,
    BACKWARD_TANGENT: tangent_of_backward_tangent,
    SECOND_TANGENT: tangent_of_second_tangent,
}
TRANSPOSES: dict[int, Callable[..., Any]] = {
    BACKWARD: transpose_of_backward,
    FORWARD_TANGENT: transpose_of_tangent,
    BACKWARD_TANGENT: transpose_of_backward_tangent,
    SECOND_TANGENT: transpose_of_second_tangent,
}
for _operation, _primitive in PRIMITIVES.items():
    ad.primitive_jvps[_primitive] = TANGENTS[_operation]
    if _operation in TRANSPOSES:
        ad.primitive_transposes[_primitive] = TRANSPOSES[_operation]
