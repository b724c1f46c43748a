"""Attention kernels run on the host: forward and backward, parts of problems, statistics of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from emulated_kernels import ATTENTION_KERNELS, ATTENTION_KERNELS_WITH_LONG_SUMS, KEYS_PER_SUM, STATISTICS_KERNELS
from emulated_programs import Program
from emulated_runs import Run, runs

pytestmark = pytest.mark.early

# Magnitude of the inputs, rare options, deterministic. The slowest cases take half a minute each.
CASES = ((1, 0, 0), (1, 1, 0), (4, 0, 1), (4, 1, 1))
# Kernels and cases of parts.cpp: float32 and 16 bits, with one, two and four warps for each 32 keys, long sums.
PART_KERNELS = {
    "bf16-64": ATTENTION_KERNELS["bf16-64"],
    "f16-128": ATTENTION_KERNELS["f16-128"],
    "bf16-256": ("bf16_", 256, "64, 64", "32, 32, 1"),
    "f32-64": ATTENTION_KERNELS["f32-64"],
    "f32-128": ATTENTION_KERNELS["f32-128"],
    "bf16-64-sums": ATTENTION_KERNELS_WITH_LONG_SUMS["bf16-64-sums"],
    "f32-512": ATTENTION_KERNELS["f32-512"],
    "bf16-512": ATTENTION_KERNELS["bf16-512"],
    "f16-512-small": ATTENTION_KERNELS["f16-512-small"],
}
PART_CASES = ((1, 0, 0), (1, 1, 1))
# Magnitude of the inputs, options (forward_statistics.cpp), maxima of heads.
STATISTICS_CASES = ((1, 0, 0), (1, 31, 1), (3, 2, 0), (1, 32, 1), (2, 59, 0))


def attention(
    dtype: str, head_dim: int, forward: str, backward: str, keys_per_sum: int = KEYS_PER_SUM, arch: int = 90
) -> Program:
    defines = {"DTYPE": dtype, "HEAD_DIM": head_dim, "FORWARD_TILE": forward, "BACKWARD_TILE": backward}
    defines |= {"LIBFLASH_KEYS_PER_SUM": keys_per_sum, "__CUDA_ARCH__": arch * 10}
    headers = ("attention/backward_steps.cuh", "sm80/backward.cuh", "sm80/backward_wide.cuh", "sm80/forward.cuh")
    instances = Program("attention_instances.cpp", headers, tuple(defines.items()))
    return instances._replace(source="attention.cpp", instances=(instances,))


def parts(*sizes: Any) -> Program:
    return attention(*sizes)._replace(source="parts.cpp")


def forward_statistics(dtype: str, head_dim: int, tile: str, keys_per_sum: int) -> Program:
    defines = {"DTYPE": dtype, "HEAD_DIM": head_dim, "FORWARD_TILE": tile, "LIBFLASH_KEYS_PER_SUM": keys_per_sum}
    defines["__CUDA_ARCH__"] = 800  # the only PTX version of these kernels
    headers = ("attention/start_head_maxima.cuh", "sm80/forward.cuh", "sm80/forward_statistics.cuh")
    return Program("forward_statistics.cpp", headers, tuple(defines.items()))


ATTENTION_RUNS = runs(
    {name: attention(*sizes) for name, sizes in (ATTENTION_KERNELS | ATTENTION_KERNELS_WITH_LONG_SUMS).items()},
    lambda name: CASES[1:3] if name.endswith("small") else CASES,
)
PART_RUNS = runs({name: parts(*sizes) for name, sizes in PART_KERNELS.items()}, lambda _: PART_CASES)
STATISTICS_RUNS = runs(
    {name: forward_statistics(*sizes) for name, sizes in STATISTICS_KERNELS.items()}, lambda _: STATISTICS_CASES
)


@pytest.mark.parametrize("run", ATTENTION_RUNS)
def test_attention_against_double(output: Callable[[Run], str], run: Run) -> None:
    output(run)


@pytest.mark.parametrize("run", PART_RUNS)
def test_parts_against_double(output: Callable[[Run], str], run: Run) -> None:
    assert output(run).count("ok ") == (6 if run.arguments[1] else 5)


@pytest.mark.parametrize("run", STATISTICS_RUNS)
def test_statistics_against_double(output: Callable[[Run], str], run: Run) -> None:
    dropout = run.arguments[1] & 4  # without a comparison of out
    assert output(run).count("ok ") == (4 if dropout else 5)
