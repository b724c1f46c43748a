"""Paths and source changes for programs that run sources of CUDA kernels on the host (tests/cuda/on_host/)."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tests" / "cuda" / "on_host"
NVCC = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
CUDA_HEADERS = next((p for p in Path(NVCC).resolve().parents[1].glob("**/include") if (p / "cuda_bf16.h").exists()), None)
CXX = shutil.which("g++")


def for_the_host(source: str) -> str:
    """Replace what is not C++: shared memory with a size from the launch, and launches."""
    source = re.sub(r"extern __shared__ __align__\(\d+\) char (\w+)\[\];", r"char* \1 = emulation::dynamic_shared;", source)
    launch = r"(\w+)<<<(.*?), (\S*?), \S*?, \S*?>>>\(([\w, ]+)\);"
    return re.sub(launch, r"emulation::launch(\2, \3, [&] { \1(\4); });", source)
