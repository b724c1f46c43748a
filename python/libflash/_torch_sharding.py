"""DTensors: sharding rules of the operators. Shards of batch and heads are computed separately; other shards are gathered.

Operators that write to their arguments have no rule: PyTorch might write to a gathered copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

Placement = Any

SEQUENCES = ("dout", "q", "k", "v", "out", "k_cache", "v_cache", "k_rope_cache")
SCORES = ("bias", "mask", "block_mask")  # (batch, heads, ...), aligned to the right, each full or 1
LISTS = ("row_counts", "row_indices", "col_counts", "col_indices")  # (batch or 1, heads or 1, ...)
BY_BATCH = ("seqused_q", "seqused_k", "cache_seqlens", "cache_leftpad", "cache_batch_idx", "block_table", "q_positions")
# With the first two options the cache's first axis is not the batch; with the others, rows belong to several sequences.
NOT_BY_BATCH = ("block_table", "cache_batch_idx", "cu_seqlens_new", "tree_mask")


def placement(name: str, x: Any, by: str, layout: str) -> Placement:
    """The placement of an argument, if the operator is sharded along "b" (batch) or "h" (heads)."""
    if name in SEQUENCES:
        return Shard(1 if x.ndim == 3 else layout.index(by))
    if name in ("lse", "dlse"):
        return Shard(0 if by == "b" or x.ndim == 2 else 1)
    if name in SCORES or name in LISTS:
        axis = "bh".index(by) + (x.ndim - 4 if name in SCORES else 0)
        return Shard(axis) if axis >= 0 and x.shape[axis] > 1 else Replicate()
    if name == "alibi_slopes":
        return Shard(x.ndim - 1) if by == "h" else Shard(0) if x.ndim == 2 else Replicate()
    if name == "learnable_sink":
        return Shard(0) if by == "h" else Replicate()
    if name in ("k_scale", "v_scale"):  # (heads) or (1), (batch, heads), (batch, row, heads, ...)
        axis = {"b": -1, "h": 0}[by] if x.ndim == 1 else {"b": 0, "h": min(x.ndim - 1, 2)}[by]
        return Shard(axis) if axis >= 0 and x.shape[axis] > 1 else Replicate()
    return Shard(0) if name in BY_BATCH and by == "b" else Replicate()


def summed(x: Placement) -> Placement:
    """The placement of the gradient of an argument: each shard has a part of the sum if the argument is replicated."""
    return Partial() if x == Replicate() else x


def is_tensor(x: Any) -> bool:
    return hasattr(x, "placements") and hasattr(x, "tensor_meta")


def shard_axes(given: dict[str, Any]) -> list[str]:
    """The axes, "b" and "h", along which the call may be sharded. Query heads must stay with their key head. A dropout mask
    depends on the batch entry and the head, which a shard does not know. A schedule is for the shapes of the whole call."""
    q, k = given["q"], given["k" if "k" in given else "k_cache"]
    layout = given.get("layout", "bshd")
    if (
        given.get("dropout_p")
        or given.get("schedule") is not None
        or q.ndim not in (3, 4)
        or k.ndim != (3 if given.get("cu_seqlens_k") is not None else 4)
    ):
        return []
    possible = []
    if q.ndim == 4 and k.ndim == 4 and all(given.get(name) is None for name in NOT_BY_BATCH):
        possible.append("b")
    heads = k.shape[1 if k.ndim == 3 else layout.index("h")]
    if heads % q.mesh.size() == 0:
        possible.append("h")
    return possible


def rule(name: str, operator: Any) -> Any:
    names = [argument.name for argument in operator._schema.arguments]

    def acceptable(*args: Any, **keywords: Any) -> list[Any]:
        given = dict(zip(names, args, strict=False)) | keywords
        layout = given.get("layout", "bshd")
        accepted = []
        for by in (*shard_axes(given), None):
            placements = {
                argument: (placement(argument, x, by, layout) if by else Replicate()) if is_tensor(x) else None
                for argument, x in given.items()
            }
            accepted.append((results(name, given, placements, by), list(placements.values())))
        return accepted

    return acceptable


def results(name: str, given: dict[str, Any], placements: dict[str, Placement], by: str | None) -> list[Placement]:
    if name != "attention_backward":
        lse = Replicate() if by is None else Shard(0 if by == "b" or given["q"].ndim == 3 else 1)
        return [placements["q"], lse]
    of_scores = [
        summed(placements[argument]) if by and given.get(needed) else Replicate()
        for argument, needed in (("bias", "need_dbias"), ("learnable_sink", "need_dsink"))
    ]
    return [placements["q"], placements["k"], placements["v"], *of_scores]


def merge_rule(outs: Any, lses: Any, *args: Any) -> list[Any]:
    layout = args[0] if args else "bshd"
    accepted = []
    out: Placement
    lse: Placement
    for by in ("b", "h", None):
        if by is None:
            out, lse = Replicate(), Replicate()
        elif outs[0].ndim == 3:
            if by == "b":
                continue
            out, lse = Shard(1), Shard(0)
        else:
            out, lse = Shard(layout.index(by)), Shard("bh".index(by))
        accepted.append(([out, lse], [out] * len(outs) + [lse] * len(lses) + [None] * len(args)))
    return accepted


def register() -> None:
    for name in ("attention", "attention_backward", "decode"):
        operator = getattr(torch.ops.libflash, name).default
        register_sharding(operator)(rule(name, operator))
    register_sharding(torch.ops.libflash.merge.default)(merge_rule)


register()
