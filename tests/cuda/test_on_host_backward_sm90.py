"""Backward of sm90 run on the host: also more than 256 channels, and additions to dq in a fixed order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from emulated_kernels import BACKWARD_KERNELS_SM90, BACKWARD_KERNELS_SM90_WITH_LONG_SUMS, KEYS_PER_SUM, WIDE_BACKWARD_KERNELS_SM90
from emulated_programs import Program, for_racecheck
from emulated_runs import ORDER_SEEDS, Run, runs

pytestmark = pytest.mark.early

# Backward with additions to dq in a fixed order: kernel -> seeds of orders and numbers of thread blocks that run at the
# same time.
FIXED_ORDER = {
    "bf16-64": ((1, 3), (3, 2)),
    "f16-128": ((3, 4),),
    "bf16-192": ((2, 3),),
    "bf16-256": ((4, 4),),
    "f16-64-sums": ((1, 2), (3, 2)),
}
ONE_BY_ONE = (0, 1)


def backward_sm90(dtype: str, head_dim: int, tile: str, stages: int, keys_per_sum: int = KEYS_PER_SUM) -> Program:
    defines = {"DTYPE": dtype, "HEAD_DIM": head_dim, "BACKWARD_TILE": tile, "STAGES": stages}
    defines["LIBFLASH_KEYS_PER_SUM"] = keys_per_sum
    headers = ("attention/backward_steps.cuh", "sm90/backward.cuh")
    return Program("backward_sm90.cpp", headers, tuple(defines.items()))


def wide_backward_sm90(*sizes: Any) -> Program:
    program = backward_sm90(*sizes)
    headers = ("attention/backward_steps.cuh", "sm90/backward_wide.cuh")
    return program._replace(headers=headers, defines=(*program.defines, ("WIDE_HEADS", 1)))


BACKWARD_SM90_RUNS = [
    *runs(
        {name: backward_sm90(*sizes) for name, sizes in (BACKWARD_KERNELS_SM90 | BACKWARD_KERNELS_SM90_WITH_LONG_SUMS).items()},
        lambda name: tuple((x, 0) for x in ORDER_SEEDS[name != "bf16-64" :]),
    ),
    *runs({"bf16-64-racecheck": for_racecheck(backward_sm90(*BACKWARD_KERNELS_SM90["bf16-64"]))}, lambda _: ((1, 0),)),
]
WIDE_BACKWARD_SM90_RUNS = runs(
    {name: wide_backward_sm90(*sizes) for name, sizes in WIDE_BACKWARD_KERNELS_SM90.items()}
    | {"bf16-512-racecheck": for_racecheck(wide_backward_sm90(*WIDE_BACKWARD_KERNELS_SM90["bf16-512"]))},
    lambda name: tuple((x, 0) for x in ORDER_SEEDS[name != "bf16-512" :]),
)
FIXED_ORDER_RUNS = runs(
    {name: backward_sm90(*(BACKWARD_KERNELS_SM90 | BACKWARD_KERNELS_SM90_WITH_LONG_SUMS)[name]) for name in FIXED_ORDER},
    FIXED_ORDER.__getitem__,
)


@pytest.mark.parametrize("run", BACKWARD_SM90_RUNS)
def test_backward_sm90_against_double(output: Callable[[Run], str], run: Run) -> None:
    assert output(run).count("ok ") == 27


@pytest.mark.parametrize("run", WIDE_BACKWARD_SM90_RUNS)
def test_wide_backward_sm90_against_double(output: Callable[[Run], str], run: Run) -> None:
    assert output(run).count("ok ") == 20  # those without other rare options than a softcap


@pytest.mark.parametrize("run", FIXED_ORDER_RUNS)
def test_backward_sm90_has_the_same_bits_in_a_fixed_order(output: Callable[[Run], str], run: Run) -> None:
    """Whenever thread blocks, copies and additions begin and end."""
    defines = dict(run.program.defines)
    unordered = (defines["DTYPE"], defines["HEAD_DIM"]) == ("f16_", 128)  # with block masks, unless there are rare options
    got = output(run)
    assert got.count("ok ") == 27 - 4 * unordered
    assert got == output(Run(run.program, ONE_BY_ONE))
