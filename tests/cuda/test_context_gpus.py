"""context_parallel_attention on two and four GPUs: equal to one call in float32 on the CPU for every scheme, order and option.
Decode.
"""

from __future__ import annotations

import functools
import itertools
import pathlib
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if torch.cuda.device_count() < 2:
    pytest.skip("needs two CUDA devices", allow_module_level=True)

import context_ranks  # noqa: E402
import decode_ranks  # noqa: E402
import libflash.torch as adapter  # noqa: E402
from context_ranks import Problem, gradients, run_ranks  # noqa: E402

CAUSAL = ("causal", True)
SHAPE = (2, 4 * 296, 8, 2, 64, 64)
WAYS = [("ring", "zigzag"), ("ring", "contiguous"), ("heads", "zigzag"), ("all_gather", "zigzag"), ("auto", "zigzag")]
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal-lse": {"options": (CAUSAL,), "dlse": True},
    "window-sink": {"options": (CAUSAL, ("window_size", (300, -1))), "sink": True, "dlse": True},
    "softcap": {"options": (CAUSAL, ("softcap", 3.0), ("softmax_scale", 0.2))},
    "dropout": {"options": (CAUSAL, ("dropout_p", 0.25), ("seed", 2**40 + 3), ("offset", 5))},
    "documents": {"options": (CAUSAL,), "documents": (1, 821, 0, 19, 343), "sink": True},
    "deterministic-128": {"options": (CAUSAL, ("deterministic", True)), "shape": (1, 1024, 8, 4, 128, 128)},
}
LIMITS = {"float32": 1e-5, "bfloat16": 1e-2}  # root mean square of the error over that of the values
PROBLEMS = [
    Problem(f"{scheme}-{order}-{name}-{dtype}", scheme, order, dtype=dtype, device="cuda", **{"shape": SHAPE, **more})
    for (scheme, order), (name, more), dtype in itertools.product(WAYS, OPTIONS.items(), LIMITS)
]


@pytest.fixture(scope="module", params=[2, 4], ids="{} GPUs".format)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    if torch.cuda.device_count() < request.param:
        pytest.skip(f"needs {request.param} CUDA devices")
    return run_ranks(request.param, tmp_path_factory.mktemp("ranks"), context_ranks.problems_job, PROBLEMS, backend="nccl")


@functools.cache
def one_call(problem: Problem) -> dict[str, Any]:
    cu = problem.cu_seqlens()
    packed = {} if cu is None else {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    x = {name: None if t is None else t.float() for name, t in problem.tensors().items()}
    return gradients(problem, x, lambda *t, **options: adapter.attention(*t, **options, **packed))


@pytest.mark.parametrize("number", range(len(PROBLEMS)), ids=map(str, PROBLEMS))
def test_equal_to_one_call(results: list[Any], number: int) -> None:
    compare(PROBLEMS[number], [made[number] for made in results])


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs 4 CUDA devices")
def test_heads_and_a_ring_over_four_gpus(tmp_path: pathlib.Path) -> None:
    """A mesh of two dimensions."""
    problems = [
        Problem(f"mesh-{name}-{dtype}", "auto", "zigzag", (2, 2), dtype=dtype, device="cuda", **{"shape": SHAPE, **more})
        for (name, more), dtype in itertools.product(OPTIONS.items(), LIMITS)
    ]
    results = run_ranks(4, tmp_path, context_ranks.problems_job, problems, backend="nccl")
    for number, problem in enumerate(problems):
        compare(problem, [made[number] for made in results])


def compare(problem: Problem, results: list[Any]) -> None:
    """What every rank has made."""
    for name, wanted in one_call(problem).items():
        for rank, made in enumerate(results):
            got = made[name].float()
            finite = wanted.isfinite()
            assert torch.equal(got.isfinite(), finite), f"{problem}: {name} on rank {rank}"
            got, exact = torch.where(finite, got, 0), torch.where(finite, wanted, 0)
            error = (got - exact).square().mean().sqrt() / exact.square().mean().sqrt()
            assert error <= LIMITS[problem.dtype], f"{problem}: {name} on rank {rank}: {error:.2g}"


@pytest.mark.parametrize("scheme", ["ring", "heads"])
def test_same_bits_in_every_run(tmp_path: pathlib.Path, scheme: str) -> None:
    options = (CAUSAL, ("deterministic", True))
    problem = Problem("bits", scheme, "zigzag", shape=SHAPE, dtype="bfloat16", device="cuda", options=options)
    for first, *others in run_ranks(2, tmp_path, context_ranks.problems_job, [problem] * 4, backend="nccl"):
        for other in others:
            for name, x in first.items():
                assert torch.equal(x, other[name]), name


def graph_job(rank: int, scheme: str) -> list[bool]:
    """Whether out and gradients of replays of a captured call are those of calls, also for other values."""
    torch.manual_seed(rank)
    x = [torch.randn(1, 2048, heads, 128, device="cuda", dtype=torch.bfloat16).requires_grad_() for heads in (8, 2, 2)]

    def step() -> list[Any]:
        out = adapter.context_parallel_attention(*x, scheme=scheme, causal=True, deterministic=True)
        return [out, *torch.autograd.grad(out, x, out.detach())]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        made = step()
    same = []
    for _ in range(2):
        with torch.no_grad():
            for y in x:
                y.normal_()
        graph.replay()
        same += [torch.equal(a, b) for a, b in zip(made, step(), strict=True)]
    return same


@pytest.mark.parametrize("scheme", ["ring", "heads", "all_gather"])
def test_in_a_graph(tmp_path: pathlib.Path, scheme: str) -> None:
    assert run_ranks(2, tmp_path, graph_job, scheme, backend="nccl") == [[True] * 8] * 2


@pytest.mark.parametrize("case", [case for case in decode_ranks.CASES if case.dtype != "fp64"], ids=lambda case: case.name)
def test_decode(case: Any, tmp_path: pathlib.Path) -> None:
    decode_ranks.check_ranks(case, 2, tmp_path, device="cuda", backend="nccl")
