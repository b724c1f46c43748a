"""Decode captured in a graph and replayed with other lengths, tables, trees and positions: trees, shards of the keys, invariant
rows, values in the keys. A replay has the bits of a plain call, and its caches are those of a plain call.
"""

from __future__ import annotations

from typing import Any

import pytest
from gpu_kernels import device_of, in_place_of, kernels_of_values_in_keys, of_many_rows, of_values_in_keys, parameters

import libflash

torch = pytest.importorskip("torch")
from gpu_case import DTYPES, same_bits  # noqa: E402  (needs torch)
from gpu_decode import KERNELS, KERNELS_AND_MANY_ROWS, LIMITS, ints, normal  # noqa: E402
from gpu_graphs import captured  # noqa: E402

BATCH, TOTAL, PAGE, COLUMNS = 4, 40, 16, 20
# Query rows of the sequences, and keys in the cache before the call; the first step is the one that is captured.
STEPS = [
    ((10, 10, 10, 10), (100, 50, 0, 200)),
    ((0, 40, 0, 0), (7, 280, 0, 320)),
    ((1, 1, 1, 1), (319, 0, 64, 127)),
    ((0, 0, 0, 0), (0, 0, 0, 0)),
    ((17, 0, 3, 20), (300, 12, 128, 15)),
]
Tensors = dict[str, torch.Tensor]


class Step:
    """Packed rows that are appended to pages. `load` puts the numbers of a step into the tensors of the call."""

    def __init__(self, kernel: dict, heads: tuple[int, int] = (4, 2), **options: Any) -> None:
        self.kernel, self.device, self.dtype = kernel, device_of(kernel), DTYPES[kernel["dtype"]]
        self.in_keys = of_values_in_keys(kernel)
        dim, dim_v = (kernel["head_dim"], kernel["head_dim_v"]) if self.in_keys else (64, 64)
        self.options = {"causal": True, "kernel": kernel["name"], "return_lse": True, **options}
        if self.in_keys:
            self.options["head_dim_v"] = dim_v
        self.q = normal(kernel, TOTAL, heads[0], dim, seed=1)
        self.new = {"k": normal(kernel, TOTAL, heads[1], dim, seed=2)}
        self.caches: Tensors = {"k_cache": normal(kernel, BATCH * COLUMNS, PAGE, heads[1], dim, seed=3)}
        if not self.in_keys:
            self.new["v"] = normal(kernel, TOTAL, heads[1], dim, seed=4)
            self.caches["v_cache"] = normal(kernel, BATCH * COLUMNS, PAGE, heads[1], dim, seed=5)
        self.first = {name: x.clone() for name, x in self.caches.items()}
        self.numbers = self.numbers_of(0)
        wide = torch.float32 if "shard" in options else self.dtype
        self.made = [torch.empty(TOTAL, heads[0], dim_v, dtype=wide, device=self.device),
                     torch.empty(heads[0], TOTAL, device=self.device)]  # fmt: skip

    def numbers_of(self, step: int) -> Tensors:
        rows, cached = STEPS[step]
        generator = torch.Generator().manual_seed(step)
        table = torch.randperm(BATCH * COLUMNS, generator=generator).to(torch.int32).view(BATCH, COLUMNS)
        used = torch.arange(COLUMNS) * PAGE < torch.tensor([n + m for n, m in zip(rows, cached, strict=True)])[:, None]
        starts = ints(self.kernel, *(sum(rows[:b]) for b in range(BATCH + 1)))
        made = {"cu_seqlens_q": starts, "cache_seqlens": ints(self.kernel, *cached)}
        return made | {"block_table": torch.where(used, table, 2**31 - 1).to(torch.int32).to(self.device)}

    def load(self, numbers: Tensors) -> None:
        for name, x in numbers.items():
            self.numbers[name].copy_(x)
        for name, x in self.first.items():
            self.caches[name].copy_(x)
        for x in self.made:
            x.fill_(7)

    def __call__(self) -> None:
        self.into(self.made, self.caches)

    def into(self, made: list[torch.Tensor], caches: Tensors) -> None:
        given = {"v_cache": None, **caches, **self.new, **self.numbers, **self.options}
        libflash.decode(self.q, out=made[0], lse=made[1], **given)


def check_replays(step: Step, more: list[Tensors] | None = None) -> list[list[torch.Tensor]]:
    """`more`: further numbers of each step. Returns the results of each step."""
    if more:
        step.numbers |= {name: x.clone() for name, x in more[0].items()}
    replay, results = captured(step, step.device), []
    for number, (rows, _) in enumerate(STEPS):
        step.load(step.numbers_of(number) | (more[number] if more else {}))
        replay()
        wanted, own = [torch.full_like(x, 7) for x in step.made], {name: x.clone() for name, x in step.first.items()}
        step.into(wanted, own)
        assert all(same_bits(a, b) for a, b in zip(step.made, wanted, strict=True)), number
        assert all(same_bits(x, own[name]) for name, x in step.caches.items()), number
        written = sum(rows)
        assert (step.made[0][written:] == 7).all()
        assert not (step.made[0][:written] == 7).flatten(1).all(1).any()
        of_step = step.first if "shard" not in step.options else {}  # a shard appends a part of the rows
        for name, x in of_step.items():
            assert (x != step.caches[name]).flatten(2).any(2).sum() == written
        results.append([x.clone() for x in step.made])
    return results


def trees(step: Step, positions: bool) -> list[Tensors]:
    """Random bits of each step; of two sequences only, the others are causal. Positions do not descend along the keys."""
    made = []
    for number, (rows, cached) in enumerate(STEPS):
        generator = torch.Generator().manual_seed(10 + number)
        numbers = [0, rows[0], rows[0], rows[0], rows[0] + rows[3]]
        bits = torch.randint(-(2**31), 2**31, (TOTAL, 2), generator=generator).to(torch.int32)
        one = {"tree_mask": bits.to(step.device), "cu_seqlens_tree": ints(step.kernel, *numbers)}
        if positions:
            at = [m + i // 2 for n, m in zip(rows, cached, strict=True) for i in range(n)]
            one["q_positions"] = ints(step.kernel, *at, *[0] * (TOTAL - len(at)))
        made.append(one)
    return made


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("kernel", parameters([*KERNELS_AND_MANY_ROWS, in_place_of("decode")]))
def test_trees(kernel: dict, positions: bool) -> None:
    """With positions also a window; the kernels for many rows do not support both."""
    window = {"window_size": (90, 0)} if positions and not of_many_rows(kernel) else {}
    step = Step(kernel, **window)
    with_trees = check_replays(step, trees(step, positions))
    without = check_replays(Step(kernel, **window))
    assert not same_bits(with_trees[0][0], without[0][0])


@pytest.mark.parametrize("kernel", parameters([*KERNELS, in_place_of("decode")]))
@pytest.mark.parametrize("split", [{}, {"split_size": 128}, {"invariant": True}], ids=str)
def test_shards(kernel: dict, split: dict) -> None:
    """Each shard keeps its own part of the new rows."""
    parts = [check_replays(Step(kernel, shard=(2, i, 8), **split)) for i in range(2)]
    for number, (rows, _) in enumerate(STEPS):
        assert same_bits(parts[0][number][0], parts[1][number][0]) == (sum(rows) == 0)


@pytest.mark.parametrize("kernel", parameters([*KERNELS, in_place_of("decode")]))
@pytest.mark.parametrize("more", [{}, {"window_size": (150, 0), "softcap": 9.0}, {"split_size": 128}], ids=str)
def test_invariant_rows(kernel: dict, more: dict) -> None:
    check_replays(Step(kernel, invariant=True, **more))


@pytest.mark.parametrize("heads", [(16, 1), (128, 1)], ids=str)
@pytest.mark.parametrize("more", [{}, {"num_splits": 1}, {"window_size": (150, 0)}], ids=str)
@pytest.mark.parametrize("kernel", parameters(kernels_of_values_in_keys()))
def test_values_in_the_keys(kernel: dict, more: dict, heads: tuple[int, int]) -> None:
    """The kernel for sm_90a, against that for sm_80 too."""
    results = check_replays(Step(kernel, heads, **more))
    other = Step(kernel | {"name": kernel["name"].replace("sm90", "sm80")}, heads, **more)
    limit, of_lse = LIMITS[kernel["dtype"]]
    for number, got in enumerate(results):
        other.load(other.numbers_of(number))
        other()
        torch.testing.assert_close(got[0], other.made[0], rtol=2 * limit, atol=2 * limit)
        torch.testing.assert_close(got[1], other.made[1], rtol=2 * of_lse, atol=2 * of_lse)
