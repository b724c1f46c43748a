"""Prints what will be compiled and about how long it takes.

pip hides stdout and stderr of a build, so a long build looks like one that hangs. The line is therefore also written to the
controlling terminal, if there is one.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping

PROCESSOR_MINUTES = {False: 4, True: 48}  # without and with the CUDA kernels, on a processor with nothing else to do


def processors(environ: Mapping[str, str] = os.environ) -> int:
    """Number of processors that the build may use."""
    level = environ.get("CMAKE_BUILD_PARALLEL_LEVEL", "")
    return int(level) if level.isdecimal() and int(level) > 0 else len(os.sched_getaffinity(0))


def duration(cuda: bool, count: int) -> str:
    minutes = math.ceil(PROCESSOR_MINUTES[cuda] / count)
    return f"{minutes} minute{'s' if minutes > 1 else ''}"


def line(cuda: bool, count: int) -> str:
    """What is compiled, by how many processors, in about how many minutes."""
    what = "the CPU library and the CUDA kernels" if cuda else "the CPU library"
    time = f"about {duration(cuda, count)} on {count} processor{'s' if count > 1 else ''}"
    shorter = f" LIBFLASH_CUDA=off compiles the CPU library alone, in about {duration(False, count)}." if cuda else ""
    return f"libflash: compiling {what}: {time}, more on a busy machine.{shorter}"


def announce(text: str) -> None:
    """Print to stderr, and to the terminal if stderr is not one."""
    print(text, file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        return
    try:
        with open("/dev/tty", "w") as terminal:
            print(f"\n{text}", file=terminal, flush=True)  # pip's own line, which it has not ended yet, stays as it is
    except OSError:  # there is no terminal: a job of CI, a container
        pass
