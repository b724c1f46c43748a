"""Runs a program with a time limit, and then ends it and all processes that it started."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import signal
import subprocess
import time

GRACE = 5.0  # seconds that a program has to end what it started


@dataclasses.dataclass(frozen=True)
class Done:
    code: int | None  # None: ran past the limit
    text: str  # stdout and stderr together
    seconds: float


def run_limited(command: list[str], limit: float, log: pathlib.Path, environment: dict[str, str] | None = None) -> Done:
    """Output goes to `log` while it runs, so that it is kept if the program exceeds the limit."""
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, signal.SIGTERM)  # torchrun then ends its processes, which are in sessions of their own
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return Done(code, log.read_text(errors="replace"), time.monotonic() - start)
