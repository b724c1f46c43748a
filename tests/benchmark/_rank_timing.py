"""Times of calls that all ranks of a torch.distributed group make together."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

Call = Callable[[], object]
SHORTEST = 0.01  # milliseconds of a call, at least


@dataclass(frozen=True)
class Clock:
    """A sample is a window of as many calls back to back as take `window` milliseconds, or one call if that is longer. So the
    clock and the power of a GPU settle in a window of short calls as they do during one long call.
    """

    device: torch.device
    window: float

    def milliseconds(self, call: Call, calls: int = 1) -> float:
        """Milliseconds per call of some calls back to back: those of the slowest rank, on every rank."""
        dist.barrier()
        self.finish()
        begun = time.perf_counter()
        for _ in range(calls):
            call()
        self.finish()
        mine = torch.tensor([1000 * (time.perf_counter() - begun) / calls], device=self.device)
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        return mine.item()

    def finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def first_sample(self, call: Call) -> tuple[int, float | None]:
        """The number of calls in a window, the same on all ranks; and a sample, if one call takes as long as a window."""
        first = self.milliseconds(call)
        if first >= self.window:
            return 1, first
        shorter = min(first, self.milliseconds(call, 3))  # the first one waits for the host
        return math.ceil(self.window / max(shorter, SHORTEST)), None

    def sample(self, call: Call) -> float:
        calls, found = self.first_sample(call)
        return self.milliseconds(call, calls) if found is None else found

    def medians(self, calls: dict[str, Call], rounds: int) -> dict[str, float]:
        """Each round has a sample of every call, in an order that is shuffled alike on all ranks. Every call has run before."""
        sizes, times = {}, {}
        for name, call in calls.items():
            sizes[name], found = self.first_sample(call)
            times[name] = [] if found is None else [found]
        order = random.Random(1)
        for i in range(rounds):
            for name in order.sample(list(calls), len(calls)):
                if len(times[name]) <= i:
                    times[name].append(self.milliseconds(calls[name], sizes[name]))
        return {name: statistics.median(values) for name, values in times.items()}
