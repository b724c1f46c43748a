"""Runs a program in two processes, which find each other by a file. The program's arguments: rank, file, further arguments."""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Sequence
from typing import NoReturn

FOLDER = pathlib.Path(__file__).parent


def run_in_two_processes(program: str, folder: pathlib.Path, *arguments: str, seconds: int = 300) -> list[str]:
    """Output and errors of both processes, whose exit code must be 0. `program`: in tests/support; `folder`: for the file."""
    (texts,) = run_in_pairs(program, folder, [arguments], seconds)
    return texts


def run_in_pairs(program: str, folder: pathlib.Path, calls: Sequence[tuple[str, ...]], seconds: int = 300) -> list[list[str]]:
    """The same for several lists of further arguments, with two processes each, all at the same time."""
    from forked_programs import run_together  # the programs themselves import this module

    given = [[str(rank), str(folder / f"store{number}"), *call] for number, call in enumerate(calls) for rank in range(2)]
    done = run_together(FOLDER / program, given, seconds, ignore_warnings=True)
    texts = [one.stdout + one.stderr for one in done]
    assert all(one.returncode == 0 for one in done), "\n".join(texts)[-4000:]
    return [texts[first : first + 2] for first in range(0, len(texts), 2)]


def leave() -> NoReturn:
    """End such a program without the end of the interpreter, which a thread of gloo can abort: it may still drop tensors of the
    last collective, for which it needs Python.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
