"""Eighteen ways in which a kernel can be a little wrong, each put into the emulator.

A check that has never failed has not been tested: the rule of `tolerance` must refuse these. Sizes and positions fit a
causal problem of some thousand rows and keys.
"""

from __future__ import annotations

import numpy as np
from emulator import Emulator, Tile
from reference import Head
from rounding import stored, widened


def truncated(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """x rounded to a storage type towards zero."""
    near = stored(x, dtype)
    bits = near.view(np.uint16)
    away = np.abs(near.astype(x.dtype)) > np.abs(x)
    return np.where(away, bits - 1, bits).astype(np.uint16).view(dtype).astype(x.dtype)


class DroppedKey(Emulator):
    """One key in the middle is never seen."""

    def visible(self, head: Head) -> np.ndarray:
        out = head.visible.copy()
        out[:, head.visible.shape[1] // 2] = False
        return out


class LastKeyMissing(Emulator):
    """The loop over keys ends one early."""

    def visible(self, head: Head) -> np.ndarray:
        out = head.visible.copy()
        out[:, -1] = False
        return out


class DiagonalOffByOne(Emulator):
    """Causal rows see one key too many."""

    def visible(self, head: Head) -> np.ndarray:
        return head.visible | np.roll(head.visible, 1, axis=1)


class ScaleOffBy01Percent(Emulator):
    def scale(self, head: Head) -> np.floating:
        return head.scale * self.real.type(1.001)


class ScaleOffBy1Percent(Emulator):
    def scale(self, head: Head) -> np.floating:
        return head.scale * self.real.type(1.01)


class SwappedValues(Emulator):
    """Two neighbouring rows of v are swapped in every tile."""

    def values(self, tile: Tile) -> np.ndarray:
        v = super().values(tile)
        return v[[1, 0, *range(2, len(v))]]


class MissedRescale(Emulator):
    """One tile's new row maximum does not reach the accumulated output of one row."""

    def rescale(self, tile: Tile, acc: np.ndarray, alpha: np.ndarray) -> np.ndarray:
        out = super().rescale(tile, acc, alpha)
        if tile.keys.start == self.tile_k:
            lowered = int(np.argmin(alpha))
            out[lowered] = acc[lowered]
        return out


class LostRowSum(Emulator):
    """One tile's part of the row sum is lost for one row."""

    def sum_rows(self, tile: Tile, row_sum: np.ndarray, p: np.ndarray) -> np.ndarray:
        out = super().sum_rows(tile, row_sum, p)
        if tile.keys.start == self.tile_k:
            out[3] = row_sum[3]
        return out


class CheapExponential(Emulator):
    """Relative error 2^-11, as of half precision, where 2^-21 is claimed."""

    def exp(self, x: np.ndarray) -> np.ndarray:
        return np.exp(x) * (1 + self.real.type(2.0**-11) * np.sin(40 * np.where(np.isfinite(x), x, 0)))


class TruncatedP(Emulator):
    def round_p(self, p: np.ndarray) -> np.ndarray:
        return truncated(p, self.dtype)


class TruncatedOutput(Emulator):
    def store_o(self, o: np.ndarray) -> np.ndarray:
        return truncated(o, self.dtype)


class LowPrecisionOutputSum(Emulator):
    """o accumulates over tiles in the storage type."""

    def accumulate_o(self, acc: np.ndarray) -> np.ndarray:
        return widened(acc, self.dtype)


class LowPrecisionLse(Emulator):
    def store_lse(self, lse: np.ndarray) -> np.ndarray:
        return widened(lse, self.dtype)


class DeltaMissingInOneRow(Emulator):
    """delta is 0 in one row: that of median size in the second half. In a row of zeros the defect would change nothing."""

    def delta(self, dout: np.ndarray, o: np.ndarray) -> np.ndarray:
        out = super().delta(dout, o)
        late = np.abs(out[len(out) // 2 :])
        out[len(out) // 2 + np.argsort(late)[len(late) // 2]] = 0
        return out


class StaleValues(Emulator):
    """One tile of rows multiplies one tile of keys with the values of the tile before: a wait is missing."""

    def values(self, tile: Tile) -> np.ndarray:
        at = tile.keys
        if tile.rows.start == 5 * self.tile_q and at.start == 2 * self.tile_k:
            at = slice(at.start - self.tile_k, at.stop - self.tile_k)
        return tile.head.v[at]


class LostTileOfDk(Emulator):
    """One tile of rows does not reach one tile of dk."""

    def accumulate_dk(self, tile: Tile, dk: np.ndarray, part: np.ndarray) -> np.ndarray:
        lost = tile.rows.start == 5 * self.tile_q and tile.keys.start == 2 * self.tile_k
        return dk if lost else dk + part


class LostRowOfDv(Emulator):
    """One row of dv is not written."""

    def finish_dv(self, dv: np.ndarray) -> np.ndarray:
        dv[len(dv) // 3] = 0
        return dv


class LowPrecisionDqSum(Emulator):
    """dq accumulates over tiles in the storage type. With few tiles this is hardly worse than rounding dq once."""

    def accumulate_dq(self, dq: np.ndarray) -> np.ndarray:
        return widened(dq, self.dtype)


DEFECTS = [
    DroppedKey,
    LastKeyMissing,
    DiagonalOffByOne,
    ScaleOffBy01Percent,
    ScaleOffBy1Percent,
    SwappedValues,
    MissedRescale,
    LostRowSum,
    CheapExponential,
    TruncatedP,
    TruncatedOutput,
    LowPrecisionOutputSum,
    LowPrecisionLse,
    DeltaMissingInOneRow,
    StaleValues,
    LostTileOfDk,
    LostRowOfDv,
    LowPrecisionDqSum,
]
