"""decode(invariant=True) with the options that test_cache_options_cuda.py does not have: the bits of a row are those of a call
for this row alone, which has the keys up to its own.
"""

from __future__ import annotations

from typing import Any

import pytest
from gpu_kernels import device_of, in_place_of, parameters

import libflash

torch = pytest.importorskip("torch")
from gpu_case import DTYPES, same_bits  # noqa: E402  (needs torch)
from gpu_decode import KERNELS, ints  # noqa: E402

every_kernel = pytest.mark.parametrize("kernel", parameters([*KERNELS, in_place_of("decode")]))
HEADS_Q, HEADS_K, ROPE = 6, 2, 16
# More than a segment of 1024 keys, less than a tile, the edge of a tile. The capacity is a multiple of pages of 3 and 16.
ROWS, LENGTHS, CAPACITY = (35, 5, 3, 1, 9), (1250, 130, 3, 1030, 128), 1296
PAGE = {"pages of 3": 3, "chain in pages": 16}
OPTIONS: dict[str, dict[str, Any]] = {
    "alibi": {"alibi_slopes": 1},
    "alibi and sink": {"alibi_slopes": 1, "learnable_sink": 1, "window_size": (700, 0)},
    "heads before rows": {},
    "pages of 3": {"window_size": (1100, 0)},
    "rope cache": {},
    "values in keys": {},
    "values in keys beside a rope cache": {"window_size": (1100, 0)},
    "shards": {"shard": (3, 1, 16)},
    "shards of single keys": {"shard": (2, 0, 1), "window_size": (1100, 0), "learnable_sink": 1},
    "chain": {},
    "chain in pages": {"softcap": 3.0},
    "chain with positions": {"alibi_slopes": 1},
}


def first_row(b: int) -> int:
    return sum(ROWS[:b])


def chain() -> torch.Tensor:
    """Each row sees itself and the rows before it."""
    words = -(-max(ROWS) // 32)
    bits = torch.zeros(sum(ROWS), 32 * words, dtype=torch.int64)
    for b, n in enumerate(ROWS):
        bits[first_row(b) : first_row(b) + n, :n] = torch.ones(n, n, dtype=torch.int64).tril()
    numbers = (bits.view(-1, words, 32) << torch.arange(32)).sum(-1)
    return torch.where(numbers < 2**31, numbers, numbers - 2**32).to(torch.int32)


class Problem:
    """Packed rows over caches of one entry, or of several pages, for each sequence."""

    def __init__(self, kernel: dict, option: str) -> None:
        self.kernel, self.option = kernel, option
        self.device, self.dtype = device_of(kernel), DTYPES[kernel["dtype"]]
        dim = min(kernel["head_dim"], 96)
        self.of_all = {"kernel": kernel["name"], "invariant": True, "causal": True, "return_lse": True, **OPTIONS[option]}
        for name, seed in (("alibi_slopes", 8), ("learnable_sink", 9)):
            if name in self.of_all:
                self.of_all[name] = self.random(HEADS_Q, seed=seed, dtype=torch.float32).abs()
        rope = ROPE if "rope" in option else 0
        self.q = self.random(sum(ROWS), HEADS_Q, dim, seed=1)
        self.caches: dict[str, Any] = {"k_cache": self.cache(dim - rope, seed=2), "v_cache": None}
        if "values in keys" in option:
            self.of_all["head_dim_v"] = dim - 32
        else:
            self.caches["v_cache"] = self.cache(dim - 8, seed=3)
        if rope:
            self.caches["k_rope_cache"] = self.cache(rope, seed=4)
        self.table: torch.Tensor | None = None
        if option in PAGE:
            self.scatter(PAGE[option])
        self.trees: dict[str, torch.Tensor] = {}
        if "chain" in option:
            self.trees["tree_mask"] = chain().to(self.device)
        if "positions" in option:  # without a window these change ALiBi, and are here what they would be anyway
            at = [torch.arange(keys - rows, keys) for rows, keys in zip(ROWS, LENGTHS, strict=True)]
            self.trees["q_positions"] = torch.cat(at).to(torch.int32).to(self.device)

    def random(self, *shape: int, seed: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return x.to(dtype or self.dtype).to(self.device)

    def cache(self, dim: int, seed: int) -> torch.Tensor:
        if self.option == "heads before rows":
            return self.random(len(ROWS), HEADS_K, CAPACITY, dim, seed=seed).transpose(1, 2)
        return self.random(len(ROWS), CAPACITY, HEADS_K, dim, seed=seed)

    def scatter(self, page: int) -> None:
        order = torch.randperm(len(ROWS) * CAPACITY // page, generator=torch.Generator().manual_seed(5)).to(self.device)
        for name, cache in self.caches.items():
            pages = torch.empty_like(cache.reshape(-1, page, *cache.shape[2:]))
            pages[order] = cache.reshape(pages.shape)
            self.caches[name] = pages
        self.table = order.to(torch.int32).view(len(ROWS), -1)

    def whole(self, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        starts = ints(self.kernel, *[first_row(b) for b in range(len(ROWS) + 1)])
        where = {} if self.table is None else {"block_table": self.table}
        given = {"cache_seqlens": ints(self.kernel, *LENGTHS), "cu_seqlens_q": starts, **where, **self.trees, **more}
        return libflash.decode(self.q, **self.caches, **self.of_all, **given)

    def alone(self, b: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One row of a sequence, in a batch of one."""
        at = first_row(b) + row
        caches = self.caches
        where: dict[str, torch.Tensor] = {"cache_seqlens": ints(self.kernel, LENGTHS[b] - ROWS[b] + row + 1)}
        if self.table is None:
            caches = {name: x if x is None else x[b : b + 1] for name, x in caches.items()}
        else:
            where["block_table"] = self.table[b : b + 1]
        out, lse = libflash.decode(self.q[at : at + 1][None], **caches, **self.of_all, **where)
        return out[0, 0], lse[0, :, 0]


@every_kernel
@pytest.mark.parametrize("option", OPTIONS)
def test_rows_equal_rows_alone(kernel: dict, option: str) -> None:
    x = Problem(kernel, option)
    out, lse = x.whole()
    for b, n in enumerate(ROWS):
        for row in {*range(0, n, 16), n - 1}:
            own = x.alone(b, row)
            assert same_bits(out[first_row(b) + row], own[0])
            assert same_bits(lse[:, first_row(b) + row].contiguous(), own[1].contiguous())
    assert out.isfinite().all()


@every_kernel
@pytest.mark.parametrize("option", ["chain", "chain in pages", "chain with positions"])
def test_trees(kernel: dict, option: str) -> None:
    """A row of a random tree has the bits that it has beside rows that see other keys, and in another place of the batch."""
    x, generator = Problem(kernel, option), torch.Generator().manual_seed(6)
    bits = x.trees["tree_mask"]
    tree = bits & torch.randint(-(2**31), 2**31, bits.shape, generator=generator).to(torch.int32).to(x.device)
    out, lse = x.whole(tree_mask=tree)
    assert not same_bits(out, x.whole()[0])
    for b, n in enumerate(ROWS):
        row = first_row(b) + n // 2
        others = torch.zeros_like(tree)
        others[row] = tree[row]
        got = x.whole(tree_mask=others)
        assert same_bits(got[0][row], out[row])
        assert same_bits(got[1][:, row].contiguous(), lse[:, row].contiguous())
        rows = slice(first_row(b), first_row(b) + n)
        where = {"cache_seqlens": ints(x.kernel, LENGTHS[b]), "cu_seqlens_q": ints(x.kernel, 0, n), "tree_mask": tree[rows]}
        if "q_positions" in x.trees:
            where["q_positions"] = x.trees["q_positions"][rows].contiguous()
        caches = x.caches
        if x.table is None:
            caches = {name: y if y is None else y[b : b + 1] for name, y in caches.items()}
        else:
            where["block_table"] = x.table[b : b + 1]
        one = libflash.decode(x.q[rows], **caches, **x.of_all, **where)
        assert same_bits(one[0], out[rows])
        assert same_bits(one[1], lse[:, rows].contiguous())
