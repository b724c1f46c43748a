"""Decode with values in the keys (MLA) on sm90: thread blocks that work in pairs and share the loads of keys give the bits of
thread blocks that do not.

With packed rows (cu_seqlens_q) they do not work in pairs; otherwise they do where the rows of a sequence fill an even number of
tiles of 64.
"""

from __future__ import annotations

from typing import Any

import pytest

import libflash

torch = pytest.importorskip("torch")
from gpu_case import same_bits  # noqa: E402  (needs torch)
from gpu_kernels import kernels_of_values_in_keys  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not any("sm90" in k["name"] for k in kernels_of_values_in_keys()), reason="no such kernel for this GPU"),
]

KEYS, VALUES, CAPACITY = 576, 512, 700
LENGTHS = (0, 1, 63, 64, 65, 130, 333, 700, 511, 640)


class Problem:
    """Pages in a random order; rows that no sequence has are NaN, and an entry of the block table names no page."""

    def __init__(self, dtype: Any, heads: int, rows: int, page: int) -> None:
        generator = torch.Generator("cuda").manual_seed(heads * 100 + rows * 10 + page)
        batch, columns = len(LENGTHS), -(-CAPACITY // page)
        self.rows, self.starts = rows, torch.arange(0, (batch + 1) * rows, rows, dtype=torch.int32, device="cuda")
        self.lengths = torch.tensor(LENGTHS, dtype=torch.int32, device="cuda")
        self.table = torch.randperm(batch * columns, generator=generator, device="cuda").int().view(batch, columns)
        self.cache = torch.randn(batch * columns, page, 1, KEYS, generator=generator, device="cuda").to(dtype)
        self.q = torch.randn(batch, rows, heads, KEYS, generator=generator, device="cuda").to(dtype)
        in_order = self.cache[self.table.long()].flatten(1, 2)
        in_order[torch.arange(columns * page, device="cuda") >= self.lengths[:, None]] = torch.nan
        self.cache[self.table.long()] = in_order.unflatten(1, (columns, page))
        self.table[8, 2] = -1

    def run(self, packed: bool, **options: Any) -> tuple[Any, Any]:
        q = self.q.flatten(0, 1) if packed else self.q
        if packed:
            options["cu_seqlens_q"] = self.starts
        options |= {"cache_seqlens": self.lengths, "block_table": self.table, "head_dim_v": VALUES, "return_lse": True}
        out, lse = libflash.decode(q, self.cache, None, backend="sm90", **options)
        if packed:
            out, lse = out.unflatten(0, (-1, self.rows)), lse.unflatten(1, (-1, self.rows)).transpose(0, 1)
        return out, lse

    def explain(self, **options: Any) -> str:
        options |= {"cache_seqlens": self.lengths, "block_table": self.table, "head_dim_v": VALUES}
        return str(libflash.explain(self.q, self.cache, None, op="decode", backend="sm90", **options))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"num_splits": 1},
    "causal": {"causal": True, "num_splits": 1},
    "splits": {"causal": True, "split_size": 128},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("page", [16, 48, 64, 256])
@pytest.mark.parametrize(("heads", "rows"), [(128, 1), (100, 1), (65, 1), (16, 8), (40, 3), (128, 4)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_pairs_have_the_bits_of_single_thread_blocks(dtype: str, heads: int, rows: int, page: int, option: str) -> None:
    problem = Problem(getattr(torch, dtype), heads, rows, page)
    assert "in pairs" in problem.explain(**OPTIONS[option])
    for repeat in range(3):
        pairs, single = problem.run(False, **OPTIONS[option]), problem.run(True, **OPTIONS[option])
        assert not pairs[0].isnan().any(), repeat
        assert all(same_bits(x, y) for x, y in zip(pairs, single, strict=True)), repeat


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize(("heads", "rows"), [(64, 2), (16, 8), (128, 4)])
def test_windows(heads: int, rows: int, page: int) -> None:
    """A pair begins with the first key that a row of either thread block sees. The warpgroup that adds up the probabilities of a
    tile may then be another one, so sums are rounded in another order.
    """
    problem = Problem(torch.bfloat16, heads, rows, page)
    pairs, single = (problem.run(packed, causal=True, window_size=(70, 0), num_splits=1) for packed in (False, True))
    torch.testing.assert_close(pairs[0], single[0], rtol=2**-7, atol=2**-9)
    torch.testing.assert_close(pairs[1], single[1], rtol=1e-6, atol=1e-6)
