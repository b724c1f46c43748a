"""One test problem: shapes, values and options, from which inputs, exact results and limits are built.

case = cases.quick()[0]
x = case.inputs()                                   q, k, v, dout, dlse and options, in the storage type
out, lse = libflash.attention(x.q, x.k, x.v, **x.options, return_lse=True)
case.check(o=out, lse=lse)                          raises AssertionError with the error
"""

from __future__ import annotations

import dataclasses
import zlib
from functools import lru_cache

import numpy as np

from . import structured, tolerance
from .fills import GENERIC, random_fill
from .reference import Gradients, ScoreNumbers, backward, forward
from .rounding import DTYPES, stored, widened
from .visibility import BLOCK


@dataclasses.dataclass
class Inputs:
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray | None  # None: forward alone
    dlse: np.ndarray | None
    options: dict  # keyword arguments of libflash.attention and of the reference alike


@dataclasses.dataclass(frozen=True)
class Case(ScoreNumbers):
    """Strings of axis letters give the full axes of an optional tensor, the others are 1: bias="hk" is (1, H, 1, Sk)."""

    name: str
    dtype: str = "bf16"
    batch: int = 1
    seqlen_q: int | tuple[int, ...] = 64  # a tuple: packed, one length per sequence
    seqlen_k: int | tuple[int, ...] = 64
    heads_q: int = 2
    heads_k: int = 2
    head_dim: int = 64
    head_dim_v: int | None = None
    fill: str = "randn"
    causal: bool = False
    causal_align: str = "bottom_right"
    window_size: tuple[int, int] = (-1, -1)
    alibi: str | None = None  # "h" or "bh"
    bias: str | None = None  # letters of "bhqk"
    mask: str | None = None
    block_mask: str | None = None  # letters of "bh"
    sink: bool = False
    dropout_p: float = 0.0
    seed: int = 0
    offset: int = 0
    used_q: tuple[int, ...] | None = None
    used_k: tuple[int, ...] | None = None
    slack_rows: int = 0  # packed: rows after the last sequence
    dlse: bool = False
    positions: str | None = None  # how rows and keys have them: "begin": one number; "begins": one per sequence; "rows": one each
    part_of_dropout: bool = False  # give sequence_numbers, head_begin and heads_total
    poison: str | None = None  # where NaN or inf is: see `poisoned`

    def __str__(self) -> str:
        return self.name

    @property
    def packed(self) -> bool:
        return isinstance(self.seqlen_q, tuple)

    @property
    def sequences(self) -> int:
        return len(self.seqlen_q) if self.packed else self.batch

    @property
    def longest(self) -> tuple[int, int]:
        """Largest seqlen_q and seqlen_k."""
        if self.packed:
            return max(self.seqlen_q, default=0), max(self.seqlen_k, default=0)
        return self.seqlen_q, self.seqlen_k

    def inputs(self) -> Inputs:
        """New arrays with the same values in every call."""
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        dim_v = self.head_dim if self.head_dim_v is None else self.head_dim_v
        rows_q, rows_k = self._rows(self.seqlen_q), self._rows(self.seqlen_k)
        shapes = [
            (*rows_q, self.heads_q, self.head_dim),
            (*rows_k, self.heads_k, self.head_dim),
            (*rows_k, self.heads_k, dim_v),
            (*rows_q, self.heads_q, dim_v),
        ]
        options = self._options(rng)
        if self.fill in structured.KINDS:
            values = structured.fill(self, rng, shapes, options)
        else:
            values = random_fill(self.fill, rng, *shapes)
        q, k, v, dout = (stored(x, self.dtype) for x in values)
        dlse = None
        if self.dlse:
            rows = (self.heads_q, rows_q[0]) if self.packed else (self.batch, self.heads_q, self.seqlen_q)
            dlse = rng.standard_normal(rows).astype(self._wide())
        return poisoned(self, Inputs(q, k, v, dout, dlse, options))

    def _rows(self, seqlen: int | tuple[int, ...]) -> tuple[int, ...]:
        return (sum(seqlen) + self.slack_rows,) if isinstance(seqlen, tuple) else (self.batch, seqlen)

    def _wide(self) -> np.dtype:
        """The type of lse and of small parameters."""
        return DTYPES["fp64" if self.dtype == "fp64" else "fp32"]

    def _options(self, rng: np.random.Generator) -> dict:
        """Only the options that differ from the defaults."""
        options = self.given("causal", "causal_align", "window_size", "dropout_p", "seed", "offset")
        if self.packed:
            options["cu_seqlens_q"], options["cu_seqlens_k"] = (
                np.cumsum((0, *lengths)).astype(np.int32) for lengths in (self.seqlen_q, self.seqlen_k)
            )
        for name, used in {"seqused_q": self.used_q, "seqused_k": self.used_k}.items():
            if used is not None:
                options[name] = np.array(used, dtype=np.int32)
        sizes = dict(zip("bhqk", (self.sequences, self.heads_q, *self.longest), strict=True))
        if self.alibi is not None:
            slopes = 2.0 ** -(1 + 7 * rng.random([sizes[axis] for axis in self.alibi]))
            options["alibi_slopes"] = widened(slopes, "bf16").astype(self._wide())
        if self.bias is not None:
            shape = [sizes[axis] if axis in self.bias else 1 for axis in "bhqk"]
            options["bias"] = stored(widened(rng.standard_normal(shape), "bf16"), self.dtype)
        if self.mask is not None:
            options["mask"] = rng.random([sizes[axis] if axis in self.mask else 1 for axis in "bhqk"]) < 0.7
        if self.block_mask is not None:
            lead = [sizes[axis] if axis in self.block_mask else 1 for axis in "bh"]
            blocks = [-(-n // BLOCK) for n in self.longest]
            along = np.eye(*blocks, dtype=bool)  # kept, so that there is something to see
            options["block_mask"] = (rng.random([*lead, *blocks]) < 0.4) | along
        options |= self._positions(rng)
        if self.part_of_dropout:
            options["sequence_numbers"] = rng.permutation(self.sequences + 3)[: self.sequences].astype(np.int32)
            options |= {"head_begin": 3, "heads_total": self.heads_q + 5}
        if self.sink:
            options["learnable_sink"] = widened(rng.standard_normal(self.heads_q), "bf16").astype(self._wide())
        return options

    def _positions(self, rng: np.random.Generator) -> dict:
        """Random positions of rows and keys, from a range of a few times the longest sequence."""
        options: dict = {}
        for side, lengths in (("row", self.seqlen_q), ("column", self.seqlen_k)):
            far = 2 * max(*self.longest, 1)
            if self.positions == "begin":
                options |= {f"{side}_begin": int(rng.integers(far)), f"{side}_step": int(rng.integers(1, 4))}
            elif self.positions == "begins":
                options |= {f"{side}_begin": rng.integers(far, size=self.sequences).astype(np.int32), f"{side}_step": 2}
            elif self.positions == "rows":
                each = lengths if self.packed else [lengths] * self.batch
                chosen = [np.sort(rng.permutation(far + n)[:n]) for n in each]
                rows = np.concatenate([*chosen, np.zeros(self.slack_rows if self.packed else 0)]).astype(np.int32)
                options[f"{side}_positions"] = rows if self.packed else rows.reshape(self.batch, lengths)
        return options

    def reference(self) -> Gradients:
        """Exact gradients; for o and lse see `reference_forward`."""
        return _reference(self)

    def reference_forward(self) -> tuple[np.ndarray, np.ndarray]:
        x = self.inputs()
        return forward(x.q, x.k, x.v, **x.options)

    def expected(self, **errors: float) -> tolerance.Expected:
        """Exact results with limits. `errors`: exp_error, tanh_error and p_roundings of the backend, see error_bounds.Model."""
        return _expected(self, tuple(sorted(errors.items())))

    def check(
        self, *, two_times: bool = False, errors: dict[str, float] | None = None, **result: object
    ) -> dict[str, tolerance.Report]:
        """Check any of o, lse, dq, dk, dv, dbias, dsink by the rule of `tolerance`; structured cases also exactly."""
        reports = tolerance.check(result, self.expected(**(errors or {})), label=str(self), two_times=two_times)
        if self.fill in structured.KINDS:
            structured.check(self, self.inputs(), result)
        return reports


@lru_cache(maxsize=32)
def _expected(case: Case, errors: tuple) -> tolerance.Expected:
    x = case.inputs()
    generic = case.fill in GENERIC and case.poison is None
    return tolerance.expect(x.q, x.k, x.v, dout=x.dout, dlse=x.dlse, generic=generic, **dict(errors), **x.options)


@lru_cache(maxsize=32)
def _reference(case: Case) -> Gradients:
    x = case.inputs()
    return backward(x.dout, x.q, x.k, x.v, dlse=x.dlse, **x.options)


def poisoned(case: Case, x: Inputs) -> Inputs:
    """NaN or inf as `poison` says, in the middle of the first sequence (its rows start at 0 in any layout).

    "q_nan": a row of q, one head; "k_nan", "v_nan", "v_inf": a row of k or v, one key head; "dout_nan": a row of
    dout, one head; "unused": NaN in every row of q, k, v, dout that no sequence uses.
    """
    if case.poison is None:
        return x
    if case.poison == "unused":
        for array, lengths, used in ((x.q, case.seqlen_q, case.used_q), (x.k, case.seqlen_k, case.used_k)):
            keep = used_rows(case, array, lengths, used)
            for target in (array, x.dout if array is x.q else x.v):
                target[~keep] = np.nan
        return x
    name, what = case.poison.split("_")
    array = getattr(x, name)
    middle = (case.used_k or case.used_q or [case.longest[name in "kv"]])[0] // 2
    array[(*((0,) if not case.packed else ()), middle, 0)] = {"nan": np.nan, "inf": np.inf}[what]
    return x


def used_rows(case: Case, array: np.ndarray, lengths: int | tuple[int, ...], used: tuple[int, ...] | None) -> np.ndarray:
    """Bool over the rows of a q-like or k-like array: true where a sequence uses the row."""
    keep = np.zeros(array.shape[: 1 if case.packed else 2], dtype=bool)
    start = 0
    for b in range(case.sequences):
        length = lengths[b] if case.packed else lengths
        valid = length if used is None else min(used[b], length)
        keep[slice(start, start + valid) if case.packed else (b, slice(valid))] = True
        start += length
    return keep
