"""Good calls of every function, and the bad cases (bad_cases_*.py): each changes one thing of a good call."""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import abi
import ml_dtypes
import numpy as np

# Operations of a case.
FORWARD, BACKWARD, BOTH = ("forward",), ("backward",), ("forward", "backward")
ALL3 = ("forward", "backward", "decode")
TANGENTS = ("forward_tangent", "backward_tangent")

B, SQ, SK, HQ, HK, D, DV = 2, 5, 7, 4, 2, 8, 6
LENGTHS_Q, LENGTHS_K, LENGTHS_NEW = (2, 3), (4, 3), (1, 2)
BF16 = np.dtype(ml_dtypes.bfloat16)
POISON = 0x5A


def floats(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def poisoned(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    array = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8).fill(POISON)
    return array


GUARD = 4096


def guarded(array: np.ndarray) -> np.ndarray:
    """A copy between guard bands, so that a tensor that a bad case moves or enlarges overlaps no other one by accident."""
    block = np.full(array.nbytes + 2 * GUARD, POISON, np.uint8)
    copy = block[GUARD : GUARD + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@dataclass
class Case:
    """A call: `tensors` are its arguments in order (None: NULL), `options` the fields of its options struct."""

    function: str
    tensors: dict[str, abi.Tensor | None] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    tangents: dict[str, Any] = field(default_factory=dict)  # fields of flash_tangents_t
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    count: int = 0  # merge
    lists: Any = None  # compress
    null: set[str] = field(default_factory=set)  # arguments other than tensors that are NULL
    struct_tail: bytes | None = None
    short_workspace: str = ""
    index: int = 0  # kernel_info, device_info
    info_size: int | None = None
    capacity: int = 4096

    def put(self, name: str, array: np.ndarray, output: bool = False) -> abi.Tensor:
        """A tensor argument."""
        self.arrays[name] = guarded(array)
        self.tensors[name] = view = abi.tensor(self.arrays[name])
        if output:
            self.outputs.append(name)
        return view

    def option(self, name: str, array: np.ndarray, output: bool = False) -> abi.Tensor:
        """A tensor of the options."""
        self.arrays[name] = guarded(array)
        self.options[name] = view = abi.tensor(self.arrays[name])
        if output:
            self.outputs.append(name)
        return view

    def tangent(self, name: str, array: np.ndarray, output: bool = False) -> abi.Tensor:
        """A tensor of the tangents; its full name is "tangents.q"."""
        full = f"tangents.{name}"
        self.arrays[full] = guarded(array)
        self.tangents[name] = view = abi.tensor(self.arrays[full])
        if output:
            self.outputs.append(full)
        return view

    def no_options(self) -> None:
        """Also without the tangents that need an option."""
        self.options = {}
        for name in ("bias", "learnable_sink", "dbias", "dsink"):
            self.tangents.pop(name, None)

    def get(self, name: str) -> abi.Tensor:
        if name.startswith("tangents."):
            return self.tangents[name.removeprefix("tangents.")]
        for where in (self.tensors, self.options):
            if isinstance(where.get(name), abi.Tensor):
                return where[name]
        raise KeyError(name)


Change = Callable[[Case], Any]


def field_bytes(size: int, at: int) -> bytes:
    """Zeros except one byte."""
    return bytes(at) + b"\x01" + bytes(size - at - 1)


def setting(name: str, **fields: Any) -> Change:
    """Plain fields of a tensor: dtype, ndim, data, ..."""

    def change(case: Case) -> None:
        for key, value in fields.items():
            setattr(case.get(name), key, value)

    return change


def sizing(name: str, axis: int, size: int) -> Change:
    return lambda case: case.get(name).shape.__setitem__(axis, size)


def striding(name: str, axis: int, stride: int) -> Change:
    return lambda case: case.get(name).stride.__setitem__(axis, stride)


def with_options(**fields: Any) -> Change:
    return lambda case: case.options.update(fields)


def with_tensor(name: str, make: Callable[[], np.ndarray], output: bool = False) -> Change:
    """Adds or replaces a tensor of the options."""
    return lambda case: case.option(name, make(), output)


def instead(name: str, make: Callable[[], np.ndarray]) -> Change:
    """Replaces a tensor argument."""
    return lambda case: case.put(name, make(), name in case.outputs and not case.outputs.remove(name))


def with_tangent(name: str, make: Callable[[], np.ndarray], output: bool = False) -> Change:
    """Adds or replaces a tensor of the tangents."""
    return lambda case: case.tangent(name, make(), output)


def without(name: str) -> Change:
    def change(case: Case) -> None:
        if name.startswith("tangents."):
            case.tangents[name.removeprefix("tangents.")] = None
        elif name in case.tensors:
            case.tensors[name] = None
        else:
            case.options[name] = None

    return change


def null(name: str) -> Change:
    return lambda case: case.null.add(name)


def on_cuda(name: str) -> Change:
    return setting(name, device_type=abi.CUDA_DEVICE)


def aliasing(name: str, other: str, offset_bytes: int = 0) -> Change:
    """`name` gets the memory of `other`, so the two overlap."""
    return lambda case: setattr(case.get(name), "data", case.get(other).data + offset_bytes)


def both(*changes: Change) -> Change:
    def change(case: Case) -> None:
        for one in changes:
            one(case)

    return change


@dataclass(frozen=True)
class Bad:
    """One refusal: what to change in a good call, and the expected status and text, `argument: rule (value)`."""

    id: str
    functions: tuple[str, ...]
    change: Change
    argument: str
    rule: str
    value: str
    status: int = abi.INVALID
    base: str = "dense"
    data: bool = False  # found by the call alone: the workspace query and explain do not read data


def attention(function: str, base: str) -> Case:
    backward = function in {"backward", "backward_tangent"}
    case = Case(function)
    packed_q, packed_k = base in {"packed", "packed_q"}, base in {"packed", "packed_k"}
    dtype = {"bf16": BF16, "f64": np.float64}.get(base, np.float32)
    lse_dtype = np.float64 if base == "f64" else np.float32
    total_q, total_k = sum(LENGTHS_Q) + 1, sum(LENGTHS_K) + 2
    rows_q, rows_k = (total_q,) if packed_q else (B, SQ), (total_k,) if packed_k else (B, SK)
    lse_shape = (HQ, total_q) if packed_q else (B, HQ, SQ)
    if backward:
        case.put("dout", floats(*rows_q, HQ, DV, dtype=dtype))
    case.put("q", floats(*rows_q, HQ, D, dtype=dtype))
    case.put("k", floats(*rows_k, HK, D, dtype=dtype))
    case.put("v", floats(*rows_k, HK, DV, dtype=dtype))
    if backward:
        case.put("out", floats(*rows_q, HQ, DV, dtype=dtype))
        case.put("lse", floats(*lse_shape, dtype=lse_dtype))
        case.put("dq", poisoned(*rows_q, HQ, D, dtype=dtype), output=True)
        case.put("dk", poisoned(*rows_k, HK, D, dtype=dtype), output=True)
        case.put("dv", poisoned(*rows_k, HK, DV, dtype=dtype), output=True)
    else:
        case.put("out", poisoned(*rows_q, HQ, DV, dtype=dtype), output=True)
        case.put("lse", poisoned(*lse_shape, dtype=lse_dtype), output=True)
    if packed_q:
        case.option("cu_seqlens_q", np.cumsum((0, *LENGTHS_Q), dtype=np.int32))
    if packed_k:
        case.option("cu_seqlens_k", np.cumsum((0, *LENGTHS_K), dtype=np.int32))
    if base == "blocks":
        mask = np.ones((1, HQ, 1, 1), np.bool_)
        case.options["block_lists"], kept = abi.compress(mask)
        case.arrays.update(zip(("row_counts", "row_indices", "col_counts", "col_indices"), kept, strict=True))
    if function in TANGENTS:
        add_tangents(case)
    return case


def add_tangents(case: Case) -> None:
    """Of every input, bias and sink included; every output."""
    like = case.arrays
    wide = like["lse"].dtype
    for name, shape in {"bias": (SQ, SK), "learnable_sink": (HQ,)}.items():
        case.option(name, floats(*shape, dtype=wide))
    for name in ("q", "k", "v", "bias", "learnable_sink"):
        case.tangent(name, floats(*like[name].shape, dtype=like[name].dtype))
    backward = case.function == "backward_tangent"
    for name in ("out", "lse"):
        made = (floats if backward else poisoned)(*like[name].shape, dtype=like[name].dtype)
        case.tangent(name, made, output=not backward)
    if not backward:
        case.tangent("delta", poisoned(*like["lse"].shape, dtype=wide), output=True)
        case.tangent("cotangent", floats(*like["out"].shape, dtype=like["out"].dtype))
    case.tangent("dout", floats(*like["out"].shape, dtype=like["out"].dtype))
    case.tangent("dlse", floats(*like["lse"].shape, dtype=wide))
    if backward:
        for name, of in {"dq": "q", "dk": "k", "dv": "v", "dbias": "bias", "dsink": "learnable_sink"}.items():
            case.tangent(name, poisoned(*like[of].shape, dtype=like[of].dtype), output=True)


CAPACITY, NEW, ENTRIES, PAGE_SIZE, PAGES, COLUMNS = 12, 2, 3, 4, 8, 3


def decode(base: str) -> Case:
    case = Case("decode")
    paged, packed = base == "paged", base == "packed"
    cache = (PAGES, PAGE_SIZE) if paged else (ENTRIES, CAPACITY)
    rows, new = ((sum(LENGTHS_Q) + 1,), (sum(LENGTHS_NEW) + 1,)) if packed else ((B, SQ), (B, NEW))
    case.put("q", floats(*rows, HQ, D))
    case.put("k_cache", floats(*cache, HK, D), output=True)
    case.put("v_cache", floats(*cache, HK, DV), output=True)
    case.put("out", poisoned(*rows, HQ, DV), output=True)
    case.put("lse", poisoned(*((HQ, *rows) if packed else (B, HQ, SQ))), output=True)
    case.option("cache_seqlens", ints(6, 9))
    case.option("k_new", floats(*new, HK, D))
    case.option("v_new", floats(*new, HK, DV))
    case.option("rotary_cos", floats(20, 3))
    case.option("rotary_sin", floats(20, 3))
    case.options["flags"] = abi.CAUSAL
    if packed:
        case.option("cu_seqlens_q", np.cumsum((0, *LENGTHS_Q)).astype(np.int32))
        case.option("cu_seqlens_new", np.cumsum((0, *LENGTHS_NEW)).astype(np.int32))
    if paged:
        case.option("block_table", np.array([[0, 1, 2], [3, 4, 5]], np.int32))
    else:
        case.option("cache_batch_idx", ints(2, 0))
        if not packed:
            case.option("cache_leftpad", ints(1, 0))
    return case


ROWS_TO_WRITE = 4


def cache_write(base: str) -> Case:
    """With a rope part, or else with a rotary embedding; "codes": a cache of int8 with scales of rows."""
    case = Case("cache_write")
    dtype = np.int8 if base == "codes" else np.float32
    case.put("k_new", floats(ROWS_TO_WRITE, HK, D))
    case.put("v_new", floats(ROWS_TO_WRITE, HK, DV))
    case.put("k_cache", floats(PAGES, PAGE_SIZE, HK, D, dtype=dtype), output=True)
    case.put("v_cache", floats(PAGES, PAGE_SIZE, HK, DV, dtype=dtype), output=True)
    case.put("slots", np.array([5, -1, 31, 0], np.int64))
    if base == "codes":
        case.option("k_scale", floats(PAGES, PAGE_SIZE, HK), output=True)
        case.option("v_scale", floats(PAGES, PAGE_SIZE, HK, 2), output=True)
    if base == "rope":
        case.option("k_rope_cache", floats(PAGES, PAGE_SIZE, HK, 3), output=True)
        case.option("k_rope_new", floats(ROWS_TO_WRITE, HK, 3))
    else:
        case.option("rotary_cos", floats(20, 3))
        case.option("rotary_sin", floats(20, 3))
        case.option("positions", ints(3, 99, 19, 0))  # the row that is skipped may have any
    return case


def merge(base: str) -> Case:
    case = Case("merge", count=2)
    rows = (9,) if base == "packed" else (B, SQ)
    for n in range(2):
        case.put(f"outs[{n}]", floats(*rows, HQ, DV))
        case.put(f"lses[{n}]", floats(*((HQ, 9) if base == "packed" else (B, HQ, SQ))))
    case.put("out", poisoned(*rows, HQ, DV, dtype=BF16), output=True)
    case.put("lse", poisoned(*((HQ, 9) if base == "packed" else (B, HQ, SQ))), output=True)
    return case


def compress() -> Case:
    case = Case("compress")
    case.put("block_mask", np.ones((B, 1, 3, 4), np.bool_))
    case.lists, arrays = abi.block_lists((B, 1, 3, 4))
    for name, array in zip(("row_counts", "row_indices", "col_counts", "col_indices"), arrays, strict=True):
        case.arrays[name] = array
        case.outputs.append(name)
    return case


def build(function: str, base: str) -> Case:
    if function in {*BOTH, *TANGENTS}:
        return attention(function, base)
    builders = {"decode": decode, "merge": merge, "cache_write": cache_write}
    if function in builders:
        return builders[function](base)
    return compress() if function == "compress" else Case(function)


OPTION_TYPES = {
    "forward": abi.AttentionOptions,
    "backward": abi.AttentionOptions,
    "forward_tangent": abi.AttentionOptions,
    "backward_tangent": abi.AttentionOptions,
    "decode": abi.DecodeOptions,
    "merge": abi.MergeOptions,
    "cache_write": abi.CacheWriteOptions,
}


def options_of(case: Case) -> Any:
    """The options struct, followed by `struct_tail`; the case keeps the arrays alive."""
    kind = OPTION_TYPES[case.function]
    if "options" in case.null:
        return None
    given = abi.options(kind, **case.options)
    if case.struct_tail is None:
        return given
    size = c.sizeof(kind)
    block = c.create_string_buffer(bytes(given) + case.struct_tail, size + len(case.struct_tail))
    pointed = c.cast(block, c.POINTER(kind))
    pointed.kept = (block, given)
    if case.struct_tail and "struct_size" not in case.options:
        pointed.contents.struct_size = size + len(case.struct_tail)
    return pointed


def tangents_of(case: Case, keep_data: bool = True) -> list[Any]:
    """The tangents struct, for the functions that have one."""
    if case.function not in TANGENTS:
        return []
    if "tangents" in case.null:
        return [None]
    fields = dict(case.tangents)
    if not keep_data:
        for name, view in fields.items():
            if isinstance(view, abi.Tensor):
                fields[name] = abi.Tensor.from_buffer_copy(view)
                fields[name].data = None
    return [abi.options(abi.Tangents, **fields)]


def query(case: Case, opts: Any) -> tuple[int, int]:
    """Status and bytes of the workspace query. The query must not read data, so all pointers are NULL."""
    size = c.c_size_t(12345)
    views = [None if t is None else abi.Tensor.from_buffer_copy(t) for t in case.tensors.values()]
    for view in filter(None, views):
        view.data = None
    prefix = "flash_" if case.function == "cache_write" else "flash_attention_"
    name = f"{prefix}{case.function}_workspace_size"
    structs = [*tangents_of(case, keep_data=False), opts]
    status = getattr(abi.lib, name)(*map(abi.pointer, views), *structs, None if "bytes" in case.null else c.byref(size))
    return status, size.value


def explain(case: Case, opts: Any) -> int:
    inputs = ("q", "k_cache", "v_cache") if case.function == "decode" else ("q", "k", "v")
    views = [abi.pointer(case.tensors[name]) for name in inputs]
    function = getattr(abi.lib, f"flash_attention_{case.function}_explain")
    text = None if "text" in case.null else c.create_string_buffer(case.capacity)
    return function(*views, *tangents_of(case), opts, text, case.capacity, None)


def call(case: Case) -> int:
    if case.function == "merge":
        return call_merge(case)
    if case.function == "compress":
        lists = None if "lists" in case.null else c.byref(case.lists)
        return abi.lib.flash_block_mask_compress(abi.pointer(case.tensors["block_mask"]), lists, None)
    if case.function == "kernel_info":
        return call_info(case, abi.KernelInfo, abi.lib.flash_kernel_info)
    if case.function == "device_info":
        return call_info(case, abi.DeviceInfo, abi.lib.flash_device_info)
    opts = options_of(case)
    if case.function == "cache_write":
        return abi.lib.flash_cache_write(*map(abi.pointer, case.tensors.values()), opts, None)
    needed = query(case, opts)[1] if case.short_workspace else 1 << 22
    work = abi.Workspace(needed)
    address, size = work.address, work.size
    if case.short_workspace == "null":
        address = None
    elif case.short_workspace == "short":
        size = needed - 1
    elif case.short_workspace == "misaligned":
        address += 64
    views = map(abi.pointer, case.tensors.values())
    return getattr(abi.lib, f"flash_attention_{case.function}")(*views, *tangents_of(case), opts, address, size, None)


def call_merge(case: Case) -> int:
    outs = (abi.Tensor * 2)(case.tensors["outs[0]"], case.tensors["outs[1]"])
    lses = (abi.Tensor * 2)(case.tensors["lses[0]"], case.tensors["lses[1]"])
    views = (abi.pointer(case.tensors["out"]), abi.pointer(case.tensors["lse"]))
    parts = (None if "outs" in case.null else outs, None if "lses" in case.null else lses)
    return abi.lib.flash_attention_merge(*parts, case.count, *views, options_of(case), None)


def call_info(case: Case, kind: type[c.Structure], function: Any) -> int:
    info = kind(struct_size=c.sizeof(kind) if case.info_size is None else case.info_size)
    return function(case.index, None if "info" in case.null else c.byref(info))
