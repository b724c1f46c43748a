"""All places, and the files that do not agree with a list of options."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from cython_places import cython
from option_groups import Groups
from python_places import context_parallel, jax, types
from text_edits import Edit

ROOT = Path(__file__).resolve().parents[2]


def option_list() -> ModuleType:
    """The list, without importing libflash, which may not be built yet."""
    spec = importlib.util.spec_from_file_location("option_list_to_write", ROOT / "python/libflash/_option_list.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    return module


def edits(options: Any) -> dict[Path, list[Edit]]:
    groups = Groups(options)
    found: dict[Path, list[Edit]] = {}
    for part in (cython, types, jax, context_parallel):
        for name, more in part(groups).items():
            found.setdefault((ROOT / "python/libflash" / name).resolve(), []).extend(more)
    return found


def changed(options: Any) -> dict[Path, str]:
    """The files that do not agree with the options, and their new texts."""
    found = {}
    for path, changes in edits(options).items():
        old = new = path.read_text()
        for edit in changes:
            new = edit(new)
        if new != old:
            found[path] = new
    return found
