"""The packing of sequences."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


def cu_seqlens(lengths: Iterable[int]) -> np.ndarray:
    """Where each sequence begins, and the end of the last one."""
    return np.cumsum((0, *lengths)).astype(np.int32)
