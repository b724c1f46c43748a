"""The memory of a call: the growth of the process's peak, which the operating system counts."""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")


def peak_growth(call: Callable[[], Result]) -> tuple[Result, int]:
    """(result of the call, bytes by which the peak of the process's memory rose above what it had before).

    For a fresh process: memory that was freed before and that the allocator kept is not counted.
    """
    reset_peak()
    before = min(peak_bytes(), resident_bytes() or sys.maxsize)
    result = call()
    return result, max(peak_bytes() - before, 0)


def reset_peak() -> None:
    """On Linux the peak is counted from here on. Elsewhere, or without the permission, the old peak stays."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Largest resident size so far."""
    found = proc_status("VmHWM")
    if found is not None:
        return found
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def resident_bytes() -> int | None:
    return proc_status("VmRSS")


def available_bytes() -> int | None:
    """Available memory of the machine; None if unknown."""
    return proc_entry(Path("/proc/meminfo"), "MemAvailable")


def proc_status(name: str) -> int | None:
    return proc_entry(Path("/proc/self/status"), name)


def proc_entry(path: Path, name: str) -> int | None:
    """Bytes of a line "name: 123 kB"; None where there is no such file or line."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":")), None)
