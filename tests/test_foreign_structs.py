"""libflash's declarations of XLA's structs against the header in jaxlib. For DLPack's see test_dlpack.py."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parent.parent
COMPILER = shutil.which("g++") or shutil.which("clang++")

XLA = {  # libflash's struct: (XLA's, {libflash's field: XLA's}); if the dict is empty, only the size is compared
    "xla_extension": ("XLA_FFI_Extension_Base", {"struct_size": "struct_size", "type": "type", "next": "next"}),
    "xla_version": ("XLA_FFI_Api_Version", {"major_version": "major_version", "minor_version": "minor_version"}),
    "xla_text": ("XLA_FFI_ByteSpan", {"ptr": "ptr", "len": "len"}),
    "xla_scalar": ("XLA_FFI_Scalar", {"dtype": "dtype", "value": "value"}),
    "xla_buffer": ("XLA_FFI_Buffer", {"dtype": "dtype", "data": "data", "rank": "rank", "dims": "dims"}),
    "xla_buffers": ("XLA_FFI_Args", {"size": "size", "types": "types", "items": "args"}),
    "xla_attributes": ("XLA_FFI_Attrs", {"size": "size", "types": "types", "names": "names", "values": "attrs"}),
    "xla_error_create_args": ("XLA_FFI_Error_Create_Args", {"message": "message", "errc": "errc"}),
    "xla_error_destroy_args": ("XLA_FFI_Error_Destroy_Args", {"error": "error"}),
    "xla_stream_get_args": ("XLA_FFI_Stream_Get_Args", {"context": "ctx", "stream": "stream"}),
    "xla_device_ordinal_get_args": ("XLA_FFI_DeviceOrdinal_Get_Args", {"context": "ctx", "device_ordinal": "device_ordinal"}),
    "xla_metadata_extension": ("XLA_FFI_Metadata_Extension", {"metadata": "metadata"}),
}
XLA_MAY_GROW = {  # structs to which later versions append fields: only offsets are compared
    "xla_api": (
        "XLA_FFI_Api",
        {
            "api_version": "api_version", "internal_api": "internal_api", "error_create": "XLA_FFI_Error_Create",
            "error_destroy": "XLA_FFI_Error_Destroy", "stream_get": "XLA_FFI_Stream_Get",
            "device_ordinal_get": "XLA_FFI_DeviceOrdinal_Get",
        },
    ),
    "xla_frame": (
        "XLA_FFI_CallFrame",
        {"api": "api", "context": "ctx", "stage": "stage", "args": "args", "rets": "rets", "attrs": "attrs"},
    ),
    "xla_metadata": ("XLA_FFI_Metadata", {"api_version": "api_version", "traits": "traits"}),
}  # fmt: skip
XLA_VALUES = {
    "XLA_EXTENSION_METADATA": "XLA_FFI_Extension_Metadata",
    "XLA_STAGE_EXECUTE": "XLA_FFI_ExecutionStage_EXECUTE",
    "XLA_BUFFER": "XLA_FFI_ArgType_BUFFER",
    "XLA_ATTRIBUTE_SCALAR": "XLA_FFI_AttrType_SCALAR",
    "XLA_ATTRIBUTE_STRING": "XLA_FFI_AttrType_STRING",
    "XLA_TRAIT_COMMAND_BUFFER": "XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE",
    "XLA_API_MAJOR": "XLA_FFI_API_MAJOR",
    **{f"XLA_{name}": f"XLA_FFI_DataType_{name}" for name in ("PRED", "S32", "S64", "U8", "U32", "F16", "F32", "F64", "BF16")},
    **{
        f"XLA_{name}": f"XLA_FFI_Error_Code_{name}"
        for name in ("INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "UNIMPLEMENTED", "INTERNAL")
    },
}


def compiles(tmp_path: Path, includes: list[Path], text: str) -> None:
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    source = tmp_path / "layout.cpp"
    source.write_text(text)
    command = [COMPILER, "-std=c++17", "-fsyntax-only", *(f"-I{path}" for path in includes), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def same_layout(ours: str, theirs: str, fields: dict[str, str], *, size: bool = True) -> list[str]:
    lines = [f'static_assert(offsetof({ours}, {a}) == offsetof({theirs}, {b}), "{ours}.{a}");' for a, b in fields.items()]
    lines += [
        f'static_assert(sizeof((({ours} *)0)->{a}) == sizeof((({theirs} *)0)->{b}), "{ours}.{a}");' for a, b in fields.items()
    ]
    return [*lines, *([f'static_assert(sizeof({ours}) == sizeof({theirs}), "{ours}");'] if size else [])]


def xla_program(*extra: str) -> str:
    lines = ["#include <cstddef>", "#include <xla/ffi/api/c_api.h>", '#include "xla_ffi.h"']
    for ours, (theirs, fields) in XLA.items():
        lines += same_layout(ours, theirs, fields)
    lines += same_layout("xla_buffers", "XLA_FFI_Rets", {"size": "size", "types": "types", "items": "rets"})
    for ours, (theirs, fields) in XLA_MAY_GROW.items():
        embedded = {a: b for a, b in fields.items() if a not in ("args", "rets", "attrs")}
        lines += same_layout(ours, theirs, embedded, size=False)
        lines += [f'static_assert(offsetof({ours}, {a}) == offsetof({theirs}, {b}), "");' for a, b in fields.items()]
    lines += [f'static_assert((int){ours} == (int){theirs}, "{ours}");' for ours, theirs in XLA_VALUES.items()]
    return "\n".join([*lines, *extra])


def xla_includes() -> list[Path]:
    jax = pytest.importorskip("jax")
    return [Path(jax.ffi.include_dir()), SOURCES / "python" / "jax_ffi"]


def test_xla(tmp_path: Path) -> None:
    compiles(tmp_path, xla_includes(), xla_program())


def test_the_check_would_notice(tmp_path: Path) -> None:
    wrong = 'static_assert(offsetof(xla_buffer, data) == offsetof(XLA_FFI_Buffer, dims), "");'
    with pytest.raises(AssertionError, match="static"):
        compiles(tmp_path, xla_includes(), xla_program(wrong))


def test_handlers_need_no_foreign_header() -> None:
    for path in (SOURCES / "python" / "jax_ffi").glob("*.[ch]"):
        included = set(re.findall(r'#include [<"]([^>"]+)', path.read_text()))
        assert not [name for name in included if name.startswith(("xla/", "jax", "tsl/"))], path
