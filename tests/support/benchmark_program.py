"""Imports the programs of tests/benchmark, and runs them with the CPU in place of a GPU."""

from __future__ import annotations

import contextlib
import importlib.util
import pathlib
import sys
import types
from collections.abc import Callable

import pytest

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


def cells_on_the_cpu(monkeypatch: pytest.MonkeyPatch, module: str, sizes: dict[str, object]) -> types.ModuleType:
    """The module of cells, with these sizes and the CPU in place of a GPU."""
    cells, contenders = sys.modules[module], sys.modules["_gpu_contenders"]
    monkeypatch.setattr(contenders, "DEVICE", "cpu")
    for peer in contenders.SDPA:
        monkeypatch.setitem(contenders.SDPA, peer, contenders.SDPBackend.MATH)
    for of_family in (contenders, cells):
        if hasattr(of_family, "FAMILY"):
            monkeypatch.setattr(of_family, "FAMILY", "cpu")
    for name, value in sizes.items():
        monkeypatch.setattr(cells, name, value)
    return cells


def make_up_times(monkeypatch: pytest.MonkeyPatch, benchmark: types.ModuleType) -> None:
    """main() of a program with sections runs on the CPU: one call of each contender, and made-up times."""
    torch, shapes = pytest.importorskip("torch"), sys.modules["gpu_shapes"]

    def medians(calls: dict[str, Callable], rounds: int, replay_ms: float) -> tuple[dict[str, float], float]:
        for call in calls.values():
            call()
        return {name: 2.0**i for i, name in enumerate(calls)}, 0.0123

    monkeypatch.setattr(benchmark, "medians", medians)
    monkeypatch.setattr(shapes, "setting", lambda rounds, kernel: {"rounds": rounds})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(shapes.gc, "freeze", lambda: None)
