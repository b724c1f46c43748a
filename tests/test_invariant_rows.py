"""decode(invariant=True): the bits of a row depend on its own sequence alone.

The reference of each test is one call for one row of one sequence on one thread. Kernels are compared with themselves.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from harness import BFLOAT16, assert_same_bits, random
from libflash.conformance.reference_cache import CODES
from sequences import cu_seqlens
from test_decode import KERNELS

import libflash

every_kernel = pytest.mark.parametrize("kernel", KERNELS)
TYPES = [np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.float64)]
every_type = pytest.mark.parametrize("dtype", TYPES, ids=str)
HEADS_Q, HEADS_K, DIM = 6, 2, 40
# More than one segment of 1024 keys, less than a tile, the edges of tiles.
LENGTHS = np.array([2500, 130, 3, 1030, 128, 700], np.int32)
ROWS = (70, 5, 3, 33, 1, 9)
CAPACITY = 2560
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window_size": (100, 0)},
    "wide window": {"window_size": (1500, 0)},
    "softcap": {"softcap": 3.0},
    "alibi": {"alibi_slopes": random(HEADS_Q, seed=8)},
    "sink": {"learnable_sink": random(HEADS_Q, seed=9)},
    "negative scale": {"softmax_scale": -0.3},
    "segments of 256": {"split_size": 256, "window_size": (900, 0)},
}
every_option = pytest.mark.parametrize("option", OPTIONS)


@dataclasses.dataclass
class Problem:
    q: np.ndarray  # packed by ROWS
    caches: list[np.ndarray]
    options: dict[str, Any]

    def rows_of(self, b: int) -> slice:
        return slice(sum(ROWS[:b]), sum(ROWS[: b + 1]))

    def row(self, b: int, i: int, **more: Any) -> list[np.ndarray]:
        """(heads_q, head_dim_v) and (heads_q,) of one row, computed alone."""
        at = self.rows_of(b).start + i
        length = np.array([LENGTHS[b] - ROWS[b] + i + 1], np.int32)
        q, caches = self.q[at : at + 1], [x[b : b + 1] for x in self.caches]
        o, lse = libflash.decode(q[None], *caches, cache_seqlens=length, return_lse=True, **self.of_sequence(b), **more)
        return [o[0, 0], lse[0, :, 0]]

    def of_sequence(self, b: int) -> dict[str, Any]:
        scales = {name: x[b : b + 1] for name, x in self.options.items() if name.endswith("_scale") and name[0] in "kv"}
        return self.options | scales


def problem(dtype: np.dtype, kernel: str, code: str = "", **options: Any) -> Problem:
    caches = [random(len(LENGTHS), CAPACITY, HEADS_K, DIM, seed=seed).astype(dtype) for seed in (1, 2)]
    if code:
        caches = [(8 * x.astype(np.float32)).astype(CODES[code]) for x in caches]
        for name, seed in (("k_scale", 5), ("v_scale", 6)):
            options[name] = np.abs(random(*caches[0].shape[:3], seed=seed)) / 8
    if "alibi_slopes" in options and dtype == np.float64:
        options["alibi_slopes"] = options["alibi_slopes"].astype(dtype)
    q = random(sum(ROWS), HEADS_Q, DIM, seed=3).astype(dtype)
    return Problem(q, caches, {"kernel": kernel, "invariant": True} | options)


def check(x: Problem, o: np.ndarray, lse: np.ndarray, order: list[int] | None = None, step: int = 7) -> None:
    """Packed results, of the sequences in `order`, against rows alone."""
    begin = 0
    for b in order or range(len(ROWS)):
        for i in {*range(0, ROWS[b], step), ROWS[b] - 1}:
            wanted = x.row(b, i)
            assert_same_bits(o[begin + i], wanted[0])
            assert_same_bits(np.ascontiguousarray(lse[:, begin + i]), np.ascontiguousarray(wanted[1]))
        begin += ROWS[b]


def packed_call(x: Problem, **more: Any) -> list[np.ndarray]:
    given = {"cu_seqlens_q": cu_seqlens(ROWS), "cache_seqlens": LENGTHS} | x.options | more
    return list(libflash.decode(x.q, *x.caches, return_lse=True, **given))


@lru_cache(maxsize=4)
def packed_result(kernel: str, dtype: np.dtype, option: str = "causal") -> list[np.ndarray]:
    """What calls with other pages or threads are compared with."""
    return packed_call(problem(dtype, kernel, **OPTIONS[option]))


@every_kernel
@every_option
@every_type
def test_packed_rows_equal_rows_alone(kernel: str, dtype: np.dtype, option: str) -> None:
    x = problem(dtype, kernel, **OPTIONS[option])
    check(x, *packed_call(x), step=20)


@every_kernel
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("dtype", TYPES[:3], ids=str)
def test_codes(kernel: str, dtype: np.dtype, code: str) -> None:
    x = problem(dtype, kernel, code, window_size=(1200, 0))
    check(x, *packed_call(x), step=20)


@every_kernel
@every_type
def test_order_of_sequences(kernel: str, dtype: np.dtype) -> None:
    x = problem(dtype, kernel)
    order = [3, 5, 0, 2, 4, 1]
    q = np.concatenate([x.q[x.rows_of(b)] for b in order])
    rows = tuple(ROWS[b] for b in order)
    o, lse = libflash.decode(q, *x.caches, cu_seqlens_q=cu_seqlens(rows), cache_seqlens=LENGTHS[order], return_lse=True,
                             cache_batch_idx=np.array(order, np.int32), **x.options)  # fmt: skip
    check(x, o, lse, order)


PREFILLED = 300


@pytest.mark.parametrize("chunk", [1, 7, 64, 100])
@every_kernel
@every_type
@pytest.mark.parametrize("option", ["causal", "window", "segments of 256"])
def test_prefill_in_chunks(kernel: str, dtype: np.dtype, option: str, chunk: int) -> None:
    """With appends: the cache grows chunk by chunk; the bits are those of one chunk."""
    for got, wanted in zip(prefill(kernel, dtype, option, chunk), prefill_at_once(kernel, dtype, option), strict=True):
        assert_same_bits(got, wanted)


def prefill(kernel: str, dtype: np.dtype, option: str, chunk: int) -> list[np.ndarray]:
    q = random(1, PREFILLED, HEADS_Q, DIM, seed=3).astype(dtype)
    new = [random(1, PREFILLED, HEADS_K, DIM, seed=seed).astype(dtype) for seed in (1, 2)]
    caches = [np.full((1, 320, HEADS_K, DIM), np.nan, dtype) for _ in new]
    options = dict(OPTIONS[option], kernel=kernel, invariant=True, return_lse=True)
    results = []
    for first in range(0, PREFILLED, chunk):
        at = slice(first, first + chunk)
        results.append(libflash.decode(q[:, at], *caches, k=new[0][:, at], v=new[1][:, at],
                                       cache_seqlens=np.array([first], np.int32), **options))  # fmt: skip
    return [np.concatenate([r[0] for r in results], 1), np.concatenate([r[1] for r in results], 2)]


@lru_cache(maxsize=4)
def prefill_at_once(kernel: str, dtype: np.dtype, option: str) -> list[np.ndarray]:
    return prefill(kernel, dtype, option, PREFILLED)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 256])
@every_kernel
@pytest.mark.parametrize("option", ["causal", "window"])
def test_pages(kernel: str, page_size: int, option: str) -> None:
    """In any order, with absent pages before the window."""
    x = problem(np.dtype(np.float32), kernel, **OPTIONS[option])
    columns = -(-CAPACITY // page_size)
    table = np.random.default_rng(5).permutation(len(LENGTHS) * columns).astype(np.int32).reshape(len(LENGTHS), columns)
    pages = [np.full((table.size, page_size, HEADS_K, DIM), np.nan, np.float32) for _ in x.caches]
    for paged, cache in zip(pages, x.caches, strict=True):
        rows = np.zeros((len(LENGTHS), columns * page_size, HEADS_K, DIM), np.float32)
        rows[:, :CAPACITY] = cache
        paged[table] = rows.reshape(*table.shape, page_size, HEADS_K, DIM)
    for b, length in enumerate(LENGTHS if option == "window" else ()):
        table[b, : max(length - ROWS[b] - 100, 0) // page_size] = -5
    x.caches = pages
    for got, one in zip(packed_call(x, block_table=table), packed_result(kernel, x.q.dtype, option), strict=True):
        assert_same_bits(got, one)


@pytest.mark.parametrize("threads", [1, 2, 3, 8, 64])
@every_kernel
@every_type
def test_threads(kernel: str, dtype: np.dtype, threads: int) -> None:
    """With many threads segments are tasks of their own; on one thread all are one task."""
    x, wanted = problem(dtype, kernel), packed_result(kernel, dtype)
    last = [LENGTHS, x.q[np.cumsum(ROWS) - 1]]
    before = libflash.get_num_threads()
    libflash.set_num_threads(threads)
    try:
        got = packed_call(x)
        one_row = libflash.decode(last[1][:, None], *x.caches, cache_seqlens=last[0], return_lse=True, **x.options)
    finally:
        libflash.set_num_threads(before)
    for a, b in zip(got, wanted, strict=True):
        assert_same_bits(a, b)
    assert_same_bits(one_row[0][:, 0], wanted[0][np.cumsum(ROWS) - 1])
    assert_same_bits(np.ascontiguousarray(one_row[1][:, :, 0].T), np.ascontiguousarray(wanted[1][:, np.cumsum(ROWS) - 1]))


@every_kernel
def test_strides_of_the_cache_and_capacity(kernel: str) -> None:
    x = problem(np.dtype(np.float32), kernel)
    wanted = packed_call(x)
    x.caches = [np.ascontiguousarray(c.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for c in x.caches]
    for got, one in zip(packed_call(x), wanted, strict=True):
        assert_same_bits(got, one)
    x.caches = [np.concatenate([c, np.full_like(c, np.nan)], axis=1) for c in x.caches]
    for got, one in zip(packed_call(x), wanted, strict=True):
        assert_same_bits(got, one)


@every_kernel
@every_type
def test_a_chain_is_causal(kernel: str, dtype: np.dtype) -> None:
    """And positions that are the numbers of the keys change nothing, with a window too."""
    x = problem(dtype, kernel, window_size=(150, 0))
    words = 3
    bits = np.zeros((sum(ROWS), words), np.int32)
    positions = np.concatenate([np.arange(n - r, n) for n, r in zip(LENGTHS, ROWS, strict=True)]).astype(np.int32)
    for b, n in enumerate(ROWS):
        for i in range(n):
            for j in range(i + 1):
                bits[x.rows_of(b).start + i, j // 32] |= np.array(1 << (j % 32), np.uint32).astype(np.int32)
    wanted = packed_call(x)
    for got, one in zip(packed_call(x, tree_mask=bits, q_positions=positions), wanted, strict=True):
        assert_same_bits(got, one)
    for got, one in zip(packed_call(x, q_positions=positions), wanted, strict=True):
        assert_same_bits(got, one)


@every_kernel
def test_a_tree_equals_its_branches(kernel: str) -> None:
    """Of a random tree each row equals a call of that row alone, which sees its ancestors by bits."""
    rng = np.random.default_rng(4)
    nodes, cached = 20, 300
    cache = [random(1, 400, HEADS_K, DIM, seed=seed) for seed in (1, 2)]
    q = random(1, nodes, HEADS_Q, DIM, seed=3)
    seen = np.eye(nodes, dtype=bool)
    for i in range(1, nodes):
        seen[i] |= seen[rng.integers(i)]
    bits = (seen * (1 << np.arange(nodes))).sum(1).astype(np.int32)[:, None]
    options = dict(cache_seqlens=np.array([cached + nodes], np.int32), invariant=True, kernel=kernel)
    whole = libflash.decode(q, *cache, tree_mask=bits, **options)
    for i in range(nodes):
        others = np.zeros_like(bits)
        others[i] = bits[i]
        alone = libflash.decode(q, *cache, tree_mask=others, **options)
        assert_same_bits(whole[0, i], alone[0, i])


@every_kernel
@every_type
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_nan_at_keys_that_a_row_does_not_see(kernel: str, dtype: np.dtype, rows: int) -> None:
    """In keys, values and scales of later keys and of keys before the window: the bits of the rows that do not see them stay."""
    x = problem(dtype, kernel, window_size=(64, 0))
    q, cache = x.q[:rows][None], [c[:1] for c in x.caches]
    options = dict(x.options, cache_seqlens=np.array([1100], np.int32), return_lse=True)
    wanted = libflash.decode(q, *cache, **options)
    spoilt = [c.copy() for c in cache]
    for c in spoilt:
        c[:, 1099] = np.nan
        c[:, : 1100 - rows - 64] = np.inf
        c[:, 1100:] = np.nan
    got = libflash.decode(q, *spoilt, **options)
    assert_same_bits(np.ascontiguousarray(got[0][:, :-1]), np.ascontiguousarray(wanted[0][:, :-1]))
    assert_same_bits(np.ascontiguousarray(got[1][:, :, :-1]), np.ascontiguousarray(wanted[1][:, :, :-1]))
    assert np.isnan(got[0][:, -1].astype(np.float64)).all()


@every_kernel
def test_result_is_exact(kernel: str) -> None:
    """Values that are all 1 give 1, over several segments."""
    x = problem(np.dtype(np.float32), kernel)
    x.caches[1][...] = 1
    o, _ = packed_call(x)
    np.testing.assert_allclose(o, 1, rtol=2e-7, atol=0)


@every_kernel
@every_option
def test_close_to_the_free_choice(kernel: str, option: str) -> None:
    x = problem(np.dtype(np.float64), kernel, **OPTIONS[option])
    invariant = packed_call(x)
    x.options["invariant"] = False
    for got, wanted in zip(invariant, packed_call(x), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-11, atol=1e-12)


def test_splits_are_refused() -> None:
    x = problem(np.dtype(np.float32), KERNELS[0])
    with pytest.raises(libflash.InvalidError, match="num_splits: must be 0 with invariant=True"):
        packed_call(x, num_splits=2)


def test_explain_names_the_version() -> None:
    q, cache = np.zeros((1, 1, 2, 8), np.float32), np.zeros((1, 5000, 2, 8), np.float32)
    text = libflash.explain(q, cache, cache, op="decode", invariant=True)
    if "scalar" not in text.split("kernel", 1)[1].splitlines()[0]:
        assert "invariant: segments of 1024 keys, version 1" in text
    assert "invariant rows" in text
    assert "segments of 256" in libflash.explain(q, cache, cache, op="decode", invariant=True, split_size=256)
