"""torch.vmap of the operators: the mapped axis is folded into the batch if this gives the same results. Otherwise the operator
runs once for each slice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ._errors import UnsupportedError
from ._torch_tangents import DIRECTION, rows_contiguous

Tensor = torch.Tensor

WRITTEN: dict[str, tuple[str, ...]] = {"attention_out": ("out", "lse"), "decode_append": ("k_cache", "v_cache")}
WRITTEN["decode_append_parts"] = (*WRITTEN["decode_append"], "row_k_scale", "row_v_scale", "rope_cache")
WRITTEN["cache_write"] = WRITTEN["decode_append_parts"]
MOVED = tuple(DIRECTION.values())
BATCH_AXIS = {"bshd": 0, "bhsd": 0, "sbhd": 1}
SEQUENCES = ("dout", "q", "k", "v", "out")  # the layout determines the batch axis
BY_BATCH = ("lse", "dlse", "seqused_q", "seqused_k")  # the batch is axis 0
SCORES = ("bias", "mask", "block_mask")  # up to four axes, aligned to the right; the batch may be 1
# Packed sequences have no batch axis. A dropout mask depends on the batch entry. dbias and dsink are summed over the batch.
NOT_FOLDED = ("cu_seqlens_q", "cu_seqlens_k", "dropout_p", "row_counts", "need_dbias", "need_dsink")


def rule(name: str, operator: Any) -> Callable[..., Any]:
    names = [argument.name for argument in operator._schema.arguments]

    def batched(info: Any, in_dims: tuple[Any, ...], *args: Any, **keywords: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | keywords
        dims = dict(zip(names, in_dims, strict=False))
        written = WRITTEN.get(name, ())
        for argument in written:
            if isinstance(given.get(argument), Tensor) and dims.get(argument) is None:
                raise UnsupportedError(f"vmap: {argument} is written to and must be mapped over, because other arguments are")
        if name == "attention_with_tangent" and not any(isinstance(dims.get(x), int) for x in given if x not in MOVED):
            return of_many_tangents(info.batch_size, given, dims)
        if name in ("attention", "attention_backward") and foldable(given, dims):
            return folded(operator, info.batch_size, given, dims)
        return slice_by_slice(operator, info.batch_size, given, dims, written)

    return batched


def of_many_tangents(size: int, given: dict[str, Any], dims: dict[str, Any]) -> Any:
    """Many tangents of one call, as in jacfwd: out and lse are computed once."""
    primals = {name: x for name, x in given.items() if name not in MOVED}
    out, lse = torch.ops.libflash.attention.default(**primals)
    along = given | {"out": out, "lse": lse}
    tangents, at = slice_by_slice(torch.ops.libflash.attention_tangent.default, size, along, dims, ())
    return (out, lse, *tangents), (None, None, *at)


def foldable(given: dict[str, Any], dims: dict[str, Any]) -> bool:
    def is_set(name: str) -> bool:
        value = given.get(name)
        return isinstance(value, Tensor) or bool(value)

    mapped = all(dims.get(name) is not None for name in ("q", "k", "v")) and dims.get("learnable_sink") is None
    return mapped and not any(map(is_set, NOT_FOLDED))


# -- one slice at a time


def slice_by_slice(operator: Any, size: int, given: dict[str, Any], dims: dict[str, Any], written: tuple[str, ...]) -> Any:
    def part(x: Any, dim: Any, i: int, name: str) -> Any:
        if isinstance(x, (list, tuple)) and isinstance(dim, (list, tuple)):
            return [part(element, its_dim, i, name) for element, its_dim in zip(x, dim, strict=True)]
        if dim is None or not isinstance(x, Tensor):
            return x
        x = x.select(dim, i) if size > 0 else x.new_zeros(x.movedim(dim, 0).shape[1:])
        if name in written:
            return x
        # The library needs arrays of integers (lengths, tables, positions) without gaps, other arrays with dense rows.
        return x.contiguous() if x.dtype in (torch.int32, torch.int64) else rows_contiguous(x)

    slices = range(max(size, 1))  # for an axis of size 0, one slice gives the shapes of the results
    results = [operator(**{name: part(x, dims.get(name), i, name) for name, x in given.items()}) for i in slices]
    if not isinstance(results[0], tuple) or not results[0]:
        return None, None
    stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
    return stacked if size > 0 else tuple(x[:0] for x in stacked), (0,) * len(stacked)


# -- folded


def folded(operator: Any, size: int, given: dict[str, Any], dims: dict[str, Any]) -> Any:
    axis = BATCH_AXIS[given.get("layout", "bshd")]
    q = given["q"].movedim(dims["q"], 0)
    batch = q.shape[1 + axis]
    flat = {name: fold(name, x, dims.get(name), size, batch, axis) for name, x in given.items()}
    results = operator(**flat)
    is_backward = "dout" in given
    unfolded = []
    for i, x in enumerate(results):
        along = 0 if i == 1 and not is_backward else axis  # lse begins with the batch in every layout
        unfolded.append(x.unflatten(along, (size, batch)).movedim(along, 0) if i < 3 else x.expand(size, *x.shape))
    return tuple(unfolded), (0,) * len(unfolded)


def fold(name: str, x: Any, dim: int | None, size: int, batch: int, axis: int) -> Any:
    """x with a batch axis that is `size` times as long; x itself if it has no batch axis and is not mapped."""
    if not isinstance(x, Tensor):
        return x
    if name in SEQUENCES or name in BY_BATCH:
        return joined(spread(x, dim, size), axis if name in SEQUENCES else 0)
    if name in SCORES:
        missing = 4 - (x.dim() if dim is None else x.dim() - 1)
        if dim is None:
            x = x[(None,) * missing]
            return x if x.shape[0] == 1 else joined(spread(x, None, size), 0)
        x = x.movedim(dim, 0)
        x = x[(slice(None), *(None,) * missing)]
        return joined(x.expand(size, batch, *x.shape[2:]), 0)
    if name == "alibi_slopes" and (dim is not None or x.dim() == 2):
        x = spread(x, dim, size)
        return joined(x if x.dim() == 3 else x[:, None].expand(size, batch, x.shape[1]), 0)
    return x


def spread(x: Tensor, dim: int | None, size: int) -> Tensor:
    """x with the mapped axis first; repeated if x is not mapped."""
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def joined(x: Tensor, axis: int) -> Tensor:
    """x of shape (size, ...), with its first axis merged into `axis`."""
    x = x.movedim(0, axis).flatten(axis, axis + 1)
    return x if x.stride(-1) == 1 else x.contiguous()
