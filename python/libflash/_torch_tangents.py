"""Forward mode and second derivatives of the PyTorch operators: the operators attention_tangent and attention_backward_tangent,
their gradients, and the rules by which the Functions of _torch_autograd.py use them.

    derivative of attention: forward mode attention_tangent, reverse mode attention_backward;
                             if forward mode is alone at its level attention_with_tangent, which computes out too
    of attention_backward: forward mode attention_backward_tangent, reverse mode both tangents (the Hessian is symmetric)
    of attention_tangent: reverse mode attention_backward and attention_backward_tangent
    of attention_backward_tangent: reverse mode for the direction, in which it is linear, itself and attention_tangent

Before attention_backward_tangent, attention_delta_tangent takes the place of attention_tangent in 16 bits: see _second_order.py.
Everything further raises: a tangent of a tangent, and other derivatives of attention_backward_tangent. `out` and `lse` are
functions of the inputs; derivatives are total ones, so they get none of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import starmap
from typing import Any

import torch
from torch._C._functorch import is_legacy_batchedtensor as is_batched
from torch._functorch.utils import enable_single_level_autograd_function
from torch._guards import TracingContext
from torch.autograd import forward_ad

from ._errors import UnsupportedError
from ._torch_function import Function
from ._torch_kernels import unrounded_sums

Tensor = torch.Tensor


# Which argument of the tangent operators belongs to which input.
DIRECTION = {"q": "tq", "k": "tk", "v": "tv", "bias": "tbias", "learnable_sink": "tsink"}
NO_THIRD = "attention has no third derivative; where it is not needed, leave out create_graph=True or detach() the gradient"
IN_A_COMPILER = (
    "the forward-mode derivative of attention cannot be compiled: PyTorch's compiler loses tangents of operators; call the "
    "transform (torch.func.jvp, jacfwd, hessian) outside of torch.compile"
)
FORWARD_TWICE = (
    "attention has no third derivative and no forward-mode derivative of a forward-mode derivative, and {} carries a tangent; "
    "for a second derivative use reverse mode for one of the two: torch.func.jacfwd(torch.func.jacrev(f))"
)


def operator(name: str) -> Any:
    return getattr(torch.ops.libflash, name).default


def tangent_of(x: Any) -> Tensor | None:
    """The tangent of x, if x is a dual. PyTorch cannot unpack batched gradients (is_grads_batched), which have none."""
    return forward_ad.unpack_dual(x).tangent if isinstance(x, Tensor) and not is_batched(x) else None


def primal_of(x: Any) -> Any:
    return forward_ad.unpack_dual(x).primal if isinstance(x, Tensor) and not is_batched(x) else x


def carries_tangent(values: Any) -> bool:
    if forward_ad._current_level < 0 or all(tangent_of(x) is None for x in values):
        return False
    if torch.compiler.is_compiling() or TracingContext.try_get() is not None:
        raise UnsupportedError(IN_A_COMPILER)
    return True


def refuse_second_tangent(tensors: dict[str, Any]) -> None:
    if forward_ad._current_level >= 0:
        for name, x in tensors.items():
            if tangent_of(x) is not None:
                raise UnsupportedError(FORWARD_TWICE.format(name))


def refuse_constants(names: Any, tangents: Any, differentiable: tuple[str, ...]) -> None:
    for name, tangent in zip(names, tangents, strict=True):
        if tangent is not None and name not in differentiable:
            raise UnsupportedError(
                f"{name} carries a tangent, and attention has no derivative with respect to it; pass {name}.detach()"
            )


def rows_contiguous(x: Tensor | None) -> Tensor | None:
    """x, or a copy with a contiguous last dimension, which the library requires. The tangent of a bias may have no dimensions."""
    return x if x is None or x.dim() == 0 or x.stride(-1) == 1 else x.contiguous()


def without_kernel(options: dict[str, Any]) -> dict[str, Any]:
    """The options without the name of a kernel, which is that of another operation."""
    return {name: value for name, value in options.items() if name != "kernel_name"}


def of_forward(options: dict[str, Any]) -> dict[str, Any]:
    """The options of attention_backward that attention has too."""
    return {name: value for name, value in options.items() if name not in ("dlse", "need_dbias", "need_dsink")}


def tangents_of_rows(run: Callable[[str], Any], inputs: list[Any], options: dict[str, Any], along: dict[str, Any]) -> Any:
    """(tout, tlse) in the direction `along`, which may have tdout and tdlse, and further options for attention_backward_tangent.
    `inputs`: dout, q, k, v, out and lse; `options`: those of attention_backward; `run`: an operator by its name."""
    of_attention = of_forward(options)
    if inputs[1].dtype in (torch.float16, torch.bfloat16):
        dlse = {"dlse": options["dlse"]} if "dlse" in options else {}
        tout, tlse, tdelta, delta = run("attention_delta_tangent")(*inputs, **of_attention, **dlse, **along)
        return tout, tlse, {"tdelta": tdelta, "delta": delta}
    direction = {name: x for name, x in along.items() if name in DIRECTION.values()}
    return *run("attention_tangent")(*inputs[1:], **of_attention, **direction), {}


def directions(given: dict[str, Tensor | None]) -> dict[str, Any]:
    """The tangents by the operators' names."""
    return {DIRECTION[name]: rows_contiguous(x) for name, x in given.items() if x is not None}


# -- what _torch_autograd.py calls


def makes_duals(values: Any) -> bool:
    """Whether make_dual() can give the results their tangents. It cannot in PyTorch's batched forward mode, which gradcheck
    uses, nor if a tangent requires a gradient at this level."""
    if not torch._C._is_fwd_grad_enabled():
        return False
    tangents = [t for t in map(tangent_of, values) if t is not None]
    records = torch.is_grad_enabled() and any(t.requires_grad for t in tangents)
    return not records and not any(map(is_batched, tangents))


def attention_of_duals(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Any:
    """(out, lse) with their tangents, in one pass instead of two. Only where this level records no gradient: what is recorded
    must have both derivatives, as the Function Attention has. Outer levels may record one."""
    from ._torch_autograd import below_autograd

    given = {"q": q, "k": k, "v": v} | options
    moved = {name: tangent_of(x) for name, x in given.items()}
    refuse_constants(moved, moved.values(), tuple(DIRECTION))
    primals = {name: primal_of(x) for name, x in given.items()}
    along = directions({name: moved.get(name) for name in DIRECTION})
    with below_autograd():
        out, lse, tout, tlse = operator("attention_with_tangent")(**primals, **along)
    return forward_ad.make_dual(out, tout), forward_ad.make_dual(lse, tlse)


def tangent_of_attention(primals: dict[str, Any], options: dict[str, Any], given: dict[str, Tensor | None]) -> Any:
    """(tout, tlse). `primals`: q, k, v, out and lse. Called by the Function's jvp, at the level of the tangents."""
    inputs = [primals[name] for name in ("q", "k", "v", "out", "lse")]
    return attention_tangent(*inputs, **without_kernel(options), **directions(given))


def tangent_of_backward(primals: dict[str, Any], options: dict[str, Any], given: dict[str, Tensor | None]) -> Any:
    """The tangents of the results of attention_backward. `given` has those of dout, dlse, out and lse too."""
    inputs = [primals[name] for name in ("dout", "q", "k", "v", "out", "lse")]
    options = without_kernel(options)
    along = directions({name: given.get(name) for name in DIRECTION})
    more = {"t" + name: rows_contiguous(given[name]) for name in ("dout", "dlse") if given.get(name) is not None}
    tout, tlse = given.get("out"), given.get("lse")
    known = tout is not None and tlse is not None
    if along and (not known or unrounded_sums(inputs[1], inputs[3], options)):
        by_name = {"attention_tangent": attention_tangent, "attention_delta_tangent": attention_delta_tangent}
        tout, tlse, of_rows = tangents_of_rows(by_name.__getitem__, inputs, options, along | more)
        more |= of_rows
    tout = torch.zeros_like(inputs[4]) if tout is None else rows_contiguous(tout)
    tlse = torch.zeros_like(inputs[5]) if tlse is None else tlse
    return attention_backward_tangent(*inputs, tout, tlse, **options, **along, **more)


# -- the operators at the Autograd key


def attention_with_tangent(*tensors: Any, **options: Any) -> Any:
    """If an argument carries a tangent: attention and attention_tangent as two operators, which have derivatives."""
    from ._torch_autograd import below_autograd, requires_gradient

    values = (*tensors, *options.values())
    if carries_tangent(values):
        out, lse = operator("attention")(*tensors, **{name: x for name, x in options.items() if name not in DIRECTION.values()})
        return out, lse, *operator("attention_tangent")(*tensors, out, lse, **options)
    if torch.is_grad_enabled() and requires_gradient(values):
        with enable_single_level_autograd_function():
            return WithTangent.apply(tuple(options), *values)
    with below_autograd():
        return operator("attention_with_tangent")(*tensors, **options)


def attention_tangent(*tensors: Any, **options: Any) -> Any:
    return tangent_at_autograd("attention_tangent", ("q", "k", "v", "out", "lse"), tensors, options)


def attention_delta_tangent(*tensors: Any, **options: Any) -> Any:
    return tangent_at_autograd("attention_delta_tangent", ("dout", "q", "k", "v", "out", "lse"), tensors, options)


def tangent_at_autograd(name: str, names: tuple[str, ...], tensors: Any, options: dict[str, Any]) -> Any:
    from ._torch_autograd import below_autograd, requires_gradient

    refuse_second_tangent(dict(zip(names, tensors, strict=True)) | options)
    values = (*tensors, *options.values())
    if torch.is_grad_enabled() and requires_gradient(values):
        with enable_single_level_autograd_function():
            return Tangent.apply(name, (*names, *options), *values)
    with below_autograd():
        return operator(name)(*tensors, **options)


def save(ctx: Any, names: tuple[str, ...], values: Any, made: Any) -> Any:
    """What the backward of a tangent needs: the inputs, whose names are given, and the results."""
    given = dict(zip(names, values, strict=True))
    ctx.names = names
    ctx.numbers = {name: x for name, x in given.items() if not isinstance(x, Tensor)}
    ctx.tensors = tuple(name for name, x in given.items() if isinstance(x, Tensor))
    ctx.save_for_backward(*(given[name] for name in ctx.tensors), *made)
    ctx.set_materialize_grads(False)
    return made


def gradients(
    x: dict[str, Any], wanted: set[str], of_results: tuple[Tensor | None, ...], of_tangents: tuple[Tensor | None, ...]
) -> dict[str, Any]:
    """The gradients of the inputs `wanted` from those of out and lse (`of_results`) and of tout and tlse (`of_tangents`).
    `x`: the arguments of attention_tangent, and its results. `of_tangents` are dout and dlse of the operators called here, and
    `of_results` the tangents of these."""
    moved = directions({name: x.pop(direction) for name, direction in DIRECTION.items() if direction in x})
    q, k, v, out, lse, tout, tlse = (x.pop(name) for name in ("q", "k", "v", "out", "lse", "tout", "tlse"))
    options = without_kernel(x)
    need = {"need_dbias": {"bias", "tbias"}, "need_dsink": {"learnable_sink", "tsink"}}
    options |= {name: True for name, inputs in need.items() if wanted & inputs}
    found: dict[str, Any] = {}

    def backward(cotangents: tuple[Tensor | None, ...], names: Any) -> None:
        dout, dlse = map(rows_contiguous, cotangents)
        more = options if dlse is None else options | {"dlse": dlse}
        dout = torch.zeros_like(out) if dout is None else dout
        found.update(zip(names, operator("attention_backward")(dout, q, k, v, out, lse, **more), strict=True))

    if all(g is None for g in of_tangents):
        if any(g is not None for g in of_results):
            backward(of_results, DIRECTION)
        return found
    if wanted & set(DIRECTION.values()):
        backward(of_tangents, DIRECTION.values())
    if wanted & set(DIRECTION):
        dout, dlse, tdout, tdlse = map(rows_contiguous, (*of_tangents, *of_results))
        dout = torch.zeros_like(out) if dout is None else dout
        more = {name: g for name, g in (("tdout", tdout), ("tdlse", tdlse)) if g is not None}
        options |= {} if dlse is None else {"dlse": dlse}
        if unrounded_sums(q, v, options):
            tout, tlse, of_rows = tangents_of_rows(operator, [dout, q, k, v, out, lse], options, moved | more)
            more |= of_rows
        made = operator("attention_backward_tangent")(dout, q, k, v, out, lse, tout, tlse, **options, **moved, **more)
        found.update(zip(DIRECTION, made, strict=True))
    return found


def of_inputs(ctx: Any, found: dict[str, Any], wanted: set[str]) -> tuple[Any, ...]:
    return None, *(found.get(name) if name in wanted else None for name in ctx.names)


def wanted_of(ctx: Any, first: int = 1) -> set[str]:
    return {name for name, needed in zip(ctx.names, ctx.needs_input_grad[first:], strict=True) if needed}


class Tangent(Function):
    """(operator, names, *values) -> (tout, tlse), and of attention_delta_tangent tdelta and delta, which are constants as they
    are for attention_backward_tangent"""

    @staticmethod
    def forward(ctx: Any, name: str, names: tuple[str, ...], *values: Any) -> Any:
        from ._torch_autograd import below_autograd

        with below_autograd():
            made = operator(name)(**dict(zip(names, values, strict=True)))
        ctx.mark_non_differentiable(*made[2:])
        save(ctx, names, values, made[:2])
        return made

    @staticmethod
    def backward(ctx: Any, *of_results: Tensor | None) -> tuple[Any, ...]:
        names, wanted = (*ctx.tensors, "tout", "tlse"), wanted_of(ctx, 2)
        x = dict(zip(names, ctx.saved_tensors, strict=True)) | ctx.numbers
        x = {name: value for name, value in x.items() if name not in ("dout", "dlse", "tdout", "tdlse")}
        return None, *of_inputs(ctx, gradients(x, wanted, (None, None), of_results[:2]), wanted)


class WithTangent(Function):
    """(names, q, k, v, *options) -> (out, lse, tout, tlse)

    If nobody differentiates the tangents, as in MeanFlow, its backward is that of attention.
    """

    @staticmethod
    def forward(ctx: Any, names: tuple[str, ...], *values: Any) -> Any:
        from ._torch_autograd import below_autograd

        with below_autograd():
            made = operator("attention_with_tangent")(*values[:3], **dict(zip(names, values[3:], strict=True)))
        return save(ctx, ("q", "k", "v", *names), values, made)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        names, wanted = (*ctx.tensors, "out", "lse", "tout", "tlse"), wanted_of(ctx)
        x = dict(zip(names, ctx.saved_tensors, strict=True)) | ctx.numbers
        return of_inputs(ctx, gradients(x, wanted, cotangents[:2], cotangents[2:]), wanted)


def attention_backward_tangent(*tensors: Any, **options: Any) -> Any:
    from ._torch_autograd import below_autograd, requires_gradient

    names = ("dout", "q", "k", "v", "out", "lse", "tout", "tlse")
    refuse_second_tangent(dict(zip(names, tensors, strict=True)) | options)
    values = (*tensors, *options.values())
    if torch.is_grad_enabled() and requires_gradient(values):
        with enable_single_level_autograd_function():
            tensors = tuple(starmap(without_third, zip(names, tensors, strict=True)))
            return BackwardTangent.apply(tuple(options), *tensors, *starmap(without_third, options.items()))
    with below_autograd():
        return operator("attention_backward_tangent")(*tensors, **options)


LINEAR = (*DIRECTION.values(), "tdout", "tdlse")  # what the tangents of the gradients are linear in
OF_INPUTS = ("out", "lse", "tout", "tlse", "tdelta", "delta")  # functions of the inputs: derivatives are total ones


def without_third(name: str, x: Any) -> Any:
    """x; if the tangents of the gradients are not linear in x, a derivative with respect to it raises."""
    if name in (*LINEAR, *OF_INPUTS) or not isinstance(x, Tensor) or not x.requires_grad:
        return x
    return Constant.apply(x)


class Constant(Function):
    """x -> x. Raises if a derivative with respect to x is requested, but not if only derivatives with respect to LINEAR are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        from ._torch_autograd import below_autograd

        with below_autograd():
            return torch.ops.aten.alias.default(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise UnsupportedError(NO_THIRD)


class BackwardTangent(Function):
    """(names, dout, q, k, v, out, lse, tout, tlse, *options) -> the tangents of the gradients

    The Hessian is symmetric: the gradient for the direction is made of both tangents in the direction of the cotangents.
    """

    @staticmethod
    def forward(ctx: Any, names: tuple[str, ...], *values: Any) -> Any:
        from ._torch_autograd import below_autograd

        count = len(values) - len(names)
        ctx.names = ("dout", "q", "k", "v", "out", "lse", "tout", "tlse", *names)
        ctx.given = {name: x for name, x in zip(ctx.names, values, strict=True) if not isinstance(x, Tensor)}
        ctx.tensors = tuple(name for name, x in zip(ctx.names, values, strict=True) if isinstance(x, Tensor))
        ctx.save_for_backward(*(x for x in values if isinstance(x, Tensor)))
        ctx.set_materialize_grads(False)
        with below_autograd():
            return operator("attention_backward_tangent")(*values[:count], **dict(zip(names, values[count:], strict=True)))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        from ._torch_autograd import Backward

        x = dict(zip(ctx.tensors, ctx.saved_tensors, strict=True))
        wanted = {name for name, needed in zip(ctx.names, ctx.needs_input_grad[1:], strict=True) if needed}
        found = {name: x[name].new_zeros(()).expand_as(x[name]) for name in wanted if name not in LINEAR}  # for Constant
        if wanted & set(LINEAR):
            given = {name: g for name, g in zip(Backward.RESULTS, gradients, strict=True) if g is not None and g.numel() > 0}
            along, inputs = directions(given), [x[name] for name in ("dout", "q", "k", "v", "out", "lse")]
            others = (*LINEAR, *OF_INPUTS)
            options = {name: value for name, value in (x | ctx.given).items() if name in ctx.names[8:] and name not in others}
            tout, tlse, of_rows = tangents_of_rows(operator, inputs, options, along)
            options |= {"need_dbias": "tbias" in wanted, "need_dsink": "tsink" in wanted}
            made = operator("attention_backward_tangent")(*inputs, tout, tlse, **options, **along, **of_rows)
            found |= {"tdout": tout, "tdlse": tlse} | dict(zip(DIRECTION.values(), made, strict=True))
        return None, *(found.get(name) if name in wanted and name not in OF_INPUTS else None for name in ctx.names)
