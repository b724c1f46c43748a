"""Decode and the work before it on the stream, which may still run when decode's kernels start: dependent launches and graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import libflash

torch = pytest.importorskip("torch")
from gpu_case import DTYPES, same_bits  # noqa: E402  (needs torch)
from gpu_decode import every_kernel_and_many_rows  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@every_kernel_and_many_rows
@pytest.mark.parametrize("previous", ["kernel", "copy", "fill", "join", "decode"])
@pytest.mark.parametrize("splits", [1, 3])
def test_decode_waits_for_previous_work(kernel: dict, previous: str, splits: int) -> None:
    """A call may be launched before the previous work on the stream has ended, and reads what that writes, also in a graph."""
    dtype, dim = DTYPES[kernel["dtype"]], min(kernel["head_dim"], kernel["head_dim_v"])
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
        if previous == "join":
            side.wait_stream(main)
            with torch.cuda.stream(side):
                keys.copy_(source)
            length.fill_(700)
            main.wait_stream(side)
        elif previous == "kernel":
            length.fill_(900)
            torch.mul(source, 2, out=keys)
        elif previous == "copy":
            length.fill_(1000)
            keys.copy_(source)
        elif previous == "fill":
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
        attend(q if previous != "decode" else out, out if previous != "decode" else first_out)

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


@every_kernel_and_many_rows
@pytest.mark.parametrize("splits", [1, 4])
def test_block_table_that_the_previous_call_writes(kernel: dict, splits: int) -> None:
    """The key that one call appends is the block table of the next call, which must not read the old table."""
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


@every_kernel_and_many_rows
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
