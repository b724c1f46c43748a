"""Ring attention as it is commonly written: causal, zigzag order, batch_isend_irecv and a merge of partial results. A peer for
libflash.torch.context_parallel_attention that uses the same kernels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

import libflash

Tensor = torch.Tensor


def pass_on(tensors: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], list[Any]]:
    """Send tensors to the next rank. Returns the tensors that the rank before this one sends, and the requests to wait for."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = tuple(torch.empty_like(x) for x in tensors)
    operations = [dist.P2POp(dist.isend, x, (rank + 1) % ranks) for x in tensors]
    operations += [dist.P2POp(dist.irecv, x, (rank - 1) % ranks) for x in received]
    return received, dist.batch_isend_irecv(operations)


def visible(source: int, half: int) -> tuple[slice, slice, bool]:
    """The rows and keys of this rank's tokens and those of `source` that see each other, and whether a causal mask is needed."""
    rank = dist.get_rank()
    if source == rank:
        return slice(None), slice(None), True
    return (slice(None), slice(half), False) if source < rank else (slice(half, None), slice(None), False)


class PlainRing(torch.autograd.Function):
    """q, k, v (1, tokens, heads, head_dim): this rank's two chunks of the zigzag order."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ranks, half = dist.get_world_size(), q.shape[1] // 2
        keys, out, lse = (k, v), None, None
        for step in range(ranks):
            following, requests = pass_on(keys) if step + 1 < ranks else (keys, [])
            rows, columns, causal = visible((dist.get_rank() - step) % ranks, half)
            part = libflash.attention(q[:, rows], *(x[:, columns] for x in keys), causal=causal, return_lse=True)
            if out is None:
                out, lse = part
            else:
                out[:, rows], lse[..., rows] = libflash.merge([out[:, rows], part[0]], [lse[..., rows], part[1]])
            for request in requests:
                request.wait()
            keys = following
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        ranks, half = dist.get_world_size(), q.shape[1] // 2
        keys, dq = (k, v), torch.zeros_like(q, dtype=torch.float32)
        sums = tuple(torch.zeros_like(x, dtype=torch.float32) for x in keys)
        for step in range(ranks):
            following, requests = pass_on(keys) if step + 1 < ranks else (keys, [])
            rows, columns, causal = visible((dist.get_rank() - step) % ranks, half)
            given = [dout[:, rows], q[:, rows], *(x[:, columns] for x in keys), out[:, rows], lse[..., rows].contiguous()]
            gradients = libflash.attention_backward(*given, causal=causal)
            dq[:, rows] += gradients[0]
            for total, more in zip(sums, gradients[1:], strict=True):
                total[:, columns] += more
            arrived, more_requests = pass_on(sums)  # after the last step each sum is on the rank that has its keys
            for request in requests + more_requests:
                request.wait()
            keys, sums = following, arrived
        return dq.to(q.dtype), *(x.to(k.dtype) for x in sums)
