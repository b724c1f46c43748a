"""Arrays between guard bands, poisoned outputs, workspaces of exactly the required size: no byte outside may be written.

Calls use the C interface (abi), where the caller provides the workspace.
"""

from __future__ import annotations

import ctypes as c
import mmap
from collections.abc import Callable

import abi
import numpy as np

GUARD = 4096
POISON = {1: 0x7F, 2: 0x7FA5, 4: 0x7FA5A5A5, 8: 0x7FF5A5A5A5A5A5A5}  # NaN in every floating type (fp16 and bf16 alike)


class Guarded:
    """One array in its own block: guard bands of 4 KiB on both sides and, with `gap`, strides with gaps; all poisoned.
    `shift` moves it by that many elements, which changes its alignment."""

    def __init__(self, array: np.ndarray, gap: int = 0, output: bool = False, shift: int = 0) -> None:
        size = array.itemsize
        padded = [n + (gap if axis < array.ndim - 1 else 8 * (gap > 0)) for axis, n in enumerate(array.shape)]
        count = int(np.prod(padded, dtype=np.int64))
        self.block = np.full((count * size + 2 * GUARD) // size + shift, POISON[size], f"u{size}")
        self.name, self.output = "", output

        def inside(block: np.ndarray) -> np.ndarray:
            start = GUARD // size + shift
            return block[start : start + count].reshape(padded)[tuple(slice(n) for n in array.shape)]

        self.array = inside(self.block.view(array.dtype)) if array.dtype != bool else inside(self.block).view(bool)
        self.own = np.zeros(self.block.shape, bool)
        inside(self.own)[...] = True
        if not output:
            self.array[...] = array
        self.before = self.block.copy()

    @property
    def view(self) -> abi.Tensor:
        """The array as the library sees it."""
        return abi.tensor(self.array)

    def check_around(self) -> None:
        """Only elements of the array have changed."""
        stray = (self.block != self.before) & ~self.own
        assert not stray.any(), f"{self.name}: {int(stray.sum())} elements changed outside of it, first at {stray.argmax()}"

    def check(self, owned: np.ndarray | None = None) -> None:
        """Inputs and the surroundings of outputs are unchanged; outputs are written where `owned` is true (default
        everywhere).
        """
        changed = self.block != self.before
        stray = changed & ~self.own if self.output else changed
        assert not stray.any(), (
            f"{self.name}: {int(stray.sum())} elements changed outside of the outputs, first at {stray.argmax()}"
        )
        if self.output:
            mine = self.array.view(f"u{self.array.dtype.itemsize}") == POISON[self.array.dtype.itemsize]
            left = mine if owned is None else mine & owned
            assert not left.any(), (
                f"{self.name}: {int(left.sum())} of {left.size} elements not written, first {np.argwhere(left)[:1]}"
            )
            if owned is not None:
                assert mine[~owned].all(), f"{self.name}: rows that belong to no sequence were written"


class Workspace:
    """Exactly `size` bytes between guard bands, aligned to 256 bytes but not to 512. `content`: "zeros", "ones" (all bits 1), or
    random bytes.
    """

    def __init__(self, size: int, content: str) -> None:
        self.size = size
        self.block = np.full(size + 2 * GUARD + 512, 0xC3, np.uint8)
        base = self.base()
        self.start = GUARD + (256 - (base + GUARD) % 512) % 512
        self.address = base + self.start
        fill = {"zeros": 0, "ones": 0xFF}.get(content)
        self.block[self.start : self.start + size] = np.random.default_rng(5).integers(0, 256, size) if fill is None else fill

    def base(self) -> int:
        """The address for the library."""
        return self.block.ctypes.data

    def check(self) -> None:
        outside = np.concatenate([self.block[: self.start], self.block[self.start + self.size :]])
        assert (outside == 0xC3).all(), f"the guard bands of a workspace of {self.size} bytes were written"


def call(
    name: str, arrays: list[np.ndarray | abi.Tensor], options: c.Structure, content: str, workspace: type[Workspace] = Workspace
) -> int:
    """Call flash_attention_<name> with a workspace of exactly the size that the workspace query returns."""
    views, size = abi._views(tuple(arrays)), c.c_size_t()
    function = f"flash_attention_{name}"
    abi.check(getattr(abi.lib, function + "_workspace_size")(*views, c.byref(options), c.byref(size)))
    work = workspace(size.value, content)
    abi.check(getattr(abi.lib, function)(*views, c.byref(options), work.address, size.value, None))
    work.check()
    return size.value


PAGE = mmap.PAGESIZE
libc = c.CDLL(None, use_errno=True)
libc.mprotect.argtypes = (c.c_void_p, c.c_size_t, c.c_int)


class Fenced:
    """Places arrays so that the byte after their last (or before their first) is not mapped: an access there ends the process."""

    def __init__(self, at_end: bool) -> None:
        self.at_end = at_end
        self.kept: list[object] = []

    def __call__(self, array: np.ndarray) -> np.ndarray:
        pages = -(-max(array.nbytes, 1) // PAGE)
        area = mmap.mmap(-1, (pages + 2) * PAGE)
        base = np.frombuffer(area, np.uint8)
        for fence in (0, pages + 1):
            if libc.mprotect(base.ctypes.data + fence * PAGE, PAGE, 0) != 0:
                raise OSError(c.get_errno(), "mprotect")
        start = PAGE + (pages * PAGE - array.nbytes if self.at_end else 0)
        placed = base[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        placed[...] = array
        self.kept += [area, base]
        return placed


def each(options: dict, place: Callable[[np.ndarray], np.ndarray]) -> dict:
    """Options with placed arrays."""
    return {name: place(value) if isinstance(value, np.ndarray) else value for name, value in options.items()}
