"""The meaning of the axes of operands and results. The rules of vmap and of sharding use these labels:

b  batch            B  batch, of size 1 and repeated
h  query heads      k  key heads          anything else may be neither folded nor sharded
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ._jax_calls import BACKWARD, DECODE, Call


def operand_labels(call: Call, operands: Sequence[Any]) -> list[str]:
    heads = {
        "bshd": ("bshd", "btkd", "btke", "bshe"),
        "bhsd": ("bhsd", "bktd", "bkte", "bhse"),
        "sbhd": ("sbhd", "tbkd", "tbke", "sbhe"),
    }
    q, k, v, out = ("shd", "tkd", "tke", "she") if call.packed else heads[call.options.layout]
    labels = {"q": q, "k": k, "v": v, "out": out, "dout": out, "lse": "hs" if call.packed else "bhs", "learnable_sink": "h"}
    if call.operation == DECODE:
        labels |= {"k_cache": "btkd", "v_cache": "btke", "k": "bnkd", "v": "bnke"}
        if call.packed or "cu_seqlens_new" in call.names:
            labels |= {"k": "nkd", "v": "nke"}
        if call.packed or "block_table" in call.names or "cache_batch_idx" in call.names:
            labels |= {"k_cache": "ptkd", "v_cache": "ptke"}
    labels |= {"dlse": labels["lse"], "cache_seqlens": "b", "cache_leftpad": "b", "cache_batch_idx": "b", "block_table": "bc"}
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
        "tree_mask": "xw",
    }
    found = []
    for name, x in zip((*call.fixed, *call.names), operands, strict=True):
        if name == "alibi_slopes":
            found.append("bh"[-len(x.shape) :])
        elif name in ("bias", "mask", "block_mask"):  # always four dimensions here
            axes = zip("bhij", x.shape, strict=True)
            found.append("".join(axis if size != 1 else {"b": "B", "h": "H"}.get(axis, axis) for axis, size in axes))
        else:
            found.append(labels.get(name, "xyzw"[: len(x.shape)]))
    return found


def result_labels(call: Call, operands: Sequence[Any]) -> list[str]:
    given = dict(zip((*call.fixed, *call.names), operand_labels(call, operands), strict=True))
    if call.operation == BACKWARD:
        return [given["q"], given["k"], given["v"], *([given["bias"]] if call.options.need_dbias else [])]
    out = given["q"][:-1] + "e"
    return [out, "hs" if call.packed else "bhs", *([given["k_cache"], given["v_cache"]] if "k" in call.names else [])]
