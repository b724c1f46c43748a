"""The versions of frameworks that the adapters need: older ones are refused with both versions, and the README states them."""

from __future__ import annotations

import importlib
import pathlib

import pytest
from harness import run_python

import libflash
from libflash import _versions

README = (pathlib.Path(__file__).resolve().parents[1] / "README.md").read_text()


@pytest.mark.parametrize(
    ("version", "numbers"),
    [
        ("2.11.0a0+git12ab", (2, 11, 0)),
        ("2.9.1+cpu", (2, 9, 1)),
        ("0.10.2.dev20260101", (0, 10, 2)),
        ("6", (6,)),
        ("5.0.0rc1", (5, 0, 0)),
    ],
)
def test_numbers_of_a_version(version: str, numbers: tuple[int, ...]) -> None:
    assert _versions.numbers_of(version) == numbers


def test_the_order_is_that_of_numbers() -> None:
    assert _versions.too_old("PyTorch", "2.9.1", "x") == "x needs PyTorch 2.11 or newer; the version found is 2.9.1"
    for version in ("2.11", "2.11.0", "2.13.0+cpu", "3.0"):
        assert _versions.too_old("PyTorch", version, "x") is None


@pytest.mark.parametrize(("module", "package", "old"), [("torch", "PyTorch", "2.10.0"), ("jax", "JAX", "0.7.0")])
def test_an_old_version_is_refused(module: str, package: str, old: str) -> None:
    pytest.importorskip(module)
    program = f"""
import {module}
{module}.__version__ = {old!r}
try:
    import libflash.{module}
except ImportError as error:
    print(error)
"""
    wanted = f"libflash.{module} needs {package} {_versions.NEEDED[package]} or newer; the version found is {old}\n"
    assert run_python(program) == wanted


def test_continuous_batching_of_an_old_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    switch = importlib.import_module("libflash._torch_hf_models").switch
    monkeypatch.setattr(transformers, "__version__", "5.18.0")
    text = r"enable\(model, paged=True\) needs transformers 5\.19 or newer; the version found is 5\.18\.0"
    with pytest.raises(libflash.UnsupportedError, match=text):
        switch((), paged=True)
    switch(())


def test_the_readme_states_them() -> None:
    for package, needed in _versions.NEEDED.items():
        assert f"{package} {needed}" in README, package
