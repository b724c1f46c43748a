"""Compiles host functions that the library does not export, for a test: some of its sources and a wrapper."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def compiler() -> str:
    found = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if not found:
        pytest.skip("no C++ compiler")
    return found


def run_compiler(folder: Path, *arguments: str | Path) -> None:
    """Compile with checks that end the program at undefined behaviour. `folder` has the headers generated for a library."""
    options = ["-std=c++17", "-fPIC", "-fsanitize=undefined", "-fno-sanitize-recover=all"]
    includes = [f"-I{folder}", f"-I{ROOT / 'libflash'}", f"-I{ROOT / 'include'}"]
    done = subprocess.run([compiler(), *options, *includes, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def compile_host(folder: Path, wrapper: str, *sources: str | Path, optimize: str = "-O1") -> ctypes.CDLL:
    """`wrapper` is C++ with extern "C" functions; `sources` are paths below libflash/, or whole paths of object files."""
    source = folder / "wrapper.cpp"
    source.write_text(wrapper)
    files = [ROOT / "libflash" / path for path in sources]
    run_compiler(folder, optimize, "-shared", source, *files, "-o", folder / "wrapper.so")
    return load_host(folder)


def compile_objects(folder: Path, *sources: str) -> None:
    """Compile each of these sources below libflash/ to an object file in `folder`, as many at a time as there are processors."""

    def compile_one(number: int) -> None:
        run_compiler(folder, "-O0", "-c", ROOT / "libflash" / sources[number], "-o", folder / f"{number}.o")

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, range(len(sources))))


def load_host(folder: Path) -> ctypes.CDLL:
    """What compile_host() made in `folder`."""
    return ctypes.CDLL(str(folder / "wrapper.so"))
