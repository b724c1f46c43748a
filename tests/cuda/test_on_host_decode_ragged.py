"""Decode of rows of any lengths run on the host, alone and beside a prefill kernel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from emulated_decode import decode, decode_instances, decode_sm90, prefill_instances
from emulated_kernels import DECODE_KERNELS, DECODE_KERNELS_OF_TWO_HEADS, DECODE_ROWS_KERNELS_SM90, WIDE_DECODE_KERNELS
from emulated_programs import Program, with_kernels
from emulated_runs import Run, runs

pytestmark = pytest.mark.early

# Rows of any lengths: the arguments of decode_ragged.cpp.
RAGGED_CASES = (
    *((1, 0, 0, 0, 0, -1, 0, 0, 0, 1, 0, 0), (0, 1, 2, 0, 0, -1, 1, 0, 130, 1, 1, 3), (1, 0, 1, 0, 0, 25, 0, 0, 0, 0, 1, 1)),
    *((2, 0, 1, 1, 0, 20, 0, 0, 0, 1, 1, 2), (3, 1, 1, 1, 0, -1, 1, 0, 0, 0, 1, 0), (3, 0, 0, 0, 1, -1, 1, 5, 0, 1, 1, 0)),
    *((1, 1, 1, 1, 1, -1, 0, 0, 0, 0, 1, 4), (-128, 1, 2, 1, 2, 15, 1, 0, 3, 0, 0, 5), (2, 1, 2, 1, 0, 3, 1, 4, 0, 1, 1, 0)),
    *((1, 0, 1, 0, 2, -1, 0, 0, 0, 0, 1, 0), (2, 0, 0, 1, 2, 6, 0, 0, 0, 1, 0, 1), (1, 0, 0, 1, 0, 56, 0, 0, 0, 1, 1, 0)),
)
# Of the kernel of sm90 for many rows, which supports neither positions with a window nor positions with ALiBi.
RAGGED_CASES_OF_MANY_ROWS = (
    *((1, 0, 0, 0, 0, -1, 0, 0, 0, 1, 0, 0), (0, 1, 2, 0, 0, -1, 1, 0, 130, 1, 1, 3), (1, 0, 1, 0, 0, 25, 0, 0, 0, 0, 1, 1)),
    *((3, 1, 1, 1, 0, -1, 0, 0, 0, 0, 1, 0), (3, 0, 0, 0, 1, -1, 1, 5, 0, 1, 1, 0), (1, 1, 1, 1, 1, -1, 0, 0, 0, 0, 1, 4)),
    *((-128, 1, 2, 1, 2, -1, 0, 0, 3, 0, 0, 5), (2, 1, 2, 0, 0, 3, 1, 4, 0, 1, 1, 0), (1, 0, 1, 0, 2, -1, 1, 0, 0, 0, 1, 0)),
    *((1, 1, 0, 1, 1, -1, 0, 50, 0, 0, 0, 2), (2, 0, 0, 0, 0, -1, 1, 45, 0, 0, 1, 1), (0, 0, 0, 0, 0, 9, 0, 22, 0, 1, 1, 3)),
    # The most splits of a row that a warp combines, and one more.
    *((8, 1, 0, 0, 0, -1, 0, 0, 2, 1, 0, 0), (8, 0, 0, 0, 0, -1, 1, 43, 0, 0, 0, 4), (9, 1, 1, 0, 0, -1, 0, 0, 1, 1, 1, 0)),
)
# Rows of any lengths beside a prefill kernel. The sequences have up to 40 query rows, or all 100.
RAGGED_CASES_WITH_PREFILL = (
    *((1, 0, 0, 0, 0, -1, 0, 0, 0, 1, 0, 0, 9), (3, 1, 1, 0, 0, -1, 0, 0, 0, 1, 1, 1, 9)),
    *((2, 0, 2, 1, 0, -1, 0, 0, 3, 1, 1, 2, 30), (0, 1, 1, 0, 0, 25, 0, 0, 2, 1, 0, 3, 4)),
    *((0, 1, 0, 0, 0, -1, 0, 100, 0, 1, 0, 0, 96), (40, 1, 0, 0, 0, 20, 0, 0, 0, 1, 1, 0, 2)),
)
# Rows of any lengths whose prefix sums descend.
RAGGED_CASES_DESCENDING = (
    *((2, 0, 1, 1, 2, -1, 0, 0, 0, 1, 0, 0, 0), (3, 1, 1, 0, 0, -1, 1, 0, 130, 1, 1, 2, 0)),
    *((2, 0, 0, 0, 0, 20, 0, 0, 3, 0, 1, 1, 0), (1, 1, 1, 0, 0, -1, 0, 0, 31, 1, 0, 0, 0)),
    *((9, 0, 1, 0, 0, -1, 1, 0, 0, 1, 0, 0, 0),),
)
RAGGED_CASES_DESCENDING_WITH_PREFILL = ((3, 1, 1, 0, 0, -1, 0, 0, 0, 1, 1, 1, 9),)


def ascending(cases: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    return tuple((*case, 0) for case in cases)


def descending(cases: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    return tuple((*case, 1) for case in cases)


def with_no_prefill(cases: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    return ascending(tuple((*case, 0) for case in cases))


def decode_ragged(dtype: str, head_dim: int, tile: str) -> Program:
    return decode(dtype, head_dim, tile)._replace(source="decode_ragged.cpp")


def decode_with_prefill(dtype: str, head_dim: int, tile: str) -> Program:
    prefill_tile = "128, 128, 4" if head_dim == 64 else "128, 128, 2"
    of_decode = decode_instances(dtype, f"{head_dim}, {head_dim}", tile)
    return with_kernels("decode_ragged.cpp", of_decode, prefill_instances(dtype, head_dim, head_dim, prefill_tile))


def ragged_rows_sm90(dtype: str, head_dim: int, tile: str, stages: int, group: int, head_dim_of_call: int) -> Program:
    """decode_ragged.cpp with the kernel of sm90. `group`: query heads of a key head."""
    of_decode = decode_sm90(dtype, head_dim, head_dim, tile, stages)
    of_decode = of_decode._replace(source="decode_instances.cpp", defines=(*of_decode.defines, ("DECODE_SM90", 1)))
    program = with_kernels("decode_ragged.cpp", of_decode, prefill_instances(dtype, head_dim, head_dim, "128, 128, 2"))
    own = {"HEAD_DIM": head_dim_of_call, "GROUP": group, "PREFILL_DIMS": f"{head_dim}, {head_dim}"}
    return program._replace(defines=tuple((dict(program.defines) | own).items()))


RAGGED_RUNS = [
    *runs(
        {f"ragged-{name}": decode_ragged(*sizes) for name, sizes in DECODE_KERNELS.items()},
        lambda name: (
            *with_no_prefill(RAGGED_CASES if name == "ragged-bf16-64" else RAGGED_CASES[1::2]),
            *descending(RAGGED_CASES_DESCENDING if name == "ragged-bf16-64" else RAGGED_CASES_DESCENDING[:1]),
        ),
    ),
    *runs(
        {f"ragged-{name}": decode_ragged(*WIDE_DECODE_KERNELS[name]) for name in ("bf16-512", "f32-512")},
        lambda _: with_no_prefill(RAGGED_CASES[1::2]),
    ),
    *runs(
        {f"prefill-{name}": decode_with_prefill(*sizes) for name, sizes in DECODE_KERNELS_OF_TWO_HEADS.items()},
        lambda _: (*ascending(RAGGED_CASES_WITH_PREFILL), *descending(RAGGED_CASES_DESCENDING_WITH_PREFILL)),
    ),
]
# Rows of a key head that take tiles of 64 rows and, with larger groups, of 128; and fewer channels than those of the kernel.
RAGGED_SM90_RUNS = [
    *runs(
        {"ragged-bf16-64": ragged_rows_sm90(*DECODE_ROWS_KERNELS_SM90["bf16-64"], 3, 40)},
        lambda _: (
            *with_no_prefill(RAGGED_CASES_OF_MANY_ROWS),
            *ascending(RAGGED_CASES_WITH_PREFILL[::2]),
            *descending(RAGGED_CASES_DESCENDING[1:]),
        ),
    ),
    *runs(
        {"ragged-f16-128": ragged_rows_sm90(*DECODE_ROWS_KERNELS_SM90["f16-128"], 10, 128)},
        lambda _: with_no_prefill(RAGGED_CASES_OF_MANY_ROWS[::2]),
    ),
]


@pytest.mark.parametrize("run", RAGGED_RUNS)
def test_decode_against_double(output: Callable[[Run], str], run: Run) -> None:
    output(run)


@pytest.mark.parametrize("run", RAGGED_SM90_RUNS)
def test_decode_sm90_of_ragged_rows_against_double(output: Callable[[Run], str], run: Run) -> None:
    assert " rows, " in output(run).splitlines()[0]
