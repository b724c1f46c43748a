"""Information: the kernels and devices of this build on this machine."""

from __future__ import annotations

import ctypes as c
import os
import subprocess
import sys

import abi
import pytest

OPERATIONS = ("forward", "backward", "decode", "merge", "compress")


def test_every_operation_has_a_usable_cpu_kernel() -> None:
    for operation in OPERATIONS:
        rows = [k for k in abi.kernels() if k.operation.decode() == operation and k.backend == b"cpu"]
        assert rows, operation
        assert any(k.usable for k in rows), operation


def test_rows_are_well_formed() -> None:
    rows = abi.kernels()
    names = [k.name.decode() for k in rows]
    assert len(set(names)) == len(names)
    for k, name in zip(rows, names, strict=True):
        operation, backend = k.operation.decode(), k.backend.decode()
        assert operation in OPERATIONS
        assert backend in {"cpu", "sm80", "sm90", "any"}
        assert name.startswith(f"{operation}_{backend}")
        assert bool(k.why_not) != bool(k.usable), name
        assert k.dtype in {b"any", b"f16", b"bf16", b"f32"}
        assert min(k.head_dim, k.head_dim_v, k.tile_q, k.tile_k, k.stages) >= 0
        assert k.reserved == 0


def test_the_scalar_truth_comes_last() -> None:
    for operation in ("forward", "backward", "decode"):
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
import ctypes, sys
lib = ctypes.CDLL(sys.argv[1])
lib.flash_cpu_threads.restype = ctypes.c_int32
print(lib.flash_cpu_threads())
"""


@pytest.mark.parametrize(("given", "expected"), [("3", 3), ("1", 1), ("0", None), ("-2", None), ("many", None), ("", None)])
def test_number_of_threads(given: str, expected: int | None) -> None:
    """LIBFLASH_NUM_THREADS if it is a positive number, else the processors of the process."""
    environment = {**os.environ, "LIBFLASH_NUM_THREADS": given}
    command = [sys.executable, "-c", THREADS, str(abi.library_path())]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) == (expected or len(os.sched_getaffinity(0)))


def test_two_copies_load_in_one_process(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Another version, or another program's copy, keeps its own error text."""
    copy = tmp_path_factory.mktemp("copy") / "libflash.so"
    copy.write_bytes(abi.library_path().read_bytes())
    other = abi.load(copy)
    assert abi.lib.flash_kernel_info(-1, None) == abi.INVALID
    assert other.flash_last_error() == b""
    assert other.flash_kernel_count() == abi.lib.flash_kernel_count()
