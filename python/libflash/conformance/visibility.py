"""Which keys a query sees: causal, window, element mask and block mask, one head of one sequence."""

from __future__ import annotations

import numpy as np

BLOCK = 128  # rows and columns of one block-mask entry


def head_part(array: np.ndarray, batch: int, head: int, rows: int, columns: int) -> np.ndarray:
    """The (rows, columns) part of a (B|1, H|1, Sq|1, Sk|1) array for one sequence and head."""
    array = array.reshape((1,) * (4 - array.ndim) + array.shape)
    plane = array[batch if array.shape[0] > 1 else 0, head if array.shape[1] > 1 else 0]
    return np.broadcast_to(plane[:rows, :columns], (rows, columns))


def visible_keys(
    rows: int,
    columns: int,
    *,
    causal: bool = False,
    causal_align: str = "bottom_right",
    window_size: tuple[int, int] = (-1, -1),
    mask: np.ndarray | None = None,
    block_mask: np.ndarray | None = None,
    batch: int = 0,
    head: int = 0,
    positions: tuple[np.ndarray, np.ndarray] | None = None,
) -> np.ndarray:
    """Bool (rows, columns): true where the row sees the key. Row i is aligned with key i + shift, where the shift depends on the
    valid lengths, unless `positions` has the positions of the rows and of the keys."""
    if causal_align not in ("bottom_right", "top_left"):
        raise ValueError(f"causal_align must be bottom_right or top_left, not {causal_align!r}")
    shift = columns - rows if causal_align == "bottom_right" else 0
    i = np.arange(rows)[:, None] + shift
    j = np.arange(columns)[None, :]
    if positions is not None:
        i, j = positions[0][:, None], positions[1][None, :]
    left, right = window_size
    visible = np.ones((rows, columns), dtype=bool)
    if causal:
        visible &= j <= i
    if right >= 0:
        visible &= j <= i + right
    if left >= 0:
        visible &= j >= i - left
    if mask is not None:
        visible &= head_part(np.asarray(mask, dtype=bool), batch, head, rows, columns)
    if block_mask is not None:
        block_mask = np.asarray(block_mask, dtype=bool)
        plane = block_mask[batch if block_mask.shape[0] > 1 else 0, head if block_mask.shape[1] > 1 else 0]
        visible &= plane[np.arange(rows)[:, None] // BLOCK, np.arange(columns)[None, :] // BLOCK]
    return visible
