"""Decode over keys that sequences share run on the host: the same bits with and without the hint."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from emulated_decode import decode, decode_instances
from emulated_kernels import DECODE_KERNELS_OF_TWO_HEADS
from emulated_programs import Program, with_kernels
from emulated_runs import Run, runs

pytestmark = pytest.mark.early

# Keys that sequences share: the arguments of decode_prefix.cpp. First the calls that take the hint.
PREFIX_CASES = (
    *((1, 4, 1, 16, 0, 0, 0, 0, 20, 1, 0), (1, 3, 0, 16, 0, 0, 0, 1, 4, 0, 1), (1, 4, 3, 16, 1, 0, 0, 0, 20, 1, 1)),
    *((3, 3, -256, 64, 1, 0, 0, 8, 20, 0, 0), (1, 4, 0, 16, 2, 1, 0, 9, 20, 0, 2)),
    *((1, 4, 1, 0, 0, 0, 0, 0, 20, 1, 2), (1, 16, 2, 3, 1, 0, 0, 1, 20, 1, 0), (5, 3, 4, 16, 3, 5, 0, 8, 20, 0, 1)),
    *((1, 1, 5, 100, 1, 0, 0, 0, 20, 0, 0), (2, 1, 0, 64, 1, 2, 0, 0, 4, 1, 1)),
    *((1, 4, 1, 16, 4, 0, 0, 0, 20, 0, 0), (1, 4, 2, 16, 5, 1, 0, 0, 20, 0, 1)),
)
# The same for the kernel of sm90, with three cases of 128 rows in a thread block before the first one of 64.
PREFIX_CASES_OF_SM90 = (
    *((1, 16, 1, 16, 1, 0, 0, 0, 20, 1, 1), (3, 5, 0, 32, 0, 0, 0, 9, 20, 0, 2), (2, 8, 3, 0, 0, 0, 0, 8, 4, 1, 0)),
    *((1, 4, 1, 16, 0, 0, 0, 16, 20, 1, 1), (2, 8, 0, 32, 0, 0, 0, 24, 4, 0, 2), (1, 4, 0, 16, 1, 0, 0, 16, 4, 1, 1)),
    *(case for case in PREFIX_CASES if case[3] % 16 == 0),
)
# ALiBi, a window, more rows than a slab, a call that leaves most of the GPU idle without splits, and invariant rows.
PREFIX_CASES_WITHOUT = (
    *((2, 2, -128, 16, 0, 1, 1, 8, 20, 1, 1), (4, 4, -384, 16, 2, 0, 1, 9, 20, 1, 2)),
    *((1, 4, 1, 16, 0, 0, 0, 2, 20, 0, 0), (1, 4, 1, 16, 0, 0, 0, 4, 20, 0, 0)),
    *((5, 4, 1, 16, 0, 0, 0, 8, 20, 0, 0), (1, 4, 0, 16, 0, 0, 0, 0, 64, 0, 0)),
)


def decode_prefix(dtype: str, head_dim: int, tile: str) -> Program:
    return decode(dtype, head_dim, tile)._replace(source="decode_prefix.cpp")


def decode_prefix_sm90(dtype: str, head_dim: int, tile: str, stages: int) -> Program:
    """The shared keys by the kernel of sm90."""
    defines = {"DTYPE": dtype, "HEAD_DIM": head_dim, "PREFIX_TILE": f"128, 64, {stages}"}
    of_prefix = Program("prefix_instances.cpp", ("sm90/decode_prefix.cuh",), tuple(defines.items()))
    of_decode = decode_instances(dtype, f"{head_dim}, {head_dim}", tile)
    return with_kernels("decode_prefix.cpp", of_decode, of_prefix)


PREFIX_RUNS = runs(
    {name: decode_prefix(*sizes) for name, sizes in DECODE_KERNELS_OF_TWO_HEADS.items()},
    lambda name: (*PREFIX_CASES, *PREFIX_CASES_WITHOUT) if name == "bf16-64" else PREFIX_CASES[1::3],
)
# Two stages instead of those of kernels.table, so that they are filled again.
PREFIX_SM90_RUNS = runs(
    {f"sm90-{name}": decode_prefix_sm90(*sizes, 2) for name, sizes in DECODE_KERNELS_OF_TWO_HEADS.items()},
    lambda name: PREFIX_CASES_OF_SM90[:: 1 if name == "sm90-bf16-64" else 4],
)


@pytest.mark.parametrize("run", PREFIX_RUNS)
def test_the_hint_of_shared_keys_changes_no_bit(output: Callable[[Run], str], run: Run) -> None:
    used = "unused" if run.arguments in PREFIX_CASES_WITHOUT else "used"
    assert f"ok 0 bits differ, 0 absent, hint {used}" in output(run)


@pytest.mark.parametrize("run", PREFIX_SM90_RUNS)
def test_the_kernel_of_sm90_for_shared_keys_has_the_same_bits(output: Callable[[Run], str], run: Run) -> None:
    threads = {PREFIX_CASES_OF_SM90[0]: 384, PREFIX_CASES_OF_SM90[3]: 256}.get(run.arguments, "")
    assert f"ok 0 bits differ, 0 absent, hint used by sm90 with {threads}" in output(run)
