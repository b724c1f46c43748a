"""Under a short name a test finds everything that the module of the package has."""

from __future__ import annotations

import importlib
import pathlib

import pytest

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "short_names"


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_nothing_is_missing(name: str) -> None:
    short, module = importlib.import_module(name), importlib.import_module(f"libflash.conformance.{name}")
    public = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    assert {key: getattr(short, key, None) for key in public} == public
