"""Gradients of the PyTorch operators: the code that runs at PyTorch's Autograd dispatch key, and the Functions that it records.

Attention has reverse mode, forward mode and second derivatives, by the operators of _torch_tangents.py. Operations without a
derivative raise an error; no gradient is silently dropped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._C._functorch import is_legacy_batchedtensor as is_batched
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from . import _core, _torch_kernels, _torch_tangents
from ._errors import UnsupportedError
from ._torch_eager import eager
from ._torch_function import Function
from ._torch_merge import as_lse, as_out, merge_of_operators

Tensor = torch.Tensor


# -- checks of a call at the Autograd key


def requires_gradient(tensors: Iterable[Any]) -> bool:
    for x in tensors:  # noqa: SIM110  any() of a generator takes three times as long
        if isinstance(x, Tensor) and x.requires_grad:
            return True
    return False


# Alternatives to an operation that has no derivative, for error texts.
INSTEAD = {"decode": "use attention, or ", "attention into out": "leave out `out` and `lse`, or ", "cache_write": ""}


def refuse_tangents(operation: str, tensors: dict[str, Any]) -> None:
    if forward_ad._current_level < 0:
        return
    for name, x in tensors.items():
        if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise UnsupportedError(
                f"{operation} has no derivative, and {name} carries a tangent; {INSTEAD[operation]}pass {name}.detach()"
            )


def refuse_gradients(operation: str, tensors: dict[str, Any]) -> None:
    if torch.is_grad_enabled():
        for name, x in tensors.items():
            if isinstance(x, Tensor) and x.requires_grad:
                raise UnsupportedError(
                    f"{operation} has no gradient, and {name} requires one; {INSTEAD[operation]}call it under torch.no_grad()"
                )


@contextlib.contextmanager
def below_autograd() -> Iterator[None]:
    """Inside, an operator dispatches to the next level of torch.func, which may also record gradients, or to the kernel."""
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True), torch._C._AutoDispatchBelowAutograd():
        yield


def operator(name: str) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        with below_autograd():
            return getattr(torch.ops.libflash, name).default(*args, **options)

    return call


def only_forward(name: str, names: tuple[str, ...], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Run an operation that writes to its arguments or has no gradient."""
    operation = {"d": "decode", "c": "cache_write"}.get(name[0], "attention into out")
    tensors = dict(zip(names, args, strict=True)) | options
    refuse_tangents(operation, tensors)
    refuse_gradients(operation, tensors)
    with torch._C._AutoDispatchBelowAutograd():
        return getattr(torch.ops.libflash, name).default(*args, **options)


# -- attention


def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    values = (q, k, v, *options.values())
    records, moves = torch.is_grad_enabled() and requires_gradient(values), _torch_tangents.carries_tangent(values)
    if moves and not records and "kernel_name" not in options and _torch_tangents.makes_duals(values):
        return _torch_tangents.attention_of_duals(q, k, v, options)
    if records or moves:
        with enable_single_level_autograd_function():
            return record(run_operator, q, k, v, *numbers_and_tensors(options))
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.libflash.attention.default(q, k, v, **options)


def run_operator(inputs: tuple[Tensor, ...], options: dict[str, Any]) -> Any:
    return operator("attention")(*inputs, **options)


def numbers_and_tensors(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    numbers: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for name, value in options.items():
        (tensors if isinstance(value, Tensor) else numbers)[name] = value
    return numbers, tensors


def record(
    run: Callable[[tuple[Tensor, ...], dict[str, Any]], Any], q: Tensor, k: Tensor, v: Tensor, numbers: dict[str, Any],
    tensors: dict[str, Tensor],
) -> Any:  # fmt: skip
    """(out, lse) of `run`, recorded for backward."""
    slopes = tensors.get("alibi_slopes")
    if slopes is not None and slopes.requires_grad:
        raise UnsupportedError("alibi_slopes requires a gradient, and there is none for it; pass alibi_slopes.detach()")
    return Attention.apply((run, numbers, tuple(tensors)), q, k, v, *tensors.values())


def rows_contiguous(x: Tensor) -> Tensor:
    """The gradient with dense rows, which the library requires. PyTorch's gradient may have any strides, for instance expanded
    from a scalar."""
    return x if x.stride(-1) == 1 else x.contiguous()


class Attention(Function):
    """((run, numbers, names), q, k, v, *tensors) -> (out, lse), where `names` are the option names of `tensors`. One argument for
    all that is no tensor, because PyTorch looks at each argument in both passes."""

    @staticmethod
    def forward(
        ctx: Any, how: tuple[Callable[..., Any], dict[str, Any], tuple[str, ...]], q: Tensor, k: Tensor, v: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        run, numbers, names = how
        out, lse = run((q, k, v), numbers | dict(zip(names, tensors, strict=True)) if names else numbers)
        ctx.numbers, ctx.names = numbers, names
        ctx.save_for_backward(q, k, v, out, lse, *tensors)
        if forward_ad._current_level >= 0:
            ctx.save_for_forward(q, k, v, out, lse, *tensors)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Tensor, Tensor]:
        moved = dict(zip(("q", "k", "v", *ctx.names), tangents[1:], strict=True))
        _torch_tangents.refuse_constants(moved, moved.values(), tuple(_torch_tangents.DIRECTION))
        values = map(_torch_tangents.primal_of, ctx.saved_tensors)
        primals = dict(zip(("q", "k", "v", "out", "lse", *ctx.names), values, strict=True))
        options = {name: primals[name] for name in ctx.names} | ctx.numbers
        given = {name: moved.get(name) for name in _torch_tangents.DIRECTION}
        return _torch_tangents.tangent_of_attention(primals, options, given)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        options = dict(ctx.numbers)
        options.pop("kernel_name", None)  # the option names a forward kernel
        if dlse is not None:
            dlse = options["dlse"] = rows_contiguous(dlse)
        dout = torch.zeros_like(out) if dout is None else rows_contiguous(dout)
        names = ctx.names
        if not names:
            dq, dk, dv, _, _ = run_backward((dout, q, k, v, out, lse), dlse, options)
            return None, dq, dk, dv
        options.update(zip(names, tensors, strict=True))
        wanted = {name for name, needed in zip(names, ctx.needs_input_grad[4:], strict=True) if needed}
        if "bias" in wanted:
            options["need_dbias"] = True
        if "learnable_sink" in wanted:
            options["need_dsink"] = True
        dq, dk, dv, dbias, dsink = run_backward((dout, q, k, v, out, lse), dlse, options)
        given = {"bias": dbias, "learnable_sink": dsink}
        return None, dq, dk, dv, *(given[name] if name in wanted else None for name in names)


def run_backward(inputs: tuple[Tensor, ...], dlse: Tensor | None, options: dict[str, Any]) -> Any:
    """(dq, dk, dv, dbias, dsink). `inputs`: dout, q, k, v, out and lse. `options` contains dlse, if given."""
    if torch.compiler.is_compiling():  # by compiled autograd
        return torch.ops.libflash.attention_backward.default(*inputs, **options)
    dout, q, k, v, _, _ = inputs
    given = (dout,) if dlse is None else (dout, dlse)
    batched = any(map(is_batched, given))  # torch.autograd.grad(is_grads_batched=True)
    # A gradient that PyTorch knows to be zero, as of a tangent's constant factors, has no memory. The dispatcher gives it some.
    if not torch.is_grad_enabled() and not batched and eager(dout, q, k, v, dlse) and not any(map(Tensor._is_zerotensor, given)):
        return _core.call_as_operator(_torch_kernels.gradients, inputs, options)
    return torch.ops.libflash.attention_backward.default(*inputs, **options)


def attention_backward(*tensors: Tensor, **options: Any) -> Any:
    values = (*tensors, *options.values())
    if (torch.is_grad_enabled() and requires_gradient(values)) or _torch_tangents.carries_tangent(values):
        with enable_single_level_autograd_function():
            return Backward.apply(tuple(options), *values)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.libflash.attention_backward.default(*tensors, **options)


class Backward(Function):
    """(names, dout, q, k, v, out, lse, *options) -> (dq, dk, dv, dbias, dsink)"""

    RESULTS = ("q", "k", "v", "bias", "learnable_sink")  # the inputs whose gradients the results are
    WITH_TANGENT = (*RESULTS, "dout", "dlse", "out", "lse")

    @staticmethod
    def forward(ctx: Any, names: tuple[str, ...], *values: Any) -> Any:
        ctx.names = ("dout", "q", "k", "v", "out", "lse", *names)
        ctx.numbers = {name: x for name, x in zip(ctx.names, values, strict=True) if not isinstance(x, Tensor)}
        ctx.tensors = tuple(name for name, x in zip(ctx.names, values, strict=True) if isinstance(x, Tensor))
        tensors = [x for x in values if isinstance(x, Tensor)]
        ctx.save_for_backward(*tensors)
        if forward_ad._current_level >= 0:
            ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)
        return operator("attention_backward")(*values[:6], **dict(zip(names, values[6:], strict=True)))

    @staticmethod
    def inputs(ctx: Any, values: Iterable[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """dout, q, k, v, out and lse, and the options."""
        primals = dict(zip(ctx.tensors, values, strict=True)) | ctx.numbers
        return primals, {name: primals[name] for name in ctx.names[6:]}

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        moved = dict(zip(ctx.names, tangents[1:], strict=True))
        _torch_tangents.refuse_constants(moved, moved.values(), Backward.WITH_TANGENT)
        primals, options = Backward.inputs(ctx, map(_torch_tangents.primal_of, ctx.saved_tensors))
        return _torch_tangents.tangent_of_backward(primals, options, moved)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        from ._torch_ops import OPERATORS

        primals, options = Backward.inputs(ctx, ctx.saved_tensors)
        given = {name: x for name, x in zip(Backward.RESULTS, gradients, strict=True) if x is not None and x.numel() > 0}
        along = _torch_tangents.directions(given)
        x = [primals[name] for name in ("dout", "q", "k", "v", "out", "lse")]
        options = _torch_tangents.without_kernel(options)
        forward = _torch_tangents.of_forward(options)
        tout, tlse, of_rows = _torch_tangents.tangents_of_rows(OPERATORS.__getitem__, x, forward, along)
        wanted = {name for name, needed in zip(ctx.names, ctx.needs_input_grad[1:], strict=True) if needed}
        options |= {"need_dbias": "bias" in wanted, "need_dsink": "learnable_sink" in wanted}
        found = {"dout": tout, "dlse": tlse}
        if wanted & set(Backward.RESULTS):
            made = OPERATORS["attention_backward_tangent"](*x, tout, tlse, **options, **along, **of_rows)
            found |= dict(zip(Backward.RESULTS, made, strict=True))
        return None, *(found.get(name) if name in wanted else None for name in ctx.names)


def attention_out(*args: Any, **options: Any) -> Any:
    return only_forward("attention_out", ("q", "k", "v", "out", "lse"), args, options)


# -- decode


def decode(*args: Any, **options: Any) -> Any:
    return only_forward("decode", ("q", "k_cache", "v_cache"), args, options)


def decode_append(*args: Any, **options: Any) -> Any:
    return only_forward("decode_append", ("q", "k_cache", "v_cache", "k", "v"), args, options)


def decode_append_parts(*args: Any, **options: Any) -> Any:
    parts = ("row_k_scale", "row_v_scale", "rope_cache", "k_rope")
    return only_forward("decode_append_parts", ("q", "k_cache", "v_cache", "k", "v", *parts), args, options)


def cache_write(*args: Any, **options: Any) -> Any:
    parts = ("row_k_scale", "row_v_scale", "rope_cache")
    return only_forward("cache_write", ("k", "v", "k_cache", "v_cache", "slots", *parts), args, options)


# -- merge


def merge(outs: list[Tensor], lses: list[Tensor], **options: Any) -> Any:
    values = (*outs, *lses)
    if _torch_tangents.carries_tangent(values):
        return merge_of_operators(outs, lses, options.get("layout", "bshd"))
    if torch.is_grad_enabled() and requires_gradient(values):
        with enable_single_level_autograd_function():
            return record_merge(operator("merge"), outs, lses, options)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.libflash.merge.default(outs, lses, **options)


def record_merge(run: Callable[..., Any], outs: Any, lses: Any, options: dict[str, Any]) -> Any:
    return Merge.apply(run, options, *outs, *lses)


class Merge(Function):
    """(run, options, *outs, *lses) -> (out, lse)

    With w_n = exp(lse_n - lse): douts_n = w_n dout, dlses_n = w_n (dlse + dout . (outs_n - out)).
    A part with lse_n = -inf has w_n = 0 and contributes nothing, even if its outs_n holds NaN. The gradients consist of PyTorch's
    own operators, which are differentiable again.
    """

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], options: dict[str, Any], *parts: Tensor) -> Any:
        count = len(parts) // 2
        out, lse = run(list(parts[:count]), list(parts[count:]), **options)
        ctx.layout = options.get("layout", "bshd")
        ctx.save_for_backward(out, lse, *parts)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        out, lse, *parts = ctx.saved_tensors
        count = len(parts) // 2
        dout = torch.zeros_like(out) if dout is None else dout
        dout, out, lse = dout.to(lse.dtype), out.to(lse.dtype), as_out(lse, ctx.layout)
        slope = -(dout * out).sum(-1, keepdim=True)
        if dlse is not None:
            slope = slope + as_out(dlse, ctx.layout)
        douts, dlses = [], []
        for part, given in zip(parts[:count], parts[count:], strict=True):
            part_lse = as_out(given, ctx.layout)
            counts = part_lse != -float("inf")
            difference = torch.where(counts, part_lse, 0.0) - torch.where(counts, lse, 0.0)
            weight = torch.where(counts, difference.exp(), 0.0)
            inner = (dout * torch.where(counts, part, 0.0)).sum(-1, keepdim=True)
            douts.append((weight * dout).to(part.dtype))
            dlses.append(as_lse(weight * (slope + inner), ctx.layout).to(given.dtype))
        return None, None, *douts, *dlses
