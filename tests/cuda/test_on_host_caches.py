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
    *((1, 4, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 16), (2, 3, 0, 0, 1, 0, 3, 1, 1, 0, 1, 1, 16)),
    *((3, 4, 0, 0, 1, 5, -128, 1, 0, 0, 0, 1, 7), (0, 2, 0, 0, 1, 2, 0, 1, 0, 0, 0, 0, 16)),
    *((0, 3, 0, 0, 1, 9, 3, 0, 0, 0, 1, 1, 64), (0, 1, 0, 0, 1, 0, 2, 1, 1, 0, 0, 0, 16)),
    *((1, 16, 0, 0, 1, 2, 0, 0, 0, 0, 0, 0, 24), (3, 16, 0, 0, 1, 0, 2, 1, 0, 0, 0, 1, 1)),
    *((0, 16, 0, 0, 1, 0, 2, 0, 0, 0, 1, 0, 16), (0, 0, 16, 0, 1, 0, 0, 1, 0, 0, 0, 0, 16)),
    *((1, 4, 16, 0, 1, 1, 2, 1, 0, 0, 0, 1, 16), (2, 0, 16, 0, 1, 9, 0, 1, 0, 0, 1, 0, 5)),
    *((3, 4, 0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 16), (0, 0, 0, 1, 1, 1, 0, 1, 0, 0, 0, 0, 16)),
    *((0, 2, 16, 1, 1, 3, 2, 1, 0, 0, 0, 0, 1), (1, 16, 16, 1, 1, 0, 0, 1, 0, 0, 0, 0, 16)),
    *((0, 0, 0, 0, 3, 0, 0, 1, 0, 0, 1, 0, 16), (1, 4, 0, 0, 2, 2, 3, 1, 1, 0, 1, 1, 24)),
    *((0, 0, 0, 0, 4, 9, 0, 0, 1, 0, 0, 0, 16), (0, 0, 0, 0, 1, 0, -128, 0, 0, 1, 1, 0, 16)),
    *((1, 3, 0, 0, 1, 9, -128, 0, 0, 1, 0, 1, 7), (0, 0, 0, 0, 1, 0, 0, 1, 1, 1, 0, 0, 16)),
    *((3, 16, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 64),),
)
OPTION_CASES_OF_NUMBERS = tuple(case for case in OPTION_CASES if case[0] == 0)
# Of wide heads: rope parts beside values that are channels of the keys, as in MLA; codes with one scale, with those of groups of
# 128 channels, of rows and of heads, and without.
OPTION_CASES_OF_MLA = (
    *((0, 0, 64, 1, 1, 3, 2, 1, 0, 0, 0, 1, 16), (0, 0, 0, 1, 1, 0, -128, 0, 0, 0, 1, 0, 16)),
    *((1, 1, 64, 1, 1, 1, 2, 1, 0, 0, 0, 1, 64), (1, 0, 64, 1, 1, 0, 0, 0, 0, 0, 0, 1, 16)),
    *((1, 128, 64, 1, 1, 0, 3, 1, 0, 0, 0, 1, 1), (1, 128, 64, 1, 1, 8, 0, 0, 0, 1, 1, 0, 64)),
    *((3, 4, 64, 1, 1, 8, 0, 0, 0, 0, 1, 1, 24), (2, 2, 64, 1, 2, 0, 0, 1, 1, 0, 0, 1, 7)),
    *((0, 128, 64, 1, 1, 0, 2, 1, 0, 0, 0, 1, 5), (2, 3, 64, 0, 1, 2, 0, 0, 0, 0, 0, 1, 16)),
)
# Groups of 160 of 480 channels: the two warps, which have 256 channels each, share one.
OPTION_CASES_OF_SHARED_GROUPS = (
    *((1, 160, 0, 0, 1, 2, 0, 0, 0, 0, 0, 1, 16), (0, 160, 0, 0, 1, 0, 2, 1, 0, 0, 0, 0, 16)),
    *((3, 160, 0, 0, 1, 3, -128, 1, 0, 1, 0, 1, 24),),
)
# 333 channels, whose rows are read element by element.
OPTION_CASES_OF_ODD_ROWS = (
    *((1, 3, 0, 0, 1, 2, 0, 0, 0, 0, 0, 1, 7), (3, 4, 0, 0, 1, 0, 2, 1, 0, 0, 1, 0, 16)),
    *((2, 0, 0, 1, 1, 3, 0, 1, 0, 0, 0, 1, 1), (0, 1, 0, 0, 1, 0, 2, 1, 0, 0, 0, 1, 24)),
)
SPECIAL_CASES = {"f32-480": OPTION_CASES_OF_SHARED_GROUPS, "f32-333": OPTION_CASES_OF_ODD_ROWS}


def decode_codes(dtype: str, head_dim: int, tile: str) -> Program:
    return decode(dtype, head_dim, tile)._replace(source="decode_codes.cpp")


def decode_options(dtype: str, head_dim: int, tile: str) -> Program:
    return decode(dtype, head_dim, tile)._replace(source="decode_options.cpp")


def decode_every_code(dtype: str, head_dim: int, tile: str) -> Program:
    return decode(dtype, head_dim, tile)._replace(source="decode_every_code.cpp")


def for_sm80(program: Program) -> Program:
    """Whose conversions of codes are others than those of Hopper."""
    instances = tuple(map(for_sm80, program.instances))
    return program._replace(defines=(*program.defines, ("__CUDA_ARCH__", 800)), instances=instances)


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
    *runs({"bf16-512": decode_options(*WIDE_DECODE_KERNELS["bf16-512"])}, lambda _: OPTION_CASES[::2]),
    *runs({"f32-512": decode_options(*WIDE_DECODE_KERNELS["f32-512"])}, lambda _: OPTION_CASES_OF_NUMBERS[::2]),
    *runs(
        {"f32-576": decode_options("f32_", 576, WIDE_DECODE_KERNELS["f32-512"][2])},
        lambda _: (*OPTION_CASES_OF_NUMBERS[1::2], *(case for case in OPTION_CASES_OF_MLA if case[0] == 0)),
    ),
    *runs({"f16-576": decode_options(*WIDE_DECODE_KERNELS["f16-576"])}, lambda _: (*OPTION_CASES[1::2], *OPTION_CASES_OF_MLA)),
    *runs(
        {"bf16-480": decode_options("bf16_", 480, WIDE_DECODE_KERNELS["bf16-512"][2])},
        lambda _: OPTION_CASES_OF_SHARED_GROUPS,
    ),
    *runs(
        {"bf16-333": decode_options("bf16_", 333, WIDE_DECODE_KERNELS["bf16-512"][2])},
        lambda _: OPTION_CASES_OF_ODD_ROWS,
    ),
    *runs(
        {f"f32-{n}": decode_options("f32_", n, WIDE_DECODE_KERNELS["f32-512"][2]) for n in (480, 333)},
        lambda name: [case for case in SPECIAL_CASES[name] if case[0] == 0],
    ),
]
EVERY_CODE_RUNS = runs(
    {name: decode_every_code(*(DECODE_KERNELS | WIDE_DECODE_KERNELS)[name]) for name in ("bf16-64", "bf16-512", "f16-576")}
    | {"bf16-512-sm80": for_sm80(decode_every_code(*WIDE_DECODE_KERNELS["bf16-512"]))},
    lambda _: ((1,), (2,), (3,)),
)
CACHE_WRITE_RUNS = runs({dtype: cache_write(f"{dtype}_") for dtype in ("f16", "bf16", "f32")}, lambda _: ((),))


@pytest.mark.parametrize("run", CODE_RUNS)
def test_decode_over_codes(output: Callable[[Run], str], run: Run) -> None:
    assert output(run).count("ok ") == (2 if run.arguments[3] else 4)


@pytest.mark.parametrize("run", EVERY_CODE_RUNS)
def test_every_code_has_its_value(output: Callable[[Run], str], run: Run) -> None:
    assert output(run).count("ok ") == 2


@pytest.mark.parametrize("run", OPTION_RUNS)
def test_decode_with_options_of_caches(output: Callable[[Run], str], run: Run) -> None:
    stored, _, _, _, shards, _, _, append, tree, invariant, _, _, _ = run.arguments
    of_values = stored and shards == 1 and not append
    assert output(run).count("ok ") == shards + bool(of_values) + (invariant and not append and not tree)


@pytest.mark.parametrize("run", CACHE_WRITE_RUNS)
def test_cache_write_stores_the_bits_of_the_cpu(output: Callable[[Run], str], run: Run) -> None:
    assert output(run).count("ok ") == 1 + 2 * (2 * 3 + 3 * 4 * 3)
