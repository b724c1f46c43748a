"""The static schedule of the sm90 forward kernels: each tile is computed once, and thread blocks end at about the same time."""

from __future__ import annotations

import ctypes as c
import itertools
from pathlib import Path

import pytest
from host_library import compile_host

WRAPPER = """
#include "cuda/host/static_schedule.h"
using namespace libflash::cuda;

extern "C" int64_t choose(int64_t rows, int64_t keys, int64_t heads, int64_t head_dim, int64_t left, int64_t right,
                          int64_t tile_q, int64_t tile_k, int64_t blocks, int64_t* made) {
    libflash::AttentionProblem problem;
    problem.dtype = libflash::DType::bf16;
    problem.batch = 1, problem.heads_q = problem.heads_k = static_cast<int>(heads);
    problem.q_rows.capacity = problem.q_rows.max_length = rows;
    problem.k_rows.capacity = problem.k_rows.max_length = keys;
    problem.head_dim = problem.head_dim_v = static_cast<int>(head_dim);
    if (left >= 0) problem.mask_rule.left = left;
    if (right >= 0) problem.mask_rule.right = right;
    const bool paired = right >= 0;
    ScheduleParams schedule = schedule_params(problem.q_rows, 1, heads, tile_q * (paired ? 2 : 1), kL2Bytes, false);
    schedule.paired = paired;
    const int64_t used = set_static_schedule(schedule, problem, query_tile_times(problem, tile_q, tile_k), blocks).blocks;
    made[0] = paired ? schedule.fixed.tail_head : heads, made[1] = schedule.fixed.most_tiles;
    made[2] = paired ? schedule.fixed.tail_group.divisor : 0;
    return used;
}
"""
FIXED = 1.5  # key tiles: the time between two work tiles


@pytest.fixture(scope="module")
def lib(tmp_path_factory: pytest.TempPathFactory) -> c.CDLL:
    library = compile_host(Path(tmp_path_factory.mktemp("static")), WRAPPER)
    library.choose.argtypes, library.choose.restype = [*[c.c_int64] * 9, c.POINTER(c.c_int64)], c.c_int64
    return library


def rounded(rows: int, tile: int) -> int:
    return -(-rows // tile)


class Schedule:
    """Which tiles each thread block computes, written independently of sm90/static_schedule.cuh. `group`: heads of the tail whose
    tiles are in one order; if they are not all of the tail, each group is a round.
    """

    def __init__(self, tiles: int, heads: int, tail_head: int, blocks: int, group: int = 0) -> None:
        self.of_block: list[list[tuple[int, int]]] = [[] for _ in range(blocks)]  # head, tile
        pairs = [(head, i) for head in range(tail_head) for i in range((tiles + 1) // 2)]
        places = []
        for first in range(0, len(pairs), blocks):
            places = pairs[first : first + blocks]
            for place, (head, near) in enumerate(places):
                self.of_block[place] += [(head, tile) for tile in dict.fromkeys((tiles - 1 - near, near))]
        if 0 < group < heads - tail_head:
            self.rounds([longest_first(tiles, first, min(heads, first + group)) for first in range(tail_head, heads, group)])
            return
        tail, incomplete = longest_first(tiles, tail_head, heads), len(places) % blocks
        for place in range(incomplete, blocks) if incomplete else ():
            self.of_block[place] += tail[:1]
            tail = tail[1:]
        self.rounds([tail[first : first + blocks] for first in range(0, len(tail), blocks)], blocks)

    def rounds(self, rounds: list[list[tuple[int, int]]], size: int = 0) -> None:
        """One tile for each thread block, every second round from the other end."""
        for i, items in enumerate(rounds):
            places = range(size or len(rounds[0]))
            for place, item in zip(places if i % 2 else reversed(places), items, strict=False):
                self.of_block[place].append(item)


def longest_first(tiles: int, first: int, end: int) -> list[tuple[int, int]]:
    return [(head, tile) for tile in reversed(range(tiles)) for head in range(first, end)]


def visible(rows: int, keys: int, tile: int, tile_q: int) -> int:
    """The keys that the last row of a tile sees under a causal mask."""
    return min(keys, max(0, min(rows, (tile + 1) * tile_q) + keys - rows))


def schedule_time(schedule: Schedule, rows: int, keys: int, tile_q: int, tile_k: int) -> float:
    """In key tiles."""
    times = [rounded(visible(rows, keys, tile, tile_q), tile_k) + FIXED for tile in range(rounded(rows, tile_q))]
    return max(sum(times[tile] for _, tile in tiles) for tiles in schedule.of_block)


TILES = {64: (192, 128), 128: (128, 176), 256: (128, 80)}  # of forward in 16 bits, by head_dim
SIDES = ((512, 512), (1000, 1000), (2048, 2048), (4096, 4096), (16384, 16384), (512, 4096), (192, 2560), (4096, 512), (100, 100))
CELLS = list(itertools.product(SIDES, (1, 8, 16, 33, 40, 128, 144, 256, 512), TILES))


def cache_factor(at_once: int, keys: int, head_dim: int) -> float:
    """What it costs that the tiles of a head are computed at different times; `at_once`: heads in use meanwhile."""
    return 1 + 0.1 * max(0.0, at_once * keys * head_dim * 4 / 36e6 - 1)


@pytest.mark.parametrize("blocks", [132, 114])
def test_causal_schedules(lib: c.CDLL, blocks: int) -> None:
    """Never slower than pairs alone, and every tile once."""
    with_tail = in_rounds = 0
    for (rows, keys), heads, head_dim in CELLS:
        tile_q, tile_k = TILES[head_dim]
        made = (c.c_int64 * 3)()
        used = lib.choose(rows, keys, heads, head_dim, -1, 0, tile_q, tile_k, blocks, made)
        tail_head, most, group = made
        tiles = rounded(rows, tile_q)
        with_tail += tail_head < heads
        in_rounds += tail_head + group < heads
        assert used == min(blocks, heads * (tiles if tail_head < heads else rounded(tiles, 2)))
        assert tail_head == heads or keys >= rows
        assert tail_head + group >= heads or group * tiles <= blocks
        schedule = Schedule(tiles, heads, tail_head, used, group)
        items = [item for of_block in schedule.of_block for item in of_block]
        assert sorted(items) == [(head, tile) for head in range(heads) for tile in range(tiles)]
        assert most >= max(map(len, schedule.of_block))
        pairs = Schedule(tiles, heads, heads, min(blocks, heads * rounded(tiles, 2)))
        time, of_pairs = (schedule_time(x, rows, keys, tile_q, tile_k) for x in (schedule, pairs))
        in_pairs = min(heads, rounded(blocks, rounded(tiles, 2)))
        if group * tiles > blocks and tiles > 1:  # else all tiles of a head are computed at the same time
            time *= cache_factor(max(min(tail_head, in_pairs), heads - tail_head), keys, head_dim)
        of_pairs *= cache_factor(in_pairs, keys, head_dim)
        assert time <= of_pairs, (rows, keys, heads, tile_q, tail_head, group)
    assert with_tail > len(CELLS) // 4
    assert in_rounds > len(CELLS) // 50


@pytest.mark.parametrize(
    ("rows", "keys", "heads", "head_dim", "limit", "pairs"),
    [
        (4096, 4096, 64, 128, 1.007, 1.03),
        (16384, 16384, 16, 128, 1.006, 1.03),
        (16384, 16384, 32, 64, 1.007, 1.05),
        (192, 2560, 208, 128, 1.3, 1.2),  # in rounds
        (297, 9029, 208, 128, 1.07, 1.6),
        (384, 6586, 352, 256, 1.01, 1.4),
        (1664, 1664, 40, 256, 1.05, 1.4),
        (3285, 3285, 12, 256, 1.12, 1.5),  # 40 MB of keys and values in the tail
    ],
)
def test_thread_blocks_end_together(
    lib: c.CDLL, rows: int, keys: int, heads: int, head_dim: int, limit: float, pairs: float
) -> None:
    """The time over that of an equal division; `pairs`: with pairs alone it is longer than this."""
    tile_q, tile_k = TILES[head_dim]
    made = (c.c_int64 * 3)()
    used = lib.choose(rows, keys, heads, head_dim, -1, 0, tile_q, tile_k, 132, made)
    tiles = rounded(rows, tile_q)
    equal = heads * sum(rounded(visible(rows, keys, tile, tile_q), tile_k) + FIXED for tile in range(tiles)) / 132
    times = [
        schedule_time(schedule, rows, keys, tile_q, tile_k) / equal
        for schedule in (Schedule(tiles, heads, made[0], used, made[2]), Schedule(tiles, heads, heads, 132))
    ]
    assert times[0] <= limit
    assert times[1] >= pairs


def test_few_tiles_are_not_paired(lib: c.CDLL) -> None:
    """16 heads of 1024 rows: 64 pairs, but 128 tiles, one for each thread block."""
    made = (c.c_int64 * 3)()
    assert lib.choose(1024, 1024, 16, 128, -1, 0, 128, 176, 132, made) == 128
    assert list(made) == [0, 1, 16]


def test_without_a_mask_there_is_no_tail(lib: c.CDLL) -> None:
    """All tiles take equally long."""
    made = (c.c_int64 * 3)()
    assert lib.choose(16384, 16384, 16, 128, -1, -1, 128, 176, 132, made) == 132
    assert list(made)[:2] == [16, 16]


def time_in_window(schedule: Schedule, rows: int, left: int, tile_q: int, tile_k: int) -> float:
    """In key tiles."""
    seen = [min(visible(rows, rows, tile, tile_q), left + tile_q) for tile in range(rounded(rows, tile_q))]
    times = [rounded(keys, tile_k) + FIXED for keys in seen]
    return max(sum(times[tile] for _, tile in tiles) for tiles in schedule.of_block)


WINDOWS = list(itertools.product((1000, 2048, 4096, 16384), (8, 16, 32, 40, 64), (127, 1023, 4095), TILES))


def test_schedules_in_a_window(lib: c.CDLL) -> None:
    """Tiles in one order where that is faster than pairs; hardly ever slower, because the times of pairs are estimated."""
    ratios = []
    for rows, heads, left, head_dim in WINDOWS:
        tile_q, tile_k = TILES[head_dim]
        made = (c.c_int64 * 3)()
        used = lib.choose(rows, rows, heads, head_dim, left, 0, tile_q, tile_k, 132, made)
        tiles = rounded(rows, tile_q)
        assert made[0] in (0, heads)
        schedule = Schedule(tiles, heads, made[0], used, made[2])
        assert sum(map(len, schedule.of_block)) == heads * tiles
        pairs = Schedule(tiles, heads, heads, min(132, heads * rounded(tiles, 2)))
        ratios.append(time_in_window(schedule, rows, left, tile_q, tile_k) / time_in_window(pairs, rows, left, tile_q, tile_k))
    assert max(ratios) <= 1.02
    assert sum(ratio < 0.95 for ratio in ratios) >= len(ratios) // 8


@pytest.mark.parametrize(
    ("rows", "heads", "left", "head_dim", "limit", "pairs"),
    [(16384, 16, 4095, 128, 1.03, 1.1), (2048, 32, 1023, 64, 1.06, 1.7)],
)
def test_thread_blocks_end_together_in_a_window(
    lib: c.CDLL, rows: int, heads: int, left: int, head_dim: int, limit: float, pairs: float
) -> None:
    """As test_thread_blocks_end_together()."""
    tile_q, tile_k = TILES[head_dim]
    made = (c.c_int64 * 3)()
    used = lib.choose(rows, rows, heads, head_dim, left, 0, tile_q, tile_k, 132, made)
    tiles = rounded(rows, tile_q)
    one_head = Schedule(tiles, 1, 1, 1)
    equal = heads * time_in_window(one_head, rows, left, tile_q, tile_k) / 132
    times = [
        time_in_window(schedule, rows, left, tile_q, tile_k) / equal
        for schedule in (Schedule(tiles, heads, made[0], used, made[2]), Schedule(tiles, heads, heads, 132))
    ]
    assert times[0] <= limit
    assert times[1] >= pairs
