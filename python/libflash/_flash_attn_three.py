"""Arguments that flash-attn 3 added to the functions of flash-attn 2: handled, without effect on the result, or refused by name.

num_splits, seqused_q, seqused_k, k_descale, v_descale, page_table and s_aux have counterparts. scheduler_metadata, pack_gqa and
sm_margin only affect the speed of flash-attn's own kernels: they are checked and change nothing.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from . import _core
from ._arguments import described, integer, is_traced, refuse_bool, refuse_traced
from ._errors import Error, InvalidError, UnsupportedError

Array = Any

# The names of libflash.decode's arguments in the functions of flash-attn.
NAMES = {"k_scale": "k_descale", "v_scale": "v_descale", "cu_seqlens_new": "cu_seqlens_k_new"}
NAMES_WITH_QV = {"k_cache": "v_cache", "k_rope_cache": "k_cache", "k_scale": "v_descale", "k_rope": "k", "k": "v"}
NAMES_OF_PAGES = {"k_cache": "k", "v_cache": "v"}  # in flash_attn_varlen_func


def names_of(s_aux: Any, page_table: Any, qv: Any) -> dict[str, str]:
    """NAMES, with the names that the caller used for arguments that have two."""
    given = {"learnable_sink": "s_aux"} if s_aux is not None else {}
    given |= {"block_table": "page_table"} if page_table is not None else {}
    return NAMES | given | (NAMES_WITH_QV if qv is not None else {})


@contextmanager
def own_names(names: dict[str, str], table_rows: tuple[Array, int] | None = None) -> Iterator[None]:
    """Translate the argument names in errors of libflash.decode to the names that the caller knows. `table_rows`: what the block
    table was made from by rows_of_table, cache_batch_idx and the number of rows."""
    try:
        yield
    except (Error, TypeError) as error:
        words = re.compile(rf"\b(?:{'|'.join(sorted(names, key=len, reverse=True))})\b")
        text = unknown_row(str(error), *table_rows) if table_rows else str(error)
        raise type(error)(words.sub(lambda found: names[found[0]], text)) from error


def unknown_row(text: str, cache_batch_idx: Array, rows: int) -> str:
    """The text about a wrong page in a row that rows_of_table did not find, as one about cache_batch_idx; other texts as they
    are."""
    found = re.match(r"block_table: a page must .* \(entry \((\d+), \d+\) is -1 ", text)
    index = int(cache_batch_idx[int(found[1])]) if found else 0
    if not found or 0 <= index < rows:
        return text
    return f"cache_batch_idx: must be at least 0 and below the rows of block_table (entry {found[1]} is {index} of {rows})"


def has_unknown_row(q: Array, cache_batch_idx: Array, rows: int) -> bool:
    """Whether the values of a call on the CPU are known, and an index is outside of the table."""
    if not (known_on_host(q) and known_on_host(cache_batch_idx)):
        return False
    return bool(((cache_batch_idx < 0) | (cache_batch_idx >= rows)).any())


def run_at_once(decode: Callable[..., Any], *arrays: Array, **options: Any) -> Any:
    """The results of libflash.jax.decode, after they are computed. What XLA refuses when the program runs, possibly after the
    call, raises the library's error here, as for other arrays."""
    import jax

    try:
        return jax.block_until_ready(decode(*arrays, **options))  # type: ignore[no-untyped-call]
    except jax.errors.JaxRuntimeError as error:
        kind, _, text = str(error).partition(": ")
        if kind != "INVALID_ARGUMENT":
            raise
        raise InvalidError(text) from error


def either(names: tuple[str, str], first: Array | None, second: Array | None) -> Array | None:
    """The value of an argument that has two names."""
    if first is not None and second is not None:
        raise InvalidError(f"{names[0]} and {names[1]} are two names of one argument; give one of them")
    return second if first is None else first


def require_arrays(**given: Any) -> None:
    """Refuse lists, numbers and None where the shape of an array is read."""
    for name, x in given.items():
        if not hasattr(x, "shape"):
            raise TypeError(f"{name} must be an array, not {described(x)}")


def check_bound(name: str, bound: Any, cu_seqlens: Any = None, rows: Any = None) -> None:
    """Check an upper bound of lengths that is not passed on: its kind, and where they are known, that no length is above it."""
    if bound is None or is_symbolic(bound) or (hasattr(bound, "dtype") and library_of(bound) and not known_on_host(bound)):
        return
    given = integer(bound, name)
    if given < 0:
        raise InvalidError(f"{name} is {given}; it must be positive, or 0 or None if not known")
    if given == 0:
        return
    if rows is not None and not is_symbolic(rows) and given < rows:
        raise InvalidError(f"{name} is {given}; it must be at least every length, and q has {rows} rows of each sequence")
    if cu_seqlens is not None and getattr(cu_seqlens, "ndim", 0) == 1 and known_on_host(cu_seqlens):
        for sequence, (begin, end) in enumerate(pairwise(cu_seqlens.tolist())):
            if end - begin > given:
                raise InvalidError(f"{name} is {given}; it must be at least every length (sequence {sequence} has {end - begin})")


def check_numbers(**numbers: Any) -> None:
    """Check numbers that are not passed on if they are 0."""
    for name, x in numbers.items():
        if x is None:
            raise TypeError(f"{name} must be a number, not None")
        if type(x) is not int and type(x) is not float:
            refuse_traced(x, name)
            refuse_bool(x, name)


def is_instance(x: Any, library: str, name: str) -> bool:
    """Whether x is an instance of library.name. A library that is not imported cannot have made it."""
    return isinstance(x, getattr(sys.modules.get(library), name, ()))


def is_tensor(x: Any) -> bool:
    """Whether x is PyTorch's."""
    return is_instance(x, "torch", "Tensor")


def is_symbolic(x: Any) -> bool:
    """Whether x is a symbolic size of PyTorch. A conversion to an int would fix it."""
    return is_instance(x, "torch", "SymInt")


def size(x: Any, name: str) -> int:
    """An int of Python from an integer of any library; a symbolic size as it is."""
    return x if is_symbolic(x) else integer(x, name)


def sequences(cu_seqlens: Any) -> int:
    """The number of packed sequences. len() would fix a symbolic size."""
    return (cu_seqlens.shape[0] if hasattr(cu_seqlens, "shape") else len(cu_seqlens)) - 1


def check_hints(pack_gqa: Any, sm_margin: Any) -> None:
    if pack_gqa is not None and type(pack_gqa) is not bool:
        _core.flag(pack_gqa, "pack_gqa")
    if integer(sm_margin, "sm_margin") < 0:
        raise InvalidError(f"sm_margin is {sm_margin}; it must not be negative")


def refuse(attention_chunk: int, q_descale: Array | None) -> None:
    if integer(attention_chunk, "attention_chunk"):
        raise UnsupportedError(f"attention_chunk is {attention_chunk}; attention in chunks is not supported: it must be 0")
    if q_descale is not None:
        raise UnsupportedError("q_descale: q of 8 bits is not supported; pass q in 16 bits, multiplied by its scale")


def check_rotary_seqlens(rotary_seqlens: Array | None, cache_seqlens: Any, rotary_cos: Array | None) -> None:
    """Check rotary_seqlens, the begin of the rotary positions. It needs rotary_cos, and only its default is supported."""
    if rotary_seqlens is not None and rotary_cos is not None and rotary_seqlens is not cache_seqlens:
        raise UnsupportedError(
            "rotary_seqlens is not the tensor given as cache_seqlens; rotary positions other than those of the cached rows are "
            "not supported"
        )


def refuse_without_pages(**given: Array | None) -> None:
    """Refuse arguments that only keys and values in a cache have."""
    for name, x in given.items():
        if x is not None:
            raise UnsupportedError(f"{name} is for keys in a cache: flash_attn_varlen_func with block_table, or "
                                   "flash_attn_with_kvcache")  # fmt: skip


def library_of(x: Array) -> Any:
    """The module with array functions for this array; None for unknown libraries."""
    for name, array in (("torch", "Tensor"), ("numpy", "ndarray"), ("jax.numpy", "ndarray")):
        module = sys.modules.get(name)
        if module is not None and isinstance(x, getattr(module, array)):
            return module
    return None


def known_on_host(x: Array) -> bool:
    """Whether the values of the array are known, and reading them does not wait for a GPU."""
    library = library_of(x)
    if library is None or is_traced(x):
        return False
    if library.__name__ == "torch":
        from ._torch_eager import has_values

        return x.device.type == "cpu" and has_values(x)
    return library.__name__ == "numpy" or all(device.platform == "cpu" for device in x.devices())


def rows_of_table(block_table: Array, cache_batch_idx: Array) -> Array:
    """The rows of the block table for the sequences of a call, in their order."""
    require_arrays(block_table=block_table, cache_batch_idx=cache_batch_idx)
    shapes = tuple(block_table.shape), tuple(cache_batch_idx.shape)
    if len(shapes[0]) != 2 or len(shapes[1]) != 1:
        raise InvalidError(f"block_table has shape {shapes[0]} and cache_batch_idx {shapes[1]}; they need 2 dimensions and 1")
    library = library_of(block_table)
    if library is None:
        raise UnsupportedError(
            f"cache_batch_idx with block_table is not for {type(block_table).__name__}: pass the lines of the table"
        )
    # An index outside of the table gets no pages. Without a table, such an entry of cache_batch_idx gets no keys.
    known = (cache_batch_idx >= 0) & (cache_batch_idx < block_table.shape[0])
    return library.where(known[:, None], block_table[library.where(known, cache_batch_idx, 0)], -1)


def with_qv(
    q: Array, k_cache: Array, v_cache: Array, qv: Array, options: dict[str, Any]
) -> tuple[Array, Array, None, dict[str, Any]]:
    """The arguments of libflash.decode for scores q k + qv v: the keys are the channels of v followed by those of k, which the
    rotary embedding rotates."""
    require_arrays(q=q, k_cache=k_cache, v_cache=v_cache, qv=qv)
    if options.get("k_scale") is not None:
        raise UnsupportedError("k_descale is not supported together with qv: k_cache has q's type")
    if qv.ndim != q.ndim or qv.shape[:-1] != q.shape[:-1] or qv.shape[-1] != v_cache.shape[-1]:
        raise InvalidError(
            f"qv has shape {tuple(qv.shape)}; it needs {tuple(q.shape[:-1])} and the {v_cache.shape[-1]} channels of v_cache"
        )
    changed = dict(
        options, k_rope_cache=k_cache, head_dim_v=v_cache.shape[-1], k=options.get("v"), v=None, k_rope=options.get("k"),
        k_scale=options.get("v_scale"), v_scale=None,
    )  # fmt: skip
    return joined(qv, q), v_cache, None, changed


def joined(a: Array, b: Array) -> Array:
    """a and b, concatenated along the last dimension."""
    library = library_of(a)
    if library is None or library.__name__ == "jax.numpy":
        raise UnsupportedError(f"qv is for PyTorch tensors and NumPy arrays, not {type(a).__name__}; use libflash.decode")
    return library.concatenate((a, b), -1)
