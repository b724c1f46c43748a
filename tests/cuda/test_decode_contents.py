"""Decode with numbers out of range in device memory: prefix sums, padding, positions, tree bits. The results are those of the
clamped numbers, and no valid key of the caches changes.

The CPU refuses such numbers. There the calls get the clamped ones, which shows that the rest of each test is right.
"""

from __future__ import annotations

from typing import Any

import pytest
from gpu_kernels import device_of, in_place_of, of_many_rows, parameters

import libflash

torch = pytest.importorskip("torch")
from gpu_case import bits, same_bits  # noqa: E402  (needs torch)
from gpu_codes import TORCH_CODES  # noqa: E402
from gpu_decode import KERNELS_AND_MANY_ROWS, ints, normal  # noqa: E402

every_kernel = pytest.mark.parametrize("kernel", parameters([*KERNELS_AND_MANY_ROWS, in_place_of("decode")]))
LARGEST = 2**31 - 1
LENGTHS, CAPACITY, HEADS_Q, HEADS_K, DIM = (20, 9, 30, 7, 31), 48, 4, 2, 64

Options = dict[str, Any]


def unchecked(kernel: dict, given: tuple[int, ...], clamped: tuple[int, ...]) -> torch.Tensor:
    """Numbers that only a GPU takes as they are."""
    return ints(kernel, *(clamped if device_of(kernel) == "cpu" else given))


def caches(kernel: dict) -> list[torch.Tensor]:
    return [normal(kernel, len(LENGTHS), CAPACITY, HEADS_K, DIM, seed=seed) for seed in (1, 2)]


def run(kernel: dict, q: torch.Tensor, before: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    """out and lse, NaN where nothing was written, and the caches after the call."""
    own = [x.clone() for x in before]
    out = torch.full_like(q, torch.nan)
    lse = torch.full((*q.shape[:-3], q.shape[-2], q.shape[-3]), torch.nan, device=q.device)
    given = {"cache_seqlens": ints(kernel, *LENGTHS), "causal": True, **options}
    libflash.decode(q, *own, out=out, lse=lse, return_lse=True, kernel=kernel["name"], **given)
    return [out, lse, *own]


def check_same(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert [same_bits(a, b) for a, b in zip(got, wanted, strict=True)] == [True] * len(wanted)


def changed_rows(after: torch.Tensor, before: torch.Tensor) -> set[tuple[int, int]]:
    return {(b, row) for b, row in (bits(after) != bits(before)).any(-1).any(-1).nonzero().tolist()}


def angles(kernel: dict, rows: int, more: int = 0) -> Options:
    """Rotary tables with `rows` rows and, after them, the last row `more` times."""
    at = torch.arange(rows).clamp(max=rows - 1)[:, None] * 0.1 ** torch.linspace(0, 3, 16)
    at = torch.cat([at, at[-1:].expand(more, -1)])
    return {f"rotary_{name}": f(at).to(device_of(kernel)) for name, f in (("cos", torch.cos), ("sin", torch.sin))}


# Entries below 0 and above the 8 rows. The first two sequences end before their begin or at it, and so does the fourth.
STARTS, CLAMPED = (-1, -9, 3, LARGEST, 20, 2**30), (0, 0, 3, 8, 8, 8)
ASCENDING = (0, 1, 2, 2, 5, 6)


@every_kernel
@pytest.mark.parametrize("split", [{}, {"num_splits": 3}], ids=str)
@pytest.mark.parametrize("which", ["both", "queries", "new rows"])
def test_prefix_sums(kernel: dict, which: str, split: dict) -> None:
    """Entries are clamped to the rows of their tensor, and a sequence whose end is before its begin is empty. Each sequence
    appends exactly its rows.
    """
    before, few = caches(kernel), ints(kernel, *ASCENDING)
    q, k, v = (normal(kernel, 8, heads, DIM, seed=seed) for heads, seed in ((HEADS_Q, 3), (HEADS_K, 4), (HEADS_K, 5)))
    results = []
    for starts in (unchecked(kernel, STARTS, CLAMPED), ints(kernel, *CLAMPED)):
        given = {"cu_seqlens_q": few if which == "new rows" else starts, "k": k, "v": v}
        if which != "both":
            given["cu_seqlens_new"] = starts if which == "new rows" else few
        results.append(run(kernel, q, before, **given, **split, **angles(kernel, CAPACITY)))
    check_same(*results)
    out, _, *after = results[0]
    queries, news = (ASCENDING if which == other else CLAMPED for other in ("new rows", "queries"))
    assert out[: queries[-1]].isfinite().all()
    assert out[queries[-1] :].isnan().all()
    appended = [(b, i) for b in range(len(LENGTHS)) for i in range(news[b], news[b + 1])]
    places = [(b, LENGTHS[b] + i - news[b]) for b, i in appended]
    for x, y in zip(after, before, strict=True):
        assert changed_rows(x, y) == set(places)
    for (_, i), (b, row) in zip(appended, places, strict=True):
        assert same_bits(after[1][b, row], v[i])


@every_kernel
@pytest.mark.parametrize("split", [{}, {"num_splits": 1}, {"num_splits": 3}], ids=str)
@pytest.mark.parametrize("which", ["queries", "both", "new rows"])
@pytest.mark.parametrize(
    ("starts", "in_order", "turn"),
    # Entries of empty sequences inside the rows of another one; the rows of the first sequence after those of the fourth.
    [((0, 3, 8, 5, -2, -7), (0, 3, 8, 8, 8, 8), 0), ((4, 8, 2, 0, 3, -7), (0, 4, 4, 4, 7, 7), 4)],
    ids=["inside", "after"],
)
def test_prefix_sums_that_descend(
    kernel: dict, starts: tuple[int, ...], in_order: tuple[int, ...], turn: int, which: str, split: dict
) -> None:
    """Each sequence has its rows, wherever they are among those of the others, with the same bits as in order."""
    before, turned = caches(kernel), 0 if device_of(kernel) == "cpu" else turn
    q, k, v = (normal(kernel, 8, heads, DIM, seed=seed) for heads, seed in ((HEADS_Q, 3), (HEADS_K, 4), (HEADS_K, 5)))
    of_queries = 0 if which == "new rows" else 1
    results = []
    for sums, turns in ((unchecked(kernel, starts, in_order), turn - turned), (ints(kernel, *in_order), turn)):
        given: Options = {"cu_seqlens_q": sums if of_queries else ints(kernel, *ASCENDING)}
        if which != "queries":
            given |= {"k": k.roll(turns, 0), "v": v.roll(turns, 0), **angles(kernel, CAPACITY)}
        if which == "new rows":
            given["cu_seqlens_new"] = sums
        results.append(run(kernel, q.roll(turns * of_queries, 0), before, **given, **split))
    (out, lse, *after), wanted = results
    check_same([out.roll(turned * of_queries, 0), lse.roll(turned * of_queries, -1), *after], wanted)
    assert wanted[0].isfinite().all(-1).all(-1).sum() == (in_order if of_queries else ASCENDING)[-1]
    places = {(b, n + i) for b, n in enumerate(LENGTHS) for i in range(in_order[b + 1] - in_order[b]) if which != "queries"}
    for x, y in zip(after, before, strict=True):
        assert changed_rows(x, y) == places


@every_kernel
@pytest.mark.parametrize("append", [0, 1, 3])
@pytest.mark.parametrize("page", [0, 16])
def test_padding(kernel: dict, page: int, append: int) -> None:
    """cache_leftpad is clamped to 0 and the number of keys. A sequence that is all padding has no keys; its new rows are written
    nevertheless.
    """
    before, q = caches(kernel), normal(kernel, len(LENGTHS), 2, HEADS_Q, DIM, seed=3)
    options: Options = {}
    if append:
        options |= {name: normal(kernel, len(LENGTHS), append, HEADS_K, DIM, seed=seed) for name, seed in (("k", 4), ("v", 5))}
    if page:
        table = torch.arange(len(LENGTHS) * CAPACITY // page, dtype=torch.int32, device=q.device).flip(0)
        options["block_table"] = table.view(len(LENGTHS), -1).contiguous()
        before = [x.reshape(-1, page, HEADS_K, DIM) for x in before]
    on_cpu = device_of(kernel) == "cpu"  # which refuses padding of new rows, too
    keys = [n + append * (not on_cpu) for n in LENGTHS]
    given, clamped = (-5, LARGEST, 25, keys[3] + 1, -LARGEST), (0, keys[1], 25, keys[3], 0)
    pads = unchecked(kernel, given, clamped), ints(kernel, *clamped)
    got, wanted = (run(kernel, q, before, cache_leftpad=pad, **options) for pad in pads)
    check_same(got, wanted)
    out, lse, *after = got
    for b in range(len(LENGTHS)):
        hidden = b in (1, 3) and not (on_cpu and append)
        assert bool((out[b] == 0).all()) == hidden
        assert bool((lse[b] == -torch.inf).all()) == hidden
    rows = {(b, LENGTHS[b] + i) for b in range(len(LENGTHS)) for i in range(append)}
    if page:
        columns = CAPACITY // page
        rows = {(len(LENGTHS) * columns - 1 - b * columns - row // page, row % page) for b, row in rows}
    for x, y in zip(after, before, strict=True):
        assert changed_rows(x, y) == rows


@every_kernel
@pytest.mark.parametrize("append", [1, 3])
@pytest.mark.parametrize("code", ["", "e4m3"])
def test_positions_past_the_rotary_tables(kernel: dict, code: str, append: int) -> None:
    """They use the last row of the tables: in queries and new keys, by their number in the sequence and by q_positions."""
    if code and (kernel["dtype"] == "f32" or of_many_rows(kernel)):
        pytest.skip("the kernel has no caches of 8 bits")
    before, rows = caches(kernel), 24
    options: Options = {}
    if code:
        before = [x.to(TORCH_CODES[code]) for x in before]
        options = {name: torch.full((1,), 0.5, device=before[0].device) for name in ("k_scale", "v_scale")}
    q = normal(kernel, len(LENGTHS), append, HEADS_Q, DIM, seed=3)
    news = {name: normal(kernel, len(LENGTHS), append, HEADS_K, DIM, seed=seed) for name, seed in (("k", 4), ("v", 5))}
    options |= news
    short, long = angles(kernel, rows), angles(kernel, rows, more=40)
    tables = long if device_of(kernel) == "cpu" else short
    results = [run(kernel, q, before, **options, **these) for these in (tables, long)]
    check_same(*results)
    unlimited = run(kernel, q, before, **options, **angles(kernel, CAPACITY))
    different = [not same_bits(a, b) for a, b in zip(results[0][0], unlimited[0], strict=True)]
    assert different == [n + append > rows for n in LENGTHS]
    given = [x for b in range(len(LENGTHS)) for x in ((LARGEST, 3, 23), (-LARGEST, 24, 2**30), (0, 1, 30))[b % 3][:append]]
    clamped = [min(max(x, 0), rows - 1) for x in given]
    shape = (len(LENGTHS), append)
    at = ints(kernel, *clamped).view(shape) if device_of(kernel) == "cpu" else ints(kernel, *given).view(shape)
    got = run(kernel, q, before, **options, **short, q_positions=at)
    wanted = run(kernel, q, before, **options, **short, q_positions=ints(kernel, *clamped).view(shape))
    check_same(got, wanted)
    assert not same_bits(got[0], results[0][0])


@every_kernel
@pytest.mark.parametrize("packed", [False, True])
def test_rows_beyond_the_words_of_a_tree(kernel: dict, packed: bool) -> None:
    """Bits that tree_mask does not have are 0: of 40 rows over one word all see the first 32 of the last 40 keys. So the other
    keys have no influence.
    """
    rows, keys = 40, 45
    before, q = caches(kernel), normal(kernel, len(LENGTHS), rows, HEADS_Q, DIM, seed=3)
    lengths = ints(kernel, *[keys] * len(LENGTHS))
    one = torch.full((len(LENGTHS) * rows, 1), -1, dtype=torch.int32, device=q.device)
    two = torch.cat([one, torch.zeros_like(one)], 1)
    options: Options = {"cache_seqlens": lengths}
    if packed:
        q = q.reshape(-1, HEADS_Q, DIM)
        options["cu_seqlens_q"] = ints(kernel, *range(0, len(q) + 1, rows))
    words = two if device_of(kernel) == "cpu" else one
    got, wanted = (run(kernel, q, before, tree_mask=mask, **options) for mask in (words, two))
    check_same(got, wanted)
    others = [x.clone() for x in before]
    for x, seed in zip(others, (6, 7), strict=True):
        x[:, keys - 8 : keys] = normal(kernel, len(LENGTHS), 8, HEADS_K, DIM, seed=seed)
    again = run(kernel, q, others, tree_mask=words, **options)
    check_same(again[:2], got[:2])
    for x in others:
        x[:, keys - 9 : keys] = 0
    assert not same_bits(run(kernel, q, others, tree_mask=words, **options)[0], got[0])
