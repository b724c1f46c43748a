"""One thing to run on a target: a case, a check, a repetition, a bad input."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from . import structured, tangent_bounds, tolerance
from .case import Case
from .checks.bad_input import BadInput
from .checks.check import Check, bits
from .decode_cases import DecodeCase
from .outcome import FAILS, NOT_OFFERED, Outcome
from .reference import Options, heads
from .tangent_cases import TangentCase
from .target import NotOffered, Results, Target


@dataclasses.dataclass(frozen=True)
class Item:
    """`run` adds its findings to the outcome; `dtype` is the name of the storage type."""

    group: str
    name: str
    dtype: str
    run: Callable[[Target, Outcome], None]

    def outcome(self, target: Target) -> Outcome:
        """Run on the target. Every exception is a finding, except NotOffered."""
        outcome = Outcome(self.group, self.name)
        try:
            self.run(target, outcome)
        except NotOffered as lacking:
            outcome.status, outcome.lacks = NOT_OFFERED, str(lacking)
            return outcome
        except AssertionError as finding:
            outcome.findings.append(str(finding).strip())
        except Exception as error:
            outcome.findings.append(f"raised {type(error).__name__}: {error}")
        if outcome.findings:
            outcome.status = FAILS
        return outcome


def of_case(case: Case) -> Item:
    def run(target: Target, outcome: Outcome) -> None:
        if outcome.group == "accuracy" and has_row_without_key(case):
            outcome.group = "rows without a key"
        if case.poison not in (None, "unused"):
            target.keep_apart()
        x = case.inputs()
        results = target.run(x)
        expected = case.expected(**target.errors(x))
        outcome.reports, outcome.findings = tolerance.judge(present(results, expected), expected)
        if case.fill in structured.KINDS:
            structured.check(case, x, results)

    group = "NaN and infinity" if case.poison else "exact answers" if case.fill in structured.KINDS else "accuracy"
    return Item(group, case.name, case.dtype, run)


def has_row_without_key(case: Case) -> bool:
    x = case.inputs()
    return any(not head.visible.any(axis=1).all() for head in heads(x.q, x.k, x.v, Options(**x.options)))


def present(results: Results, expected: tolerance.Expected) -> Results:
    """The results that are expected: without gradients, if the case has forward alone."""
    return {name: x for name, x in results.items() if name in expected.tensors}


def of_decode_case(case: DecodeCase) -> Item:
    def run(target: Target, outcome: Outcome) -> None:
        results = target.run_decode(case.inputs(), case.dtype)
        caches: dict[str, Any] = {name: results.pop(name) for name in ("k_cache", "v_cache") if name in results}
        expected = case.expected()
        outcome.reports, outcome.findings = tolerance.judge(results, expected)
        case.check(**caches)

    return Item("decode", case.name, case.dtype, run)


def of_tangent(tangent: TangentCase) -> Item:
    def run(target: Target, outcome: Outcome) -> None:
        if tangent.case.poison not in (None, "unused"):
            target.keep_apart()
        results = target.run_tangents(*tangent.problem())
        ratios, outcome.findings = tangent_bounds.judge(results, tangent.expected())
        outcome.reports = {name: tolerance.Report(t1=ratio) for name, ratio in ratios.items()}

    return Item("tangents", tangent.case.name, tangent.case.dtype, run)


def of_check(group: str, check: Check, *, apart: bool = False) -> Item:
    """`apart`: see broken_values.needs_apart."""

    def run(target: Target, outcome: Outcome) -> None:
        if apart:
            target.keep_apart()
        check(target.call)

    return Item(group, check.name, check.dtype, run)


def repeated(case: Case, gradients: bool, times: int = 3) -> Item:
    """Repeated calls give the same bits."""

    def run(target: Target, outcome: Outcome) -> None:
        def once() -> Results:
            x = case.inputs()
            return target.run(x if gradients else dataclasses.replace(x, dout=None, dlse=None), repeatable=True)

        first = once()
        if gradients and "dq" not in first:
            raise NotOffered("gradients")
        for _ in range(times - 1):
            for name, x in once().items():
                different = bits(x) != bits(first[name])
                if different.any():
                    outcome.findings.append(f"{name}: {int(different.sum())} of {different.size} elements differ in another run")

    return Item("same bits again", f"{'backward' if gradients else 'forward'}-{case.name}", case.dtype, run)


def refused(bad: BadInput, dtype: str) -> Item:
    def run(target: Target, outcome: Outcome) -> None:
        missing = [word for word in (dtype, bad.needs) if word and word not in target.offers]
        missing += ["the contents of arrays are not looked at on this device"] * (bad.contents and not target.reads_contents)
        if missing:
            raise NotOffered(", ".join(missing))
        try:
            results = target.results(bad.inputs(dtype))
        except Exception:
            return
        o = results["o"]
        words = f"shape {o.shape}, {'with NaN' if np.isnan(o.astype(np.float64)).any() else 'all finite'}"
        outcome.findings.append(f"not refused: the call gave a result ({words})")

    return Item("bad input", f"{bad.name} ({dtype})", dtype, run)
