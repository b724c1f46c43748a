"""Flash-Decoding: one query against a growing cache, batch 1, split over the multiprocessors or not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch
from _gpu_contenders import DEVICE
from _gpu_timing import medians
from gpu_attention import agree

import libflash

HEADS_Q, HEADS_K, HEAD_DIM = 16, 2, 128
SEQLENS = tuple(1024 << i for i in range(10))  # to 524288
QUICK_SEQLENS = SEQLENS[::3]


def calls(seqlen: int) -> dict[str, Callable[[], torch.Tensor]]:
    """One split, and the library's choice. Both are compared with plain attention."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    shapes = [(1, 1, HEADS_Q, HEAD_DIM), *[(1, seqlen, HEADS_K, HEAD_DIM)] * 2]
    q, k, v = (torch.randn(shape, generator=generator, device=DEVICE).bfloat16() for shape in shapes)
    lengths = torch.full((1,), seqlen, dtype=torch.int32, device=DEVICE)

    def decode(num_splits: int) -> Callable[[], torch.Tensor]:
        return lambda: libflash.decode(q, k, v, cache_seqlens=lengths, num_splits=num_splits)

    made = {"unsplit": decode(1), "split": decode(0)}
    exact = plain(q, k, v)
    for name, call in made.items():
        agree(f"decode, {name}, {seqlen} keys", "forward", "bfloat16", call(), exact)
    return made


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    groups = q.float().view(HEADS_K, HEADS_Q // HEADS_K, HEAD_DIM)
    weights = torch.einsum("kgd,skd->kgs", groups, k[0].float()).mul_(HEAD_DIM**-0.5).softmax(dim=-1)
    return torch.einsum("kgs,skd->kgd", weights, v[0].float()).view(q.shape)


def why_not() -> str | None:
    """Why this build cannot decode on a GPU; None if it can."""
    try:
        calls(QUICK_SEQLENS[0])
    except (libflash.UnsupportedError, libflash.NoDeviceError) as refused:
        return str(refused).splitlines()[0]
    return None


def measure(quick: bool) -> Iterator[dict]:
    if reason := why_not():
        print(f"no CUDA decode kernel in this build: {reason}", file=sys.stderr)
        return
    for seqlen in QUICK_SEQLENS if quick else SEQLENS:
        ms, _ = medians(calls(seqlen), rounds=3, replay_ms=4.0)
        torch.cuda.empty_cache()
        cache_bytes = 2 * 2 * seqlen * HEADS_K * HEAD_DIM
        yield {
            "seqlen": seqlen,
            "us": {name: float(f"{1e3 * value:.4g}") for name, value in ms.items()},
            "gb_per_s": {name: round(cache_bytes / value / 1e6) for name, value in ms.items()},
        }
