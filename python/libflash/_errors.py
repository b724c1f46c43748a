"""The exceptions of libflash: one for each status of the C library. Each is also a subclass of a built-in exception."""

from __future__ import annotations

import re

__all__ = [
    "CancelledError",
    "CudaError",
    "Error",
    "InternalError",
    "InvalidError",
    "NoDeviceError",
    "OutOfMemoryError",
    "UnsupportedError",
    "VersionError",
    "WorkspaceError",
]


class Error(Exception):
    """Base of all exceptions that libflash raises for a refused or failed call.

    `status` is the number of the C library's `flash_status_t`, `status_name` its name ("INVALID", ...). The text names the
    argument, the rule and the value. A wrong kind of object (a list instead of an array) is a plain TypeError.
    """

    status: int = 8
    status_name: str = "INTERNAL"


class InvalidError(Error, ValueError):
    """The call is wrong on every machine: a shape, a stride, a value, a missing array."""

    status = 1
    status_name = "INVALID"


class UnsupportedError(Error, NotImplementedError):
    """The call is valid, but no kernel of this build supports it on this machine."""

    status = 2
    status_name = "UNSUPPORTED"


class VersionError(Error, ValueError):
    """The Python module and the native library have different versions."""

    status = 3
    status_name = "VERSION"


class WorkspaceError(Error, ValueError):
    """The workspace is missing, too small or misaligned."""

    status = 4
    status_name = "WORKSPACE"


class NoDeviceError(Error, RuntimeError):
    """CUDA arrays, but no usable GPU, no driver, or a driver that is too old."""

    status = 5
    status_name = "NO_DEVICE"


class CudaError(Error, RuntimeError):
    """The CUDA runtime reported an error, possibly one of earlier work."""

    status = 6
    status_name = "CUDA"


class OutOfMemoryError(Error, MemoryError):
    """Memory could not be allocated."""

    status = 7
    status_name = "OUT_OF_MEMORY"


class InternalError(Error, RuntimeError):
    """A defect of the library."""

    status = 8
    status_name = "INTERNAL"


class CancelledError(Error, RuntimeError):
    """A call on the CPU was cancelled before it was complete; its outputs are undefined.

    Python callers do not see this exception: when a signal handler cancels a call (Ctrl-C), the handler's exception is raised.
    """

    status = 9
    status_name = "CANCELLED"


_BY_STATUS: dict[int, type[Error]] = {cls.status: cls for cls in Error.__subclasses__()}


# Names that differ between the C library's error texts and Python: fields, flags and the value of an argument that is not given.
_PYTHON_NAMES = {
    "k_new": "k",
    "v_new": "v",
    "k_rope_new": "k_rope",
    "rng_state": "seed",
    "shard_count": "shard[0]",
    "shard_index": "shard[1]",
    "shard_keys": "shard[2]",
    "window_left": "window_size[0]",
    "window_right": "window_size[1]",
    "FLASH_FLAG_TOP_LEFT": 'causal_align="top_left"',
    "positions (FLASH_FLAG_POSITIONS)": "positions of rows and keys",
    "FLASH_FLAG_POSITIONS": "positions of rows and keys",
    "resume (FLASH_FLAG_CONTINUE)": "resume",
    "FLASH_FLAG_CONTINUE": "resume=True",
    "block_lists": "block_mask",
    "add (FLASH_FLAG_ADD)": "add",
    "FLASH_FLAG_ADD": "add=True",
    "FLASH_FLAG_INVARIANT_ROWS": "invariant=True",
    "NULL": "None",
}
_RENAMED = re.compile(rf"\b(?:{'|'.join(map(re.escape, _PYTHON_NAMES))})(?!\w)")


def python_names(text: str) -> str:
    """An error text of the C library, with Python's names of arguments."""
    return _RENAMED.sub(lambda found: _PYTHON_NAMES[found[0]], text)


_BLOCKS = (
    r"(block_mask[\w.]*): shape must be \((.*)\) \(full size \((\d+), (\d+), (\d+), (\d+)\), "
    r"given (\d+) x (\d+) of (\d+) x (\d+) blocks\)"
)
_DECODE_ORDER = "; decode takes q as (batch, seqlen, heads, head_dim) and caches as (batch or pages, rows, heads, head_dim)"


def clearer(text: str) -> str:
    """An error text of the C library, with what a caller in Python needs to know besides."""
    if found := re.match(_BLOCKS, text):
        name, meaning, *sizes = found.groups()
        batch, heads, rows, columns = sizes[:4]
        needed = ", ".join((*(size if size == "1" else f"{size} or 1" for size in (batch, heads)), rows, columns))
        return f"{name}: shape must be ({meaning}) = ({needed}); it is ({', '.join(sizes[4:])})"
    if text.startswith("k_cache: the heads of q must be a multiple"):
        text += _DECODE_ORDER
    return text


def from_status(status: int, text: str) -> Error:
    """The exception for a status other than OK. `text` is the C library's."""
    text = clearer(python_names(text))
    cls = _BY_STATUS.get(status)
    if cls is None:
        return InternalError(f"unknown status {status}: {text}")
    return cls(text)
