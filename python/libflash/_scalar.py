"""Distinguishes numbers from arrays, for arguments that may be either."""

from __future__ import annotations

from typing import TypeGuard


def is_scalar(x: object) -> TypeGuard[float]:
    """Whether x is a number of Python or NumPy. True and False are not numbers."""
    if isinstance(x, (int, float)):
        return not isinstance(x, bool)
    return hasattr(x, "__float__") and not hasattr(x, "__dlpack__") and type(x).__name__ not in ("bool", "bool_")
