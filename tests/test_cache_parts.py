"""Decode: keys in two tensors, k_cache and k_rope_cache, are keys in one; a rotary embedding rotates the second part."""

from __future__ import annotations

from typing import Any

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


TYPES = [np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.float64)]
CACHED, TABLE = np.array([70, 3], np.int32), np.array([[3, 1, 4, 7, 5, 9], [0, 2, 6, 8, 10, 11]], np.int32)
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window_size": (40, 0)},
    "positions": {"q_positions": np.array([[70, 71, 71], [3, 4, 4]], np.int32)},
    "tree": {"tree_mask": np.array([1, 3, 5, 1, 3, 7], np.int32)[:, None]},
}


def rotary(pairs: int, interleaved: bool) -> dict[str, Any]:
    angles = np.arange(80)[:, None] * 0.1 ** np.linspace(0, 3, pairs)
    tables = {"rotary_cos": np.cos(angles).astype(np.float32), "rotary_sin": np.sin(angles).astype(np.float32)}
    return tables | {"rotary_interleaved": interleaved}


def problem(dtype: np.dtype, rope: int, latent: int = 32) -> tuple[np.ndarray, dict[str, Any]]:
    """The values are channels of the latent part."""
    x = {"k_cache": random(12, 16, 1, latent, seed=1), "k_rope_cache": random(12, 16, 1, rope, seed=2)}
    x |= {"k": random(2, 3, 1, latent, seed=3), "k_rope": random(2, 3, 1, rope, seed=4)}
    given = {name: value.astype(dtype) for name, value in x.items()} | {"cache_seqlens": CACHED, "block_table": TABLE}
    return random(2, 3, 4, latent + rope, seed=5).astype(dtype), given | {"head_dim_v": latent}


def rotated(x: np.ndarray, given: dict[str, Any], tables: dict[str, Any]) -> np.ndarray:
    """x is rotated as keys that are appended: what a cache of one part then holds."""
    batch, rows, heads, dim = x.shape
    caches = [np.zeros((batch, 80, heads, dim), x.dtype) for _ in range(2)]
    more = {name: given[name] for name in ("cache_seqlens", "q_positions", "tree_mask") if name in given}
    libflash.decode(np.zeros_like(x), *caches, k=x, v=x, **more, **tables)
    return np.stack([caches[0][b, n : n + rows] for b, n in enumerate(CACHED)])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("invariant", [False, True])
def test_rotation_in_the_call_is_one_before_it(kernel: str, dtype: np.dtype, option: str, invariant: bool) -> None:
    """Bit for bit, in the results and in the caches."""
    for rope, pairs, interleaved in ((8, 4, True), (8, 4, False), (16, 3, True), (16, 3, False), (9, 4, False), (2, 1, True)):
        q, x = problem(dtype, rope)
        tables, more = rotary(pairs, interleaved), {"kernel": kernel, "return_lse": True, "invariant": invariant}
        x |= OPTIONS[option]
        before = {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in x.items()}
        got = libflash.decode(q, **x, **tables, **more)
        before["k_rope"] = rotated(before["k_rope"], before, tables)
        rows = q[..., 32:].copy()
        if option == "full":  # all rows have the position of the first
            own = [rotated(rows[:, i : i + 1], before, tables) for i in range(3)]
            rows = np.concatenate(own, axis=1)
        else:
            rows = rotated(rows, before, tables)
        wanted = libflash.decode(np.concatenate([q[..., :32], rows], -1), **before, **more)
        for one, other in zip(got, wanted, strict=True):
            assert_same_bits(one, other)
        for name in ("k_cache", "k_rope_cache"):
            assert_same_bits(x[name], before[name])


@pytest.mark.parametrize("kernel", KERNELS)
def test_queries_alone_are_rotated(kernel: str) -> None:
    """Without new keys."""
    q, x = problem(BFLOAT16, 16)
    for name in ("k", "k_rope"):
        del x[name]
    tables, rows = rotary(8, True), q.copy()
    got = libflash.decode(q, **x, **tables, kernel=kernel)
    assert_same_bits(q, rows)
    rows[..., 32:] = rotated(rows[..., 32:].copy(), x, tables)
    assert_same_bits(got, libflash.decode(rows, **x, kernel=kernel))


def test_more_channels_than_the_rope_part_are_refused() -> None:
    q, x = problem(BFLOAT16, 16)
    with pytest.raises(libflash.InvalidError, match=r"^rotary_cos: .* at most those of k_rope_cache \(18 of 16\)"):
        libflash.decode(q, **x, **rotary(9, True))
    rows = {name: x[name].reshape(6, *x[name].shape[2:]) for name in ("k", "k_rope")}
    more = {"slots": np.arange(6), "positions": np.arange(6, dtype=np.int32), "k_rope_cache": x["k_rope_cache"]}
    with pytest.raises(libflash.InvalidError, match=r"^rotary_cos: .* at most those of k_rope_cache \(18 of 16\)"):
        libflash.cache_write(**rows, v=None, k_cache=x["k_cache"], v_cache=None, **more, **rotary(9, True))
