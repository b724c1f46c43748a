"""Kernels of attention run on the host: their own sources, with fibers for threads and stand-ins for single instructions.

Slow, and blind to races and to what instructions really do; but it runs where there is no GPU, and finds a wrong index at once.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent / "on_host"
NVCC = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
CUDA_HEADERS = next((p for p in Path(NVCC).resolve().parents[1].glob("**/include") if (p / "cuda_bf16.h").exists()), None)
CXX = shutil.which("g++")

# Type, head_dim, tiles of forward and of backward with its stages: kernels of one warp for 32 keys, of two and of four.
ROWS = {
    "bf16-64": ("bf16_", 64, "128, 128", "128, 128, 1"),
    "f16-128": ("f16_", 128, "128, 64", "64, 128, 3"),
    "bf16-192": ("bf16_", 192, "64, 64", "64, 64, 2"),
    "bf16-256-small": ("bf16_", 256, "64, 64", "32, 32, 1"),
    "f32-64": ("f32_", 64, "128, 32", "32, 128, 1"),
    "f32-128": ("f32_", 128, "128, 32", "32, 64, 1"),
    "f32-256-small": ("f32_", 256, "64, 16", "16, 32, 1"),
}

# Which row, how large the inputs are, whether with the rare options, whether deterministic. The slowest take half a minute each.
CASES = ((1, 0, 0), (1, 1, 0), (4, 0, 1), (4, 1, 1))
RUNS = [(row, *case) for row in ROWS for case in (CASES[1:3] if row.endswith("small") else CASES)]

# Type, head_dim, tile with its stages: fragments of Q in registers or not, matrix instructions or none, few warps.
DECODE_ROWS = {
    "bf16-64": ("bf16_", 64, "16, 64, 4"),
    "f16-256-small": ("f16_", 256, "16, 32, 2"),
    "f32-128-small": ("f32_", 128, "16, 32, 2"),
}

# Forward for sm_90a, with its stages: three, two and two warpgroups. And the disorders of forward_sm90.cpp it is run in.
ROWS_SM90 = {
    "bf16-64": ("bf16_", 64, "192, 128", 4),
    "f16-128": ("f16_", 128, "128, 128", 2),
    "bf16-256": ("bf16_", 256, "128, 80", 2),
}
DISORDERS = (0, 1)


def for_the_host(source: str) -> str:
    """Shared memory that is sized by the launch, and the launch itself, are no C++."""
    source = re.sub(r"extern __shared__ __align__\(\d+\) char (\w+)\[\];", r"char* \1 = emulation::dynamic_shared;", source)
    launch = r"(\w+)<<<(.*?), (\S*?), \S*?, \S*?>>>\(([\w, ]+)\);"
    return re.sub(launch, r"emulation::launch(\2, \3, [&] { \1(\4); });", source)


def compiled(folder: Path, room: str, headers: tuple[str, ...], program: str, **defines: object) -> Path:
    """`program` of on_host, with these headers of a room made ready for the host."""
    if CXX is None or CUDA_HEADERS is None:
        pytest.skip("no g++ or no CUDA headers")
    (folder / "cuda" / room).mkdir(parents=True)
    for name in headers:
        source = (ROOT / "libflash/cuda" / room / name).read_text()
        changed = for_the_host(source)
        assert changed != source
        (folder / "cuda" / room / name).write_text(changed)
    command = [CXX, "-std=c++17", "-O2", "-fno-strict-aliasing", "-fno-pie", "-no-pie", "-w", "-fpermissive"]
    command += [f"-D{name}={value}" for name, value in {**defines, "__CUDA_ARCH__": 900}.items()]
    # The changed headers first, then the stand-ins, then the library's own.
    command += [f"-I{path}" for path in (folder, HERE, ROOT / "libflash", ROOT / "include", CUDA_HEADERS)]
    done = subprocess.run([*command, HERE / program, "-o", folder / "program"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:3000]
    return folder / "program"


def assert_right(program: Path, *arguments: int) -> None:
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="module")
def attention(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    dtype, head_dim, forward, backward = ROWS[request.param]
    tiles = {"FORWARD_TILE": forward, "BACKWARD_TILE": backward}
    folder = tmp_path_factory.mktemp("attention")
    headers = ("backward.cuh", "forward.cuh")
    return compiled(folder, "sm80", headers, "attention.cpp", DTYPE=dtype, HEAD_DIM=head_dim, **tiles)


@pytest.mark.parametrize(("attention", "size", "rare", "deterministic"), RUNS, indirect=["attention"])
def test_attention_against_double(attention: Path, size: int, rare: int, deterministic: int) -> None:
    assert_right(attention, size, rare, deterministic)


@pytest.fixture(scope="module", params=DECODE_ROWS)
def decode(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    dtype, head_dim, tile = DECODE_ROWS[request.param]
    folder = tmp_path_factory.mktemp("decode")
    return compiled(folder, "sm80", ("decode.cuh",), "decode.cpp", DTYPE=dtype, HEAD_DIM=head_dim, DECODE_TILE=tile)


# Query rows, ranges (negative: the keys of each), whether paged, what is appended (nothing, two rows ahead of decode, one
# within it), and how many tiles fewer are under way than there is room for.
DECODE_RUNS = (
    *((1, 1, 0, 0, 1), (5, 3, 1, 0, 0), (6, 1, 0, 1, 0), (9, -128, 1, 1, 0), (25, 2, 0, 1, 0)),
    *((1, 1, 0, 2, 1), (1, 3, 0, 2, 0), (1, -128, 1, 2, 0), (1, 40, 1, 2, 0), (4, 2, 1, 0, 1)),
)


@pytest.mark.parametrize(("rows", "splits", "paged", "append", "fewer"), DECODE_RUNS)
def test_decode_against_double(decode: Path, rows: int, splits: int, paged: int, append: int, fewer: int) -> None:
    assert_right(decode, rows, splits, paged, append, fewer)


@pytest.fixture(scope="module", params=ROWS_SM90)
def forward_sm90(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    dtype, head_dim, tile, stages = ROWS_SM90[request.param]
    folder = tmp_path_factory.mktemp("forward_sm90")
    defines = {"DTYPE": dtype, "HEAD_DIM": head_dim, "FORWARD_TILE": tile, "STAGES": stages}
    return compiled(folder, "sm90", ("forward.cuh",), "forward_sm90.cpp", **defines)


@pytest.mark.parametrize("disorder", DISORDERS)
def test_sm90_against_double(forward_sm90: Path, disorder: int) -> None:
    done = subprocess.run([forward_sm90, str(disorder)], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.count("ok ") == 11


def test_rows_of_the_table_are_run() -> None:
    """The tiles above are those of the library."""
    table = (ROOT / "libflash/cuda/kernels.table").read_text()
    for dtype, head_dim, tile, stages in ROWS_SM90.values():
        row = rf"forward +sm90 +{dtype.rstrip('_')} +{head_dim} +{tile.replace(', ', 'x')} +{stages} "
        assert re.search(row, table), row
