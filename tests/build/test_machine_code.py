"""Checks of the kernels' machine code that need no GPU: the assembler's report on every kernel of kernels.table for
every architecture of the build, and the matrix instructions in the PTX.

LIBFLASH_BUILD_DIR names a build folder with the CUDA part, made with CMAKE_CUDA_FLAGS="-Xptxas=-v --keep --keep-dir=KEPT", where
KEPT is its folder `kept`, for the PTX of every kernel. Its build.log is the output of a clean build.
"""

import json
import os
import re
from pathlib import Path

import pytest

# The matrix instruction of each folder's kernels. Without it in the PTX a kernel would use slower instructions.
MATRIX_INSTRUCTION = {"sm80": "mma.sync.aligned.m16n8k16", "sm90": "wgmma.mma_async"}
OF_FLOATS = {"sm80": "mma.sync.aligned.m16n8k8.row.col.f32.tf32"}
OF_DOUBLES = {"80": "mma.sync.aligned.m8n8k4.row.col.f64", "90": "mma.sync.aligned.m16n8k"}
# Kernels of float64 whose tiles have 8 rows.
EIGHT_ROWS = r"_tangent_sm80_f64_d(256|512_small)$|^backward_sm80_f64_d512_small$|_f64_d512_small_statistics$"
KERNEL = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for 'sm_(?P<arch>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?:, used \d+ barriers)?(?:, (?P<shared>\d+) bytes smem)?",
    re.S,
)
LARGEST_REGISTERS = 255
# GPUs with 99 KB of shared memory per thread block: tiles take 96 KB of dynamic shared memory, so static memory must be small.
# The tiles of wide heads have fewer query rows, and need less beside them. Their large kernel needs more shared memory anyway.
SMALL = ("80", "86", "89", "120")
LARGEST_SHARED, LARGEST_SHARED_WIDE = 2048, 2560


def units(build):
    """name -> (folder, compiler command, kernels) of each translation unit with kernels in the build folder."""
    found = {}
    for entry in json.loads((build / "compile_commands.json").read_text()):
        source = Path(entry["file"])
        if source.suffix == ".cu" and source.parent.name == "generated":
            folder = re.search(r"libflash_cuda_([a-z0-9]+)\w*\.dir", entry["command"])[1]
            found[source.stem] = folder, entry, re.findall(r"^int launch_(\w+)\(", source.read_text(), re.MULTILINE)
    assert found, f"{build}: no CUDA kernels in this build"
    assert all(names for _, _, names in found.values()), found
    return found


def made_from(entry):
    """PTX version -> targets compiled from it: {"80": ["sm_80", "compute_80"], "90a": ["sm_90a"]}."""
    return {ptx: codes.split(",") for ptx, codes in re.findall(r"arch=compute_(\w+),code=\[([\w,]+)\]", entry["command"])}


def architectures(entry):
    """The architectures with machine code: "80", "90a"."""
    return sorted(code.removeprefix("sm_") for codes in made_from(entry).values() for code in codes if code.startswith("sm_"))


def kernel_of(symbol, names):
    """The kernel's name, which its symbol contains."""
    kernel = max((name for name in names if name in symbol), key=len, default=None)
    assert kernel, f"the symbol {symbol} contains no kernel's name"
    return kernel


def kernels(log, names):
    """(kernel, architecture) -> the assembler's report on each of its functions."""
    found = {}
    for match in KERNEL.finditer(log):
        found.setdefault((kernel_of(match["name"], names), match["arch"]), []).append(match.groupdict())
    return found


if "LIBFLASH_BUILD_DIR" not in os.environ:
    pytest.skip("LIBFLASH_BUILD_DIR names no build folder with the CUDA part", allow_module_level=True)
FOLDER = Path(os.environ["LIBFLASH_BUILD_DIR"])
UNITS = units(FOLDER)
LOG = (FOLDER / "build.log").read_text()
KERNELS = kernels(LOG, [name for _, _, names in UNITS.values() for name in names])
WANTED = [(name, arch) for _, entry, names in UNITS.values() for name in names for arch in architectures(entry)]


def test_nothing_is_serialized():
    assert "serialized" not in LOG  # "wgmma.mma_async instructions are serialized due to ..."


@pytest.mark.parametrize(("name", "arch"), WANTED, ids=[f"{name}-{arch}" for name, arch in WANTED])
def test_no_spills_no_local_memory(name, arch):
    assert (name, arch) in KERNELS, f"not in build.log: {sorted(KERNELS)}"
    for kernel in KERNELS[name, arch]:
        assert (kernel["stack"], kernel["stores"], kernel["loads"]) == ("0", "0", "0"), kernel
        assert int(kernel["registers"]) <= LARGEST_REGISTERS


@pytest.mark.parametrize(("name", "arch"), [(n, a) for n, a in WANTED if n.startswith("forward_sm80") and a in SMALL])
def test_forward_fits_the_small_gpus(name, arch):
    if name.endswith("_d512"):
        pytest.skip("needs 163 KB")
    most = LARGEST_SHARED_WIDE if "_d512_small" in name else LARGEST_SHARED
    if name.endswith("f16_d256_statistics"):
        most = 8192  # two warps with the same rows exchange P; it fits beside tiles of 64 KB and less than 4 KB of other memory
    assert all(int(kernel["shared"] or 0) <= most for kernel in KERNELS[name, arch]), KERNELS[name, arch]


def ptx_of(unit, entry):
    """version -> the PTX that the build made. The compiler leaves the version out of the file's name if there is only one."""
    versions = list(made_from(entry))
    names = {version: f"{unit}.compute_{version}.ptx" for version in versions} if versions[1:] else {versions[0]: f"{unit}.ptx"}
    return {version: (FOLDER / "kept" / name).read_text() for version, name in names.items()}


def instruction(name, folder, version):
    """The instruction that a kernel must contain in this version of its PTX."""
    if "_f64_" in name:
        return OF_DOUBLES["80" if re.search(EIGHT_ROWS, name) else version]
    if "_f32_" not in name:
        return MATRIX_INSTRUCTION[folder]
    return "fma.rn.f32" if name.startswith("decode") else OF_FLOATS[folder]


def entries(ptx, names):
    """kernel -> the PTX of its functions."""
    found = dict.fromkeys(names, "")
    for kernel in re.split(r"^(?=.*\.entry )", ptx, flags=re.MULTILINE)[1:]:
        found[kernel_of(re.search(r"\.entry (\w+)", kernel)[1], names)] += kernel
    return found


@pytest.mark.parametrize("unit", UNITS)
def test_matrix_instructions(unit):
    folder, entry, names = UNITS[unit]
    if folder not in MATRIX_INSTRUCTION:
        pytest.skip(f"{unit} multiplies no matrices")
    for version, ptx in ptx_of(unit, entry).items():
        for name, code in entries(ptx, names).items():
            assert instruction(name, folder, version) in code, f"{name}, PTX version {version}"


def registers_of_roles(code):
    """(registers of a lane of all warpgroups that change them, number of warpgroups) of a kernel in PTX. One warpgroup takes each
    path that gives registers away, the others the path that takes more.
    """
    threads = int(re.search(r"\.maxntid (\d+)", code)[1])
    given = [int(x) for x in re.findall(r"setmaxnreg\.dec\.sync\.aligned\.u32 (\d+)", code)]
    taken = {int(x) for x in re.findall(r"setmaxnreg\.inc\.sync\.aligned\.u32 (\d+)", code)}
    if not taken:
        return 0, threads // 128
    assert len(taken) == 1, taken
    return sum(given) + taken.pop() * (threads // 128 - len(given)), threads // 128


@pytest.mark.parametrize("unit", [unit for unit, (folder, _, _) in UNITS.items() if folder == "sm90"])
def test_registers_of_the_roles(unit):
    """All warpgroups together have no more registers than they were launched with: else one waits for more forever."""
    _, entry, names = UNITS[unit]
    checked = 0
    for ptx in ptx_of(unit, entry).values():
        for kernel in re.split(r"^(?=.*\.entry )", ptx, flags=re.MULTILINE)[1:]:
            symbol = re.search(r"\.entry (\w+)", kernel)[1]
            if "setmaxnreg" in kernel:
                wanted, warpgroups = registers_of_roles(kernel)
                reports = [r for found in KERNELS.values() for r in found if r["name"] == symbol and r["arch"] == "90a"]
                assert [wanted <= int(r["registers"]) * warpgroups for r in reports] == [True], (symbol, wanted, reports)
                checked += 1
    assert checked or not any(name.startswith(("forward", "backward", "prefill")) for name in names)
