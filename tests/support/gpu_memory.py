"""The memory harness on a GPU: guarded blocks that are copied to the GPU and back, and memory between fences.

Calls use the C interface on the default stream; every copy back waits for it.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable

import abi
import numpy as np
import torch
from case import Case
from memory_harness import Guarded, Workspace
from test_attention import c_options

DEVICE = "cuda"


def sent(block: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(block.view(np.uint8)).to(DEVICE)


def fetched(block: np.ndarray, from_gpu: torch.Tensor) -> None:
    block.view(np.uint8)[...] = from_gpu.cpu().numpy()


def on_gpu(array: np.ndarray, address: int, device: int = 0) -> abi.Tensor:
    """The tensor struct of `array`, at `address`."""
    view = abi.tensor(array)
    view.data, view.device_type, view.device_id = address, abi.CUDA_DEVICE, device
    return view


def growth(call: Callable[[], object]) -> int:
    """Peak of PyTorch's allocator during a call, including its results."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


class GuardedOnGpu(Guarded):
    def __init__(self, array: np.ndarray, gap: int = 0, output: bool = False, shift: int = 0) -> None:
        super().__init__(array, gap, output, shift)
        self.on_gpu = sent(self.block)

    @property
    def view(self) -> abi.Tensor:
        address = self.on_gpu.data_ptr() + self.array.ctypes.data - self.block.ctypes.data
        return on_gpu(self.array, address, self.on_gpu.get_device())

    def check_around(self) -> None:
        fetched(self.block, self.on_gpu)
        super().check_around()

    def check(self, owned: np.ndarray | None = None) -> None:
        fetched(self.block, self.on_gpu)
        super().check(owned)


class WorkspaceOnGpu(Workspace):
    def __init__(self, size: int, content: str) -> None:
        super().__init__(size, content)
        self.on_gpu.copy_(sent(self.block))

    def base(self) -> int:
        self.on_gpu = torch.empty(self.block.size, dtype=torch.uint8, device=DEVICE)
        return self.on_gpu.data_ptr()

    def check(self) -> None:
        fetched(self.block, self.on_gpu)
        super().check()


# -- fences: unmapped addresses around a tensor, where every access is illegal


class Location(c.Structure):
    _fields_ = (("type", c.c_int), ("id", c.c_int))


class Allocation(c.Structure):
    """CUmemAllocationProp of cuda.h."""

    _fields_ = (
        ("type", c.c_int),
        ("handle_types", c.c_int),
        ("location", Location),
        ("win32", c.c_void_p),
        ("flags", c.c_ubyte * 8),
    )


class Access(c.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", c.c_int))


PINNED, ON_DEVICE, READ_WRITE = 1, 1, 3
u64, size_t = c.c_uint64, c.c_size_t
PROTOTYPES = {
    "cuMemGetAllocationGranularity": (c.POINTER(size_t), c.POINTER(Allocation), c.c_int),
    "cuMemAddressReserve": (c.POINTER(u64), size_t, size_t, u64, u64),
    "cuMemCreate": (c.POINTER(u64), size_t, c.POINTER(Allocation), u64),
    "cuMemMap": (u64, size_t, size_t, u64, u64),
    "cuMemSetAccess": (u64, size_t, c.POINTER(Access), size_t),
    "cuMemUnmap": (u64, size_t),
    "cuMemRelease": (u64,),
    "cuMemAddressFree": (u64, size_t),
    "cuMemcpyHtoD_v2": (u64, c.c_void_p, size_t),
    "cuMemcpyDtoH_v2": (c.c_void_p, u64, size_t),
}


class Driver:
    """The few functions of the driver that map memory; a context must be current (torch.cuda.init and one tensor)."""

    def __init__(self) -> None:
        self.library = c.CDLL("libcuda.so.1")
        for name, arguments in PROTOTYPES.items():
            getattr(self.library, name).argtypes = arguments
        self.where = Location(ON_DEVICE, 0)
        self.kind = Allocation(type=PINNED, location=self.where)
        granularity = size_t()
        self.call("cuMemGetAllocationGranularity", c.byref(granularity), c.byref(self.kind), 0)
        self.granularity = granularity.value

    def call(self, name: str, *arguments: object) -> None:
        code = getattr(self.library, name)(*arguments)
        if code != 0:
            raise RuntimeError(f"{name}: CUDA error {code}")


class FencedBlock:
    """`size` bytes at the end (or start) of mapped memory."""

    def __init__(self, driver: Driver, size: int, at_end: bool) -> None:
        self.driver, self.size = driver, size
        step = driver.granularity
        self.mapped = max(1, -(-size // step)) * step
        self.reserved = self.mapped + 2 * step
        base, self.handle = u64(), u64()
        driver.call("cuMemAddressReserve", c.byref(base), self.reserved, 0, 0, 0)
        driver.call("cuMemCreate", c.byref(self.handle), self.mapped, c.byref(driver.kind), 0)
        self.base, self.start = base.value, base.value + step
        driver.call("cuMemMap", self.start, self.mapped, 0, self.handle, 0)
        driver.call("cuMemSetAccess", self.start, self.mapped, c.byref(Access(driver.where, READ_WRITE)), 1)
        self.address = self.start + (self.mapped - size if at_end else 0)

    def write(self, array: np.ndarray) -> None:
        self.driver.call("cuMemcpyHtoD_v2", self.address, array.ctypes.data, array.nbytes)

    def read(self, array: np.ndarray) -> None:
        self.driver.call("cuMemcpyDtoH_v2", array.ctypes.data, self.address, array.nbytes)

    def free(self) -> None:
        self.driver.call("cuMemUnmap", self.start, self.mapped)
        self.driver.call("cuMemRelease", self.handle)
        self.driver.call("cuMemAddressFree", self.base, self.reserved)


class Fences:
    """All arrays of a call, each next to a fence. As a context manager it frees them."""

    def __init__(self, driver: Driver, at_end: bool) -> None:
        self.driver, self.at_end = driver, at_end
        self.blocks: list[FencedBlock] = []

    def __enter__(self) -> Fences:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:  # else nothing works any more
            for block in self.blocks:
                block.free()

    def block(self, size: int) -> FencedBlock:
        self.blocks.append(FencedBlock(self.driver, size, self.at_end))
        return self.blocks[-1]

    def place(self, array: np.ndarray) -> abi.Tensor:
        block = self.block(array.nbytes)
        if array.nbytes:
            block.write(np.ascontiguousarray(array))
        return on_gpu(array, block.address)

    def call(self, name: str, views: list[abi.Tensor], options: c.Structure) -> None:
        pointers, size = [abi.pointer(view) for view in views], size_t()
        function = f"flash_attention_{name}"
        abi.check(getattr(abi.lib, function + "_workspace_size")(*pointers, c.byref(options), c.byref(size)))
        padded_size = -(-size.value // 256) * 256
        abi.check(getattr(abi.lib, function)(*pointers, c.byref(options), self.block(padded_size).address, size.value, None))


def fenced_run(driver: Driver, case: Case, kernels: tuple[str, str], at_end: bool) -> dict[str, np.ndarray]:
    """Forward and backward of a case with every tensor and the workspace next to a fence."""
    x = case.inputs()
    with Fences(driver, at_end) as fences:
        results: dict[str, tuple[np.ndarray, abi.Tensor]] = {}

        def output(name: str, like: np.ndarray) -> abi.Tensor:
            array = np.full(like.shape, np.nan, like.dtype)
            results[name] = array, fences.place(array)
            return results[name][1]

        q, k, v, dout = (fences.place(array) for array in (x.q, x.k, x.v, x.dout))
        options = {name: fences.place(value) if isinstance(value, np.ndarray) else value for name, value in c_options(x).items()}
        rows = x.q.shape[:-1]
        lse_rows = rows[::-1] if case.packed else (rows[0], rows[2], rows[1])
        out, lse = output("o", x.dout), output("lse", np.empty(lse_rows, np.float64 if x.q.dtype == np.float64 else np.float32))
        fences.call("forward", [q, k, v, out, lse], abi.options(abi.AttentionOptions, kernel=kernels[0].encode(), **options))
        dq, dk, dv = (output(name, getattr(x, name[1:])) for name in ("dq", "dk", "dv"))
        for name, given in {"dbias": "bias", "dsink": "learnable_sink"}.items():
            if given in x.options:
                options[name] = output(name, x.options[given])
        if x.dlse is not None:
            options["dlse"] = fences.place(x.dlse)
        made = abi.options(abi.AttentionOptions, kernel=kernels[1].encode(), **options)
        fences.call("backward", [dout, q, k, v, out, lse, dq, dk, dv], made)
        for array, view in results.values():
            block = next(block for block in fences.blocks if block.address == view.data)
            if array.nbytes:
                block.read(array)
    return {name: array for name, (array, _) in results.items()}
