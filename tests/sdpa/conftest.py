"""Fixtures of the tests of libflash.torch.enable. They import PyTorch when they run: without it the tests are skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def switch_off_again() -> Iterator[None]:
    yield
    from sdpa_problem import switch_off

    switch_off()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the functions of the compiled module in the order in which they are called."""
    from sdpa_problem import record_calls

    return record_calls(monkeypatch)
