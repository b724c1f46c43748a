"""Decode with rows of any lengths on the GPU: bits that must be the same, graphs, padding, and bad contents of lengths.

The cases "packed", "positions" and "tree" of test_decode.py compare results with the oracle; here longer chunks are compared with
the CPU.
"""

from __future__ import annotations

import numpy as np
import pytest
from harness import assert_same_bits, random
from sequences import cu_seqlens

import libflash

torch = pytest.importorskip("torch")
from gpu_case import to_device, to_numpy  # noqa: E402  (needs torch)
from gpu_decode import KERNELS, LIMITS, NUMPY, decode, every_kernel, every_kernel_and_many_rows  # noqa: E402
from gpu_kernels import parameters  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

CACHED, ROWS = np.array([700, 1, 0, 129, 512, 300], np.int32), (1, 3, 0, 70, 2, 33)
PADS = np.array([650, 1, 0, 17, 64, 290], np.int32)
HEADS_Q, HEADS_K, DIM, CAPACITY, PAGE = 6, 2, 48, 800, 16
# One kernel of each type and width with few registers to spare; graphs need no more.
SOME = [k for k in KERNELS if (k["dtype"], k["head_dim"]) in {("bf16", 64), ("f16", 128), ("f32", 256)}]


def rows(count: int, heads: int, seed: int, dtype: np.dtype) -> np.ndarray:
    return random(count, heads, DIM, seed=seed).astype(dtype)


def caches(dtype: np.dtype) -> list[np.ndarray]:
    """Keys and values for CACHED; NaN after them."""
    made = [random(len(CACHED), CAPACITY, HEADS_K, DIM, seed=seed).astype(dtype) for seed in (1, 2)]
    for x in made:
        for b, n in enumerate(CACHED):
            x[b, n:] = np.nan
    return made


def step(dtype: np.dtype, order: list[int], paged: bool, leftpad: bool = False) -> tuple[tuple, dict]:
    """Arrays and options of a call with the sequences in this order; their rows are the same in every order."""
    start = cu_seqlens(ROWS)
    at = np.concatenate([np.arange(start[b], start[b + 1]) for b in order])
    total, own = sum(ROWS), caches(dtype)
    options = {"cache_batch_idx": np.array(order, np.int32)}
    if leftpad:
        for x in own:
            for b, pad in enumerate(PADS):
                x[b, :pad] = np.nan
    if paged:
        own = [x.reshape(-1, PAGE, HEADS_K, DIM) for x in own]
        table = np.arange(len(own[0]), dtype=np.int32).reshape(len(CACHED), -1)[order]
        options = {"block_table": np.ascontiguousarray(table)}
    if leftpad:
        options["cache_leftpad"] = PADS[order]
    options |= {name: rows(total, HEADS_K, seed, dtype)[at] for name, seed in (("k", 4), ("v", 5))}
    options |= {"cache_seqlens": CACHED[order], "cu_seqlens_q": cu_seqlens(tuple(ROWS[b] for b in order))}
    return (rows(total, HEADS_Q, 3, dtype)[at], *own), options


@every_kernel_and_many_rows
@pytest.mark.parametrize(
    ("paged", "leftpad"), [(False, False), (True, False), (True, True)], ids=["contiguous", "paged", "leftpad"]
)
def test_a_sequence_has_the_same_bits_in_any_order(kernel: dict, paged: bool, leftpad: bool) -> None:
    """With a split size. The CPU gives the result; appended rows have the same bits there."""
    dtype = NUMPY[kernel["dtype"]]
    more = dict(window_size=(400, 0), softcap=20.0, learnable_sink=random(HEADS_Q, seed=9))
    first = None
    for order in ([0, 1, 2, 3, 4, 5], [3, 2, 5, 0, 4, 1]):
        arrays, options = step(dtype, order, paged, leftpad)
        got = decode(*arrays, split_size=256, kernel=kernel["name"], **options, **more)
        begin = options["cu_seqlens_q"]
        by_sequence = {b: [got[0][begin[i] : begin[i + 1]], got[1][:, begin[i] : begin[i + 1]]] for i, b in enumerate(order)}
        first = first or (by_sequence, arrays[1:])
        for b, (o, lse) in by_sequence.items():
            assert_same_bits(o, first[0][b][0])
            assert_same_bits(np.ascontiguousarray(lse), np.ascontiguousarray(first[0][b][1]))
        for cache, other in zip(arrays[1:], first[1], strict=True):
            assert_same_bits(cache, other)
    arrays, options = step(dtype, order, paged, leftpad)
    wanted, wanted_lse = libflash.decode(*arrays, return_lse=True, **options, **more)
    o_limit = 2 * LIMITS[kernel["dtype"]][0]
    np.testing.assert_allclose(got[0].astype(np.float32), wanted.astype(np.float32), rtol=o_limit, atol=o_limit)
    np.testing.assert_allclose(got[1], wanted_lse, rtol=2e-5, atol=2e-5)
    for cache, other in zip(first[1], arrays[1:], strict=True):
        assert_same_bits(cache, other)


@every_kernel
def test_a_chain_is_the_causal_rule(kernel: dict) -> None:
    """Bit for bit with a split size: 70 rows in a tree, at the positions that rows have without them."""
    dtype, count = NUMPY[kernel["dtype"]], 70
    q = rows(count, HEADS_Q, 3, dtype)
    own = [x[:1] for x in caches(dtype)]
    bits = np.tril(np.ones((count, 96), bool)).reshape(count, 3, 32) * (1 << np.arange(32, dtype=np.uint64))
    chain = bits.sum(-1).astype(np.uint32).view(np.int32)
    positions = np.arange(700 - count, 700, dtype=np.int32)
    slopes = random(HEADS_Q, seed=4) ** 2
    options = dict(cache_seqlens=CACHED[:1], cu_seqlens_q=cu_seqlens((count,)), kernel=kernel["name"], split_size=256)
    for more in ({}, {"alibi_slopes": slopes, "window_size": (100, 0)}):
        wanted = decode(q, *own, causal=True, **options, **more)
        placed = {"q_positions": positions} if more else {}
        got = decode(q, *own, tree_mask=chain, causal=False, **placed, **options, **more)
        assert_same_bits(got[0], wanted[0])
        assert_same_bits(got[1], wanted[1])


STEPS = [ROWS, (0, 0, 0, 0, 0, 0), (90, 0, 0, 0, 0, 0), (1, 1, 1, 1, 1, 1), (0, 0, 0, 0, 100, 4), ROWS]


@pytest.mark.parametrize("kernel", parameters(SOME))
@pytest.mark.parametrize("splits", [{}, {"num_splits": 4}], ids=str)
def test_replays_with_other_lengths(kernel: dict, splits: dict) -> None:
    """A captured call is right for any lengths, cached keys and tables. Rows of no sequence are not written, and tables of
    sequences without rows and keys are not read.
    """
    dtype, total = NUMPY[kernel["dtype"]], sum(ROWS)
    q, k, v = (rows(total, heads, seed, dtype) for heads, seed in ((HEADS_Q, 3), (HEADS_K, 4), (HEADS_K, 5)))
    pages = [x.reshape(-1, PAGE, HEADS_K, DIM) for x in caches(dtype)]
    table = np.arange(len(pages[0]), dtype=np.int32).reshape(len(CACHED), -1)
    angles = np.arange(CAPACITY)[:, None] * 0.1 ** np.linspace(0, 4, DIM // 2)
    angle_tables = {"rotary_cos": np.cos(angles).astype(np.float32), "rotary_sin": np.sin(angles).astype(np.float32)}
    tables = {name: to_device(array, "cuda") for name, array in angle_tables.items()}
    on_gpu = {"q": q, "k": k, "v": v, "k_cache": pages[0], "v_cache": pages[1], "block_table": table, "cache_seqlens": CACHED}
    x = {name: to_device(array, "cuda") for name, array in on_gpu.items()}
    starts = to_device(cu_seqlens(ROWS), "cuda")
    out, lse = torch.empty_like(x["q"]), torch.empty(HEADS_Q, total, device="cuda")

    def call(into: tuple[torch.Tensor, torch.Tensor], **arrays: torch.Tensor) -> None:
        given = {**x, **arrays}
        libflash.decode(given.pop("q"), given.pop("k_cache"), given.pop("v_cache"), cu_seqlens_q=starts, out=into[0], lse=into[1],
                        return_lse=True, causal=True, kernel=kernel["name"], **given, **tables, **splits)  # fmt: skip

    call((out, lse))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        call((out, lse))
    for lengths in STEPS:
        cached = np.where(np.array(lengths) > 0, CACHED, 0).astype(np.int32)
        own_table = np.where(np.array(lengths)[:, None] > 0, table, -1).astype(np.int32)
        changed = {"block_table": own_table, "cache_seqlens": cached, "k_cache": pages[0], "v_cache": pages[1]}
        for name, array in changed.items():
            x[name].copy_(to_device(array, "cuda"))
        starts.copy_(to_device(cu_seqlens(lengths), "cuda"))
        out.fill_(7), lse.fill_(7)
        graph.replay()
        again = {name: to_device(changed[name], "cuda") for name in ("k_cache", "v_cache")}
        wanted = torch.full_like(out, 7), torch.full_like(lse, 7)
        call(wanted, **again)
        for got, other in zip((out, lse), wanted, strict=True):
            assert torch.equal(got, other)
        for name, other in again.items():
            assert_same_bits(to_numpy(x[name], dtype), to_numpy(other, dtype))
        used = sum(lengths)
        assert (out[used:] == 7).all()
        assert (lse[:, used:] == 7).all()
        assert bool(torch.isfinite(out[:used]).all())
        host = [array.copy() for array in pages]
        exact = libflash.decode(
            q[:used], *host, k=k[:used], v=v[:used], cu_seqlens_q=cu_seqlens(lengths), cache_seqlens=cached, causal=True,
            block_table=np.maximum(own_table, 0), **angle_tables,
        )  # fmt: skip
        limit, got = 2 * LIMITS[kernel["dtype"]][0], to_numpy(out[:used], dtype)
        np.testing.assert_allclose(got.astype(np.float32), exact.astype(np.float32), rtol=limit, atol=limit)


@pytest.mark.parametrize("kernel", parameters(SOME))
def test_bad_contents_write_nothing_outside(kernel: dict) -> None:
    """Lengths that do not ascend or leave the tensor, positions and trees of any numbers: no memory outside is written."""
    dtype, total = NUMPY[kernel["dtype"]], 40
    worst = 2**31 - 1
    space = torch.full((3 * total, HEADS_Q, DIM), 7, dtype=to_device(np.zeros(1, dtype), "cuda").dtype, device="cuda")
    q = to_device(rows(total, HEADS_Q, 3, dtype), "cuda")
    own = [to_device(x, "cuda") for x in caches(dtype)]
    ints = lambda *x: torch.tensor(x, dtype=torch.int32, device="cuda")  # noqa: E731
    tree = torch.full((total, 1), -1, dtype=torch.int32, device="cuda")
    bad_starts = ((0, 10, 5, worst, -3, 2, 40), (-worst, worst, 0, worst, 0, worst, 0), (worst,) * 7, (40, 30, 20, 10, 0, -5, -9))
    for starts in bad_starts:
        for more in (
            {},
            {"q_positions": ints(*[worst, -worst] * 20), "window_size": (10, 0)},
            {"tree_mask": tree, "cu_seqlens_tree": ints(*starts[::-1])},
            {"k": q[:, :HEADS_K], "v": q[:, :HEADS_K], "cu_seqlens_new": ints(*starts[::-1])},
        ):
            libflash.decode(q, *own, out=space[total : 2 * total], cu_seqlens_q=ints(*starts), cache_seqlens=ints(*CACHED),
                            num_splits=2, kernel=kernel["name"], **more)  # fmt: skip
            torch.cuda.synchronize()
            assert (space[:total] == 7).all()
            assert (space[2 * total :] == 7).all()
