"""The places besides the list of options that state the options, and helpers for tests that compare them."""

from __future__ import annotations

import ast
import inspect
import pathlib
import re
from typing import Any

import abi
import pytest
from libflash._option_list import OPTIONS, Option

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "python" / "libflash"
POSITIONAL = {
    "attention": "q k v", "attention_backward": "dout q k v out lse", "decode": "q k_cache v_cache", "merge": "outs lses",
    "cache_write": "k v k_cache v_cache slots",
}  # fmt: skip
STRUCTS = {
    "attention": ("flash_attention_options_t", abi.AttentionOptions),
    "attention_backward": ("flash_attention_options_t", abi.AttentionOptions),
    "decode": ("flash_decode_options_t", abi.DecodeOptions),
    "merge": ("flash_merge_options_t", abi.MergeOptions),
    "cache_write": ("flash_cache_write_options_t", abi.CacheWriteOptions),
}
# Names of types in the stubs, and what they are in the list of options.
SAME = {
    "_DLPackArray": "Array",
    "A": "Array",
    "Tensor": "Array",
    "_Stream": "Stream",
    "Align": "causal_align",
    "Layout": "layout",
    "CacheDtype": "cache_dtype",
}
CHOICES = {option.name: f"Literal{list(option.choices)!r}" for option in OPTIONS if option.choices}
SAMPLES: dict[str, Any] = {
    "bool": None, "Literal": None, "float": 0.5, "int": 3, "str": "cpu", "Window": (3, 2), "Shard": (3, 2, 4), "int | Array": 5,
    "tuple[str, ...]": ("entropy",),
}  # fmt: skip


def defaults(function: Any) -> dict[str, Any]:
    return {name: p.default for name, p in inspect.signature(function).parameters.items() if p.kind is p.KEYWORD_ONLY}


def adapter_options(function: str, adapter: str) -> list[Option]:
    return [option for option in OPTIONS if function in option.functions and getattr(option, adapter)]


def alternatives(annotation: str) -> set[str]:
    """The members of a union, with the list's names. The names Window and Stream include None."""
    found = {SAME.get(part, part) for part in annotation.replace('"', "'").split(" | ")}
    found = {CHOICES.get(part, part) for part in found}
    return found - {"None"} if found & {"Window", "Stream"} else found


class Types:
    """The option classes (TypedDict) and functions in some files, read as text."""

    def __init__(self, *names: str) -> None:
        trees = [ast.parse((PACKAGE / name).read_text()) for name in names]
        self.functions = [node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]
        self.classes = {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}

    def members(self, name: str) -> dict[str, str]:
        found: dict[str, str] = {}
        if name not in self.classes:
            return found
        for base in self.classes[name].bases:
            found |= self.members(ast.unparse(base).partition("[")[0])
        for line in self.classes[name].body:
            if isinstance(line, ast.AnnAssign):
                found[ast.unparse(line.target)] = ast.unparse(line.annotation)
        return found

    def options(self, function: str) -> list[dict[str, str]]:
        """The options of each definition of the function whose options are one class."""
        found = []
        for node in self.functions:
            if node.name != function or node.args.kwarg is None:
                continue
            written = {x.arg: ast.unparse(x.annotation) for x in node.args.kwonlyargs}
            written.pop("return_lse", None)
            if kind := re.fullmatch(r"Unpack\[(\w+)(\[\w+\])?\]", ast.unparse(node.args.kwarg.annotation)):
                found.append(written | self.members(kind.group(1)))
        return found


def sample(option: Option, array: Any) -> Any:
    """A value that is not the default."""
    if option.kind.type == "bool":
        return not option.default
    return option.choices[1] if option.choices else SAMPLES.get(option.kind.type, array)


def adapter_cases(adapter: str) -> list[pytest.ParameterSet]:
    return [
        pytest.param(function, option, id=f"{function}-{option.name}")
        for function in ("attention", "decode", "merge")
        for option in adapter_options(function, adapter)
    ]
