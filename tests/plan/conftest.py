"""The library for described GPUs. Each test describes its GPU."""

from __future__ import annotations

import ctypes as c

import pytest
from described import build, compiled_sources, load
from made_once import made_once


@pytest.fixture(scope="session")
def lib(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> c.CDLL:
    objects = compiled_sources(request, tmp_path_factory)
    return load(made_once(request, tmp_path_factory, "described", lambda folder: build(folder, objects)))
