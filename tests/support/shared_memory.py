"""Symmetric memory for tests: files that the processes of a host map, in place of the memory of GPUs.

Copies run in another thread after a random delay, as those of a copy engine may. The data of an earlier call is overwritten with
NaN as soon as that is allowed.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from libflash._torch_context_group import Axis

from libflash import _torch_symmetric_memory as symmetric

LATEST = 0.002  # seconds


class HostProvider:
    """`lacking`: the rank that has no symmetric memory; `failing`: the (operation, rank) that raises an exception."""

    def __init__(self, lacking: int | None = None, failing: tuple[str, int] | None = None) -> None:
        self.lacking, self.failing = lacking, failing
        self.sizes: list[int] = []  # of what was allocated

    def facts(self, device: torch.device) -> dict[str, Any]:
        del device
        return {"lacks": "it has none in this test" if dist.get_rank() == self.lacking else ""}

    def obstacle(self, facts_of_all: Sequence[dict[str, Any]]) -> str:
        return symmetric.first_of([facts["lacks"] for facts in facts_of_all])

    def fail(self, operation: str) -> None:
        if self.failing == (operation, dist.get_rank()):
            raise RuntimeError(f"{operation} fails in this test")

    def allocate(self, size: int, device: torch.device) -> tuple[str, int]:
        del device
        self.fail("allocate")
        self.sizes.append(size)
        handle, path = tempfile.mkstemp(prefix="symmetric-memory-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        os.truncate(handle, size)
        os.close(handle)
        return path, size

    def connect(self, block: tuple[str, int], axis: Axis) -> HostPeers:
        path, size = block
        paths: list[Any] = [None] * axis.size
        dist.all_gather_object(paths, path, group=axis.group)
        made = HostPeers([torch.from_file(other, shared=True, size=size, dtype=torch.uint8) for other in paths], axis)
        dist.barrier(axis.group)
        os.unlink(path)
        self.fail("connect")
        return made


class Late:
    def __init__(self, future: Future[None]) -> None:
        self.future = future

    def wait(self) -> None:
        self.future.result()


class HostPeers:
    def __init__(self, blocks: list[torch.Tensor], axis: Axis) -> None:
        self.blocks, self.rank = blocks, axis.rank
        self.group = weakref.ref(axis.group)  # weak, because the group keeps this object
        self.size = blocks[0].numel()
        self.thread = ThreadPoolExecutor(1)
        self.pending: list[Future[None]] = []
        self.fresh = False

    def begin(self) -> None:
        self.fresh = True

    def end(self) -> None:
        for future in self.pending:
            future.result()
        self.pending.clear()

    def view(self, rank: int, begin: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        size = prod(shape) * dtype.itemsize
        assert begin + size <= self.size
        return self.blocks[rank][begin : begin + size].view(dtype).view(tuple(shape))

    def barrier(self) -> None:
        dist.barrier(self.group())
        if self.fresh:
            self.blocks[self.rank].fill_(255)
        self.fresh = False

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Late:
        assert all(x.is_contiguous() for pair in pairs for x in pair)

        def run() -> None:
            time.sleep(random.uniform(0, LATEST))
            for to, source in pairs:
                to.copy_(source)

        future = self.thread.submit(run)
        self.pending.append(future)
        return Late(future)


def install(**options: Any) -> HostProvider:
    """Use this symmetric memory in this process, for tensors on the CPU."""
    provider = HostProvider(**options)
    symmetric.PROVIDERS["cpu"] = provider
    return provider
