"""The same problem in other forms: permuted, split, packed, paged, in parts, with other strides.

Results have the same bits if the computation is the same; otherwise they differ by less than rounding errors of the storage type.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from harness import assert_close, assert_same_bits, attention, cpu_kernels, gradients, problem, random

import libflash

ISAS = pytest.mark.parametrize("isa", cpu_kernels())
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
NAMES = ("o", "lse", "dq", "dk", "dv")


@ISAS
@DTYPES
def test_m1_permuted_keys(isa: str, dtype: str) -> None:
    q, k, v, dout = problem(dtype)
    order = np.random.default_rng(0).permutation(150)
    one, other = gradients(q, k, v, dout, isa), gradients(q, k[:, order], v[:, order], dout, isa)
    for name in NAMES:
        wanted = one[name][:, order] if name in ("dk", "dv") else one[name]
        assert_close(other[name], wanted, name)


@ISAS
@DTYPES
def test_m2_permuted_queries_batch_and_heads(isa: str, dtype: str) -> None:
    q, k, v, dout = problem(dtype, hq=6, hk=3)
    o, lse = attention(q, k, v, isa)
    rows = np.random.default_rng(0).permutation(90)
    got, got_lse = attention(q[:, rows], k, v, isa)
    assert_close(got, o[:, rows])
    assert_close(got_lse, lse[:, :, rows])
    full = gradients(q, k, v, dout, isa, causal=True)
    heads_k = np.array([2, 0, 1])
    heads_q = (heads_k[:, None] * 2 + np.arange(2)).ravel()
    inputs = ((q, heads_q), (k, heads_k), (v, heads_k), (dout, heads_q))
    reversed_batch = gradients(*(x[::-1][:, :, heads].copy() for x, heads in inputs), isa, causal=True)
    for name in ("o", "dq"):
        assert_same_bits(reversed_batch[name], full[name][::-1][:, :, heads_q], name)
    assert_same_bits(reversed_batch["lse"], full["lse"][::-1][:, heads_q])
    for name in ("dk", "dv"):
        assert_same_bits(reversed_batch[name], full[name][::-1][:, :, heads_k], name)


@ISAS
@DTYPES
def test_m3_batch_is_its_singles(isa: str, dtype: str) -> None:
    q, k, v, dout = problem(dtype)
    whole = gradients(q, k, v, dout, isa, causal=True)
    for b in range(2):
        single = gradients(*(x[b : b + 1] for x in (q, k, v, dout)), isa, causal=True)
        for name in NAMES:
            assert_close(single[name], whole[name][b : b + 1], name)


@ISAS
@DTYPES
def test_m4_grouped_heads(isa: str, dtype: str) -> None:
    q, k, v, dout = problem(dtype, hq=6, hk=2)
    grouped = gradients(q, k, v, dout, isa, causal=True)
    repeated = gradients(q, k.repeat(3, axis=2), v.repeat(3, axis=2), dout, isa, causal=True)
    for name in ("o", "lse", "dq"):
        assert_close(grouped[name], repeated[name], name)
    for name in ("dk", "dv"):
        sums = repeated[name].astype(np.float32).reshape(2, 150, 2, 3, 32).sum(axis=3)
        assert_close(grouped[name], sums.astype(grouped[name].dtype), name)


@ISAS
@DTYPES
def test_m5_causal_prefix(isa: str, dtype: str) -> None:
    q, k, v, _ = problem(dtype, sq=150)
    o, lse = attention(q, k, v, isa, causal=True)
    for n in (1, 7, 64, 65, 128, 149):
        part, part_lse = attention(q[:, :n], k[:, :n], v[:, :n], isa, causal=True)
        assert_close(part, o[:, :n], str(n))
        assert_close(part_lse, lse[:, :, :n], str(n))


@ISAS
@DTYPES
def test_m6_packed_is_alone_is_padded(isa: str, dtype: str) -> None:
    lengths_q, lengths_k = (20, 0, 65, 3), (33, 9, 65, 0)
    cu_q, cu_k = (np.cumsum((0, *n)).astype(np.int32) for n in (lengths_q, lengths_k))
    q, k, v, dout = (x[0] for x in problem(dtype, batch=1, sq=88, sk=107))
    packed = gradients(q, k, v, dout, isa, causal=True, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    padded_q, padded_k, padded_v, padded_dout = (np.zeros((4, 70, *x.shape[1:]), x.dtype) for x in (q, k, v, dout))
    for b in range(4):
        rows_q, rows_k = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        for padded, x, rows in ((padded_q, q, rows_q), (padded_k, k, rows_k), (padded_v, v, rows_k), (padded_dout, dout, rows_q)):
            padded[b, : rows.stop - rows.start] = x[rows]
        alone = gradients(*(x[None] for x in (q[rows_q], k[rows_k], v[rows_k], dout[rows_q])), isa, causal=True)
        for name, rows in {"o": rows_q, "dq": rows_q, "dk": rows_k, "dv": rows_k}.items():
            assert_close(packed[name][rows], alone[name][0], f"{name} {b}")
        assert_close(packed["lse"][:, rows_q], alone["lse"][0], f"lse {b}")
    used = {"seqused_q": np.array(lengths_q, np.int32), "seqused_k": np.array(lengths_k, np.int32)}
    padded = gradients(padded_q, padded_k, padded_v, padded_dout, isa, causal=True, **used)
    for b in range(4):
        assert_close(padded["o"][b, : lengths_q[b]], packed["o"][cu_q[b] : cu_q[b + 1]], f"o {b}")
        assert_close(padded["dk"][b, : lengths_k[b]], packed["dk"][cu_k[b] : cu_k[b + 1]], f"dk {b}")


@ISAS
@pytest.mark.parametrize("splits", [1, 2, 3, 5, 16])
def test_m7_splits(isa: str, splits: int) -> None:
    q, k, v, _ = problem("float32", sq=3, sk=1000)
    for options in ({}, {"causal": True}, {"window_size": (40, 0)}):
        o, lse = attention(q, k, v, isa, num_splits=1, **options)
        split, split_lse = attention(q, k, v, isa, num_splits=splits, **options)
        assert_close(split, o, str(options))
        assert_close(split_lse, lse, str(options))


@pytest.mark.parametrize("page_size", [1, 7, 16, 64, 256])
def test_m8_paged_is_contiguous(page_size: int) -> None:
    rng = np.random.default_rng(0)
    lengths = np.array([1, 100, 256, 0], np.int32)
    q = random(4, 2, 4, 32)
    k, v = random(4, 256, 2, 32, seed=1), random(4, 256, 2, 32, seed=2)
    columns = -(-256 // page_size)
    table = rng.permutation(4 * columns).reshape(4, columns).astype(np.int32)
    pages = [np.full((4 * columns, page_size, 2, 32), np.nan, np.float32) for _ in range(2)]
    for made, x in zip(pages, (k, v), strict=True):
        for b, j in itertools.product(range(4), range(256)):
            made[table[b, j // page_size], j % page_size] = x[b, j]
    out, lse = libflash.decode(q, k, v, cache_seqlens=lengths, return_lse=True)
    got, got_lse = libflash.decode(q, *pages, cache_seqlens=lengths, block_table=table, return_lse=True)
    assert_close(got, out)
    assert_close(got_lse, lse)


@ISAS
@DTYPES
def test_m9_m10_decode_is_the_last_row_of_prefill(isa: str, dtype: str) -> None:
    """At any capacity of the cache."""
    q, k, v, _ = problem(dtype, batch=3, sq=150)
    o, lse = attention(q, k, v, isa, causal=True)
    for capacity in (150, 151, 400):
        caches = [np.full((3, capacity, 2, 32), np.nan, x.dtype) for x in (k, v)]
        for cache, x in zip(caches, (k, v), strict=True):
            cache[:, :150] = x
        got, got_lse = libflash.decode(
            q[:, -2:], *caches, cache_seqlens=np.full(3, 150, np.int32), return_lse=True, kernel=f"decode_cpu_{isa}"
        )
        assert_close(got, o[:, -2:], str(capacity))
        assert_close(got_lse, lse[:, :, -2:], str(capacity))


@ISAS
@DTYPES
def test_m11_windows(isa: str, dtype: str) -> None:
    q, k, v, dout = problem(dtype, sq=130, sk=130, hq=2)
    pairs = [
        ({"window_size": (-1, 0)}, {"causal": True}),
        ({"window_size": (500, 500)}, {}),
        ({"window_size": (130, 0)}, {"causal": True}),
    ]
    for one, other in pairs:
        left, right = gradients(q, k, v, dout, isa, **one), gradients(q, k, v, dout, isa, **other)
        for name in NAMES:
            assert_close(left[name], right[name], f"{name} {one}")
    o, _ = attention(q, k, v, isa, window_size=(0, 0))
    assert_same_bits(o, v, "every query sees its own key alone")


@ISAS
def test_m12_chunked_prefill(isa: str) -> None:
    q, k, v, _ = problem("float32", sq=150)
    o, _ = attention(q, k, v, isa, causal=True)
    caches = [np.full((2, 160, 2, 32), np.nan, np.float32) for _ in range(2)]
    done = 0
    for chunk in (1, 50, 64, 35):
        rows = slice(done, done + chunk)
        got = libflash.decode(q[:, rows], *caches, k=k[:, rows], v=v[:, rows], cache_seqlens=np.full(2, done, np.int32),
                              kernel=f"decode_cpu_{isa}")  # fmt: skip
        assert_close(got, o[:, rows], str(done))
        done += chunk
    assert_same_bits(caches[0][:, :150], k)


@ISAS
@DTYPES
def test_m25_strides(isa: str, dtype: str) -> None:
    """Transposed, padded and broadcast inputs give the bits of their copies; so do outputs and dout."""
    q, k, v, dout = problem(dtype)
    o, lse = attention(q, k, v, isa, causal=True)
    wanted = gradients(q, k, v, dout, isa, causal=True)

    def transposed(x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x.transpose(2, 0, 1, 3)).transpose(1, 2, 0, 3)

    def padded(x: np.ndarray) -> np.ndarray:
        wide = np.full(tuple(n + 3 for n in x.shape), np.nan, x.dtype)
        wide[tuple(slice(1, n + 1) for n in x.shape)] = x
        return wide[tuple(slice(1, n + 1) for n in x.shape)]

    for change in (transposed, padded):
        got = gradients(*(change(x) for x in (q, k, v, dout)), isa, causal=True)
        assert_same_bits(got, wanted, change.__name__)
        outputs = {name: change(np.full_like(x, np.nan)) for name, x in (("dq", q), ("dk", k), ("dv", v))}
        out, out_lse = change(np.full_like(o, np.nan)), np.full((90, 2, 4), np.nan, np.float32).transpose(1, 2, 0)
        libflash.attention(q, k, v, causal=True, out=out, lse=out_lse, kernel=f"forward_cpu_{isa}")
        assert_same_bits({"o": out, "lse": out_lse}, {"o": o, "lse": lse})
        libflash.attention_backward(dout, q, k, v, out, out_lse, causal=True, kernel=f"backward_cpu_{isa}", **outputs)
        assert_same_bits(outputs, {name: wanted[name] for name in outputs})
    one = np.broadcast_to(k[:1, :, :1], k.shape)
    same = gradients(q, one, one, dout[:1, :1].repeat(2, 0).repeat(90, 1), isa)
    assert_same_bits(gradients(q, one.copy(), one.copy(), np.broadcast_to(dout[:1, :1], dout.shape), isa), same)


@ISAS
@DTYPES
def test_m28_twice_the_same(isa: str, dtype: str) -> None:
    q, k, v, dout = problem(dtype)
    options = {"causal": True, "dropout_p": 0.25, "seed": 3, "softcap": 4.0, "bias": random(4, 90, 1, seed=70)}
    assert_same_bits(gradients(q, k, v, dout, isa, **options), gradients(q, k, v, dout, isa, **options))
