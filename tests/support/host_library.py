"""Compiles host functions that the library does not export, for a test: some of its sources and a wrapper."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def compile_host(folder: Path, wrapper: str, *sources: str, optimize: str = "-O1") -> ctypes.CDLL:
    """`wrapper` is C++ with extern "C" functions; `sources` are paths below libflash/."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if not compiler:
        pytest.skip("no C++ compiler")
    source, library = folder / "wrapper.cpp", folder / "wrapper.so"
    source.write_text(wrapper)
    includes = [f"-I{folder}", f"-I{ROOT / 'libflash'}", f"-I{ROOT / 'include'}"]
    files = [str(source), *(str(ROOT / "libflash" / path) for path in sources)]
    command = [
        compiler,
        "-std=c++17",
        optimize,
        "-shared",
        "-fPIC",
        "-fsanitize=undefined",
        "-fno-sanitize-recover=all",
        *includes,
        *files,
    ]
    done = subprocess.run([*command, "-o", str(library)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return load_host(folder)


def load_host(folder: Path) -> ctypes.CDLL:
    """What compile_host() made in `folder`."""
    return ctypes.CDLL(str(folder / "wrapper.so"))
