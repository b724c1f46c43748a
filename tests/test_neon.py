"""The kernels for NEON against the portable code on the same processor: they add in the same order, so every bit is the same."""

from __future__ import annotations

import numpy as np
import pytest
from harness import cpu_kernels, gradients, qkv, random

import libflash

pytestmark = pytest.mark.skipif("neon" not in cpu_kernels(), reason="not a 64-bit Arm processor")

OPTIONS = [
    {},
    {"causal": True, "softcap": 3.0},
    {"window_size": (9, 4), "dropout_p": 0.3, "seed": 5},
]
# Tiles of every height: 64 keys and what is left over.
SHAPES = [{"sq": 70, "sk": 131, "d": 64}, {"sq": 9, "sk": 33, "d": 19, "dv": 45}, {"sq": 3, "sk": 7, "d": 128}]


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    for name, x in one.items():
        assert x.tobytes() == other[name].tobytes(), name


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "causal", "window"])
@pytest.mark.parametrize("shape", SHAPES, ids=["large", "odd", "small"])
def test_attention(shape: dict, options: dict, dtype: str) -> None:
    q, k, v = qkv(**shape, dtype=dtype)
    dout = random(*q.shape[:3], v.shape[3], seed=9, dtype=v.dtype)
    same(*(gradients(q, k, v, dout, isa, **options) for isa in ("neon", "generic")))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 20])
def test_decode(rows: int, dtype: str) -> None:
    q, k, v = qkv(sq=rows, sk=150, d=40, dtype=dtype)
    calls = (libflash.decode(q, k, v, return_lse=True, kernel=f"decode_cpu_{isa}") for isa in ("neon", "generic"))
    same(*({"o": o, "lse": lse} for o, lse in calls))
