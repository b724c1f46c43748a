"""exp2, tanh and rounding of the CPU engine's vectors on every instruction set of this machine, by
tests/cpu/test_functions.cpp.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from harness import cpu_kernels

ROOT = Path(__file__).resolve().parents[1]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
FLAGS = {"generic": [], "avx2": AVX2, "avx512": AVX512, "avx512bf16": [*AVX512, "-mavx512bf16", "-mavx512vbmi"]}
FLAGS |= {"neon": ["-DLIBFLASH_NEON=1"], "neonbf16": ["-DLIBFLASH_NEON=1", "-march=armv8.2-a+bf16"]}
every_isa = pytest.mark.parametrize("isa", [isa for isa in cpu_kernels() if isa in FLAGS])


def run(isa: str, folder: Path, step: int) -> list[str]:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    assert compiler, "no C++ compiler"
    program = folder / "test_functions"
    options = ["-std=c++17", "-O2", f"-DLIBFLASH_ISA={isa}", *FLAGS[isa], f"-I{ROOT / 'include'}", f"-I{ROOT / 'libflash'}"]
    source = ROOT / "tests" / "cpu" / "test_functions.cpp"
    subprocess.run([compiler, *options, str(source), "-o", str(program)], check=True, capture_output=True)
    done = subprocess.run([program, str(step)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    assert lines[0] == f"{isa}, every {step}-th"
    assert len(lines) == 5
    return lines


@every_isa
def test_functions(isa: str, tmp_path: Path) -> None:
    run(isa, tmp_path, 997)


@pytest.mark.long
@every_isa
def test_functions_of_every_float(isa: str, tmp_path: Path) -> None:
    print("\n".join(run(isa, tmp_path, 1)))
