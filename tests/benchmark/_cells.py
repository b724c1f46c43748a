"""The cells of the benchmarks: the problems that are timed, and their number of operations."""

from __future__ import annotations

import dataclasses
import itertools

SEQLENS = (512, 2048, 8192)
HEAD_DIMS = (64, 128)
DTYPES = ("float32", "bfloat16")
PASSES = ("forward", "backward")

# seqlen: (batch, heads * head_dim). Operations grow with the square of the length, so long sequences have a batch of 1 and fewer
# heads; at least two, because an implementation may process a whole head per thread.
SIZES = {512: (16, 512), 2048: (2, 512), 8192: (1, 256)}
QUICK_SIZES = {512: (4, 512), 2048: (1, 256)}

# On a GPU as in the papers: the same number of tokens and of channels in every cell.
GPU_TOKENS, GPU_WIDTH = 16384, 2048
GPU_SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
GPU_HEAD_DIMS = (64, 128, 256)
GPU_QUICK_SEQLENS, GPU_QUICK_HEAD_DIMS = (1024, 8192), (64, 128)
GPU_FLOAT_SEQLENS, GPU_FLOAT_HEAD_DIMS = (1024, 4096), (64, 128)  # float32 takes an order of magnitude longer


@dataclasses.dataclass(frozen=True)
class Cell:
    direction: str  # "forward" or "backward"
    dtype: str
    head_dim: int
    seqlen: int
    causal: bool
    batch: int
    heads: int

    @property
    def gflop(self) -> float:
        """Counted as in the FlashAttention papers: only the matrix products, half of them if causal, backward 2.5 times
        forward.
        """
        forward = 4 * self.batch * self.heads * self.seqlen**2 * self.head_dim * (0.5 if self.causal else 1) / 1e9
        return forward * (2.5 if self.direction == "backward" else 1)

    @property
    def key(self) -> tuple[str, int, int, bool]:
        """The line of the table, which forward and backward of one problem share."""
        return self.dtype, self.head_dim, self.seqlen, self.causal


def cells(quick: bool) -> list[Cell]:
    sizes = QUICK_SIZES if quick else SIZES
    problems = itertools.product(DTYPES, HEAD_DIMS, sizes.items(), (False, True), PASSES)
    return [
        Cell(direction, dtype, head_dim, seqlen, causal, batch, width // head_dim)
        for dtype, head_dim, (seqlen, (batch, width)), causal, direction in problems
    ]


def gpu_shapes(dtype: str, quick: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Head dims and lengths with which a type is timed."""
    if dtype == "float32":
        return GPU_FLOAT_HEAD_DIMS, GPU_FLOAT_SEQLENS[:1] if quick else GPU_FLOAT_SEQLENS
    return (GPU_QUICK_HEAD_DIMS, GPU_QUICK_SEQLENS) if quick else (GPU_HEAD_DIMS, GPU_SEQLENS)


def gpu_cells(dtypes: list[str], directions: list[str], quick: bool) -> list[Cell]:
    found = []
    for direction, dtype in itertools.product(directions, dtypes):
        head_dims, seqlens = gpu_shapes(dtype, quick)
        for head_dim, causal, seqlen in itertools.product(head_dims, (False, True), seqlens):
            found.append(Cell(direction, dtype, head_dim, seqlen, causal, GPU_TOKENS // seqlen, GPU_WIDTH // head_dim))
    return found
