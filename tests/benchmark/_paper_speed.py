"""Speed by length, as in the figures of the FlashAttention-2 paper: every contender on every cell."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import torch
from _cells import GPU_SEQLENS, GPU_TOKENS, GPU_WIDTH, PASSES, Cell
from _gpu_contenders import problem
from _gpu_timing import Call, medians
from _paper_contenders import SLACK, contenders
from gpu_attention import compare

HEAD_DIMS, QUICK_SEQLENS = (64, 128), (1024, 4096)
ROUNDS, REPLAY_MS = 3, 8.0


def cells(quick: bool) -> list[Cell]:
    problems = itertools.product(HEAD_DIMS, (False, True), QUICK_SEQLENS if quick else GPU_SEQLENS, PASSES)
    return [
        Cell(direction, "bfloat16", head_dim, seqlen, causal, GPU_TOKENS // seqlen, GPU_WIDTH // head_dim)
        for head_dim, causal, seqlen, direction in problems
    ]


def calls_of(cell: Cell) -> dict[str, Call]:
    """Call each once and compare its result with libflash's."""
    p = problem(cell)
    calls = {name: contender(p) for name, contender in contenders(cell).items()}
    compare(cell, calls, SLACK)
    return calls


def measure(quick: bool) -> Iterator[dict]:
    for cell in cells(quick):
        ms, spread = medians(calls_of(cell), ROUNDS, REPLAY_MS)
        torch.cuda.empty_cache()
        yield dataclasses.asdict(cell) | {
            "ms": {name: float(f"{value:.4g}") for name, value in ms.items()},
            "tflops": {name: round(cell.gflop / value, 1) for name, value in ms.items()},
            "spread": round(spread, 3),
        }
