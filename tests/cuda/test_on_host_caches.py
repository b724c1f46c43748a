"""Caches run on the host: decode over codes of 8 bits and with the options that need instances of their own, and cache writes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from emulated_decode import decode
from emulated_kernels import DECODE_KERNELS, DECODE_KERNELS_OF_TWO_HEADS, WIDE_DECODE_KERNELS
from emulated_programs import Program
from emulated_runs import Run, runs

pytestmark = pytest.mark.early

# Decode over codes of 8 bits: query rows, splits, paged, appended rows, type of the codes (1: e4m3, 2: e5m2, 3: int8), what
# scales belong to (0: none, 1: all, 2: heads, 3: sequences and heads, 4: rows), key heads of a thread block, late copies,
# append by the attention kernel, numbers of the queries.
CODE_CASES = (
    *((1, 1, 0, 0, 1, 0, 1, 1, 0, 0), (2, 3, 1, 0, 2, 2, 1, 0, 0, 0), (5, -128, 0, 0, 3, 4, 1, 1, 0, 0)),
    *((7, 2, 1, 0, 1, 4, 1, 0, 0, 0), (1, 1, 1, 1, 1, 4, 1, 1, 0, 1), (1, 3, 0, 1, 2, 3, 1, 0, 0, 0)),
    *((2, 1, 1, 2, 3, 4, 1, 0, 0, 0), (9, 2, 0, 2, 1, 1, 1, 1, 0, 0), (3, 1, 0, 0, 1, 2, 1, 1, 0, 1)),
)
# Both ways to multiply bfloat16 with codes.
CODE_CASES_OF_NUMBERS = (
    *((2, 1, 0, 0, 1, 2, 1, 1, 0, 1), (1, 1, 0, 0, 2, 0, 1, 1, 0, 1), (2, 2, 1, 0, 3, 4, 1, 0, 0, 1)),
    *((2, 1, 0, 0, 1, 2, 1, 1, 0, 2), (1, 1, 0, 0, 2, 0, 1, 1, 0, 2), (2, 2, 1, 0, 3, 4, 1, 0, 0, 2)),
)
CODE_CASES_INSIDE = (
    *((1, 1, 1, 1, 1, 4, 1, 1, 1, 0), (1, 3, 0, 1, 2, 3, 1, 0, 1, 0), (1, 2, 1, 1, 3, 4, 1, 1, 1, 0)),
    *((1, 1, 0, 1, 1, 2, 1, 1, 1, 2), (1, -128, 0, 1, 3, 2, 1, 0, 1, 0), (1, 40, 1, 1, 2, 4, 1, 1, 1, 1)),
    *((1, 1, 1, 1, 2, 0, 1, 1, 1, 0), (1, 1, 1, 1, 3, 4, 1, 1, 1, 2)),
)
CODE_CASES_OF_TWO_HEADS = (
    *((1, 1, 0, 0, 3, 4, 2, 1, 0, 0), (3, 2, 1, 1, 1, 4, 2, 0, 0, 0), (2, -128, 0, 0, 2, 3, 2, 1, 0, 0)),
    *((1, 1, 0, 1, 3, 4, 2, 1, 1, 0), (1, 2, 1, 1, 1, 3, 2, 1, 1, 0), (1, -128, 1, 1, 2, 4, 2, 0, 1, 0)),
)

# The options of caches that need instances of their own: the arguments of decode_options.cpp.
OPTION_CASES = (
    *((1, 4, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0), (2, 3, 0, 0, 1, 0, 3, 1, 1, 0, 1, 1), (3, 4, 0, 0, 1, 5, -128, 1, 0, 0, 0, 1)),
    *((0, 2, 0, 0, 1, 2, 0, 1, 0, 0, 0, 0), (0, 3, 0, 0, 1, 9, 3, 0, 0, 0, 1, 1), (0, 1, 0, 0, 1, 0, 2, 1, 1, 0, 0, 0)),
    *((1, 5, 0, 0, 1, 2, 0, 0, 0, 0, 0, 0), (3, 5, 0, 0, 1, 0, 2, 1, 0, 0, 0, 1), (0, 5, 0, 0, 1, 0, 2, 0, 0, 0, 1, 0)),
    *((0, 0, 16, 0, 1, 0, 0, 1, 0, 0, 0, 0), (1, 4, 16, 0, 1, 1, 2, 1, 0, 0, 0, 1), (2, 0, 16, 0, 1, 9, 0, 1, 0, 0, 1, 0)),
    *((3, 4, 0, 1, 1, 0, 0, 1, 0, 0, 0, 0), (0, 0, 0, 1, 1, 1, 0, 1, 0, 0, 0, 0), (0, 2, 16, 1, 1, 3, 2, 1, 0, 0, 0, 0)),
    *((1, 5, 16, 1, 1, 0, 0, 1, 0, 0, 0, 0), (0, 0, 0, 0, 3, 0, 0, 1, 0, 0, 1, 0), (1, 4, 0, 0, 2, 2, 3, 1, 1, 0, 1, 1)),
    *((0, 0, 0, 0, 4, 9, 0, 0, 1, 0, 0, 0), (0, 0, 0, 0, 1, 0, -128, 0, 0, 1, 1, 0), (1, 3, 0, 0, 1, 9, -128, 0, 0, 1, 0, 1)),
    *((0, 0, 0, 0, 1, 0, 0, 1, 1, 1, 0, 0), (3, 5, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0)),
)
OPTION_CASES_OF_NUMBERS = tuple(case for case in OPTION_CASES if case[0] == 0)
# Of wide heads, which have no scales. Also rope parts beside values that are channels of the keys, as in MLA.
OPTION_CASES_OF_WIDE_HEADS = (
    *(case for case in OPTION_CASES if case[:2] == (0, 0)),
    *((0, 0, 0, 0, 1, 9, 3, 1, 0, 0, 1, 1), (0, 0, 64, 1, 1, 3, 2, 1, 0, 0, 0, 1), (0, 0, 0, 1, 1, 0, -128, 0, 0, 0, 1, 0)),
)


def decode_codes(dtype: str, head_dim: int, tile: str) -> Program:
    return decode(dtype, head_dim, tile)._replace(source="decode_codes.cpp")


def decode_options(dtype: str, head_dim: int, tile: str) -> Program:
    return decode(dtype, head_dim, tile)._replace(source="decode_options.cpp")


def cache_write(dtype: str) -> Program:
    return Program("cache_write.cpp", ("any/cache_write.cuh",), (("DTYPE", dtype),))


CODE_RUNS = [
    *runs(
        {name: decode_codes(*DECODE_KERNELS[name]) for name in ("bf16-64", "f16-256-small")},
        # too few threads for 256 channels
        lambda name: (*CODE_CASES, *CODE_CASES_OF_NUMBERS, *CODE_CASES_INSIDE) if name == "bf16-64" else CODE_CASES,
    ),
    *runs(
        {name: decode_codes(*DECODE_KERNELS_OF_TWO_HEADS[name]) for name in ("f16-128",)},
        lambda _: (*CODE_CASES_OF_TWO_HEADS, *CODE_CASES_INSIDE[::2]),
    ),
    *runs(
        {"two-heads-bf16-64": decode_codes(*DECODE_KERNELS_OF_TWO_HEADS["bf16-64"])},
        lambda _: (*CODE_CASES_OF_TWO_HEADS[::2], CODE_CASES_OF_TWO_HEADS[-1]),
    ),
]
OPTION_RUNS = [  # there are no codes beside float32
    *runs({"bf16-64": decode_options(*DECODE_KERNELS["bf16-64"])}, lambda _: OPTION_CASES),
    *runs({"f16-256-small": decode_options(*DECODE_KERNELS["f16-256-small"])}, lambda _: OPTION_CASES[::2]),
    *runs({"f32-128-small": decode_options(*DECODE_KERNELS["f32-128-small"])}, lambda _: OPTION_CASES_OF_NUMBERS),
    *runs(
        {name: decode_options(*sizes) for name, sizes in WIDE_DECODE_KERNELS.items()},
        lambda _: OPTION_CASES_OF_WIDE_HEADS,
    ),
]
CACHE_WRITE_RUNS = runs({dtype: cache_write(f"{dtype}_") for dtype in ("f16", "bf16", "f32")}, lambda _: ((),))


@pytest.mark.parametrize("run", CODE_RUNS)
def test_decode_over_codes(output: Callable[[Run], str], run: Run) -> None:
    assert output(run).count("ok ") == (2 if run.arguments[3] else 4)


@pytest.mark.parametrize("run", OPTION_RUNS)
def test_decode_with_options_of_caches(output: Callable[[Run], str], run: Run) -> None:
    _, _, _, _, shards, _, _, append, tree, invariant, _, _ = run.arguments
    assert output(run).count("ok ") == shards + (invariant and not append and not tree)


@pytest.mark.parametrize("run", CACHE_WRITE_RUNS)
def test_cache_write_stores_the_bits_of_the_cpu(output: Callable[[Run], str], run: Run) -> None:
    assert output(run).count("ok ") == 1 + 2 * 3 + 3 * 4 * 3
