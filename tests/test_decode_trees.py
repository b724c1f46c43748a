"""Decode with trees and positions: answers that are known without the oracle."""

from __future__ import annotations

import numpy as np
import pytest
from harness import assert_same_bits, random
from sequences import cu_seqlens
from test_decode import KERNELS

import libflash

every_kernel = pytest.mark.parametrize("kernel", KERNELS)
HEADS_Q, HEADS_K, DIM, CAPACITY = 4, 2, 32, 200


def words(sees: np.ndarray) -> np.ndarray:
    """(rows, rows) of bool as bits."""
    rows, columns = sees.shape
    padded = np.zeros((rows, -(-columns // 32) * 32), bool)
    padded[:, :columns] = sees
    weights = 1 << np.arange(32, dtype=np.uint64)
    return (padded.reshape(rows, -1, 32) * weights).sum(-1).astype(np.uint32).view(np.int32)


def problem(rows: int, cached: int) -> tuple[np.ndarray, list[np.ndarray], dict]:
    q, caches = random(rows, HEADS_Q, DIM, seed=1), [random(1, CAPACITY, HEADS_K, DIM, seed=s) for s in (2, 3)]
    return q, caches, {"cu_seqlens_q": cu_seqlens((rows,)), "cache_seqlens": np.array([cached], np.int32)}


@every_kernel
@pytest.mark.parametrize("rows", [1, 3, 40, 70])
@pytest.mark.parametrize("split", [{}, {"num_splits": 1}, {"split_size": 128}], ids=str)
def test_a_chain_is_the_causal_rule(kernel: str, rows: int, split: dict) -> None:
    q, caches, options = problem(rows, 150)
    options |= {"return_lse": True, "kernel": kernel, "softcap": 10.0, **split}
    wanted = libflash.decode(q, *caches, **options)
    chain = words(np.tril(np.ones((rows, rows), bool)))
    for causal in (True, False):
        got = libflash.decode(q, *caches, tree_mask=chain, causal=causal, **options)
        assert_same_bits(got[0], wanted[0])
        assert_same_bits(got[1], wanted[1])
    none = libflash.decode(q, *caches, tree_mask=chain, cu_seqlens_tree=cu_seqlens((0,)), causal=False, **options)
    assert_same_bits(none[0], wanted[0])
    dense = libflash.decode(q[None], *caches, tree_mask=chain, **{n: x for n, x in options.items() if n != "cu_seqlens_q"})
    assert_same_bits(dense[0][0], wanted[0])


@every_kernel
def test_a_star_is_one_row_beside_each_other(kernel: str) -> None:
    """Nodes that see only themselves: each row is a call of its own with its key after the prefix."""
    rows, cached = 6, 90
    q, caches, options = problem(rows, cached)
    out = libflash.decode(q, *caches, tree_mask=words(np.eye(rows, dtype=bool)), kernel=kernel, **options)
    prefix = cached - rows
    for i in range(rows):
        own = [np.concatenate([x[:, :prefix], x[:, prefix + i : prefix + i + 1]], axis=1) for x in caches]
        wanted = libflash.decode(q[None, i : i + 1], *own, kernel=kernel)
        np.testing.assert_allclose(out[i], wanted[0, 0], rtol=1e-5, atol=1e-6)


@every_kernel
def test_siblings_in_another_order(kernel: str) -> None:
    """Permuted nodes with their bits, positions, queries and keys permute the rows of the result."""
    rows, cached = 5, 80
    q, caches, options = problem(rows, cached)
    parents, prefix = [-1, 0, 0, 1, 2], cached - rows
    sees, depth = np.eye(rows, dtype=bool), np.zeros(rows, np.int32)
    for i in range(1, rows):
        sees[i] |= sees[parents[i]]
        depth[i] = depth[parents[i]] + 1
    order = np.array([0, 2, 1, 4, 3])
    more = {"window_size": (30, 0), "alibi_slopes": np.full(HEADS_Q, 0.1, np.float32), "kernel": kernel}
    wanted = libflash.decode(q, *caches, tree_mask=words(sees), q_positions=prefix + depth, **options, **more)
    moved = [x.copy() for x in caches]
    for x in moved:
        x[:, prefix:cached] = x[:, prefix:cached][:, order]
    got = libflash.decode(
        q[order], *moved, tree_mask=words(sees[order][:, order]), q_positions=prefix + depth[order], **options, **more
    )
    np.testing.assert_allclose(got, wanted[order], rtol=1e-5, atol=1e-6)


@every_kernel
def test_a_row_that_sees_nothing(kernel: str) -> None:
    """No bit set and no earlier key: out 0, lse -inf. A row does not see its own key without a bit. The sign bit of a word counts
    too."""
    sees = np.zeros((32, 32), bool)
    sees[1, 31] = True
    q, caches, options = problem(32, 32)
    out, lse = libflash.decode(q, *caches, tree_mask=words(sees), return_lse=True, kernel=kernel, **options)
    assert not out[np.arange(32) != 1].any()
    assert (lse[:, np.arange(32) != 1] == -np.inf).all()
    np.testing.assert_allclose(out[1], np.repeat(caches[1][0, 31], 2, axis=0), rtol=1e-6)


@every_kernel
def test_equal_keys_count_the_visible_ones(kernel: str) -> None:
    """K = 0: out is the mean of the visible values, lse the logarithm of their number."""
    rows, cached = 20, 60
    q, caches, options = problem(rows, cached)
    caches[0][...] = 0
    sees = np.tril(np.random.default_rng(5).random((rows, rows)) < 0.5)
    out, lse = libflash.decode(q, *caches, tree_mask=words(sees), return_lse=True, kernel=kernel, **options)
    visible = np.concatenate([np.ones((rows, cached - rows)), sees], axis=1)
    counts = visible.sum(axis=1)
    np.testing.assert_allclose(lse, np.broadcast_to(np.log(counts), lse.shape), rtol=1e-6)
    sums = np.einsum("ij,jhd->ihd", visible, caches[1][0, :cached].astype(np.float64))
    means = (sums / counts[:, None, None]).repeat(HEADS_Q // HEADS_K, axis=1)
    np.testing.assert_allclose(out, means, rtol=1e-5, atol=1e-6)


@every_kernel
def test_positions_of_the_rows_turn_queries_and_new_keys(kernel: str) -> None:
    """The same positions as without them give the same bits."""
    q, caches, options = problem(5, 40)
    k, v = random(5, HEADS_K, DIM, seed=8), random(5, HEADS_K, DIM, seed=9)
    angles = np.arange(100)[:, None] * 0.3 ** np.arange(DIM // 2)
    tables = {"rotary_cos": np.cos(angles).astype(np.float32), "rotary_sin": np.sin(angles).astype(np.float32)}
    results = []
    for more in ({}, {"q_positions": np.arange(40, 45)}, {"q_positions": np.array([40, 41, 41, 42, 43])}):
        own = [x.copy() for x in caches]
        results.append([libflash.decode(q, *own, k=k, v=v, kernel=kernel, **options, **tables, **more), *own])
    for got, wanted in zip(results[1], results[0], strict=True):
        assert_same_bits(got, wanted)
    assert np.array_equal(results[2][1][0, 41], results[0][1][0, 41])
    assert not np.array_equal(results[2][1][0, 42], results[0][1][0, 42])


def test_a_window_needs_positions() -> None:
    q, caches, options = problem(2, 40)
    tree = words(np.eye(2, dtype=bool))
    with pytest.raises(libflash.UnsupportedError, match="tree_mask: needs q_positions where a window is given"):
        libflash.decode(q, *caches, tree_mask=tree, window_size=(10, 0), **options)
    assert "UNSUPPORTED" in libflash.explain(q, *caches, op="decode", tree_mask=tree, window_size=(10, 0), **options)
