"""Forward problems, one for each kind of static schedule of the sm90 kernels."""

from __future__ import annotations

from typing import NamedTuple


class Problem(NamedTuple):
    sequences: int
    rows: int
    keys: int
    heads: int
    causal: bool
    line: str  # a part of the line "schedule" or "instance" of explain, with 132 multiprocessors; "\n" ends the line
    head_dims: tuple[int, ...]  # that have this schedule


IN_TURN = "longest or shortest tiles first in turn"
ALL = (64, 96, 128, 192, 256)
PROBLEMS = {
    "rounds": Problem(4, 1000, 1000, 40, False, "plain\n", ALL),
    "pairs": Problem(4, 1000, 1000, 40, True, "long tiles paired with short ones", ALL),
    "tail": Problem(16, 1024, 1024, 16, True, "but not in the last 25 of 256 heads", (128,)),
    "long-tail": Problem(1, 4000, 4000, 32, True, "but not in the last 8 of 32 heads", (128,)),
    "longest-first": Problem(1, 1000, 1000, 16, True, "16 heads at a time, longest tiles first", (96, 128, 192, 256)),
    "groups": Problem(26, 297, 1200, 8, True, f"44 heads at a time, {IN_TURN}", (128, 192, 256)),
    "groups-of-192-rows": Problem(26, 500, 1200, 8, True, f"44 heads at a time, {IN_TURN}", (64, 96)),
    "narrow": Problem(1, 1000, 1000, 16, False, "plain, narrow", (64,)),
    "narrow-causal": Problem(2, 500, 500, 16, True, "plain, narrow", (64,)),
}
