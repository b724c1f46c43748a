"""Values for the inputs. Gaussian data alone is not enough: it hides errors that real activations show.

randn    standard normal                      outlier  randn, and 10 randn more on 0.1% of the entries
u01      uniform in [0, 1): all positive      big      6 randn: sharp softmax
mean     randn + 2, like real keys            int      integers -2..2, 80% zeros: products are exact
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def outlier(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    spikes = (rng.random(shape) < 0.001) * rng.standard_normal(shape)
    return rng.standard_normal(shape) + 10 * spikes


def sparse_integers(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.integers(-2, 3, shape) * (rng.random(shape) < 0.25)


RANDOM: dict[str, Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]] = {
    "randn": lambda rng, shape: rng.standard_normal(shape),
    "u01": lambda rng, shape: rng.random(shape),
    "mean": lambda rng, shape: rng.standard_normal(shape) + 2,
    "outlier": outlier,
    "big": lambda rng, shape: 6 * rng.standard_normal(shape),
    "int": sparse_integers,
}
GENERIC = {"randn", "u01", "mean"}  # rounding errors without preferred sign


def random_fill(kind: str, rng: np.random.Generator, *shapes: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """One float64 array per shape; dout, the last of four, is plain normal where `big` would only scale it."""
    return tuple(RANDOM["randn" if kind == "big" and index == 3 else kind](rng, shape) for index, shape in enumerate(shapes))
