"""Where the CUDA compiler of a build comes from: the machine, the package index, or nowhere.

Only the package index needs a decision before CMake runs, because its compiler is a build requirement. Which compiler CMake then
finds, and whether it works, is decided in libflash/cuda/toolchain.cmake, which searches in the same order. This module imports
nothing but the standard library and changes nothing.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MODES = ("auto", "on", "off", "pypi", "system")
SPELLINGS = {"1": "on", "true": "on", "yes": "on", "0": "off", "false": "off", "no": "off"}
OLDEST_DRIVER = 13000  # in the format of cuDriverGetVersion; older drivers cannot run code of CUDA 13


@dataclass(frozen=True)
class Choice:
    mode: str  # the requested one of MODES
    requires: tuple[str, ...]  # additional build requirements
    line: str  # why, for the person who builds
    cuda: bool  # whether the CUDA kernels are to be compiled


class ChoiceError(Exception):
    """The requested mode is not possible on this machine."""


def requested_mode(config_settings: Mapping[str, object] | None, environ: Mapping[str, str] = os.environ) -> str:
    """LIBFLASH_CUDA from the build settings (-Ccmake.define.LIBFLASH_CUDA=...), else from the environment, else "auto"."""
    value = (config_settings or {}).get("cmake.define.LIBFLASH_CUDA") or environ.get("LIBFLASH_CUDA") or "auto"
    mode = SPELLINGS.get(str(value).lower(), str(value).lower())
    if mode not in MODES:
        raise ChoiceError(f"LIBFLASH_CUDA: one of {', '.join(MODES)} is needed, got {value!r}")
    return mode


def find_nvcc(environ: Mapping[str, str] = os.environ, conventional: Path = Path("/usr/local/cuda")) -> str | None:
    """The machine's nvcc: $CUDACXX, PATH, $CUDA_HOME and $CUDA_PATH, the conventional place."""
    if named := environ.get("CUDACXX"):
        return named
    if found := shutil.which("nvcc", path=environ.get("PATH", "")):
        return found
    for root in (environ.get("CUDA_HOME"), environ.get("CUDA_PATH"), str(conventional)):
        if root and os.access(os.path.join(root, "bin", "nvcc"), os.X_OK):
            return os.path.join(root, "bin", "nvcc")
    return None


def driver_version() -> int | None:
    """The CUDA version of the NVIDIA driver (13000 for 13.0), or None without one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int(0)
    return version.value if driver.cuDriverGetVersion(ctypes.byref(version)) == 0 else None


def compiler_wheels() -> tuple[str, ...]:
    """The compiler in the package index; pyproject.toml names it, as the dependency group cuda-build."""
    pyproject = Path(__file__).resolve().parents[2] / "pyproject.toml"
    with pyproject.open("rb") as file:
        return tuple(tomllib.load(file)["dependency-groups"]["cuda-build"])


def has_compiler_wheels() -> bool:
    """Whether the package index has a compiler for this kind of machine."""
    return sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")


def choose(mode: str, nvcc: str | None, driver: int | None, wheels_exist: bool) -> Choice:
    """The decision, from the properties of the machine that are given."""
    if mode == "off":
        return Choice(mode, (), "the CPU library, as requested", cuda=False)
    if mode == "system":
        if nvcc is None:
            raise ChoiceError("LIBFLASH_CUDA=system: no nvcc in $CUDACXX, on PATH, in $CUDA_HOME, $CUDA_PATH or /usr/local/cuda")
        return Choice(mode, (), f"CUDA part with {nvcc}", cuda=True)
    if mode != "pypi" and nvcc is not None:
        return Choice(mode, (), f"CUDA part with {nvcc}", cuda=True)
    if mode in ("pypi", "on"):
        if not wheels_exist:
            raise ChoiceError(
                f"LIBFLASH_CUDA={mode}: the package index has no CUDA compiler for {sys.platform} {platform.machine()}"
            )
        return Choice(mode, compiler_wheels(), "CUDA part with the compiler from the package index", cuda=True)
    if driver is None:
        return Choice(mode, (), "no nvcc and no NVIDIA driver: the CPU library", cuda=False)
    if driver < OLDEST_DRIVER:
        found = f"{driver // 1000}.{driver % 1000 // 10}"
        line = f"no nvcc, and the NVIDIA driver supports CUDA {found}, 13.0 is needed: the CPU library"
        return Choice(mode, (), line, cuda=False)
    if not wheels_exist:
        return Choice(mode, (), f"no nvcc, and none in the package index for {platform.machine()}: the CPU library", cuda=False)
    line = "an NVIDIA driver, no nvcc: CUDA part with the compiler from the package index"
    return Choice(mode, compiler_wheels(), line, cuda=True)


def choose_here(config_settings: Mapping[str, object] | None) -> Choice:
    """choose() for this machine."""
    return choose(requested_mode(config_settings), find_nvcc(), driver_version(), has_compiler_wheels())
