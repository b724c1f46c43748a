"""Decode with very many sequences, very large caches, and too many splits."""

from __future__ import annotations

import pytest

import libflash

torch = pytest.importorskip("torch")
from gpu_case import same_bits  # noqa: E402  (needs torch)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_more_sequences_than_a_grid_is_wide() -> None:
    q = torch.randn(70000, 1, 2, 64, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(70000, 3, 1, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    got = libflash.decode(q, k, v)
    scores = torch.einsum("bihd,bjkd->bhij", q.float(), k.float()) * 0.125
    wanted = torch.einsum("bhij,bjkd->bihd", scores.softmax(-1), v.float())
    assert (got.float() - wanted).abs().max() < 0.04


def test_a_cache_of_more_than_two_to_the_31_elements() -> None:
    pages, size = 70000, 256
    caches = [torch.zeros(pages, size, 1, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    assert caches[0].numel() > 2**31
    table = torch.tensor([[pages - 1, 0, pages // 2]], dtype=torch.int32, device="cuda")
    q = torch.randn(1, 1, 4, 128, device="cuda", dtype=torch.bfloat16)
    for cache in caches:
        for page in table[0].tolist():
            cache[page] = torch.randn(size, 1, 128, device="cuda")
    got = libflash.decode(q, *caches, block_table=table)
    small = [x[table[0].long()] for x in caches]
    wanted = libflash.decode(q, *small, block_table=torch.arange(3, dtype=torch.int32, device="cuda")[None])
    assert same_bits(got, wanted)


def test_more_splits_than_thread_blocks_can_be_counted_are_refused() -> None:
    pages = torch.zeros(1, 16, 1, 64, dtype=torch.bfloat16, device="cuda")
    table = torch.zeros(1, 1 << 20, dtype=torch.int32, device="cuda").expand(70000, -1)
    q = torch.zeros(70000, 1, 1, 64, dtype=torch.bfloat16, device="cuda")
    lengths = torch.ones(70000, dtype=torch.int32, device="cuda")
    with pytest.raises(libflash.UnsupportedError, match=r"split_size: .*131072 ranges"):
        libflash.decode(q, pages, pages.clone(), block_table=table, cache_seqlens=lengths, split_size=128)
