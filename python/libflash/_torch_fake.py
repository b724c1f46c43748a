"""The kernels of the PyTorch operators for tensors without data (fake and meta tensors).

They return tensors of the right shapes, and raise what the real call would raise: the library checks the shapes. A call with a
size that is not known yet is checked when it runs.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from . import _core
from ._arguments import check_parts
from ._block_mask import BlockMask
from ._errors import InvalidError, NoDeviceError, UnsupportedError
from ._torch_kernels import BLOCK_LISTS, decode_type, library_options, lse_shape, lse_type, optional_gradients, with_parts

Tensor = torch.Tensor
SYMBOLIC = (torch.SymInt, torch.SymFloat)


class _UnknownSize(Exception):
    """A symbolic size or number without an example."""


def known_size(x: Any) -> Any:
    """x, which is a size, a stride or a number that depends on one. If it is symbolic: the value that PyTorch traces with; no
    guard is added."""
    if not isinstance(x, SYMBOLIC):
        return x
    hint = getattr(x.node, "hint", None)
    if not isinstance(hint, (int, float)):
        raise _UnknownSize
    return hint


def shape_of(x: Any) -> Any:
    """The library's description of a tensor without data; anything else as it is. A meta tensor is described as one on the CPU,
    because what the CPU refuses, every device refuses."""
    if isinstance(x, BlockMask):
        return BlockMask(*(shape_of(getattr(x, name)) for name in BLOCK_LISTS))
    if isinstance(x, (list, tuple)):
        return [shape_of(size) for size in x]  # a window or a shard
    if not isinstance(x, Tensor):
        return known_size(x)
    device = "cuda" if x.device.type == "cuda" else "cpu"
    sizes, strides = tuple(map(known_size, x.shape)), tuple(map(known_size, x.stride()))
    return _core.TensorShape(sizes, strides, str(x.dtype).removeprefix("torch."), device)


def check(function: Any, *tensors: Any, meta: bool, **options: Any) -> None:
    """Raise what the call would raise. `function` is a check of the library."""
    options = library_options(options)
    if meta:
        options.pop("backend", None)
        options.pop("kernel", None)
    try:
        function(*map(shape_of, tensors), **{name: shape_of(value) for name, value in options.items()})
    except (_UnknownSize, NoDeviceError):  # a program may be traced on a machine without its GPU
        return


def without_data(schema: Any, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel of an operator for tensors without data. Meta tensors beside others are refused: as descriptions of tensors on
    the CPU they would pass, and the result would be on meta.
    """
    names = [argument.name for argument in schema.arguments]
    written = {argument.name for argument in schema.arguments if argument.is_write}

    @functools.wraps(kernel)
    def call(*args: Any, **options: Any) -> Any:
        devices = {}
        for name, value in (*zip(names, args, strict=False), *options.items()):
            for i, x in enumerate(value if isinstance(value, list | tuple) else [value]):
                if isinstance(x, Tensor):
                    devices[name if value is x else f"{name}[{i}]"] = x.device
                    if name in written:
                        fix_offset(x, name)
        on_meta = next((name for name, device in devices.items() if device.type == "meta"), None)
        for name, device in devices.items():
            if on_meta is not None and device.type != "meta":
                raise InvalidError(f"{name} is on the device {device}, but {on_meta} on meta; they must be on the same device")
        return kernel(*args, **options)

    return call


def fix_offset(x: Tensor, name: str) -> None:
    """Make the storage offset of a written view a number. PyTorch's compiler loses an offset that depends on symbolic sizes, and
    the call would write to the beginning of the storage. torch.compile fixes these sizes, and compiles again for others. An
    exported program is right unless it is compiled ahead of time, which cannot fix sizes."""
    offset = x.storage_offset()
    if not isinstance(offset, torch.SymInt):
        return
    compiler: Any = sys.modules.get("torch._inductor.virtualized")
    ahead_of_time = compiler is not None and bool(compiler.V.aot_compilation)
    if not ahead_of_time and (torch.compiler.is_exporting() or torch._guards.TracingContext.try_get() is None):
        return
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    node = offset.node
    if ahead_of_time or free_unbacked_symbols(offset):
        on = "dynamic dimensions" if ahead_of_time else "data"
        raise UnsupportedError(
            f"{name} is a view with the storage offset {node.expr}, which depends on {on}: PyTorch's compiler would write to the "
            "beginning of the storage; pass a tensor with storage of its own, or a view with a known offset"
        )
    for symbol in sorted(node.expr.free_symbols, key=str):
        node.shape_env.evaluate_expr(symbol)


def checked_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options that the checks of the library accept. A random state is left out, because it has no data."""
    return {name: value for name, value in options.items() if name not in ("rng_state", "deterministic")}


def check_rank(q: Tensor, v: Tensor) -> None:
    if q.dim() not in (3, 4) or v.dim() not in (3, 4):
        raise InvalidError(f"q and v have {q.dim()} and {v.dim()} dimensions; 4 are needed, or 3 with cu_seqlens")


def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    check_rank(q, v)
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = q.new_empty(lse_shape(q, options.get("layout", "bshd")), dtype=lse_type(q))
    check(_core.check_attention, q, k, v, out, lse, None, meta=q.is_meta, **checked_options(options))
    return out, lse


def attention_out(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, **options: Any) -> None:
    check_rank(q, v)
    check(_core.check_attention, q, k, v, out, lse, None, meta=q.is_meta, **checked_options(options))


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    need_dbias: bool = False,
    need_dsink: bool = False,
    **options: Any,
) -> tuple[Tensor, ...]:
    check_rank(q, v)
    dbias, dsink = optional_gradients(options, need_dbias, need_dsink)
    options = checked_options(options) | {"deterministic": options.get("deterministic", False)}
    with contextlib.suppress(_UnknownSize):
        gradients = tuple(map(shape_of, (dout, dbias, dsink)))
        check(_core.check_attention, q, k, v, out, lse, gradients, meta=q.is_meta, **options)
    optional = (q.new_empty(0) if x is None else x for x in (dbias, dsink))
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), *optional


def attention_with_tangent(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, ...]:
    moved = ("tq", "tk", "tv", "tbias", "tsink")
    out, lse = attention(q, k, v, **{name: x for name, x in options.items() if name not in moved})
    return out, lse, *attention_tangent(q, k, v, out, lse, **options)


def attention_tangent(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """The real call compares the tangents with their primals."""
    check_rank(q, v)
    return q.new_empty((*q.shape[:-1], v.shape[-1])), torch.empty_like(lse, memory_format=torch.contiguous_format)


def attention_delta_tangent(dout: Tensor, *primal: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tout, tlse = attention_tangent(*primal, **options)
    return tout, tlse, torch.empty_like(tlse), torch.empty_like(tlse)


def attention_backward_tangent(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *rest: Tensor,
    need_dbias: bool = False,
    need_dsink: bool = False,
    **options: Any,
) -> tuple[Tensor, ...]:
    check_rank(q, v)
    optional = (q.new_empty(0) if x is None else x for x in optional_gradients(options, need_dbias, need_dsink))
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), *optional


def decode(q: Tensor, k_cache: Tensor, v_cache: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
    values = k_cache if v_cache is None else v_cache
    if q.dim() != (3 if "cu_seqlens_q" in options else 4) or values.dim() != 4:
        name = "k_cache" if v_cache is None else "v_cache"
        raise InvalidError(
            f"q and {name} have {q.dim()} and {values.dim()} dimensions; both need 4, but q needs 3 with cu_seqlens_q"
        )
    channels = values.shape[-1] if v_cache is not None else options.get("head_dim_v", 1)
    out = q.new_empty((*q.shape[:-1], channels), dtype=decode_type(q, options))
    lse = q.new_empty(lse_shape(q, "bshd"), dtype=lse_type(q))
    check(_core.check_decode, q, k_cache, v_cache, out, lse, meta=q.is_meta, **options)
    return out, lse


def decode_append(
    q: Tensor, k_cache: Tensor, v_cache: Tensor | None, k: Tensor, v: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    return decode(q, k_cache, v_cache, k=k, v=v, **options)


def decode_append_parts(
    q: Tensor, k_cache: Tensor, v_cache: Tensor | None, k: Tensor, v: Tensor | None, *parts: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    return decode(q, k_cache, v_cache, k=k, v=v, **options, **with_parts(*parts))


def cache_write(
    k: Tensor, v: Tensor | None, k_cache: Tensor, v_cache: Tensor | None, slots: Tensor, *rest: Any, **_: Any
) -> None:
    """The library checks the shapes when the call runs."""


def merge(outs: list[Tensor], lses: list[Tensor], *, layout: str = "bshd", **options: Any) -> tuple[Tensor, Tensor]:
    check_parts(outs, lses)
    first = outs[0]
    if first.dim() not in (3, 4):
        raise InvalidError(f"outs[0] has {first.dim()} dimensions; it needs 4, or 3 if packed")
    rows = lse_shape(first, layout)
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if tuple(out.shape) != tuple(first.shape) or not out.is_floating_point() or out.stride(-1) != 1:
            raise InvalidError(
                f"outs[{i}] is {out.dtype}, {tuple(out.shape)}, strides {out.stride()}; it must be floating point, "
                f"{tuple(first.shape)}, with a contiguous last dimension"
            )
        if tuple(lse.shape) != tuple(rows) or lse.dtype != lse_type(out):
            raise InvalidError(f"lses[{i}] is {lse.dtype}, {tuple(lse.shape)}; it must be {lse_type(out)}, {tuple(rows)}")
    return first.new_empty(first.shape), first.new_empty(rows, dtype=lse_type(first))
