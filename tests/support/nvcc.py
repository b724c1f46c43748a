"""The CUDA compiler of this machine and the architecture of its GPU, for tests and benchmarks that compile programs."""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path

CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76  # of enum CUdevice_attribute


def find_nvcc() -> str | None:
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    candidates = [os.environ.get("CUDACXX"), "nvcc", *(str(Path(home, "bin", "nvcc")) for home in [*homes, "/usr/local/cuda"])]
    return next((found for found in map(shutil.which, filter(None, candidates)) if found), None)


def architecture() -> str | None:
    """The architecture of the first GPU as nvcc names it (sm_90, ...); None without a GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        return None
    assert driver.cuDeviceGetAttribute(ctypes.byref(major), CAPABILITY_MAJOR, device) == 0
    assert driver.cuDeviceGetAttribute(ctypes.byref(minor), CAPABILITY_MINOR, device) == 0
    return f"sm_{major.value}{minor.value}"
