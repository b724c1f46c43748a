"""Decode on a GPU: shards of the keys, invariant rows, hints of shared keys, float32 results, ragged rows over codes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from decode_cases import DecodeCase

import libflash

torch = pytest.importorskip("torch")
from gpu_case import DTYPES, same_bits  # noqa: E402  (needs torch)
from gpu_codes import on_device, some_codes  # noqa: E402
from gpu_decode import KERNELS, every_kernel  # noqa: E402
from gpu_shards import check_shards  # noqa: E402
from test_decode_shards import CASES as SHARD_CASES  # noqa: E402
from test_decode_shards import SHARDS, appends_all  # noqa: E402
from test_shared_keys import GROUPS, LENGTHS, LENS, table  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

TYPES = {"fp16": "f16", "bf16": "bf16", "fp32": "f32"}
NARROW = [case for case in SHARD_CASES if appends_all(case) and case.dtype in TYPES]


@pytest.mark.parametrize(("number", "case"), list(enumerate(NARROW)), ids=str)
def test_merged_shards_are_the_whole(number: int, case: DecodeCase) -> None:
    for split, at in (({}, number), ({"split_size": 128}, number + 3)):
        check_shards(case, *SHARDS[at % len(SHARDS)], **split)


def test_there_are_cases_of_shards() -> None:
    assert {case.dtype for case in NARROW} == set(TYPES)
    assert sum(bool(case.append) for case in NARROW) >= 5


def test_a_shard_without_keys() -> None:
    """out 0 and lse -inf; the cache is not read. With a sink shard 0 has its lse."""
    q = torch.randn(2, 1, 4, 32, device="cuda", dtype=torch.float16)
    caches = [torch.full((2, 8, 2, 32), torch.nan, device="cuda", dtype=torch.float16)] * 2
    lengths, sink = torch.tensor([32, 0], device="cuda", dtype=torch.int32), torch.arange(4.0, device="cuda")
    for index, more in ((3, {}), (3, {"learnable_sink": sink}), (2, {"learnable_sink": sink})):
        out, lse = libflash.decode(q, *caches, cache_seqlens=lengths, shard=(4, index, 16), return_lse=True, **more)
        assert not out.any()
        assert torch.isneginf(lse).all()
    lengths.zero_()
    out, lse = libflash.decode(q, *caches, cache_seqlens=lengths, shard=(4, 0, 16), return_lse=True, learnable_sink=sink)
    assert not out.any()
    assert torch.equal(lse, sink[:, None].expand_as(lse))


@every_kernel
def test_float32_results_are_the_unrounded_ones(kernel: dict) -> None:
    dtype = DTYPES[kernel["dtype"]]
    q = torch.randn(2, 3, 8, 48, device="cuda", dtype=dtype)
    caches = [torch.randn(2, 300, 2, 48, device="cuda", dtype=dtype) for _ in range(2)]
    lengths = torch.tensor([300, 77], device="cuda", dtype=torch.int32)
    for more in ({"num_splits": 1}, {"num_splits": 3}):
        wide = torch.empty(q.shape, device="cuda")
        libflash.decode(q, *caches, cache_seqlens=lengths, out=wide, kernel=kernel["name"], **more)
        narrow = libflash.decode(q, *caches, cache_seqlens=lengths, kernel=kernel["name"], **more)
        limit = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
        torch.testing.assert_close(wide, narrow.float(), rtol=limit, atol=limit)


# -- invariant rows

ROWS, CACHED = (70, 5, 3, 33, 1, 9), (2500, 130, 3, 1030, 128, 700)
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window_size": (1500, 0)},
    "softcap": {"softcap": 3.0},
    "splits of 256": {"split_size": 256, "window_size": (900, 0)},
}


def starts(rows: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *rows], device="cuda").cumsum(0).to(torch.int32)


def ints(*x: int) -> torch.Tensor:
    return torch.tensor(x, device="cuda", dtype=torch.int32)


@every_kernel
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("code", ["", "e4m3", "int8"])
def test_invariant_rows(kernel: dict, option: str, code: str) -> None:
    """Packed, in another order, in chunks and in pages: the bits of a row alone."""
    if code and kernel["dtype"] == "f32":
        return
    dtype, dim = DTYPES[kernel["dtype"]], min(kernel["head_dim"], 96)
    q = torch.randn(sum(ROWS), 6, dim, device="cuda", dtype=dtype)
    caches = [torch.randn(len(ROWS), 2560, 2, dim, device="cuda").to(dtype) for _ in range(2)]
    more: dict[str, Any] = {"invariant": True, "return_lse": True, "kernel": kernel["name"], "causal": True, **OPTIONS[option]}
    if code:
        caches = [some_codes(code, len(ROWS), 2560, 2, dim, seed=seed) for seed in (1, 2)]
        more |= {name: torch.rand(2, device="cuda") / 20 + 0.01 for name in ("k_scale", "v_scale")}
    begin = starts(ROWS).tolist()
    out, lse = libflash.decode(q, *caches, cu_seqlens_q=starts(ROWS), cache_seqlens=ints(*CACHED), **more)
    for b, n in enumerate(ROWS):
        own, alone = [x[b : b + 1] for x in caches], q[begin[b] : begin[b] + n]
        for i in {*range(0, n, 20), n - 1}:
            one = libflash.decode(alone[None, i : i + 1], *own, cache_seqlens=ints(CACHED[b] - n + i + 1), **more)
            assert same_bits(one[0][0, 0], out[begin[b] + i])
            assert same_bits(one[1][0, :, 0].contiguous(), lse[:, begin[b] + i].contiguous())
    order = [3, 5, 0, 2, 4, 1]
    mixed = torch.cat([q[begin[b] : begin[b] + ROWS[b]] for b in order])
    other = libflash.decode(
        mixed, *caches, cu_seqlens_q=starts(tuple(ROWS[b] for b in order)), cache_seqlens=ints(*(CACHED[b] for b in order)),
        cache_batch_idx=ints(*order), **more,
    )  # fmt: skip
    assert same_bits(other[0], torch.cat([out[begin[b] : begin[b] + ROWS[b]] for b in order]))
    for size in (1, 7, 64):  # chunks of the first sequence
        parts = [
            libflash.decode(q[None, at : min(at + size, 70)], *[x[:1] for x in caches],
                            cache_seqlens=ints(2500 - 70 + min(at + size, 70)), **more)[0][0]
            for at in range(0, 70, size)
        ]  # fmt: skip
        assert same_bits(torch.cat(parts), out[:70])
    for page in (16, 64):
        pages = [x.reshape(-1, page, 2, dim) for x in caches]
        columns = torch.arange(len(pages[0]), device="cuda", dtype=torch.int32).reshape(len(ROWS), -1)
        paged = libflash.decode(q, *pages, cu_seqlens_q=starts(ROWS), cache_seqlens=ints(*CACHED), block_table=columns, **more)
        assert same_bits(paged[0], out)
        assert same_bits(paged[1], lse)


# -- hints and codes


@pytest.mark.parametrize("invariant", [False, True])
def test_the_hint_changes_no_bit(invariant: bool) -> None:
    rows = ints(1, 2, 40, 0, 3)
    q, k, v = (torch.randn(46, heads, 32, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2))
    pages = [torch.randn(40, 16, 2, 32, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    options = {"k": k, "v": v, "cu_seqlens_q": starts(tuple(rows.tolist())), "invariant": invariant, "return_lse": True}
    options |= {"cache_seqlens": on_device(LENGTHS), "block_table": on_device(np.maximum(table(3), 0))}
    results = []
    for hint in ({}, {"shared_groups": on_device(GROUPS), "shared_lens": on_device(LENS)}):
        own = [x.clone() for x in pages]
        results.append([*libflash.decode(q, *own, **options, **hint), *own])
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("code", ["e4m3", "e5m2", "int8"])
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_ragged_rows_over_codes_have_the_bits_of_values(head_dim: int, dtype: str, code: str) -> None:
    """Of the same call over elements with the values of the codes and the same scales; with splits and pages."""
    caches = [some_codes(code, len(ROWS) * 160, 16, 2, head_dim, seed=seed) for seed in (1, 2)]
    q = torch.randn(sum(ROWS), 6, head_dim, device="cuda", dtype=DTYPES[dtype])
    columns = torch.randperm(len(ROWS) * 160, device="cuda").to(torch.int32).view(len(ROWS), 160)
    options = {"cu_seqlens_q": starts(ROWS), "cache_seqlens": ints(*CACHED), "block_table": columns, "return_lse": True}
    for shape in ((1,), (2,), (len(ROWS), 2), caches[0].shape[:3], (*caches[0].shape[:3], head_dim // 32)):
        scales = {name: torch.rand(shape, device="cuda") / 20 + 0.01 for name in ("k_scale", "v_scale")}
        for more in ({}, {"num_splits": 4}, {"split_size": 256}):
            got = libflash.decode(q, *caches, **options, **scales, **more)
            wanted = libflash.decode(q, *(x.to(DTYPES[dtype]) for x in caches), **options, **scales, **more)
            assert all(same_bits(a, b) for a, b in zip(got, wanted, strict=True)), (shape, more)


@pytest.mark.parametrize("code", ["e4m3", "int8"])
def test_ragged_steps_over_codes_in_a_graph(code: str) -> None:
    """Captured once, replayed with other lengths; appended codes and scales are those of a call by itself."""
    caches = [some_codes(code, 40, 16, 2, 64, seed=seed) for seed in (1, 2)]
    scales = {name: torch.full((40, 16, 2), 0.03, device="cuda") for name in ("k_scale", "v_scale")}
    q, k, v = (torch.randn(30, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2))
    begin, lengths = starts((1, 20, 0, 9)), ints(50, 20, 0, 100)
    columns = torch.arange(40, device="cuda", dtype=torch.int32).view(4, 10)

    def call(own: list[torch.Tensor], factors: dict[str, torch.Tensor]) -> torch.Tensor:
        return libflash.decode(
            q, *own, k=k, v=v, cu_seqlens_q=begin, cache_seqlens=lengths, block_table=columns, causal=True, **factors
        )

    call([x.clone() for x in caches], {name: x.clone() for name, x in scales.items()})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(caches, scales)
    for rows, cached in (((5, 5, 5, 15), (0, 60, 3, 155)), ((0, 30, 0, 0), (9, 9, 9, 9)), ((1, 1, 1, 1), (159, 160, 0, 1))):
        begin.copy_(starts(rows)), lengths.copy_(ints(*cached))
        own, factors = [x.clone() for x in caches], {name: x.clone() for name, x in scales.items()}
        wanted, used = call(own, factors), sum(rows)
        graph.replay()
        assert same_bits(out[:used], wanted[:used])
        for x, y in zip([*caches, *scales.values()], [*own, *factors.values()], strict=True):
            assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


def test_there_are_kernels_of_every_type() -> None:
    assert {kernel["dtype"] for kernel in KERNELS} == {"f16", "bf16", "f32"}
