"""Layers that share a schedule, on the GPU: no bit changes, in captured graphs and on several streams too; and a schedule of any
numbers writes nothing outside of the results.
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from gpu_case import same_bits  # noqa: E402  (needs torch)
from gpu_graphs import captured  # noqa: E402
from gpu_kernels import device_of, in_place_of, kernels, parameters  # noqa: E402
from gpu_schedule import CACHED, HEADS_Q, LAYERS, ROWS, Layers, Results  # noqa: E402

KERNELS = kernels("prefill")
every_kernel = pytest.mark.parametrize("kernel", parameters([*KERNELS, in_place_of("prefill")]))
on_gpu = pytest.mark.parametrize("kernel", parameters(KERNELS))
kinds_of_rows = pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
FORMS = (
    {"causal": True},
    {"causal": False},
    {"causal": True, "window_size": (90, 0)},
    {"causal": True, "invariant": True},
)


def same(some: list[Results], others: list[Results]) -> bool:
    return all(same_bits(x, y) for one, other in zip(some, others, strict=True) for x, y in zip(one, other, strict=True))


@every_kernel
@kinds_of_rows
@pytest.mark.parametrize("page", [0, 16, 40])
@pytest.mark.parametrize("more", FORMS, ids=str)
def test_no_bit_changes(kernel: dict, page: int, rows: tuple[int, ...], more: dict[str, Any]) -> None:
    """Pages of 40 rows are copied, where the kernel has an instance for that, and only without `invariant`."""
    layers = Layers(kernel, page, rows, **more)
    if device_of(kernel) == "cuda" and f"{kernel['name']}, tile" not in layers.explain():
        assert page == 40 or kernel["head_dim_v"] > 128, "the prefill kernel is not in the plan"
        return
    wanted = layers.results()
    schedule = layers.schedule(layer=1)
    before = None if schedule is None else schedule.clone()
    assert same(layers.results(schedule=schedule), wanted)
    assert before is None or torch.equal(schedule, before), "the schedule was written"
    assert ("tile order from the schedule: " in layers.explain(schedule=schedule)) == (schedule is not None)


def units(schedule: torch.Tensor) -> torch.Tensor:
    """Batch entry, head and tile of each unit. The number of thread blocks is an estimate, whose last bits may differ."""
    return schedule[4:].view(-1, 4)[: int(schedule[1]), :3]


@every_kernel
def test_strides_do_not_matter(kernel: dict) -> None:
    """A schedule that was made for other strides."""
    layers = Layers(kernel, 16, ROWS["mixed"], causal=True)
    wanted, schedule = layers.results(), layers.schedule()
    layers.caches = [tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in caches) for caches in layers.caches]
    assert same(layers.results(schedule=schedule), wanted)
    other = layers.schedule()
    assert schedule is None or torch.equal(units(schedule), units(other))


STEPS = (
    (ROWS["mixed"], CACHED),
    ((0,) * 8, (0,) * 8),
    ((1170, 0, 0, 0, 0, 0, 0, 0), CACHED),
    ((1,) * 8, CACHED),
    ((64, 63, 64, 63, 65, 1, 0, 700), CACHED[::-1]),
    (ROWS["mixed"], CACHED),
)


@every_kernel
@pytest.mark.parametrize("page", [0, 16])
def test_replays_with_other_lengths(kernel: dict, page: int) -> None:
    """A graph of a step: the schedule once, then three layers that read it. Each replay computes it again."""
    layers = Layers(kernel, page, ROWS["mixed"], causal=True)
    outputs, schedules = layers.outputs(), []

    def step() -> None:
        schedules.append(layers.schedule())
        for layer in range(LAYERS):
            layers.run(layer, outputs[layer], schedule=schedules[-1])

    replay = captured(step, layers.device)
    for rows, cached in STEPS:
        layers.set_lengths(rows, cached)
        for x in (x for results in outputs for x in results):
            x.fill_(7)
        replay()
        replay()
        assert same(outputs, layers.results())


@on_gpu
@pytest.mark.parametrize("page", [16])
def test_layers_on_several_streams(kernel: dict, page: int) -> None:
    """They read one schedule at the same time."""
    layers = Layers(kernel, page, ROWS["mixed"], causal=True)
    wanted, schedule, outputs = layers.results(), layers.schedule(), layers.outputs()
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(LAYERS)]
    for _ in range(4):
        for layer, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                layers.run(layer, outputs[layer], schedule=schedule)
    torch.cuda.synchronize()
    assert same(outputs, wanted)


@every_kernel
def test_a_kernel_waits_for_the_schedule(kernel: dict) -> None:
    """The lengths are written right before the call that makes the schedule, and layers follow it without a pause."""
    layers = Layers(kernel, 16, ROWS["mixed"], causal=True)
    wanted = layers.results()
    for _ in range(3):
        layers.set_lengths((0,) * 8, (0,) * 8)
        if layers.device == "cuda":
            torch.cuda._sleep(2_000_000)
        layers.set_lengths(ROWS["mixed"], CACHED)
        assert same(layers.results(schedule=layers.schedule()), wanted)


@on_gpu
@kinds_of_rows
def test_a_schedule_of_any_numbers(kernel: dict, rows: tuple[int, ...]) -> None:
    """The call ends and writes only rows of the sequences, and the next call is right."""
    layers = Layers(kernel, 16, rows, causal=True)
    wanted, schedule = layers.results(), layers.schedule()
    generator = torch.Generator("cuda").manual_seed(1)
    total, dim_v = sum(rows), kernel["head_dim_v"]
    space = torch.full((3 * total, HEADS_Q, dim_v), 7, dtype=layers.queries[0].dtype, device="cuda")
    lse = torch.empty(HEADS_Q, total, device="cuda")
    for fill in (0, -1, 1, 7, 2**31 - 1, -(2**31), None, None):
        wrong = torch.empty_like(schedule)
        wrong.random_(-(2**31), 2**31 - 1, generator=generator) if fill is None else wrong.fill_(fill)
        layers.run(0, [space[total : 2 * total], lse], schedule=wrong)
        torch.cuda.synchronize()
        assert (space[:total] == 7).all()
        assert (space[2 * total :] == 7).all()
    longer = Layers(kernel, 16, (900, 800, 700, 600, 500, 400, 300, 200), causal=True).schedule()
    layers.run(0, [space[total : 2 * total], lse], schedule=longer)
    assert (space[:total] == 7).all()
    assert (space[2 * total :] == 7).all()
    assert same(layers.results(schedule=schedule), wanted)
