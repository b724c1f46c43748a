"""The steps of a generation on the GPU: keys appended and rotated, and attention, one call per token."""

from __future__ import annotations

import numpy as np
import pytest
from harness import assert_same_bits, random
from reference import forward

import libflash

torch = pytest.importorskip("torch")
from gpu_case import DTYPES, same_bits  # noqa: E402  (needs torch)
from gpu_decode import LIMITS, NUMPY, SPLITS, decode, every_kernel, every_kernel_and_many_rows  # noqa: E402
from test_decode import LENGTHS, cached, queries, rotate  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@every_kernel
@pytest.mark.parametrize("pages", [False, True], ids=["contiguous", "paged"])
def test_five_hundred_steps(kernel: dict, pages: bool) -> None:
    """Token by token with rotary embedding, each step appended in place, is one causal attention over all. Free pages are NaN."""
    steps, heads_q, heads_k, dim = 500, 4, 2, 16
    name, dtype = kernel["name"], NUMPY[kernel["dtype"]]
    arrays = [random(2, steps, h, dim, seed=h + 7 * i).astype(dtype) for i, h in enumerate((heads_q, heads_k, heads_k))]
    angles = np.arange(steps)[:, None] * 0.3 ** np.arange(dim // 2)
    cos, sin = (f(angles).astype(np.float32) for f in (np.cos, np.sin))
    columns = 64
    table = np.random.default_rng(0).permutation(2 * columns + 1)[:-1].reshape(2, columns).astype(np.int32)
    shape = (2 * columns + 1, 8) if pages else (2, columns * 8)
    caches = [torch.full((*shape, heads_k, dim), torch.nan, dtype=DTYPES[kernel["dtype"]], device="cuda") for _ in range(2)]
    options = {"block_table": torch.from_numpy(table).cuda()} if pages else {}
    options |= {
        "rotary_cos": torch.from_numpy(cos).cuda(),
        "rotary_sin": torch.from_numpy(sin).cuda(),
        "rotary_interleaved": False,
    }
    q, k, v = (torch.from_numpy(x.astype(np.float32)).cuda().to(DTYPES[kernel["dtype"]]) for x in arrays)
    lengths, out = torch.zeros(2, dtype=torch.int32, device="cuda"), torch.empty_like(q)
    for t in range(steps):
        new = slice(t, t + 1)
        out[:, new] = libflash.decode(q[:, new], *caches, k=k[:, new], v=v[:, new], cache_seqlens=lengths, kernel=name, **options)
        lengths += 1
    rotated = [rotate(x, cos, sin).astype(dtype) for x in arrays[:2]]
    wanted, _ = forward(*rotated, arrays[2], causal=True)
    limit, _ = LIMITS[kernel["dtype"]]
    np.testing.assert_allclose(out.double().cpu().numpy(), wanted, rtol=limit, atol=limit)
    flat = [x[torch.from_numpy(table).long().cuda()].reshape(2, columns * 8, heads_k, dim) if pages else x for x in caches]
    np.testing.assert_allclose(flat[0][:, :steps].double().cpu().numpy(), rotated[1].astype(np.float64), rtol=limit, atol=1e-12)
    assert torch.equal(flat[1][:, :steps], v)
    assert all(x[:, steps:].isnan().all() for x in flat)
    if pages:
        free = np.setdiff1d(np.arange(2 * columns + 1), table)
        assert all(x[torch.from_numpy(free).cuda()].isnan().all() for x in caches)


@every_kernel_and_many_rows
def test_an_appended_cache_holds_the_bits_of_the_cpu(kernel: dict) -> None:
    dtype = NUMPY[kernel["dtype"]]
    rng = np.random.default_rng(1)
    for interleaved in (True, False):
        q, (k, v) = queries(dtype), cached(dtype)
        new = [rng.standard_normal((len(LENGTHS), 3, 2, 48)).astype(dtype) for _ in range(2)]
        cos, sin = (f(np.arange(800)[:, None] * 0.7 ** np.arange(20)).astype(np.float32) for f in (np.cos, np.sin))
        lengths = np.minimum(LENGTHS, 697).astype(np.int32)
        options = dict(k=new[0], v=new[1], cache_seqlens=lengths, rotary_cos=cos, rotary_sin=sin, rotary_interleaved=interleaved)
        caches = [k.copy(), v.copy()], [k.copy(), v.copy()]
        decode(q, *caches[0], kernel=kernel["name"], **options)
        libflash.decode(q, *caches[1], **options)
        assert_same_bits(caches[0][0], caches[1][0])
        assert_same_bits(caches[0][1], caches[1][1])


class Steps:
    """Tokens of four sequences, and a contiguous or paged cache to which they are appended one by one."""

    STARTS = (0, 13, 61, 126)  # crosses the ends of tiles, of pages and of splits of 128 keys

    def __init__(self, dtype: torch.dtype, group: int, dim: int, steps: int, *, interleaved: bool, float_tables: bool) -> None:
        generator = torch.Generator("cuda").manual_seed(group + dim)

        def made(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device="cuda").to(dtype)

        self.count, rows = steps, (len(self.STARTS), steps)
        self.q, self.k, self.v = made(*rows, 2 * group, dim), made(*rows, 2, dim), made(*rows, 2, dim - 8)
        self.start = made(4, 192, 2, dim), made(4, 192, 2, dim - 8)
        angles = torch.rand(192, dim // 4, generator=generator, device="cuda") * 6
        tables = [x if float_tables else x.to(dtype) for x in (angles.cos(), angles.sin())]
        self.rotary = {"rotary_cos": tables[0], "rotary_sin": tables[1], "rotary_interleaved": interleaved}

    def lengths(self, step: int = 0) -> torch.Tensor:
        return torch.tensor(self.STARTS, dtype=torch.int32, device="cuda") + step

    def token(self, step: int) -> tuple[torch.Tensor, ...]:
        return tuple(x[:, step : step + 1] for x in (self.q, self.k, self.v))

    def decode(self, step: int, caches: list[torch.Tensor], **options: object) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = self.token(step)
        lengths = self.lengths(step)
        return libflash.decode(q, *caches, k=k, v=v, cache_seqlens=lengths, return_lse=True, **self.rotary, **options)


@every_kernel_and_many_rows
@pytest.mark.parametrize("group", [1, 5, 16])
@pytest.mark.parametrize("rule", [{}, {"window_size": (0, 0)}, {"window_size": (70, 0), "num_splits": 3}, *SPLITS[1:]], ids=str)
def test_a_step_is_what_appending_first_gives(kernel: dict, group: int, rule: dict) -> None:
    """One new row per sequence is appended by the thread blocks that read it; with a leftpad of 0 by a kernel before decode."""
    dim = min(kernel["head_dim"], 72)
    steps = Steps(DTYPES[kernel["dtype"]], group, dim, 9, interleaved=group == 5, float_tables=group != 1)
    within, ahead = ([x.clone() for x in steps.start] for _ in range(2))
    table = torch.randperm(48, generator=torch.Generator("cuda").manual_seed(0), device="cuda").int().reshape(4, 12)
    pages = [torch.empty_like(x).reshape(48, 16, *x.shape[2:]) for x in steps.start]
    for x, y in zip(pages, steps.start, strict=True):
        x[table.long()] = y.reshape(4, 12, 16, *y.shape[2:])
    nothing = torch.zeros(4, dtype=torch.int32, device="cuda")
    options = {"kernel": kernel["name"], "causal": True, **rule}
    for step in range(steps.count):
        wanted = steps.decode(step, ahead, cache_leftpad=nothing, **options)
        for got in (steps.decode(step, within, **options), steps.decode(step, pages, block_table=table, **options)):
            assert same_bits(got[0], wanted[0])
            assert same_bits(got[1], wanted[1])
    assert not same_bits(within[0], steps.start[0])
    for x, y, z in zip(within, ahead, pages, strict=True):
        assert same_bits(x, y)
        assert same_bits(z[table.long()].reshape(y.shape), y)


@every_kernel_and_many_rows
def test_steps_replayed_from_a_graph(kernel: dict) -> None:
    """A graph of a step that also increments the lengths, replayed token by token."""
    steps = Steps(DTYPES[kernel["dtype"]], 3, 64, 40, interleaved=False, float_tables=True)
    caches, others = ([x.clone() for x in steps.start] for _ in range(2))
    q, k, v = (x.clone() for x in steps.token(0))
    lengths, out = steps.lengths(), torch.empty(4, 1, 6, 56, dtype=q.dtype, device="cuda")
    options = {"cache_seqlens": lengths, "kernel": kernel["name"], "num_splits": 2, **steps.rotary}
    libflash.decode(q, *(x.clone() for x in caches), k=k, v=v, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        libflash.decode(q, *caches, k=k, v=v, out=out, **options)
        lengths.add_(1)
    for step in range(steps.count):
        for x, y in zip((q, k, v), steps.token(step), strict=True):
            x.copy_(y)
        graph.replay()
        assert same_bits(out, steps.decode(step, others, kernel=kernel["name"], num_splits=2)[0]), step
    assert all(same_bits(x, y) for x, y in zip(caches, others, strict=True))
