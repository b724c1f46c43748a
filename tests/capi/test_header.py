"""The header: C99 to C++20 without a warning, alone and included twice; and its layout against a golden file."""

from __future__ import annotations

import ctypes as c
import re
import shutil
import subprocess
from pathlib import Path

import abi
import pytest

GOLDEN = Path(__file__).with_name("abi_layout.txt")
WARNINGS = ["-Wall", "-Wextra", "-pedantic", "-Werror", "-Wshadow", "-Wundef"]
STANDARDS = [*(("c", s) for s in ("c99", "c11", "c17")), *(("c++", s) for s in ("c++11", "c++14", "c++17", "c++20"))]
COMPILERS = {"c": ("gcc", "clang"), "c++": ("g++", "clang++")}
STRUCTS = {
    "flash_tensor_t": abi.Tensor,
    "flash_block_lists_t": abi.BlockLists,
    "flash_attention_options_t": abi.AttentionOptions,
    "flash_tangents_t": abi.Tangents,
    "flash_decode_options_t": abi.DecodeOptions,
    "flash_merge_options_t": abi.MergeOptions,
    "flash_cache_write_options_t": abi.CacheWriteOptions,
    "flash_kernel_info_t": abi.KernelInfo,
    "flash_device_info_t": abi.DeviceInfo,
}
USE = """
#include <libflash.h>
#include <libflash.h>
flash_attention_options_t forward_options(void);
flash_attention_options_t forward_options(void) {
    flash_attention_options_t options = FLASH_ATTENTION_OPTIONS_INIT; return options; }
flash_tangents_t tangents(void);
flash_tangents_t tangents(void) { flash_tangents_t made = FLASH_TANGENTS_INIT; return made; }
flash_decode_options_t decode_options(void);
flash_decode_options_t decode_options(void) { flash_decode_options_t options = FLASH_DECODE_OPTIONS_INIT; return options; }
flash_merge_options_t merge_options(void);
flash_merge_options_t merge_options(void) { flash_merge_options_t options = FLASH_MERGE_OPTIONS_INIT; return options; }
flash_kernel_info_t kernel_info(void);
flash_kernel_info_t kernel_info(void) { flash_kernel_info_t info = FLASH_KERNEL_INFO_INIT; return info; }
flash_device_info_t device_info(void);
flash_device_info_t device_info(void) { flash_device_info_t info = FLASH_DEVICE_INFO_INIT; return info; }
"""


def compile_text(compiler: str, text: str, suffix: str, folder: Path, *flags: str) -> None:
    source = folder / f"use{suffix}"
    source.write_text(text)
    command = [compiler, *flags, f"-I{abi.HEADER.parent}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("language", "standard"), STANDARDS)
@pytest.mark.parametrize("which", [0, 1], ids=["gcc", "clang"])
def test_compiles(language: str, standard: str, which: int, tmp_path: Path) -> None:
    compiler = COMPILERS[language][which]
    if not shutil.which(compiler):
        pytest.skip(f"{compiler} is not installed")
    suffix = ".c" if language == "c" else ".cpp"
    compile_text(compiler, USE, suffix, tmp_path, f"-std={standard}", *WARNINGS, "-fsyntax-only")


def constants() -> dict[str, str]:
    """Enumerators and macros with plain numbers, by name, as written in the header; without the version, which may change."""
    text = abi.HEADER.read_text()
    found = dict(re.findall(r"^ +(FLASH_\w+) = (\d+)", text, re.M))
    found |= dict(re.findall(r"^#define (FLASH_\w+) (0x[0-9a-f]+u|\d+)\b", text, re.M))
    return {name: value for name, value in found.items() if not name.startswith("FLASH_VERSION")}


def layout_program() -> str:
    lines = [f'printf("{name} %lld\\n", (long long){name});' for name in constants()]
    for struct, mirror in STRUCTS.items():
        lines.append(f'printf("{struct} %zu\\n", sizeof({struct}));')
        lines += [
            f'printf("{struct}.{name} %zu %zu\\n", offsetof({struct}, {name}), sizeof((({struct} *)0)->{name}));'
            for name, *_ in mirror._fields_
        ]
    body = "\n    ".join(lines)
    return f"#include <stdio.h>\n#include <libflash.h>\nint main(void) {{\n    {body}\n    return 0;\n}}\n"


@pytest.mark.parametrize(("compiler", "suffix"), [("cc", ".c"), ("c++", ".cpp")])
def test_layout(compiler: str, suffix: str, tmp_path: Path) -> None:
    """Sizes, offsets and values are those of the last release, so that old programs keep working."""
    if not shutil.which(compiler):
        pytest.skip(f"{compiler} is not installed")
    program = tmp_path / "layout"
    compile_text(compiler, layout_program(), suffix, tmp_path, "-o", str(program))
    assert subprocess.run([program], capture_output=True, text=True, check=True).stdout == GOLDEN.read_text()


@pytest.mark.parametrize("struct", STRUCTS)
def test_mirror(struct: str) -> None:
    """The ctypes structs of these tests have the header's layout."""
    mirror = STRUCTS[struct]
    golden = dict(line.split(" ", 1) for line in GOLDEN.read_text().splitlines())
    assert int(golden[struct]) == c.sizeof(mirror)
    for name, *_ in mirror._fields_:
        field = getattr(mirror, name)
        assert golden[f"{struct}.{name}"] == f"{field.offset} {field.size}"
    fields = [line for line in golden if line.startswith(struct + ".")]
    assert len(fields) == len(mirror._fields_)


def test_every_function_is_mirrored() -> None:
    declared = re.findall(r"^FLASH_API [\w ]+?\*?\s*\*?(flash_\w+)\(", abi.HEADER.read_text(), re.M)
    assert sorted(declared) == sorted(abi.PROTOTYPES)


def test_header_is_alone() -> None:
    """It includes nothing but the two freestanding headers."""
    assert re.findall(r"^#include (.+)$", abi.HEADER.read_text(), re.M) == ["<stddef.h>", "<stdint.h>"]
