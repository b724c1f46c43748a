"""Chunks and decodes of one call run at the same time. They wait for what comes before on the stream. What follows must wait for
both, also where decode ends long before prefill, and in captured graphs; the result is that of the two parts in calls of their
own.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sequences import cu_seqlens

import libflash

torch = pytest.importorskip("torch")
from gpu_case import DTYPES, to_device  # noqa: E402  (needs torch)
from gpu_kernels import kernels, parameters  # noqa: E402

KERNELS = kernels("prefill")
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not any(k["usable"] for k in KERNELS), reason="no CUDA device with prefill kernels"
)

every_kernel = pytest.mark.parametrize("kernel", parameters(KERNELS))
HEADS_Q, HEADS_K, KEYS, PAGE = 16, 4, 6000, 64
# Rows of the sequences, of which some have none: few and many decodes beside a chunk, so long that the prefill kernel takes it.
STEPS = {"long chunk": (3000, 1, 0, 1), "many decodes": (900, *(1,) * 90, 0, 3), "chunks only": (700, 0, 300)}


class Step:
    def __init__(self, kernel: dict, rows: tuple[int, ...]) -> None:
        generator = torch.Generator("cuda").manual_seed(len(rows))
        dtype = DTYPES[kernel["dtype"]]
        dims = kernel["head_dim"], kernel["head_dim_v"]
        columns = -(-KEYS // PAGE)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device="cuda", generator=generator).to(dtype)

        self.rows = rows
        lengths = torch.tensor([KEYS - 37 * (i % 50) for i in range(len(rows))], device="cuda", dtype=torch.int32)
        self.caches = [random(4 * columns, PAGE, HEADS_K, dim) for dim in dims]
        table = torch.randint(4 * columns, (len(rows), columns), device="cuda", generator=generator).int()
        self.q = random(sum(rows), HEADS_Q, dims[0])
        self.options = {
            "cache_seqlens": lengths,
            "block_table": table,
            "cu_seqlens_q": to_device(cu_seqlens(rows)),
            "causal": True,
        }
        text = libflash.explain(self.q, *self.caches, op="decode", **self.options)
        assert f"{kernel['name']}, tile" in text
        assert ", at the same time as decode" in text

    def call(self, keep: Callable[[int], bool] = lambda rows: True, **more: object) -> tuple[torch.Tensor, torch.Tensor]:
        """The step with the rows of the sequences that `keep` accepts."""
        q = torch.cat([part for part in self.q.split(self.rows) if keep(part.shape[0])])
        options = self.options | {"cu_seqlens_q": to_device(cu_seqlens(n if keep(n) else 0 for n in self.rows))}
        return libflash.decode(q, *self.caches, return_lse=True, **options, **more)


def parts(step: Step) -> list[torch.Tensor]:
    """The rows of out as two calls give them, in the order of the step."""
    both = [step.call(keep)[0] if any(map(keep, step.rows)) else step.q[:0, :, :1] for keep in (is_long, is_short)]
    long, short = (list(x.split([n for n in step.rows if keep(n)])) for x, keep in zip(both, (is_long, is_short), strict=True))
    return [(long if is_long(n) else short).pop(0) for n in step.rows if n > 0]


def is_long(rows: int) -> bool:
    return rows >= 100


def is_short(rows: int) -> bool:
    return 0 < rows < 100


@every_kernel
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS)
def test_both_parts_as_in_calls_of_their_own(kernel: dict, rows: tuple[int, ...]) -> None:
    step = Step(kernel, rows)
    got, lse = step.call()
    assert torch.isfinite(lse).all()
    for mine, wanted in zip(got.split([n for n in rows if n > 0]), parts(step), strict=True):
        error = (mine.float() - wanted.float()).norm() / wanted.float().norm()
        assert error < 0.01


@every_kernel
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS)
def test_waits_for_what_comes_before(kernel: dict, rows: tuple[int, ...]) -> None:
    """Kernels write the queries, the lengths and the block table right before the call, and overwrite them right after it."""
    steps = [Step(kernel, rows), Step(kernel, rows[::-1])]
    wanted = [step.call()[0] for step in steps]
    mutable = {name: torch.zeros_like(x) for name, x in steps[0].options.items() if isinstance(x, torch.Tensor)}
    q, got = torch.zeros_like(steps[0].q), []
    torch.cuda.synchronize()
    for step in steps * 2:
        torch.cuda._sleep(2_000_000)
        q.copy_(step.q)
        for name, x in mutable.items():
            x.copy_(step.options[name])
        got.append(libflash.decode(q, *steps[0].caches, **step.options | mutable))
        for x in (q, *mutable.values()):
            x.zero_()
    for mine, expected in zip(got, wanted * 2, strict=True):
        assert torch.equal(mine, expected)


@every_kernel
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS)
def test_what_follows_waits_for_both(kernel: dict, rows: tuple[int, ...]) -> None:
    step = Step(kernel, rows)
    wanted = step.call()[0]
    torch.cuda.synchronize()
    out = torch.zeros_like(wanted)
    for _ in range(5):
        out.fill_(7.0)
        copy = step.call(out=out)[0].clone()
        out.fill_(7.0)
        assert torch.equal(copy, wanted)


@every_kernel
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS)
def test_what_follows_in_a_graph_waits_for_both(kernel: dict, rows: tuple[int, ...]) -> None:
    step = Step(kernel, rows)
    wanted = step.call()[0]
    out, copy = torch.zeros_like(wanted), torch.zeros_like(wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.fill_(7.0)
        libflash.decode(step.q, *step.caches, out=out, **step.options)
        copy.copy_(out)
        out.fill_(7.0)
    for _ in range(5):
        copy.zero_()
        graph.replay()
        assert torch.equal(copy, wanted)
