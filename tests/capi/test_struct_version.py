"""Structs that grow: `struct_size` says which fields a caller knows."""

from __future__ import annotations

import ctypes as c
import shutil
import subprocess
from pathlib import Path

import abi
import numpy as np
import pytest
from bad_cases import OPTION_TYPES, build, call, field_bytes, options_of

INFOS = {"flash_kernel_info": abi.KernelInfo, "flash_device_info": abi.DeviceInfo}


@pytest.mark.parametrize("function", OPTION_TYPES)
@pytest.mark.parametrize("tail", [1, 8, 4096 - 352])
def test_zero_tail_is_accepted(function: str, tail: int) -> None:
    """A program compiled against a later header that uses none of its new fields."""
    case = build(function, "dense")
    case.struct_tail = bytes(tail)
    assert call(case) == abi.OK, abi.last_error()


@pytest.mark.parametrize("function", OPTION_TYPES)
@pytest.mark.parametrize("at", [0, 1, 7, 15])
def test_every_byte_of_the_tail_counts(function: str, at: int) -> None:
    case = build(function, "dense")
    case.struct_tail = field_bytes(16, at)
    assert call(case) == abi.VERSION
    assert f"byte {c.sizeof(OPTION_TYPES[function]) + at} of" in abi.last_error()


@pytest.mark.parametrize("function", OPTION_TYPES)
def test_bytes_behind_the_struct_are_not_read(function: str) -> None:
    """Memory after a struct of the known size belongs to the caller."""
    case = build(function, "dense")
    case.struct_tail = b"\xff" * 64
    case.options["struct_size"] = c.sizeof(OPTION_TYPES[function])
    assert call(case) == abi.OK, abi.last_error()


@pytest.mark.parametrize("function", ["forward", "backward"])
def test_a_program_of_version_1(function: str) -> None:
    """The memory after such a program's struct is not read as rng_state."""
    case = build(function, "dense")
    case.options["struct_size"] = abi.AttentionOptions.rng_state.offset
    case.option("rng_state", np.zeros(5, np.float32))
    assert call(case) == abi.OK, abi.last_error()


def test_a_program_of_version_1_that_decodes() -> None:
    case = build("decode", "dense")
    case.options["struct_size"] = abi.DecodeOptions.cu_seqlens_q.offset
    case.option("cu_seqlens_q", np.zeros(5, np.float32))
    assert call(case) == abi.OK, abi.last_error()


@pytest.mark.parametrize("function", OPTION_TYPES)
def test_no_options_are_all_defaults(function: str) -> None:
    case, same = build(function, "dense"), build(function, "dense")
    for one in (case, same):
        one.no_options()
    opts = options_of(case)
    assert opts.struct_size == c.sizeof(OPTION_TYPES[function])
    assert call(case) == abi.OK, abi.last_error()
    same.null.add("options")
    assert call(same) == abi.OK, abi.last_error()
    for name in case.outputs:
        assert case.arrays[name].tobytes() == same.arrays[name].tobytes()


@pytest.mark.parametrize("function", INFOS)
def test_info_of_a_later_version(function: str) -> None:
    """The library writes the fields that it knows, zeros after them, and keeps the caller's struct_size."""
    if function == "flash_device_info" and abi.lib.flash_device_count() == 0:
        pytest.skip("no CUDA device")
    size = c.sizeof(INFOS[function])
    block = c.create_string_buffer(b"\xff" * (size + 32), size + 32)
    info, known = c.cast(block, c.POINTER(INFOS[function])), INFOS[function](struct_size=size)
    info.contents.struct_size = size + 16
    assert getattr(abi.lib, function)(0, info) == abi.OK, abi.last_error()
    assert getattr(abi.lib, function)(0, c.byref(known)) == abi.OK, abi.last_error()
    assert info.contents.struct_size == size + 16
    assert info.contents.name == known.name != b""
    assert block.raw[4:size] == bytes(known)[4:]
    assert block.raw[size : size + 16] == bytes(16)
    assert block.raw[size + 16 :] == b"\xff" * 16


@pytest.mark.parametrize("function", INFOS)
@pytest.mark.parametrize("less", [1, 8])
def test_info_before_version_1(function: str, less: int) -> None:
    """Refused, and nothing is written."""
    size = c.sizeof(INFOS[function])
    block = c.create_string_buffer(b"\xff" * size, size)
    info = c.cast(block, c.POINTER(INFOS[function]))
    info.contents.struct_size = size - less
    assert getattr(abi.lib, function)(0, info) == abi.VERSION
    assert abi.last_error().startswith("struct_size: ")
    assert block.raw[4:] == b"\xff" * (size - 4)


INIT = r"""
#include <libflash.h>
#include <stdio.h>
int main(void) {
    flash_kernel_info_t kernel = FLASH_KERNEL_INFO_INIT;
    flash_device_info_t device = FLASH_DEVICE_INFO_INIT;
    if (flash_kernel_info(0, &kernel) != FLASH_STATUS_OK) return puts(flash_last_error()), 1;
    if (flash_device_count() > 0 && flash_device_info(0, &device) != FLASH_STATUS_OK) return puts(flash_last_error()), 1;
    printf("%u %u %s\n", (unsigned)kernel.struct_size, (unsigned)device.struct_size, kernel.name);
    return 0;
}
"""


@pytest.mark.parametrize(("compiler", "standard", "suffix"), [("cc", "c99", ".c"), ("c++", "c++11", ".cpp")])
def test_info_by_the_initializers(compiler: str, standard: str, suffix: str, tmp_path: Path) -> None:
    if not shutil.which(compiler):
        pytest.skip(f"{compiler} is not installed")
    source, program, library = tmp_path / f"use{suffix}", tmp_path / "use", abi.library_path().resolve()
    source.write_text(INIT)
    flags = [f"-std={standard}", "-Wall", "-Wextra", "-Wshadow", "-Werror", f"-I{abi.HEADER.parent}"]
    subprocess.run([compiler, *flags, source, library, f"-Wl,-rpath,{library.parent}", "-o", program], check=True)
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split()
    assert printed == [str(c.sizeof(abi.KernelInfo)), str(c.sizeof(abi.DeviceInfo)), abi.kernels()[0].name.decode()]


def test_version() -> None:
    text = abi.lib.flash_version_string().decode()
    major, minor, patch = map(int, text.split("."))
    assert abi.lib.flash_version() == major * 10000 + minor * 100 + patch
    header = abi.HEADER.read_text()
    for name, value in (("MAJOR", major), ("MINOR", minor), ("PATCH", patch)):
        assert f"#define FLASH_VERSION_{name} {value}\n" in header
