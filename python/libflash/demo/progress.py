"""A progress bar on stderr. Nothing is written if stderr is no terminal."""

from __future__ import annotations

import sys
import time

WIDTH = 30


class Progress:
    """`work` and what advance() adds are in the same unit, whatever it is."""

    def __init__(self, work: float):
        self.work, self.done = max(work, 1e-9), 0.0
        self.label = ""
        self.start = time.monotonic()
        self.shown = sys.stderr.isatty()

    def step(self, label: str) -> None:
        self.label = label
        self.draw()

    def advance(self, work: float) -> None:
        self.done = min(self.done + work, self.work)

    def draw(self) -> None:
        if not self.shown:
            return
        filled = int(WIDTH * self.done / self.work)
        seconds = time.monotonic() - self.start
        bar = "#" * filled + "." * (WIDTH - filled)
        sys.stderr.write(f"\r\x1b[K[{bar}] {100 * self.done / self.work:3.0f} %  {seconds:4.0f} s  {self.label}")
        sys.stderr.flush()

    def clear(self) -> None:
        """Erase the bar before a line of output."""
        if self.shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
