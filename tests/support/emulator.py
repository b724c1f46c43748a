"""A FlashAttention kernel in NumPy: tiles, online softmax, float32 sums, P and dS rounded to the storage type.

It replaces a real kernel in tests of the tolerance rule: without a defect it must pass, with a defect (see defects) it
must fail. Every method that a defect replaces is one step of the algorithm. With float64 tensors it computes in float64.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from reference import NEG_INF, Head, Options, add_broadcast, empty_outputs, head_cotangents, heads, zero_gradients
from rounding import stored, widened


@dataclasses.dataclass
class Tile:
    """One tile of scores: a range of rows and of keys of a head, and which pairs of them are visible."""

    head: Head
    rows: slice
    keys: slice
    visible: np.ndarray

    def part(self, term: np.ndarray | float) -> np.ndarray | float:
        return term[self.rows, self.keys] if isinstance(term, np.ndarray) else term


class Emulator:
    """Forward and backward by tiles of tile_q rows and tile_k keys."""

    def __init__(self, tile_q: int = 64, tile_k: int = 64) -> None:
        self.tile_q, self.tile_k = tile_q, tile_k

    @np.errstate(all="ignore")
    def run(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, dout: np.ndarray, dlse: np.ndarray | None = None, **options
    ) -> dict[str, np.ndarray | None]:
        """o, lse, dq, dk, dv, dbias, dsink, each in its storage type."""
        self.dtype = v.dtype
        self.real = np.dtype(np.float64 if v.dtype == np.float64 else np.float32)
        opt = Options(**options)
        o, lse = (x.astype(self.real) for x in empty_outputs(q, v, opt))
        total = zero_gradients(q, k, v, opt)
        total = dataclasses.replace(total, **{name: x.astype(self.real) for name, x in vars(total).items() if x is not None})
        for head in map(self.narrow, heads(q, k, v, opt)):
            o[head.at_q], lse[head.at_lse] = self.forward(head)
            cotangents = [x.astype(self.real) for x in head_cotangents(head, dout, dlse)]
            self.backward(head, o[head.at_q], lse[head.at_lse], *cotangents, total)
        return {
            "o": stored(o, v.dtype),
            "lse": lse,
            **{name: stored(getattr(total, name), v.dtype) for name in ("dq", "dk", "dv")},
            "dbias": None if opt.bias is None else stored(total.dbias, opt.bias.dtype),
            "dsink": None if opt.learnable_sink is None else stored(total.dsink, opt.learnable_sink.dtype),
        }

    def narrow(self, head: Head) -> Head:
        """The head in the type of the arithmetic, which represents values of the storage type exactly."""
        arrays = {name: x.astype(self.real) for name, x in vars(head).items() if name in "qkv"}
        terms = {name: self.real.type(getattr(head, name)) for name in ("scale", "softcap", "sink")}
        for name in ("alibi", "bias", "keep"):
            terms[name] = np.asarray(getattr(head, name)).astype(self.real)
            terms[name] = terms[name] if terms[name].ndim else self.real.type(terms[name])
        return dataclasses.replace(head, **arrays, **terms, visible=self.visible(head))

    def tiles(self, head: Head) -> list[list[Tile]]:
        """Rows of tiles; those without a visible pair are skipped, as a kernel does."""
        lq, lk = head.visible.shape
        out = []
        for i in range(0, lq, self.tile_q):
            rows = slice(i, min(i + self.tile_q, lq))
            keys = [slice(j, min(j + self.tile_k, lk)) for j in range(0, lk, self.tile_k)]
            row = [Tile(head, rows, at, head.visible[rows, at]) for at in keys]
            out.append([tile for tile in row if tile.visible.any()])
        return out

    def forward(self, head: Head) -> tuple[np.ndarray, np.ndarray]:
        o = np.zeros((len(head.q), head.v.shape[1]), dtype=self.real)
        lse = np.full(len(head.q), NEG_INF if head.sink == NEG_INF else head.sink, dtype=self.real)
        for row in self.tiles(head):
            if row:
                at = row[0].rows
                o[at], lse[at] = self.forward_rows(head, row)
        return self.store_o(o), self.store_lse(lse)

    def forward_rows(self, head: Head, row: list[Tile]) -> tuple[np.ndarray, np.ndarray]:
        count = len(row[0].visible)
        row_max = np.full(count, NEG_INF, dtype=self.real)
        row_sum = np.zeros(count, dtype=self.real)
        acc = np.zeros((count, head.v.shape[1]), dtype=self.real)
        for tile in row:
            s, _ = self.scores(tile)
            new_max = np.maximum(row_max, s.max(axis=1))
            shift = np.where(new_max == NEG_INF, self.real.type(0), new_max)
            p = self.exp(s - shift[:, None])
            alpha = np.exp(row_max - shift)
            row_sum = self.sum_rows(tile, row_sum * alpha, p)
            weights = self.round_p(p * tile.part(head.keep))
            acc = self.accumulate_o(self.rescale(tile, acc, alpha) + weights @ self.values(tile))
            row_max = new_max
        if head.sink > NEG_INF:
            new_max = np.maximum(row_max, head.sink)
            alpha = np.exp(row_max - new_max)
            row_sum, acc, row_max = row_sum * alpha + np.exp(head.sink - new_max), acc * alpha[:, None], new_max
        seen = row_sum > 0
        divisor = np.where(seen, row_sum, self.real.type(1))
        return acc / divisor[:, None], np.where(seen, row_max + np.log(divisor), self.real.type(NEG_INF))

    def backward(self, head: Head, o: np.ndarray, lse: np.ndarray, dout: np.ndarray, dlse: np.ndarray, total: object) -> None:
        delta = self.delta(dout, o)
        dq = np.zeros_like(head.q)
        dk, dv = np.zeros_like(head.k), np.zeros_like(head.v)
        for row in self.tiles(head):
            for tile in row:
                rows, keys = tile.rows, tile.keys
                s, slope = self.scores(tile)
                p = self.exp(s - np.where(lse[rows] == NEG_INF, 0, lse[rows])[:, None].astype(self.real))
                keep = tile.part(head.keep)
                dv[keys] += self.round_p(p * keep).T @ dout[rows]
                dp = self.round_dp(dout[rows] @ head.v[keys].T) * keep
                ds = p * (dp - (delta[rows] - dlse[rows])[:, None])
                dz = self.round_ds(slope * ds)
                dq[rows] = self.accumulate_dq(dq[rows] + dz @ head.k[keys])
                dk[keys] = self.accumulate_dk(tile, dk[keys], dz.T @ head.q[rows])
                if total.dbias is not None:
                    plane = np.zeros(head.visible.shape, dtype=self.real)
                    plane[rows, keys] = ds
                    add_broadcast(total.dbias, head, plane)
        scale = self.scale(head)
        total.dq[head.at_q] = scale * dq
        total.dk[head.at_k] += scale * dk
        total.dv[head.at_k] += self.finish_dv(dv)
        if total.dsink is not None and head.sink > NEG_INF:
            p_sink = np.where(lse > NEG_INF, np.exp(head.sink - lse), self.real.type(0))
            total.dsink[head.head] += (p_sink * (dlse - delta)).sum()

    def scores(self, tile: Tile) -> tuple[np.ndarray, np.ndarray | float]:
        """Final scores, -inf where hidden, and the slope of the softcap."""
        head = tile.head
        s = (head.q[tile.rows] @ head.k[tile.keys].T) * self.scale(head)
        slope = self.real.type(1)
        if head.softcap > 0:
            t = np.tanh(s / head.softcap)
            s, slope = head.softcap * t, 1 - t * t
        s = s + tile.part(head.alibi) + tile.part(head.bias)
        return np.where(tile.visible, s, self.real.type(NEG_INF)), slope

    # The steps that a defect replaces.

    def visible(self, head: Head) -> np.ndarray:
        return head.visible

    def scale(self, head: Head) -> np.floating:
        return head.scale

    def exp(self, x: np.ndarray) -> np.ndarray:
        return np.exp(x)

    def values(self, tile: Tile) -> np.ndarray:
        return tile.head.v[tile.keys]

    def sum_rows(self, tile: Tile, row_sum: np.ndarray, p: np.ndarray) -> np.ndarray:
        return row_sum + p.sum(axis=1)

    def rescale(self, tile: Tile, acc: np.ndarray, alpha: np.ndarray) -> np.ndarray:
        return acc * alpha[:, None]

    def round_p(self, p: np.ndarray) -> np.ndarray:
        return widened(p, self.dtype)

    def accumulate_o(self, acc: np.ndarray) -> np.ndarray:
        return acc

    def store_o(self, o: np.ndarray) -> np.ndarray:
        return widened(o, self.dtype)

    def store_lse(self, lse: np.ndarray) -> np.ndarray:
        return lse

    def delta(self, dout: np.ndarray, o: np.ndarray) -> np.ndarray:
        return (dout * o).sum(axis=1)

    def round_dp(self, dp: np.ndarray) -> np.ndarray:
        return dp

    def round_ds(self, ds: np.ndarray) -> np.ndarray:
        return widened(ds, self.dtype)

    def accumulate_dq(self, dq: np.ndarray) -> np.ndarray:
        return dq

    def accumulate_dk(self, tile: Tile, dk: np.ndarray, part: np.ndarray) -> np.ndarray:
        return dk + part

    def finish_dv(self, dv: np.ndarray) -> np.ndarray:
        return dv
