"""libflash as PyTorch operators, torch.ops.libflash.attention and others, for torch.compile, torch.export and torch.func.

An operator is a schema and one implementation each for plain tensors (_torch_kernels.py), tensors without data (_torch_fake.py),
autograd (_torch_autograd.py, _torch_tangents.py) and vmap (_torch_vmap.py). libflash/torch.py uses the operators only if a
transform, mode or tracer must see the call, because PyTorch's dispatcher takes longer than a small call.

All arguments are positional: PyTorch's ahead-of-time packages lose the defaults of keyword-only ones. The argument that names a
kernel is `kernel_name`, since PyTorch's compiler has an argument `kernel` of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from . import _core, _torch_autograd, _torch_fake, _torch_kernels, _torch_tangents, _torch_vmap
from ._option_list import operator_arguments
from ._torch_eager import register_sharding

Tensor = torch.Tensor

_DIRECTION = tuple(f"Tensor? {name}=None" for name in ("tq", "tk", "tv", "tbias", "tsink"))
_COTANGENTS = tuple(f"Tensor? {name}=None" for name in ("dlse", "tdout", "tdlse"))
_OF_ROWS = ("Tensor? tdelta=None", "Tensor? delta=None")
_BACKWARD_TANGENT = (*_DIRECTION, *_COTANGENTS, "bool need_dbias=False", "bool need_dsink=False", *_OF_ROWS)
_SCHEMAS = (
    f"attention(Tensor q, Tensor k, Tensor v, {operator_arguments('attention')}) -> (Tensor out, Tensor lse)",
    f"attention_out(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!)? lse, {operator_arguments('attention')}) -> ()",
    "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse=None, "
    f"{operator_arguments('attention', 'bool need_dbias=False', 'bool need_dsink=False')}) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsink)",
    "attention_tangent(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{operator_arguments('attention', *_DIRECTION)}) -> (Tensor tout, Tensor tlse)",
    # attention and attention_tangent in one pass over the keys
    f"attention_with_tangent(Tensor q, Tensor k, Tensor v, {operator_arguments('attention', *_DIRECTION)}) "
    "-> (Tensor out, Tensor lse, Tensor tout, Tensor tlse)",
    # attention_tangent, and tdelta and delta for attention_backward_tangent from sums that are not rounded
    "attention_delta_tangent(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{operator_arguments('attention', *_DIRECTION, *_COTANGENTS)}) "
    "-> (Tensor tout, Tensor tlse, Tensor tdelta, Tensor delta)",
    # with tdelta, tout and tdlse are not read; with delta, dlse is not
    "attention_backward_tangent(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor tout, Tensor tlse, "
    f"{operator_arguments('attention', *_BACKWARD_TANGENT)}) "
    "-> (Tensor tdq, Tensor tdk, Tensor tdv, Tensor tdbias, Tensor tdsink)",
    f"decode(Tensor q, Tensor k_cache, Tensor? v_cache, {operator_arguments('decode')}) -> (Tensor out, Tensor lse)",
    "decode_append(Tensor q, Tensor(a!) k_cache, Tensor(b!)? v_cache, Tensor k, Tensor? v, "
    f"{operator_arguments('decode')}) -> (Tensor out, Tensor lse)",
    # decode_append that also writes scales of rows and the rope part of keys
    "decode_append_parts(Tensor q, Tensor(a!) k_cache, Tensor(b!)? v_cache, Tensor k, Tensor? v, Tensor(c!)? row_k_scale, "
    "Tensor(d!)? row_v_scale, Tensor(e!)? rope_cache, Tensor? k_rope, "
    f"{operator_arguments('decode')}) -> (Tensor out, Tensor lse)",
    "cache_write(Tensor k, Tensor? v, Tensor(a!) k_cache, Tensor(b!)? v_cache, Tensor slots, Tensor(c!)? row_k_scale, "
    "Tensor(d!)? row_v_scale, Tensor(e!)? rope_cache, Tensor? k_scale=None, Tensor? v_scale=None, Tensor? k_rope=None, "
    "Tensor? rotary_cos=None, Tensor? rotary_sin=None, bool rotary_interleaved=True, Tensor? positions=None, "
    "str? cache_dtype=None, str? backend=None, str? kernel_name=None) -> ()",
    f"merge(Tensor[] outs, Tensor[] lses, {operator_arguments('merge')}) -> (Tensor out, Tensor lse)",
)

library = torch.library.Library("libflash", "DEF")


def by_name(schema: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the required arguments and, by name, of the options that are not at their defaults."""
    required = sum(not argument.has_default_value() for argument in schema.arguments)
    optional = [(argument.name, argument.default_value) for argument in schema.arguments[required:]]
    defaults = dict(optional)

    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        options = {
            name: value for (name, default), value in zip(optional, args[required:], strict=False) if differs(value, default)
        }
        for name, value in keywords.items():
            if name not in defaults or differs(value, defaults[name]):
                options[name] = value
        return function(*args[:required], **options)

    return call


def differs(value: Any, default: Any) -> bool:
    if value is None or isinstance(value, (Tensor, torch.SymInt, torch.SymFloat)):
        return value is not None
    if isinstance(value, list) and any(isinstance(x, torch.SymInt) for x in value):
        return True
    return bool(value != default)


def on_plain_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        return _core.call_as_operator(function, args, options)

    return call


# Arguments that PyTorch computes: gradients, tangents, and tangents of gradients.
COMPUTED = frozenset((*_torch_tangents.DIRECTION.values(), "dout", "dlse", "tout", "tlse", "tdout", "tdlse", "tdelta", "delta"))


def with_dense_rows(schema: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """A gradient or tangent that PyTorch knows to be zero has no memory. A kernel gets it as one number that is repeated along
    every axis, and the library needs dense rows. Outside of the kernel its strides are dense: only here can it be found."""
    names = [argument.name for argument in schema.arguments]
    if COMPUTED.isdisjoint(names):
        return function

    def dense(name: str, x: Any) -> Any:
        repeated = name in COMPUTED and isinstance(x, Tensor) and x.dim() > 0 and x.stride(-1) == 0
        return x.contiguous() if repeated else x

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        given = {name: dense(name, x) for name, x in options.items()}
        return function(*map(dense, names, args), **given)

    return call


def register() -> dict[str, Any]:
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
    operators = {}
    for text in _SCHEMAS:
        name = text.partition("(")[0]
        library.define(text, tags=tags)
        operator = operators[name] = getattr(torch.ops.libflash, name).default
        schema = operator._schema
        kernel = by_name(schema, on_plain_tensors(with_dense_rows(schema, getattr(_torch_kernels, name))))
        for key in ("CPU", "CUDA"):
            library.impl(name, kernel, key)
        fake = _torch_fake.without_data(schema, by_name(schema, getattr(_torch_fake, name)))
        torch.library.register_fake(f"libflash::{name}", fake, lib=library)
        at_autograd = getattr(_torch_tangents if name.endswith("tangent") else _torch_autograd, name)
        library.impl(name, by_name(schema, at_autograd), "Autograd")
        torch.library.register_vmap(f"libflash::{name}", _torch_vmap.rule(name, operator), lib=library)
    return operators


OPERATORS = register()


register_sharding()
from . import _torch_flops  # noqa: E402, F401  (needs the operators)
