"""FLOP counts of the operators for torch.utils.flop_counter.

They follow PyTorch's counts for its own attention: matrix products only, two operations for a multiplication and an addition, all
pairs of queries and keys, including masked pairs. Packed sequences count the pairs within each sequence.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

Tensor = torch.Tensor


def pairs(q: Tensor, k: Tensor, options: dict[str, Any]) -> int:
    """The number of pairs of queries and keys, times heads_q."""
    layout = options.get("layout") or "bshd"
    axes = {axis: i for i, axis in enumerate(layout)}
    cu_q, cu_k = options.get("cu_seqlens_q"), options.get("cu_seqlens_k")
    if cu_q is None and cu_k is None:
        return int(q.shape[axes["b"]] * q.shape[axes["h"]] * q.shape[axes["s"]] * k.shape[axes["s"]])
    lengths_q, lengths_k = lengths(q, cu_q, axes), lengths(k, cu_k, axes)
    return int(q.shape[-2] * sum(a * b for a, b in zip(lengths_q, lengths_k, strict=True)))


def lengths(x: Tensor, cu_seqlens: Tensor | None, axes: dict[str, int]) -> list[Any]:
    """The length of each sequence. Tensors without data (fake tensors) count as sequences of equal length."""
    if cu_seqlens is None:
        return [x.shape[axes["s"]]] * x.shape[axes["b"]]
    if type(cu_seqlens) is Tensor and not cu_seqlens.is_meta:
        return cu_seqlens.diff().tolist()
    count = cu_seqlens.shape[0] - 1
    return [x.shape[0] / count] * count


@register_flop_formula([torch.ops.libflash.attention, torch.ops.libflash.attention_out], get_raw=True)
def attention_flops(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> int:
    return 2 * pairs(q, k, named("attention", 3, args, options)) * (q.shape[-1] + v.shape[-1])


@register_flop_formula(torch.ops.libflash.attention_backward, get_raw=True)
def backward_flops(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *args: Any, **options: Any) -> int:
    """Five products: the scores again, dP, dV, dQ and dK."""
    return 2 * pairs(q, k, named("attention_backward", 6, args, options)) * (3 * q.shape[-1] + 2 * v.shape[-1])


@register_flop_formula(torch.ops.libflash.attention_tangent, get_raw=True)
def tangent_flops(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *args: Any, **options: Any) -> int:
    """Five products, as if q, k and v all had tangents: the scores again, their tangent (two), and the tangent of out (two)."""
    return 2 * pairs(q, k, named("attention_tangent", 5, args, options)) * (3 * q.shape[-1] + 2 * v.shape[-1])


@register_flop_formula(torch.ops.libflash.attention_delta_tangent, get_raw=True)
def delta_tangent_flops(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *args: Any, **options: Any
) -> int:
    """As attention_tangent, although the operator may recompute out."""
    return 2 * pairs(q, k, named("attention_delta_tangent", 6, args, options)) * (3 * q.shape[-1] + 2 * v.shape[-1])


@register_flop_formula(torch.ops.libflash.attention_with_tangent, get_raw=True)
def with_tangent_flops(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> int:
    return 2 * pairs(q, k, named("attention_with_tangent", 3, args, options)) * (3 * q.shape[-1] + 3 * v.shape[-1])


_DECODE = [torch.ops.libflash.decode, torch.ops.libflash.decode_append, torch.ops.libflash.decode_append_parts]


@register_flop_formula(_DECODE, get_raw=True)
def decode_flops(q: Tensor, k_cache: Tensor, v_cache: Tensor | None, *args: Any, **options: Any) -> int:
    """Counts the whole capacity of the cache for each row: lengths are not read."""
    given = named("decode", 3, args, options)
    table, head_dim_v = given.get("block_table"), given["head_dim_v"] if v_cache is None else v_cache.shape[-1]
    capacity = k_cache.shape[1] * (1 if table is None else table.shape[1])
    return int(2 * math.prod(q.shape[:-1]) * capacity * (q.shape[-1] + head_dim_v))


def named(name: str, required: int, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """The optional arguments of an operator by their names; `args` follow the required arguments."""
    schema = getattr(torch.ops.libflash, name).default._schema
    return {argument.name: x for argument, x in zip(schema.arguments[required:], args, strict=False)} | options
