"""Decode: keys in two tensors, k_cache and k_rope_cache, are keys in one."""

from __future__ import annotations

import numpy as np
import pytest
from harness import BFLOAT16, assert_same_bits, random
from test_decode import KERNELS

import libflash


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16, np.dtype(np.float32)], ids=str)
@pytest.mark.parametrize("rows", [1, 12])
@pytest.mark.parametrize("invariant", [False, True])
def test_rope_apart_is_joined(kernel: str, dtype: np.dtype, rows: int, invariant: bool) -> None:
    """Bit for bit where the products of one part are exact: its sum is then the same in any order."""
    whole = np.round(2 * random(2, 300, 1, 48, seed=1)).astype(dtype)
    q = np.round(2 * random(2, rows, 4, 48, seed=2)).astype(dtype)
    v = random(2, 300, 1, 32, seed=3).astype(dtype)
    options = dict(kernel=kernel, return_lse=True, invariant=invariant, cache_seqlens=np.array([300, 170], np.int32))
    options |= {"softmax_scale": 0.125, "window_size": (200, 0)}
    wanted = libflash.decode(q, whole, v, softcap=50.0, **options)
    apart = np.ascontiguousarray(whole[..., :32]), np.ascontiguousarray(whole[..., 32:])
    got = libflash.decode(q, apart[0], v, k_rope_cache=apart[1], softcap=50.0, **options)
    for one, other in zip(got, wanted, strict=True):
        assert_same_bits(one, other)
