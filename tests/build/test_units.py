"""The translation units that units.cmake makes from kernels.table. Runs the CMake functions alone; compiles nothing."""

import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CUDA = ROOT / "libflash" / "cuda"
TABLE = (CUDA / "kernels.table").read_text()
LIST = "80-real 90a-real 100-real 120-real 80-virtual"
SCRIPT = """
include({cuda}/architectures.cmake)
include({cuda}/units.cmake)
set(CMAKE_CUDA_ARCHITECTURES {architectures})
libflash_folder_architectures()
set(LIBFLASH_KERNELS "{kernels}")
set(versions 80 90)
{versions}
libflash_units("{table}" "{folder}")
foreach(group IN LISTS groups)
  foreach(file IN LISTS sources_${{group}})
    message("${{group}}|${{file}}|${{gencode_${{file}}}}")
  endforeach()
endforeach()
"""


@pytest.fixture
def cmake(cmake_script, tmp_path):
    def run(kernels="all", architectures=LIST, versions="", table=TABLE):
        """unit -> (its kernels, group, options), and the kernels of the registry."""
        folder = tmp_path / "with spaces" / "generated"
        shutil.rmtree(folder, ignore_errors=True)
        (tmp_path / "table").write_text(table)
        about = {"kernels": kernels, "architectures": architectures, "versions": versions}
        done = cmake_script(SCRIPT.format(cuda=CUDA, table=tmp_path / "table", folder=folder, **about))
        assert done.returncode == 0, done.stderr
        units = {}
        for group, file, options in (line.split("|") for line in done.stderr.splitlines()):
            text = (folder / file).read_text()
            names = re.findall(r"^struct (\w+) \{$", text, re.MULTILINE)
            assert names == re.findall(r"^int launch_(\w+)\(", text, re.MULTILINE)
            assert names == re.findall(r"^KernelResources resources_(\w+)\(", text, re.MULTILINE)
            assert text.startswith(f"// Generated from cuda/kernels.table: {', '.join(names)}.\n")
            units[file.removesuffix(".cu")] = names, group, options
        assert {f"{unit}.cu" for unit in units} | {"cuda_kernels.inc", "cuda_architectures.inc"} == {
            path.name for path in folder.iterdir()
        }
        return units, re.findall(r"^LIBFLASH_CUDA_KERNEL\(\w+, (\w+), ", (folder / "cuda_kernels.inc").read_text(), re.MULTILINE)

    return run


def kernels_of(units):
    return [name for names, *_ in units.values() for name in names]


def test_every_kernel_is_in_one_unit(cmake):
    lines = [line for line in TABLE.splitlines() if re.match("[a-z]", line)]
    units, registry = cmake()
    assert len(registry) == len(lines)
    assert sorted(kernels_of(units)) == sorted(registry) == sorted(set(registry))
    assert max(len(names) for names, *_ in units.values()) == 2


def test_both_types_of_16_bits_share_a_unit(cmake):
    units, _ = cmake()
    assert units["forward_sm90_bf16_f16_d192x128"][0] == ["forward_sm90_bf16_d192x128", "forward_sm90_f16_d192x128"]
    assert units["decode_sm80_f32_d128"][0] == [
        "decode_sm80_f32_d128"
    ]  # the tile and stages of the 16-bit kernels, in a unit of their own
    assert units["decode_sm80_bf16_f16_d128"][1] == "sm80_large"
    assert units["decode_sm80_bf16_f16_d128_small"][1] == "sm80_small"
    assert units["merge_any"][0] == ["merge_any"]


def test_float64_has_headers_of_its_own(cmake, tmp_path):
    units, _ = cmake(versions="set(versions_f64 80 90)")
    assert units["backward_tangent_sm80_f64_d128"][1] == units["forward_sm80_f64_d64"][1] == "sm80_f64"
    assert units["forward_sm80_f64_d128"][1:] == ("sm80_f64_large", "--generate-code=arch=compute_90,code=[sm_90]")
    assert units["forward_sm80_f64_d128_small"][1] == "sm80_f64_small"
    for name, versions in (("forward_sm80_f64_d128_small", {"80"}), ("backward_sm80_f64_d128", {"80", "90"})):
        assert set(re.findall(r"arch=compute_(\d+)", units[name][2])) == versions
    text = (tmp_path / "with spaces" / "generated" / "backward_tangent_sm80_f64_d128.cu").read_text()
    assert '#include "cuda/sm80/backward_tangent_f64.cuh"' in text


@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_wide_heads_have_a_header_of_their_own_on_sm90(cmake, tmp_path, operation):
    units, _ = cmake()
    assert units[f"{operation}_sm90_bf16_f16_d512"][1] == "sm90_wide"
    for folder, code in (("sm90", f"{operation}_wide"), ("sm80", operation)):
        text = (tmp_path / "with spaces" / "generated" / f"{operation}_{folder}_bf16_f16_d512.cu").read_text()
        assert f'#include "cuda/{folder}/{code}.cuh"' in text
        assert f"return launch_{code}<" in text


def test_statistics_have_headers_of_their_own(cmake, tmp_path):
    units, _ = cmake(versions="set(versions_f64 80)\nset(versions_forward_statistics 80)")
    assert units["forward_sm80_bf16_f16_d64_statistics"][1] == units["forward_sm80_f64_d128_statistics"][1] == "sm80_statistics"
    assert units["forward_sm90_bf16_f16_d64_statistics"][1] == "sm90_statistics"
    assert units["forward_sm80_bf16_f16_d512_small_statistics"][1] == "sm80_statistics_small"
    assert set(re.findall(r"arch=compute_(\d+)", units["forward_sm80_bf16_f16_d64_statistics"][2])) == {"80"}
    for unit, header in (("sm80_bf16_f16_d64", "sm80/forward_statistics"), ("sm80_f64_d128", "sm80/forward_statistics_f64")):
        text = (tmp_path / "with spaces" / "generated" / f"forward_{unit}_statistics.cu").read_text()
        assert f'#include "cuda/{header}.cuh"' in text
        assert "return launch_forward_statistics<" in text


PAIR = "forward sm80 bf16 64 128x128 1 dev\nforward sm80 f16 64 {}\n"


def test_the_mark_dev_does_not_separate_kernels(cmake):
    units, registry = cmake(table=PAIR.format("128x128 1 -"))
    assert units["forward_sm80_bf16_f16_d64"][0] == registry == ["forward_sm80_bf16_d64", "forward_sm80_f16_d64"]


@pytest.mark.parametrize("second", ["128x64 1 -", "128x128 2 -", "128x128 1 large", "128x128 1 small"])
def test_kernels_that_differ_are_apart(cmake, second):
    units, _ = cmake(table=PAIR.format(second))
    apart = "forward_sm80_f16_d64" + ("_small" if "small" in second else "")
    assert {unit: names for unit, (names, *_) in units.items()} == {unit: [unit] for unit in ("forward_sm80_bf16_d64", apart)}


def test_kernels_with_other_versions_are_apart(cmake):
    units, _ = cmake(versions="set(versions_forward_sm80_f16_d64 80 90 100)", table=PAIR.format("128x128 1 -"))
    assert list(units) == ["forward_sm80_bf16_d64", "forward_sm80_f16_d64"]
    assert "compute_100" not in units["forward_sm80_bf16_d64"][2]
    assert "compute_100" in units["forward_sm80_f16_d64"][2]


def test_versions_of_an_operation(cmake):
    """A kernel's own versions come first, then those of its operation, then those of all."""
    table = "\n".join(f"{operation} sm80 f16 64 64x32 1 -" for operation in ("forward", "forward_tangent", "backward_tangent"))
    own = "set(versions_forward_tangent 80)\nset(versions_backward_tangent 80)\nset(versions_backward_tangent_sm80_f16_d64 80 90)"
    units, _ = cmake(versions=own, table=table + "\n")
    from_90 = {unit for unit, (*_, options) in units.items() if "compute_90" in options}
    assert from_90 == {"forward_sm80_f16_d64", "backward_tangent_sm80_f16_d64"}


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        ("forward_sm80_f16_d128$", {"forward_sm80_f16_d128": ["forward_sm80_f16_d128"]}),
        ("^decode_sm80_.*16_d64", {"decode_sm80_bf16_f16_d64": ["decode_sm80_bf16_d64", "decode_sm80_f16_d64"]}),
        ("^(merge|compress)", {"merge_any": ["merge_any"], "compress_any": ["compress_any"]}),
    ],
)
def test_chosen_kernels_alone(cmake, pattern, wanted):
    units, registry = cmake(pattern)
    assert {unit: names for unit, (names, *_) in units.items()} == wanted
    assert sorted(registry) == sorted(kernels_of(units))


def test_dev_kernels(cmake):
    units, registry = cmake("dev")
    marked = [line.split() for line in TABLE.splitlines() if re.match("[a-z].*dev", line)]
    assert len(registry) == len(marked) > 0
    assert sorted(kernels_of(units)) == sorted(registry)
    assert units["forward_sm80_bf16_d128"][0] == ["forward_sm80_bf16_d128"]


def test_kernels_without_an_architecture(cmake):
    units, registry = cmake(architectures="80-real")
    assert sorted(registry) == sorted(kernels_of(units))
    assert not [name for name in registry if "sm90" in name]
    kinds = {"", "_backward", "_f32", "_f64", "_statistics", "_tangent", "_wide"}
    groups = {"any", *(f"sm80{kind}{small}" for kind in kinds for small in ("", "_small"))}
    assert {group for _, group, _ in units.values()} == groups
