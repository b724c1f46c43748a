"""Inputs whose exact results are known: they show mask, index and pipeline errors that a tolerance hides.

    counting   q = 0: exp(lse) is the number n of visible keys; v column b is bit b of the key's index, so that
               o * n counts, bit by bit, which keys were seen; dk = 0
    selection  each key has a code of +-8 in 16 channels, each query copies the code of one key that it sees; scale 1:
               the softmax is one-hot (the next score is 128 lower), o is the v row of that key, dq = dk = 0, and
               dv sums small integers
    ones       v = 1: o = 1 within one ulp
    zero_v     v = 0: o = 0, dq = dk = 0
    zero_dout  dout = 0: no gradient at all
    equal      every key the same, integer dot products: p is uniform however large the scores, o the mean of v

`fill` builds the inputs of a case, `check` asserts their exact results, in addition to the tolerance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .fills import random_fill
from .reference import Head, Options, heads
from .rounding import ROUNDING, Rounding

if TYPE_CHECKING:
    from .case import Case, Inputs

KINDS = ("counting", "selection", "ones", "zero_v", "zero_dout", "equal")
CODE_DIMS = 16


def fill(case: Case, rng: np.random.Generator, shapes: list[tuple[int, ...]], options: dict) -> tuple[np.ndarray, ...]:
    """q, k, v, dout in float64 for a structured fill."""
    q, k, v, dout = random_fill("randn", rng, *shapes)
    if case.fill == "counting":
        q[:] = 0
        v[:] = key_bits(case, v.shape)
    elif case.fill == "selection":
        small = [rng.integers(-3, 4, x.shape).astype(np.float64) for x in (v, dout)]
        return (*codes(case, rng, q, k, options), *small)
    elif case.fill == "ones":
        v[:] = 1
    elif case.fill == "zero_v":
        v[:] = 0
    elif case.fill == "zero_dout":
        dout[:] = 0
    elif case.fill == "equal":
        k[:] = 64 * rng.integers(-8, 9, k.shape[-1])
        q[:] = rng.integers(-8, 9, q.shape)
    else:
        raise ValueError(f"{case.fill!r} is not one of {KINDS}")
    return q, k, v, dout


def key_bits(case: Case, shape: tuple[int, ...]) -> np.ndarray:
    """Column c holds one bit of the key's position in its sequence: bit c, and from bit 0 again after the last."""
    if case.packed:
        position = np.concatenate([np.arange(n) for n in case.seqlen_k] + [np.zeros(case.slack_rows, dtype=int)])
        position = position[:, None, None]
    else:
        position = np.arange(shape[1])[None, :, None, None]
    bits = np.arange(shape[-1]) % max(case.longest[1] - 1, 1).bit_length()
    return np.broadcast_to((position >> bits) & 1, shape)


def codes(case: Case, rng: np.random.Generator, q: np.ndarray, k: np.ndarray, options: dict) -> tuple[np.ndarray, np.ndarray]:
    """Keys with distinct codes, queries that copy the code of one visible key; the other channels are zero."""
    if q.shape[-1] < CODE_DIMS:
        raise ValueError(f"selection needs {CODE_DIMS} dims for its codes, the case has {q.shape[-1]}")
    if case.softmax_scale != 1 or case.dtype == "fp64":
        raise ValueError("selection is one-hot with softmax_scale 1 and where exp(-128) is nothing, not in float64")
    q, k = np.zeros_like(q), np.zeros_like(k)
    for head in heads(q, k, k, Options(**options)):
        position = np.arange(len(head.k))[:, None]
        k[(*head.at_k, slice(CODE_DIMS))] = 16.0 * ((position >> np.arange(CODE_DIMS)) & 1) - 8
        seen = np.flatnonzero(head.visible.any(axis=1))
        chosen = np.array([rng.choice(np.flatnonzero(head.visible[i])) for i in seen], dtype=int)
        rows = np.zeros((len(head.q), CODE_DIMS))
        rows[seen] = 16.0 * ((chosen[:, None] >> np.arange(CODE_DIMS)) & 1) - 8
        q[(*head.at_q, slice(CODE_DIMS))] = rows
    return q, k


def check(case: Case, inputs: Inputs, result: dict[str, np.ndarray]) -> None:
    """Check the exact results of a structured case in `result` (o, lse, dq, dk, dv)."""
    store = ROUNDING[inputs.v.dtype]
    got = {name: np.asarray(x).astype(np.float64) for name, x in result.items() if x is not None}
    if case.fill in ("counting", "selection", "ones", "equal"):
        for head in heads(inputs.q, inputs.k, inputs.v, Options(**inputs.options)):
            if "o" in got:
                check_rows(case.fill, head, got["o"][head.at_q], store)
            if "lse" in got and case.fill == "counting" and result["lse"].itemsize >= 4:  # a half type does not resolve them
                n = head.visible.sum(axis=1)
                with np.errstate(over="ignore"):
                    np.testing.assert_array_equal(np.rint(np.exp(got["lse"][head.at_lse])), n, f"{case}: keys seen")
    zero = {"counting": ["dk"], "selection": ["dq", "dk"], "zero_v": ["o", "dq", "dk"], "zero_dout": ["dq", "dk", "dv"]}
    for name in zero.get(case.fill, []):
        if name in got:
            assert not got[name].any(), f"{case}: {name} must be exactly 0, has {np.abs(got[name]).max()}"
    if case.fill == "selection" and "dv" in got:
        np.testing.assert_array_equal(got["dv"], case.reference().dv.round(), f"{case}: dv sums integers")


def check_rows(kind: str, head: Head, o: np.ndarray, store: Rounding) -> None:
    """Check one head's output; the tolerance checks rows without a visible key."""
    visible = head.visible.astype(np.float64)
    n = visible.sum(axis=1)[:, None]
    seen = n[:, 0] > 0
    if not seen.any():
        return
    ulp = 2 * store.u + store.sum_error(len(head.k))  # the sum's error counts if the storage type has its precision
    if kind == "counting":
        counts = visible @ head.v
        resolved = counts * store.u < 0.5  # larger counts are not exact in the storage type
        np.testing.assert_array_equal(np.rint(o * n)[resolved], counts[resolved], "keys seen, by bit of their index")
    elif kind == "selection":
        chosen = np.where(head.visible, head.q @ head.k.T, -np.inf).argmax(axis=1)
        np.testing.assert_array_equal(o[seen], head.v[chosen][seen], "the selected rows of v")
    elif kind == "ones":
        assert (np.abs(o[seen] - 1) <= ulp).all(), f"v = 1 gave {o[seen].min()} .. {o[seen].max()}"
    elif kind == "equal":
        mean, size = (visible[seen] @ v / n[seen] for v in (head.v, np.abs(head.v)))
        assert (np.abs(o[seen] - mean) <= ulp * size).all(), "equal keys must give the mean of v"
