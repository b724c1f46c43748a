"""The library for described GPUs. Each test describes its GPU."""

from __future__ import annotations

import ctypes as c

import pytest
from described import build


@pytest.fixture(scope="session")
def lib(tmp_path_factory: pytest.TempPathFactory) -> c.CDLL:
    return build(tmp_path_factory.mktemp("described"))
