"""Pages in flash_attn_varlen_func for calls that decode does not support: with gradients, tangents, dropout_p or seqused_q."""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Any

from ._arguments import integer
from ._errors import InvalidError, UnsupportedError
from ._flash_attn_three import is_symbolic, known_on_host, sequences

Array = Any


def gather_pages(
    q: Array, k: Array, v: Array, block_table: Array, lengths: dict[str, Any]
) -> tuple[Array, Array, dict[str, Any]]:
    """The pages of each sequence in one array, (batch, columns * page_size, heads_k, head_dim), and the used lengths."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(q, torch.Tensor):
        raise UnsupportedError("block_table together with dropout_p or seqused_q is for PyTorch tensors; gather the pages before")
    from ._torch_options import require_tensors

    longest = lengths["max_seqlen_k"]
    if longest is not None:  # 0 means unknown, as None does; a symbolic number would be fixed here
        longest = None if is_symbolic(longest) else integer(longest, "max_seqlen_k") or None
    name = "cu_seqlens_k" if lengths.get("seqused_k") is None else "seqused_k"
    require_tensors(k=k, v=v, block_table=block_table, cu_seqlens_q=lengths["cu_seqlens_q"], **{name: lengths[name]})
    seqused_k = used_keys(lengths["cu_seqlens_k"], lengths.get("seqused_k"))
    check_table(block_table, k, seqused_k, sequences(lengths["cu_seqlens_q"]), name)
    if longest is not None:
        block_table = block_table[:, : -(-longest // k.shape[1])]
    pages = block_table.long().clamp(0, k.shape[0] - 1)  # entries past a sequence's last page may have any value
    if not q.is_cuda:
        absent = absent_pages(seqused_k, block_table, k)
        if known_on_host(seqused_k) and known_on_host(block_table):
            check_gathered(seqused_k, block_table, k, longest, name, absent)
        else:  # the library refuses this length when the program runs
            seqused_k = sys.modules["torch"].where(absent.any(1), -1, seqused_k)
    if k.shape[0] == 0:
        pages = pages[:, :0]  # no sequence has a key
    k, v = (x[pages].flatten(1, 2) for x in (k, v))
    others = {name: x for name, x in lengths.items() if name not in ("cu_seqlens_k", "max_seqlen_k")}
    return k, v, others | {"seqused_k": seqused_k}


def check_table(block_table: Array, k: Array, used: Array, batch: int, name: str) -> None:
    if k.ndim != 4 or k.shape[1] < 1:
        raise InvalidError(f"k has shape {tuple(k.shape)}; pages need (pages, page_size, heads_k, head_dim), page_size 1 or more")
    if block_table.ndim != 2 or block_table.shape[0] != batch:
        raise InvalidError(f"block_table has shape {tuple(block_table.shape)}; it needs (batch, columns), and batch is {batch}")
    if tuple(used.shape) != (batch,):
        raise InvalidError(f"{name} has {used.numel()} sequences; cu_seqlens_q has {batch}")
    for x, called in ((block_table, "block_table"), (used, name)):
        if x.is_floating_point() or x.is_complex():
            raise InvalidError(f"{called}: dtype must be int32 (it is {x.dtype})")


def absent_pages(used: Array, block_table: Array, k: Array) -> Array:
    """The entries of the table that a sequence uses and that are no pages."""
    columns = sys.modules["torch"].ones_like(block_table).cumsum(1) - 1
    return ((block_table < 0) | (block_table >= k.shape[0])) & (columns * k.shape[1] < used[:, None])


def check_gathered(used: Array, block_table: Array, k: Array, longest: int | None, name: str, absent: Array) -> None:
    """Host tensors: refuse keys that max_seqlen_k or the table leave out, or whose page does not exist."""
    (num_pages, page_size), columns = k.shape[:2], block_table.shape[1]
    most = int(used.max()) if used.numel() else 0
    if longest is not None and most > longest:
        raise InvalidError(f"max_seqlen_k is {longest}; it must be at least every length, or None ({most} keys)")
    if most > columns * page_size:
        raise InvalidError(f"{name}: a sequence has {most} keys; the columns of block_table have room for {columns * page_size}")
    if absent.any():
        b, column = absent.nonzero()[0].tolist()
        raise InvalidError(
            f"block_table: a page must be at least 0 and below the number of pages (entry ({b}, {column}) is "
            f"{int(block_table[b, column])} of {num_pages})"
        )


def used_keys(cu_seqlens_k: Array | None, seqused_k: Array | None) -> Array:
    """(batch,): the keys of each sequence in its pages."""
    if seqused_k is not None:
        return seqused_k
    if cu_seqlens_k is None:
        raise InvalidError("cu_seqlens_k and seqused_k are None; keys in pages need one of them")
    if getattr(cu_seqlens_k, "ndim", 1) != 1:
        raise InvalidError(f"cu_seqlens_k has {cu_seqlens_k.ndim} dimensions; it needs 1")
    if known_on_host(cu_seqlens_k):
        for b, (begin, end) in enumerate(pairwise(cu_seqlens_k.tolist())):
            if end < begin:
                raise InvalidError(f"cu_seqlens_k: must not decrease (entries {b} and {b + 1} are {begin} and {end})")
    return cu_seqlens_k[1:] - cu_seqlens_k[:-1]
