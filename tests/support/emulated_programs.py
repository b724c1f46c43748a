"""Programs that run CUDA kernels on the host (tests/cuda/on_host/): the kernels' sources, with fibers as threads and emulations
of single instructions. This module describes the parts of a program, and compiles it once for all processes.
"""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path
from typing import NamedTuple

from kernels_on_host import CUDA_HEADERS, CXX, HERE, ROOT, for_the_host
from made_once import locked


class Program(NamedTuple):
    """A program of on_host, the headers of the backend that for_the_host() changes for it, its macros, and sources with the code
    of its kernels (<kernel>_instances.cpp). Compiling these takes longest, so programs with the same kernel share the object
    files.
    """

    source: str
    headers: tuple[str, ...]
    defines: tuple[tuple[str, object], ...]
    instances: tuple[Program, ...] = ()


def with_kernels(source: str, *kernels: Program) -> Program:
    """The program of that source, with the headers and the macros of its kernels."""
    defines = {name: value for kernel in kernels for name, value in kernel.defines}
    headers = tuple(name for kernel in kernels for name in kernel.headers)
    return Program(source, headers, tuple(defines.items()), kernels)


def for_racecheck(program: Program) -> Program:
    return program._replace(defines=(*program.defines, ("LIBFLASH_RACECHECK", 1)))


def compiled(program: Program, folder: Path) -> Path:
    """The program, or the object file of a program's kernels. The first process that needs it compiles it, to `folder`."""
    own = folder / hashlib.sha256(repr(program).encode()).hexdigest()[:16]
    with locked(own):
        if not (own / "compiled").exists():
            compile_to(own, program, [compiled(instances, folder) for instances in program.instances])
    return own / "compiled"


def compile_to(folder: Path, program: Program, objects: list[Path]) -> None:
    for name in program.headers:
        source = (ROOT / "libflash/cuda" / name).read_text()
        changed = for_the_host(source)
        assert changed != source
        (folder / "cuda" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "cuda" / name).write_text(changed)
    # The code of kernels takes most of the time to compile, but little of the time of a run (machine.h): it is optimized less.
    optimize = "-O1" if program.instances else "-Og"
    defines = {"__CUDA_ARCH__": 900} | dict(program.defines)
    # Vector instructions of this processor make the emulated products faster. A product and a sum are rounded separately.
    options = [optimize, "-march=native", "-ffp-contract=off", f"-D__CUDA_ARCH__={defines.pop('__CUDA_ARCH__')}"]
    # A GPU refuses a misaligned access, which this processor allows. The check takes a quarter more time, so only decode, whose
    # parts of shared memory have many sizes, is checked.
    decodes = any(part.source.startswith("decode") for part in (program, *program.instances))
    sanitizer = ["-fsanitize=alignment", "-fno-sanitize-recover=alignment"] if decodes else []
    options += sanitizer
    # The changed headers come first, then the emulated instructions, then the library's headers.
    includes = [f"-I{path}" for path in (folder, HERE, ROOT / "libflash", ROOT / "include", CUDA_HEADERS)]
    arguments = [*options, *(f"-D{name}={value}" for name, value in defines.items()), *includes]
    arguments += ["-include", precompiled(options, folder.parent), HERE / program.source]
    if program.source.endswith("_instances.cpp"):
        arguments += ["-c"]
    else:
        arguments += [*objects, machine(sanitizer, folder.parent)]
    run_compiler(*arguments, "-o", folder / "compiled")


def precompiled(options: list[str], folder: Path) -> Path:
    """A header that includes machine.h, precompiled with these options, because small programs spend much of their time on it."""
    own = folder / "_".join(["headers", *options])
    header, made = own / "headers.h", own / "headers.h.gch"
    with locked(own):
        if not made.exists():
            header.write_text('#include "machine.h"\n')
            run_compiler(*options, f"-I{HERE}", f"-I{CUDA_HEADERS}", "-x", "c++-header", header, "-o", own / "incomplete")
            (own / "incomplete").rename(made)
    return header


def machine(options: list[str], folder: Path) -> Path:
    """The object file of machine.cpp, compiled with these options. It is the same for every version of PTX."""
    own = folder / "_".join(["machine", *options])
    with locked(own):
        if not (own / "machine.o").exists():
            level = ["-O3", "-march=native", "-ffp-contract=off", "-D__CUDA_ARCH__=900", *options]
            run_compiler(*level, f"-I{HERE}", f"-I{CUDA_HEADERS}", "-c", HERE / "machine.cpp", "-o", own / "incomplete")
            (own / "incomplete").rename(own / "machine.o")
    return own / "machine.o"


def run_compiler(*arguments: str | Path) -> None:
    command = [CXX, "-std=c++17", "-fno-strict-aliasing", "-fno-pie", "-no-pie", "-w", "-fpermissive", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:3000]
