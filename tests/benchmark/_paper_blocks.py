"""Time against density of a block mask: libflash skips the 128 x 128 blocks that the mask hides."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from _block_masks import block_mask, compare
from _cells import GPU_TOKENS, GPU_WIDTH, PASSES, Cell
from _gpu_contenders import DEVICE, RESULTS, Problem, problem
from _gpu_timing import medians
from _paper_contenders import kernel

import libflash

SEQLEN, HEAD_DIM = 8192, 128
DENSITIES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
QUICK_DENSITIES = (0.1, 0.5, 1.0)


def call(p: Problem, mask: torch.Tensor | None) -> Callable[[], tuple[torch.Tensor, ...]]:
    """A call in the cell's direction. The mask is compressed before, since a model uses a mask for many calls."""
    options = {} if mask is None else {"block_mask": libflash.compress_block_mask(mask)}
    forward, backward = (kernel(direction, HEAD_DIM) for direction in PASSES)
    out, lse = libflash.attention(p.q, p.k, p.v, return_lse=True, kernel=forward, **options)
    if p.cell.direction == "forward":
        return lambda: (libflash.attention(p.q, p.k, p.v, out=out, kernel=forward, **options),)
    made = {name: torch.empty_like(p.q) for name in RESULTS["backward"]}
    return lambda: libflash.attention_backward(p.dout, p.q, p.k, p.v, out, lse, kernel=backward, **made, **options)


def measure(quick: bool) -> Iterator[dict]:
    """One result per direction and density; density None: a call without a mask."""
    for direction in PASSES:
        one = Cell(direction, "bfloat16", HEAD_DIM, SEQLEN, False, GPU_TOKENS // SEQLEN, GPU_WIDTH // HEAD_DIM)
        p = problem(one)
        masks = {density: block_mask(density, SEQLEN).to(DEVICE) for density in (QUICK_DENSITIES if quick else DENSITIES)}
        calls = {"dense": call(p, None)} | {str(density): call(p, mask) for density, mask in masks.items()}
        for density, mask in masks.items():
            compare(p, mask, calls[str(density)]())
        ms, _ = medians(calls, rounds=3, replay_ms=8.0)
        torch.cuda.empty_cache()
        for name, value in ms.items():
            exact = None if name == "dense" else masks[float(name)].float().mean().item()
            yield {"direction": direction, "density": exact and round(exact, 4), "ms": float(f"{value:.4g}")}
