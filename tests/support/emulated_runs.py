"""Runs of emulated programs (emulated_programs.py), each a case of a test.

The emulation needs no GPU and finds wrong indices. It is slow, finds a race only if a random order makes a result
wrong, and does not show how the hardware's instructions behave.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from emulated_programs import Program, compiled

ORDER_SEEDS = (0, 1)  # 0: everything runs as soon as it can; 1: a random order (emulation.h)


class Run(NamedTuple):
    """A program and its arguments: the parameter `run` of a test."""

    program: Program
    arguments: tuple[int, ...]


def runs(programs: dict[str, Program], cases: Callable[[str], tuple[tuple[int, ...], ...]]) -> list[object]:
    return [
        pytest.param(Run(program, case), id="-".join(map(str, (name, *case))))
        for name, program in programs.items()
        for case in cases(name)
    ]


def finished(program: Future[Path], arguments: tuple[int, ...]) -> str:
    """The output of a run, which must succeed."""
    command = [program.result(), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@contextmanager
def started_together(request: pytest.FixtureRequest, factory: pytest.TempPathFactory) -> Iterator[Callable[[Run], str]]:
    """A function that returns the output of a run. The runs of all selected tests start at once, as many at a time as there are
    processors. Where pytest distributes the tests over processes, each run starts with its test, and the processes share the
    programs.
    """
    distributed = hasattr(request.config, "workerinput")
    base = factory.getbasetemp()
    folder = (base.parent if distributed else base) / "on_host"  # of all processes
    items = [] if distributed else request.session.items
    parameters = [item.callspec.params.get("run") for item in items if hasattr(item, "callspec")]
    requested = [run for run in parameters if isinstance(run, Run)]
    programs: dict[Program, Future[Path]] = {}
    begun: dict[Run, Future[str]] = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:

        def begin_program(program: Program) -> Future[Path]:
            if program not in programs:
                for instances in program.instances:  # first, so that few programs wait for them
                    begin_program(instances)
                programs[program] = pool.submit(compiled, program, folder)
            return programs[program]

        def begin(run: Run) -> Future[str]:
            if run not in begun:
                begun[run] = pool.submit(finished, begin_program(run.program), run.arguments)
            return begun[run]

        for run in requested:  # programs before runs, so that a run only waits for a program that is being compiled
            begin_program(run.program)
        for run in requested:
            begin(run)
        yield lambda run: begin(run).result()
        pool.shutdown(cancel_futures=True)
    for made in folder.glob("headers_*/*.gch"):  # these files are large
        made.unlink(missing_ok=True)
