"""Decode run on the host: sequences of the same length."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from emulated_decode import decode, decode_sm90
from emulated_kernels import DECODE_KERNELS, DECODE_KERNELS_OF_TWO_HEADS, DECODE_KERNELS_SM90, DECODE_ROWS_KERNELS_SM90
from emulated_programs import for_racecheck
from emulated_runs import ORDER_SEEDS, Run, runs

pytestmark = pytest.mark.early

# Query rows, splits (negative: the keys of each), paged, append (0: nothing, 1: two rows by a kernel before decode, 2: one row by
# decode), stages left empty, key heads of a thread block, and whether copies arrive as late as they may.
DECODE_CASES = (
    *((1, 1, 0, 0, 1, 1, 1), (5, 3, 1, 0, 0, 1, 0), (6, 1, 0, 1, 0, 1, 1), (9, -128, 1, 1, 0, 1, 0), (25, 2, 0, 1, 0, 1, 1)),
    *((1, 1, 0, 2, 1, 1, 0), (1, 3, 0, 2, 0, 1, 1), (1, -128, 1, 2, 0, 1, 1), (1, 40, 1, 2, 0, 1, 0), (4, 2, 1, 0, 1, 1, 1)),
)
TWO_HEADS = (
    *((1, 1, 0, 0, 1, 2, 1), (5, 3, 1, 0, 0, 2, 0), (2, 1, 1, 1, 0, 2, 1), (3, -96, 0, 1, 1, 2, 1), (1, 1, 0, 2, 0, 2, 1)),
    *((1, 3, 1, 2, 1, 2, 1), (1, 40, 1, 2, 0, 2, 0)),
)
DECODE_RUNS = [
    *runs({name: decode(*sizes) for name, sizes in DECODE_KERNELS.items()}, lambda _: DECODE_CASES),
    *runs({name: decode(*sizes) for name, sizes in DECODE_KERNELS_OF_TWO_HEADS.items()}, lambda _: TWO_HEADS),
]
DECODE_SM90_RUNS = runs(
    {name: decode_sm90(*sizes) for name, sizes in DECODE_KERNELS_SM90.items()}
    | {name: decode_sm90(dtype, dim, dim, *tile) for name, (dtype, dim, *tile) in DECODE_ROWS_KERNELS_SM90.items()}
    | {"bf16-576-racecheck": for_racecheck(decode_sm90(*DECODE_KERNELS_SM90["bf16-576"]))},
    lambda name: tuple((x,) for x in (*ORDER_SEEDS, 2)["racecheck" in name :]),
)


@pytest.mark.parametrize("run", DECODE_RUNS)
def test_decode_against_double(output: Callable[[Run], str], run: Run) -> None:
    output(run)


@pytest.mark.parametrize("run", DECODE_SM90_RUNS)
def test_decode_sm90_against_double(output: Callable[[Run], str], run: Run) -> None:
    assert output(run).count("ok ") == 15
