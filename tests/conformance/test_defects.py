"""The conformance kit finds the defects of wrong targets, and none in a right target."""

from __future__ import annotations

import pytest
from conformance_targets import AcceptsBadInput, ChangesBits, Emulated, Fragile, Leaking, LimitedTarget, TopLeft
from defects import DEFECTS
from emulator import Emulator
from libflash.conformance.items import chosen
from libflash.conformance.outcome import FAILS, HOLDS, NOT_OFFERED, Outcome
from libflash.conformance.target import Target

TYPES = ["bf16", "fp16", "fp32", "fp64"]


def outcomes(target: Target, *words: str, types: list[str] = TYPES) -> list[Outcome]:
    return [item.outcome(target) for item in chosen(types, list(words))]


def failing(found: list[Outcome]) -> dict[str, str]:
    return {outcome.name: "\n".join(outcome.findings) for outcome in found if outcome.status == FAILS}


def test_a_right_emulator_holds() -> None:
    found = [outcome for words in WHERE[:-1] for outcome in outcomes(Emulated(), *words)]
    assert not failing(found)
    assert sum(outcome.status == HOLDS for outcome in found) > 15


# Every defect must show in at least one of these: small problems first, and a large one, which the last defect needs.
WHERE = [
    ("accuracy", "fill-randn-bf16"),
    ("accuracy", "fill-mean"),
    ("exact answers", "exact-counting"),
    ("accuracy", "large-bf16"),
]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
def test_seeded_defects_are_found(defect: type[Emulator]) -> None:
    target = Emulated(defect)
    assert any(failing(outcomes(target, *words)) for words in WHERE)


def test_results_that_change_between_calls() -> None:
    found = failing(outcomes(ChangesBits(), "same bits again", "heads-4"))
    assert found
    assert all(name.startswith("backward") and "dq: 1 of" in text for name, text in found.items())


def test_bad_input_that_is_accepted() -> None:
    found = failing(outcomes(AcceptsBadInput(), "bad input", types=["fp32"]))
    assert len(found) == len(chosen(["fp32"], ["bad input"]))
    assert all("not refused" in text for text in found.values())


def test_nan_that_leaks() -> None:
    found = failing(outcomes(Leaking(), "NaN and infinity"))
    assert any(name.startswith("hidden_keys_do_not_leak") for name in found)
    assert any(name.startswith("poison-") for name in found)


def test_the_wrong_corner() -> None:
    assert any("keys seen" in text for text in failing(outcomes(TopLeft(), "exact answers", "counting", "-causal")).values())


def test_an_exception_is_a_failure() -> None:
    found = failing(outcomes(Fragile(), "only-lengths"))
    assert found
    assert all("raised KeyError: 'no such kernel'" in text for text in found.values())


def test_what_is_not_offered_is_no_failure() -> None:
    found = outcomes(LimitedTarget(), "dim-")
    assert not failing(found)
    lacking = {outcome.lacks for outcome in found if outcome.status == NOT_OFFERED}
    assert {"bf16", "head_dim must be a multiple of 8", "head_dim above 128", "two head_dims"} <= lacking
    assert any(outcome.status == HOLDS for outcome in found)
    assert {outcome.lacks for outcome in outcomes(LimitedTarget(), "decode")} == {"decode"}
