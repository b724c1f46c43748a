"""The steps of a schedule as calls with positions: each forward step continues the previous one (no merge), backward adds to
float32 sums. They support every option of a schedule on the CPU and on GPUs, except ALiBi with some orders on GPUs.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from . import _core
from ._context_layout import LocalTokens

if TYPE_CHECKING:
    from ._torch_context_schedule import Schedule

Tensor = torch.Tensor


def wide_type(x: Tensor) -> torch.dtype:
    """The type of sums and of lse."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def lse_shape(q: Tensor) -> tuple[int, ...]:
    return (q.shape[0], q.shape[2], q.shape[1]) if q.ndim == 4 else (q.shape[1], q.shape[0])


class PositionForward:
    """out and lse of the rows of a rank, from calls with the keys of one rank after another, beginning with its own keys."""

    def __init__(self, schedule: Schedule, q: Tensor, v: Tensor) -> None:
        self.schedule = schedule
        self.q = q
        kind = q.dtype if schedule.one_call else wide_type(q)
        self.out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=kind)
        self.lse = q.new_empty(lse_shape(q), dtype=wide_type(q))
        self.resume = False

    def add(self, k: Tensor, v: Tensor, rank: int, *, beside_kernels: bool = False) -> None:
        del beside_kernels
        options = call_options(self.schedule, self.q, rank)
        options.pop("deterministic", None)  # forward is always deterministic
        if not self.resume and self.schedule.sink is not None:
            options["learnable_sink"] = self.schedule.sink
        options |= {"out": self.out, "lse": self.lse, "resume": self.resume}
        _core.call_as_operator(_core.attention, (self.q, k, v), options)
        self.resume = True

    def finish(self) -> tuple[Tensor, Tensor]:
        return self.out.to(self.q.dtype), self.lse


class PositionBackward:
    """dq of a rank's rows and, for the keys of each rank in turn, these rows' part of dk and dv. `given`: dout, q, out, lse."""

    def __init__(self, schedule: Schedule, given: tuple[Tensor, ...], dlse: Tensor | None, dsink: Tensor | None) -> None:
        self.schedule = schedule
        self.given = given
        self.first: dict[str, Any] = {"dlse": dlse}  # options of the first call only
        if dsink is not None:
            self.first |= {"learnable_sink": schedule.sink, "dsink": dsink}
        self.dq = self.like_gradients(given[1])
        self.delta = {} if schedule.one_call else {"delta": torch.empty_like(given[3])}
        self.begun = False

    def gradient_type(self, x: Tensor) -> torch.dtype:
        """The type of the gradient for x."""
        return x.dtype if self.schedule.ranks.ring.size == 1 else wide_type(x)

    def like_gradients(self, x: Tensor) -> Tensor:
        return torch.empty_like(x, memory_format=torch.contiguous_format, dtype=self.gradient_type(x))

    def begin(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.add(k, v, self.schedule.ranks.ring.rank)

    def end(self) -> tuple[()]:
        return ()

    def add(self, k: Tensor, v: Tensor, rank: int, into: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """dk and dv, which are written to `into` if given."""
        dout, q, out, lse = self.given
        dk, dv = into if into is not None else (self.like_gradients(k), self.like_gradients(v))
        options = call_options(self.schedule, q, rank) | self.delta | {"dq": self.dq, "dk": dk, "dv": dv, "add": self.begun}
        if self.begun:
            dk.zero_()
            dv.zero_()
        else:
            options |= self.first
        _core.call_as_operator(_core.attention_backward, (dout, q, k, v, out, lse), options)
        self.begun = True
        return dk, dv

    def finish(self) -> Tensor:
        return self.dq.to(self.given[1].dtype)


def call_options(schedule: Schedule, q: Tensor, rank: int) -> dict[str, Any]:
    """The options of a call with the keys of one rank of the ring, or of all ranks."""
    options = dict(schedule.options)
    rows, columns = schedule.local_tokens(schedule.ranks.ring.rank), schedule.local_tokens(rank)
    packed = schedule.layout.cu_seqlens is not None
    if packed:
        options["cu_seqlens_q"] = tensor_of(rows.cu_seqlens, q.device)
        options["cu_seqlens_k"] = tensor_of(columns.cu_seqlens, q.device)
    if schedule.ranks.ring.size == 1:  # all rows and all keys: their numbers are their positions
        return options
    batch = None if packed else q.shape[0]
    return options | side("row", rows, q.device, batch) | side("column", columns, q.device, batch)


def tensor_of(numbers: np.ndarray, device: torch.device) -> Tensor:
    """The numbers as int32 on the device. Copies on GPUs are cached, because a copy in each step would block the host."""
    made = np.array(numbers, dtype=np.int32, order="C")
    return _copied(made.tobytes(), made.shape, device) if device.type == "cuda" else torch.from_numpy(made)


@lru_cache(maxsize=64)
def _copied(numbers: bytes, shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(numbers), dtype=torch.int32).reshape(shape).to(device)


def side(name: str, held: LocalTokens, device: torch.device, batch: int | None) -> dict[str, Any]:
    """The positions of rows or keys: one number per sequence if the rows of a sequence are neighbours. batch: None if packed."""
    positions = held.positions
    if batch is None:
        starts = held.cu_seqlens[:-1]
        if are_neighbours(positions, starts):
            begins = np.append(positions, 0)[starts] * (held.counts > 0)
            return {f"{name}_begin": tensor_of(begins, device)}
        return {f"{name}_positions": tensor_of(positions, device)}
    if are_neighbours(positions, np.zeros(1, dtype=np.int64)):
        return {f"{name}_begin": int(positions[0]) if len(positions) else 0}
    return {f"{name}_positions": tensor_of(np.broadcast_to(positions, (batch, len(positions))), device)}


def are_neighbours(positions: np.ndarray, starts: np.ndarray) -> bool:
    """Whether positions are consecutive within each sequence; sequences begin at `starts`."""
    follows = np.ones(len(positions) + 1, dtype=bool)
    follows[1:-1] = np.diff(positions) == 1
    follows[starts] = True
    return bool(follows.all())
