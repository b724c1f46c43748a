"""Problems in forward mode: those of `cases`, each with a direction, that is, tangents for some of its inputs."""

from __future__ import annotations

import dataclasses
import zlib
from functools import cache, lru_cache
from typing import Any

import numpy as np

from . import cases, tangent_bounds
from .case import Case, Inputs
from .error_bounds import Tensor
from .reference_tangent import Tangents
from .rounding import stored
from .tolerance import Report

INPUTS = ("q", "k", "v", "bias", "learnable_sink", "dout", "dlse")
# Inputs without a tangent. The cases use the entries in turn.
ABSENT = [(), (), ("v", "dout", "dlse"), ("k", "v"), ("q", "bias"), ("q", "k", "bias", "learnable_sink"), ("dout", "dlse")]


@dataclasses.dataclass(frozen=True)
class TangentCase:
    number: int  # in quick()
    case: Case

    def __str__(self) -> str:
        return self.case.name

    @property
    def absent(self) -> tuple[str, ...]:
        return ABSENT[self.number % len(ABSENT)]

    def problem(self) -> tuple[Inputs, Tangents]:
        x = self.case.inputs()
        return x, tangents_of(self.case, x, *self.absent)

    def expected(self) -> dict[str, Tensor]:
        """Exact tangents of every result, with their limits."""
        return _expected(self)

    def check(self, **result: Any) -> dict[str, Report]:
        """Check tangents (to, tlse, tdq, ...) and delta by `tangent_bounds`, other results by the rule of the case."""
        own = {name: x for name, x in result.items() if name not in self.expected()}
        tangents = {name: x for name, x in result.items() if name not in own}
        return (self.case.check(**own) if own else {}) | tangent_bounds.reports(tangents, self.expected(), str(self))


@lru_cache(maxsize=16)
def _expected(tangent: TangentCase) -> dict[str, Tensor]:
    x, t = tangent.problem()
    assert x.dout is not None
    return tangent_bounds.expect(x.q, x.k, x.v, t, dout=x.dout, dlse=x.dlse, **x.options)


@cache
def quick() -> list[TangentCase]:
    """Every third of cases.quick()."""
    return [TangentCase(number, case) for number, case in enumerate(cases.quick()[::3])]


def tangents_of(case: Case, x: Inputs, *absent: str) -> Tangents:
    """A random direction, the same in every call, without the inputs named in `absent`."""
    rng = np.random.default_rng(zlib.crc32(("tangents of " + case.name).encode()))
    like = {"q": x.q, "k": x.k, "v": x.v, "dout": x.dout, "dlse": x.dlse}
    like |= {name: x.options.get(name) for name in ("bias", "learnable_sink")}
    made = {name: None if a is None else direction(rng, a) for name, a in like.items()}
    return Tangents(**{name: made[name] for name in INPUTS if name not in absent})


def direction(rng: np.random.Generator, like: np.ndarray) -> np.ndarray:
    """Random numbers rounded to the 8 significant bits of bf16, with integers, because NumPy has bf16 only with ml_dtypes."""
    bits = rng.standard_normal(like.shape).astype(np.float32).view(np.uint32)
    return stored(((bits + np.uint32(0x8000)) & np.uint32(0xFFFF0000)).view(np.float32), like.dtype)
