"""context_parallel_decode on several processes, each with its shard of the cache of a case: the results are those of the case."""

from __future__ import annotations

import pathlib
from typing import Any

import libflash.torch
import numpy as np
import torch
from context_ranks import run_ranks
from decode_cases import DecodeCase
from key_shards import KeyShards

KEYS = 4  # shard_keys: so many consecutive keys belong to the same shard
CASES = [
    DecodeCase("contiguous", "fp32", lengths=(29, 100, 0), seqlen_q=2, window_size=(40, 0), sink=True),
    DecodeCase("appended", "fp32", lengths=(29, 100), seqlen_q=2, append=2, rotary=32, alibi="h"),
    DecodeCase("paged", "fp64", lengths=(29, 100), page_size=16, softcap=5.0),
    DecodeCase("packed", "fp32", lengths=(29, 100, 7), seqlen_q=(2, 5, 0), append=(2, 5, 0), page_size=16, tree=True),
    DecodeCase("half", "fp16", lengths=(29, 100), seqlen_q=3),
]


def on_rank(rank: int, case: DecodeCase, ranks: int, device: str) -> dict[str, Any]:
    shards = KeyShards(case.inputs(), ranks, KEYS)
    options = shards.options(rank)
    options |= {name: torch.from_numpy(x).to(device) for name, x in options.items() if isinstance(x, np.ndarray)}
    del options["shard"]
    caches = [torch.from_numpy(shards.caches[name][rank]).to(device) for name in ("k_cache", "v_cache")]
    q = torch.from_numpy(shards.x.q).to(device)
    out, lse = libflash.torch.context_parallel_decode(q, *caches, shard_keys=KEYS, return_lse=True, **options)
    made = {"out": out, "lse": lse, "k_cache": caches[0], "v_cache": caches[1]}
    return {name: x.cpu().numpy() for name, x in made.items()}


def check_ranks(case: DecodeCase, ranks: int, folder: pathlib.Path, device: str = "cpu", backend: str = "gloo") -> None:
    made = run_ranks(ranks, folder, on_rank, case, ranks, device, backend=backend)
    for name in ("out", "lse"):
        assert all(np.array_equal(x[name], made[0][name], equal_nan=True) for x in made)
    shards = KeyShards(case.inputs(), ranks, KEYS)
    for rank, x in enumerate(made):
        for name in ("k_cache", "v_cache"):
            shards.caches[name][rank][...] = x[name]
    joined = {name: shards.joined(name) for name in ("k_cache", "v_cache")}
    assert made[0]["out"].dtype == shards.x.q.dtype
    case.check(o=made[0]["out"], lse=made[0]["lse"], **joined)
