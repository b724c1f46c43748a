"""Imports the programs of tests/benchmark."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
import types

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "benchmark"


def program(name: str) -> types.ModuleType:
    """Import one of them. Its imports work as when it is run."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(FOLDER))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(FOLDER))
    return module
