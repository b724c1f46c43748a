"""Decode with shared_groups and shared_lens: a hint that changes no bit, and that must be true."""

from __future__ import annotations

import numpy as np
import pytest
from harness import assert_same_bits, random
from sequences import cu_seqlens
from test_decode import KERNELS

import libflash

HEADS_Q, HEADS_K, DIM, PAGE, PAGES = 4, 2, 32, 16, 40
PREFIX = 3 * PAGE + 5  # the fourth page is shared too, but only its first rows
LENGTHS = np.array([70, 53, 80, 0, 90], np.int32)
GROUPS, LENS = np.array([0, 3, 3, 3, 5], np.int32), np.array([PREFIX - 5, 9, 0, 0], np.int32)


def caches() -> list[np.ndarray]:
    return [random(PAGES, PAGE, HEADS_K, DIM, seed=s) for s in (1, 2)]


def table(shared: int) -> np.ndarray:
    """The first `shared` columns of sequences 0 to 2 are those of sequence 0."""
    made = np.random.default_rng(3).permutation(PAGES)[: 5 * 8].reshape(5, 8).astype(np.int32)
    made[1:3, :shared] = made[0, :shared]
    made[3] = -1  # a padding sequence
    return made


def both_ways(q: np.ndarray, **options) -> list[list[np.ndarray]]:
    results = []
    for hint in ({}, {"shared_groups": GROUPS, "shared_lens": LENS}):
        own = caches()
        results.append([*libflash.decode(q, *own, return_lse=True, **options, **hint), *own])
    return results


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (40, 0)])
def test_the_hint_changes_no_bit(kernel: str, invariant: bool, window: tuple[int, int]) -> None:
    rows = np.array([1, 2, 40, 0, 3])
    packing = cu_seqlens(rows)
    q, k, v = random(46, HEADS_Q, DIM, seed=4), random(46, HEADS_K, DIM, seed=5), random(46, HEADS_K, DIM, seed=6)
    options = {"cache_seqlens": LENGTHS, "block_table": table(3), "cu_seqlens_q": packing}
    options |= {"window_size": window, "invariant": invariant}
    without, with_hint = both_ways(q, k=k, v=v, kernel=kernel, **options)
    for got, wanted in zip(with_hint, without, strict=True):
        assert_same_bits(got, wanted)


def test_one_entry_of_a_contiguous_cache() -> None:
    q = random(3, 1, HEADS_Q, DIM, seed=1)
    own = [random(2, 64, HEADS_K, DIM, seed=s) for s in (2, 3)]
    options = {"cache_batch_idx": np.array([1, 1, 0], np.int32), "cache_seqlens": np.array([50, 60, 64], np.int32)}
    wanted = libflash.decode(q, *own, **options)
    got = libflash.decode(q, *own, shared_groups=np.array([0, 2]), shared_lens=np.array([50]), **options)
    assert_same_bits(got, wanted)
    with pytest.raises(libflash.InvalidError, match="shared_groups: sequences of a group must have the same cache entry"):
        libflash.decode(q, *own, shared_groups=np.array([0, 3]), shared_lens=np.array([50]), **options)


def test_pages_that_are_not_read_may_differ() -> None:
    """Pages before a window, pages after the shared keys, and pages of a sequence without rows."""
    q = random(4, HEADS_Q, DIM, seed=1)
    options = {"block_table": table(3), "cu_seqlens_q": np.array([0, 1, 2, 4, 4, 4], np.int32), "cache_seqlens": LENGTHS}
    hint = {"shared_groups": np.array([0, 3], np.int32), "shared_lens": np.array([PREFIX - 5], np.int32)}
    own = caches()
    libflash.decode(q, *own, **options, **hint)
    other = {**options, "block_table": table(2)}
    with pytest.raises(libflash.InvalidError, match=r"same pages for their shared keys .*sequences 0 and 1 have .* in column 2"):
        libflash.decode(q, *own, **other, **hint)
    libflash.decode(q, *own, window_size=(1, 0), **other, **hint)
