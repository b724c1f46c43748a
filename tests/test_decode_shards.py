"""Decode on shards of the keys: merged, they are the whole."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
from decode_cases import DecodeCase
from harness import BFLOAT16, assert_same_bits, random
from key_shards import KeyShards
from reference_decode import own_rows
from test_decode import CASES, KERNELS, every_kernel

import libflash

SHARDS = [(2, 1), (3, 16), (8, 1), (5, 7), (4, 64), (8, 16), (7, 3)]  # how many, and their keys in a row
HEADS_Q, HEADS_K, DIM = 4, 2, 32


def appends_all(case: DecodeCase) -> bool:
    """As many new rows as query rows, which shards need."""
    options = case.inputs().options
    if "k" not in options:
        return True
    cu = options.get("cu_seqlens_q")
    rows = [[at[-1].stop - at[-1].start for at in own_rows(x, own)] for x, own in (
        (case.inputs().q, cu), (options["k"], options.get("cu_seqlens_new", cu)))]  # fmt: skip
    return all(new >= queries for queries, new in zip(*rows, strict=True))


def merged(parts: list[tuple[np.ndarray, np.ndarray]], dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    outs, lses = zip(*parts, strict=True)
    out = np.empty(outs[0].shape, dtype)
    return out, libflash.merge(outs, lses, out=out)[1]


@every_kernel
@pytest.mark.parametrize(("number", "case"), list(enumerate(case for case in CASES if appends_all(case))), ids=str)
def test_merged_shards_are_the_whole(number: int, case: DecodeCase, kernel: str) -> None:
    for split, at in (({}, number), ({"split_size": 128}, number + 3)):
        shards = KeyShards(case.inputs(), *SHARDS[at % len(SHARDS)])
        parts = shards.decode(kernel=kernel, **split)
        assert all(out.dtype == np.float32 for out, _ in parts)
        o, lse = merged(parts, shards.x.q.dtype)
        if case.slack_rows:  # never written
            o[-case.slack_rows :], lse[:, -case.slack_rows :] = 0, -np.inf
        case.check(o=o, lse=lse, k_cache=shards.joined("k_cache"), v_cache=shards.joined("v_cache"))


def long_problem() -> DecodeCase:
    return DecodeCase(
        "shards-long", "fp32", lengths=(1500, 3, 900, 0), capacity=1600, seqlen_q=3, append=3, window_size=(1100, 0), sink=True
    )


@every_kernel
@pytest.mark.parametrize("count", range(1, 9))
@pytest.mark.parametrize("keys", [1, 16])
def test_every_number_of_shards(kernel: str, count: int, keys: int) -> None:
    if kernel == "decode_cpu_scalar" and count not in (1, 3):
        return
    case = long_problem()
    for invariant in (False, True):
        shards = KeyShards(case.inputs(), count, keys)
        o, lse = merged(shards.decode(kernel=kernel, invariant=invariant), np.dtype("float32"))
        case.check(o=o, lse=lse, k_cache=shards.joined("k_cache"), v_cache=shards.joined("v_cache"))


@every_kernel
def test_one_shard_is_the_whole_call(kernel: str) -> None:
    case = dataclasses.replace(long_problem(), dtype="bf16", alibi="h")
    results = []
    for shard in ({}, {"shard": (1, 0, 16)}, {"shard": (0, 0, 0)}):
        x = case.inputs()
        results.append(
            [*libflash.decode(x.q, x.k_cache, x.v_cache, kernel=kernel, return_lse=True, **x.options, **shard), x.k_cache]
        )
    assert results[0][0].dtype == BFLOAT16
    for other in results[1:]:
        for got, wanted in zip(other, results[0], strict=True):
            assert_same_bits(got, wanted)


@every_kernel
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_types_of_out(kernel: str, dtype: str) -> None:
    """float32 beside 16-bit inputs, with and without shards, is the unrounded result."""
    kind = BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
    q, caches = (
        random(2, 3, HEADS_Q, DIM, seed=1).astype(kind),
        [random(2, 90, HEADS_K, DIM, seed=s).astype(kind) for s in (2, 3)],
    )
    lengths = np.array([90, 37], np.int32)
    for rows in (1, 3):  # 3 rows of 4 heads use another engine than 1
        for more in ({}, {"shard": (2, 0, 40)}):
            options = {"cache_seqlens": lengths, "kernel": kernel, **more}
            narrow, wide = np.empty((2, rows, HEADS_Q, DIM), kind), np.full((2, rows, HEADS_Q, DIM), np.nan, np.float32)
            libflash.decode(q[:, :rows], *caches, out=narrow, **options)
            if dtype == "float64":
                with pytest.raises(libflash.InvalidError, match="out: dtype"):
                    libflash.decode(q[:, :rows], *caches, out=wide, **options)
                continue
            libflash.decode(q[:, :rows], *caches, out=wide, **options)
            assert_same_bits(wide.astype(kind), narrow)


@every_kernel
def test_a_shard_without_keys(kernel: str) -> None:
    """out 0 and lse -inf, never NaN; the cache is not read. With a sink shard 0 has its lse."""
    q = random(2, 1, HEADS_Q, DIM, seed=1)
    caches = [np.full((2, 8, HEADS_K, DIM), np.nan, np.float32) for _ in range(2)]
    sink = np.arange(HEADS_Q, dtype=np.float32)
    for index, more in ((3, {}), (3, {"learnable_sink": sink}), (2, {"learnable_sink": sink})):
        options = {"cache_seqlens": np.array([32, 0], np.int32), "shard": (4, index, 16), "kernel": kernel, **more}
        out, lse = libflash.decode(q, *caches, return_lse=True, **options)
        assert not out.any()
        assert (lse == -np.inf).all()
    first = {"cache_seqlens": np.zeros(2, np.int32), "shard": (4, 0, 16), "learnable_sink": sink, "kernel": kernel}
    out, lse = libflash.decode(q, *caches, return_lse=True, **first)
    assert not out.any()
    np.testing.assert_array_equal(lse, np.broadcast_to(sink[:, None], lse.shape))


@pytest.mark.parametrize("kernel", KERNELS)
def test_codes_and_scales_of_new_rows(kernel: str) -> None:
    """Each shard has the codes and the computed scales that the whole cache has, and merged they attend to the same values."""
    count, keys, capacity, new = 3, 4, 60, 7
    q, k, v = random(1, new, HEADS_Q, DIM, seed=1), random(1, new, HEADS_K, DIM, seed=2), random(1, new, HEADS_K, DIM, seed=3)
    whole = [random(1, capacity, HEADS_K, DIM, seed=s).astype(np.int8) for s in (4, 5)]
    scales = [np.abs(random(1, capacity, HEADS_K, seed=s)) for s in (6, 7)]
    here = [np.arange(capacity)[np.arange(capacity) // keys % count == i] for i in range(count)]
    parts = [[x[:, rows].copy() for x in (*whole, *scales)] for rows in here]
    options = {"k": k, "v": v, "cache_seqlens": np.array([41], np.int32), "return_lse": True, "kernel": kernel}
    wanted = libflash.decode(q, *whole, k_scale=scales[0], v_scale=scales[1], **options)
    results = [
        libflash.decode(q, *part[:2], k_scale=part[2], v_scale=part[3], shard=(count, i, keys), **options)
        for i, part in enumerate(parts)
    ]
    for rows, part in zip(here, parts, strict=True):
        for got, want in zip(part, (*whole, *scales), strict=True):
            assert_same_bits(got, np.ascontiguousarray(want[:, rows]))
    for got, want in zip(merged(results, np.dtype("float32")), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-4)


def test_a_hint_of_shared_keys_counts_all_keys() -> None:
    q = random(2, 1, HEADS_Q, DIM, seed=1)
    caches = [random(6, 4, HEADS_K, DIM, seed=s) for s in (2, 3)]
    options = {"cache_seqlens": np.array([24, 24], np.int32), "shard": (2, 1, 4), "shared_groups": np.array([0, 2], np.int32)}
    table = np.array([[0, 1, 2], [0, 3, 4]], np.int32)  # the second page has keys 12 to 15
    libflash.decode(q, *caches, block_table=table, shared_lens=np.array([12]), **options)
    with pytest.raises(libflash.InvalidError, match=r"same pages .*in column 1"):
        libflash.decode(q, *caches, block_table=table, shared_lens=np.array([13]), **options)


def test_fewer_new_rows_than_query_rows() -> None:
    q, k = random(1, 2, HEADS_Q, DIM, seed=1), random(1, 1, HEADS_K, DIM, seed=2)
    caches = [random(1, 8, HEADS_K, DIM, seed=s) for s in (2, 3)]
    options = {"k": k, "v": k, "shard": (2, 0, 1)}
    with pytest.raises(libflash.UnsupportedError, match=r"^k: must have at least as many rows as q with shard\[0\]"):
        libflash.decode(q, *caches, **options)
    explained = libflash.explain(q, *caches, op="decode", **options)
    assert "UNSUPPORTED" in explained
    assert "k: must have" in explained
    for shard, text in (((2, 2, 1), "shard[1]: must be at least 0 and below shard[0]"), ((-1, 0, 1), "shard[0]: must be")):
        with pytest.raises(libflash.InvalidError, match=f"^{re.escape(text)}"):
            libflash.decode(q, *caches, shard=shard, cache_seqlens=np.array([4], np.int32))
