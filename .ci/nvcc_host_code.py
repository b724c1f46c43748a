#!/usr/bin/env python3
"""Compiler launcher for a cross build of the CUDA part: nvcc compiles the host code of a source for the other processor, and the
code for the GPU comes from a build of the same sources on this machine, which took most of the time.

    LIBFLASH_KEPT=FOLDER nvcc_host_code.py NVCC OPTION...

FOLDER has what `nvcc --keep` left of that build: of each source the GPU code of all architectures (.fatbin.c), the host functions
that launch its kernels (.stub.c) and the part of symbols that tells sources apart (.module_id). Any other source is compiled
completely.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

KEPT = (".fatbin.c", ".stub.c", ".module_id")

# The steps of nvcc for the GPU: the compiler, the assembler, and what packs the code of all architectures. They alone read the
# preprocessor's output for the GPU (.cpp1.ii).
FOR_THE_GPU = re.compile(r'^"?(\$CICC_PATH/)?(cicc|ptxas|fatbinary)\b|\.cpp1\.ii" *$')


def without_dependencies(command: list[str]) -> list[str]:
    """The command without the list of included files, which a build that is made once does not need."""
    kept, words = [], iter(command)
    for word in words:
        if word in ("-MT", "-MF"):
            next(words)
        elif word != "-MD":
            kept.append(word)
    return kept


def steps(command: list[str], folder: str) -> tuple[dict[str, str], list[str]]:
    """The environment and the commands of nvcc's steps, whose intermediate files are in the folder."""
    dry_run = [*without_dependencies(command), "--dryrun", "--keep", "--keep-dir", folder]
    planned = subprocess.run(dry_run, capture_output=True, text=True, check=False)
    if planned.returncode:
        sys.exit(planned.stderr)
    lines = [line.removeprefix("#$ ") for line in planned.stderr.splitlines() if line.startswith("#$ ")]
    settings = [re.fullmatch(r"(\w+)=(.*)", line) for line in lines]
    environment = {found[1]: found[2] for found in settings if found}
    return environment, [line for line, found in zip(lines, settings, strict=True) if not found]


def compile_host_code(command: list[str], kept: Path, unit: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        environment, commands = steps(command, folder)
        for file in kept.glob(f"{unit}.*"):
            if file.name.endswith(KEPT):
                shutil.copy(file, folder)
        for line in commands:
            if FOR_THE_GPU.search(line):
                continue
            # With the kept symbols, not with those that it would make of this build's folder.
            step = line.replace("--gen_module_id_file", "")
            done = subprocess.run(step, shell=True, env=os.environ | environment, check=False)
            if done.returncode:
                return done.returncode
    return 0


def main() -> int:
    kept, command = Path(os.environ["LIBFLASH_KEPT"]), sys.argv[1:]
    sources = [Path(word).stem for word in command if word.endswith(".cu")]
    if len(sources) == 1 and (kept / f"{sources[0]}.fatbin.c").exists():
        return compile_host_code(command, kept, sources[0])
    return subprocess.call(command)


if __name__ == "__main__":
    sys.exit(main())
