"""The steps of a schedule without positions: calls of attention on parts of the rows and keys, as for a whole sequence.

In both orders of tokens the visible pairs of a step's rows and keys are rectangles and triangles, and a call for each of them
needs no kernel that knows positions: on Hopper GPUs those of wgmma serve it. The results of the steps, each rounded to the type
of q, are merged at the end; gradients are added in float32 where there are more than two terms.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from . import _core
from ._context_layout import Layout

if TYPE_CHECKING:
    from ._torch_context_schedule import Schedule

Tensor = torch.Tensor
MOST_RESULTS = 4  # of a row that are kept before they are merged: each takes the memory of out


def serves(q: Tensor, packed: bool, window: tuple[int, int], causal: bool, options: dict[str, Any]) -> bool:
    """Whether a schedule uses these calls. On the CPU, calls with positions are as fast."""
    unbounded = window[0] < 0 and (window[1] < 0 or causal)
    plain = not packed and not options.get("dropout_p") and options.get("alibi_slopes") is None
    return q.is_cuda and q.element_size() == 2 and unbounded and plain


@dataclass(frozen=True)
class Part:
    """Rows that see the first `keys` keys: all of them, or if `causal` so that the last row sees the last key."""

    rows: slice
    keys: int
    causal: bool


@cache
def parts_of(layout: Layout, rows: tuple[int, ...], columns: tuple[int, ...], causal: bool) -> tuple[Part, ...]:
    """Of the rows that see a key; `rows` and `columns` are ranks. For one sequence without a window."""
    row, column = layout.local_tokens(rows).positions, layout.local_tokens(columns).positions
    seen = np.searchsorted(column, row, side="right") if causal else np.full(len(row), len(column))
    more = np.diff(seen)
    made, begin = [], 0
    while begin < len(seen):
        last, step = begin, 0
        if begin < len(more) and more[begin] in (0, 1):
            step = int(more[begin])
            others = np.flatnonzero(more[begin:] != step)
            last = begin + (int(others[0]) if len(others) else len(more) - begin)
        if seen[last] > 0:
            made.append(Part(slice(begin, last + 1), int(seen[last]), step == 1))
        begin = last + 1
    return tuple(made)


def keys_used(parts: tuple[Part, ...]) -> int:
    return max((part.keys for part in parts), default=0)


def call_options(options: dict[str, Any]) -> dict[str, Any]:
    """Those of a schedule without what a part has of its own, or none."""
    return {
        name: value for name, value in options.items() if name not in ("causal", "window_size", "dropout_p", "seed", "offset")
    }


class Sum:
    """Tensors (batch, tokens, ...), of which all but the first may have some tokens only. Rounded once, if there are two."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.pending: tuple[slice, Tensor] | None = None

    def add(self, tokens: slice, x: Tensor) -> None:
        if self.total is None:
            self.total = x
        elif self.pending is None and x.dtype == self.total.dtype:
            self.pending = tokens, x
        else:
            if self.pending is not None:
                self.total = self.total.to(torch.promote_types(x.dtype, torch.float32))
                self.total[:, self.pending[0]] += self.pending[1]
                self.pending = None
            self.total[:, tokens] += x

    def finish(self, dtype: torch.dtype) -> Tensor:
        assert self.total is not None
        if self.pending is not None:
            self.total[:, self.pending[0]] += self.pending[1]
        return self.total.to(dtype)


class PartForward:
    """out and lse of the rows of a rank, from its calls with the keys of one rank after the other; its own come first."""

    def __init__(self, schedule: Schedule, q: Tensor, v: Tensor) -> None:
        del v
        self.schedule = schedule
        self.q = q
        self.sink = schedule.sink
        self.results: list[tuple[slice, Tensor, Tensor]] = []

    def add(self, k: Tensor, v: Tensor, rank: int) -> None:
        options = call_options(self.schedule.options)
        options.pop("deterministic", None)  # forward always is
        if self.sink is not None:
            options["learnable_sink"] = self.sink
        self.sink = None  # counts once
        for part in self.schedule.parts(self.schedule.ranks.ring.rank, rank):
            given = (self.q[:, part.rows], k[:, : part.keys], v[:, : part.keys])
            out, lse = _core.call_as_operator(_core.attention, given, options | {"causal": part.causal, "return_lse": True})
            self.results.append((part.rows, out, lse))
        if len(self.results) > MOST_RESULTS:
            out, lse = self.merged(torch.float32)
            self.results = [(slice(0, self.q.shape[1]), out, lse)]

    def merged(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Of all results, for rows with the same results at a time."""
        rows, out, lse = self.results[0]
        if len(self.results) == 1 and (rows.start, rows.stop) == (0, self.q.shape[1]):
            return out.to(dtype), lse
        ends = sorted({end for rows, *_ in self.results for end in (rows.start, rows.stop)})
        whole = self.q.new_empty((*self.q.shape[:-1], out.shape[-1]), dtype=dtype)
        whole_lse = lse.new_empty((*lse.shape[:-1], self.q.shape[1]))
        for begin, end in pairwise(ends):
            outs, lses = [], []
            for rows, out, lse in self.results:
                if rows.start <= begin and end <= rows.stop:
                    mine = slice(begin - rows.start, end - rows.start)
                    outs.append(out[:, mine])
                    lses.append(lse[..., mine])
            options = {"out": whole[:, begin:end], "lse": whole_lse[..., begin:end]}
            _core.call_as_operator(_core.merge, (outs, lses), options)
        return whole, whole_lse

    def finish(self) -> tuple[Tensor, Tensor]:
        return self.merged(self.q.dtype)


class PartBackward:
    """dq of the rows of a rank, and for the keys of each rank in turn their part of dk and dv. `given`: dout, q, out, lse."""

    def __init__(self, schedule: Schedule, given: tuple[Tensor, ...], dlse: Tensor | None, dsink: Tensor | None) -> None:
        self.schedule = schedule
        self.given = given
        self.dlse = dlse
        self.sinks = None if dsink is None else (schedule.sink, dsink)
        self.dq = Sum()

    @staticmethod
    def like_gradients(x: Tensor) -> Tensor:
        return x

    def add(self, k: Tensor, v: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """dk and dv of the keys that are used."""
        parts = self.schedule.parts(self.schedule.ranks.ring.rank, rank)
        dk, dv = Sum(), Sum()
        rows = slice(min(part.rows.start for part in parts), max(part.rows.stop for part in parts))
        shape = (self.given[1].shape[0], rows.stop - rows.start, *self.given[1].shape[2:])
        dq = self.given[1].new_zeros(shape) if len(parts) > 1 else self.given[1].new_empty(shape)
        for part in sorted(parts, key=lambda part: -part.keys):  # the first has all keys
            mine = slice(part.rows.start - rows.start, part.rows.stop - rows.start)
            made = self.gradients(part, k[:, : part.keys], v[:, : part.keys], dq[:, mine])
            dk.add(slice(0, part.keys), made[0])
            dv.add(slice(0, part.keys), made[1])
        self.dq.add(rows, dq)
        self.sinks = None
        return dk.finish(k.dtype), dv.finish(v.dtype)

    def gradients(self, part: Part, k: Tensor, v: Tensor, dq: Tensor) -> tuple[Tensor, Tensor]:
        """Writes dq; returns dk and dv."""
        dout, q, out, lse = self.given
        options = call_options(self.schedule.options) | {"causal": part.causal, "dq": dq}
        if self.dlse is not None:
            options["dlse"] = self.dlse[..., part.rows]
        if self.sinks is not None:
            options |= {"learnable_sink": self.sinks[0], "dsink": torch.empty_like(self.sinks[1])}
        given = (dout[:, part.rows], q[:, part.rows], k, v, out[:, part.rows], lse[..., part.rows])
        made = _core.call_as_operator(_core.attention_backward, given, options)
        if self.sinks is not None:
            self.sinks[1].add_(options["dsink"])
        return made[1], made[2]

    def finish(self) -> Tensor:
        return self.dq.finish(self.given[1].dtype)
