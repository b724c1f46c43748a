"""Peak memory of calls that all ranks make together, and what _context_memory.py says of it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import NamedTuple

import libflash.torch
import torch
import torch.distributed as dist
from _context_memory import Shape, Workspace, peak

import libflash
from libflash import _torch_symmetric_memory as symmetric_memory


class Measured(NamedTuple):
    """Bytes, and whether some of them are symmetric memory."""

    size: int
    symmetric: bool = False


def measured_peak(call: Callable[[], object], device: torch.device) -> Measured | None:
    """What the call holds at most, its results included: of PyTorch's allocator, and symmetric memory. None on a CPU."""
    if device.type != "cuda":
        call()
        return None
    torch.cuda.synchronize()
    symmetric_memory.release()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    symmetric = symmetric_memory.held()
    return Measured(torch.cuda.max_memory_allocated() - before + symmetric, symmetric > 0)


def modelled_peak(
    name: str, whole: list[torch.Tensor], shards: list[torch.Tensor], causal: bool, backward: bool, symmetric: bool
) -> int | None:
    """The peak of this rank by the model; None for contenders that are not libflash's. `name`: a scheme, and a transport after a
    comma.
    """
    q, k, _ = shards
    scheme = name.partition(",")[0]
    if scheme == "auto":
        scheme = libflash.torch.explain_context_parallel(*shards, causal=causal).split(":")[0].split()[1]
    if scheme not in ("ring", "all_gather", "heads", "heads_ring"):
        return None
    ranks = dist.get_world_size()
    mesh = (2, ranks // 2) if scheme == "heads_ring" else (ranks,)
    shape = Shape(q.shape[1], q.shape[2], k.shape[2], q.shape[3], q.element_size())
    return peak(scheme, shape, mesh, causal, backward, dist.get_rank(), workspace=workspace_of(whole), symmetric=symmetric)


def workspace_of(whole: list[torch.Tensor]) -> Workspace:
    """The workspace of calls with some rows, keys and heads of the whole problem."""

    @functools.cache
    def workspace(operation: str, rows: int, keys: int, heads: tuple[int, int], causal: bool) -> int:
        sizes = ((rows, heads[0]), (keys, heads[1]), (keys, heads[1]))
        q, k, v = (x[:, :tokens, :count] for x, (tokens, count) in zip(whole, sizes, strict=True))
        found = re.search(r"^workspace +(\d+)", libflash.explain(q, k, v, op=operation, causal=causal), re.MULTILINE)
        return int(found[1]) if found else 0

    return workspace


def memory_of_ranks(
    peaks: dict[str, Measured | None], whole: list[torch.Tensor], shards: list[torch.Tensor], causal: bool, backward: bool
) -> dict[str, dict[str, int]]:
    """The largest of all ranks: {"bytes": ..., "model": ...}, the latter for libflash's schemes."""
    made = {}
    for name, peak_of_rank in peaks.items():
        found = peak_of_rank or Measured(0)
        model = modelled_peak(name, whole, shards, causal, backward, found.symmetric) or 0
        pair = torch.tensor([found.size, model], device=whole[0].device)
        dist.all_reduce(pair, dist.ReduceOp.MAX)
        made[name] = {what: size for what, size in zip(("bytes", "model"), pair.tolist(), strict=True) if size}
    return made


def said_of_memory(memory: dict[str, int] | None) -> str:
    if not memory or "bytes" not in memory:
        return ""
    error = f", {memory['bytes'] / memory['model'] - 1:+.1%} of the model" if "model" in memory else ""
    return f", {memory['bytes'] / 1e9:.3f} GB beyond q, k, v{error}"
