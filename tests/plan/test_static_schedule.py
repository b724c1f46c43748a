"""The static schedule of the sm90 forward kernels: each tile is computed once, and thread blocks end at about the same time."""

from __future__ import annotations

import ctypes as c
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
    """Which tiles each thread block computes, written independently of sm90/static_schedule.cuh."""

    def __init__(self, tiles: int, heads: int, tail_head: int, blocks: int) -> None:
        self.of_block: list[list[tuple[int, int]]] = [[] for _ in range(blocks)]  # head, tile
        pairs = [(head, i) for head in range(tail_head) for i in range((tiles + 1) // 2)]
        tail = [(head, tile) for tile in reversed(range(tiles)) for head in range(tail_head, heads)]
        places = []
        for first in range(0, len(pairs), blocks):
            places = pairs[first : first + blocks]
            for place, (head, near) in enumerate(places):
                self.of_block[place] += [(head, tile) for tile in dict.fromkeys((tiles - 1 - near, near))]
        incomplete = len(places) % blocks
        for place in range(incomplete, blocks) if incomplete else ():
            self.of_block[place] += tail[:1]
            tail = tail[1:]
        for i, first in enumerate(range(0, len(tail), blocks)):
            order = range(blocks) if i % 2 else reversed(range(blocks))
            for place, item in zip(order, tail[first : first + blocks], strict=False):
                self.of_block[place].append(item)


def visible(rows: int, keys: int, tile: int, tile_q: int) -> int:
    """The keys that the last row of a tile sees under a causal mask."""
    return min(keys, max(0, min(rows, (tile + 1) * tile_q) + keys - rows))


def schedule_time(schedule: Schedule, rows: int, keys: int, tile_q: int, tile_k: int) -> float:
    """In key tiles."""
    times = [rounded(visible(rows, keys, tile, tile_q), tile_k) + FIXED for tile in range(rounded(rows, tile_q))]
    return max(sum(times[tile] for _, tile in tiles) for tiles in schedule.of_block)


TILES = {64: (192, 128), 128: (128, 176), 256: (128, 80)}  # of forward in 16 bits, by head_dim
CELLS = [
    (rows, keys, heads, head_dim)
    for head_dim in TILES
    for rows, keys in ((512, 512), (1000, 1000), (2048, 2048), (4096, 4096), (16384, 16384), (512, 4096), (4096, 512), (100, 100))
    for heads in (1, 8, 16, 33, 128, 256, 512)
]


@pytest.mark.parametrize("blocks", [132, 114])
def test_causal_schedules(lib: c.CDLL, blocks: int) -> None:
    """Never slower than pairs alone, and every tile once."""
    with_tail = 0
    for rows, keys, heads, head_dim in CELLS:
        tile_q, tile_k = TILES[head_dim]
        made = (c.c_int64 * 2)()
        used = lib.choose(rows, keys, heads, head_dim, -1, 0, tile_q, tile_k, blocks, made)
        tail_head, most = made
        tiles = rounded(rows, tile_q)
        with_tail += tail_head < heads
        assert used == min(blocks, heads * (tiles if tail_head < heads else rounded(tiles, 2)))
        assert tail_head == heads or (keys >= rows and (heads - tail_head) * keys * head_dim * 4 <= 36e6)
        schedule = Schedule(tiles, heads, tail_head, used)
        items = [item for of_block in schedule.of_block for item in of_block]
        assert sorted(items) == [(head, tile) for head in range(heads) for tile in range(tiles)]
        assert most >= max(map(len, schedule.of_block))
        pairs = Schedule(tiles, heads, heads, min(blocks, heads * rounded(tiles, 2)))
        time, of_pairs = (schedule_time(x, rows, keys, tile_q, tile_k) for x in (schedule, pairs))
        assert time <= of_pairs, (rows, keys, heads, tile_q, tail_head)
    assert with_tail > len(CELLS) // 4


@pytest.mark.parametrize(
    ("rows", "heads", "head_dim", "limit"), [(4096, 64, 128, 1.007), (16384, 16, 128, 1.006), (16384, 32, 64, 1.007)]
)
def test_thread_blocks_end_together(lib: c.CDLL, rows: int, heads: int, head_dim: int, limit: float) -> None:
    """The time over that of an equal division; with pairs alone 1.03 to 1.06."""
    tile_q, tile_k = TILES[head_dim]
    made = (c.c_int64 * 2)()
    used = lib.choose(rows, rows, heads, head_dim, -1, 0, tile_q, tile_k, 132, made)
    tiles = rounded(rows, tile_q)
    equal = heads * sum(rounded(visible(rows, rows, tile, tile_q), tile_k) + FIXED for tile in range(tiles)) / 132
    assert schedule_time(Schedule(tiles, heads, made[0], used), rows, rows, tile_q, tile_k) <= limit * equal


def test_few_tiles_are_not_paired(lib: c.CDLL) -> None:
    """16 heads of 1024 rows: 64 pairs, but 128 tiles, one for each thread block."""
    made = (c.c_int64 * 2)()
    assert lib.choose(1024, 1024, 16, 128, -1, 0, 128, 176, 132, made) == 128
    assert list(made) == [0, 1]


@pytest.mark.parametrize(("left", "right"), [(-1, -1), (200, 0)])
def test_masks_without_a_tail(lib: c.CDLL, left: int, right: int) -> None:
    """Tiles take equally long without a mask, and nearly so in a window."""
    made = (c.c_int64 * 2)()
    assert lib.choose(16384, 16384, 16, 128, left, right, 128, 176, 132, made) == 132
    assert list(made) == [16, 16]
