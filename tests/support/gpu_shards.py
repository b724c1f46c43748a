"""Shards of the keys of a decode problem, computed on a GPU one after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from decode_cases import DecodeCase
from gpu_case import to_device, to_numpy
from key_shards import KeyShards

import libflash


class ShardsOnDevice(KeyShards):
    """Each call is on the device, whose caches come back."""

    device = "cuda"

    def decode(self, **options: Any) -> list[Any]:
        made = []
        for i in range(self.count):
            arrays = {"k_cache": self.caches["k_cache"][i], "v_cache": self.caches["v_cache"][i], **self.options(i)}
            given = {name: to_device(x, self.device) if isinstance(x, np.ndarray) else x for name, x in arrays.items()}
            made.append(libflash.decode(to_device(self.x.q, self.device), return_lse=True, **given, **options))
            for name in ("k_cache", "v_cache"):
                arrays[name][...] = to_numpy(given[name], arrays[name].dtype)
        return made


def check_shards(case: DecodeCase, count: int, keys: int, device: str = "cuda", **options: Any) -> None:
    """The merged results of the shards, and what they appended, are those of the whole."""
    shards = ShardsOnDevice(case.inputs(), count, keys)
    shards.device = device
    outs, lses = zip(*shards.decode(**options), strict=True)
    assert all(out.dtype == torch.float32 for out in outs)
    out = torch.empty(outs[0].shape, dtype=to_device(shards.x.q[:0], device).dtype, device=device)
    merged, lse = libflash.merge(outs, lses, out=out)
    o, lse = to_numpy(merged, shards.x.q.dtype), lse.cpu().numpy()
    if case.slack_rows:  # never written
        o[-case.slack_rows :], lse[:, -case.slack_rows :] = 0, -np.inf
    case.check(o=o, lse=lse, k_cache=shards.joined("k_cache"), v_cache=shards.joined("v_cache"))
