"""The building blocks of the CUDA kernels, cuda/ptx, cuda/tile and cuda/attention, on a GPU: the programs of blocks/.

Programs named sm90_* test instructions that only sm_90a has.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from nvcc import architecture, find_nvcc

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = sorted((ROOT / "tests" / "cuda" / "blocks").glob("*.cu"))


def test_programs_are_there() -> None:
    assert {path.stem.split("_")[0] for path in PROGRAMS} == {"ptx", "tile", "attention", "sm90"}


every_program = pytest.mark.parametrize("source", PROGRAMS, ids=[path.stem for path in PROGRAMS])


def command(nvcc: str, source: Path, arch: str) -> list[str]:
    """The compiler and its options, without what it makes of the program."""
    target = ["-gencode=arch=compute_90a,code=sm_90a"] if source.stem.startswith("sm90_") else [f"-arch={arch}"]
    return [
        nvcc,
        "-std=c++17",
        *target,
        "-Xcompiler=-Wall,-Wextra",
        f"-I{ROOT / 'libflash'}",
        f"-I{ROOT / 'include'}",
        str(source),
    ]


def run_compiler(*arguments: str) -> None:
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@every_program
def test_the_compiler_accepts_a_block(source: Path, tmp_path: Path) -> None:
    """Without a GPU: only the first step of the compiler, which takes about two seconds."""
    nvcc = find_nvcc()
    if not nvcc:
        pytest.skip("no nvcc")
    if architecture():
        pytest.skip("a GPU compiles all of it")
    run_compiler(*command(nvcc, source, "sm_90"), "-cuda", "-o", str(tmp_path / "preprocessed"))


@every_program
def test_block(source: Path, tmp_path: Path) -> None:
    nvcc = find_nvcc()
    if not nvcc:
        pytest.skip("no nvcc")
    arch = architecture()
    if not arch:
        pytest.skip("no CUDA device")
    if source.stem.startswith("sm90_") and arch != "sm_90":
        pytest.skip(f"for sm_90, the GPU is of {arch}")
    program = tmp_path / source.stem
    run_compiler(*command(nvcc, source, arch), "-o", str(program))
    done = subprocess.run([program], capture_output=True, text=True, check=False, timeout=300)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = [line.split()[0] for line in done.stdout.splitlines()]
    assert "ok" in verdicts
    assert set(verdicts) <= {"ok", "absent"}, done.stdout
