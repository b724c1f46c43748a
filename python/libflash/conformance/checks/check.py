"""A check: a function with the arguments of one run, and a name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np

from ..rounding import DTYPES, stored
from ..target import NotOffered, Results
from ..tolerance import check as check_results
from ..tolerance import expect


class Run(Protocol):
    def __call__(self, q: Any, k: Any, v: Any, dout: Any = None, **options: Any) -> Results: ...


@dataclasses.dataclass(frozen=True)
class Check:
    name: str
    dtype: str
    function: Callable[..., None]
    arguments: tuple[Any, ...]

    def __str__(self) -> str:
        return self.name

    def __call__(self, run: Run) -> None:
        self.function(run, *self.arguments)


def checks_of(function: Callable[..., None], types: Iterable[str], *factors: dict[str, Any]) -> list[Check]:
    """One check for each of the storage types that this Python has and each combination of one value from every factor. A factor
    maps names to values.
    """
    combined: list[tuple[str, tuple[Any, ...]]] = [(function.__name__, ())]
    for factor in factors:
        combined = [(f"{name}-{label}", (*values, value)) for name, values in combined for label, value in factor.items()]
    return [
        Check(f"{name}-{dtype}", dtype, function, (DTYPES[dtype], *values))
        for name, values in combined
        for dtype in types
        if dtype in DTYPES
    ]


def random(*shape: int, seed: int = 0, dtype: np.dtype | str = "fp32") -> np.ndarray:
    return stored(np.random.default_rng(seed).standard_normal(shape), dtype)


def qkv(
    batch: int = 1, sq: int = 40, sk: int = 56, hq: int = 4, hk: int = 2, d: int = 16, dtype: np.dtype | str = "fp32"
) -> list[np.ndarray]:
    shapes = (batch, sq, hq, d), (batch, sk, hk, d), (batch, sk, hk, d)
    return [random(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]


def assert_right(got: Results, q: Any, k: Any, v: Any, dout: Any = None, **options: Any) -> None:
    """The results satisfy the rule of `tolerance`."""
    if any(name in got for name in ("dq", "dk", "dv")):
        options["dout"] = dout
    check_results(got, expect(q, k, v, **options))


def assert_zero(got: Results, *names: str) -> None:
    """Every element of these tensors, as far as the target computes them, is exactly 0."""
    for name in names:
        if name in got:
            assert not got[name].any(), f"{name} must be exactly 0, has {np.abs(wide(got[name])).max()}"


def wide(x: np.ndarray) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def bits(x: np.ndarray) -> np.ndarray:
    """The elements as integers, to compare bits: 0 and -0 differ, and a NaN equals a NaN with the same bits."""
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


def assert_same_bits(got: np.ndarray, wanted: np.ndarray, what: str) -> None:
    different = bits(got) != bits(wanted)
    assert got.dtype == wanted.dtype, f"{what}: {got.dtype}, before {wanted.dtype}"
    assert not different.any(), f"{what}: {int(different.sum())} of {different.size} elements changed"


def only(got: Results, name: str) -> np.ndarray:
    """The tensor `name`, without which a check has nothing to test."""
    if name not in got:
        raise NotOffered(name)
    return got[name]
