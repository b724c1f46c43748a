"""Cases of all options in float64, with the oracle's tangents and second derivatives: for adapters that differentiate by
transformations."""

from __future__ import annotations

import dataclasses
from typing import Any

import cases
import numpy as np
from case import Case, Inputs
from convert import owned
from reference_tangent import Tangents, backward_tangent, forward_tangent
from tangent_cases import tangents_of

RELATIVE = 1e-10


def chosen(start: int) -> list[str]:
    """Every fifth case of those that every backend runs, from number `start` on, if it is small and has a backward pass."""
    small = [case for case in cases.quick() if not case.name.startswith(("poison", "exact")) and case.inputs().q.size < 40_000]
    return [case.name for case in small[start::5] if case.inputs().dout is not None]


def widened(x: Any) -> Any:
    """Arrays of floating-point numbers, also of 16 bits, as float64."""
    return x.astype(np.float64) if isinstance(x, np.ndarray) and x.dtype.kind not in "biu" else x


def wide(x: Inputs) -> Inputs:
    moved = {field.name: widened(getattr(x, field.name)) for field in dataclasses.fields(x) if field.name != "options"}
    return Inputs(**moved, options={name: widened(value) for name, value in x.options.items()})


class SecondProblem:
    """A case: its differentiable inputs, their direction, cotangents and the direction of those, and the other options."""

    def __init__(self, name: str) -> None:
        self.case: Case = cases.by_name(name)
        x = self.x = wide(self.case.inputs())
        t = self.t = tangents_of(self.case, x)
        self.inputs = {"q": x.q, "k": x.k, "v": x.v}
        self.inputs |= {n: x.options[n] for n in ("bias", "learnable_sink") if n in x.options}
        self.options = {n: y for n, y in x.options.items() if n not in self.inputs}
        self.direction = {n: getattr(t, n) for n in self.inputs}
        rows = (x.q.shape[1], x.q.shape[0]) if x.q.ndim == 3 else (x.q.shape[0], x.q.shape[2], x.q.shape[1])
        dlse = np.zeros(rows) if x.dlse is None else x.dlse
        self.cotangents = x.dout, dlse
        self.moved_cotangents = t.dout, np.zeros(dlse.shape) if t.dlse is None else t.dlse

    def forward(self) -> tuple[np.ndarray, ...]:
        """out, lse, tout, tlse"""
        return forward_tangent(self.x.q, self.x.k, self.x.v, self.t, **self.x.options)

    def backward(self, *, along_cotangents: bool) -> tuple[Any, Any]:
        """The gradients and their tangents."""
        t: Tangents = self.t if along_cotangents else dataclasses.replace(self.t, dout=None, dlse=None)
        dout, dlse = self.cotangents
        return backward_tangent(dout, self.x.q, self.x.k, self.x.v, t, dlse=dlse, **self.x.options)

    def check(self, found: Any, wanted: Any, names: tuple[str, ...]) -> None:
        """Compare results, without rows that belong to no sequence."""
        for name, *pair in zip(names, found, wanted, strict=True):
            x, y = (owned(self.case, {"lse": np.zeros((1, 0))} | {name: np.asarray(a)})[name] for a in pair)
            finite = np.isfinite(y)
            assert (np.isfinite(x) == finite).all()
            limit = RELATIVE * max(1.0, float(np.abs(y[finite]).max(initial=0)))
            np.testing.assert_allclose(x[finite], y[finite], rtol=0, atol=limit, err_msg=name)

    def check_gradients(self, found: dict[str, Any], wanted: Any) -> None:
        for name, x in found.items():
            y = wanted.dsink if name == "learnable_sink" else getattr(wanted, "d" + name)
            self.check([x], [y], ("d" + name,))
