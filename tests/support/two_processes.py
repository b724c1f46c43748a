"""Runs a program in two processes, which find each other by a file. The program's arguments: rank, file, further arguments."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from typing import NoReturn

FOLDER = pathlib.Path(__file__).parent


def run_in_two_processes(program: str, folder: pathlib.Path, *arguments: str, seconds: int = 300) -> list[str]:
    """Output and errors of both processes, whose exit code must be 0. `program`: in tests/support; `folder`: for the file."""
    command = [sys.executable, "-W", "ignore", str(FOLDER / program)]
    both = [
        subprocess.Popen(
            [*command, str(rank), str(folder / "store"), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        texts = [process.communicate(timeout=seconds)[0] for process in both]
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [0, 0], "\n".join(texts)[-4000:]
    return texts


def leave() -> NoReturn:
    """End such a program without the end of the interpreter, which a thread of gloo can abort: it may still drop tensors of the
    last collective, for which it needs Python.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
