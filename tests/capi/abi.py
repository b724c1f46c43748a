"""The C ABI seen through ctypes: structs, prototypes, and NumPy arrays as tensors.

The structs are read from the text of include/libflash.h, independently of the Cython module and of a compiler, so that each
checks the others; test_header.py compares them with abi_layout.txt, the layout of the last release.
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


def constant(text: str) -> int:
    """A number, or the name of one in the header."""
    return int(text) if text.isdecimal() else int(re.search(rf"#define {text} (\d+)", HEADER_TEXT)[1])


def header_struct(name: str) -> type[c.Structure]:
    """A struct of the header, from its text."""
    body = re.search(rf"^typedef struct {name} {{\n(.*?)^}} {name};", HEADER_TEXT, re.M | re.S)[1]
    body = re.sub(r"/\*.*?\*/", "", body, flags=re.S)
    lines = [line.strip() for line in body.splitlines() if line.strip()]
    fields = [re.fullmatch(r"(?:const )?(\w+) (\*?)(\w+)(?:\[(\w+)\])?;", line) for line in lines]
    return type(name, (c.Structure,), {"_fields_": [(field[3], field_type(*field.group(1, 2, 4))) for field in fields]})


def field_type(name: str, star: str, count: str | None) -> Any:
    if star:
        return POINTERS[name]
    kind = STRUCTS.get(name) or NUMBERS[name]
    return kind * constant(count) if count else kind


HEADER_TEXT = HEADER.read_text()
NUMBERS = {f"{sign}int{bits}_t": getattr(c, f"c_{sign}int{bits}") for sign in ("", "u") for bits in (32, 64)}
NUMBERS |= {"double": c.c_double, "char": c.c_char}
POINTERS: dict[str, Any] = {"void": c.c_void_p, "char": c.c_char_p}
STRUCTS: dict[str, type[c.Structure]] = {}
for _name in re.findall(r"^typedef struct (\w+) {", HEADER_TEXT, re.M):
    STRUCTS[_name] = header_struct(_name)
    POINTERS[_name] = c.POINTER(STRUCTS[_name])

Tensor, BlockLists = STRUCTS["flash_tensor_t"], STRUCTS["flash_block_lists_t"]
AttentionOptions, Tangents = STRUCTS["flash_attention_options_t"], STRUCTS["flash_tangents_t"]
DecodeOptions, MergeOptions = STRUCTS["flash_decode_options_t"], STRUCTS["flash_merge_options_t"]
CacheWriteOptions = STRUCTS["flash_cache_write_options_t"]
KernelInfo, DeviceInfo = STRUCTS["flash_kernel_info_t"], STRUCTS["flash_device_info_t"]
TensorPointer = POINTERS["flash_tensor_t"]

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
    "flash_attention_decode_schedule_size": (c.c_int, [_T] * 5 + [_D, *_SIZE]),
    "flash_attention_decode_schedule": (c.c_int, [_T] * 5 + [_D, _T, c.c_void_p]),
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
