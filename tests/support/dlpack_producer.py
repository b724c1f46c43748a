"""An array library for the tests: NumPy memory exported in every form that DLPack allows.

The structs repeat DLPack's, in ctypes, independent of python/libflash/_dlpack.pxd.
"""

from __future__ import annotations

import ctypes as c
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
READ_ONLY, COPIED = 1, 2  # bits of `flags`


class Device(c.Structure):
    _fields_ = (("device_type", c.c_int32), ("device_id", c.c_int32))


class DataType(c.Structure):
    _fields_ = (("code", c.c_uint8), ("bits", c.c_uint8), ("lanes", c.c_uint16))


class DLTensor(c.Structure):
    _fields_ = (
        ("data", c.c_void_p),
        ("device", Device),
        ("ndim", c.c_int32),
        ("dtype", DataType),
        ("shape", c.POINTER(c.c_int64)),
        ("strides", c.POINTER(c.c_int64)),
        ("byte_offset", c.c_uint64),
    )


class Managed(c.Structure):
    _fields_ = (("dl_tensor", DLTensor), ("manager_ctx", c.c_void_p), ("deleter", c.c_void_p))


class ManagedVersioned(c.Structure):
    _fields_ = (
        ("major", c.c_uint32),
        ("minor", c.c_uint32),
        ("manager_ctx", c.c_void_p),
        ("deleter", c.c_void_p),
        ("flags", c.c_uint64),
        ("dl_tensor", DLTensor),
    )


DELETER = c.PYFUNCTYPE(None, c.c_void_p)
new_capsule = c.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = c.py_object, (c.c_void_p, c.c_char_p, c.c_void_p)


class Array:
    """`deleted` counts the calls of the deleter, `requests` lists the arguments of __dlpack__."""

    def __init__(
        self,
        array: np.ndarray,
        *,
        legacy: bool = False,
        read_only: bool = False,
        copied: bool = False,
        null_strides: bool = False,
        byte_offset: int = 0,
        lanes: int = 1,
        device: tuple[int, int] = (1, 0),
        version: tuple[int, int] = (1, 0),
        code: int | None = None,
        null_data: bool = False,
        no_deleter: bool = False,
        same_capsule: bool = False,
    ) -> None:
        self.array, self.device = array, device
        self.legacy, self.null_strides, self.byte_offset = legacy, null_strides, byte_offset
        self.flags = READ_ONLY * read_only | COPIED * copied
        self.lanes, self.version, self.code, self.null_data = lanes, version, code, null_data
        self.no_deleter, self.same_capsule = no_deleter, same_capsule
        self.deleted, self.requests = 0, []
        self.alive: list[Any] = []  # what exports point to
        self.capsule: Any = None

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **arguments: Any) -> Any:
        self.requests.append(arguments)
        if not self.same_capsule or self.capsule is None:
            self.capsule = self.export()
        return self.capsule

    def view(self) -> DLTensor:
        x = self.array
        shape = (c.c_int64 * x.ndim)(*x.shape)
        strides = (c.c_int64 * x.ndim)(*(s // x.itemsize for s in x.strides))
        self.alive += [shape, strides]
        code = CODES[x.dtype.kind] if self.code is None else self.code
        return DLTensor(
            data=None if self.null_data else x.ctypes.data - self.byte_offset,
            device=Device(*self.device),
            ndim=x.ndim,
            dtype=DataType(code, 8 * x.itemsize, self.lanes),
            shape=c.cast(shape, c.POINTER(c.c_int64)),
            strides=None if self.null_strides else c.cast(strides, c.POINTER(c.c_int64)),
            byte_offset=self.byte_offset,
        )

    def export(self) -> Any:
        deleter = DELETER(self.delete)
        address = None if self.no_deleter else c.cast(deleter, c.c_void_p)
        if self.legacy:
            made: Any = Managed(self.view(), None, address)
            name = b"dltensor"
        else:
            made = ManagedVersioned(*self.version, None, address, self.flags, self.view())
            name = b"dltensor_versioned"
        self.alive += [deleter, made]
        return new_capsule(c.addressof(made), name, None)

    def delete(self, _: int) -> None:
        self.deleted += 1


class OldArray(Array):
    """As before DLPack 1.0: __dlpack__ has the argument `stream` only."""

    def __init__(self, array: np.ndarray, **kind: Any) -> None:
        super().__init__(array, legacy=True, **kind)

    def __dlpack__(self, stream: Any = None) -> Any:  # type: ignore[override]
        return super().__dlpack__(stream=stream)


class StandardArray(Array):
    """With the array API's functions that make a new array."""

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    def __array_namespace__(self) -> SimpleNamespace:
        def empty(shape: tuple[int, ...], *, dtype: np.dtype, device: tuple[int, int]) -> StandardArray:
            return StandardArray(np.full(shape, 77, dtype), device=device)

        return SimpleNamespace(empty=empty, float32=np.float32, float64=np.float64, int32=np.int32)


class ExchangeTable(c.Structure):
    _fields_ = (
        ("major", c.c_uint32),
        ("minor", c.c_uint32),
        ("prev_api", c.c_void_p),
        ("allocator", c.c_void_p),
        ("from_object", c.c_void_p),
        ("to_object", c.c_void_p),
        ("borrow", c.c_void_p),
        ("current_stream", c.c_void_p),
    )


def exchange_array(*, borrows: bool, read_only: bool = False, newer_table_first: bool = False) -> type[Array]:
    """A type of array with DLPack's C exchange table. Without `borrows` it can only give owned views, which the standard allows;
    with `newer_table_first` the first table has a later major version."""

    class Exchanged(Array):
        calls: ClassVar[list[str]] = []

        def __dlpack__(self, **arguments: Any) -> Any:
            raise AssertionError("the table is there to be used")

    @c.PYFUNCTYPE(c.c_int, c.py_object, c.POINTER(DLTensor))
    def borrow(x: Array, out: Any) -> int:
        Exchanged.calls.append("borrow")
        out[0] = x.view()
        return 0

    @c.PYFUNCTYPE(c.c_int, c.py_object, c.POINTER(c.c_void_p))
    def from_object(x: Array, out: Any) -> int:
        Exchanged.calls.append("own")
        deleter = DELETER(x.delete)
        made = ManagedVersioned(1, 3, None, c.cast(deleter, c.c_void_p), READ_ONLY * read_only, x.view())
        x.alive += [deleter, made]
        out[0] = c.addressof(made)
        return 0

    def address(function: Any) -> Any:
        return c.cast(function, c.c_void_p)

    table = ExchangeTable(1, 3, None, None, address(from_object), None, address(borrow) if borrows else None, None)
    future = ExchangeTable(2, 0, c.addressof(table))
    Exchanged.kept = [borrow, from_object, table, future]  # type: ignore[attr-defined]
    first = future if newer_table_first else table
    Exchanged.__dlpack_c_exchange_api__ = new_capsule(c.addressof(first), b"dlpack_exchange_api", None)  # type: ignore[attr-defined]
    return Exchanged
