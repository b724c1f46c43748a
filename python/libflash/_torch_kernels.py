"""The kernels of the PyTorch operators for plain tensors: each calls the library and returns tensors. They record no gradients.

A function is given an option only if it is not at its default. Results are dense, in the order of the axes of the caller's
layout, as the library allocates them.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from . import _core
from ._block_mask import BlockMask
from ._second_order import CPU, computes_out_anew
from ._torch_dtensor import beside

Tensor = torch.Tensor

BLOCK_LISTS = ("row_counts", "row_indices", "col_counts", "col_indices")


CONVERTED = frozenset(("row_counts", "rng_state", "seed", "offset", "kernel_name"))


def library_options(options: dict[str, Any]) -> dict[str, Any]:
    """Convert the arguments of an operator to those of libflash.attention."""
    if CONVERTED.isdisjoint(options):
        return options
    if "row_counts" in options:
        options["block_mask"] = BlockMask(*(options.pop(name) for name in BLOCK_LISTS))
    if "rng_state" in options:
        options["seed"] = options.pop("rng_state")
    for name in ("seed", "offset"):
        if name in options and not isinstance(options[name], Tensor):
            options[name] %= 1 << 64  # PyTorch's integers are signed
    if "kernel_name" in options:
        options["kernel"] = options.pop("kernel_name")
    return options


def lse_type(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def decode_type(q: Tensor, options: dict[str, Any]) -> torch.dtype:
    """The type of out. With a shard of the keys it is the type of lse, because the results are merged later."""
    return lse_type(q) if options.get("shard", (1,))[0] > 1 else q.dtype


def lse_shape(q: Tensor, layout: str) -> tuple[int, ...]:
    """(batch, heads_q, seqlen_q), or (heads_q, total_q) if packed."""
    if q.dim() == 3:
        return q.shape[1], q.shape[0]
    if layout == "bhsd":
        return q.shape[0], q.shape[1], q.shape[2]
    if layout == "sbhd":
        return q.shape[1], q.shape[2], q.shape[0]
    return q.shape[0], q.shape[2], q.shape[1]


def filled_results(q: Tensor, head_dim_v: int, options: dict[str, Any], dtype: torch.dtype | None = None) -> None:
    """Adds results that are not given. `options` has cu_seqlens_q: the library does not write rows that belong to no sequence."""
    if options.get("out") is None:
        options["out"] = q.new_zeros((*q.shape[:-1], head_dim_v), dtype=dtype)
    if options.get("lse") is None:
        options["lse"] = torch.full(lse_shape(q, "bshd"), -torch.inf, dtype=lse_type(q), device=q.device)


def attention(q: Tensor, k: Tensor, v: Tensor, *, deterministic: bool = False, **options: Any) -> tuple[Tensor, Tensor]:
    """The library does not write packed rows that belong to no sequence. They are 0 here (lse: -inf), and so are their gradients,
    so that no uninitialized memory enters a gradient. The forward pass is always deterministic."""
    if "cu_seqlens_q" in options:
        filled_results(q, v.shape[-1], options)
    out, lse = _core.attention(q, k, v, return_lse=True, **library_options(options))
    return out, lse


def attention_alone(q: Tensor, k: Tensor, v: Tensor, *, deterministic: bool = False, **options: Any) -> tuple[Tensor]:
    """Without lse; not an operator."""
    if "cu_seqlens_q" in options:
        return attention(q, k, v, **options)[:1]
    return (_core.attention(q, k, v, **library_options(options)),)


def attention_out(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, *, deterministic: bool = False, **options: Any
) -> None:
    _core.attention(q, k, v, out=out, lse=lse, return_lse=lse is not None, **library_options(options))


def optional_gradients(options: dict[str, Any], need_dbias: bool, need_dsink: bool) -> tuple[Tensor | None, Tensor | None]:
    """Memory for dbias and dsink; None for what is not requested."""
    bias, sink = options.get("bias"), options.get("learnable_sink")
    dbias = bias.new_empty(bias.shape) if need_dbias and bias is not None else None
    dsink = sink.new_empty(sink.shape) if need_dsink and sink is not None else None
    return dbias, dsink


def gradients(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """dq, dk, dv, dbias, dsink; None for what is not requested."""
    dbias = dsink = None
    if need_dbias or need_dsink:
        dbias, dsink = optional_gradients(options, need_dbias, need_dsink)
        options |= {"dbias": dbias, "dsink": dsink}
    if "cu_seqlens_q" in options:
        options["dq"] = q.new_zeros(q.shape)
    if "cu_seqlens_k" in options:
        options |= {"dk": k.new_zeros(k.shape), "dv": v.new_zeros(v.shape)}
    dq, dk, dv = _core.attention_backward(dout, q, k, v, out, lse, **library_options(options))
    return dq, dk, dv, dbias, dsink


def attention_backward(*tensors: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """An operator returns tensors only: empty ones for what is not requested."""
    return tuple(tensors[1].new_empty(0) if x is None else x for x in gradients(*tensors, **options))


def attention_tangent(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, deterministic: bool = False, **options: Any
) -> tuple[Tensor, Tensor]:
    """Packed rows that belong to no sequence have tangents 0."""
    return tangents_of_rows(q, k, v, options | {"out": out, "lse": lse})


def tangents_of_rows(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    packed = "cu_seqlens_q" in options
    _, _, tout, tlse = _core.attention_tangent(q, k, v, **library_options(options))
    if packed:
        outside = rows_outside(options["cu_seqlens_q"], q.shape[0])
        tout[outside] = 0
        tlse[:, outside] = 0
    return tout, tlse


def unrounded_sums(q: Tensor, v: Tensor, options: dict[str, Any]) -> bool:
    """Whether attention_delta_tangent computes out again. `options`: those of an operator."""
    if q.dtype not in (torch.float16, torch.bfloat16):
        return False
    arch = CPU
    if q.is_cuda:
        if not torch.cuda.is_available():  # a program may be traced on a machine without its GPU
            return False
        major, minor = torch.cuda.get_device_capability(q.device)
        arch = 10 * major + minor
    return computes_out_anew(arch, (q.shape[-1], v.shape[-1]), options, options.get("backend"))


def attention_delta_tangent(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, deterministic: bool = False, **options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Packed rows that belong to no sequence have 0 everywhere."""
    tdelta, delta = (torch.zeros_like(lse, memory_format=torch.contiguous_format) for _ in range(2))
    from_lse = {} if unrounded_sums(q, v, options) else {"out": out, "lse": lse}
    tout, tlse = tangents_of_rows(q, k, v, options | from_lse | {"dout": dout, "tdelta": tdelta, "delta": delta})
    return tout, tlse, tdelta, delta


def attention_with_tangent(q: Tensor, k: Tensor, v: Tensor, *, deterministic: bool = False, **options: Any) -> tuple[Tensor, ...]:
    """Packed rows that belong to no sequence are 0 (lse: -inf), and so are their tangents."""
    packed = "cu_seqlens_q" in options
    made: tuple[Tensor, ...] = _core.attention_tangent(q, k, v, **library_options(options))
    if packed:
        outside = rows_outside(options["cu_seqlens_q"], q.shape[0])
        for x, value in zip(made, (0, -math.inf, 0, 0), strict=True):
            (x if x.dim() == 3 else x.T)[outside] = value
    return made


def rows_outside(cu_seqlens: Tensor, rows: int) -> Tensor:
    """Bool: the rows of a packed tensor that belong to no sequence."""
    at = beside(cu_seqlens, torch.arange(rows, device=cu_seqlens.device))
    return (at < cu_seqlens[0]) | (at >= cu_seqlens[-1])


def attention_backward_tangent(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tout: Tensor,
    tlse: Tensor,
    *,
    need_dbias: bool = False,
    need_dsink: bool = False,
    deterministic: bool = False,
    **options: Any,
) -> tuple[Tensor, ...]:
    """Empty tensors for what is not requested, as attention_backward. delta takes the place of dlse."""
    tdbias, tdsink = optional_gradients(options, need_dbias, need_dsink)
    cu_q, cu_k = options.get("cu_seqlens_q"), options.get("cu_seqlens_k")
    made = _core.attention_backward_tangent(
        dout, q, k, v, out, lse, tout, tlse, tdbias=tdbias, tdsink=tdsink, **library_options(options)
    )
    for x, cu in zip(made, (cu_q, cu_k, cu_k), strict=True):
        if cu is not None:
            x[rows_outside(cu, x.shape[0])] = 0
    return *made, *(q.new_empty(0) if x is None else x for x in (tdbias, tdsink))


def decode(q: Tensor, k_cache: Tensor, v_cache: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
    channels = options.get("head_dim_v", 1) if v_cache is None else v_cache.shape[-1]
    # A head_dim_v that the library refuses makes no tensor before.
    if "cu_seqlens_q" in options and (v_cache is not None or 0 < channels <= k_cache.shape[-1]):
        filled_results(q, channels, options, decode_type(q, options))
    out, lse = _core.decode(q, k_cache, v_cache, return_lse=True, **library_options(options))
    return out, lse


def decode_append(
    q: Tensor, k_cache: Tensor, v_cache: Tensor | None, k: Tensor, v: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    return decode(q, k_cache, v_cache, k=k, v=v, **options)


def with_parts(
    row_k_scale: Tensor | None, row_v_scale: Tensor | None, rope_cache: Tensor | None, k_rope: Tensor | None
) -> dict[str, Tensor]:
    """The options of decode for the further tensors of decode_append_parts."""
    parts = {"k_scale": row_k_scale, "v_scale": row_v_scale, "k_rope_cache": rope_cache, "k_rope": k_rope}
    return {name: x for name, x in parts.items() if x is not None}


def decode_append_parts(
    q: Tensor, k_cache: Tensor, v_cache: Tensor | None, k: Tensor, v: Tensor | None, *parts: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:
    return decode_append(q, k_cache, v_cache, k, v, **options, **with_parts(*parts))


def cache_write(
    k: Tensor,
    v: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor | None,
    slots: Tensor,
    row_k_scale: Tensor | None,
    row_v_scale: Tensor | None,
    rope_cache: Tensor | None,
    **options: Any,
) -> None:
    options |= with_parts(row_k_scale, row_v_scale, rope_cache, None)
    _core.cache_write(k, v, k_cache, v_cache, slots, **library_options(options))


def merge(outs: list[Tensor], lses: list[Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    out, lse = _core.merge(outs, lses, **library_options(options))
    return out, lse
