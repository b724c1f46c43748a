"""Everything that names the options agrees with the one list of them, and every option arrives where a call ends."""

from __future__ import annotations

import ast
import ctypes
import inspect
import pathlib
import re
from typing import Any

import abi
import numpy as np
import pytest
from harness import qkv
from libflash._option_list import OPTIONS, Option, options_of

import libflash
from libflash import _option_list

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "python" / "libflash"
POSITIONAL = {
    "attention": "q k v", "attention_backward": "dout q k v out lse", "decode": "q k_cache v_cache", "merge": "outs lses",
}  # fmt: skip
STRUCTS = {
    "attention": ("flash_attention_options_t", abi.AttentionOptions),
    "attention_backward": ("flash_attention_options_t", abi.AttentionOptions),
    "decode": ("flash_decode_options_t", abi.DecodeOptions),
    "merge": ("flash_merge_options_t", abi.MergeOptions),
}
NOT_OPTIONS = {"struct_size", "flags", "num_threads", "tile_q", "tile_k", "reserved"}  # fields that Python fills by itself


def defaults(function: Any) -> dict[str, Any]:
    return {name: p.default for name, p in inspect.signature(function).parameters.items() if p.kind is p.KEYWORD_ONLY}


def adapter_options(function: str, adapter: str) -> list[Option]:
    return [option for option in OPTIONS if function in option.functions and getattr(option, adapter)]


# -- Python


@pytest.mark.parametrize("operation", POSITIONAL)
def test_signature(operation: str) -> None:
    parameters = inspect.signature(getattr(libflash, operation)).parameters
    assert [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD] == POSITIONAL[operation].split()
    assert defaults(getattr(libflash, operation)) == {option.name: option.default for option in options_of(operation)}


def test_no_option_is_stated_twice_for_an_operation() -> None:
    for operation in POSITIONAL:
        names = [option.name for option in options_of(operation)]
        assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("op", "operation"), {"forward": "attention", "backward": "attention_backward", "decode": "decode"}.items()
)
def test_explain_takes_the_options_at_their_defaults(op: str, operation: str) -> None:
    q, k, v = qkv()
    given = {option.name: option.default for option in options_of(operation) if option.kind is not _option_list.OUTPUT}
    assert libflash.explain(q, k, v, op=op, **given) == libflash.explain(q, k, v, op=op)
    with pytest.raises(TypeError, match="no_such"):
        libflash.explain(q, k, v, op=op, no_such=None)


def arguments_for(operation: str) -> tuple[np.ndarray, ...]:
    q, k, v = qkv()
    if operation == "attention_backward":
        out, lse = libflash.attention(q, k, v, return_lse=True)
        return q, q, k, v, out, lse
    if operation == "merge":
        out, lse = libflash.attention(q, k, v, return_lse=True)
        return [out], [lse]
    return q, k, v


@pytest.mark.parametrize(
    ("operation", "option"), [(op, option) for op in POSITIONAL for option in options_of(op)], ids=lambda x: getattr(x, "name", x)
)
def test_a_wrong_type_is_refused_by_name(operation: str, option: Option) -> None:
    with pytest.raises((TypeError, libflash.InvalidError)) as refused:
        getattr(libflash, operation)(*arguments_for(operation), **{option.name: object()})
    assert str(refused.value).startswith(option.name)
    assert option.kind.error in str(refused.value)


# -- types


SAME = {
    "_DLPackArray": "Array",
    "A": "Array",
    "Tensor": "Array",
    "_Stream": "Stream",
    "Align": "causal_align",
    "Layout": "layout",
}
CHOICES = {option.name: f"Literal{list(option.choices)!r}" for option in OPTIONS if option.choices}


def alternatives(annotation: str) -> set[str]:
    """The members of a union, in the list's words. The names Window and Stream include None."""
    found = {SAME.get(part, part) for part in annotation.replace('"', "'").split(" | ")}
    found = {CHOICES.get(part, part) for part in found}
    return found - {"None"} if found & {"Window", "Stream"} else found


class Types:
    """The classes of options (TypedDict) in some files, and what functions take, read as text."""

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
        """Of each definition of the function that passes options as one class."""
        found = []
        for node in self.functions:
            if node.name != function or node.args.kwarg is None:
                continue
            written = {x.arg: ast.unparse(x.annotation) for x in node.args.kwonlyargs}
            written.pop("return_lse", None)
            kind = re.fullmatch(r"Unpack\[(\w+)(\[\w+\])?\]", ast.unparse(node.args.kwarg.annotation))
            found.append(written | self.members(kind.group(1)))
        return found


@pytest.mark.parametrize("operation", POSITIONAL)
def test_stub(operation: str) -> None:
    wanted = {option.name: alternatives(option.type) for option in options_of(operation) if option.name != "return_lse"}
    found = Types("_core.pyi", "_option_types.py").options(operation)
    assert len(found) == (1 if operation == "attention_backward" else 3)
    for options in found:
        assert {name: alternatives(annotation) for name, annotation in options.items()} == wanted


# -- C


def struct_fields(text: str, name: str) -> dict[str, str]:
    """Name and type of each field, from C or Cython."""
    body = re.search(name + (r" {\n(?s:(.*?))\n}" if "#define" in text else r":\n((?: {8}.*\n)+)"), text).group(1)
    body = re.sub(r"/\*.*?\*/", "", body, flags=re.S)
    return {m[2]: m[1].strip() for m in re.finditer(r"^\s*((?:const )?\w+ \*?)\s*(\w+);?\s*$", body, re.M)}


@pytest.mark.parametrize("path", ["include/libflash.h", "python/libflash/_capi.pxd"])
@pytest.mark.parametrize("struct", sorted({name for name, _ in STRUCTS.values()}))
def test_struct(path: str, struct: str) -> None:
    wanted = {}
    for option in OPTIONS:
        if any(STRUCTS[operation][0] == struct for operation in option.operations):
            wanted |= dict.fromkeys(option.fields, option.kind.c)
    if struct == "flash_attention_options_t":
        wanted |= {"block_lists": "const flash_block_lists_t *", "rng_state": "const flash_tensor_t *"}
    found = struct_fields((ROOT / path).read_text(), struct)
    assert {name: kind for name, kind in found.items() if name not in NOT_OPTIONS} == wanted


C_TYPES = {"double": ctypes.c_double, "int64_t": ctypes.c_int64, "uint64_t": ctypes.c_uint64, "const char *": ctypes.c_char_p}


@pytest.mark.parametrize("operation", POSITIONAL)
def test_abi_table(operation: str) -> None:
    fields = dict(STRUCTS[operation][1]._fields_)
    for option in options_of(operation):
        for name in option.fields:
            pointer = abi.TensorPointer if name != "block_lists" else ctypes.POINTER(abi.BlockLists)
            integer = option.kind is _option_list.SEED and name == "seed"
            assert fields[name] is (ctypes.c_uint64 if integer else C_TYPES.get(option.kind.c, pointer)) or name == "rng_state"
    if operation == "attention":
        assert fields["rng_state"] is abi.TensorPointer


def test_flags() -> None:
    wanted = {option.flag for option in OPTIONS if option.flag}
    assert set(re.findall(r"#define FLASH_FLAG_(\w+)", abi.HEADER.read_text())) == wanted
    assert set(re.findall(r"^ +FLASH_FLAG_(\w+)$", (PACKAGE / "_capi.pxd").read_text(), re.M)) == wanted
    assert all(isinstance(getattr(abi, flag), int) for flag in wanted)
