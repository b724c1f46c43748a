"""Attention of the rows of a rank over the keys of all ranks of an axis: passed on from rank to rank, or gathered.

ring: in step t the rank with number r computes with the keys of rank r - t, which that rank sends to it directly; pairs of ranks
without a visible pair of row and key send nothing, so with a window only neighbours talk. Forward goes on from step to step
(no merge). In backward, out and lse of the whole rows give each step its part of dq, and dk and dv of its keys, which go home in
float32 and are added in the order of the steps. The keys of the next step are on their way during the computation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from . import _core
from . import _torch_context_group as groups
from ._context_layout import Layout, LocalTokens
from ._torch_context_group import Exchange, Ranks

Tensor = torch.Tensor


def wide_type(x: Tensor) -> torch.dtype:
    """Of sums and of lse."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@dataclass
class Schedule:
    """`options`: of libflash.attention, the same in all steps. `window`: keys that a row sees to the left and right; -1: all."""

    ranks: Ranks
    layout: Layout
    window: tuple[int, int]
    gathered: bool
    options: dict[str, Any]
    sink: Tensor | None = None

    # -- one call

    def local_tokens(self, ring_rank: int) -> LocalTokens:
        return self.layout.local_tokens(self.ranks.members(ring_rank))

    def call_options(self, q: Tensor, rows: LocalTokens, columns: LocalTokens) -> dict[str, Any]:
        options = dict(self.options)
        packed = self.layout.cu_seqlens is not None
        if packed:
            options["cu_seqlens_q"] = tensor_of(rows.cu_seqlens, q.device)
            options["cu_seqlens_k"] = tensor_of(columns.cu_seqlens, q.device)
        if self.ranks.ring.size == 1:  # all rows and all keys: their numbers are their positions
            return options
        batch = None if packed else q.shape[0]
        return options | side("row", rows, q.device, batch) | side("column", columns, q.device, batch)

    def forward_call(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, columns: LocalTokens, first: bool) -> None:
        options = self.call_options(q, self.local_tokens(self.ranks.ring.rank), columns)
        options.pop("deterministic", None)  # forward always is
        if first and self.sink is not None:
            options["learnable_sink"] = self.sink
        options |= {"out": out, "lse": lse, "resume": not first}
        _core.call_as_operator(_core.attention, (q, k, v), options)

    def backward_call(self, given: tuple[Tensor, ...], k: Tensor, v: Tensor, sums: dict[str, Tensor], columns: LocalTokens,
                      dlse: Tensor | None, dsink: Tensor | None, first: bool) -> None:  # fmt: skip
        dout, q, out, lse = given
        options = self.call_options(q, self.local_tokens(self.ranks.ring.rank), columns) | sums
        if first:
            options["dlse"] = dlse
            if dsink is not None:
                options |= {"learnable_sink": self.sink, "dsink": dsink}
        options["add"] = not first
        _core.call_as_operator(_core.attention_backward, (dout, q, k, v, out, lse), options)

    # -- the steps

    def sees(self, rows: int, columns: int) -> bool:
        return self.layout.sees(self.ranks.members(rows), self.ranks.members(columns), self.window)

    def partner(self, step: int) -> tuple[int, int]:
        """The rank that uses this rank's keys in a step, and the rank whose keys this rank uses."""
        ring = self.ranks.ring
        return (ring.rank + step) % ring.size, (ring.rank - step) % ring.size

    def send_keys(self, step: int, k: Tensor, v: Tensor) -> Exchange:
        ring = self.ranks.ring
        to, source = self.partner(step)
        return Exchange(ring, 4 * step, to if self.sees(to, ring.rank) else None, (k, v),
                        source if self.sees(ring.rank, source) else None, (k, v))  # fmt: skip

    def send_gradients(self, step: int, made: tuple[Tensor, ...], like: tuple[Tensor, ...]) -> Exchange:
        ring = self.ranks.ring
        user, owner = self.partner(step)
        return Exchange(ring, 4 * step + 2, owner if made else None, made,
                        user if self.sees(user, ring.rank) else None, like)  # fmt: skip

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        ring = self.ranks.ring
        steps = 1 if self.gathered else ring.size
        out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype if steps == 1 else wide_type(q))
        lse = q.new_empty(lse_shape(q), dtype=wide_type(q))
        if self.gathered:
            k, v, columns = self.gather(k), self.gather(v), self.all_tokens()
            self.forward_call(q, k, v, out, lse, columns, True)
            return out, lse
        following = self.send_keys(1, k, v) if steps > 1 else None
        self.forward_call(q, k, v, out, lse, self.local_tokens(ring.rank), True)
        for step in range(1, steps):
            keys = following.wait() if following else ()
            following = self.send_keys(step + 1, k, v) if step + 1 < steps else None
            if keys:
                self.forward_call(q, *keys, out, lse, self.local_tokens(self.partner(step)[1]), False)
        return out.to(q.dtype), lse

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None,
                 dsink: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        ring, given = self.ranks.ring, (dout, q, out, lse)
        steps = 1 if self.gathered else ring.size
        if self.gathered:
            k, v, columns = self.gather(k), self.gather(v), self.all_tokens()
        else:
            columns = self.local_tokens(ring.rank)
        kind = {} if ring.size == 1 else {"dtype": wide_type(q)}
        sums = {name: torch.empty_like(x, memory_format=torch.contiguous_format, **kind)
                for name, x in (("dq", q), ("dk", k), ("dv", v))}  # fmt: skip
        delta = {} if steps == 1 else {"delta": torch.empty_like(lse)}
        following = self.send_keys(1, k, v) if steps > 1 else None
        self.backward_call(given, k, v, sums | delta, columns, dlse, dsink, True)
        if self.gathered:
            sums["dk"], sums["dv"] = self.scatter_sum(sums["dk"]), self.scatter_sum(sums["dv"])
        home: Exchange | None = None
        for step in range(1, steps):
            keys = following.wait() if following else ()
            following = self.send_keys(step + 1, k, v) if step + 1 < steps else None
            made = self.step_gradients(step, keys, given, sums | delta) if keys else ()
            add_home(home, sums)
            home = self.send_gradients(step, made, (sums["dk"], sums["dv"]))
        add_home(home, sums)
        return sums["dq"].to(q.dtype), sums["dk"].to(k.dtype), sums["dv"].to(v.dtype)

    def step_gradients(self, step: int, keys: tuple[Tensor, ...], given: tuple[Tensor, ...], sums: dict[str, Tensor]) -> Any:
        """dk and dv of another rank's keys; adds to dq."""
        made = tuple(torch.zeros_like(x, memory_format=torch.contiguous_format, dtype=wide_type(x)) for x in keys)
        columns = self.local_tokens(self.partner(step)[1])
        self.backward_call(given, *keys, sums | {"dk": made[0], "dv": made[1]}, columns, None, None, False)
        return made

    # -- all keys at once

    def all_tokens(self) -> LocalTokens:
        return self.layout.local_tokens(tuple(range(self.ranks.size)))

    def order(self) -> np.ndarray:
        """Of the gathered tokens, which come rank by rank: their order by position."""
        return np.argsort(np.concatenate([self.local_tokens(r).tokens for r in range(self.ranks.ring.size)]), kind="stable")

    def token_dim(self) -> int:
        return 0 if self.layout.cu_seqlens is not None else 1

    def gather(self, x: Tensor) -> Tensor:
        joined = torch.cat(groups.gather(self.ranks.ring, x), self.token_dim())
        return joined.index_select(self.token_dim(), torch.from_numpy(self.order()).to(x.device))

    def scatter_sum(self, x: Tensor) -> Tensor:
        dim, back = self.token_dim(), torch.from_numpy(np.argsort(self.order())).to(x.device)
        return groups.sum_pieces(self.ranks.ring, list(x.index_select(dim, back).chunk(self.ranks.ring.size, dim)))


def add_home(exchange: Exchange | None, sums: dict[str, Tensor]) -> None:
    received = exchange.wait() if exchange else ()
    if received:
        sums["dk"] += received[0]
        sums["dv"] += received[1]


def lse_shape(q: Tensor) -> tuple[int, ...]:
    return (q.shape[0], q.shape[2], q.shape[1]) if q.ndim == 4 else (q.shape[1], q.shape[0])


def tensor_of(numbers: np.ndarray, device: torch.device) -> Tensor:
    """The numbers as int32 on the device. On GPUs copies are kept: a copy for each step would hold up the host."""
    made = np.array(numbers, dtype=np.int32, order="C")
    return _copied(made.tobytes(), made.shape, device) if device.type == "cuda" else torch.from_numpy(made)


@lru_cache(maxsize=64)
def _copied(numbers: bytes, shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(numbers), dtype=torch.int32).reshape(shape).to(device)


def side(name: str, held: LocalTokens, device: torch.device, batch: int | None) -> dict[str, Any]:
    """Where rows or keys stand: one number for each sequence if those of a sequence are neighbours. batch: None if packed."""
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
    """Whether within each sequence, which begin at `starts`, each position follows that before it."""
    follows = np.ones(len(positions) + 1, dtype=bool)
    follows[1:-1] = np.diff(positions) == 1
    follows[starts] = True
    return bool(follows.all())
