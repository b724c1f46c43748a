"""Files that all processes of pytest need and that take long to make: the first process that needs them makes them."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def made_once(request: pytest.FixtureRequest, factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The folder of that name, in which `make` has written its files. With pytest-xdist it is one folder for all processes."""
    base = factory.getbasetemp()
    folder = (base.parent if hasattr(request.config, "workerinput") else base) / name
    with locked(folder):
        if not (folder / "made").exists():
            make(folder)
            (folder / "made").touch()
    return folder


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes out of the folder, which need not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
