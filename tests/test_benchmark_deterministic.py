"""gpu_deterministic.py with the CPU in place of a GPU: its cases, and its comparison of bits."""

from __future__ import annotations

import types
from collections import Counter

import pytest
from benchmark_program import cells_on_the_cpu, program

torch = pytest.importorskip("torch")


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Small cells; no time is measured, but every call runs."""
    made = program("gpu_deterministic")
    cells_on_the_cpu(monkeypatch, "_shapes", {"TOKENS": 96, "WIDTH": 2048})
    monkeypatch.setattr(made, "FAMILY", "cpu")
    monkeypatch.setattr(made, "OPTION_SEQLEN", 48)

    def medians(calls: dict, rounds: int) -> tuple[dict[str, float], float]:
        return {name: float(len(call())) for name, call in calls.items()}, 0.0

    choice = made.own_choice

    def another(p: object, **given: object) -> str:
        assert choice(p, **given) == "cpu"
        return "another"

    monkeypatch.setattr(made, "medians", medians)
    monkeypatch.setattr(made, "own_choice", another)
    return made


def test_cases(benchmark: types.ModuleType) -> None:
    found = Counter(case.option for case in benchmark.option_cases("bfloat16"))
    assert found == {"window": 3, "grouped": 6, "softcap": 3, "alibi": 3, "bias": 3, "mask": 3, "dropout": 6}
    assert len(benchmark.plain_cases("bfloat16")) == 36


def test_every_option_runs(benchmark: types.ModuleType) -> None:
    """The forward pass has the option, too: the calls give the gradients of libflash.torch.attention with it."""
    import libflash.torch

    for case in benchmark.option_cases("bfloat16"):
        if case.cell.head_dim > 64 and case.option != "grouped":
            continue
        p, given = benchmark.problem_of(case)
        inputs = [x.clone().requires_grad_() for x in (p.q, p.k, p.v)]
        out = libflash.torch.attention(*inputs, causal=case.cell.causal, **given)
        wanted = torch.autograd.grad(out, inputs, p.dout)
        assert all(map(torch.equal, benchmark.backward_libflash(p, None, given=given)(), wanted)), case
        times, _ = benchmark.measure(case, repeats=1, rounds=1)
        assert times == dict.fromkeys(("default", "deterministic", "deterministic, sm80"), 3.0)


@pytest.mark.parametrize("wrong", ["another number", "not written"])
def test_other_bits_are_found(benchmark: types.ModuleType, wrong: str) -> None:
    made, calls = [torch.zeros(3) for _ in range(3)], []

    def call() -> list:
        calls.append(1)
        for x in made[: 2 if wrong == "not written" and len(calls) > 1 else 3]:
            x.fill_(float(len(calls)) if wrong == "another number" and x is made[1] else 1.0)
        return made

    with pytest.raises(ValueError, match="dk has other bits" if wrong == "another number" else "dv has other bits"):
        benchmark.same_bits(call, 2)
