"""The kernels' machine code, as far as it can be judged without a GPU: every row of kernels.table compiled once more for each
architecture of the build, and the assembler asked what it did.

LIBFLASH_BUILD_DIR names a configured build folder with the CUDA part.
"""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

# What a room's kernels exist for; without it in the PTX a kernel computes in the slow way.
MATRIX_INSTRUCTION = {"sm80": "mma.sync", "sm90": "wgmma.mma_async"}
KERNEL = re.compile(
    r"Compiling entry function '(?P<name>\w+)'.*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers",
    re.S,
)
LARGEST_REGISTERS = 255


def rows():
    """(row, room, compiler command) for each row that the build folder compiles."""
    folder = os.environ.get("LIBFLASH_BUILD_DIR")
    if not folder:
        return []
    found = []
    for entry in json.loads((Path(folder) / "compile_commands.json").read_text()):
        source = Path(entry["file"])
        if source.suffix == ".cu" and source.parent.name == "generated":
            found.append((source.stem, re.search(r"libflash_cuda_(\w+)\.dir", entry["command"])[1], entry))
    assert found, f"LIBFLASH_BUILD_DIR={folder}: no CUDA kernels in this build"
    return found


def architectures(entry):
    """Those with machine code: "80", "90a"."""
    return sorted(set(re.findall(r"code=\[?[^\]\s]*?sm_(\w+)", entry["command"])))


ROWS = [(name, room, entry, arch) for name, room, entry in rows() for arch in architectures(entry)]
if not ROWS:
    pytest.skip("LIBFLASH_BUILD_DIR names no build folder with the CUDA part", allow_module_level=True)


def compile_as(entry, arch, kind, out, *more):
    """The command of the build, for one architecture, to a cubin or to PTX."""
    words = shlex.split(entry["command"])
    if Path(words[0]).name == "ccache":
        words = words[1:]
    words = [w for w in words if not w.startswith(("--generate-code", "-arch", "--compress-mode")) and w not in ("-c", "-dc")]
    del words[words.index("-o") : words.index("-o") + 2]
    for flag in ("-MF", "-MT"):
        if flag in words:
            del words[words.index(flag) : words.index(flag) + 2]
    words = [w for w in words if w != "-MD"]
    done = subprocess.run(
        [*words, f"-arch=sm_{arch}", kind, "-o", str(out), *more],
        cwd=entry["directory"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize(("name", "room", "entry", "arch"), ROWS, ids=[f"{name}-{arch}" for name, _, _, arch in ROWS])
def test_no_spills_no_local_memory(tmp_path, name, room, entry, arch):
    said = compile_as(entry, arch, "-cubin", tmp_path / "row.cubin", "-Xptxas", "-v")
    kernels = [m.groupdict() for m in KERNEL.finditer(said)]
    assert kernels, said
    assert "serialized" not in said, said  # "wgmma.mma_async instructions are serialized due to ..."
    for kernel in kernels:
        assert name in kernel["name"], "a profiler shows the row's name"
        assert (kernel["stack"], kernel["stores"], kernel["loads"]) == ("0", "0", "0"), kernel
        assert int(kernel["registers"]) <= LARGEST_REGISTERS


@pytest.mark.parametrize(("name", "room", "entry", "arch"), ROWS, ids=[f"{name}-{arch}" for name, _, _, arch in ROWS])
def test_matrix_instructions(tmp_path, name, room, entry, arch):
    if room not in MATRIX_INSTRUCTION:
        pytest.skip(f"{name} multiplies no matrices")
    compile_as(entry, arch, "-ptx", tmp_path / "row.ptx")
    assert MATRIX_INSTRUCTION[room] in (tmp_path / "row.ptx").read_text()
