"""The steps of a schedule without positions: calls of attention on parts of the rows and keys, as for a whole sequence.

In both orders of tokens the visible pairs of a step's rows and keys form rectangles and triangles. A call for each of them needs
no kernel with positions, so Hopper GPUs can use the wgmma kernels. The results of the steps, each rounded to the type of q, are
merged at the end; gradients are added in float32 if there are more than two terms.
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
# From this number of rows on, sm_margin makes the kernels faster during transfers: measured on two H100s.
ROWS_BESIDE_TRANSFERS = 32768
MOST_RESULTS = 4  # results of a row before they are merged: each takes as much memory as out


def serves(q: Tensor, packed: bool, window: tuple[int, int], causal: bool, options: dict[str, Any]) -> bool:
    """Whether a schedule uses PartForward and PartBackward. On the CPU, calls with positions are as fast."""
    unbounded = window[0] < 0 and (window[1] < 0 or causal)
    plain = not packed and not options.get("dropout_p") and options.get("alibi_slopes") is None
    return q.is_cuda and q.element_size() == 2 and unbounded and plain


@dataclass(frozen=True)
class Part:
    """Rows that see the first `keys` keys: all rows see all of these keys or, if `causal`, the last row sees the last key."""

    rows: slice
    keys: int
    causal: bool


@cache
def parts_of(layout: Layout, rows: tuple[int, ...], columns: tuple[int, ...], causal: bool) -> tuple[Part, ...]:
    """The parts of the rows that see a key; `rows` and `columns` are ranks. For one sequence without a window."""
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
    """The options of a schedule, without those that each part sets or that parts do not support."""
    return {
        name: value for name, value in options.items() if name not in ("causal", "window_size", "dropout_p", "seed", "offset")
    }


class Sum:
    """The sum of tensors (batch, tokens, ...), one of which has all `size` tokens, in the order of add(). The sum of two tensors
    is rounded once.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.terms: list[tuple[slice, Tensor]] = []
        self.total: Tensor | None = None

    def add(self, tokens: slice, x: Tensor) -> None:
        self.terms.append((tokens, x))
        if self.total is not None or len(self.terms) > 2:
            self.add_terms()

    def add_terms(self) -> None:
        for tokens, x in self.terms:
            if self.total is None:
                kind = torch.promote_types(x.dtype, torch.float32)
                self.total = x.new_zeros((x.shape[0], self.size, *x.shape[2:]), dtype=kind)
            self.total[:, tokens] += x
        self.terms = []

    def finish(self, dtype: torch.dtype) -> Tensor:
        if self.total is not None:
            return self.total.to(dtype)
        (_, whole), *others = sorted(self.terms, key=lambda term: term[1].shape[1], reverse=True)
        for tokens, x in others:
            whole[:, tokens] += x
        return whole.to(dtype)


class PartForward:
    """out and lse of the rows of a rank, from calls with the keys of one rank after another, beginning with its own keys."""

    def __init__(self, schedule: Schedule, q: Tensor, v: Tensor) -> None:
        del v
        self.schedule = schedule
        self.q = q
        self.sink = schedule.sink
        self.results: list[tuple[slice, Tensor, Tensor]] = []

    def add(self, k: Tensor, v: Tensor, rank: int, *, beside_kernels: bool = False) -> None:
        """`beside_kernels`: kernels that send and receive run at the same time."""
        beside = beside_kernels and self.q.shape[1] >= ROWS_BESIDE_TRANSFERS
        options = call_options(self.schedule.options) | {"sm_margin": int(beside)}
        options.pop("deterministic", None)  # forward is always deterministic
        if self.sink is not None:
            options["learnable_sink"] = self.sink
        self.sink = None  # only the first call counts the sink
        for part in self.schedule.parts(self.schedule.ranks.ring.rank, rank):
            given = (self.q[:, part.rows], k[:, : part.keys], v[:, : part.keys])
            out, lse = _core.call_as_operator(_core.attention, given, options | {"causal": part.causal, "return_lse": True})
            self.results.append((part.rows, out, lse))
        if len(self.results) > MOST_RESULTS:
            out, lse = self.merged(torch.float32)
            self.results = [(slice(0, self.q.shape[1]), out, lse)]

    def merged(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The merged results. Rows with results of the same calls are merged together."""
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
    """dq of a rank's rows and, for the keys of each rank in turn, these rows' part of dk and dv. `given`: dout, q, out, lse."""

    def __init__(self, schedule: Schedule, given: tuple[Tensor, ...], dlse: Tensor | None, dsink: Tensor | None) -> None:
        self.schedule = schedule
        self.given = given
        self.dlse = dlse
        self.sinks = None if dsink is None or schedule.sink is None else (schedule.sink, dsink)
        self.dq = Sum(given[1].shape[1])
        self.own: tuple[Tensor, ...] = ()  # k, v, dq, dk, dv

    @staticmethod
    def gradient_type(x: Tensor) -> torch.dtype:
        """The type of the gradient for x."""
        return x.dtype

    def begin(self, k: Tensor, v: Tensor) -> tuple[()]:
        """Compute the first half of the heads with the rank's own keys, while the keys of the next step arrive."""
        self.own = (k, v, *(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (self.given[1], k, v)))
        self.own_heads(0, k.shape[2] // 2)
        return ()

    def end(self) -> tuple[Tensor, Tensor]:
        """Compute the other half of the heads, while the gradients of the last step are sent."""
        k, _, dq, dk, dv = self.own
        self.own_heads(k.shape[2] // 2, k.shape[2])
        self.own = ()
        self.dq.add(slice(0, dq.shape[1]), dq)
        return dk, dv

    def own_heads(self, begin: int, end: int) -> None:
        if begin == end:
            return
        k, v, dq, dk, dv = self.own
        rank, group = self.schedule.ranks.ring.rank, dq.shape[2] // k.shape[2]
        rows, keys = slice(begin * group, end * group), slice(begin, end)
        (part,) = self.schedule.parts(rank, rank)  # all rows and keys
        into = dk[:, :, keys], dv[:, :, keys]
        self.gradients(part, k[:, :, keys], v[:, :, keys], dq[:, :, rows], rows, into, own=True)

    def add(self, k: Tensor, v: Tensor, rank: int, into: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """dk and dv of the used keys of another rank, or of all ranks. They are written to `into` if one call computes them."""
        parts = self.schedule.parts(self.schedule.ranks.ring.rank, rank)
        sums = Sum(keys_used(parts)), Sum(keys_used(parts))
        rows = slice(min(part.rows.start for part in parts), max(part.rows.stop for part in parts))
        shape = (self.given[1].shape[0], rows.stop - rows.start, *self.given[1].shape[2:])
        dq = self.given[1].new_zeros(shape) if len(parts) > 1 else self.given[1].new_empty(shape)
        for part in parts:
            mine = slice(part.rows.start - rows.start, part.rows.stop - rows.start)
            given = (k[:, : part.keys], v[:, : part.keys], dq[:, mine])
            made = self.gradients(part, *given, into=into if len(parts) == 1 else None)
            for total, x in zip(sums, made, strict=True):
                total.add(slice(0, part.keys), x)
        self.dq.add(rows, dq)
        return sums[0].finish(k.dtype), sums[1].finish(v.dtype)

    def gradients(self, part: Part, k: Tensor, v: Tensor, dq: Tensor, heads: slice = slice(None),
                  into: tuple[Tensor, Tensor] | None = None, own: bool = False) -> tuple[Tensor, Tensor]:  # fmt: skip
        """dk and dv, in `into` if given. Writes dq of some query heads. The calls with the rank's own keys count the sink."""
        dout, q, out, lse = self.given
        options = call_options(self.schedule.options) | {"causal": part.causal, "dq": dq}
        if into is not None:
            options |= {"dk": into[0], "dv": into[1]}
        if self.dlse is not None:
            options["dlse"] = self.dlse[:, heads, part.rows]
        sinks = self.sinks if own or self.schedule.gathered else None
        if sinks is not None:
            options |= {"learnable_sink": sinks[0][heads], "dsink": torch.empty_like(sinks[1][heads])}
        given = (dout[:, part.rows, heads], q[:, part.rows, heads], k, v, out[:, part.rows, heads], lse[:, heads, part.rows])
        made = _core.call_as_operator(_core.attention_backward, given, options)
        if sinks is not None:
            sinks[1][heads] += options["dsink"]
        return made[1], made[2]

    def finish(self) -> Tensor:
        return self.dq.finish(self.given[1].dtype)
