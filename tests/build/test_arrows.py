"""The #include lines follow the layers of libflash/README.md."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(p for p in (ROOT / "libflash").rglob("*") if p.suffix in (".h", ".cpp", ".cu", ".cuh"))
CUDA_HEADER = re.compile(r"^(cuda|cublas|cute|cutlass|nv/|mma\.h|cooperative_groups|driver_types|vector_types)")
FRAMEWORK = re.compile(r"^(torch|ATen|c10|pybind11|nanobind|Python\.h|numpy|xla|jaxlib|tensorflow|dlpack)")

# folder -> folders and single files it may include from. All may include `libflash.h` and the standard library.
KERNEL_HEADERS = {"cuda/config.h", "cuda/params.h", "cuda/plans.h", "cuda/merge_plan.h"}  # host headers for device code
MAY_INCLUDE = {
    "package": {"old_glibc.inc"},
    "problem": {"problem", "build_info.h"},
    "cpu": {"cpu", "cpu/engine", "problem"},
    "plan": {"plan", "problem", "cpu/kernels.h", "cuda/kernels.h", "cuda/machine_code.h", "build_info.h"},
    "capi": {"capi", "plan", "problem", "build_info.h"},
    # The host code of the CUDA backend: shared code, then that of each architecture, which does not include another one's.
    "cuda": {"cuda", "cuda/host", "cuda/attention", "problem", "cuda_kernels.inc", "cuda_architectures.inc", "build_info.h"},
    "cuda/any (host)": {"cuda", "cuda/host", "cuda/any", "problem"},
    "cuda/sm80 (host)": {"cuda", "cuda/host", "cuda/attention", "cuda/sm80", "problem"},
    "cuda/sm90 (host)": {"cuda", "cuda/host", "cuda/attention", "cuda/sm90", "problem"},
    # Device code, from single instructions to kernels.
    "cuda/ptx": {"cuda/ptx"},
    "cuda/tile": {"cuda/tile", "cuda/ptx", "cuda/driver.h"},
    "cuda/attention": {"cuda/attention", "cuda/tile", "cuda/ptx", *KERNEL_HEADERS},
    "cuda/any": {"cuda/any", "cuda/attention", "cuda/tile", "cuda/ptx", *KERNEL_HEADERS},
    "cuda/sm80": {"cuda/sm80", "cuda/attention", "cuda/tile", "cuda/ptx", *KERNEL_HEADERS},
    "cuda/sm90": {"cuda/sm90", "cuda/attention", "cuda/tile", "cuda/ptx", *KERNEL_HEADERS},
}
# The layers, from the bottom up. Each may include those below it, directly or not; the two backends do not include each other.
BELOW = {
    "package": set(),
    "problem": set(),
    "cpu": {"problem"},
    "cuda": {"problem"},
    "plan": {"problem", "cpu", "cuda"},
    "capi": {"problem", "cpu", "cuda", "plan"},
}
FOLDERS = {"any", "sm80", "sm90"}  # of architectures


def name(path):
    return path.relative_to(ROOT / "libflash").as_posix()


def folder(path):
    return path.parent.relative_to(ROOT / "libflash").as_posix()


def without_comments(text):
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)


def includes(path):
    return re.findall(r'^\s*#\s*include\s*(["<])([^">]+)[">]', path.read_text(), re.M)


def allowed(header, folders):
    folder = header.rpartition("/")[0]
    return header == "libflash.h" or header in folders or folder in folders


def entry_of(path):
    """The key of MAY_INCLUDE that a file comes under."""
    top, _, below = folder(path).partition("/")
    if top != "cuda" or path.suffix not in (".h", ".cpp"):
        return folder(path) if folder(path) in MAY_INCLUDE else top
    return f"cuda/{below} (host)" if below in FOLDERS else "cuda"


def reached(path, seen):
    """Every header of the library that a file includes, directly or not."""
    for quote, header in includes(path):
        target = ROOT / "libflash" / header
        if quote == '"' and target.is_file() and target not in seen:
            seen.add(target)
            reached(target, seen)
    return seen


def test_there_is_something_to_read():
    assert len(SOURCES) > 40
    assert sum(len(includes(path)) for path in SOURCES) > 150


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_includes(path):
    folders = MAY_INCLUDE[entry_of(path)]
    for quote, header in includes(path):
        if quote == '"':
            if path.suffix in (".h", ".cpp"):
                assert not header.endswith(".cuh"), f"{name(path)} is host code, {header} is not"
            assert allowed(header, folders), f"{name(path)} must not include {header}"
        elif CUDA_HEADER.match(header):
            assert folder(path).startswith("cuda"), f"{name(path)} must not include {header}"
        assert not FRAMEWORK.match(header), f"{name(path)} must not include {header}"


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_no_layer_reaches_upwards(path):
    """Through any number of headers."""
    layer = name(path).partition("/")[0]
    layers = {name(header).partition("/")[0] for header in reached(path, set())}
    assert layers <= BELOW[layer] | {layer}, f"{name(path)} reaches {sorted(layers - BELOW[layer] - {layer})}"


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_an_architecture_is_known_in_its_folder_alone(path):
    """No comparison with its name elsewhere, no call of its functions, and no list of names."""
    for architecture in ("sm80", "sm90"):
        if folder(path) != f"cuda/{architecture}":
            text = without_comments(path.read_text())
            assert f'"{architecture}"' not in text, f"{name(path)} names {architecture}"
            assert f"{architecture}::" not in text, f"{name(path)} calls {architecture}"


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_machine_instructions_stand_in_ptx(path):
    if folder(path) != "cuda/ptx":
        assert not re.search(r"\basm\b", without_comments(path.read_text())), f"{name(path)}: asm belongs into cuda/ptx"


def test_the_header_needs_nothing():
    assert {header for _, header in includes(ROOT / "include" / "libflash.h")} == {"stddef.h", "stdint.h"}


def test_every_kernel_has_its_file():
    kernels = [
        line.split()
        for line in (ROOT / "libflash" / "cuda" / "kernels.table").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert kernels
    for operation, where, *_, marks in kernels:
        code = next((f"{operation}_{mark}" for mark in ("statistics", "wide") if mark in marks.split(",")), operation)
        assert (ROOT / "libflash" / "cuda" / where / f"{code}.cuh").is_file()
