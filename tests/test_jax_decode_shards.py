"""libflash.jax.decode on shards of the keys, and with the hint of shared keys."""

from __future__ import annotations

import re

import numpy as np
import pytest
from harness import BFLOAT16, assert_same_bits, random

import libflash

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import libflash.jax  # noqa: E402

COUNT, KEYS = 3, 4
LENGTHS = np.array([29, 40], np.int32)


def problem() -> tuple[np.ndarray, list[list[np.ndarray]], list[np.ndarray]]:
    q, *whole = (
        random(*shape, seed=i).astype(BFLOAT16) for i, shape in enumerate(((2, 3, 4, 16), (2, 48, 2, 16), (2, 48, 2, 16)))
    )
    here = [np.arange(48)[np.arange(48) // KEYS % COUNT == i] for i in range(COUNT)]
    return q, [[np.ascontiguousarray(x[:, rows]) for x in whole] for rows in here], whole


def test_shards_are_those_of_the_library() -> None:
    q, parts, _ = problem()
    k, v = (random(2, 3, 2, 16, seed=s).astype(BFLOAT16) for s in (7, 8))

    def step(index: int):
        return jax.jit(lambda q, caches, k, v: libflash.jax.decode(
            q, *caches, k=k, v=v, cache_seqlens=LENGTHS, return_lse=True, shard=(COUNT, index, KEYS)))  # fmt: skip

    for index, part in enumerate(parts):
        got = step(index)(q, part, k, v)
        own = [x.copy() for x in part]
        wanted = libflash.decode(q, *own, k=k, v=v, cache_seqlens=LENGTHS, return_lse=True, shard=(COUNT, index, KEYS))
        assert got[0].dtype == np.float32
        for x, y in zip(got, (*wanted, *own), strict=True):
            assert_same_bits(np.asarray(x), y)


def test_merged_shards_are_the_whole() -> None:
    q, parts, whole = problem()

    @jax.jit
    def merged(q, parts):
        results = [
            libflash.jax.decode(q, *part, cache_seqlens=LENGTHS, return_lse=True, shard=(COUNT, i, KEYS))
            for i, part in enumerate(parts)
        ]
        return libflash.jax.merge(*zip(*results, strict=True))

    got = merged(q, parts)
    wanted = libflash.decode(*(x.astype(np.float64) for x in (q, *whole)), cache_seqlens=LENGTHS, return_lse=True)
    for x, y in zip(got, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def test_vmap() -> None:
    q, parts, _ = problem()
    one = lambda q, k, v: libflash.jax.decode(q, k, v, cache_seqlens=LENGTHS, shard=(COUNT, 1, KEYS))  # noqa: E731
    stacked = [np.stack([x, x[::-1]]) for x in (q, *parts[1])]
    got = jax.vmap(one)(*stacked)
    assert got.dtype == np.float32
    for i in range(2):
        assert_same_bits(np.asarray(got[i]), np.asarray(one(*(x[i] for x in stacked))))


def test_refusals() -> None:
    q, parts, _ = problem()
    for shard, text in (((2, 2, 1), "shard[1]: must be at least 0 and below shard[0]"), ((-1, 0, 1), "shard[0]: ")):
        with pytest.raises(libflash.InvalidError, match=f"^{re.escape(text)}"):
            jax.eval_shape(lambda q, s=shard: libflash.jax.decode(q, *parts[0], cache_seqlens=LENGTHS, shard=s), q)
    with pytest.raises(TypeError, match="shard must be a triple"):
        libflash.jax.decode(q, *parts[0], shard=(2, 1))


def test_the_hint() -> None:
    q, _, whole = problem()
    options = {"cache_batch_idx": np.array([1, 1], np.int32), "cache_seqlens": LENGTHS}
    hint = {"shared_groups": np.array([0, 2], np.int32), "shared_lens": np.array([29], np.int32)}
    wanted = libflash.decode(q, *whole, **options)
    got = jax.jit(lambda given: libflash.jax.decode(q, *whole, **given))({**options, **hint})
    assert_same_bits(np.asarray(got), wanted)
    with pytest.raises(Exception, match="shared_lens: must be at most cache_seqlens"):
        libflash.jax.decode(q, *whole, **options, **hint | {"shared_lens": jnp.array([30], jnp.int32)}).block_until_ready()
