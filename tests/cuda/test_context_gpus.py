"""context_parallel_attention on two and four GPUs: equal to one call in float32 on the CPU for every scheme, order and option.
Decode.
"""

from __future__ import annotations

import dataclasses
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
from two_processes import run_in_two_processes  # noqa: E402

import libflash  # noqa: E402
from libflash import _torch_symmetric_memory as symmetric  # noqa: E402

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


def bits_of(problem: Problem, transport: str) -> dict[str, Any]:
    return context_ranks.run_problem(dataclasses.replace(problem, transport=transport))


def transports_job(problems: list[Problem]) -> list[list[str]]:
    """Of each problem, the results that the transports give other bits. Twice: memory is used again, for other shapes."""
    made = []
    for problem in problems * 2:
        one, other = (bits_of(problem, transport) for transport in ("messages", "symmetric_memory"))
        made.append([name for name, x in one.items() if not torch.equal(x, other[name])])
    return made


def obstacle_here() -> str:
    """Why these GPUs have no symmetric memory, or ''."""
    x = torch.zeros(1, 8, 1, 64, device="cuda", dtype=torch.bfloat16)
    adapter.context_parallel_attention(x, x, x, scheme="ring")
    said = adapter.explain_context_parallel(x, x, x, scheme="ring")
    return "" if "transport  symmetric_memory" in said else said


DETERMINISTIC = ("deterministic", True)
ON_BOTH = [
    Problem(f"both-{scheme}-{order}-{batch}-{dtype}-{len(more)}", scheme, order, shape=(batch, 4 * 296, 8, 2, 64, 64),
            dtype=dtype, device="cuda", sink=True, dlse=True, options=(CAUSAL, DETERMINISTIC, *more))
    for scheme, order in itertools.product(("ring", "all_gather"), ("zigzag", "contiguous"))
    for batch, dtype, more in ((1, "bfloat16", ()), (3, "bfloat16", ()), (2, "float32", ()),
                               (2, "bfloat16", (("window_size", (300, -1)),)))
]  # fmt: skip


def memory_job(rank: int) -> dict[str, Any]:
    """Backward after other calls on other streams, growth, and captures that would need more memory."""
    torch.manual_seed(rank)
    symmetric.release()

    def inputs(tokens: int) -> list[Any]:
        return [torch.randn(1, tokens, n, 128, device="cuda", dtype=torch.bfloat16).requires_grad_() for n in (8, 2, 2)]

    def forward(x: list[Any], transport: str = "auto") -> Any:
        return adapter.context_parallel_attention(*x, scheme="ring", causal=True, deterministic=True, transport=transport)

    def refused(x: list[Any]) -> str:
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                forward(x)
        except libflash.InvalidError as error:
            return str(error)
        return ""

    several = [inputs(tokens) for tokens in (512, 16384, 1024)]
    torch.cuda.synchronize()
    results = []
    for transport in ("messages", "symmetric_memory"):
        streams = [torch.cuda.Stream() for _ in several]
        outs = []
        for x, stream in zip(several, streams, strict=True):
            with torch.cuda.stream(stream):
                outs.append(forward(x, transport))
        results.append([torch.autograd.grad(out, x, out.detach()) for out, x in zip(outs, several, strict=True)])
        torch.cuda.synchronize()
    pairs = [pair for one, other in zip(*results, strict=True) for pair in zip(one, other, strict=True)]
    made: dict[str, Any] = {"same": [torch.equal(*pair) for pair in pairs], "held": symmetric.held()}
    made["growth"] = refused(inputs(65536))
    symmetric.release()
    made["released"] = symmetric.held()
    made["first"] = refused(inputs(512))
    return made


def symmetric_job(rank: int, problems: list[Problem]) -> Any:
    """Or why these GPUs have no symmetric memory."""
    return obstacle_here() or (transports_job(problems), memory_job(rank))


@pytest.fixture(scope="module", params=[2, 4], ids="{} GPUs".format)
def on_both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Problem], list[Any]]:
    """Problems, and what each rank says."""
    if torch.cuda.device_count() < request.param:
        pytest.skip(f"needs {request.param} CUDA devices")
    problems = list(ON_BOTH)
    for problem in ON_BOTH[:2] if request.param == 4 else ():
        problems.append(dataclasses.replace(problem, name=f"mesh-{problem}", scheme="heads_ring", mesh=(2, 2)))
    results = run_ranks(request.param, tmp_path_factory.mktemp("ranks"), symmetric_job, problems, backend="nccl")
    if isinstance(results[0], str):
        pytest.skip(results[0])
    return problems, results


def test_both_transports_give_the_same_bits(on_both: tuple[list[Problem], list[Any]]) -> None:
    problems, results = on_both
    for bits, _ in results:
        for problem, differ in zip(problems * 2, bits, strict=True):
            assert differ == [], str(problem)


def test_memory_of_a_group(on_both: tuple[list[Problem], list[Any]]) -> None:
    for _, made in on_both[1]:
        assert all(made["same"])
        slots = min(2, len(on_both[1]) - 1)
        assert made["held"] == 16384 * 2 * 2 * 128 * 2 * (1 + slots)  # K and V, and slots for their gradients
        assert "bytes of symmetric memory are needed inside the capture of a graph" in made["growth"]
        assert made["released"] == 0
        assert "the first call of its group and inside the capture of a graph" in made["first"]


def refusals_job(rank: int) -> list[str]:
    said = []
    x = torch.zeros(1, 64, 4, 64, device="cuda", dtype=torch.bfloat16)
    for call in (adapter.context_parallel_attention, adapter.explain_context_parallel):
        try:
            call(x, x, x, scheme="ring", alibi_slopes=torch.ones(4, device="cuda"))
        except libflash.UnsupportedError as error:
            said.append(str(error))
    return said


def test_explain_refuses_what_the_call_refuses(tmp_path: pathlib.Path) -> None:
    for said in run_ranks(2, tmp_path, refusals_job, backend="nccl"):
        assert len(said) == 2
        assert said[0] == said[1]
        assert "the tokens of a rank are not neighbours" in said[0]


def test_a_rank_that_ends(tmp_path: pathlib.Path) -> None:
    """The other one raises within the time limit of the group."""
    assert "raised" in run_in_two_processes("context_faults.py", tmp_path, "backward", "cuda", seconds=100)[0]


def graph_job(rank: int, scheme: str) -> list[bool]:
    torch.manual_seed(rank)
    return graph_of(scheme, "auto") + graph_of(scheme, "messages")


def graph_of(scheme: str, transport: str) -> list[bool]:
    """Whether out and gradients of replays of a captured call are those of calls, also for other values."""
    x = [torch.randn(1, 2048, heads, 128, device="cuda", dtype=torch.bfloat16).requires_grad_() for heads in (8, 2, 2)]

    def step() -> list[Any]:
        out = adapter.context_parallel_attention(*x, scheme=scheme, causal=True, deterministic=True, transport=transport)
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
    assert run_ranks(2, tmp_path, graph_job, scheme, backend="nccl") == [[True] * 16] * 2


@pytest.mark.parametrize("case", [case for case in decode_ranks.CASES if case.dtype != "fp64"], ids=lambda case: case.name)
def test_decode(case: Any, tmp_path: pathlib.Path) -> None:
    decode_ranks.check_ranks(case, 2, tmp_path, device="cuda", backend="nccl")
