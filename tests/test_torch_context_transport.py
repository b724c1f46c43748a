"""The transport `symmetric_memory` of context_parallel_attention on gloo processes that share memory: the bits of messages for
every problem, memory that is used again and grows, its absence, and ranks that end.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import pathlib
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)

import context_ranks  # noqa: E402
import libflash.torch as adapter  # noqa: E402
import shared_memory  # noqa: E402
from context_ranks import Problem, run_ranks  # noqa: E402
from libflash._torch_context_transport import ALIGNMENT, regions_of  # noqa: E402
from test_torch_context import CAUSAL, problems  # noqa: E402
from two_processes import run_in_two_processes  # noqa: E402

import libflash  # noqa: E402
from libflash import _torch_context as calls  # noqa: E402
from libflash import _torch_context_parts as parts_module  # noqa: E402
from libflash import _torch_context_schedule as schedules  # noqa: E402
from libflash import _torch_symmetric_memory as symmetric  # noqa: E402

Bits = list[dict[str, Any]]


def problems_with_transport(ranks: int) -> list[Problem]:
    """The problems whose keys are sent to other ranks."""
    if ranks == 3:
        more = {"shape": (2, 36, 4, 2, 8, 6), "dtype": "bfloat16", "sink": True, "dlse": True}
        return [Problem(f"three-{order}", "ring", order, options=(CAUSAL,), **more) for order in ("zigzag", "contiguous")]
    return [problem for problem in problems(ranks) if problem.scheme != "heads"]


IN_PARTS = [
    Problem(f"parts-{scheme}-{order}-{batch}-{causal}", scheme, order, mesh, (batch, 48, 8, 4, 8, 16), "float32",
            dlse=True, sink=True, options=(("causal", causal),))
    for scheme, order, mesh in (("ring", "zigzag", None), ("ring", "contiguous", None), ("all_gather", "zigzag", None),
                                ("heads_ring", "zigzag", (2, 2)))
    for batch in (1, 3)
    for causal in (True, False)
]  # fmt: skip
IN_PARTS += [
    Problem(f"parts-half-{order}", "ring", order, None, (2, 48, 8, 4, 8, 16), "bfloat16", dlse=True, sink=True, options=(CAUSAL,))
    for order in ("zigzag", "contiguous")
]


def both_transports(problem: Problem) -> tuple[Any, Any]:
    return tuple(
        context_ranks.run_problem(dataclasses.replace(problem, transport=name)) for name in ("messages", "symmetric_memory")
    )


@contextmanager
def in_parts(answer: bool) -> Iterator[None]:
    """Calls on parts of rows and keys, as on GPUs; results are merged sooner, so that four ranks merge before the end too."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (schedules, calls) if answer else ():
            patch.setattr(module, "serves", lambda *given: True)
        patch.setattr(parts_module, "MOST_RESULTS", 2)
        yield


def bits_job(rank: int, whole: list[Problem], parts: list[Problem]) -> list[tuple[Any, Any]]:
    del rank
    shared_memory.install()
    made = [both_transports(problem) for problem in whole]
    with in_parts(True):
        return made + [both_transports(problem) for problem in parts]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_bits_of_messages(ranks: int, tmp_path: pathlib.Path) -> None:
    """The problems run one after the other in the same memory, so that it is used again and grows."""
    parts = [problem for problem in IN_PARTS if ranks == 4 or problem.mesh is None] if ranks != 3 else []
    whole = problems_with_transport(ranks)
    for results in run_ranks(ranks, tmp_path, bits_job, whole, parts):
        for problem, (one, other) in zip(whole + parts, results, strict=True):
            assert one.keys() == other.keys()
            for name, x in one.items():
                assert not x.isnan().any(), f"{problem}: {name}"
                assert torch.equal(x, other[name]), f"{problem}: {name}"
        for problem, (one, _) in zip(parts, results[len(whole) :], strict=True):
            check_part(problem, one)


def check_part(problem: Problem, made: dict[str, Any]) -> None:
    """As one device in float64, but for the rounding of each step."""
    limit = 1e-5 if problem.dtype == "float32" else 8e-3
    exact = {name: None if x is None else x.double() for name, x in problem.tensors().items()}
    for name, x in context_ranks.gradients(problem, exact, adapter.attention).items():
        error = ((made[name] - x).norm() / x.norm()).item()
        assert error <= limit, f"{problem}: {name}: {error:.3g}"


def inputs(tokens: int, batch: int = 1, heads_k: int = 2, dim: int = 8) -> list[torch.Tensor]:
    return [torch.randn(batch, tokens, heads, dim).requires_grad_() for heads in (4, heads_k, heads_k)]


def reuse_job(rank: int) -> dict[str, Any]:
    """Backward after other forward calls; growth; the memory that a group holds."""
    provider = shared_memory.install()
    torch.manual_seed(rank)
    made: dict[str, Any] = {"same": []}

    def forward(x: list[torch.Tensor], transport: str) -> torch.Tensor:
        return adapter.context_parallel_attention(*x, causal=True, scheme="ring", transport=transport)

    several = [inputs(8), inputs(64, 2, 4), inputs(12)]
    results = {}
    for transport in ("messages", "auto"):
        outs = [forward(x, transport) for x in several]
        results[transport] = [torch.autograd.grad(out.sin().sum(), x) for out, x in zip(outs, several, strict=True)]
    for one, other in zip(results["messages"], results["auto"], strict=True):
        made["same"] += [torch.equal(a, b) for a, b in zip(one, other, strict=True)]
    made["sizes"] = list(provider.sizes)
    before = adapter.explain_context_parallel(*several[0], scheme="ring")
    large = inputs(1 << 10, 1, 4, 128)
    forward(large, "auto").sum().backward()
    forward(several[0], "auto")
    made["grown"] = provider.sizes[len(made["sizes"]) :]
    made["explained"] = before, adapter.explain_context_parallel(*several[0], scheme="ring")
    made["others"] = [
        adapter.explain_context_parallel(*several[0], scheme="ring", transport="messages"),
        adapter.explain_context_parallel(*several[0], scheme="heads"),
    ]
    group = torch.distributed.new_group([0, 1])
    adapter.context_parallel_attention(*several[0], group=group, scheme="ring")
    made["groups"] = [len(symmetric._memories)]
    torch.distributed.destroy_process_group(group)
    del group
    gc.collect()
    made["groups"].append(len(symmetric._memories))
    symmetric.release()
    forward(several[0], "symmetric_memory")
    made["after release"] = provider.sizes[-1]
    return made


def test_memory_is_used_again_grows_and_is_freed(tmp_path: pathlib.Path) -> None:
    least = symmetric.GRANULARITY
    for made in run_ranks(2, tmp_path, reuse_job):
        assert all(made["same"])
        assert made["sizes"] == [least]
        one = (1 << 10) * 4 * 128 * 4  # K or V of the large call
        assert made["grown"] == [2 * one, 4 * one]  # forward; backward, with a slot for gradients
        wanted = "transport  symmetric_memory: every rank can read the memory of the others; {} bytes on each\n"
        assert [wanted.format(size) in text for size, text in zip((least, 4 * one), made["explained"], strict=True)] == [True] * 2
        assert "transport  messages: requested" in made["others"][0]
        assert "transport" not in made["others"][1]
        assert made["groups"] == [2, 1]
        assert made["after release"] == least


def absent_job(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    if options.get("install", True):
        shared_memory.install(**options)
    x = inputs(8)
    made: dict[str, Any] = {"before": adapter.explain_context_parallel(*x, scheme="ring")}

    def refused(transport: str) -> str:
        try:
            adapter.context_parallel_attention(*x, scheme="ring", transport=transport)
        except libflash.Error as error:
            return f"{type(error).__name__}: {error}"
        return ""

    made["named"] = refused("symmetric_memory"), refused("symmetric_memory")
    made["auto"] = refused("auto")
    made["wrong"] = refused("pigeons"), refused("messages" if rank == 0 else "auto")
    made["after"] = adapter.explain_context_parallel(*x, scheme="ring")
    return made


ABSENT = {
    "a rank has none": ({"lacking": 1}, "rank 1: it has none in this test"),
    "allocate": ({"failing": ("allocate", 1)}, f"rank 1: {symmetric.GRANULARITY} bytes could not be allocated: allocate fails"),
    "connect": ({"failing": ("connect", 0)}, "rank 0: the ranks could not map each other's memory: connect fails in this test"),
    "cpu": ({"install": False}, "tensors"),
}


@pytest.mark.parametrize("case", ABSENT)
def test_without_it_all_ranks_send_messages(case: str, tmp_path: pathlib.Path) -> None:
    options, reason = ABSENT[case]
    for made in run_ranks(2, tmp_path, absent_job, options):
        for text in made["named"]:
            assert text.startswith("UnsupportedError: transport is 'symmetric_memory', and "), text
            assert reason in text
        assert made["auto"] == ""
        assert "transport is 'pigeons'; it must be one of auto, messages, symmetric_memory" in made["wrong"][0]
        assert "transport must be the same on all ranks of the group" in made["wrong"][1]
        assert f"transport  messages: {reason}" in made["after"]


@pytest.mark.parametrize("call", ["ring", "all_gather", "backward"])
def test_a_rank_that_ends(call: str, tmp_path: pathlib.Path) -> None:
    """The other one raises within the time limit of the group."""
    assert "raised" in run_in_two_processes("context_faults.py", tmp_path, call, "shared memory", seconds=100)[0]


# -- without processes


def test_regions() -> None:
    """One after the other, aligned; a slot for two ranks, two for more, in the type of the sums."""
    keys = torch.zeros(1, 5, 2, 8, dtype=torch.bfloat16), torch.zeros(1, 5, 2, 16, dtype=torch.bfloat16)
    forward = regions_of(4, keys, None)
    assert ([x.begin for x in forward.keys], forward.slots, forward.size) == ([0, ALIGNMENT], (), 2 * ALIGNMENT)
    for ranks, slots in ((2, 1), (3, 2), (8, 2)):
        made = regions_of(ranks, keys, (torch.float32, torch.float32))
        assert [region.begin for slot in made.slots for region in slot] == [ALIGNMENT * n for n in range(2, 2 + 2 * slots)]
        assert {region.dtype for slot in made.slots for region in slot} == {torch.float32}
        assert made.size == ALIGNMENT * (2 + 2 * slots)


FACTS = {"lacks": "", "host": ("a", "1"), "number": 0, "gpu": "x", "reaches": ["y"]}
OTHER = {"lacks": "", "host": ("a", "1"), "number": 1, "gpu": "y", "reaches": ["x"]}


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        (OTHER, ""),
        (OTHER | {"lacks": "no PyTorch"}, "rank 1: no PyTorch"),
        (OTHER | {"host": ("b", "1")}, "the ranks are on several hosts"),
        (OTHER | {"number": 0}, "the GPUs of two ranks have one number"),
        (OTHER | {"gpu": "z"}, "the GPU of rank 0 cannot read the memory of that of rank 1"),
        (OTHER | {"reaches": []}, "the GPU of rank 1 cannot read the memory of that of rank 0"),
    ],
)
def test_where_gpus_share_memory(facts: dict[str, Any], text: str) -> None:
    assert symmetric.GpuProvider().obstacle([FACTS, facts]).startswith(text)
    assert bool(symmetric.GpuProvider().obstacle([FACTS, facts])) == bool(text)


def test_a_capture_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory would have to grow, or where the ranks would have to agree."""
    monkeypatch.setattr(symmetric, "capturing", lambda device: True)
    monkeypatch.setattr(torch.distributed, "all_gather_object", lambda to, x, group: to.__setitem__(0, x))
    group = torch.nn.Module()
    axis = calls.groups.Axis(group, 0, 2)
    provider = shared_memory.HostProvider()
    monkeypatch.setattr(provider, "facts", lambda device: {"lacks": ""})
    monkeypatch.setattr(provider, "obstacle", lambda cards: "")
    memory = symmetric.GroupMemory(axis, torch.device("cpu"), provider)
    with pytest.raises(libflash.InvalidError, match="inside the capture of a graph, where they cannot be allocated: call once"):
        memory.reserve(axis, 100)
    memory.peers = shared_memory.HostPeers([torch.empty(1000, dtype=torch.uint8)], axis)
    assert memory.reserve(axis, 1000) is memory.peers
    assert memory.captured == [memory.peers]  # a graph uses it from now on
    monkeypatch.setitem(symmetric.PROVIDERS, "cpu", provider)
    with pytest.raises(libflash.InvalidError, match="the first call of its group and inside the capture"):
        symmetric.memory_of(axis, torch.device("cpu"), "auto")


class Streams:
    """Replaces the streams of GPUs: records what was done, in the order of the host's calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[tuple[Any, ...]] = []
        self.current = self.stream("main")
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: self.stream("side"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(symmetric, "capturing", lambda device: self.capturing)
        self.capturing = False

    def stream(self, name: str) -> Any:
        return types.SimpleNamespace(
            name=name,
            wait_stream=lambda other: self.done.append((name, "waits for", other.name)),
            wait_event=lambda event: self.done.append((name, "waits for", event)),
            record_event=lambda: f"event on {name}",
        )

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def since(self) -> list[tuple[Any, ...]]:
        made, self.done = self.done, []
        return made


def test_order_of_copies_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy comes after the work before it, and before the end of its call; calls on two streams one after the other. Inside a
    capture nothing waits for what is outside, and a stream is joined only if it takes part.
    """
    streams = Streams(monkeypatch)
    barriers = []
    whole = torch.zeros(64, dtype=torch.uint8)
    handle = types.SimpleNamespace(
        barrier=lambda channel, timeout_ms: barriers.append((channel, timeout_ms)),
        get_buffer=lambda rank, shape, dtype, begin: whole.view(dtype)[begin : begin + 4].view(shape),
    )
    peers = symmetric.GpuPeers(whole, handle, 7000)
    assert peers.size == 64
    assert peers.view(1, 16, (2, 2), torch.float32).data_ptr() == whole.data_ptr() + 16
    peers.barrier()
    assert barriers == [(0, 7000)]
    to, source = torch.zeros(3), torch.arange(3.0)
    peers.begin()
    pending = peers.copy([(to, source)])
    assert torch.equal(to, source)
    pending.wait()
    assert streams.since() == [("side", "waits for", "main"), ("main", "waits for", "event on side")]
    peers.end()
    assert streams.since() == [("main", "waits for", "side")]
    peers.begin()
    peers.end()
    assert streams.since() == []
    with streams.on(streams.stream("other")):
        peers.begin()
        assert streams.since() == [("other", "waits for", "event on main")]
        peers.end()
        streams.capturing = True
        with streams.on(streams.stream("captured")):
            peers.begin()
            peers.end()
            assert streams.since() == []
    peers.begin()
    assert streams.since() == []


def test_the_environment_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for before in (None, "0"):
        if before is None:
            monkeypatch.delenv(symmetric.NO_MULTICAST, raising=False)
        else:
            monkeypatch.setenv(symmetric.NO_MULTICAST, before)
        with symmetric.without_multicast():
            assert os.environ[symmetric.NO_MULTICAST] == "1"
        assert os.environ.get(symmetric.NO_MULTICAST) == before
