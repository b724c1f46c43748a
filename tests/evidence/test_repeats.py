"""Counts of differing repeats, with CPU kernels in place of CUDA kernels, and with calls whose bits differ."""

from __future__ import annotations

import pytest
from gpu_kernels import KINDS, in_place_of

torch = pytest.importorskip("torch")
import repeats  # noqa: E402  (needs torch)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "BATCH", 3)


def test_kernels_that_repeat_themselves(small: None) -> None:
    entry, right = repeats.entry(in_place_of("forward"), 3)
    assert right
    assert len(entry["golden"]) == 32
    assert entry["differing"] == entry["dense"] == entry["options"] == entry["blocks"] == {"o": 0, "lse": 0}
    assert "default" not in entry
    entry, right = repeats.entry(in_place_of("decode"), 3)
    assert right
    assert entry["differing"] == {"o": 0, "lse": 0}
    entry, right = repeats.entry(in_place_of("backward"), 3)
    assert right
    assert entry["differing"] == entry["default"] == {"dq": 0, "dk": 0, "dv": 0}


OTHERS = {
    "statistics": ("o", "lse", "max_logit", "entropy"),
    "values in keys": ("o", "lse"),
    "forward_tangent": ("o", "lse", "to", "tlse"),
    "backward_tangent": ("tdq", "tdk", "tdv"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_kernels_of_other_kinds(small: None, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One problem; every tensor counts."""
    kernel = in_place_of(kind)
    entry, right = repeats.entry(kernel, 3)
    assert right
    assert entry.keys() == {"kernel", "golden", "differing"}
    assert entry["differing"] == dict.fromkeys(OTHERS[kind], 0)
    real, count = repeats.calls(kernel)["differing"], iter(range(1000))
    name = OTHERS[kind][-1]
    monkeypatch.setattr(repeats, "calls", lambda _: {"differing": lambda: (found := real()) | {name: found[name] * next(count)}})
    entry, right = repeats.entry(kernel, 2)
    assert not right
    assert entry["differing"][name] == 2


def test_every_kind_has_a_test() -> None:
    assert {*OTHERS, "forward", "backward", "decode"} == set(KINDS)


def test_what_differs_is_counted() -> None:
    """NaN equals NaN; the sign of zero counts."""
    made = torch.zeros(2, 5, dtype=torch.bfloat16)
    made[0] = torch.nan
    calls = iter([made, made, made, -made, made, -made])
    found = repeats.differing(lambda: {"a": next(calls), "b": made}, 5, lambda: None)
    assert found == {"a": 2, "b": 0}


@pytest.mark.parametrize(
    ("mode", "tensor", "right"),
    [
        ("differing", "dq", False),
        ("differing", "dv", False),
        ("default", "dq", True),
        ("default", "dk", False),
        ("default", "dv", False),
    ],
)
def test_what_may_differ(small: None, monkeypatch: pytest.MonkeyPatch, mode: str, tensor: str, right: bool) -> None:
    """Only dq may differ, and only without deterministic=True."""
    real = repeats.calls

    def restless(kernel: dict) -> dict:
        made = real(kernel)
        steady, count = made[mode], iter(range(1000))
        return made | {mode: lambda: (found := steady()) | {tensor: found[tensor] * next(count)}}

    monkeypatch.setattr(repeats, "calls", restless)
    entry, verdict = repeats.entry(in_place_of("backward"), 2)
    assert entry[mode][tensor] == 2
    assert verdict == right
