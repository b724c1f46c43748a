"""Decode on the GPU: the list of cases of the CPU kernels against the same reference, and what must hold bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import decode_cases
import numpy as np
import pytest
from decode_cases import DecodeCase
from gpu_kernels import TYPES, chosen
from harness import assert_same_bits, random
from reference import forward

import libflash

torch = pytest.importorskip("torch")
from gpu_case import DTYPES, bits, same_bits  # noqa: E402  (needs torch)
from gpu_decode import KERNELS, LIMITS, NUMPY, SPLITS, decode, every_kernel  # noqa: E402
from test_decode import LENGTHS, cached, in_pages, queries, without_padding  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

CASES = decode_cases.quick()
RUNS = [(case, kernel["name"]) for index, case in enumerate(CASES) for kernel in chosen(KERNELS, case, index)]


def test_every_type_has_kernels() -> None:
    assert {kernel["dtype"] for kernel in KERNELS} == set(TYPES)


@pytest.mark.parametrize(("case", "kernel"), RUNS, ids=[f"{case}-{kernel}" for case, kernel in RUNS])
def test_case(case: DecodeCase, kernel: str) -> None:
    for split in SPLITS:
        x = case.inputs()
        o, lse = decode(x.q, x.k_cache, x.v_cache, kernel=kernel, **split, **x.options)
        case.check(o=o, lse=lse, k_cache=x.k_cache, v_cache=x.v_cache)


@every_kernel
@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 16, 64, 100, 256, 1024])
def test_pages_are_a_contiguous_cache_bit_for_bit(kernel: dict, page_size: int) -> None:
    """Pages of any size in any order; what the table holds behind the last key is no page."""
    dtype = NUMPY[kernel["dtype"]]
    q, (k, v) = queries(dtype), cached(dtype)
    pages, table = in_pages((k, v), page_size)
    for split in SPLITS[1:]:
        options = dict(cache_seqlens=LENGTHS, kernel=kernel["name"], softcap=20.0, **split)
        wanted = decode(q, k, v, **options)
        got = decode(q, *pages, block_table=table, **options)
        assert_same_bits(got[0], wanted[0])
        assert_same_bits(got[1], wanted[1])


@every_kernel
@pytest.mark.parametrize("split", [*SPLITS[1:], {"split_size": 384}], ids=str)
def test_capacity_does_not_show(kernel: dict, split: dict) -> None:
    """However much room there is behind the keys: the same bits, and the room is left as it was."""
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


@every_kernel
@pytest.mark.parametrize("split_size", [128, 512])
@pytest.mark.parametrize("rows", [2, 9])
def test_batch_does_not_show_with_a_split_size(kernel: dict, split_size: int, rows: int) -> None:
    """Alone, in another order, in another batch: a sequence has its own bits."""
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


@every_kernel
@pytest.mark.parametrize("split", [{"num_splits": n} for n in (2, 7, 100, 1024)] + SPLITS[2:], ids=str)
def test_m7_any_split_is_the_unsplit_result(kernel: dict, split: dict) -> None:
    """With more ranges than keys too; a row with a sink and no key as well."""
    dtype = NUMPY[kernel["dtype"]]
    q, (k, v), sink = queries(dtype), cached(dtype), random(6, seed=5)
    options = dict(cache_seqlens=LENGTHS, learnable_sink=sink, kernel=kernel["name"])
    wanted, got = decode(q, k, v, num_splits=1, **options), decode(q, k, v, **split, **options)
    o_limit, lse_limit = LIMITS[kernel["dtype"]]
    np.testing.assert_allclose(got[0].astype(np.float64), wanted[0].astype(np.float64), rtol=o_limit, atol=o_limit)
    np.testing.assert_allclose(got[1], wanted[1], rtol=lse_limit, atol=lse_limit)
    np.testing.assert_allclose(got[1][2], np.broadcast_to(sink[:, None], (6, 2)), rtol=1e-6)
    assert not got[0][2].astype(np.float64).any()


@every_kernel
@pytest.mark.parametrize("rows", [1, 3, 16, 40])
@pytest.mark.parametrize("heads", [(1, 1), (7, 1), (6, 3), (80, 2)], ids=str)
def test_groups_and_rows_fill_tiles(kernel: dict, rows: int, heads: tuple[int, int]) -> None:
    """Query rows of a group share tiles: whole ones, parts, and groups that straddle two."""
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


class Many:
    """Sequences of any length, with and without a step to take in."""

    def __init__(self, kernel: dict, sequences: int, keys: int) -> None:
        self.sequences, self.keys = sequences, keys
        self.kernel, dtype, dim = kernel["name"], DTYPES[kernel["dtype"]], kernel["head_dim"]
        self.generator = torch.Generator("cuda").manual_seed(0)
        shapes = ((1, 16), (keys, 8), (keys, 8), (1, 8), (1, 8))
        self.q, self.k, self.v, k, v = (self.random(sequences, n, h, dim).to(dtype) for n, h in shapes)
        self.news = {"k": k, "v": v}, {f"rotary_{name}": self.random(keys, dim // 4) for name in ("cos", "sin")}

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device="cuda")

    def lengths(self) -> Iterator[torch.Tensor]:
        """Where all are long, where some are short, and where most are empty."""
        for least in (self.keys - 50, 0):
            yield torch.randint(least, self.keys, (self.sequences,), generator=self.generator, device="cuda", dtype=torch.int32)
        yield torch.where(self.random(self.sequences) < 1.0, 0, self.keys - 1).int()

    def decode(
        self, which: slice, lengths: torch.Tensor, caches: list[torch.Tensor], step: bool, **options: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Caches are contiguous, or in pages where there is a table."""
        if step:
            options |= {name: x[which] for name, x in self.news[0].items()} | self.news[1]
        if "block_table" not in options:
            caches = [x[which] for x in caches]
        options |= {"cache_seqlens": lengths[which], "kernel": self.kernel, "return_lse": True}
        return libflash.decode(self.q[which], *caches, **options)


@every_kernel
@pytest.mark.parametrize("split", [{"num_splits": 1}, {"split_size": 512}], ids=str)
def test_more_thread_blocks_than_run_at_once(kernel: dict, split: dict) -> None:
    """Where thread blocks follow each other some begin later, with fewer copies under way: the same bits as where they do not."""
    many = Many(kernel, 48, 1100)
    for lengths in many.lengths():
        for step in (False, True):
            caches, others = ([many.k.clone(), many.v.clone()] for _ in range(2))
            together = many.decode(slice(None), lengths, caches, step, **split)
            for few in map(slice, range(0, 48, 8), range(8, 56, 8)):
                got = many.decode(few, lengths, others, step, **split)
                assert all(same_bits(x, y[few]) for x, y in zip(got, together, strict=True))
            assert all(map(same_bits, caches, others))


@every_kernel
@pytest.mark.parametrize(("sequences", "keys"), [(56, 1100), (16, 2100), (1, 1100)])
@pytest.mark.parametrize("page", [0, 16])
def test_as_many_ranges_as_it_chooses(kernel: dict, sequences: int, keys: int, page: int) -> None:
    """Left to itself it may take two key heads a thread block, in any number of ranges: the result is that of one range."""
    many, limits, which = Many(kernel, sequences, keys), LIMITS[kernel["dtype"]], slice(None)
    for lengths in many.lengths():
        for step in (False, True):
            caches, others = ([many.k.clone(), many.v.clone()] for _ in range(2))
            wanted = many.decode(which, lengths, others, step, num_splits=1)
            options = {}
            if page:
                shape = (-1, page, *many.k.shape[2:])
                padded = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % page)) for x in caches]
                order = torch.randperm(padded[0].shape[0] * padded[0].shape[1] // page, device="cuda")
                caches = [x.reshape(shape)[order] for x in padded]
                options["block_table"] = order.argsort().reshape(sequences, -1).int()
            got = many.decode(which, lengths, caches, step, **options)
            for x, y, limit in zip(got, wanted, limits, strict=True):
                torch.testing.assert_close(x, y, rtol=limit, atol=limit)
            if page:
                caches = [x[options["block_table"].long()].reshape(sequences, -1, *many.k.shape[2:])[:, :keys] for x in caches]
            assert all(map(same_bits, caches, others))


@every_kernel
@pytest.mark.parametrize("ahead", ["kernel", "copy", "fill", "join", "decode"])
@pytest.mark.parametrize("splits", [1, 3])
def test_it_waits_for_what_is_ahead_of_it(kernel: dict, ahead: str, splits: int) -> None:
    """A call may be launched before the work ahead of it has ended, and sees all that this writes, also in a graph."""
    dtype, dim = DTYPES[kernel["dtype"]], kernel["head_dim"]
    generator = torch.Generator("cuda").manual_seed(0)
    q, source, v = (
        torch.randn(48, n, h, dim, generator=generator, device="cuda").to(dtype) for n, h in ((1, 16), (1000, 8), (1000, 8))
    )
    keys, out, first_out = torch.empty_like(source), torch.empty_like(q), torch.empty_like(q)
    length = torch.empty(48, dtype=torch.int32, device="cuda")
    options = {"cache_seqlens": length, "kernel": kernel["name"], "num_splits": splits}
    side = torch.cuda.Stream()

    def attend(query: torch.Tensor, to: torch.Tensor) -> None:
        libflash.decode(query, keys, v, out=to, **options)

    def work(between: Callable[[], None]) -> None:
        main = torch.cuda.current_stream()
        if ahead == "join":
            side.wait_stream(main)
            with torch.cuda.stream(side):
                keys.copy_(source)
            length.fill_(700)
            main.wait_stream(side)
        elif ahead == "kernel":
            length.fill_(900)
            torch.mul(source, 2, out=keys)
        elif ahead == "copy":
            length.fill_(1000)
            keys.copy_(source)
        elif ahead == "fill":
            length.fill_(500)
            keys.zero_()
        else:
            keys.copy_(source)
            length.fill_(1000)
            for _ in range(3):
                between()
                attend(q, first_out)
                between()
                attend(first_out, out)
                between()
                length.sub_(250)
        between()
        attend(q if ahead != "decode" else out, out if ahead != "decode" else first_out)

    def results() -> list[torch.Tensor]:
        return [out.clone(), first_out.clone()]

    def forget() -> None:
        for x in (keys, out, first_out):
            x.fill_(float("nan"))
        length.fill_(1)
        torch.cuda.synchronize()

    forget()
    work(torch.cuda.synchronize)
    torch.cuda.synchronize()
    wanted = results()
    assert not wanted[0].isnan().any()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work(lambda: None)
    for call in (lambda: work(lambda: None), graph.replay) * 3:
        forget()
        call()
        assert all(map(same_bits, results(), wanted))


@every_kernel
@pytest.mark.parametrize("splits", [1, 4])
def test_pages_that_the_call_ahead_writes(kernel: dict, splits: int) -> None:
    """The key that one call appends is the next one's block table, of which it may have read what was there before."""
    dtype, size = DTYPES[kernel["dtype"]], 16
    generator = torch.Generator("cuda").manual_seed(0)
    q, new_v = (torch.randn(1, 1, h, 64, generator=generator, device="cuda").to(dtype) for h in (4, 1))
    keys, values = (torch.randn(1, 3000, 1, 64, generator=generator, device="cuda").to(dtype) for _ in range(2))
    new_k = torch.zeros_like(new_v)
    table, new_table = keys[0, 2000].view(torch.int32), new_k[0, 0].view(torch.int32)
    pages = table.numel()
    caches = [torch.randn(pages, size, 2, 64, generator=generator, device="cuda").to(dtype) for _ in range(2)]
    position = torch.tensor([2000], dtype=torch.int32, device="cuda")
    first_out, out = torch.empty_like(q), torch.empty_like(q)
    own = {"kernel": kernel["name"], "num_splits": splits}

    def both() -> None:
        libflash.decode(q, keys, values, k=new_k, v=new_v, cache_seqlens=position, out=first_out, **own)
        libflash.decode(q, *caches, block_table=table, out=out, **own)

    def shuffle(x: torch.Tensor) -> None:
        x.copy_(torch.randperm(pages, generator=generator, device="cuda", dtype=torch.int32)[None])

    both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        both()
    for call in (both, graph.replay) * 20:
        shuffle(table)
        shuffle(new_table)
        torch.cuda.synchronize()
        call()
        assert torch.equal(table, new_table)
        wanted = libflash.decode(q, *caches, block_table=new_table.clone(), **own)
        assert same_bits(out, wanted)


@every_kernel
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
def test_leftpad_hides_whatever_is_there(kernel: dict, page_size: int | None) -> None:
    dtype = NUMPY[kernel["dtype"]]
    q, (k, v) = queries(dtype), cached(dtype)
    pad = np.array([64, 0, 0, 129, 511, 3], np.int32)
    for b, n in enumerate(pad):
        k[b, :n] = v[b, :n] = np.nan
    where, place = [k, v], {}
    if page_size:
        where, table = in_pages((k, v), page_size)
        place["block_table"] = without_padding(table, pad, page_size)
    limit, _ = LIMITS[kernel["dtype"]]
    for split in SPLITS:
        o, lse = decode(q, *where, cache_seqlens=LENGTHS, cache_leftpad=pad, kernel=kernel["name"], **place, **split)
        for b, (first, last) in enumerate(zip(pad, LENGTHS, strict=True)):
            wanted, wanted_lse = forward(q[b : b + 1], k[b : b + 1, first:last], v[b : b + 1, first:last], causal=True)
            np.testing.assert_allclose(o[b : b + 1].astype(np.float64), wanted, rtol=limit, atol=limit)
            np.testing.assert_allclose(lse[b : b + 1], wanted_lse, rtol=1e-5, atol=1e-5)


@every_kernel
@pytest.mark.parametrize("append", [0, 3])
def test_bad_numbers_on_the_device_reach_nothing(kernel: dict, append: int) -> None:
    """Lengths are cut to the capacity; entries and pages that are not there are absent. What surrounds the cache stays."""
    dtype = DTYPES[kernel["dtype"]]
    generator = torch.Generator("cuda").manual_seed(0)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    around = [made(12, 40, 2, 32) for _ in range(2)]
    before = [x.clone() for x in around]
    caches = [x[4:8, 4:36] for x in around]
    q = made(4, 2, 4, 32)
    new = {"k": made(4, append, 2, 32), "v": made(4, append, 2, 32)} if append else {}
    numbers = torch.tensor([-5, 10, 2**31 - 1, 40], dtype=torch.int32, device="cuda")
    cut = numbers.clamp(0, 32)
    right = [x.clone() for x in caches]
    wanted = libflash.decode(q, *right, cache_seqlens=cut, kernel=kernel["name"], **new)
    got = libflash.decode(q, *caches, cache_seqlens=numbers, kernel=kernel["name"], **new)
    assert same_bits(got, wanted)
    assert all(same_bits(x.contiguous(), y) for x, y in zip(caches, right, strict=True))
    entries = torch.tensor([3, -1, 4, 0], dtype=torch.int32, device="cuda")
    tables = torch.stack([entries.flip(0), entries], 1)
    for place in ({"cache_batch_idx": entries}, {"block_table": tables}):
        lengths = torch.full((4,), 20, dtype=torch.int32, device="cuda")
        out, lse = libflash.decode(q, *caches, cache_seqlens=lengths, return_lse=True, kernel=kernel["name"], **place, **new)
        if "cache_batch_idx" in place:
            assert not out[1:3].any()
            assert (lse[1:3] == -torch.inf).all()
        assert out.isfinite().all()
    for x, y in zip(around, before, strict=True):
        outside = torch.ones(x.shape[:2], dtype=torch.bool, device="cuda")
        outside[4:8, 4:36] = False
        assert torch.equal(bits(x)[outside], bits(y)[outside])


@every_kernel
@pytest.mark.parametrize("place", ["own", "entries", "pages", "leftpad", "pages and leftpad"])
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("append", [1, 3])
def test_rows_that_do_not_fit_are_absent(kernel: dict, append: int, rotary: bool, place: str) -> None:
    """Full and nearly full sequences beside one with room, judged by a cache that has room for all."""
    dtype, capacity, lengths = DTYPES[kernel["dtype"]], 96, [96, 95, 40, 94]
    generator = torch.Generator("cuda").manual_seed(3)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    q, options = made(4, append, 4, 64), {"k": made(4, append, 2, 64), "v": made(4, append, 2, 64), "kernel": kernel["name"]}
    options["cache_seqlens"] = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    if rotary:
        angles = torch.arange(capacity + append, device="cuda")[:, None] * 0.1 ** torch.linspace(0, 3, 16, device="cuda")
        options |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    caches = [made(4, capacity, 2, 64) for _ in range(2)]
    roomy = [torch.cat([x, torch.full_like(x[:, :32], torch.nan)], 1) for x in caches]
    table = torch.arange(24, dtype=torch.int32, device="cuda").reshape(4, 6)
    where = {
        "own": {},
        "entries": {"cache_batch_idx": torch.arange(4, dtype=torch.int32, device="cuda")},
        "pages": {"block_table": table},
        "leftpad": {"cache_leftpad": torch.tensor([3, 0, 40, 90], dtype=torch.int32, device="cuda")},
    }
    where["pages and leftpad"] = where["pages"] | where["leftpad"]
    where = where[place]
    given = [x.reshape(24, 16, 2, 64) if "block_table" in where else x for x in caches]
    wanted_caches = [x.clone() for x in roomy]
    libflash.decode(q, *wanted_caches, **options)
    out, lse = libflash.decode(q, *given, return_lse=True, **where, **options)
    for x, y in zip(caches, wanted_caches, strict=True):
        assert same_bits(x, y[:, :capacity].contiguous())
    # A query row alone, with the keys that it sees as the whole cache.
    turned = {name: options[name] for name in ("rotary_cos", "rotary_sin") if name in options}
    pad = where.get("cache_leftpad", torch.zeros(4, dtype=torch.int32, device="cuda"))
    for i in range(append):
        for b, length in enumerate(lengths):
            keys = slice(int(pad[b]), min(length + i + 1, capacity))
            row = q[b : b + 1, i : i + 1]
            if turned:
                row = turned_by_append(row, length + i, turned)
            alone = [x[b : b + 1, keys].contiguous() for x in wanted_caches]
            wanted, wanted_lse = libflash.attention(row, *alone, return_lse=True)
            limit, _ = LIMITS[kernel["dtype"]]
            torch.testing.assert_close(out[b : b + 1, i : i + 1], wanted, rtol=limit, atol=limit)
            torch.testing.assert_close(lse[b : b + 1, :, i : i + 1], wanted_lse, rtol=1e-4, atol=1e-4)


def turned_by_append(row: torch.Tensor, position: int, tables: dict[str, torch.Tensor]) -> torch.Tensor:
    """A query row as the rotary embedding leaves it: appended as a key to an empty cache whose tables begin at its position."""
    cache = [torch.zeros_like(row) for _ in range(2)]
    here = {name: table[position : position + 1].contiguous() for name, table in tables.items()}
    start = torch.zeros(1, dtype=torch.int32, device="cuda")
    libflash.decode(row, *cache, k=row, v=row, cache_seqlens=start, **here)
    return cache[0]


@every_kernel
def test_a_replayed_graph_sees_new_lengths_and_pages(kernel: dict) -> None:
    dtype = DTYPES[kernel["dtype"]]
    generator = torch.Generator("cuda").manual_seed(0)
    q, new_k, new_v = (torch.randn(3, 1, h, 64, generator=generator, device="cuda").to(dtype) for h in (4, 2, 2))
    caches = [torch.randn(40, 16, 2, 64, generator=generator, device="cuda").to(dtype) for _ in range(2)]
    start = [x.clone() for x in caches]
    table = torch.arange(39, dtype=torch.int32, device="cuda").reshape(3, 13)
    lengths = torch.tensor([5, 100, 0], dtype=torch.int32, device="cuda")
    options = {"k": new_k, "v": new_v, "kernel": kernel["name"], "num_splits": 3}
    out = libflash.decode(q, *caches, cache_seqlens=lengths, block_table=table, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        libflash.decode(q, *caches, cache_seqlens=lengths, block_table=table, out=out, **options)
    for round in range(20):
        lengths.copy_(torch.randint(0, 200, (3,), generator=generator, device="cuda", dtype=torch.int32))
        table.copy_(torch.randperm(39, generator=generator, device="cuda").reshape(3, 13))
        q.copy_(torch.randn(q.shape, generator=generator, device="cuda"))
        for x, y in zip(caches, start, strict=True):
            x.copy_(y)
        graph.replay()
        others = [x.clone() for x in start]
        wanted = libflash.decode(q, *others, cache_seqlens=lengths, block_table=table, **options)
        assert same_bits(out, wanted), round
        assert all(same_bits(x, y) for x, y in zip(caches, others, strict=True))


@every_kernel
def test_any_alignment(kernel: dict) -> None:
    """Rows that cannot be moved 16 bytes at a time: the same numbers."""
    dtype = DTYPES[kernel["dtype"]]
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(2, n, h, 50, generator=generator, device="cuda").to(dtype) for n, h in ((2, 4), (300, 2), (300, 2)))
    lengths = torch.tensor([300, 77], dtype=torch.int32, device="cuda")

    def shifted(x: torch.Tensor) -> torch.Tensor:
        place = torch.full((*x.shape[:-1], 53), torch.nan, dtype=dtype, device="cuda")
        place[..., 1:51] = x
        return place[..., 1:51]

    aligned = [torch.nn.functional.pad(x, (0, 6)).contiguous() for x in (q, k, v)]
    out = shifted(torch.zeros(2, 2, 4, 50, device="cuda", dtype=dtype))
    options = {"cache_seqlens": lengths, "kernel": kernel["name"], "softmax_scale": 0.2}
    libflash.decode(*(shifted(x) for x in (q, k, v)), out=out, **options)
    wanted = libflash.decode(*aligned, **options)
    assert same_bits(out.contiguous(), wanted[..., :50].contiguous())


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


def test_more_ranges_than_thread_blocks_can_be_counted_are_refused() -> None:
    pages = torch.zeros(1, 16, 1, 64, dtype=torch.bfloat16, device="cuda")
    table = torch.zeros(1, 1 << 20, dtype=torch.int32, device="cuda").expand(70000, -1)
    q = torch.zeros(70000, 1, 1, 64, dtype=torch.bfloat16, device="cuda")
    lengths = torch.ones(70000, dtype=torch.int32, device="cuda")
    with pytest.raises(libflash.UnsupportedError, match=r"split_size: .*131072 ranges"):
        libflash.decode(q, pages, pages.clone(), block_table=table, cache_seqlens=lengths, split_size=128)
