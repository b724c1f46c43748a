"""Decode on the CPU: every case on every kernel and split, and results whose bits must not depend on other sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import decode_cases
import numpy as np
import pytest
from decode_cases import DecodeCase
from harness import BFLOAT16, assert_same_bits, random
from reference import forward

import libflash

KERNELS = [k["name"] for k in libflash.info()["kernels"] if k["operation"] == "decode" and k["backend"] == "cpu" and k["usable"]]
FAST = [name for name in KERNELS if name != "decode_cpu_scalar"]
CASES = [case for case in decode_cases.quick() if not case.absent_page]
SPLITS = [{}, {"num_splits": 1}, {"num_splits": 5}, {"split_size": 128}]
MANY_SPLITS = [{"num_splits": n} for n in (2, 7, 100, 1024)] + [{"split_size": n} for n in (128, 256, 1024)]
every_kernel = pytest.mark.parametrize("kernel", KERNELS)
every_fast_kernel = pytest.mark.parametrize("kernel", FAST)
DTYPES = [np.dtype("float32"), BFLOAT16, np.dtype("float16"), np.dtype("float64")]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
LENGTHS = np.array([700, 1, 0, 129, 512, 300], np.int32)


def test_kernels() -> None:
    """At least one kernel besides the scalar reference."""
    assert "decode_cpu_scalar" in KERNELS
    assert FAST


@pytest.mark.parametrize("convert", [np.asarray, lambda x: pytest.importorskip("torch").from_numpy(x)], ids=["numpy", "torch"])
def test_int64_tables_and_indices(convert: Callable[[np.ndarray], Any]) -> None:
    """They are converted on the CPU. Entries that do not fit int32 are refused, also those of no key."""
    q, k, v = (random(*shape, seed=i) for i, shape in enumerate(((2, 1, 4, 8), (6, 4, 2, 8), (6, 4, 2, 8))))
    table, lengths = np.array([[3, 1, 99], [0, -7, 2]]), np.array([6, 3])
    assert table.dtype == np.int64

    def call(dtype: str, **options: np.ndarray) -> np.ndarray:
        given = {name: convert(x.astype(dtype)) for name, x in options.items()}
        return np.asarray(libflash.decode(*(convert(x) for x in (q, k, v)), **given))

    paged = {"block_table": table, "cache_seqlens": lengths}
    whole = {"cache_batch_idx": np.array([5, 2]), "cache_leftpad": np.array([1, 0]), "cache_seqlens": np.array([4, 3])}
    for options in (paged, whole):
        assert_same_bits(call("int64", **options), call("int32", **options))
    with pytest.raises(libflash.InvalidError, match=r"^block_table holds 4294967299, which does not fit int32$"):
        call("int64", **paged | {"block_table": table + np.array([0, 0, 2**32 - 96])})
    with pytest.raises(libflash.InvalidError, match=r"^block_table has dtype int16; int32 \(or int64 on the CPU\) is needed$"):
        call("int16", block_table=table)


@every_kernel
@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case: DecodeCase, kernel: str) -> None:
    for split in SPLITS:
        x = case.inputs()
        o, lse = libflash.decode(x.q, x.k_cache, x.v_cache, return_lse=True, kernel=kernel, **split, **x.options)
        case.check(o=o, lse=lse, k_cache=x.k_cache, v_cache=x.v_cache)


@pytest.mark.parametrize("case", [case for case in decode_cases.quick() if case.absent_page], ids=str)
def test_absent_page_is_refused(case: DecodeCase) -> None:
    x = case.inputs()
    before = x.k_cache.copy()
    with pytest.raises(libflash.InvalidError, match="block_table"):
        libflash.decode(x.q, x.k_cache, x.v_cache, **x.options)
    assert_same_bits(x.k_cache, before)


def cached(dtype: np.dtype, capacity: int = 700, heads_k: int = 2, dim: int = 48) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values for LENGTHS; NaN after them."""
    caches = []
    for seed in (1, 2):
        cache = random(len(LENGTHS), max(LENGTHS), heads_k, dim, seed=seed).astype(dtype)
        cache = np.concatenate([cache, np.zeros((len(LENGTHS), capacity - max(LENGTHS), heads_k, dim), dtype)], axis=1)
        for b, n in enumerate(LENGTHS):
            cache[b, n:] = np.nan
        caches.append(cache)
    return caches[0], caches[1]


def queries(dtype: np.dtype, rows: int = 2, heads_q: int = 6, dim: int = 48) -> np.ndarray:
    return random(len(LENGTHS), rows, heads_q, dim, seed=3).astype(dtype)


def paged(cache: np.ndarray, table: np.ndarray, page_size: int, pages: int) -> np.ndarray:
    """The cache in pages; NaN on pages that are not in the table."""
    out = np.full((pages, page_size, *cache.shape[2:]), np.nan, cache.dtype)
    padded = np.concatenate([cache, np.full((len(cache), page_size, *cache.shape[2:]), np.nan, cache.dtype)], axis=1)
    for b, row in enumerate(table):
        for column, page in enumerate(row):
            if 0 <= page < pages:
                out[page] = padded[b, column * page_size : (column + 1) * page_size]
    return out


def in_pages(caches: tuple[np.ndarray, ...], page_size: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Caches for LENGTHS in pages of any order, and their table, with invalid entries after the last key."""
    columns = -(-caches[0].shape[1] // page_size)
    pages = len(LENGTHS) * columns + 3
    table = np.random.default_rng(page_size).permutation(pages)[:-3].reshape(len(LENGTHS), columns)
    for b, n in enumerate(LENGTHS):
        table[b, -(-n // page_size) :] = 2**31 - 1
    return [paged(x, table, page_size, pages) for x in caches], table.astype(np.int32)


@every_kernel
@every_dtype
@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 100, 128, 256, 1024])
def test_pages_are_a_contiguous_cache_bit_for_bit(kernel: str, dtype: np.dtype, page_size: int) -> None:
    q, (k, v) = queries(dtype), cached(dtype)
    pages, table = in_pages((k, v), page_size)
    for split in SPLITS[::3]:
        options = dict(cache_seqlens=LENGTHS, return_lse=True, kernel=kernel, softcap=20.0, **split)
        wanted = libflash.decode(q, k, v, **options)
        got = libflash.decode(q, *pages, block_table=table, **options)
        assert_same_bits(got[0], wanted[0])
        assert_same_bits(got[1], wanted[1])


@every_kernel
@pytest.mark.parametrize("split", [*SPLITS, {"split_size": 384}], ids=str)
def test_bits_do_not_depend_on_the_capacity(kernel: str, split: dict) -> None:
    """The bits do not depend on the capacity, and cache rows after the keys are not changed."""
    q = queries(BFLOAT16)
    exact = None
    for capacity in (700, 701, 1024, 5000):
        k, v = cached(BFLOAT16, capacity)
        before = k.copy(), v.copy()
        got = libflash.decode(q, k, v, cache_seqlens=LENGTHS, return_lse=True, kernel=kernel, **split)
        assert_same_bits((k, v)[0], before[0])
        assert_same_bits((k, v)[1], before[1])
        exact = exact or got
        assert_same_bits(got[0], exact[0])
        assert_same_bits(got[1], exact[1])
    assert np.isfinite(exact[1][LENGTHS > 0, :, -1]).all()


@every_kernel
@every_dtype
@pytest.mark.parametrize("split_size", [128, 512])
def test_batch_does_not_show_with_a_split_size(kernel: str, dtype: np.dtype, split_size: int) -> None:
    """A sequence has the same bits alone, in another order, with other lengths in the batch, and in other pages."""
    q, (k, v) = queries(dtype), cached(dtype)
    options = dict(return_lse=True, kernel=kernel, split_size=split_size, window_size=(600, 0))
    o, lse = libflash.decode(q, k, v, cache_seqlens=LENGTHS, **options)
    for b, n in enumerate(LENGTHS):
        alone, alone_lse = libflash.decode(q[b : b + 1], k[b : b + 1, : max(n, 1)], v[b : b + 1, : max(n, 1)],
                                           cache_seqlens=LENGTHS[b : b + 1], **options)  # fmt: skip
        assert_same_bits(alone[0], o[b])
        assert_same_bits(alone_lse[0], lse[b])
    order = np.array([4, 0, 5, 2, 1, 3], np.int32)
    got, got_lse = libflash.decode(q[order], k, v, cache_seqlens=LENGTHS[order], cache_batch_idx=order, **options)
    assert_same_bits(got, o[order])
    assert_same_bits(got_lse, lse[order])
    many = np.tile(np.arange(len(q), dtype=np.int32), 9)
    got, got_lse = libflash.decode(q[many], k, v, cache_seqlens=LENGTHS[many], cache_batch_idx=many, **options)
    assert_same_bits(got, o[many])
    assert_same_bits(got_lse, lse[many])


@every_fast_kernel
@every_dtype
def test_threads_do_not_show(kernel: str, dtype: np.dtype) -> None:
    q, (k, v) = queries(dtype, heads_q=8), cached(dtype)
    results = []
    for threads in (1, 2, 5):
        libflash.set_num_threads(threads)
        for split in SPLITS:
            results.append(libflash.decode(q, k, v, cache_seqlens=LENGTHS, return_lse=True, kernel=kernel, **split))
    for n, got in enumerate(results):
        assert_same_bits(got[0], results[n % len(SPLITS)][0])
        assert_same_bits(got[1], results[n % len(SPLITS)][1])


@every_kernel
@pytest.mark.parametrize("split", MANY_SPLITS, ids=str)
def test_m7_any_split_is_the_unsplit_result(kernel: str, split: dict) -> None:
    """Also with more splits than keys, and for a row with a sink and no key."""
    q, (k, v) = queries(np.dtype("float64")), cached(np.dtype("float64"))
    sink = random(6, seed=5).astype(np.float64)
    options = dict(cache_seqlens=LENGTHS, return_lse=True, kernel=kernel, learnable_sink=sink)
    wanted, got = libflash.decode(q, k, v, num_splits=1, **options), libflash.decode(q, k, v, **split, **options)
    np.testing.assert_allclose(got[0], wanted[0], rtol=0, atol=1e-13)
    np.testing.assert_allclose(got[1], wanted[1], rtol=0, atol=1e-13)
    assert_same_bits(got[1][2], np.broadcast_to(sink[:, None], (6, 2)).copy())


@every_kernel
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("heads", [(1, 1), (7, 1), (6, 3), (80, 2)], ids=str)
def test_groups_and_rows_fill_panels(kernel: str, rows: int, heads: tuple[int, int]) -> None:
    """Query rows of a group share tiles of 64: full tiles, partial tiles, and groups in two tiles."""
    q = random(2, rows, heads[0], 24, seed=1)
    k, v = random(2, 150, heads[1], 24, seed=2), random(2, 150, heads[1], 40, seed=3)
    slopes = random(2, heads[0], seed=4) ** 2
    sink = random(heads[0], seed=5)
    lengths = np.array([150, 45], np.int32)
    options = dict(causal=True, window_size=(60, 0), alibi_slopes=slopes, learnable_sink=sink, softmax_scale=0.3)
    got, got_lse = libflash.decode(q, k, v, cache_seqlens=lengths, return_lse=True, kernel=kernel, **options)
    o, lse = forward(q, k, v, seqused_k=lengths, **options)
    np.testing.assert_allclose(got, o, rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(got_lse, lse, rtol=1e-5, atol=2e-6)


@every_kernel
@every_dtype
@pytest.mark.parametrize("pages", [False, True], ids=["contiguous", "paged"])
def test_a_hundred_steps(kernel: str, dtype: np.dtype, pages: bool) -> None:
    """Token by token with rotary embedding, each step appended in place, is one causal attention over all of them."""
    steps, heads_q, heads_k, dim = 100, 4, 2, 16
    q, k, v = (random(2, steps, h, dim, seed=h + 7 * i).astype(dtype) for i, h in enumerate((heads_q, heads_k, heads_k)))
    angles = np.arange(steps)[:, None] * 0.3 ** np.arange(dim // 2)
    cos, sin = (f(angles).astype(dtype if dtype != "float64" else np.float64) for f in (np.cos, np.sin))
    shape = (2 * 13 + 1, 8) if pages else (2, steps + 4)
    caches = [np.full((*shape, heads_k, dim), np.nan, dtype) for _ in range(2)]
    table = np.random.default_rng(0).permutation(27)[:26].reshape(2, 13).astype(np.int32)
    table_option = {"block_table": table} if pages else {}
    start = np.array([0, 0], np.int32)
    out = []
    for t in range(steps):
        out.append(
            libflash.decode(
                q[:, t : t + 1], *caches, k=k[:, t : t + 1], v=v[:, t : t + 1], cache_seqlens=start + t,
                rotary_cos=cos, rotary_sin=sin, rotary_interleaved=False, kernel=kernel, **table_option,
            )
        )  # fmt: skip
    rotated = [np.concatenate([rotate(x, cos, sin)], axis=1).astype(dtype) for x in (q, k)]
    wanted, _ = forward(*rotated, v, causal=True)
    limit = {2: 2e-2 if dtype == BFLOAT16 else 3e-3, 4: 2e-6, 8: 1e-13}[dtype.itemsize]
    np.testing.assert_allclose(np.concatenate(out, axis=1).astype(np.float64), wanted, rtol=limit, atol=limit)
    flat = caches[0][table].reshape(2, 13 * 8, heads_k, dim)[:, :steps] if pages else caches[0][:, :steps]
    np.testing.assert_allclose(flat.astype(np.float64), rotated[1].astype(np.float64), rtol=2 * limit, atol=1e-12)
    rest = caches[0][table].reshape(2, 13 * 8, heads_k, dim)[:, steps:] if pages else caches[0][:, steps:]
    assert np.isnan(rest).all()
    if pages:
        assert all(np.isnan(cache[np.setdiff1d(np.arange(27), table)]).all() for cache in caches)


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Rotary embedding of rows 0, 1, ... in halves, float64."""
    half = x.shape[-1] // 2
    first, second = (part.astype(np.float64) for part in (x[..., :half], x[..., half:]))
    c, s = (table.astype(np.float64)[: x.shape[1], None, :] for table in (cos, sin))
    return np.concatenate([first * c - second * s, first * s + second * c], axis=-1)


@every_kernel
def test_m12_chunks_of_any_size_are_one_prefill(kernel: str) -> None:
    q, k, v = (random(2, 200, h, 32, seed=h) for h in (6, 3, 3))
    wanted, wanted_lse = forward(q, k, v, causal=True)
    caches = [np.full((2, 260, 3, 32), np.nan, np.float32) for _ in range(2)]
    done = 0
    for n in (1, 64, 3, 130, 2):
        rows = slice(done, done + n)
        o, lse = libflash.decode(q[:, rows], *caches, k=k[:, rows], v=v[:, rows], cache_seqlens=np.full(2, done, np.int32),
                                 return_lse=True, kernel=kernel)  # fmt: skip
        np.testing.assert_allclose(o, wanted[:, rows], rtol=1e-5, atol=3e-6)
        np.testing.assert_allclose(lse, wanted_lse[:, :, rows], rtol=1e-6, atol=3e-6)
        done += n
    assert_same_bits(caches[0][:, :done].copy(), k)
    assert_same_bits(caches[1][:, :done].copy(), v)
    assert all(np.isnan(cache[:, done:]).all() for cache in caches)


@every_kernel
def test_nan_in_one_sequence_stays_there(kernel: str) -> None:
    q, (k, v) = queries(np.dtype("float32")), cached(np.dtype("float32"))
    wanted = libflash.decode(q, k, v, cache_seqlens=LENGTHS, kernel=kernel)
    k[0, 300], v[3, 5] = np.nan, np.nan
    got = libflash.decode(q, k, v, cache_seqlens=LENGTHS, kernel=kernel)
    assert np.isnan(got[[0, 3]]).all()
    assert_same_bits(got[[1, 2, 4, 5]], wanted[[1, 2, 4, 5]])


def without_padding(table: np.ndarray, pad: np.ndarray, page_size: int) -> np.ndarray:
    """A table for LENGTHS with invalid entries for pages that hold only padding."""
    table = table.copy()
    for b, n in enumerate(pad):
        table[b, : n // page_size if n < LENGTHS[b] else None] = -(2**31)
    return table


@every_kernel
@pytest.mark.parametrize("page_size", [None, 1, 7, 16, 64, 256, 1024])
def test_leftpad_hides_whatever_is_there(kernel: str, page_size: int | None) -> None:
    q, (k, v) = queries(np.dtype("float32")), cached(np.dtype("float32"))
    pad = np.array([64, 0, 0, 129, 511, 3], np.int32)
    for b, n in enumerate(pad):
        k[b, :n] = v[b, :n] = np.nan
    caches, table_option = [k, v], {}
    if page_size:
        caches, table = in_pages((k, v), page_size)
        table_option["block_table"] = without_padding(table, pad, page_size)
    for split in SPLITS:
        o, lse = libflash.decode(q, *caches, cache_seqlens=LENGTHS, cache_leftpad=pad, return_lse=True, kernel=kernel,
                                 **table_option, **split)  # fmt: skip
        check_leftpad(o, lse, q, k, v, pad)


def check_leftpad(o: np.ndarray, lse: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, pad: np.ndarray) -> None:
    for b, (first, last) in enumerate(zip(pad, LENGTHS, strict=True)):
        wanted, wanted_lse = forward(q[b : b + 1], k[b : b + 1, first:last], v[b : b + 1, first:last], causal=True)
        np.testing.assert_allclose(o[b : b + 1], wanted, rtol=1e-5, atol=2e-6)
        np.testing.assert_allclose(lse[b : b + 1], wanted_lse, rtol=1e-5, atol=2e-6)
