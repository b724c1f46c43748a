"""Timing of calls on a GPU: replays of CUDA graphs, which exclude host time; contenders in random order; medians."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable

import torch

Call = Callable[[], object]
REPLAY_MS, MOST_CALLS, SETTLING = 30.0, 400, 2


def elapsed_ms(work: Call) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def graph(call: Call, replay_ms: float = REPLAY_MS) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of as many calls as take `replay_ms`, and their number. The capture is on the current stream."""
    call()  # loads and tunes kernels, which a capture does not allow
    once = elapsed_ms(call)
    if once < replay_ms:
        once = elapsed_ms(lambda: [call() for _ in range(3)]) / 3
    count = min(MOST_CALLS, max(1, round(replay_ms / max(once, 1e-3))))
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, stream=torch.cuda.current_stream()):
        for _ in range(count):
            call()
    return captured, count


def medians(calls: dict[str, Call], rounds: int, replay_ms: float = REPLAY_MS) -> tuple[dict[str, float], float]:
    """Median milliseconds per call, and the largest relative spread.

    Each round has all contenders in a random order. A card's clocks follow its power, and a contender begins at the clocks that
    the one before it has left, which changes times by up to 10 %. So a contender runs for SETTLING times `replay_ms` before a
    replay is timed.
    """
    graphs = {name: graph(call, replay_ms) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    settling = {}
    for name, (captured, _) in graphs.items():
        captured.replay()
        settling[name] = math.ceil(SETTLING * replay_ms / elapsed_ms(captured.replay))
    order = random.Random(1)
    for _ in range(rounds):
        for name in order.sample(list(graphs), len(graphs)):
            captured, count = graphs[name]
            for _ in range(settling[name]):
                captured.replay()
            times[name].append(elapsed_ms(captured.replay) / count)
    ms = {name: statistics.median(values) for name, values in times.items()}
    return ms, max(map(relative_spread, times.values()))


def relative_spread(values: list[float]) -> float:
    return (max(values) - min(values)) / statistics.median(values)
