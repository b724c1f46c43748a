"""Tangents in C++, by the scalar reference and the engine, and the float64 oracle agree over every option, as in test_scalar."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from case import Case, Inputs
from harness import cpu_kernels
from reference_tangent import Tangents, backward_tangent, forward_tangent
from tangent_cases import tangents_of
from tangent_problem import run_backward, run_forward
from test_scalar import CASES as SCALAR_CASES
from test_scalar import assert_agree, sequence_rows

# Tangents of parts of a problem are refused.
CASES = [dataclasses.replace(case, positions=None, part_of_dropout=False) for case in SCALAR_CASES]

ABSENT = [(), (), ("k", "v"), ("q",), ("v", "bias", "learnable_sink"), ("q", "k", "bias"), ("dout", "dlse"), ("q", "k", "v")]


def check_deltas(x: Inputs, t: Tangents, got: dict, exact: tuple[np.ndarray, ...], at: Any, scale: float) -> None:
    """delta = dout . o - dlse and tdelta = tdout . o + dout . to - tdlse, 0 for rows that see nothing."""
    o, lse, to = exact

    def of_rows(dout: np.ndarray | None, y: np.ndarray, less: np.ndarray | None) -> np.ndarray:
        dot = 0.0 if dout is None else np.moveaxis((dout * y).sum(-1), -1, -2)
        return np.where(lse != -np.inf, dot - (0.0 if less is None else less), 0.0)

    assert_agree(got["delta"][at], of_rows(x.dout, o, x.dlse)[at], "delta", scale)
    assert_agree(got["tdelta"][at], (of_rows(t.dout, o, t.dlse) + of_rows(x.dout, to, None))[at], "tdelta", scale)


def check(case: Case, isa: str, absent: tuple[str, ...], from_lse: bool, delta: bool, **tiles: int) -> None:
    x = case.inputs()
    t = tangents_of(case, x, *absent)
    o, lse, to, tlse = forward_tangent(x.q, x.k, x.v, t, **x.options)
    primal = {"o": o.astype(x.q.dtype), "lse": lse.astype(np.float64)} if from_lse else None
    got = run_forward(x, t, isa, primal=primal, delta=delta, **tiles)
    rows_q, rows_k = sequence_rows(case, x.q, case.seqlen_q), sequence_rows(case, x.k, case.seqlen_k)
    at_lse = (slice(None), rows_q) if case.packed else slice(None)
    inputs = [a for a in (x.q, x.k, x.v, x.dout, t.q, t.k, t.v, t.dout) if a is not None]
    # Sums of products of up to five inputs, which may cancel, with the errors of the scores.
    scale = max(np.abs(a).max(initial=1) for a in inputs) ** 5 * max(1, abs(case.softmax_scale or 0) * np.sqrt(case.head_dim))
    assert_agree(got["o"][rows_q], o[rows_q], "o")
    assert_agree(got["lse"][at_lse], lse[at_lse], "lse")
    assert_agree(got["to"][rows_q], to[rows_q], "to", scale)
    assert_agree(got["tlse"][at_lse], tlse[at_lse], "tlse", scale)
    if delta:
        check_deltas(x, t, got, (o, lse, to), at_lse, scale)
    exact, texact = backward_tangent(x.dout, x.q, x.k, x.v, t, dlse=x.dlse, **x.options)
    found = run_backward(x, t, isa, got, gradients=not from_lse, **tiles)
    for prefix, wanted in (("t", texact), ("", exact)):
        if prefix + "dq" not in found:
            continue
        for name, rows in {"dq": rows_q, "dk": rows_k, "dv": rows_k}.items():
            assert_agree(found[prefix + name][rows], getattr(wanted, name)[rows], prefix + name, scale)
        for name in ("dbias", "dsink"):
            assert (prefix + name in found) == (getattr(wanted, name) is not None)
            if prefix + name in found:
                assert_agree(found[prefix + name], getattr(wanted, name), prefix + name, scale)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_scalar(number: int) -> None:
    check(CASES[number], "scalar", ABSENT[number % len(ABSENT)], from_lse=number % 2 == 0, delta=number % 3 == 0)


ENGINES = [isa for isa in cpu_kernels() if isa != "scalar"]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_engine_in_float64(number: int) -> None:
    """The engine's float64 kernels, too, with tiles that divide the problems at many places."""
    tile_q, tile_k = ((0, 0), (2, 3), (16, 16), (1, 1), (5, 32))[number % 5]
    for isa in ENGINES:
        absent = ABSENT[(number // 2) % len(ABSENT)]
        check(CASES[number], isa, absent, from_lse=number % 2 == 1, delta=number % 3 == 0, tile_q=tile_q, tile_k=tile_k)
