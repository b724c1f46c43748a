"""Options and fixtures of all tests. `pytest` is the quick set; `pytest --long` adds the random and the large problems."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also the tests that take minutes")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: takes minutes; runs with --long only")
    config.addinivalue_line("markers", "early: takes long; runs before the others, so that no processor waits for it at the end")
    one_gpu_of(os.environ.get("LIBFLASH_TEST_GPUS", ""), os.environ.get("PYTEST_XDIST_WORKER", "gw0"))


def one_gpu_of(gpus: str, worker: str) -> None:
    """Let this process, with the name that pytest-xdist gave it, see one of the GPUs ("0,3"; "": all that it sees now)."""
    if gpus:
        names = gpus.split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = names[int(worker.removeprefix("gw")) % len(names)]


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """With -n alone, a process that has no tests left takes some of another's. By xdist's own choice (--dist load) it would wait
    for the last ones of a process that was given many slow tests.
    """
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getoption("dist") == "load" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: "early" not in item.keywords)
    wanted = [item for item in items if config.getoption("--long") or "long" not in item.keywords]
    wanted = without_repeated_skips(wanted)
    kept = set(wanted)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = wanted


def without_repeated_skips(items: list[pytest.Item]) -> list[pytest.Item]:
    """Of each function that skipif leaves out here, one case, which says why. Without a GPU some 15000 cases are skipped, and
    with pytest-xdist each takes several milliseconds.
    """
    seen: set[object] = set()
    wanted = []
    for item in items:
        if any(mark.args[:1] == (True,) for mark in item.iter_markers("skipif")):
            function = getattr(item, "function", item)
            if function in seen:
                continue
            seen.add(function)
        wanted.append(item)
    return wanted


@pytest.fixture(autouse=True)
def default_threads() -> Iterator[None]:
    """Reset the number of threads after each test."""
    import libflash  # imported here, because tests of the oracle need no library

    yield
    libflash.set_num_threads(0)
