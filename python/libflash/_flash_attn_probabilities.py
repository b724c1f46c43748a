"""S_dmask, which flash-attn's functions return on request: the probabilities, negative where dropout dropped them. For tests
only.

The library does not store this matrix. It is computed by attention itself: with one-hot values, out holds probabilities.
"""

from __future__ import annotations

from typing import Any

import torch

from ._errors import InvalidError, UnsupportedError
from ._torch_dtensor import is_dtensor
from .torch import attention

Tensor = torch.Tensor
CHUNK = 256  # keys at a time: the largest head_dim_v that every backend supports
ROUNDING = 128


def random_state() -> Tensor:
    """Seed and offset from PyTorch's default generator."""
    return torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device="cpu")


def refuse_dtensors(q: Tensor, dropout_p: Any) -> None:
    if is_dtensor(q):
        raise UnsupportedError(
            f"dropout_p is {dropout_p}; with DTensors it must be 0 here, because each rank would draw a dropout mask of its own; "
            "call libflash.torch.attention with a seed: an integer that is the same on all ranks"
        )


def require_maxima(lengths: dict[str, Any]) -> None:
    """They are the shape of S_dmask of packed sequences."""
    for name, cu_seqlens in (("max_seqlen_q", "cu_seqlens_q"), ("max_seqlen_k", "cu_seqlens_k")):
        if lengths.get(cu_seqlens) is not None and lengths[name] is None:
            raise InvalidError(f"{name} is None; with return_attn_probs and dropout_p it must be an integer: a size of S_dmask")


def positions(cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """The sequence of each packed row, and the row's position in it. Later rows count as part of the last sequence."""
    rows = torch.arange(total, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:-1].long().contiguous(), rows, right=True)
    return sequence, rows - cu_seqlens.long()[sequence]


@torch.no_grad()
def dropped_and_kept(q: Tensor, k: Tensor, options: dict[str, Any]) -> Tensor:
    """(batch, heads, seqlen_q, seqlen_k), both lengths rounded up to 128; `options` are those of the call with dropout."""
    options = options | {"return_lse": False}
    without_dropout = {name: x for name, x in options.items() if name not in ("dropout_p", "seed")}
    uniform = options | {"alibi_slopes": None, "softcap": 0.0}  # with q = 0 all visible keys have the same probability
    packed_k, packed_q = options.get("cu_seqlens_k"), options.get("cu_seqlens_q")
    keys = k.shape[-3] if packed_k is None else options["max_seqlen_k"]
    rows = q.shape[-3] if packed_q is None else options["max_seqlen_q"]
    position = torch.arange(keys, device=q.device) if packed_k is None else positions(packed_k, k.shape[0])[1]
    batch = q.shape[0] if packed_q is None else packed_q.shape[0] - 1
    result = q.new_zeros(batch, q.shape[-2], *(-(-n // ROUNDING) * ROUNDING for n in (rows, keys)))
    for first in range(0, keys, CHUNK):
        columns = torch.arange(first, min(first + CHUNK, keys), device=q.device)
        one_hot = (position[:, None] == columns).to(q.dtype)[:, None].expand(*k.shape[:-1], len(columns))
        p = attention(q, k, one_hot, **without_dropout)
        kept = attention(torch.zeros_like(q), k, one_hot, **uniform)
        assert isinstance(p, Tensor)
        assert isinstance(kept, Tensor)
        signed = torch.where(kept > 0, p, -p)
        if packed_q is None:
            result[:, :, :rows, first : first + len(columns)] = signed.transpose(1, 2)
        else:
            sequence, row = positions(packed_q, q.shape[0])
            inside = row < rows
            result[sequence[inside], :, row[inside], first : first + len(columns)] = signed[inside]
    return result
