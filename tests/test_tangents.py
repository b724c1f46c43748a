"""Tangents of every listed case, by every CPU kernel that this machine can run, against the float64 oracle."""

from __future__ import annotations

import cases
import numpy as np
import pytest
import tangent_bounds
import tangent_cases
from harness import cpu_kernels
from tangent_cases import TangentCase, tangents_of
from tangent_problem import run_backward, run_forward

CASES = [(case, isa) for case in tangent_cases.quick() for isa in cpu_kernels() if isa != "scalar"]


def check(tangent: TangentCase, isa: str) -> dict[str, float]:
    case, number = tangent.case, tangent.number
    x, t = tangent.problem()
    expected = tangent.expected()
    fused = run_forward(x, t, isa, delta=number % 2 == 0)
    case.check(o=fused["o"], lse=fused["lse"])
    from_lse = run_forward(x, t, isa, primal={name: fused[name] for name in ("o", "lse")}, delta=number % 2 == 0)
    tangent_bounds.check(from_lse, expected, f"{case}, from lse")
    return tangent_bounds.check(fused | run_backward(x, t, isa, fused, gradients=number % 4 == 0), expected, str(case))


@pytest.mark.parametrize(("case", "isa"), CASES, ids=[f"{case}-{isa}" for case, isa in CASES])
def test_case(case: TangentCase, isa: str) -> None:
    check(case, isa)


@pytest.mark.parametrize("isa", [isa for isa in cpu_kernels() if isa != "scalar"])
def test_a_wrong_result_is_found(isa: str) -> None:
    """The check fails for a lost row, a scale of a tangent that is wrong by 2 %, and a missing term."""
    case = cases.by_name("only-visible-1")
    x = case.inputs()
    t = tangents_of(case, x)
    expected = tangent_bounds.expect(x.q, x.k, x.v, t, dout=x.dout, dlse=x.dlse, **x.options)
    fused = run_forward(x, t, isa)
    right = fused | run_backward(x, t, isa, fused)
    tangent_bounds.check(right, expected)
    for name in ("to", "tdq", "tdk", "tdv"):
        lost = right[name].copy()
        lost[0, 3, 0] = 0
        scaled = (right[name].astype(np.float64) * 1.2).astype(right[name].dtype)
        for wrong in (lost, scaled):
            with pytest.raises(AssertionError):
                tangent_bounds.check({name: wrong}, expected)
    for absent in ("q", "k", "v"):
        partial = run_forward(x, tangents_of(case, x, absent), isa)
        with pytest.raises(AssertionError):
            tangent_bounds.check({"to": partial["to"]}, expected)
    for absent in ("q", "k", "v", "dout"):
        partial = run_backward(x, tangents_of(case, x, absent), isa, fused)
        with pytest.raises(AssertionError):
            tangent_bounds.check(partial, expected)
