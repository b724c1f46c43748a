"""Splits of the key tiles of backward, by simulated launches: persistent thread blocks that take the next work tile when they
have finished one. Times are in query tiles.
"""

from __future__ import annotations

import ctypes as c
import itertools
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
    made[0] = of_plan.longest(), made[1] = of_plan.all();
}
extern "C" int64_t rest(int64_t tiles, int64_t blocks, int64_t longest, int64_t most) {
    return split_rest({{longest}, tiles, 1, false}, blocks, most).splits;
}
extern "C" int64_t all(const int64_t* of_head, int64_t tiles_of_head, int64_t heads, int64_t group, int whole_heads,
                       int64_t blocks, int64_t most, int contention) {
    const KeyTileTimes times{{of_head, of_head + tiles_of_head}, tiles_of_head * heads, group, whole_heads != 0};
    return split_all(times, blocks, most, contention != 0).splits;
}
"""
MOST = 16


@pytest.fixture(scope="module")
def lib(tmp_path_factory: pytest.TempPathFactory) -> c.CDLL:
    library = compile_host(Path(tmp_path_factory.mktemp("splits")), WRAPPER)
    library.times.argtypes = [*[c.c_int64] * 4, c.c_int, *[c.c_int64] * 2, c.POINTER(c.c_int64)]
    library.rest.argtypes, library.rest.restype = [c.c_int64] * 4, c.c_int64
    library.all.argtypes = [c.POINTER(c.c_int64), *[c.c_int64] * 3, c.c_int, *[c.c_int64] * 2, c.c_int]
    library.all.restype = c.c_int64
    return library


def splits_of_all(
    lib: c.CDLL,
    tiles: list[int],
    heads: int,
    group: int,
    *,
    whole_heads: bool = False,
    blocks: int = 132,
    contention: bool = False,
) -> int:
    """The rule's splits; `tiles`: the times of the key tiles of a head, for one query head."""
    most = min(MOST, max(tiles) * group // 4, group if whole_heads else MOST)
    return lib.all((c.c_int64 * len(tiles))(*tiles), len(tiles), heads, group, whole_heads, blocks, most, contention)


def shares(time: int, group: int, splits: int, whole_heads: bool) -> list[float]:
    """The times of the splits of a key tile that takes `time` for each query head."""
    if not whole_heads:
        return [time * group / splits] * splits
    ends = [group * i // splits for i in range(splits + 1)]
    return [time * float(end - begin) for begin, end in itertools.pairwise(ends)]


def split_time(work: list[list[float]], first: int, blocks: int) -> float:
    """The time of a launch of key tiles, each with its splits; those before `first` are not split."""
    split = len(work[-1]) > 1
    of_split = 2 + ((6 if first == 0 else 3) if split else 0)
    whole = [sum(tile) + 2 for tile in work[:first]] if split else []
    return launch_time(whole + [time + of_split for tile in (work[first:] if split else work) for time in tile], blocks)


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
            work = {n: [[longest / n] * n] * tiles for n in range(1, max(1, most) + 1)}
            times = {n: split_time(tiles_of_n, first, blocks) for n, tiles_of_n in work.items()}
            allowed = [time for n, time in times.items() if n == 1 or n * (tiles % blocks) <= 4 * blocks]
            assert times[splits] <= 1.03 * min(allowed), (longest, tiles, splits)
            assert splits == 1 or times[splits] <= 0.995 * times[1], (longest, tiles, splits)


def times_of_splits(tiles: list[int], heads: int, group: int, whole_heads: bool, blocks: int) -> dict[int, float]:
    """The times of launches by the number of splits, as far as the workspace and the query heads allow."""
    most = min(MOST, max(tiles) * group // 4, 4 * blocks // (heads * len(tiles)), group if whole_heads else MOST)
    return {
        n: split_time([shares(time, group, n, whole_heads) for time in tiles for _ in range(heads)], 0, blocks)
        for n in range(1, max(1, most) + 1)
    }


def causal_tiles(rows: int, keys: int, window: int | None, *, top_left: bool = False) -> list[int]:
    """Query tiles of 64 rows that see each key tile of 128 keys."""
    shift = 0 if top_left else keys - rows
    times = []
    for first in range(0, keys, 128):
        begin, end = max(0, first - shift), rows if window is None else min(rows, first + 127 - shift + window + 1)
        times.append(max(0, -(-end // 64) - begin // 64))
    return times


@pytest.mark.parametrize("blocks", [132, 114])
@pytest.mark.parametrize("whole_heads", [False, True])
@pytest.mark.parametrize("window", [None, 255, 1023])
def test_causal_tiles(lib: c.CDLL, window: int | None, whole_heads: bool, blocks: int) -> None:
    """Few key heads: within 15 % of the best number of splits, and at most 2 % slower than without."""
    lengths = [(n, n) for n in (512, 1024, 2048, 4096, 8192)] + [(1024, 4096), (4096, 1024)]
    for heads, group, (rows, keys) in [(h, g, n) for h in (1, 2, 4, 8, 16) for g in (1, 2, 4, 8, 32) for n in lengths]:
        tiles = causal_tiles(rows, keys, window)
        if 2 * len(tiles) * heads > 4 * blocks or max(tiles) * group < 8:
            continue
        times = times_of_splits(tiles, heads, group, whole_heads, blocks)
        splits = splits_of_all(lib, tiles, heads, group, whole_heads=whole_heads, blocks=blocks)
        assert times[splits] <= 1.15 * min(times.values()), (heads, group, rows, keys, splits, times)
        assert times[splits] <= 1.02 * times[1], (heads, group, rows, keys, splits, times)


def test_keys_that_no_row_sees(lib: c.CDLL) -> None:
    """With the diagonal at the top left and fewer rows than keys, most key tiles take no time."""
    tiles = causal_tiles(1024, 8192, None, top_left=True)
    assert tiles[8:] == [0] * 56
    times = times_of_splits(tiles, 4, 8, False, 132)
    splits = splits_of_all(lib, tiles, 4, 8)
    assert splits == 2, times
    assert times[2] == min(times.values())


def test_known_splits(lib: c.CDLL) -> None:
    def causal(rows: int, heads: int, group: int, tile_k: int = 128, **options: bool) -> int:
        step = tile_k // 64
        return splits_of_all(lib, [step * i for i in range(rows // tile_k, 0, -1)], heads, group, **options)

    assert causal(2048, 8, 4) == 2
    assert causal(4096, 1, 32) == 8
    assert causal(2048, 16, 1) == 1
    assert causal(4096, 2, 8, 64) == 2
    assert causal(4096, 2, 8, 64, contention=True) == 4
    assert causal(8192, 2, 8, 64) == 1
    assert causal(8192, 2, 8, 64, contention=True) == 2
    assert causal(1024, 8, 4) == 3
    assert causal(1024, 8, 4, whole_heads=True) == 4  # 4 query heads in 3 splits take as long as in 2
    assert splits_of_all(lib, causal_tiles(2048, 2048, 1023), 8, 4) == 1  # a window: most key tiles take equally long
    assert lib.rest(132 * 15, 132, 64, MOST) == 1
    assert lib.rest(2048, 132, 64, MOST) == 3
    assert lib.rest(64, 132, 64, MOST) == 2
