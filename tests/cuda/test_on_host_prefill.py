"""Prefill of sm90 run on the host, also with the rows that decode computes with the same bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from emulated_decode import decode_instances, prefill_instances
from emulated_kernels import KEYS_PER_SUM, PREFILL_KERNELS
from emulated_programs import Program, with_kernels
from emulated_runs import ORDER_SEEDS, Run, runs

pytestmark = pytest.mark.early

# Invariant rows: type; channels of keys, of values, of the decode kernel; tiles and stages of decode and of prefill; cases, of
# which the first kernel runs each in every order of the warps, the others every second one in order.
INVARIANT_KERNELS = {
    "bf16-64": ("bf16_", (64, 64, 64), "16, 64, 4", "128, 128, 4", range(9)),
    "f16-64": ("f16_", (64, 64, 64), "16, 64, 4", "128, 128, 4", (0, 4)),
    "bf16-96": ("bf16_", (96, 96, 128), "16, 64, 3", "192, 96, 2", (0, 2)),
    "bf16-128": ("bf16_", (128, 128, 128), "16, 64, 3", "128, 128, 2", (1, 5)),
    "f16-128": ("f16_", (128, 128, 128), "16, 64, 3", "128, 128, 2", (2, 3, 6, 5)),
    "f16-192x128": ("f16_", (192, 128, 256), "16, 64, 3", "128, 128, 2", (0, 3)),
}
SHORT_CASES = (6, 7)  # without prefill, not causal


def prefill(dtype: str, head_dim: int, head_dim_v: int, tile: str, stages: int, keys_per_sum: int = KEYS_PER_SUM) -> Program:
    return with_kernels("prefill.cpp", prefill_instances(dtype, head_dim, head_dim_v, f"{tile}, {stages}", keys_per_sum))


def invariant_rows(dtype: str, head_dims: tuple[int, int, int], decode_tile: str, prefill_tile: str) -> Program:
    head_dim, head_dim_v, of_decode = head_dims
    kernels = (
        decode_instances(dtype, f"{of_decode}, {of_decode}", decode_tile),
        prefill_instances(dtype, head_dim, head_dim_v, prefill_tile),
    )
    return with_kernels("invariant_rows.cpp", *kernels)


LOADED, COPIED = 0, 1  # by TMA, or by threads
PREFILL_PROGRAMS = {name: prefill(*sizes) for name, sizes in PREFILL_KERNELS.items()}
PREFILL_RUNS = runs(PREFILL_PROGRAMS, lambda _: tuple((LOADED, x) for x in ORDER_SEEDS))
COPIED_RUNS = runs(
    {
        name: program
        for name, program in PREFILL_PROGRAMS.items()
        if name.startswith(("bf16-64", "f16-64", "f16-128", "bf16-128"))
    },
    lambda _: tuple((COPIED, x) for x in ORDER_SEEDS),
)
INVARIANT_RUNS = runs(
    {name: invariant_rows(*sizes) for name, (*sizes, _) in INVARIANT_KERNELS.items()},
    lambda name: tuple(
        (case, seed)
        for i, case in enumerate(INVARIANT_KERNELS[name][-1])
        for seed in (ORDER_SEEDS if name == "bf16-64" else ORDER_SEEDS[i % 2 :][:1])
    ),
)


@pytest.mark.parametrize("run", PREFILL_RUNS)
def test_prefill_against_double(output: Callable[[Run], str], run: Run) -> None:
    assert output(run).count("ok ") == 16


@pytest.mark.parametrize("run", COPIED_RUNS)
def test_copied_caches_against_double(output: Callable[[Run], str], run: Run) -> None:
    assert output(run).count("ok ") == 15


@pytest.mark.parametrize("run", INVARIANT_RUNS)
def test_invariant_rows_of_decode_and_prefill(output: Callable[[Run], str], run: Run) -> None:
    assert output(run).count("ok ") == (4 if run.arguments[0] in SHORT_CASES else 8)
