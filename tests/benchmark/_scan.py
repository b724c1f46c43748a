"""The problems of gpu_scan.py: random shapes, and the calls of those contenders that support them."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterator

import _gpu_contenders
from _cells import Cell
from _gpu_contenders import Call, problem
from _report import mask_name

MOST_GFLOP, FEWEST_GFLOP, MOST_TOKENS = 2000.0, 0.05, 1 << 18
LENGTHS, BATCHES = (64, 16384), (1, 64)
HEADS, GROUPS, HEAD_DIMS = (1, 2, 4, 8, 12, 16, 24, 32, 40, 64), (1, 1, 2, 4, 8), (64, 128, 256)


@dataclasses.dataclass(frozen=True)
class Shape(Cell):
    """`seqlen`, `heads` and `head_dim` are those of the queries."""

    keys: int
    key_heads: int

    @property
    def gflop(self) -> float:
        """Of the matrix products with visible keys. A causal problem has at least as many keys as rows; the last row sees all."""
        hidden = self.seqlen * (self.seqlen - 1) / 2 if self.causal else 0
        forward = 4 * self.batch * self.heads * self.head_dim * (self.seqlen * self.keys - hidden) / 1e9
        return forward * (2.5 if self.direction == "backward" else 1)

    @property
    def name(self) -> str:
        keys = "" if self.keys == self.seqlen else f" keys {self.keys}"
        size = f"{self.dtype} d={self.head_dim} {self.batch} x {self.seqlen}{keys}"
        return f"{size} heads {self.heads}/{self.key_heads} {mask_name(self.causal)}"


def log_uniform(draw: random.Random, low: int, high: int) -> int:
    return round(math.exp(draw.uniform(math.log(low), math.log(high))))


def rounded(n: int, draw: random.Random) -> int:
    """Half of the lengths are multiples of 64."""
    return max(64, n // 64 * 64) if draw.random() < 0.5 else n


def same(draw: random.Random) -> dict[str, object]:
    """As many keys as query rows."""
    length = rounded(log_uniform(draw, *LENGTHS), draw)
    return {"seqlen": length, "keys": length, "head_dim": draw.choice(HEAD_DIMS)}


def other_lengths(draw: random.Random) -> dict[str, object]:
    """Fewer query rows than keys, or the reverse without a causal mask."""
    lengths = [rounded(log_uniform(draw, *LENGTHS), draw) for _ in range(2)]
    if draw.random() < 0.3:
        return {"seqlen": max(lengths), "keys": min(lengths), "head_dim": draw.choice(HEAD_DIMS), "causal": False}
    return {"seqlen": min(lengths), "keys": max(lengths), "head_dim": draw.choice(HEAD_DIMS)}


def other_head_dims(draw: random.Random) -> dict[str, object]:
    return same(draw) | {"head_dim": 8 * draw.randint(4, 32)}


def half(draw: random.Random) -> dict[str, object]:
    return same(draw) | {"dtype": "float16"}


FAMILIES: dict[str, Callable[[random.Random], dict[str, object]]] = {
    "same": same,
    "lengths": other_lengths,
    "head_dims": other_head_dims,
    "fp16": half,
}


def shapes(family: str, direction: str, seed: int) -> Iterator[Shape]:
    """Without end."""
    draw = random.Random(f"{family} {direction} {seed}")
    while True:
        heads, group = draw.choice(HEADS), draw.choice(GROUPS)
        about = {
            "direction": direction,
            "dtype": "bfloat16",
            "causal": draw.random() < 0.5,
            "batch": log_uniform(draw, *BATCHES),
            "heads": heads,
            "key_heads": heads // group if heads % group == 0 else heads,
        }
        shape = Shape(**about | FAMILIES[family](draw))
        if FEWEST_GFLOP <= shape.gflop <= MOST_GFLOP and shape.batch * max(shape.seqlen, shape.keys) <= MOST_TOKENS:
            yield shape


def contenders(shape: Shape) -> dict[str, Callable[[], Call]]:
    """libflash and the peers that may compute this problem. PyTorch aligns a causal mask at the first row and key, the others at
    the last ones. FlashAttention-2 is left out, because cuDNN and FlashAttention-3 are faster.
    """
    found = _gpu_contenders.contenders(problem(shape, shape.keys, shape.key_heads), None)
    del found["fa2"]
    if shape.causal and shape.seqlen != shape.keys:
        del found["cudnn"]
    return found
