"""Decode calls with long chunks on the GPU, which prefill kernels take where a call has enough rows: against the CPU, in captured
graphs, beside NaN, and the refusals that leave all rows to the decode kernels.
"""

from __future__ import annotations

import numpy as np
import pytest
from harness import random
from sequences import cu_seqlens

import libflash

torch = pytest.importorskip("torch")
from gpu_case import same_bits, to_device, to_numpy  # noqa: E402  (needs torch)
from gpu_decode import decode  # noqa: E402
from gpu_kernels import kernels, parameters  # noqa: E402
from gpu_prefill import CACHED, CAPACITY, HEADS_Q, ROWS, Step, check, check_step, uses  # noqa: E402

KERNELS = kernels("prefill")
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not any(k["usable"] for k in KERNELS), reason="no CUDA device with prefill kernels"
)

every_kernel = pytest.mark.parametrize("kernel", parameters(KERNELS))


@every_kernel
@pytest.mark.parametrize("narrower", [0, 8])
@pytest.mark.parametrize("page", [0, 16, 64, 256])
@pytest.mark.parametrize("more", [{"causal": True}, {"causal": False}, {"causal": True, "window_size": (90, 0)}], ids=str)
def test_against_the_cpu(kernel: dict, page: int, more: dict, narrower: int) -> None:
    step = Step(kernel, page, more.get("window_size", (None,))[0], narrower)
    sinks = {"learnable_sink": random(HEADS_Q, seed=5)} if page == 16 else {}
    check_step(step, kernel, **more, **sinks)


def with_strides(x: torch.Tensor, form: str) -> torch.Tensor:
    """A copy of a cache (pages, rows, heads, channels) with other strides; what is between its rows is NaN."""
    pages, rows, heads, dim = x.shape
    if form == "heads first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if form == "heads outside":
        return x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    more = 8 if form == "wider pages" else dim  # elements
    apart = torch.full((pages, rows * heads * dim + more), torch.nan, dtype=x.dtype, device=x.device)
    view = apart[:, : rows * heads * dim].view(x.shape)
    return view.copy_(x)


@every_kernel
@pytest.mark.parametrize("page", [0, 16, 48, 64])
@pytest.mark.parametrize("form", ["heads first", "heads outside", "wider pages", "a row between pages"])
def test_strides_change_no_bit(kernel: dict, form: str, page: int) -> None:
    """Of pages, heads and rows, also where pages end with rows of others."""
    capacity = CAPACITY if page else CAPACITY - 3
    step = Step(kernel, 0, narrower=0)
    q, *caches = (to_device(x, "cuda") for x in step.arrays()[0])
    options = {name: to_device(x, "cuda") for name, x in step.lengths.items()} | {"causal": True}
    caches = [x[:, :capacity].contiguous() for x in caches]
    if page:
        columns = -(-capacity // page)
        padded = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, columns * page - capacity)) for x in caches]
        options["block_table"] = torch.arange(len(ROWS) * columns, device="cuda").int().reshape(len(ROWS), columns)
        caches = [x.reshape(-1, page, *x.shape[2:]) for x in padded]
    wanted = libflash.decode(q, *caches, return_lse=True, **options)
    others = [with_strides(x, form) for x in caches]
    assert f"{kernel['name']}, tile" in libflash.explain(q, *others, op="decode", **options)
    got = libflash.decode(q, *others, return_lse=True, **options)
    assert all(map(same_bits, got, wanted))


@every_kernel
def test_dense_rows(kernel: dict) -> None:
    """q with four dimensions: every sequence has the same number of rows."""
    step = Step(kernel, 64)
    q = random(len(ROWS), 200, *step.rows["q"].shape[1:], seed=11).astype(step.dtype)
    k, v = (random(len(ROWS), 200, *step.rows[name].shape[1:], seed=12).astype(step.dtype) for name in "kv")
    cached = np.minimum(CACHED, CAPACITY - 200).astype(np.int32)
    options = {"cache_seqlens": cached, "block_table": step.table, "k": k, "v": v, "causal": True}
    caches, own = ([x.copy() for x in step.caches] for _ in range(2))
    assert uses(kernel, (q, *caches), options)
    got = decode(q, *caches, **options)
    check(got, libflash.decode(q, *own, return_lse=True, **options), kernel)


@every_kernel
def test_absent_pages(kernel: dict) -> None:
    """Keys of pages that do not exist are absent."""
    step = Step(kernel, 16)
    arrays, options = step.arrays()
    options.pop("k"), options.pop("v")
    table = step.table.copy()
    table[0, 3], table[5, 7] = -1, 2**31 - 1
    options["block_table"] = table
    got = decode(*arrays, **options, causal=True)
    assert np.isfinite(got[0].astype(np.float32)).all()
    # The same with these keys taken out: without positions that matter, a shorter sequence.
    for b, column in ((0, 3), (5, 7)):
        begin, end = cu_seqlens(ROWS)[b : b + 2]
        shorter = np.concatenate([np.delete(step.table[b], column), [0]])[None].astype(np.int32)
        own = [x.copy() for x in step.caches]
        wanted = libflash.decode(
            step.rows["q"][begin:end], *own, block_table=shorter, cache_seqlens=CACHED[b : b + 1] - 16, causal=True,
            cu_seqlens_q=np.array([0, end - begin], np.int32), return_lse=True,
        )  # fmt: skip
        late = (end - begin) - (CACHED[b] - 16 * (column + 1))  # rows on the diagonal before the absent page see other keys
        first = max(0, late)
        check((got[0][begin + first : end], got[1][:, begin + first : end]), (wanted[0][first:], wanted[1][:, first:]), kernel)


LACKED = (
    *({"softcap": 20.0}, {"alibi_slopes": np.ones(HEADS_Q, np.float32)}),
    *({"num_splits": 2}, {"split_size": 128}, {"backend": "sm80"}),
)
STEPS = (ROWS, (0,) * 8, (1170, 0, 0, 0, 0, 0, 0, 0), (1,) * 8, (64, 63, 64, 63, 65, 1, 0, 700), ROWS)


@every_kernel
@pytest.mark.parametrize("page", [0, 16])
def test_replays_with_other_lengths(kernel: dict, page: int) -> None:
    """A captured call is right for any lengths: which kernel has a sequence is decided in every replay. Other rows are not
    written.
    """
    step = Step(kernel, page)
    total = sum(ROWS)
    names = {"q": step.rows["q"], "k_cache": step.caches[0], "v_cache": step.caches[1]}
    x = {name: to_device(np.nan_to_num(array.astype(np.float32)).astype(step.dtype), "cuda") for name, array in names.items()}
    lengths = {name: to_device(array, "cuda") for name, array in step.lengths.items()}
    out = torch.empty(total, HEADS_Q, kernel["head_dim_v"], dtype=x["q"].dtype, device="cuda")
    lse = torch.empty(HEADS_Q, total, device="cuda")

    def call() -> None:
        libflash.decode(x["q"], x["k_cache"], x["v_cache"], out=out, lse=lse, return_lse=True, causal=True, **lengths)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        call()
    host = [to_numpy(x[name], step.dtype) for name in ("k_cache", "v_cache")]
    for rows in STEPS:
        used, cached = sum(rows), np.maximum(CACHED, rows).astype(np.int32)
        lengths["cu_seqlens_q"].copy_(to_device(cu_seqlens(rows), "cuda"))
        lengths["cache_seqlens"].copy_(to_device(np.minimum(cached, CAPACITY), "cuda"))
        for _ in range(2):
            out.fill_(7), lse.fill_(7)
            graph.replay()
        assert (out[used:] == 7).all()
        assert (lse[:, used:] == 7).all()
        given = {**step.lengths, "cu_seqlens_q": cu_seqlens(rows), "cache_seqlens": np.minimum(cached, CAPACITY)}
        wanted = libflash.decode(step.rows["q"][:used], *host, return_lse=True, causal=True, **given)
        check((to_numpy(out[:used], step.dtype), lse[:, :used].cpu().numpy()), wanted, kernel)


@pytest.mark.parametrize("kernel", parameters([k for k in KERNELS if k["head_dim"] == 128]))
@pytest.mark.parametrize("more", LACKED, ids=lambda more: next(iter(more)))
def test_what_prefill_lacks_runs_on_the_decode_kernels(kernel: dict, more: dict) -> None:
    step = Step(kernel, 16)
    arrays, options = step.arrays()
    assert uses(kernel, arrays, options)
    assert not uses(kernel, arrays, {**options, **more})
    got = decode(*arrays, causal=True, **options, **more)
    own, options = step.arrays()
    more = {name: value for name, value in more.items() if name in ("softcap", "alibi_slopes")}
    check(got, libflash.decode(*own, return_lse=True, causal=True, **options, **more), kernel)


@pytest.mark.parametrize("kernel", parameters([k for k in KERNELS if k["dtype"] == "bf16" and k["head_dim_v"] in (64, 128)]))
def test_bad_contents_write_nothing_outside(kernel: dict) -> None:
    """Lengths that do not ascend or leave the tensor, tables of any numbers: no memory outside is written."""
    step, worst, total = Step(kernel, 16), 2**31 - 1, sum(ROWS)
    arrays, options = ([to_device(x, "cuda") for x in step.arrays()[0]], step.lengths)
    space = torch.full((3 * total, HEADS_Q, kernel["head_dim_v"]), 7, dtype=arrays[0].dtype, device="cuda")
    table = to_device(np.where(np.indices(step.table.shape).sum(0) % 3, step.table, worst).astype(np.int32), "cuda")
    for starts in (
        (0, 900, 5, worst, -3, 2, 40, 700, total),
        (-worst, worst) * 4 + (0,),
        (worst,) * 9,
        tuple(range(800, -1, -100)),
    ):
        given = {"cu_seqlens_q": torch.tensor(starts, dtype=torch.int32, device="cuda"), "block_table": table}
        cached = to_device(options["cache_seqlens"] * 1000, "cuda")
        libflash.decode(*arrays, out=space[total : 2 * total], cache_seqlens=cached, **given)
        torch.cuda.synchronize()
        assert (space[:total] == 7).all()
        assert (space[2 * total :] == 7).all()
