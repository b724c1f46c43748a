"""The host part of CUDA tile schedules: division by multiplication, and groups of heads."""

from __future__ import annotations

import ctypes as c
import random
from pathlib import Path

import pytest
from host_library import compile_host
from launch_time import launch_time

WRAPPER = """
#include "cuda/host/tile_schedule.h"

extern "C" uint32_t divide(uint32_t n, int64_t divisor) {  // what __umulhi gives on the device
    const libflash::cuda::Divisor by = libflash::cuda::divisor_params(divisor);
    return by.divisor == 1 ? n : static_cast<uint32_t>(uint64_t{n} * by.multiplier >> 32) >> by.shift;
}
extern "C" int64_t group(int64_t all, double head_bytes) { return libflash::cuda::group_of_heads(all, head_bytes); }
extern "C" int64_t balanced(int64_t all, int64_t tiles, int64_t blocks) {
    return libflash::cuda::group_for_balance(all, tiles, blocks);
}
"""


@pytest.fixture(scope="module")
def lib(tmp_path_factory: pytest.TempPathFactory) -> c.CDLL:
    library = compile_host(Path(tmp_path_factory.mktemp("schedule")), WRAPPER)
    library.divide.argtypes, library.divide.restype = [c.c_uint32, c.c_int64], c.c_uint32
    library.group.argtypes, library.group.restype = [c.c_int64, c.c_double], c.c_int64
    library.balanced.argtypes, library.balanced.restype = [c.c_int64] * 3, c.c_int64
    return library


def test_division_is_exact(lib: c.CDLL) -> None:
    chance = random.Random(5)
    divisors = [*range(1, 300), *(2**k + d for k in range(2, 31) for d in (-1, 0, 1)), 2**31 - 1]
    divisors += [chance.randrange(1, 2**31) for _ in range(500)]
    for divisor in divisors:
        edges = [0, 1, divisor - 1, divisor, 2**31 - 1, (2**31 - 1) // divisor * divisor, (2**31 - 1) // divisor * divisor - 1]
        for n in [*edges, *(chance.randrange(2**31) for _ in range(20))]:
            if 0 <= n < 2**31:
                assert lib.divide(n, divisor) == n // divisor, (n, divisor)


def test_groups_are_equal_where_they_can_be(lib: c.CDLL) -> None:
    four_megabytes = 4.2e6
    assert lib.group(32, four_megabytes) == 4  # five would fit, but leave a last group of two
    assert lib.group(30, four_megabytes) == 5
    assert lib.group(31, four_megabytes) == 5  # a prime
    assert lib.group(3, 1.0) == 3
    assert lib.group(7, 1e12) == 1


def idle_share(all_heads: int, tiles: int, group: int, blocks: int) -> float:
    """Time until the last thread block ends, over that of a perfect division. Tile t of a head takes 2 (tiles - t) + 2."""
    times = [2 * (tiles - t) + 2 for first in range(0, all_heads, group) for t in range(tiles)
             for _ in range(min(group, all_heads - first))]  # fmt: skip
    return launch_time(times, blocks) * blocks / sum(times)


@pytest.mark.parametrize("blocks", [132, 114])
def test_causal_groups_are_balanced(lib: c.CDLL, blocks: int) -> None:
    """Within 12 % of the best group, whatever the heads and tiles; groups for the L2 cache alone may take 1.6 times as long."""
    for tiles in (4, 8, 12, 16, 20, 24, 32, 48, 64, 80, 96, 128, 160, 256):
        for heads in (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 32, 40):
            if not 1.5 * blocks < heads * tiles < 16 * blocks:
                continue
            group = lib.balanced(heads, tiles, blocks) or 1
            best = min(idle_share(heads, tiles, n, blocks) for n in range(1, heads + 1))
            assert idle_share(heads, tiles, group, blocks) <= 1.12 * best, (heads, tiles, group)
    assert idle_share(8, 32, 1, 132) > 1.5
    assert lib.balanced(8, 32, 132) == 4
    assert lib.balanced(0, 4, blocks) == 0
