"""Forward of sm90 run on the host: also more than 256 channels, and statistics of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from emulated_kernels import (
    FORWARD_KERNELS_SM90,
    FORWARD_KERNELS_SM90_WITH_LONG_SUMS,
    KEYS_PER_SUM,
    STATISTICS_KERNELS_SM90,
    WIDE_FORWARD_KERNELS_SM90,
)
from emulated_programs import Program, for_racecheck
from emulated_runs import ORDER_SEEDS, Run, runs

pytestmark = pytest.mark.early


def forward_sm90(dtype: str, head_dim: int, head_dim_v: int, tile: str, stages: int, keys_per_sum: int = KEYS_PER_SUM) -> Program:
    defines = {"DTYPE": dtype, "HEAD_DIM": head_dim, "HEAD_DIM_V": head_dim_v, "FORWARD_TILE": tile, "STAGES": stages}
    defines["LIBFLASH_KEYS_PER_SUM"] = keys_per_sum
    headers = ("attention/start_head_maxima.cuh", "sm90/forward.cuh")
    return Program("forward_sm90.cpp", headers, tuple(defines.items()))


def wide_forward_sm90(*sizes: Any) -> Program:
    program = forward_sm90(*sizes)
    return program._replace(headers=("sm90/forward_wide.cuh",), defines=(*program.defines, ("WIDE_HEADS", 1)))


def forward_statistics_sm90(dtype: str, head_dim: int, tile: str, stages: int, keys_per_sum: int, wanted: int) -> Program:
    program = forward_sm90(dtype, head_dim, head_dim, tile, stages, keys_per_sum)
    return program._replace(defines=(*program.defines, ("STATISTICS", wanted)))


SM90_RUNS = runs(
    {name: forward_sm90(*sizes) for name, sizes in (FORWARD_KERNELS_SM90 | FORWARD_KERNELS_SM90_WITH_LONG_SUMS).items()},
    lambda _: tuple((x,) for x in ORDER_SEEDS),
)
WIDE_SM90_RUNS = runs(
    {name: wide_forward_sm90(*sizes) for name, sizes in WIDE_FORWARD_KERNELS_SM90.items()}
    | {"bf16-512-racecheck": for_racecheck(wide_forward_sm90(*WIDE_FORWARD_KERNELS_SM90["bf16-512"]))},
    lambda name: tuple((x,) for x in ORDER_SEEDS["racecheck" in name :]),
)
STATISTICS_SM90_RUNS = runs(
    {name: forward_statistics_sm90(*sizes) for name, sizes in STATISTICS_KERNELS_SM90.items()},
    lambda _: tuple((x,) for x in ORDER_SEEDS),
)


@pytest.mark.parametrize("run", SM90_RUNS)
def test_sm90_against_double(output: Callable[[Run], str], run: Run) -> None:
    assert output(run).count("ok ") == 32


@pytest.mark.parametrize("run", WIDE_SM90_RUNS)
def test_wide_forward_sm90_against_double(output: Callable[[Run], str], run: Run) -> None:
    assert output(run).count("ok ") == 26  # those without block masks, and two of narrower heads


@pytest.mark.parametrize("run", STATISTICS_SM90_RUNS)
def test_statistics_sm90_against_double(output: Callable[[Run], str], run: Run) -> None:
    assert output(run).count("ok ") == 29  # all cases but those with rare options
