"""The C ABI seen through ctypes: structs, prototypes, and NumPy arrays as tensors.

It repeats include/libflash.h independently of the Cython module on purpose, so that each checks the other.
"""

from __future__ import annotations

import ctypes as c
import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from library_name import soname

ROOT = Path(__file__).resolve().parents[2]
HEADER = ROOT / "include" / "libflash.h"

OK, INVALID, UNSUPPORTED, VERSION, WORKSPACE, NO_DEVICE, CUDA, OUT_OF_MEMORY, INTERNAL, CANCELLED = range(10)
NONE, FLOAT16, BFLOAT16, FLOAT32, FLOAT64, INT32, BOOL, INT64, E4M3, E5M2, INT8 = range(11)
CPU_DEVICE, CUDA_DEVICE = 0, 1
CAUSAL, TOP_LEFT, WINDOW, SCALE, DETERMINISTIC, ROTARY_INTERLEAVED = 1, 2, 4, 8, 16, 32
FROM_LSE = 64
POSITIONS, CONTINUE, ADD = 128, 256, 512
INVARIANT_ROWS = 1024
MAX_NDIM = 4

DTYPES = {
    np.dtype(np.float16): FLOAT16,
    np.dtype(ml_dtypes.bfloat16): BFLOAT16,
    np.dtype(np.float32): FLOAT32,
    np.dtype(np.float64): FLOAT64,
    np.dtype(np.int32): INT32,
    np.dtype(np.bool_): BOOL,
    np.dtype(np.int64): INT64,
    np.dtype(ml_dtypes.float8_e4m3fn): E4M3,
    np.dtype(ml_dtypes.float8_e5m2): E5M2,
    np.dtype(np.int8): INT8,
}


class Tensor(c.Structure):
    _fields_ = (
        ("data", c.c_void_p),
        ("dtype", c.c_int32),
        ("device_type", c.c_int32),
        ("device_id", c.c_int32),
        ("ndim", c.c_int32),
        ("shape", c.c_int64 * MAX_NDIM),
        ("stride", c.c_int64 * MAX_NDIM),
    )


TensorPointer = c.POINTER(Tensor)


class BlockLists(c.Structure):
    _fields_ = (("row_counts", Tensor), ("row_indices", Tensor), ("col_counts", Tensor), ("col_indices", Tensor))


class AttentionOptions(c.Structure):
    _fields_ = (
        ("struct_size", c.c_uint32),
        ("flags", c.c_uint32),
        ("softmax_scale", c.c_double),
        ("softcap", c.c_double),
        ("dropout_p", c.c_double),
        ("seed", c.c_uint64),
        ("offset", c.c_uint64),
        ("window_left", c.c_int64),
        ("window_right", c.c_int64),
        ("max_seqlen_q", c.c_int64),
        ("max_seqlen_k", c.c_int64),
        ("num_splits", c.c_int64),
        ("cu_seqlens_q", TensorPointer),
        ("cu_seqlens_k", TensorPointer),
        ("seqused_q", TensorPointer),
        ("seqused_k", TensorPointer),
        ("alibi_slopes", TensorPointer),
        ("bias", TensorPointer),
        ("mask", TensorPointer),
        ("learnable_sink", TensorPointer),
        ("block_mask", TensorPointer),
        ("block_lists", c.POINTER(BlockLists)),
        ("dlse", TensorPointer),
        ("dbias", TensorPointer),
        ("dsink", TensorPointer),
        ("backend", c.c_char_p),
        ("kernel", c.c_char_p),
        ("num_threads", c.c_int32),
        ("tile_q", c.c_int32),
        ("tile_k", c.c_int32),
        ("reserved", c.c_int32),
        ("rng_state", TensorPointer),
        ("row_begin", c.c_int64),
        ("row_step", c.c_int64),
        ("column_begin", c.c_int64),
        ("column_step", c.c_int64),
        ("row_begins", TensorPointer),
        ("column_begins", TensorPointer),
        ("row_positions", TensorPointer),
        ("column_positions", TensorPointer),
        ("sequence_numbers", TensorPointer),
        ("head_begin", c.c_int64),
        ("heads_total", c.c_int64),
        ("delta", TensorPointer),
        ("sm_margin", c.c_int32),
        ("reserved2", c.c_int32),
        ("max_logit", TensorPointer),
        ("entropy", TensorPointer),
    )


class Tangents(c.Structure):
    _fields_ = (
        ("struct_size", c.c_uint32),
        ("flags", c.c_uint32),
        ("q", TensorPointer),
        ("k", TensorPointer),
        ("v", TensorPointer),
        ("bias", TensorPointer),
        ("learnable_sink", TensorPointer),
        ("out", TensorPointer),
        ("lse", TensorPointer),
        ("dout", TensorPointer),
        ("dlse", TensorPointer),
        ("delta", TensorPointer),
        ("cotangent", TensorPointer),
        ("dq", TensorPointer),
        ("dk", TensorPointer),
        ("dv", TensorPointer),
        ("dbias", TensorPointer),
        ("dsink", TensorPointer),
    )


class DecodeOptions(c.Structure):
    _fields_ = (
        ("struct_size", c.c_uint32),
        ("flags", c.c_uint32),
        ("softmax_scale", c.c_double),
        ("softcap", c.c_double),
        ("window_left", c.c_int64),
        ("window_right", c.c_int64),
        ("num_splits", c.c_int64),
        ("split_size", c.c_int64),
        ("cache_seqlens", TensorPointer),
        ("block_table", TensorPointer),
        ("cache_batch_idx", TensorPointer),
        ("cache_leftpad", TensorPointer),
        ("k_new", TensorPointer),
        ("v_new", TensorPointer),
        ("rotary_cos", TensorPointer),
        ("rotary_sin", TensorPointer),
        ("alibi_slopes", TensorPointer),
        ("learnable_sink", TensorPointer),
        ("backend", c.c_char_p),
        ("kernel", c.c_char_p),
        ("num_threads", c.c_int32),
        ("reserved", c.c_int32),
        ("k_scale", TensorPointer),
        ("v_scale", TensorPointer),
        ("k_rope_cache", TensorPointer),
        ("k_rope_new", TensorPointer),
        ("cu_seqlens_q", TensorPointer),
        ("cu_seqlens_new", TensorPointer),
        ("q_positions", TensorPointer),
        ("tree_mask", TensorPointer),
        ("cu_seqlens_tree", TensorPointer),
        ("shared_groups", TensorPointer),
        ("shared_lens", TensorPointer),
        ("shard_count", c.c_int64),
        ("shard_index", c.c_int64),
        ("shard_keys", c.c_int64),
    )


class MergeOptions(c.Structure):
    _fields_ = (
        ("struct_size", c.c_uint32),
        ("flags", c.c_uint32),
        ("backend", c.c_char_p),
        ("kernel", c.c_char_p),
        ("num_threads", c.c_int32),
        ("reserved", c.c_int32),
    )


class CacheWriteOptions(c.Structure):
    _fields_ = (
        ("struct_size", c.c_uint32),
        ("flags", c.c_uint32),
        ("k_scale", TensorPointer),
        ("v_scale", TensorPointer),
        ("k_rope_cache", TensorPointer),
        ("k_rope_new", TensorPointer),
        ("rotary_cos", TensorPointer),
        ("rotary_sin", TensorPointer),
        ("positions", TensorPointer),
        ("backend", c.c_char_p),
        ("kernel", c.c_char_p),
        ("num_threads", c.c_int32),
        ("reserved", c.c_int32),
    )


class KernelInfo(c.Structure):
    _fields_ = (
        ("struct_size", c.c_uint32),
        ("usable", c.c_int32),
        ("name", c.c_char_p),
        ("operation", c.c_char_p),
        ("backend", c.c_char_p),
        ("dtype", c.c_char_p),
        ("why_not", c.c_char_p),
        ("head_dim", c.c_int32),
        ("head_dim_v", c.c_int32),
        ("tile_q", c.c_int32),
        ("tile_k", c.c_int32),
        ("stages", c.c_int32),
        ("reserved", c.c_int32),
    )


class DeviceInfo(c.Structure):
    _fields_ = (
        ("struct_size", c.c_uint32),
        ("arch", c.c_int32),
        ("multiprocessors", c.c_int32),
        ("shared_memory_bytes", c.c_int32),
        ("memory_bytes", c.c_int64),
        ("name", c.c_char * 256),
    )


_T = TensorPointer
_A, _D, _M = c.POINTER(AttentionOptions), c.POINTER(DecodeOptions), c.POINTER(MergeOptions)
_TAN = c.POINTER(Tangents)
_WORK = [c.c_void_p, c.c_size_t, c.c_void_p]
_SIZE = [c.POINTER(c.c_size_t)]
_TEXT = [c.c_char_p, c.c_size_t, c.POINTER(c.c_size_t)]

INTERRUPT = c.CFUNCTYPE(c.c_int32, c.c_void_p)

# Result and arguments of every function of the header.
PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    "flash_version": (c.c_int32, []),
    "flash_version_string": (c.c_char_p, []),
    "flash_status_name": (c.c_char_p, [c.c_int]),
    "flash_last_error": (c.c_char_p, []),
    "flash_attention_forward": (c.c_int, [_T] * 5 + [_A, *_WORK]),
    "flash_attention_forward_workspace_size": (c.c_int, [_T] * 5 + [_A, *_SIZE]),
    "flash_attention_backward": (c.c_int, [_T] * 9 + [_A, *_WORK]),
    "flash_attention_backward_workspace_size": (c.c_int, [_T] * 9 + [_A, *_SIZE]),
    "flash_attention_decode": (c.c_int, [_T] * 5 + [_D, *_WORK]),
    "flash_attention_decode_workspace_size": (c.c_int, [_T] * 5 + [_D, *_SIZE]),
    "flash_attention_merge": (c.c_int, [_T, _T, c.c_int32, _T, _T, _M, c.c_void_p]),
    "flash_cache_write": (c.c_int, [_T] * 5 + [c.POINTER(CacheWriteOptions), c.c_void_p]),
    "flash_cache_write_workspace_size": (c.c_int, [_T] * 5 + [c.POINTER(CacheWriteOptions), *_SIZE]),
    "flash_block_mask_compress": (c.c_int, [_T, c.POINTER(BlockLists), c.c_void_p]),
    "flash_attention_forward_explain": (c.c_int, [_T] * 3 + [_A, *_TEXT]),
    "flash_attention_backward_explain": (c.c_int, [_T] * 3 + [_A, *_TEXT]),
    "flash_attention_decode_explain": (c.c_int, [_T] * 3 + [_D, *_TEXT]),
    "flash_attention_forward_tangent": (c.c_int, [_T] * 5 + [_TAN, _A, *_WORK]),
    "flash_attention_forward_tangent_workspace_size": (c.c_int, [_T] * 5 + [_TAN, _A, *_SIZE]),
    "flash_attention_forward_tangent_explain": (c.c_int, [_T] * 3 + [_TAN, _A, *_TEXT]),
    "flash_attention_backward_tangent": (c.c_int, [_T] * 9 + [_TAN, _A, *_WORK]),
    "flash_attention_backward_tangent_workspace_size": (c.c_int, [_T] * 9 + [_TAN, _A, *_SIZE]),
    "flash_attention_backward_tangent_explain": (c.c_int, [_T] * 3 + [_TAN, _A, *_TEXT]),
    "flash_kernel_count": (c.c_int32, []),
    "flash_kernel_info": (c.c_int, [c.c_int32, c.POINTER(KernelInfo)]),
    "flash_device_count": (c.c_int32, []),
    "flash_device_info": (c.c_int, [c.c_int32, c.POINTER(DeviceInfo)]),
    "flash_cuda_state": (c.c_char_p, []),
    "flash_build_info": (c.c_char_p, []),
    "flash_cpu_isa": (c.c_char_p, []),
    "flash_cpu_threads": (c.c_int32, []),
    "flash_set_interrupt": (None, [INTERRUPT, c.c_void_p]),
}


def header_version() -> str:
    return ".".join(re.findall(r"^#define FLASH_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", HEADER.read_text(), re.M))


def library_path() -> Path:
    """The library under test: of the installed package, found without importing it; or LIBFLASH_LIBRARY."""
    if path := os.environ.get("LIBFLASH_LIBRARY"):
        return Path(path)
    spec = importlib.util.find_spec("libflash")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "lib" / soname(header_version())
        if path.exists():
            return path
    raise RuntimeError("libflash is not installed: pip install '.[test]', or set LIBFLASH_LIBRARY to a libflash.so")


def load(path: Path | None = None) -> c.CDLL:
    library = c.CDLL(str(path or library_path()))
    for name, (result, arguments) in PROTOTYPES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


lib = load()


def last_error() -> str:
    return lib.flash_last_error().decode()


def status_name(status: int) -> str:
    return lib.flash_status_name(status).decode()


def tensor(array: np.ndarray | None) -> Tensor | None:
    """A view of the array; the caller keeps the array alive."""
    if array is None:
        return None
    view = Tensor(data=array.ctypes.data, dtype=DTYPES[array.dtype], ndim=array.ndim)
    for i in range(array.ndim):
        view.shape[i] = array.shape[i]
        view.stride[i] = array.strides[i] // array.itemsize
    return view


def pointer(view: Tensor | None) -> Any:
    return c.pointer(view) if view is not None else None


def options(kind: type[c.Structure], **fields: Any) -> Any:
    """An options struct. NumPy arrays and Tensors become tensor pointers; the struct keeps them alive."""
    result = kind(struct_size=c.sizeof(kind))
    kept = []
    for name, value in fields.items():
        if isinstance(value, np.ndarray):
            kept.append(value)
            value = tensor(value)  # noqa: PLW2901
        if isinstance(value, (Tensor, BlockLists)):
            kept.append(value)
            value = c.pointer(value)  # noqa: PLW2901
        setattr(result, name, value)
    result.kept = kept
    return result


class Workspace:
    """An aligned block of exactly this many bytes."""

    def __init__(self, size: int, fill: int = 0xA5) -> None:
        self.size = size
        self.block = np.full(size + 256, fill, np.uint8)
        self.address = -(-self.block.ctypes.data // 256) * 256


class FlashError(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status_name(status)}: {text}")
        self.status, self.text = status, text


def check(status: int) -> None:
    if status != OK:
        raise FlashError(status, last_error())


def _views(arrays: tuple[Any, ...]) -> list[Any]:
    return [pointer(a if isinstance(a, Tensor) else tensor(a)) for a in arrays]


def _run(name: str, arrays: tuple[Any, ...], *structs: Any) -> None:
    views, size = _views(arrays), c.c_size_t()
    check(getattr(lib, name + "_workspace_size")(*views, *structs, c.byref(size)))
    work = Workspace(size.value)
    check(getattr(lib, name)(*views, *structs, work.address, work.size, None))


def forward(q: Any, k: Any, v: Any, out: Any, lse: Any = None, **fields: Any) -> None:
    _run("flash_attention_forward", (q, k, v, out, lse), options(AttentionOptions, **fields))


def backward(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dq: Any, dk: Any, dv: Any, **fields: Any) -> None:
    _run("flash_attention_backward", (dout, q, k, v, out, lse, dq, dk, dv), options(AttentionOptions, **fields))


def forward_tangent(q: Any, k: Any, v: Any, out: Any, lse: Any, tangents: dict[str, Any], **fields: Any) -> None:
    structs = options(Tangents, **tangents), options(AttentionOptions, **fields)
    _run("flash_attention_forward_tangent", (q, k, v, out, lse), *structs)


def backward_tangent(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, gradients: tuple[Any, ...], tangents: dict[str, Any], **fields: Any
) -> None:
    """`gradients`: dq, dk and dv, or three times None."""
    structs = options(Tangents, **tangents), options(AttentionOptions, **fields)
    _run("flash_attention_backward_tangent", (dout, q, k, v, out, lse, *gradients), *structs)


def decode(q: Any, k_cache: Any, v_cache: Any, out: Any, lse: Any = None, **fields: Any) -> None:
    _run("flash_attention_decode", (q, k_cache, v_cache, out, lse), options(DecodeOptions, **fields))


def merge(outs: list[Any], lses: list[Any], out: Any, lse: Any = None, **fields: Any) -> None:
    count = len(outs)
    parts, sums = (Tensor * count)(*map(tensor, outs)), (Tensor * count)(*map(tensor, lses))
    check(lib.flash_attention_merge(parts, sums, count, *_views((out, lse)), options(MergeOptions, **fields), None))


def block_lists(mask_shape: tuple[int, int, int, int]) -> tuple[BlockLists, list[np.ndarray]]:
    """Arrays for the row lists and the column lists of a dense mask of this shape."""
    b, h, nq, nk = mask_shape
    arrays = [np.full(s, -7, np.int32) for s in ((b, h, nq), (b, h, nq, nk), (b, h, nk), (b, h, nk, nq))]
    return BlockLists(*map(tensor, arrays)), arrays


def compress(mask: np.ndarray) -> tuple[BlockLists, list[np.ndarray]]:
    lists, arrays = block_lists(mask.shape)
    check(lib.flash_block_mask_compress(pointer(tensor(mask)), c.byref(lists), None))
    return lists, arrays


def explain(name: str, arrays: tuple[Any, ...], *structs: Any) -> str:
    function, views, needed = getattr(lib, name), _views(arrays), c.c_size_t()
    structs = structs or (None,)
    check(function(*views, *structs, None, 0, c.byref(needed)))
    text = c.create_string_buffer(needed.value)
    check(function(*views, *structs, text, needed.value, None))
    return text.value.decode()


def kernels() -> list[KernelInfo]:
    result = []
    for index in range(lib.flash_kernel_count()):
        info = KernelInfo(struct_size=c.sizeof(KernelInfo))
        check(lib.flash_kernel_info(index, c.byref(info)))
        result.append(info)
    return result
