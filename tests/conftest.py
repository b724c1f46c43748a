"""Options and fixtures of all tests. `pytest` is the quick set; `pytest --long` adds the random and the large problems."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also the tests that take minutes")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: takes minutes; runs with --long only")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--long"):
        return
    wanted = [item for item in items if "long" not in item.keywords]
    config.hook.pytest_deselected(items=[item for item in items if "long" in item.keywords])
    items[:] = wanted


@pytest.fixture(autouse=True)
def default_threads() -> Iterator[None]:
    """Reset the number of threads after each test."""
    import libflash  # imported here, because tests of the oracle need no library

    yield
    libflash.set_num_threads(0)
