"""Functions of flash-attn 3 about splits of the keys: flash_attn_combine is `libflash.merge`; get_scheduler_metadata, which plans
the splits of a later call there, only checks its arguments, because libflash plans in the call itself.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

from . import _core
from . import _flash_attn_three as three
from ._arguments import described, integer
from ._errors import InvalidError, UnsupportedError

Array = Any

TYPES = ("float32", "float16", "bfloat16")
NAMES_OF_PARTS = {"outs": "out_partial", "lses": "lse_partial"}  # of libflash.merge


def combine(out_partial: Array, lse_partial: Array, out: Array | None, out_dtype: Any) -> tuple[Array, Array]:
    shape = _shape(out_partial, "out_partial")
    if len(shape) != 5:
        raise InvalidError(f"out_partial has shape {shape}; it needs (num_splits, batch, seqlen, heads, head_dim_v)")
    if _shape(lse_partial, "lse_partial") != shape[:-1]:
        raise InvalidError(f"lse_partial has shape {tuple(lse_partial.shape)}; it needs that of out_partial without its last, "
                           f"{shape[:-1]}")  # fmt: skip
    if shape[0] == 0:
        raise InvalidError("out_partial has 0 splits; it needs 1 or more")
    for name, x in (("out_partial", out_partial), ("lse_partial", lse_partial)):
        if name_of_type(x.dtype) != "float32":
            raise InvalidError(f"{name} has dtype {name_of_type(x.dtype)}; it must be float32. libflash.merge has other types")
    wanted = None if out_dtype is None else name_of_type(out_dtype)
    if wanted is not None and wanted not in TYPES:
        raise InvalidError(f"out_dtype is {wanted}; it must be float32, float16 or bfloat16")
    if out is not None:
        three.require_arrays(out=out)
    given = None if out is None else name_of_type(out.dtype)
    if wanted is not None and given is not None and given != wanted:
        raise InvalidError(f"out has dtype {given}; out_dtype is {wanted}")
    splits = range(shape[0])
    merged, lse = _merge([out_partial[i] for i in splits], [lse_partial[i].swapaxes(-1, -2) for i in splits], out)
    if out is None and wanted not in (None, "float32"):
        merged = merged.to(out_dtype) if three.is_tensor(merged) else merged.astype(out_dtype)
    return merged, lse.swapaxes(-1, -2)


def _merge(outs: list[Array], lses: list[Array], out: Array | None) -> Any:
    if three.is_tensor(outs[0]):
        from .torch import merge

        compiling = sys.modules["torch"].compiler.is_compiling()
        with nullcontext() if compiling else three.own_names(NAMES_OF_PARTS):
            return merge(outs, lses, out=out)
    with three.own_names(NAMES_OF_PARTS):
        return _core.merge(outs, lses, out=out)


def check_problem(sizes: dict[str, Any], page_size: Any, qkv_dtype: Any, lengths: dict[str, tuple[Array | None, int]]) -> None:
    """The checks of get_scheduler_metadata. `lengths`: arrays, and how many elements each has beyond one for each sequence."""
    for name, x in sizes.items():
        if three.size(x, name) < 0:
            raise InvalidError(f"{name} is {x}; it must not be negative")
    for name in ("num_heads_q", "num_heads_kv", "headdim"):
        if sizes[name] < 1:
            raise InvalidError(f"{name} is {sizes[name]}; it must be 1 or more")
    if sizes["num_heads_q"] % sizes["num_heads_kv"]:
        raise InvalidError(
            f"num_heads_q is {sizes['num_heads_q']}; it must be a multiple of num_heads_kv, {sizes['num_heads_kv']}"
        )
    if page_size is not None and integer(page_size, "page_size") < 1:
        raise InvalidError(f"page_size is {page_size}; it must be 1 or more")
    if qkv_dtype is not None and (dtype := name_of_type(qkv_dtype)) not in TYPES:
        if "float8" in dtype:
            raise UnsupportedError(f"qkv_dtype is {dtype}; q of 8 bits is not supported")
        raise InvalidError(f"qkv_dtype is {dtype}; it must be float32, float16 or bfloat16")
    for name, (array, more) in lengths.items():
        if array is not None and _shape(array, name) != (sizes["batch_size"] + more,):
            rule = f"({sizes['batch_size'] + more},), {'batch_size' if not more else 'batch_size + 1'}"
            raise InvalidError(f"{name} has shape {tuple(array.shape)}; it needs {rule}")


def name_of_type(dtype: Any) -> str:
    """The name of a type of PyTorch, NumPy or JAX: float32, bfloat16, ..."""
    text = str(dtype)
    if text.startswith("torch."):
        return text.removeprefix("torch.")
    import numpy as np

    try:
        return str(np.dtype(dtype).name)
    except TypeError:
        return text


def _shape(x: Any, name: str) -> tuple[int, ...]:
    if not hasattr(x, "shape"):
        raise TypeError(f"{name} must be an array, not {described(x)}")
    return tuple(x.shape)
