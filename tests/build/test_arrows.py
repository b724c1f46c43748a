"""Which room may include which: the arrows of libflash/README.md, read from the #include lines."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(p for p in (ROOT / "libflash").rglob("*") if p.suffix in (".h", ".cpp", ".cu", ".cuh"))
CUDA_HEADER = re.compile(r"^(cuda|cublas|cute|cutlass|nv/|mma\.h|cooperative_groups|driver_types|vector_types)")
FRAMEWORK = re.compile(r"^(torch|ATen|c10|pybind11|nanobind|Python\.h|numpy|xla|jaxlib|tensorflow|dlpack)")

# room -> rooms it may include from; a file alone is a room of its own. `libflash.h` and the standard library are free to all.
MAY_INCLUDE = {
    "problem": {"problem"},
    "cpu": {"cpu", "problem"},
    "plan": {"plan", "problem", "cpu/kernels.h", "cuda/kernels.h", "build_info.h"},
    "capi": {"capi", "plan", "problem", "build_info.h"},
    # The host side of the CUDA backend, then what kernels are made of, from the instruction upwards.
    "cuda": {"cuda", "cuda/attention", "problem", "plan/device.h", "plan/workspace.h", "cuda_rows.inc"},
    "cuda/ptx": {"cuda/ptx"},
    "cuda/tile": {"cuda/tile", "cuda/ptx"},
    "cuda/attention": {"cuda/attention", "cuda/tile", "cuda/ptx", "cuda/config.h", "cuda/params.h"},
    "cuda/any": {"cuda/any", "cuda/attention", "cuda/tile", "cuda/ptx", "cuda/config.h", "cuda/params.h"},
    "cuda/sm80": {"cuda/sm80", "cuda/attention", "cuda/tile", "cuda/ptx", "cuda/config.h", "cuda/params.h"},
    "cuda/sm90": {"cuda/sm90", "cuda/attention", "cuda/tile", "cuda/ptx", "cuda/config.h", "cuda/params.h"},
}
SPEAKS_TO_CUDA = {"plan/device.cpp"}  # besides cuda/ itself


def name(path):
    return path.relative_to(ROOT / "libflash").as_posix()


def room(path):
    return path.parent.relative_to(ROOT / "libflash").as_posix()


def without_comments(text):
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)


def includes(path):
    return re.findall(r'^\s*#\s*include\s*(["<])([^">]+)[">]', path.read_text(), re.M)


def allowed(header, rooms):
    folder = header.rpartition("/")[0]
    return header == "libflash.h" or header in rooms or folder in rooms or folder.partition("/")[0] in rooms - {"cuda"}


def test_there_is_something_to_read():
    assert len(SOURCES) > 40
    assert sum(len(includes(path)) for path in SOURCES) > 150


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_includes(path):
    names = (room(path), room(path).partition("/")[0])
    if names[1] == "cuda" and path.suffix in (".h", ".cpp"):
        names = names[1:]  # the host side, wherever in cuda/ it stands
    rooms = MAY_INCLUDE[next(r for r in names if r in MAY_INCLUDE)]
    for quote, header in includes(path):
        if quote == '"':
            if path.suffix in (".h", ".cpp"):
                assert not header.endswith(".cuh"), f"{name(path)} is host code, {header} is not"
            assert allowed(header, rooms), f"{name(path)} must not include {header}"
        elif CUDA_HEADER.match(header):
            assert room(path).startswith("cuda") or name(path) in SPEAKS_TO_CUDA, f"{name(path)} must not know {header}"
        assert not FRAMEWORK.match(header), f"{name(path)} must not know {header}"


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_machine_instructions_stand_in_ptx(path):
    if room(path) != "cuda/ptx":
        assert not re.search(r"\basm\b", without_comments(path.read_text())), f"{name(path)}: asm belongs into cuda/ptx"


def test_the_header_needs_nothing():
    assert {header for _, header in includes(ROOT / "include" / "libflash.h")} == {"stddef.h", "stdint.h"}


def test_every_kernel_row_has_its_file():
    rows = [
        line.split()
        for line in (ROOT / "libflash" / "cuda" / "kernels.table").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert rows
    for operation, where, *_ in rows:
        assert (ROOT / "libflash" / "cuda" / where / f"{operation}.cuh").is_file()
