"""Checks of the arguments of context_parallel_attention that PyTorch and JAX have in common."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

from . import _context_layout as layouts
from ._arguments import integer
from ._context_choice import Sizes
from ._errors import InvalidError, UnsupportedError
from ._option_list import OPTIONS

ALL_KEYS = "its columns are the keys of all ranks, and those are divided: gather k and v and call attention"
DOCUMENTS = "cu_seqlens says which documents the tokens of all ranks are"
REASONS = dict.fromkeys(("bias", "mask", "block_mask"), ALL_KEYS)
REASONS |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "position_ids"), DOCUMENTS)


def refuse_others(others: dict[str, Any]) -> None:
    """Refuse arguments that context_parallel_attention does not support. None means that an option is not given."""
    for name, value in others.items():
        if value is None:
            continue
        if name in REASONS or any(option.name == name for option in OPTIONS):
            reason = f": {REASONS[name]}" if name in REASONS else ""
            raise UnsupportedError(f"{name} cannot be given to context_parallel_attention{reason}")
        raise TypeError(f"context_parallel_attention() got an unexpected keyword argument {name!r}")


def check_shapes(q: Any, k: Any, v: Any, *, packed: bool) -> None:
    dims = 3 if packed else 4
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != dims:
            names = "(tokens, heads, head_dim) with cu_seqlens" if packed else "(batch, tokens, heads, head_dim)"
            raise InvalidError(f"{name} has {x.ndim} dimensions; it must have {dims}, {names}")
    if q.shape[:-2] != k.shape[:-2] or k.shape[:-1] != v.shape[:-1]:
        raise InvalidError(
            "q, k and v must have the same batch and tokens, k and v the same heads; they are "
            f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if q.shape[-2] == 0 or k.shape[-2] == 0 or q.shape[-2] % k.shape[-2]:
        raise InvalidError(f"q has {q.shape[-2]} heads and k {k.shape[-2]}; those of q must be a multiple of those of k")


def sizes_of(q: Any, k: Any, v: Any, mesh: tuple[int, ...]) -> Sizes:
    """The sizes of one rank; `mesh`: the ranks of each dimension."""
    channels_q, channels_k = q.shape[-1] + v.shape[-1], k.shape[-1] + v.shape[-1]
    batch = q.shape[0] if q.ndim == 4 else 1
    return Sizes(q.shape[-3], q.shape[-2], k.shape[-2], channels_q, channels_k, q.dtype.itemsize, mesh, batch)


def check_tokens(sizes: Sizes, order: str, cu_seqlens: tuple[int, ...] | None) -> None:
    """Check that the tokens of all ranks together can be divided, and that the documents have the same number of tokens."""
    ranks = math.prod(sizes.mesh)
    tokens = sizes.tokens * ranks
    layouts.check_tokens(tokens, order, ranks)
    if cu_seqlens is not None and cu_seqlens[-1] != tokens:
        raise InvalidError(f"cu_seqlens ends at {cu_seqlens[-1]}; the ranks have {tokens} tokens together")


def documents_of(cu_seqlens: Any) -> tuple[int, ...] | None:
    """cu_seqlens as integers known on the host."""
    if cu_seqlens is None:
        return None
    try:
        given = cu_seqlens.tolist() if hasattr(cu_seqlens, "tolist") else cu_seqlens
        documents = tuple(integer(x, "cu_seqlens") for x in given)
    except TypeError:
        raise InvalidError(f"cu_seqlens is {cu_seqlens!r}; it must be a list or an array of integers") from None
    if len(documents) < 1 or documents[0] != 0 or any(b < a for a, b in pairwise(documents)):
        raise InvalidError(f"cu_seqlens is {documents[:8]}; it must start at 0 and not decrease")
    return documents
