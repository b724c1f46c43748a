"""Kernels of float64 run on the host, against long double."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from emulated_kernels import DOUBLE_KERNELS, DOUBLE_SMALL_KERNELS
from emulated_programs import Program
from emulated_runs import Run, runs

pytestmark = pytest.mark.early

# Options and magnitude of the inputs (attention_f64.cpp).
DOUBLE_CASES = ((0, 1), (0, 4), (1, 1), (3, 4), (4, 1), (7, 1), (9, 1), (15, 1), (16, 1), (18, 1), (19, 1))
# Options, tangents, and whether delta and tdelta are taken over (tangent_f64.cpp).
DOUBLE_TANGENT_CASES = ((0, 15, 0), (3, 15, 0), (15, 15, 1), (4, 1, 0), (7, 2, 1), (0, 4, 0), (1, 8, 1))


def doubles(head_dim: int, forward: str, backward: str, tangent: str, left_out: int, arch: int = 90) -> Program:
    defines = {"HEAD_DIM": head_dim, "FORWARD_TILE": forward, "BACKWARD_TILE": backward, "TANGENT_TILE": tangent}
    defines |= {"CHANNELS_LEFT_OUT": left_out, "__CUDA_ARCH__": arch * 10}
    defines |= {"STATISTICS_TILE": "32, 16" if head_dim <= 128 else "16, 16" if head_dim <= 256 else "8, 8"}
    headers = (
        "attention/start_head_maxima.cuh",
        "sm80/backward_f64.cuh",
        "sm80/forward_f64.cuh",
        "sm80/forward_statistics_f64.cuh",
    )
    return Program("attention_f64.cpp", headers, tuple(defines.items()))


def double_tangents(*sizes: Any) -> Program:
    headers = ("sm80/backward_tangent_f64.cuh", "sm80/forward_tangent_f64.cuh")
    return doubles(*sizes)._replace(source="tangent_f64.cpp", headers=headers)


EVERY_SIZES = DOUBLE_KERNELS | DOUBLE_SMALL_KERNELS
DOUBLE_RUNS = runs(
    {name: doubles(*sizes) for name, sizes in EVERY_SIZES.items()},
    lambda name: DOUBLE_CASES if name in ("64", "128") else DOUBLE_CASES[:2] + DOUBLE_CASES[2::2],
)
DOUBLE_TANGENT_RUNS = runs(
    {name: double_tangents(*sizes) for name, sizes in EVERY_SIZES.items() if sizes[3]},
    lambda name: DOUBLE_TANGENT_CASES if name == "128" else DOUBLE_TANGENT_CASES[2:4],
)


@pytest.mark.parametrize("run", DOUBLE_RUNS)
def test_float64_against_long_double(output: Callable[[Run], str], run: Run) -> None:
    rare, parts = run.arguments[0] & 1, run.arguments[0] & 16
    assert output(run).count("ok ") == (5 if not rare else 6 if parts else 7) + (0 if parts else 5)


@pytest.mark.parametrize("run", DOUBLE_TANGENT_RUNS)
def test_tangents_in_float64_against_long_double(output: Callable[[Run], str], run: Run) -> None:
    assert output(run).count("ok ") == (10 if run.arguments[0] & 1 else 7)  # two shapes of a bias
