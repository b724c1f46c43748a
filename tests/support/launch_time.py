"""The time of a launch of CUDA thread blocks, for tests of plans."""

from __future__ import annotations

import heapq
from collections.abc import Iterable


def launch_time(work_tiles: Iterable[float], blocks: int) -> float:
    """The end of the last work tile, given their times. Each of `blocks` thread blocks takes the next work tile when it has
    finished one.
    """
    ends = [0.0] * blocks
    for time in work_tiles:
        heapq.heappush(ends, heapq.heappop(ends) + time)
    return max(ends)
