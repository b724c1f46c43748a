"""What a call of attention needs of a target, in words: types, options, outputs. A target lists those that it offers."""

from __future__ import annotations

import numpy as np

from libflash._option_list import NUMBER, options_of

from .case import Inputs
from .reference import sequence_rows
from .rounding import DTYPES

TYPES = tuple(DTYPES)
ALIGNED = ("causal", "window_size")  # their alignment matters where a sequence has unequal numbers of queries and keys
OPTIONS = tuple(  # the options of libflash.attention that say what is computed, which any implementation may have
    option.name for option in options_of("attention") if option.adapters != () and (option.kind.array or option.kind is NUMBER)
)
SHAPES = ("grouped heads", "two head_dims", "empty tensors")
ALIGNMENTS = tuple(f"{name} {align}" for name in ALIGNED for align in ("bottom_right", "top_left"))
ALL = frozenset([*TYPES, *ALIGNED, *ALIGNMENTS, *OPTIONS, *SHAPES, "gradients", "dlse"])


def needs(x: Inputs) -> list[str]:
    """Every word of ALL that this call needs; an option with its default needs nothing."""
    found = [name for name, dtype in DTYPES.items() if x.q.dtype == dtype]
    given = {name: value for name, value in x.options.items() if value is not None}
    found += [name for name in OPTIONS if name in given]
    positions = [name for name in ALIGNED if given.get(name, False) not in (False, (-1, -1))]
    align = "" if same_lengths(x) else f" {given.get('causal_align', 'bottom_right')}"
    found += [name + align for name in positions]
    shapes = (x.q.shape[-2] != x.k.shape[-2], x.q.shape[-1] != x.v.shape[-1], 0 in (x.q.size, x.k.size, x.v.size))
    found += [name for name, needed in zip(SHAPES, shapes, strict=True) if needed]
    found += ["gradients"] * (x.dout is not None) + ["dlse"] * (x.dlse is not None)
    return found


def same_lengths(x: Inputs) -> bool:
    """Whether every sequence has as many queries as keys, so that both alignments mean the same."""
    used = [x.options.get(f"seqused_{side}") for side in "qk"]
    packed = [x.options.get(f"cu_seqlens_{side}") for side in "qk"]
    rows = [sequence_rows(array, cu, n) for array, cu, n in zip((x.q, x.k), packed, used, strict=True)]
    return all(q[-1].stop - q[-1].start == k[-1].stop - k[-1].start for q, k in zip(*rows, strict=True))


def inputs_of(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    dout: np.ndarray | None = None,
    dlse: np.ndarray | None = None,
    **options: object,
) -> Inputs:
    return Inputs(q, k, v, dout, dlse, options)
