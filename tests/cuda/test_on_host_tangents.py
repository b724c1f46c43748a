"""Kernels of tangents run on the host: of forward and of backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from emulated_kernels import BACKWARD_TANGENT_KERNELS, BACKWARD_TANGENT_KERNELS_SM90, TANGENT_KERNELS, TANGENT_KERNELS_SM90
from emulated_programs import Program, for_racecheck
from emulated_runs import ORDER_SEEDS, Run, runs

pytestmark = pytest.mark.early

# Magnitude of the inputs and of their tangents, rare options and packed rows, tangents that are given (1: q, 2: k, 4: v). With
# the largest, P ts is larger than fp16 can hold. Then whether no key is in use.
TANGENT_CASES = (
    *((1, 1, 0, 7, 0), (1, 1, 1, 7, 0), (2, 1, 1, 1, 0), (2, 1, 0, 2, 0), (1, 1, 0, 4, 0), (1, 4000, 0, 7, 0)),
    *((1, 1, 0, 7, 1), (1, 1, 1, 7, 1)),
)
# As TANGENT_CASES, with 8 for dout, and 16 for delta and tdelta as inputs.
BACKWARD_TANGENT_CASES = (
    *((1, 1, 0, 15), (1, 1, 1, 15), (1, 1, 1, 1), (1, 1, 0, 2), (1, 1, 1, 4), (1, 1, 0, 8)),
    *((1, 1, 0, 31), (1, 1, 1, 31)),
)


def forward_tangent(dtype: str, head_dim: int, tile: str) -> Program:
    defines = {"DTYPE": dtype, "HEAD_DIM": head_dim, "TANGENT_TILE": tile}
    return Program("forward_tangent.cpp", ("sm80/forward_tangent.cuh",), tuple(defines.items()))


def forward_tangent_sm90(dtype: str, head_dim: int, tile: str, stages: int) -> Program:
    defines = {"DTYPE": dtype, "HEAD_DIM": head_dim, "TANGENT_TILE": tile, "STAGES": stages}
    return Program("forward_tangent_sm90.cpp", ("sm90/forward_tangent.cuh",), tuple(defines.items()))


def backward_tangent(dtype: str, head_dim: int, tile: str) -> Program:
    program = forward_tangent(dtype, head_dim, tile)
    return program._replace(source="backward_tangent.cpp", headers=("sm80/backward_tangent.cuh",))


def backward_tangent_sm90(*sizes: Any) -> Program:
    return forward_tangent_sm90(*sizes)._replace(source="backward_tangent_sm90.cpp", headers=("sm90/backward_tangent.cuh",))


TANGENT_RUNS = runs({name: forward_tangent(*sizes) for name, sizes in TANGENT_KERNELS.items()}, lambda _: TANGENT_CASES)
TANGENT_SM90_RUNS = runs(
    {name: forward_tangent_sm90(*sizes) for name, sizes in TANGENT_KERNELS_SM90.items()}
    | {"bf16-256-racecheck": for_racecheck(forward_tangent_sm90(*TANGENT_KERNELS_SM90["bf16-256"]))},
    lambda name: tuple((x,) for x in ORDER_SEEDS["racecheck" in name :]),
)
BACKWARD_TANGENT_RUNS = runs(
    {name: backward_tangent(*sizes) for name, sizes in BACKWARD_TANGENT_KERNELS.items()}, lambda _: BACKWARD_TANGENT_CASES
)
BACKWARD_TANGENT_SM90_RUNS = runs(
    {name: backward_tangent_sm90(*sizes) for name, sizes in BACKWARD_TANGENT_KERNELS_SM90.items()}
    | {"bf16-256-racecheck": for_racecheck(backward_tangent_sm90(*BACKWARD_TANGENT_KERNELS_SM90["bf16-256"]))},
    lambda name: tuple((x,) for x in ORDER_SEEDS["racecheck" in name :]),
)


@pytest.mark.parametrize("run", TANGENT_RUNS)
def test_forward_tangent_against_double(output: Callable[[Run], str], run: Run) -> None:
    assert output(run).count("ok ") == 4


@pytest.mark.parametrize("run", TANGENT_SM90_RUNS)
def test_forward_tangent_sm90_against_double(output: Callable[[Run], str], run: Run) -> None:
    """With more than 128 channels from saved LSE alone."""
    assert output(run).count("ok ") == (14 if dict(run.program.defines)["HEAD_DIM"] > 128 else 28)


@pytest.mark.parametrize("run", BACKWARD_TANGENT_RUNS)
def test_backward_tangent_against_double(output: Callable[[Run], str], run: Run) -> None:
    assert output(run).count("ok ") == (7 if run.arguments[2] else 3)  # three shapes of a bias


@pytest.mark.parametrize("run", BACKWARD_TANGENT_SM90_RUNS)
def test_backward_tangent_sm90_against_double(output: Callable[[Run], str], run: Run) -> None:
    assert output(run).count("ok ") == 28
