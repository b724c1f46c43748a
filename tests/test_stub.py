"""The stub _core.pyi states the names, parameters and defaults of the compiled module.

options/ compares the options of both with the list of options; here is everything else.
"""

from __future__ import annotations

import ast
import inspect
import pathlib
import types
from typing import Any

import pytest
from libflash._option_list import options_of

from libflash import _core

STUB = (pathlib.Path(__file__).resolve().parents[1] / "python" / "libflash" / "_core.pyi").read_text()
KINDS = {
    "posonlyargs": inspect.Parameter.POSITIONAL_ONLY,
    "args": inspect.Parameter.POSITIONAL_OR_KEYWORD,
    "kwonlyargs": inspect.Parameter.KEYWORD_ONLY,
}
REQUIRED = inspect.Parameter.empty


def public_names() -> set[str]:
    """The module's own names: without imported names, and without names that begin with an underscore."""
    own = {name for name, value in vars(_core).items() if getattr(value, "__module__", "libflash._core") == "libflash._core"}
    modules = {name for name in own if isinstance(getattr(_core, name), types.ModuleType)}
    return {name for name in own - modules if not name.startswith("_")} | {"__version__"}


def parameters(node: ast.FunctionDef) -> tuple[dict[str, Any], dict[str, Any]]:
    """Kind and default of each parameter. Options that the stub takes from a class are not among them."""
    kinds = {x.arg: kind for field, kind in KINDS.items() for x in getattr(node.args, field)}
    if node.args.kwarg and "Unpack" not in ast.unparse(node.args.kwarg):
        kinds[node.args.kwarg.arg] = inspect.Parameter.VAR_KEYWORD
    positional = [*node.args.posonlyargs, *node.args.args]
    stated = dict(zip([x.arg for x in reversed(positional)], reversed(node.args.defaults), strict=False))
    stated |= dict(zip([x.arg for x in node.args.kwonlyargs], node.args.kw_defaults, strict=True))
    return kinds, {name: ast.literal_eval(value) for name, value in stated.items() if value is not None}


def function_differences(name: str, overloads: list[ast.FunctionDef], target: Any) -> list[str]:
    """Each overload has the module's parameters, and each default is stated by an overload."""
    signature = inspect.signature(target).parameters
    stated: dict[str, Any] = {}
    found = []
    for node in overloads:
        kinds, defaults = parameters(node)
        kinds.pop("self", None)
        listed = {option.name for option in options_of(name)} - set(kinds)
        expected = {x.name: x.kind for x in signature.values() if x.name not in listed}
        if list(kinds.items()) != list(expected.items()):
            found.append(f"{name}: parameters {kinds}, in the module {expected}")
        for parameter, value in defaults.items():
            if stated.setdefault(parameter, value) != value:
                found.append(f"{name}: {parameter} has two defaults")
    expected = {x: signature[x].default for x in kinds if x in signature and signature[x].default is not REQUIRED}
    if stated != expected or any(type(stated[x]) is not type(expected[x]) for x in stated):
        found.append(f"{name}: defaults {stated}, in the module {expected}")
    return found


def differences(text: str) -> list[str]:
    """The differences between a stub and the module."""
    functions: dict[str, list[ast.FunctionDef]] = {}
    targets: dict[str, Any] = {}
    constants: dict[str, str] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            functions.setdefault(node.name, []).append(node)
            targets[node.name] = getattr(_core, node.name, None)
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            functions[node.name] = [x for x in node.body if isinstance(x, ast.FunctionDef) and x.name == "__init__"]
            targets[node.name] = getattr(_core, node.name, None)
        elif isinstance(node, ast.AnnAssign):
            constants[ast.unparse(node.target)] = ast.unparse(node.annotation).partition("[")[0]
    constants.pop("_Stream")
    found = [f"{name}: only in the stub or only in the module" for name in sorted({*functions, *constants} ^ public_names())]
    for name, overloads in functions.items():
        if targets[name] is not None:
            found += function_differences(name, overloads, targets[name])
    for name, kind in constants.items():
        if hasattr(_core, name) and type(getattr(_core, name)).__name__ != kind:
            found.append(f"{name}: {kind} in the stub, {type(getattr(_core, name)).__name__} in the module")
    return found


def test_the_stub_agrees_with_the_module() -> None:
    assert differences(STUB) == []


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("def info()", "def information()", "info"),
        ("def get_num_threads() -> int: ...", "", "get_num_threads"),
        ("class TensorShape:", "class Shape:", "TensorShape"),
        ("NO_WINDOW: tuple[int, int]", "", "NO_WINDOW"),
        ("DTYPE_RULE: str", "DTYPE_RULE: int", "DTYPE_RULE"),
        ("shape: tuple[int, ...], strides: tuple[int, ...]", "strides: tuple[int, ...], shape: tuple[int, ...]", "TensorShape"),
        ("threads: int", "count: int", "set_num_threads"),
        ("    /,\n", "", "explain"),
        ("**options: Any,\n) -> str", ") -> str", "explain"),
        ('op: Literal["forward", "backward", "decode"] = "forward"', 'op: Literal["forward", "decode"]', "explain"),
        ("*, stream: _Stream = None)", "*, stream: _Stream = 0)", "compress_block_mask"),
        (
            "k_cache: _DLPackArray, v_cache: _DLPackArray | None = None, *, return_lse: bool",
            "k_cache: _DLPackArray, *, return_lse: bool",
            "decode",
        ),
        ("return_lse: Literal[True] = True", "return_lse: Literal[True]", "merge"),
        (
            "k: _DLPackArray, v: _DLPackArray, *, return_lse: bool",
            "k: _DLPackArray, v: _DLPackArray, return_lse: bool",
            "attention",
        ),
        ("    lse: _DLPackArray,\n    **options", "    lse: _DLPackArray = 0,\n    **options", "attention_backward"),
    ],
)
def test_a_difference_is_found(old: str, new: str, name: str) -> None:
    assert STUB.count(old) == 1, old
    assert any(text.startswith(f"{name}:") for text in differences(STUB.replace(old, new)))
