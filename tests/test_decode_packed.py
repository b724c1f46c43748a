"""Decode with packed rows: each sequence has its own number of query rows and new keys."""

from __future__ import annotations

import numpy as np
import pytest
from harness import BFLOAT16, assert_same_bits, random
from sequences import cu_seqlens
from test_decode import KERNELS

import libflash

every_kernel = pytest.mark.parametrize("kernel", KERNELS)
every_dtype = pytest.mark.parametrize("dtype", [np.dtype("float32"), BFLOAT16, np.dtype("float64")], ids=str)
CACHED = np.array([700, 1, 0, 129, 512, 300], np.int32)  # of test_decode.LENGTHS
ROWS = (1, 3, 0, 70, 2, 33)
PADS = np.array([650, 1, 0, 17, 64, 290], np.int32)
HEADS_Q, HEADS_K, DIM, CAPACITY = 6, 2, 48, 800


def cache(dtype: np.dtype) -> list[np.ndarray]:
    """Keys and values for CACHED; NaN after them."""
    made = []
    for seed in (1, 2):
        x = random(len(CACHED), CAPACITY, HEADS_K, DIM, seed=seed).astype(dtype)
        for b, n in enumerate(CACHED):
            x[b, n:] = np.nan
        made.append(x)
    return made


def rows(total: int, heads: int, dtype: np.dtype, seed: int = 3) -> np.ndarray:
    return random(total, heads, DIM, seed=seed).astype(dtype)


@every_kernel
@every_dtype
@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
@pytest.mark.parametrize("leftpad", [None, PADS], ids=["all keys", "leftpad"])
def test_every_sequence_is_as_if_alone(kernel: str, dtype: np.dtype, paged: bool, leftpad: np.ndarray | None) -> None:
    """Bit for bit with a split size: prefill chunks, rows of decode and a sequence without rows in one call, in any order."""
    total = sum(ROWS)
    q, k, v = rows(total, HEADS_Q, dtype), rows(total, HEADS_K, dtype, 4), rows(total, HEADS_K, dtype, 5)
    start = cu_seqlens(ROWS)
    options = dict(split_size=256, return_lse=True, kernel=kernel, window_size=(400, 0), softcap=20.0)
    alone, caches = {}, cache(dtype)
    pads = [{} if leftpad is None else {"cache_leftpad": leftpad[b : b + 1]} for b in range(len(CACHED))]
    for b, n in enumerate(CACHED):
        at = slice(start[b], start[b + 1])
        own = [x[b : b + 1] for x in caches]
        if leftpad is not None:
            for x in own:
                x[0, : leftpad[b]] = np.nan
        alone[b] = libflash.decode(
            q[None, at], *own, k=k[None, at], v=v[None, at], cache_seqlens=CACHED[b : b + 1], **pads[b], **options
        )
        assert all(np.isnan(x[0, n + ROWS[b] :].astype(np.float32)).all() for x in own)
    for order in ([0, 1, 2, 3, 4, 5], [3, 2, 5, 0, 4, 1]):
        mixed, where = cache(dtype), {"cache_batch_idx": np.array(order, np.int32)}
        if leftpad is not None:
            for x in mixed:
                for b, pad in enumerate(leftpad):
                    x[b, :pad] = np.nan
        if paged:
            mixed = [x.reshape(-1, 16, HEADS_K, DIM) for x in mixed]
            table = np.arange(len(mixed[0]), dtype=np.int32).reshape(len(CACHED), -1)
            where = {"block_table": np.ascontiguousarray(table[order])}
        if leftpad is not None:
            where["cache_leftpad"] = leftpad[order]
        at = np.concatenate([np.arange(start[b], start[b + 1]) for b in order])
        lengths = tuple(ROWS[b] for b in order)
        o, lse = libflash.decode(q[at], *mixed, k=k[at], v=v[at], cu_seqlens_q=cu_seqlens(lengths),
                                 cache_seqlens=CACHED[order], **where, **options)  # fmt: skip
        begin = cu_seqlens(lengths)
        for i, b in enumerate(order):
            own = slice(begin[i], begin[i + 1])
            assert_same_bits(o[own], alone[b][0][0])
            assert_same_bits(np.ascontiguousarray(lse[:, own]), np.ascontiguousarray(alone[b][1][0]))
        for got, wanted in zip(mixed, caches, strict=True):
            assert_same_bits(got.reshape(wanted.shape), wanted)


@every_kernel
@pytest.mark.parametrize("length", [1, 5])
def test_equal_lengths_are_a_dense_call(kernel: str, length: int) -> None:
    """Bit for bit with one split."""
    q = random(len(CACHED), length, HEADS_Q, DIM, seed=3)
    options = dict(cache_seqlens=CACHED, return_lse=True, kernel=kernel, num_splits=1)
    wanted, wanted_lse = libflash.decode(q, *cache(np.dtype("float32")), **options)
    starts = cu_seqlens((length,) * len(CACHED))
    o, lse = libflash.decode(q.reshape(-1, HEADS_Q, DIM), *cache(np.dtype("float32")), cu_seqlens_q=starts, **options)
    assert_same_bits(o, wanted.reshape(o.shape))
    assert_same_bits(lse, np.ascontiguousarray(wanted_lse.transpose(1, 0, 2)).reshape(lse.shape))


@every_kernel
def test_padding_touches_nothing(kernel: str) -> None:
    """Sequences without a row, as in the padding of a captured graph: their entries may hold anything, and rows that belong to no
    sequence are not written."""
    lengths, cached = (2, 0, 1, 0), np.array([20, 0, 30, 17], np.int32)
    table = np.array([[0, 1, 9], [-1, 2**31 - 1, -5], [2, 3, 2**31 - 1], [-1, -1, -1]], np.int32)
    pages = [random(4, 16, HEADS_K, DIM, seed=i) for i in (1, 2)]
    q = random(6, HEADS_Q, DIM, seed=3)
    q[3:] = np.nan
    out, lse = np.full_like(q, 7.0), np.full((HEADS_Q, 6), 7.0, np.float32)
    options = dict(cu_seqlens_q=cu_seqlens(lengths), cache_seqlens=cached, kernel=kernel)
    libflash.decode(q, *pages, block_table=table, out=out, lse=lse, return_lse=True, **options)
    assert (out[3:] == 7).all()
    assert (lse[:, 3:] == 7).all()
    assert np.isfinite(out[:3]).all()
    entries = [x.reshape(2, 32, HEADS_K, DIM) for x in pages]
    entry = np.array([0, -1, 1, 2**31 - 1], np.int32)
    same, same_lse = np.full_like(q, 7.0), np.full_like(lse, 7.0)
    libflash.decode(q, *entries, cache_batch_idx=entry, out=same, lse=same_lse, return_lse=True, **options)
    assert_same_bits(same, out)
    assert_same_bits(same_lse, lse)


@every_kernel
@pytest.mark.parametrize("rows_of_padding", [0, 3])
def test_no_sequence_has_a_row(kernel: str, rows_of_padding: int) -> None:
    q = random(rows_of_padding, HEADS_Q, DIM)
    out = np.full_like(q, 7.0)
    for batch in (0, 2):
        starts = np.zeros(batch + 1, np.int32)
        libflash.decode(q, *cache(np.dtype("float32")), cu_seqlens_q=starts, cache_seqlens=CACHED[:batch], out=out, kernel=kernel)
    assert (out == 7).all()


@every_kernel
def test_new_keys_without_queries_are_appended(kernel: str) -> None:
    caches = cache(np.dtype("float32"))
    k, v = random(5, HEADS_K, DIM, seed=8), random(5, HEADS_K, DIM, seed=9)
    out = libflash.decode(
        random(1, HEADS_Q, DIM), *caches, k=k, v=v, cache_seqlens=CACHED, cu_seqlens_q=cu_seqlens((0, 0, 0, 0, 0, 1)),
        cu_seqlens_new=cu_seqlens((0, 2, 0, 3, 0, 0)), kernel=kernel,
    )  # fmt: skip
    assert np.isfinite(out).all()
    assert_same_bits(caches[0][1, 1:3].copy(), k[:2])
    assert_same_bits(caches[1][3, 129:132].copy(), v[2:])
    assert np.isnan(caches[0][1, 3:]).all()


@every_kernel
@pytest.mark.parametrize("packed", [False, True])
def test_entries_before_the_window_are_not_read(kernel: str, packed: bool) -> None:
    """Engines free pages before a sliding window: their table entries may hold anything, and their keys NaN."""
    table = np.array([[2**31 - 1, -1, 3, 4, 9]], np.int32)
    pages = [random(5, 16, HEADS_K, DIM, seed=i) for i in (1, 2)]
    for x in pages:
        x[:3] = np.nan
    q = random(1, 2, HEADS_Q, DIM, seed=3)
    options = dict(cache_seqlens=np.array([60], np.int32), kernel=kernel)
    contiguous = [x[[3, 4]].reshape(1, 32, HEADS_K, DIM) for x in pages]
    # Rows 58 and 59 see 17 keys each; those of the first page that is left are keys 32 to 47.
    wanted = libflash.decode(q, *contiguous, cache_seqlens=np.array([28], np.int32), window_size=(16, 0), kernel=kernel)
    if packed:
        options["cu_seqlens_q"], q, wanted = cu_seqlens((2,)), q[0], wanted[0]
    got = libflash.decode(q, *pages, block_table=table, window_size=(16, 0), **options)
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)
    with pytest.raises(libflash.InvalidError, match=r"block_table.*entry \(0, 1\) is -1 of 5"):
        libflash.decode(q, *pages, block_table=table, window_size=(27, 0), **options)


def test_explain_names_the_packing() -> None:
    caches = cache(np.dtype("float32"))
    text = libflash.explain(random(9, HEADS_Q, DIM), *caches, op="decode", cu_seqlens_q=cu_seqlens((9, 0, 0, 0, 0, 0)))
    assert "queries packed 9 rows" in text
    assert "decode_cpu" in text


@every_kernel
@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
@pytest.mark.parametrize("packed", [False, True])
def test_an_append_overwrites_no_key_of_another_sequence(kernel: str, paged: bool, packed: bool) -> None:
    """As where two sequences share a page that is not full. Keys that the other one does not read may be overwritten."""
    lengths, pages = np.array([12, 5], np.int32), [random(6, 8, HEADS_K, DIM, seed=i) for i in (1, 2)]
    if paged:
        options = {"block_table": np.array([[0, 1, 2], [0, 4, 5]], np.int32)}
        said = "block_table: an append .*sequence 1 appends to page 0, row 5, which sequence 0 reads"
    else:
        pages = [x.reshape(2, 24, HEADS_K, DIM) for x in pages]
        options = {"cache_batch_idx": np.array([1, 1], np.int32)}
        said = "cache_batch_idx: an append .*sequence 1 appends to entry 1, row 5, which sequence 0 reads"
    rows = (2, 1, HEADS_Q, DIM), (2, 1, HEADS_K, DIM)
    q, k, v = random(*rows[0], seed=3), random(*rows[1], seed=4), random(*rows[1], seed=5)
    if packed:
        q, k, v, options["cu_seqlens_q"] = q[:, 0], k[:, 0], v[:, 0], cu_seqlens((1, 1))
    options |= {"kernel": kernel, "k": k, "v": v}
    before, out = [x.copy() for x in pages], np.full_like(q, 7.0)
    with pytest.raises(libflash.InvalidError, match=said):
        libflash.decode(q, *pages, cache_seqlens=lengths, out=out, **options)
    assert (out == 7).all()
    for x, old in zip(pages, before, strict=True):
        assert_same_bits(x, old)
    libflash.decode(q, *pages, cache_seqlens=lengths, window_size=(4, 0), **options)  # sequence 0 reads rows 8 to 12
    assert not np.array_equal(pages[0], before[0])


@every_kernel
def test_shared_pages_that_are_full_beside_appends(kernel: str) -> None:
    pages = [random(6, 8, HEADS_K, DIM, seed=i) for i in (1, 2)]
    q, k, v = random(2, 1, HEADS_Q, DIM, seed=3), *(random(2, 1, HEADS_K, DIM, seed=i) for i in (4, 5))
    table = np.array([[0, 1, 2], [0, 4, 5]], np.int32)
    options = {"cache_seqlens": np.array([12, 8], np.int32), "block_table": table, "k": k, "v": v, "kernel": kernel}
    assert np.isfinite(libflash.decode(q, *pages, **options)).all()


def test_an_append_beside_a_row_that_the_reader_appends_itself() -> None:
    """Sequence 0 has page 0 twice, and its rows see the newer keys alone; sequence 1 would overwrite one of them."""
    pages = [random(3, 4, HEADS_K, DIM, seed=i) for i in (1, 2)]
    q, k, v = random(2, 1, HEADS_Q, DIM, seed=3), *(random(2, 1, HEADS_K, DIM, seed=i) for i in (4, 5))
    options = {"cache_seqlens": np.array([6, 1], np.int32), "k": k, "v": v, "window_size": (2, 0)}
    table = np.array([[0, 0], [0, 2]], np.int32)
    with pytest.raises(libflash.InvalidError, match=r"sequence 1 appends to page 0, row 1, which sequence 0 reads"):
        libflash.decode(q, *pages, block_table=table, **options)
    table[1, 0] = 1
    assert np.isfinite(libflash.decode(q, *pages, block_table=table, **options)).all()


@every_kernel
@pytest.mark.parametrize("batch", [1, 2])
def test_an_append_overwrites_no_key_of_its_own_sequence(kernel: str, batch: int) -> None:
    """A page that comes twice in a table is a ring: only keys that no row sees may be overwritten."""
    pages = [random(3, 4, HEADS_K, DIM, seed=i) for i in (1, 2)]
    q, k, v = random(batch, 2, HEADS_Q, DIM, seed=3), *(random(batch, 2, HEADS_K, DIM, seed=i) for i in (4, 5))
    table = np.array([[0, 1, 0], [2, -1, -1]], np.int32)[:batch]
    options = {"cache_seqlens": np.array([8, 2], np.int32)[:batch], "block_table": table, "k": k, "v": v, "kernel": kernel}
    before = [x.copy() for x in pages]
    for window in ((-1, -1), (7, 0)):  # row 0 has position 8; new keys 8 and 9 go to the rows of keys 0 and 1
        with pytest.raises(libflash.InvalidError, match=r"sequence 0 appends to page 0, row [01], which sequence 0 reads"):
            libflash.decode(q, *pages, window_size=window, **options)
        for x, old in zip(pages, before, strict=True):
            assert_same_bits(x, old)
    got = libflash.decode(q, *pages, window_size=(6, 0), **options)
    assert_same_bits(pages[0][0, :2], k[0])
    whole = [np.concatenate([*old[:2], new[0]])[None] for old, new in zip(before, (k, v), strict=True)]
    wanted = libflash.decode(q[:1], *whole, window_size=(6, 0), kernel=kernel)
    np.testing.assert_allclose(got[:1], wanted, rtol=1e-5, atol=1e-6)
