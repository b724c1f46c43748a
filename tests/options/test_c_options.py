"""The C structs, in the header, in Cython and in the table of the tests, agree with the list of options."""

from __future__ import annotations

import ctypes
import re

import abi
import pytest
from libflash._option_list import OPTIONS, options_of
from stated_options import PACKAGE, POSITIONAL, ROOT, STRUCTS

from libflash import _option_list

NOT_OPTIONS = {"struct_size", "flags", "num_threads", "tile_q", "tile_k"}  # fields that Python fills by itself
NOT_OPTIONS |= {"reserved", "reserved2"}
ARRAYS_INSTEAD_OF_NUMBERS = ("rng_state", "row_begins", "column_begins")
C_TYPES = {"double": ctypes.c_double, "int64_t": ctypes.c_int64, "uint64_t": ctypes.c_uint64, "const char *": ctypes.c_char_p}
C_TYPES["int32_t"] = ctypes.c_int32


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
        wanted |= {"block_lists": "const flash_block_lists_t *"}
        wanted |= dict.fromkeys(ARRAYS_INSTEAD_OF_NUMBERS, "const flash_tensor_t *")
    found = struct_fields((ROOT / path).read_text(), struct)
    assert {name: kind for name, kind in found.items() if name not in NOT_OPTIONS} == wanted


@pytest.mark.parametrize("operation", POSITIONAL)
def test_abi_table(operation: str) -> None:
    fields = dict(STRUCTS[operation][1]._fields_)
    for option in options_of(operation):
        for name in option.fields:
            pointer = abi.TensorPointer if name != "block_lists" else ctypes.POINTER(abi.BlockLists)
            integer = option.kind is _option_list.SEED and name == "seed"
            wanted = ctypes.c_uint64 if integer else C_TYPES.get(option.kind.c, pointer)
            assert fields[name] is (abi.TensorPointer if name in ARRAYS_INSTEAD_OF_NUMBERS else wanted)


def test_flags() -> None:
    wanted = {option.flag for option in OPTIONS if option.flag} | {"FROM_LSE"}  # of flash_tangents_t
    assert set(re.findall(r"#define FLASH_FLAG_(\w+)", abi.HEADER.read_text())) == wanted
    assert set(re.findall(r"^ +FLASH_FLAG_(\w+)$", (PACKAGE / "_capi.pxd").read_text(), re.M)) == wanted
    assert all(isinstance(getattr(abi, flag), int) for flag in wanted)
