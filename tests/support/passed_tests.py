"""Plugin of pytest for .ci/run: a test that passed in one environment is left out in the next, which has more packages.

PYTHONPATH=tests/support pytest -p passed_tests --write-passed FILE   writes the names of the tests that passed
PYTHONPATH=tests/support pytest -p passed_tests --leave-out FILE      runs all other tests
"""

from __future__ import annotations

from pathlib import Path

import pytest


class Recorder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.passed: set[str] = set()
        self.failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)
        elif report.when == "call" and report.passed:
            self.passed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self.path.write_text("".join(f"{name}\n" for name in sorted(self.passed - self.failed)))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-passed", type=Path, help="file for the names of the tests that passed")
    parser.addoption("--leave-out", type=Path, help="file with names of tests that are not to run")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--write-passed")
    if path and not hasattr(config, "workerinput"):  # only the main process, which gets the reports of all tests
        path.unlink(missing_ok=True)
        config.pluginmanager.register(Recorder(path))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    path = config.getoption("--leave-out")
    if not path:
        return
    passed = set(path.read_text().splitlines())
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
    items[:] = [item for item in items if item.nodeid not in passed]
