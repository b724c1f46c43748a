"""Information: the kernels and devices of this build on this machine."""

from __future__ import annotations

import ctypes as c
import os
import subprocess
import sys
from pathlib import Path

import abi
import pytest

OPERATIONS = ("forward", "backward", "decode", "merge", "compress", "cache_write", "forward_tangent", "backward_tangent")


def test_every_operation_has_a_usable_cpu_kernel() -> None:
    for operation in OPERATIONS:
        found = [k for k in abi.kernels() if k.operation.decode() == operation and k.backend == b"cpu"]
        assert found, operation
        assert any(k.usable for k in found), operation


def test_rows_are_well_formed() -> None:
    found = abi.kernels()
    names = [k.name.decode() for k in found]
    assert len(set(names)) == len(names)
    for k, name in zip(found, names, strict=True):
        operation, backend = k.operation.decode(), k.backend.decode()
        assert operation in (*OPERATIONS, "prefill", "decode_prefix")  # parts of decode
        assert backend in {"cpu", "sm80", "sm90", "any"}
        assert name.startswith(f"{operation}_{backend}")
        assert bool(k.why_not) != bool(k.usable), name
        assert k.dtype in {b"any", b"f16", b"bf16", b"f32", b"f64"}
        assert min(k.head_dim, k.head_dim_v, k.tile_q, k.tile_k, k.stages) >= 0
        assert k.reserved == 0


def test_the_scalar_reference_comes_last() -> None:
    for operation in ("forward", "backward", "decode", "forward_tangent", "backward_tangent"):
        cpu = [k.name.decode() for k in abi.kernels() if k.operation.decode() == operation and k.backend == b"cpu"]
        assert cpu[-1] == f"{operation}_cpu_scalar"


def test_isa_is_that_of_the_first_usable_kernel() -> None:
    first = next(k.name.decode() for k in abi.kernels() if k.operation == b"forward" and k.backend == b"cpu" and k.usable)
    assert first == f"forward_cpu_{abi.lib.flash_cpu_isa().decode()}"


def test_devices_and_state_agree() -> None:
    count, state = abi.lib.flash_device_count(), abi.lib.flash_cuda_state().decode()
    assert "\n" not in state
    assert state.startswith("ready: ") == (count > 0)
    for index in range(count):
        info = abi.DeviceInfo(struct_size=c.sizeof(abi.DeviceInfo))
        abi.check(abi.lib.flash_device_info(index, c.byref(info)))
        assert info.arch >= 50
        assert info.multiprocessors > 0
        assert info.shared_memory_bytes >= 48 * 1024
        assert info.memory_bytes > 1 << 30
        assert info.name
    cuda = [k for k in abi.kernels() if k.backend != b"cpu"]
    if count == 0:
        assert not any(k.usable for k in cuda)
        assert all(state in k.why_not.decode() for k in cuda)


def test_build_info_is_lines_of_key_and_value() -> None:
    text = abi.lib.flash_build_info().decode()
    assert text.endswith("\n")
    pairs = dict(line.split(": ", 1) for line in text.splitlines())
    assert list(pairs) == ["version", "compiler", "build type", "cpu instruction sets", "cuda", "cuda architectures"]
    assert pairs["version"] == abi.lib.flash_version_string().decode()
    assert pairs["compiler"]
    for isa in pairs["cpu instruction sets"].split():
        assert f"forward_cpu_{isa}" in [k.name.decode() for k in abi.kernels()]


THREADS = """
import ctypes, os, sys
if len(sys.argv) > 2:
    os.sched_setaffinity(0, {int(n) for n in sys.argv[2].split(",")})
lib = ctypes.CDLL(sys.argv[1])
lib.flash_cpu_threads.restype = ctypes.c_int32
lib.flash_last_error.restype = ctypes.c_char_p
print(lib.flash_cpu_threads(), lib.flash_last_error().decode())
"""


def default_threads(*arguments: str, **environment: str) -> tuple[int, str]:
    """flash_cpu_threads() in a new process, and the error text after it."""
    base = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    command = [sys.executable, "-c", THREADS, str(abi.library_path()), *arguments]
    done = subprocess.run(command, env={**base, **environment}, capture_output=True, text=True, check=True)
    number, _, text = done.stdout.strip().partition(" ")
    return int(number), text


def processors() -> int:
    """The processors of this process, limited by the quota of its control group."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = Path("/sys/fs/cgroup", *(line[4:].strip() for line in lines if line.startswith("0::/")))
    limits = [(folder / "cpu.max").read_text().split() for folder in (own, *own.parents) if (folder / "cpu.max").exists()]
    return min([len(os.sched_getaffinity(0)), *(-(-int(quota) // int(period)) for quota, period in limits if quota != "max")])


@pytest.mark.parametrize("given", [1, 3, 4096])
def test_number_of_threads_from_the_environment(given: int) -> None:
    assert default_threads(LIBFLASH_NUM_THREADS=str(given)) == (given, "")
    assert default_threads(OMP_NUM_THREADS=str(given)) == (given, "")
    assert default_threads(LIBFLASH_NUM_THREADS=str(given), OMP_NUM_THREADS="7") == (given, "")


@pytest.mark.parametrize("given", ["0", "-2", "many", "3 ", "4097", "99999", "2,2", "1e1", "9" * 100])
def test_a_bad_number_of_threads_is_refused(given: str) -> None:
    number, text = default_threads(LIBFLASH_NUM_THREADS=given, OMP_NUM_THREADS="2")
    assert number == 0
    assert text == f'LIBFLASH_NUM_THREADS: this environment variable must be a whole number from 1 to 4096 ("{given[:63]}")'


def test_number_of_threads_without_a_usable_variable() -> None:
    """An empty variable counts as absent. OMP_NUM_THREADS is ignored unless it is a number or a list of numbers."""
    assert default_threads(LIBFLASH_NUM_THREADS="") == (processors(), "")
    assert default_threads(OMP_NUM_THREADS="many") == (processors(), "")
    assert default_threads(OMP_NUM_THREADS="3,2") == (3, "")


def test_number_of_threads_follows_the_affinity_mask() -> None:
    mine = sorted(os.sched_getaffinity(0))
    assert default_threads(str(mine[0])) == (1, "")
    assert default_threads(",".join(map(str, mine))) == (processors(), "")


def test_two_copies_load_in_one_process(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Another version, or another program's copy, keeps its own error text."""
    copy = tmp_path_factory.mktemp("copy") / "libflash.so"
    copy.write_bytes(abi.library_path().read_bytes())
    other = abi.load(copy)
    assert abi.lib.flash_kernel_info(-1, None) == abi.INVALID
    assert other.flash_last_error() == b""
    assert other.flash_kernel_count() == abi.lib.flash_kernel_count()
