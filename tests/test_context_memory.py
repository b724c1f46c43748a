"""The model of the memory of context parallel attention, against what PyTorch's allocator reports for each rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from benchmark_program import program

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)

import libflash.torch  # noqa: E402
from one_rank_alone import OwnMemory, step, stop_sending  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

MESHES = [
    ("ring", (2,)), ("ring", (4,)), ("ring", (7,)), ("all_gather", (2,)), ("all_gather", (4,)), ("heads", (2,)), ("heads", (4,)),
    ("heads_ring", (2, 3)),
]  # fmt: skip
model = program("_context_memory")


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        stop_sending(patch)
        yield


def on_the_cpu(call: Callable[[], object]) -> int:
    """The most that the call holds, its results included."""
    call()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        made = call()
    del made
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(changes))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("heads", [(8, 2), (8, 8)], ids="{0[0]} over {0[1]}".format)
@pytest.mark.parametrize(("scheme", "mesh"), MESHES, ids=[f"{scheme}-{mesh}" for scheme, mesh in MESHES])
@pytest.mark.parametrize("symmetric", [False, True])
def test_peak_of_each_rank(scheme: str, mesh: tuple[int, ...], heads: tuple[int, int], symmetric: bool) -> None:
    """In float32, since a sum of two types takes further memory on a CPU."""
    if symmetric and scheme == "heads":
        pytest.skip("heads are sent by messages")
    shape = model.Shape(128, *heads, 32, element=4)
    x = [torch.randn(1, 128, n, 32) for n in (heads[0], heads[1], heads[1])]
    ranks = range(torch.Size(mesh).numel())
    for rank, causal, backward in itertools.product({*ranks[:2], ranks[-1]}, (True, False), (False, True)):
        memory = OwnMemory() if symmetric else None
        found = on_the_cpu(partial(step, x, scheme, "zigzag", mesh, rank, causal, backward, memory))
        found += memory.size if memory else 0  # it is there before the call that is recorded
        wanted = model.peak(scheme, shape, mesh, causal, backward, rank, symmetric=symmetric)
        assert found == pytest.approx(wanted, rel=0.02), f"rank {rank}, {causal=}, {backward=}: {found / wanted:.3f}"


def test_what_the_benchmark_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model has the workspaces of this machine's kernels, as explain says them."""
    rank_memory = program("_rank_memory")
    said = {"get_world_size": 4, "get_rank": 3, "all_reduce": None}
    for name, value in said.items():
        monkeypatch.setattr(torch.distributed, name, lambda *given, value=value: value)
    monkeypatch.setattr(libflash.torch, "explain_context_parallel", lambda *x, **options: "scheme     ring: why\n")
    whole = [torch.zeros(1, 512, n, 32) for n in (8, 2, 2)]
    shards = [x[:, :128] for x in whole]
    assert rank_memory.workspace_of(whole)("backward", 128, 64, (4, 1), True) > 0
    names = ("ring", "ring, messages", "all_gather", "heads", "heads_ring", "auto", "PyTorch")
    found = {name: rank_memory.Measured(2_000_000, name == "ring") for name in names}
    for backward in (False, True):
        made = rank_memory.memory_of_ranks(found, whole, shards, True, backward)
        assert made.keys() == found.keys()
        for scheme in ("ring", "all_gather", "heads", "heads_ring"):
            mesh = (2, 2) if scheme == "heads_ring" else (4,)
            shape = model.Shape(128, 8, 2, 32, element=4)
            bare = model.peak(scheme, shape, mesh, True, backward, 3, symmetric=scheme == "ring")
            assert bare <= made[scheme]["model"] < 100 * bare
        assert made["auto"] == made["ring, messages"] != made["ring"]
        assert made["PyTorch"] == {"bytes": 2_000_000}
    assert rank_memory.said_of_memory({"bytes": 2_100_000, "model": 2_000_000}) == ", 0.002 GB beyond q, k, v, +5.0% of the model"
    assert rank_memory.said_of_memory(None) == ""
