"""The operations as JAX primitives, one per operation, with rules for derivatives, vmap and lowering.

custom_vjp and custom_jvp cannot express second derivatives of operations that are opaque to JAX; primitives can. The rules are in
_jax_derivatives.py and _jax_vmap.py; they call `bind`, as jax.py does.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir

from ._errors import UnsupportedError
from ._jax_calls import (
    ATTENTION_OPERANDS,
    BACKWARD,
    BACKWARD_TANGENT,
    CACHE_WRITE,
    DECODE,
    FORWARD,
    FORWARD_TANGENT,
    OPERANDS,
    SECOND_TANGENT,
    Call,
    Options,
    result_shapes,
    vary,
    varying_axes,
)
from ._jax_calls import (
    run as run_on_device,
)
from ._jax_sharding import partitioned, typed

FORWARD_TWICE = (
    "attention has no forward-mode derivative of a forward-mode derivative; use reverse mode for one of the two: "
    "jax.hessian, jax.jacfwd(jax.grad(f)), jax.grad of jax.jvp"
)
NO_EXPORT = (
    "libflash.jax.{} cannot be exported in a program for {} devices, because JAX exports no rules for sharding: call it inside "
    "jax.shard_map, where each device computes its part, or export the program for one device"
)
NO_PLATFORM = "libflash.jax.{} cannot be exported for the platform {!r}: libflash has kernels for 'cpu' and 'cuda'"
NO_SCRATCH = (
    "gradients of libflash.jax.attention cannot be exported for 'cuda' where JAX has no GPU: they need scratch memory, which is "
    "planned for a GPU while the program is traced"
)
PRIMITIVES = {
    operation: Primitive("libflash_" + name)
    for operation, name in {
        FORWARD: "forward",
        BACKWARD: "backward",
        DECODE: "decode",
        FORWARD_TANGENT: "forward_tangent",
        BACKWARD_TANGENT: "backward_tangent",
        SECOND_TANGENT: "second_tangent",
        CACHE_WRITE: "cache_write",
    }.items()
}


def call_of(operation: int, options: Options, extras: dict[str, Any]) -> tuple[Call, list[Any]]:
    """The call, and its optional operands in the order that the primitive expects."""
    known = OPERANDS.get(operation, ATTENTION_OPERANDS)
    names = tuple(name for name in (*known, "rng") if name in extras)
    return Call(operation, options, names), [extras[name] for name in names]


def bind(call: Call, *operands: Any) -> list[Any]:
    """The results of the operation. In programs for one device and inside shard_map there is nothing to shard."""
    whole = jax.device_count() == 1 or bool(jax.sharding.get_abstract_mesh().manual_axes)
    operands = vary(operands, varying_axes(operands))

    def body(*x: Any) -> list[Any]:
        if call.operation == SECOND_TANGENT:  # only for the types of the results; never runs
            made = [vary(jax.numpy.zeros(y.shape, y.dtype), varying_axes(x)) for y in result_shapes(call, x)]
        else:
            made = run_on_device(call, *x) if call.operation == CACHE_WRITE else partitioned(call, whole, *x)
        return typed(call, x, made)

    # The program that the primitive is lowered to is one of its parameters, because JAX searches there for operations that need
    # to know their devices.
    program = jax.make_jaxpr(body)(*map(jax.typeof, operands))
    return PRIMITIVES[call.operation].bind(*operands, call=call, program=program)  # type: ignore[no-any-return, no-untyped-call]


def run(*operands: Any, call: Call, program: Any) -> Any:
    if call.operation == SECOND_TANGENT:
        raise UnsupportedError(FORWARD_TWICE)
    return jaxpr_as_fun(program)(*operands)


lower_program = mlir.lower_fun(run, multiple_results=True)


def lower(ctx: Any, *operands: Any, call: Call, program: Any) -> Any:
    """Lower the program. jax.export cannot store the rules for sharded arrays, which JAX keeps in the process. A program that was
    traced without a GPU has no scratch memory for one, which gradients always need."""
    module = ctx.module_context
    if not getattr(getattr(module, "lowering_parameters", None), "for_export", False):
        return lower_program(ctx, *operands, call=call, program=program)
    name = {DECODE: "decode", CACHE_WRITE: "cache_write"}.get(call.operation, "attention")
    for platform in module.platforms:
        if platform not in ("cpu", "cuda"):
            raise UnsupportedError(NO_PLATFORM.format(name, platform))
    if "cuda" in module.platforms and jax.default_backend() != "gpu" and call.operation in (BACKWARD, BACKWARD_TANGENT):
        raise UnsupportedError(NO_SCRATCH)
    kept = len(module.keepalives)
    made = lower_program(ctx, *operands, call=call, program=program)
    if len(module.keepalives) > kept:
        raise UnsupportedError(NO_EXPORT.format(name, module.axis_context.num_devices))
    return made


def abstract(*operands: Any, call: Call, program: Any) -> Any:
    return program.out_avals


for _primitive in PRIMITIVES.values():
    _primitive.multiple_results = True
    _primitive.def_impl(run)  # type: ignore[no-untyped-call]
    _primitive.def_abstract_eval(abstract)  # type: ignore[no-untyped-call]
    mlir.register_lowering(_primitive, lower)
