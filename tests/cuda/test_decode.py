"""Decode on the GPU: the cases of the CPU kernels against the same reference, and results that must have the same bits."""

from __future__ import annotations

import decode_cases
import numpy as np
import pytest
from decode_cases import DecodeCase
from gpu_kernels import TYPES, chosen
from harness import assert_same_bits, random
from reference import forward

import libflash

torch = pytest.importorskip("torch")
from gpu_case import DTYPES, same_bits  # noqa: E402  (needs torch)
from gpu_decode import (  # noqa: E402
    KERNELS,
    KERNELS_AND_MANY_ROWS,
    LIMITS,
    NUMPY,
    SPLITS,
    decode,
    every_kernel,
    every_kernel_and_many_rows,
)
from test_decode import LENGTHS, cached, in_pages, queries, without_padding  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

CASES = decode_cases.quick()
RUNS = [(case, kernel["name"]) for index, case in enumerate(CASES) for kernel in chosen(KERNELS_AND_MANY_ROWS, case, index)]


def test_every_type_has_kernels() -> None:
    assert {kernel["dtype"] for kernel in KERNELS} == set(TYPES) - {"f64"}


@pytest.mark.parametrize(("case", "kernel"), RUNS, ids=[f"{case}-{kernel}" for case, kernel in RUNS])
def test_case(case: DecodeCase, kernel: str) -> None:
    for split in SPLITS:
        x = case.inputs()
        o, lse = decode(x.q, x.k_cache, x.v_cache, kernel=kernel, **split, **x.options)
        case.check(o=o, lse=lse, k_cache=x.k_cache, v_cache=x.v_cache)


@every_kernel
@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 16, 64, 100, 256, 1024])
def test_pages_are_a_contiguous_cache_bit_for_bit(kernel: dict, page_size: int) -> None:
    """Pages of any size in any order; block table entries after the last key are invalid."""
    dtype = NUMPY[kernel["dtype"]]
    q, (k, v) = queries(dtype), cached(dtype)
    pages, table = in_pages((k, v), page_size)
    for split in SPLITS[1:]:
        options = dict(cache_seqlens=LENGTHS, kernel=kernel["name"], softcap=20.0, **split)
        wanted = decode(q, k, v, **options)
        got = decode(q, *pages, block_table=table, **options)
        assert_same_bits(got[0], wanted[0])
        assert_same_bits(got[1], wanted[1])


@every_kernel_and_many_rows
@pytest.mark.parametrize("split", [*SPLITS[1:], {"split_size": 384}], ids=str)
def test_bits_do_not_depend_on_the_capacity(kernel: dict, split: dict) -> None:
    """The bits do not depend on the capacity, and cache rows after the keys are not changed."""
    dtype = NUMPY[kernel["dtype"]]
    q, exact = queries(dtype), None
    for capacity in (700, 701, 1024, 5000):
        k, v = cached(dtype, capacity)
        before = k.copy(), v.copy()
        got = decode(q, k, v, cache_seqlens=LENGTHS, kernel=kernel["name"], **split)
        assert_same_bits(k, before[0])
        assert_same_bits(v, before[1])
        exact = exact or got
        assert_same_bits(got[0], exact[0])
        assert_same_bits(got[1], exact[1])
    assert np.isfinite(exact[1][LENGTHS > 0, :, -1]).all()


@every_kernel_and_many_rows
@pytest.mark.parametrize("split_size", [128, 512])
@pytest.mark.parametrize("rows", [2, 9])
def test_bits_do_not_depend_on_the_batch_with_a_split_size(kernel: dict, split_size: int, rows: int) -> None:
    """A sequence has the same bits alone, in another order and in another batch."""
    dtype = NUMPY[kernel["dtype"]]
    q, (k, v) = queries(dtype, rows), cached(dtype)
    options = dict(kernel=kernel["name"], split_size=split_size, window_size=(600, 0), learnable_sink=random(6, seed=9))
    o, lse = decode(q, k, v, cache_seqlens=LENGTHS, **options)
    for b, n in enumerate(LENGTHS):
        alone, alone_lse = decode(q[b : b + 1], k[b : b + 1, : max(n, 1)].copy(), v[b : b + 1, : max(n, 1)].copy(),
                                  cache_seqlens=LENGTHS[b : b + 1], **options)  # fmt: skip
        assert_same_bits(alone[0], o[b])
        assert_same_bits(alone_lse[0], lse[b])
    many = np.tile(np.array([4, 0, 5, 2, 1, 3], np.int32), 9)
    got, got_lse = decode(q[many], k, v, cache_seqlens=LENGTHS[many], cache_batch_idx=many, **options)
    assert_same_bits(got, o[many])
    assert_same_bits(got_lse, lse[many])


@every_kernel_and_many_rows
@pytest.mark.parametrize("rows", [1, 3, 16, 40])
@pytest.mark.parametrize("heads", [(1, 1), (7, 1), (6, 3), (80, 2)], ids=str)
def test_groups_and_rows_fill_tiles(kernel: dict, rows: int, heads: tuple[int, int]) -> None:
    """Query rows of a group share tiles: full tiles, partial tiles, and groups in two tiles."""
    dtype = NUMPY[kernel["dtype"]]
    q = random(2, rows, heads[0], 24, seed=1).astype(dtype)
    k, v = (random(2, 150, heads[1], d, seed=d).astype(dtype) for d in (24, 40))
    slopes, sink = random(2, heads[0], seed=4) ** 2, random(heads[0], seed=5)
    lengths = np.array([150, 45], np.int32)
    options = dict(causal=True, window_size=(60, 0), alibi_slopes=slopes, learnable_sink=sink, softmax_scale=0.3)
    got, got_lse = decode(q, k, v, cache_seqlens=lengths, kernel=kernel["name"], **options)
    o, lse = forward(q, k, v, seqused_k=lengths, **options)
    o_limit, _ = LIMITS[kernel["dtype"]]
    np.testing.assert_allclose(got.astype(np.float64), o, rtol=o_limit, atol=o_limit)
    np.testing.assert_allclose(got_lse, lse, rtol=1e-5, atol=1e-5)


@every_kernel_and_many_rows
def test_nan_in_one_sequence_stays_there(kernel: dict) -> None:
    dtype = NUMPY[kernel["dtype"]]
    q, (k, v) = queries(dtype), cached(dtype)
    for split in SPLITS[1:]:
        wanted = decode(q, k.copy(), v.copy(), cache_seqlens=LENGTHS, kernel=kernel["name"], **split)[0]
        bad_k, bad_v = k.copy(), v.copy()
        bad_k[0, 300], bad_v[3, 5] = np.nan, np.nan
        got = decode(q, bad_k, bad_v, cache_seqlens=LENGTHS, kernel=kernel["name"], **split)[0]
        assert np.isnan(got[[0, 3]].astype(np.float64)).all()
        assert_same_bits(got[[1, 2, 4, 5]], wanted[[1, 2, 4, 5]])


@every_kernel
@pytest.mark.parametrize("page_size", [None, 1, 7, 16, 64, 256, 1024])
def test_leftpad_hides_nan(kernel: dict, page_size: int | None) -> None:
    dtype = NUMPY[kernel["dtype"]]
    q, (k, v) = queries(dtype), cached(dtype)
    pad = np.array([64, 0, 0, 129, 511, 3], np.int32)
    for b, n in enumerate(pad):
        k[b, :n] = v[b, :n] = np.nan
    caches, table_option = [k, v], {}
    if page_size:
        caches, table = in_pages((k, v), page_size)
        table_option["block_table"] = without_padding(table, pad, page_size)
    limit, _ = LIMITS[kernel["dtype"]]
    for split in SPLITS:
        o, lse = decode(q, *caches, cache_seqlens=LENGTHS, cache_leftpad=pad, kernel=kernel["name"], **table_option, **split)
        for b, (first, last) in enumerate(zip(pad, LENGTHS, strict=True)):
            wanted, wanted_lse = forward(q[b : b + 1], k[b : b + 1, first:last], v[b : b + 1, first:last], causal=True)
            np.testing.assert_allclose(o[b : b + 1].astype(np.float64), wanted, rtol=limit, atol=limit)
            np.testing.assert_allclose(lse[b : b + 1], wanted_lse, rtol=1e-5, atol=1e-5)


@every_kernel
def test_any_alignment(kernel: dict) -> None:
    """Rows that are not aligned to 16 bytes: the same bits."""
    dtype = DTYPES[kernel["dtype"]]
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(2, n, h, 50, generator=generator, device="cuda").to(dtype) for n, h in ((2, 4), (300, 2), (300, 2)))
    lengths = torch.tensor([300, 77], dtype=torch.int32, device="cuda")

    def shifted(x: torch.Tensor) -> torch.Tensor:
        wide = torch.full((*x.shape[:-1], 53), torch.nan, dtype=dtype, device="cuda")
        wide[..., 1:51] = x
        return wide[..., 1:51]

    aligned = [torch.nn.functional.pad(x, (0, 6)).contiguous() for x in (q, k, v)]
    out = shifted(torch.zeros(2, 2, 4, 50, device="cuda", dtype=dtype))
    options = {"cache_seqlens": lengths, "kernel": kernel["name"], "softmax_scale": 0.2}
    libflash.decode(*(shifted(x) for x in (q, k, v)), out=out, **options)
    wanted = libflash.decode(*aligned, **options)
    assert same_bits(out.contiguous(), wanted[..., :50].contiguous())
