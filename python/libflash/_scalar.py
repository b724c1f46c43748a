"""What is a number where an array may be given."""

from __future__ import annotations

from typing import TypeGuard


def is_scalar(x: object) -> TypeGuard[float]:
    """A number of Python or NumPy; True and False are none."""
    if isinstance(x, (int, float)):
        return not isinstance(x, bool)
    return hasattr(x, "__float__") and not hasattr(x, "__dlpack__") and type(x).__name__ not in ("bool", "bool_")
