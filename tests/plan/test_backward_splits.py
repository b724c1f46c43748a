"""Splits of the key tiles of backward, by simulated launches: persistent thread blocks that take the next work tile when they
have finished one. Times are in query tiles.
"""

from __future__ import annotations

import ctypes as c
from pathlib import Path

import numpy as np
import pytest
from host_library import compile_host
from launch_time import launch_time

WRAPPER = """
#include "cuda/host/backward_splits.h"
using namespace libflash::cuda;

extern "C" void times(int64_t rows, int64_t keys, int64_t left, int64_t right, int top_left, int64_t tile_q, int64_t tile_k,
                      int64_t* made) {
    libflash::AttentionProblem problem;
    problem.heads_q = 6, problem.heads_k = 2;
    problem.q_rows.max_length = rows, problem.k_rows.max_length = keys;
    problem.mask_rule.top_left = top_left != 0;
    if (left >= 0) problem.mask_rule.left = left;
    if (right >= 0) problem.mask_rule.right = right;
    BackwardPlan plan;
    plan.tile_q = static_cast<int>(tile_q), plan.tile_k = static_cast<int>(tile_k);
    plan.key_tiles = 2 * ceil_div(keys, tile_k);
    const KeyTileTimes of_plan = key_tile_times(problem, plan);
    made[0] = of_plan.longest, made[1] = of_plan.all;
}
extern "C" int64_t rest(int64_t tiles, int64_t blocks, int64_t longest, int64_t most) {
    return split_rest(tiles, blocks, longest, most).splits;
}
extern "C" int64_t all(int64_t tiles, int64_t blocks, int64_t longest, int64_t sum, int64_t most, int contention) {
    return split_all(tiles, blocks, {longest, sum}, most, contention != 0).splits;
}
"""
MOST = 16


@pytest.fixture(scope="module")
def lib(tmp_path_factory: pytest.TempPathFactory) -> c.CDLL:
    library = compile_host(Path(tmp_path_factory.mktemp("splits")), WRAPPER)
    library.times.argtypes = [*[c.c_int64] * 4, c.c_int, *[c.c_int64] * 2, c.POINTER(c.c_int64)]
    library.rest.argtypes, library.rest.restype = [c.c_int64] * 4, c.c_int64
    library.all.argtypes, library.all.restype = [*[c.c_int64] * 5, c.c_int], c.c_int64
    return library


def split_time(tiles: list[int], first: int, splits: int, blocks: int) -> float:
    """The time of a launch whose key tiles from `first` on are split."""
    of_split = 2 + (6 if first == 0 else 3)
    whole = [time + 2.0 for time in tiles[:first]] if splits > 1 else [time + 2.0 for time in tiles]
    return launch_time(whole + [time / splits + of_split for time in tiles[first:] for _ in range(splits) if splits > 1], blocks)


@pytest.mark.parametrize("top_left", [False, True])
@pytest.mark.parametrize(("left", "right"), [(-1, -1), (-1, 0), (300, 0), (40, 200), (-1, 70), (100, -1)])
@pytest.mark.parametrize(("rows", "keys"), [(512, 512), (500, 333), (130, 900), (900, 130)])
def test_times_of_key_tiles(lib: c.CDLL, rows: int, keys: int, left: int, right: int, top_left: bool) -> None:
    """By a mask of all scores: three query heads for each of two key heads."""
    row, key = np.ogrid[:rows, :keys]
    ahead = key - row - (0 if top_left else keys - rows)
    sees = np.ones((rows, keys), bool)
    if right >= 0:
        sees &= ahead <= right
    if left >= 0:
        sees &= -ahead <= left
    for tile_q, tile_k in ((64, 128), (64, 64)):
        steps = []
        for first in range(0, keys, tile_k):
            seen = np.flatnonzero(sees[:, first : first + tile_k].any(axis=1))
            steps.append(3 * (seen[-1] // tile_q - seen[0] // tile_q + 1) if len(seen) else 0)
        made = (c.c_int64 * 2)()
        lib.times(rows, keys, left, right, int(top_left), tile_q, tile_k, made)
        assert list(made) == [max(steps), 2 * sum(steps)]


@pytest.mark.parametrize("blocks", [132, 114])
def test_rest_of_equal_tiles(lib: c.CDLL, blocks: int) -> None:
    """Splits are chosen only if they save 0.5 % or more; within 3 % of the best number of splits."""
    for longest in (4, 8, 16, 32, 64, 128, 256, 1024):
        for tiles in (1, 4, 16, 40, 64, 100, 128, 140, 256, 300, 640, 1024, 2048, 4096):
            most = min(MOST, longest // 4)
            splits, first = lib.rest(tiles, blocks, longest, most), tiles - tiles % blocks
            times = {n: split_time([longest] * tiles, first, n, blocks) for n in range(1, max(1, most) + 1)}
            allowed = [time for n, time in times.items() if n == 1 or n * (tiles % blocks) <= 4 * blocks]
            assert times[splits] <= 1.03 * min(allowed), (longest, tiles, splits)
            assert splits == 1 or times[splits] <= 0.995 * times[1], (longest, tiles, splits)


@pytest.mark.parametrize("blocks", [132, 114])
def test_causal_tiles(lib: c.CDLL, blocks: int) -> None:
    """Few key heads: within 20 % of the best number of splits, and at most 4 % slower than without."""
    for heads, group, rows in [(h, g, n) for h in (1, 2, 4, 8, 16) for g in (1, 2, 4, 8, 32) for n in (4, 8, 16, 32, 64)]:
        tiles = [2 * (rows - i) * group for i in range(rows) for _ in range(heads)]
        most = min(MOST, tiles[0] // 4, 4 * blocks // len(tiles))
        splits = lib.all(len(tiles), blocks, tiles[0], sum(tiles), min(MOST, tiles[0] // 4), 0)
        times = {n: split_time(tiles, 0, n, blocks) for n in range(1, max(1, most) + 1)}
        assert times[splits] <= 1.2 * min(times.values()), (heads, group, rows, splits, times)
        assert times[splits] <= 1.04 * times[1], (heads, group, rows, splits, times)


def test_known_splits(lib: c.CDLL) -> None:
    assert lib.all(128, 132, 128, 8704, MOST, 0) == 2  # 2048 rows, 32 query and 8 key heads
    assert lib.all(32, 132, 2048, 33792, MOST, 0) == 8  # 4096 rows, 32 query heads, 1 key head
    assert lib.all(256, 132, 32, 4352, MOST, 0) == 1  # 2048 rows, 16 heads
    assert lib.all(128, 132, 512, 33280, MOST, 0) == 2  # 4096 rows, 16 query and 2 key heads, tiles of 64 keys
    assert lib.all(128, 132, 512, 33280, MOST, 1) == 4
    assert lib.all(256, 132, 1024, 132096, MOST, 0) == 1  # 8192 rows
    assert lib.all(256, 132, 1024, 132096, MOST, 1) == 2
    assert lib.rest(132 * 15, 132, 64, MOST) == 1
    assert lib.rest(2048, 132, 64, MOST) == 3
    assert lib.rest(64, 132, 64, MOST) == 2
