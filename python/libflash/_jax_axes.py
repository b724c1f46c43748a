"""The meaning of the axes of operands and results. The rules of vmap and of sharding use these labels:

b  batch            B  batch, of size 1 and repeated
h  query heads      k  key heads          other axes may be neither folded nor sharded
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ._jax_calls import BACKWARD, BACKWARD_TANGENT, CACHE_WRITE, DECODE, Call, written


def operand_labels(call: Call, operands: Sequence[Any]) -> list[str]:
    heads = {
        "bshd": ("bshd", "btkd", "btke", "bshe"),
        "bhsd": ("bhsd", "bktd", "bkte", "bhse"),
        "sbhd": ("sbhd", "tbkd", "tbke", "sbhe"),
    }
    if call.operation == CACHE_WRITE:  # runs on devices that have the whole caches
        return ["xyzw"[: len(x.shape)] for x in operands]
    q, k, v, out = heads[call.options.layout]
    if "cu_seqlens_q" in call.names:
        q, out = "shd", "she"
    if "cu_seqlens_k" in call.names:
        k, v = "tkd", "tke"
    labels = {"q": q, "k": k, "v": v, "out": out, "dout": out, "lse": rows_of(call), "learnable_sink": "h"}
    if call.operation == DECODE:
        labels |= {"k_cache": "btkd", "v_cache": "btke", "k": "bnkd", "v": "bnke"}
        if call.packed or "cu_seqlens_new" in call.names:
            labels |= {"k": "nkd", "v": "nke"}
        if call.packed or "block_table" in call.names or "cache_batch_idx" in call.names:
            labels |= {"k_cache": "ptkd", "v_cache": "ptke"}
        labels |= {"k_rope_cache": labels["k_cache"][:3] + "r", "k_rope": labels["k"][:-1] + "r"}
    labels |= {"dlse": labels["lse"], "cache_seqlens": "b", "cache_leftpad": "b", "cache_batch_idx": "b", "block_table": "bc"}
    labels |= {"tdout": labels["out"], "tdlse": labels["lse"]}
    labels |= {direction + name: labels[name] for direction in "tu" for name in "qkv" if call.operation != DECODE}
    labels |= {
        "seqused_q": "b",
        "seqused_k": "b",
        "rotary_cos": "xy",
        "rotary_sin": "xy",
        "cu_seqlens_q": "c",
        "cu_seqlens_k": "c",
        "cu_seqlens_new": "c",
        "cu_seqlens_tree": "c",
        "q_positions": "s" if call.packed else "bs",
        "row_positions": "s" if "cu_seqlens_q" in call.names else "bs",
        "column_positions": "t" if "cu_seqlens_k" in call.names else "bt",
        "tree_mask": "xw",
    }
    found = []
    for name, x in zip((*call.fixed, *call.names), operands, strict=True):
        if name in ("k_scale", "v_scale"):
            found.append(scale_label(x.shape, labels["k_cache"]))
        elif name == "alibi_slopes":
            found.append("bh"[-len(x.shape) :])
        elif name in ("bias", "mask", "block_mask", "tbias", "ubias"):  # always four dimensions here
            axes = zip("bhij", x.shape, strict=True)
            found.append("".join(axis if size != 1 else {"b": "B", "h": "H"}.get(axis, axis) for axis, size in axes))
        else:
            found.append(labels.get(name, "xyzw"[: len(x.shape)]))
    return found


def rows_of(call: Call) -> str:
    """The axes of lse."""
    return "hs" if "cu_seqlens_q" in call.names else "bhs"


def scale_label(shape: Sequence[int], cache: str) -> str:
    """The axes of a scale: of all keys or key heads, of sequences, of rows, or of groups of channels."""
    if len(shape) == 1:
        return "k" if shape[0] != 1 else "x"
    return "bk" if len(shape) == 2 else (cache[:3] + "g")[: len(shape)]


def result_operands(call: Call, operands: Sequence[Any]) -> list[str | None]:
    """For each result, the operand with the same axes: the input of a gradient, or the array that is written. None for out, lse
    and other results per row."""
    if call.operation in (BACKWARD, BACKWARD_TANGENT):
        names = ["q", "k", "v", *(["bias"] if call.options.need_dbias else [])]
        return [*names, *(["out", "lse"] if call.options.need_tangents else [])]
    rows = 0 if call.operation == CACHE_WRITE else 2 + len(call.options.statistics)
    return [*(None,) * rows, *written(call, operands)]


def result_labels(call: Call, operands: Sequence[Any]) -> list[str]:
    given = dict(zip((*call.fixed, *call.names), operand_labels(call, operands), strict=True))
    rows = rows_of(call)
    kinds = [given["q"][:-1] + "e", rows] if call.operation != CACHE_WRITE else []
    kinds += [rows for _ in call.options.statistics]
    names = result_operands(call, operands)
    return [kinds[i] if name is None else given[name] for i, name in enumerate(names)]
