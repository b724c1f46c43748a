"""Python programs in processes of a server that has imported PyTorch once for all of them, which takes longer than many of the
programs run. A process has the environment variables that this one had when the first process was started.
"""

from __future__ import annotations

import multiprocessing
import os
import pathlib
import runpy
import sys
import tempfile
import warnings
from multiprocessing.context import ForkServerContext
from typing import NamedTuple

# Most calls of PyTorch's that must not be compiled import torch._dynamo.
IMPORTED = ["torch", "torch._dynamo", "libflash.torch"]


class Finished(NamedTuple):
    returncode: int | None  # None: it ran for too long
    stdout: str
    stderr: str


def server() -> ForkServerContext:
    """What starts processes. It is the same for all callers."""
    multiprocessing.set_forkserver_preload(IMPORTED)
    return multiprocessing.get_context("forkserver")


def _run(program: str, arguments: list[str], folder: str, ignore_warnings: bool) -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        with open(f"{folder}/{name}", "wb") as file:
            os.dup2(file.fileno(), number)
    if ignore_warnings:
        warnings.simplefilter("ignore")
    sys.argv = [program, *arguments]
    sys.path.insert(0, str(pathlib.Path(program).parent))
    runpy.run_path(program, run_name="__main__")


def run_together(
    program: pathlib.Path, arguments: list[list[str]], seconds: float, ignore_warnings: bool = False
) -> list[Finished]:
    """Run `python program arguments` at the same time for each list of arguments."""
    with tempfile.TemporaryDirectory() as folder:
        parts = [pathlib.Path(folder, str(number)) for number in range(len(arguments))]
        for part in parts:
            part.mkdir()
        processes = [
            server().Process(target=_run, args=(str(program), given, str(part), ignore_warnings))
            for given, part in zip(arguments, parts, strict=True)
        ]
        try:
            for process in processes:
                process.start()
            for process in processes:
                process.join(seconds)
            codes = [process.exitcode for process in processes]
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
        texts = [[path.read_text() if path.exists() else "" for path in (p / "stdout", p / "stderr")] for p in parts]
    return [Finished(code, *text) for code, text in zip(codes, texts, strict=True)]
