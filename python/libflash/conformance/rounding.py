"""The storage types: rounding errors of stored values, and of the arithmetic used with each type.

NumPy has bfloat16 from ml_dtypes; without it there is no "bf16" in the tables here.
"""

from __future__ import annotations

import dataclasses

import numpy as np

try:
    import ml_dtypes
except ModuleNotFoundError:
    BFLOAT16: dict[str, np.dtype] = {}
else:
    BFLOAT16 = {"bf16": np.dtype(ml_dtypes.bfloat16)}

DTYPES = {
    **BFLOAT16,
    "fp16": np.dtype(np.float16),
    "fp32": np.dtype(np.float32),
    "fp64": np.dtype(np.float64),
}


@dataclasses.dataclass(frozen=True)
class Rounding:
    u: float  # unit roundoff
    eta: float  # absolute error of a P or dS too small to round well; bf16, fp32: exp flushes below 2^-126
    tiny: float  # absolute error of an output too small to round well
    largest: float
    double: bool = False  # arithmetic in float64 instead of float32

    @property
    def unit(self) -> float:
        """Relative error of a few roundings of the arithmetic type."""
        return 2.0**-51 if self.double else 2.0**-22

    @property
    def mean_square(self) -> float:
        """Mean square of the relative error of rounding to nearest."""
        return (0.425 * self.u) ** 2

    def sum_error(self, n: int) -> float:
        """a(n): relative error of a sum of n products, truncating tensor-core adders included."""
        if self.double:
            return 2.0**-50 * np.sqrt(n) + n * 2.0**-52
        return 2.0**-21 * np.sqrt(n) + n * 2.0**-28


ROUNDING = {
    **{bf16: Rounding(2.0**-8, 2.0**-126, 2.0**-126, (2 - 2.0**-7) * 2.0**127) for bf16 in BFLOAT16.values()},
    DTYPES["fp16"]: Rounding(2.0**-11, 2.0**-25, 2.0**-25, 65504.0),
    DTYPES["fp32"]: Rounding(2.0**-24, 2.0**-126, 2.0**-126, float(np.finfo(np.float32).max)),
    DTYPES["fp64"]: Rounding(2.0**-53, 2.0**-1022, 2.0**-1022, float(np.finfo(np.float64).max), double=True),
}


@np.errstate(over="ignore", invalid="ignore")
def stored(x: np.ndarray, dtype: np.dtype | str) -> np.ndarray:
    """x rounded to a storage type (nearest, ties to even) and kept in it."""
    return np.asarray(x).astype(DTYPES[dtype] if isinstance(dtype, str) else dtype)


def widened(x: np.ndarray, dtype: np.dtype | str) -> np.ndarray:
    """x rounded to a storage type, back in x's own type."""
    return stored(x, dtype).astype(x.dtype)
