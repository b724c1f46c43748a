"""Decode on the GPU where many query rows share a key head: trees of several sizes, large groups, long caches in pages, and the
kernels for sm_90a that take these, against those for sm_80."""

from __future__ import annotations

from typing import Any

import pytest

import libflash

torch = pytest.importorskip("torch")
from gpu_case import DTYPES, same_bits  # noqa: E402  (needs torch)
from gpu_decode import LIMITS  # noqa: E402
from gpu_kernels import kernels_of_many_rows, parameters  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

PAGE, COLUMNS = 16, 130
every_kernel_of_many_rows = pytest.mark.parametrize("kernel", parameters(kernels_of_many_rows()))


class Trees:
    """Packed trees over a cache in pages: a node sees itself, some earlier ones and all keys before the tree."""

    def __init__(self, dtype: torch.dtype, nodes: tuple[int, ...], heads: tuple[int, int], dim: int) -> None:
        generator = torch.Generator("cuda").manual_seed(sum(nodes))
        batch, total = len(nodes), sum(nodes)

        def made(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device="cuda").to(dtype)

        self.q = made(total, heads[0], dim)
        self.caches = [made(batch * COLUMNS, PAGE, heads[1], dim) for _ in range(2)]
        table = torch.randperm(batch * COLUMNS, generator=generator, device="cuda").to(torch.int32).view(batch, COLUMNS)
        lengths = torch.randint(max(nodes), COLUMNS * PAGE, (batch,), generator=generator, device="cuda", dtype=torch.int32)
        bits = torch.randint(-(2**31), 2**31, (total, -(-max(nodes) // 32)), generator=generator, device="cuda")
        starts = torch.tensor([0, *nodes], device="cuda").cumsum(0).to(torch.int32)
        self.options: dict[str, Any] = {"block_table": table, "cache_seqlens": lengths, "cu_seqlens_q": starts}
        self.options |= {"tree_mask": bits.to(torch.int32), "return_lse": True}

    def decode(self, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return libflash.decode(self.q, *self.caches, **self.options, **options)


@every_kernel_of_many_rows
@pytest.mark.parametrize("nodes", [(8,) * 8, (16,) * 3, (64, 64), (1, 30, 0, 64, 7), (200, 3)], ids=str)
@pytest.mark.parametrize("heads", [(8, 2), (32, 1), (3, 3)], ids=str)
def test_trees(kernel: dict, nodes: tuple[int, ...], heads: tuple[int, int]) -> None:
    trees = Trees(DTYPES[kernel["dtype"]], nodes, heads, kernel["head_dim"])
    o_limit, lse_limit = LIMITS[kernel["dtype"]]
    for options in ({"num_splits": 1}, {}, {"split_size": 256}):
        wanted = trees.decode(kernel=kernel["name"].replace("sm90", "sm80"), **options)
        got = trees.decode(kernel=kernel["name"], **options)
        torch.testing.assert_close(got[0], wanted[0], rtol=o_limit, atol=o_limit)
        torch.testing.assert_close(got[1], wanted[1], rtol=lse_limit, atol=2 * lse_limit)
        again = trees.decode(kernel=kernel["name"], **options)
        assert all(same_bits(a, b) for a, b in zip(got, again, strict=True))


@every_kernel_of_many_rows
def test_a_single_split_with_keys_has_the_bits_of_no_splits(kernel: dict) -> None:
    """Of three splits the last two have no keys. The sink reduces the results of both calls in the same order."""
    heads = (32, 2)
    trees = Trees(DTYPES[kernel["dtype"]], (9, 1, 16), heads, kernel["head_dim"])
    lengths = torch.tensor([1000, 17, 400], device="cuda", dtype=torch.int32)
    sink = torch.linspace(-3, 9, heads[0], device="cuda").to(DTYPES[kernel["dtype"]])
    options = {"kernel": kernel["name"], "learnable_sink": sink}
    trees.options["cache_seqlens"] = lengths
    whole, parts = trees.decode(num_splits=1, **options), trees.decode(split_size=1024, **options)
    assert all(same_bits(a, b) for a, b in zip(whole, parts, strict=True))


@every_kernel_of_many_rows
@pytest.mark.parametrize("rows", [1, 16, 17, 64, 65])
def test_tiles_of_64_and_128_rows_have_the_same_bits(kernel: dict, rows: int) -> None:
    """With a split size: the first sequence alone, and beside long ones, which make the tiles larger."""
    dtype, dim = DTYPES[kernel["dtype"]], kernel["head_dim"]
    q = torch.randn(rows + 300, 1, dim, device="cuda", dtype=dtype)
    caches = [torch.randn(2, 1500, 1, dim, device="cuda", dtype=dtype) for _ in range(2)]
    options: dict[str, Any] = {"split_size": 256, "kernel": kernel["name"], "causal": True}

    def starts(*at: int) -> torch.Tensor:
        return torch.tensor(at, device="cuda", dtype=torch.int32)

    both = libflash.decode(q, *caches, cu_seqlens_q=starts(0, rows, rows + 300), **options)
    alone = libflash.decode(q[:rows], *[x[:1] for x in caches], cu_seqlens_q=starts(0, rows), **options)
    assert same_bits(both[:rows].contiguous(), alone)


@every_kernel_of_many_rows
def test_the_library_chooses_by_the_rows(kernel: dict) -> None:
    dtype = DTYPES[kernel["dtype"]]
    cache = torch.zeros(2, 64, 2, kernel["head_dim"], device="cuda", dtype=dtype)
    for rows, chosen in ((4, False), (5, True), (40, True)):
        q = torch.zeros(2, rows, 8, kernel["head_dim"], device="cuda", dtype=dtype)
        assert (kernel["name"] in libflash.explain(q, cache, cache, op="decode").partition("instance")[0]) == chosen
