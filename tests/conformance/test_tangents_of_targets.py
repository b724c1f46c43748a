"""The kit's checks in forward mode: they hold for right targets, find seeded defects, and are not run where it is not offered."""

from __future__ import annotations

import dataclasses

import pytest
from libflash.conformance.case import Inputs
from libflash.conformance.items import chosen
from libflash.conformance.outcome import FAILS, HOLDS, NOT_OFFERED, Outcome
from libflash.conformance.reference_tangent import Tangents
from libflash.conformance.target import JVP, Results, Target
from libflash.conformance.targets import make
from libflash.conformance.targets.own import Own


def outcomes(target: Target, *types: str) -> list[Outcome]:
    found = [item.outcome(target) for item in chosen(list(types), ["tangents"]) if item.group == "tangents"]
    assert len(found) > 2
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["libflash", "libflash:generic", "libflash.torch", "libflash.jax", "torch.sdpa:math", "jax"])
def test_right_targets_hold(name: str) -> None:
    if "torch" in name or "jax" in name:
        pytest.importorskip("torch" if "torch" in name else "jax")
    own = name.startswith("libflash")
    found = outcomes(make(name, "cpu"), "fp32", *(["bf16"] if own else []))
    assert not [(outcome.name, outcome.findings) for outcome in found if outcome.status == FAILS]
    assert sum(outcome.status == HOLDS for outcome in found) >= (len(found) if own else 2)
    results = {tensor for outcome in found for tensor in outcome.reports}
    assert {"to", "tdq", "tdk", "tdv"} <= results
    assert ("tlse" in results) == own


class WithoutTv(Own):
    """The term P tv is missing in the tangent of out."""

    def tangents(self, x: Inputs, t: Tangents) -> Results:
        right = super().tangents(x, t)
        return right | {"to": super().tangents(x, dataclasses.replace(t, v=None))["to"]}


class FirstOrderOnly(Own):
    """The tangents of the gradients as if only dout and dlse had tangents."""

    def tangents(self, x: Inputs, t: Tangents) -> Results:
        still = super().tangents(x, Tangents(dout=t.dout, dlse=t.dlse))
        return super().tangents(x, t) | {name: still[name] for name in ("tdq", "tdk", "tdv")}


class Negative(Own):
    def tangents(self, x: Inputs, t: Tangents) -> Results:
        right = super().tangents(x, t)
        return right | {"tlse": -right["tlse"]}


class Flat(Own):
    def tangents(self, x: Inputs, t: Tangents) -> Results:
        right = super().tangents(x, t)
        return right | {"tdk": right["tdk"][..., :-1]}


@pytest.mark.parametrize("defect", [WithoutTv, FirstOrderOnly, Negative, Flat], ids=lambda x: x.__name__)
def test_defects_are_found(defect: type[Own]) -> None:
    assert any(outcome.status == FAILS for outcome in outcomes(defect(), "fp32"))


class ForwardAlone(Own):
    """Offers the forward mode of forward, but not of backward."""

    def __init__(self) -> None:
        super().__init__()
        self.offers_tangents = frozenset((JVP,))


def test_what_is_not_offered_is_not_asked_for() -> None:
    found = outcomes(ForwardAlone(), "fp32")
    assert {tensor for outcome in found for tensor in outcome.reports} == {"to", "tlse"}
    assert all(outcome.status == HOLDS for outcome in found)
    target = ForwardAlone()
    target.offers_tangents = frozenset()
    assert {(outcome.status, outcome.lacks) for outcome in outcomes(target, "fp32")} == {(NOT_OFFERED, "jvp")}
