"""Keys that sequences share, on a GPU: the hint changes no bit where it is used; explain says where."""

from __future__ import annotations

from typing import Any

import pytest

import libflash

torch = pytest.importorskip("torch")
from gpu_case import same_bits  # noqa: E402  (needs torch)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

Tensor = Any
HEADS_K, CAPACITY = 8, 2560
MOST_OWN = 300
OF_ITS_OWN = [k["name"] for k in libflash.info()["kernels"] if k["operation"] == "decode_prefix" and k["usable"]]
BY_SM90 = "by decode_prefix_sm90" if OF_ITS_OWN else ""


def ints(*x: int) -> Tensor:
    return torch.tensor(x, device="cuda", dtype=torch.int32)


class Step:
    """Sequences whose first keys are in the same pages, by `sizes` and `lens` of the groups; the others share nothing."""

    def __init__(
        self,
        sizes: tuple[int, ...],
        lens: tuple[int, ...],
        alone: int,
        page: int,
        rows: int,
        group: int,
        dim: int,
        dtype: Any = torch.bfloat16,
    ) -> None:
        torch.manual_seed(7)
        self.batch, columns = sum(sizes) + alone, CAPACITY // page
        self.groups, self.lens = torch.tensor([0, *sizes], device="cuda").cumsum(0).int(), ints(*lens)
        self.table = torch.randperm(self.batch * columns, device="cuda").int().view(self.batch, columns)
        self.sharing = torch.zeros(self.batch, dtype=torch.int64, device="cuda")
        for i, keys in enumerate(lens):
            first, last = self.groups[i : i + 2].tolist()
            self.sharing[first:last] = keys
            self.table[first:last, : keys // page] = self.table[first, : keys // page].clone()
            if keys % page:  # the last page: its other keys are the same, too
                self.table[first:last, keys // page] = self.table[first, keys // page].clone()
        own = torch.randint(page, MOST_OWN, (self.batch,), device="cuda")
        self.keys = (self.sharing + own).int()
        made = [torch.randn(self.batch * columns, page, HEADS_K, dim, device="cuda") for _ in range(2)]
        self.caches = [x.to(dtype) for x in made]
        self.q = (4 * torch.randn(self.batch, rows, HEADS_K * group, dim, device="cuda")).to(dtype)

    @property
    def hint(self) -> dict[str, Tensor]:
        return {"shared_groups": self.groups, "shared_lens": self.lens}

    def arguments(self, **options: Any) -> dict[str, Any]:
        return {"cache_seqlens": self.keys, "block_table": self.table, "return_lse": True, **options}

    def uses(self, what: str = "shared keys", **options: Any) -> bool:
        given = self.arguments(**options)
        del given["return_lse"]
        return what in libflash.explain(self.q, *self.caches, op="decode", **given)

    def decode(self, caches: list[Tensor] | None = None, **options: Any) -> tuple[Tensor, ...]:
        return libflash.decode(self.q, *(caches or self.caches), **self.arguments(**options))


def check(step: Step, **options: Any) -> None:
    assert step.uses(**options, **step.hint) != options.get("invariant", False)  # invariant rows have kernels of their own
    for got, wanted in zip(step.decode(**options, **step.hint), step.decode(**options), strict=True):
        assert same_bits(got, wanted)


SHAPES = {
    "one group": ((64,), (2048,), 0, 16, 1, 4, 128),
    "three groups": ((9, 1, 30), (777, 2048, 2000), 5, 16, 1, 4, 128),
    "large pages": ((40,), (2100,), 3, 64, 1, 1, 128),
    "no page has two keys": ((40,), (1500,), 0, 1, 1, 8, 64),
    "rows of 3 heads": ((25, 20), (2048, 64), 0, 16, 5, 3, 128),
    "16 rows": ((20, 20), (1999, 2030), 2, 256, 2, 8, 64),
    "short keys": ((40, 40), (15, 1), 0, 16, 1, 4, 128),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "softcap and sink": {"softcap": 5.0, "learnable_sink": torch.linspace(-2, 2, 8)},
    "three splits": {"num_splits": 3},
    "splits of 256": {"split_size": 256},
    "invariant": {"invariant": True, "causal": True},
    "invariant, splits of 512": {"invariant": True, "split_size": 512},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_hint_changes_no_bit(shape: str, option: str) -> None:
    step, options = Step(*SHAPES[shape]), dict(OPTIONS[option])
    if "learnable_sink" in options:
        options["learnable_sink"] = options["learnable_sink"].to("cuda").repeat(step.q.shape[2] // 8)
    check(step, **options)


@pytest.mark.skipif(BY_SM90 == "", reason="the GPU has no kernel of its own for shared keys")
@pytest.mark.parametrize("scale", [None, 0.5])  # with 0.5 maxima are raised in many tiles
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [128, 64, 72])
def test_both_kernels_have_the_same_bits(dtype: Any, dim: int, scale: float | None) -> None:
    """That of sm90 and that of sm80, which takes the calls whose kernel is requested, for one to many tiles of rows."""
    sm80 = {"kernel": f"decode_sm80_{'f16' if dtype == torch.float16 else 'bf16'}_d{128 if dim > 64 else 64}"}
    for sizes, rows, group in (((64,), 1, 4), ((70, 9, 50), 1, 8), ((40, 21), 5, 3), ((30,), 2, 8), ((40,), 1, 1)):
        step = Step(sizes, (2048, 900, 1999)[: len(sizes)], 2, 16, rows, group, dim, dtype)
        options = {"causal": True, "softmax_scale": scale, **step.hint}
        assert step.uses(BY_SM90, **options)
        assert step.uses(**options, **sm80)
        assert not step.uses(BY_SM90, **options, **sm80)
        got, wanted = step.decode(**options), step.decode(**options, **sm80)
        assert all(same_bits(a, b) for a, b in zip(got, wanted, strict=True))


def test_equal_lengths_of_one_wave() -> None:
    """Splits end at the same keys in all sequences, and a thread block may take two key heads."""
    for batch in (9, 16, 33, 64, 128):
        step = Step((batch,), (2048,), 0, 16, 1, 4, 128)
        step.keys.fill_(2048 + 64)
        check(step)


def test_an_entry_of_a_contiguous_cache() -> None:
    step = Step((40,), (2000,), 0, 16, 1, 4, 128)
    caches = [x[: 2 * CAPACITY // 16].view(2, CAPACITY, HEADS_K, 128) for x in step.caches]
    step.caches, options = caches, {"block_table": None, "cache_batch_idx": torch.ones(40, device="cuda", dtype=torch.int32)}
    check(step, **options)


@pytest.mark.parametrize("invariant", [False, True])
def test_rows_are_appended_and_rotated(invariant: bool) -> None:
    step = Step((20, 30), (2000, 512), 3, 16, 1, 4, 128)
    new = {name: torch.randn(step.batch, 1, HEADS_K, 128, device="cuda", dtype=torch.bfloat16) for name in ("k", "v")}
    angles = torch.arange(CAPACITY, device="cuda")[:, None] * 0.01 * torch.arange(64, device="cuda")
    options = {**new, "rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "causal": True, "invariant": invariant}
    assert step.uses(**options, **step.hint) != invariant
    results = []
    for hint in ({}, step.hint):
        own = [x.clone() for x in step.caches]
        results.append([*step.decode(own, **options, **hint), *own])
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


def test_replayed_with_other_lengths_and_groups() -> None:
    """Captured once. The hint is read on the device; without shared keys the result is that of no hint, too."""
    step = Step((24, 40), (2048, 1000), 0, 16, 1, 4, 128)
    step.decode(**step.hint)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step.decode(**step.hint)
    for groups, lens, own in (
        ((0, 24, 64), (2048, 1000), 5),
        ((0, 20, 24), (1900, 999), 64),
        ((3, 24, 24), (17, 500), 1),
        ((0, 0, 0), (0, 0), 9),
        ((30, 40, 64), (1000, 0), 100),
    ):
        step.groups.copy_(ints(*groups)), step.lens.copy_(ints(*lens))
        step.keys.copy_((step.sharing + own).int())
        wanted = step.decode()
        for _ in range(2):
            graph.replay()
            assert all(same_bits(a, b) for a, b in zip(got, wanted, strict=True)), (groups, lens)


@pytest.mark.parametrize(
    ("groups", "lens"),
    [((0, 90000, -5), (1 << 30, 4000)), ((50, 20, 64), (-1, 2500)), ((0, 30, 64), (2560, 2560)), ((-9, -9, 1 << 30), (7, 2000))],
)
def test_a_wrong_hint_touches_nothing_else(groups: tuple[int, ...], lens: tuple[int, ...]) -> None:
    """The caches do not change, and a later call with a true hint has its results."""
    step = Step((24, 30), (2048, 1000), 10, 16, 1, 4, 128)
    before, wanted = [x.clone() for x in step.caches], step.decode()
    step.groups.copy_(ints(*groups)), step.lens.copy_(ints(*lens))
    step.decode(**step.hint)
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(before, step.caches, strict=True))
    step.groups.copy_(ints(0, 24, 54)), step.lens.copy_(ints(2048, 1000))
    assert all(same_bits(a, b) for a, b in zip(step.decode(**step.hint), wanted, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_false_hint_changes_only_its_groups(dtype: Any) -> None:
    """Members of the first group have pages of their own. They get the first member's keys; the others have their results."""
    size, keys = 24, 2048
    step = Step((size, 30), (keys, 1000), 10, 16, 1, 4, 128, dtype)
    assert step.uses(**step.hint)
    shared, before = step.table.clone(), [x.clone() for x in step.caches]
    step.table[1:size, : keys // 16] = shared[size + 30 :, : keys // 16].repeat(3, 1)[: size - 1]
    wanted, got = step.decode(), step.decode(**step.hint)
    for a, b in zip(got, wanted, strict=True):
        assert same_bits(a[0], b[0])
        assert same_bits(a[size:], b[size:])
        assert not any(same_bits(x, y) for x, y in zip(a[1:size], b[1:size], strict=True))
    step.table.copy_(shared)  # now the hint is true
    for a, b in zip(got, step.decode(), strict=True):
        assert same_bits(a, b)
    assert all(torch.equal(x, y) for x, y in zip(before, step.caches, strict=True))


def test_a_hint_of_too_many_keys_changes_only_its_groups() -> None:
    """More keys than a member has, and than the cache has: the other sequences have their results, and all are finite."""
    step = Step((24, 30), (2048, 1000), 10, 16, 1, 4, 128)
    wanted, before = step.decode(), [x.clone() for x in step.caches]
    for lens in ((2500, 1000), (1 << 30, 1000), (2**31 - 1, 1000)):
        step.lens.copy_(ints(*lens))
        got = step.decode(**step.hint)
        for a, b in zip(got, wanted, strict=True):
            assert same_bits(a[24:], b[24:])
            assert a.isfinite().all()
        assert all(torch.equal(x, y) for x, y in zip(before, step.caches, strict=True))


def test_where_the_hint_is_ignored() -> None:
    """Results are those without it."""
    step = Step((64,), (2048,), 0, 16, 1, 4, 128)
    slopes = torch.linspace(0.01, 0.1, 32, device="cuda")
    for options in ({"window_size": (1000, 0)}, {"alibi_slopes": slopes}):
        assert not step.uses(**options, **step.hint)
        got, wanted = step.decode(**options, **step.hint), step.decode(**options)
        assert all(same_bits(a, b) for a, b in zip(got, wanted, strict=True))
    pairs = Step((2,) * 20, (2048,) * 20, 0, 16, 1, 4, 128)
    assert not pairs.uses(**pairs.hint)
