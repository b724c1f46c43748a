"""A decode call of sequences that share their first keys, for the kernels for shared keys on a GPU."""

from __future__ import annotations

import numpy as np
from gpu_case import to_device
from gpu_decode import NUMPY, decode
from gpu_prefill import check
from harness import random

import libflash

SEQUENCES, HEADS_Q, HEADS_K, PAGE, COLUMNS = 36, 8, 2, 16, 40  # enough sequences that the plan uses the shared keys
GROUPS, SHARED = np.array([0, 33, 35], np.int32), np.array([500, 256], np.int32)


class SharedKeys:
    """Arrays of the call. Pages that the call must not read are NaN."""

    def __init__(self, kernel: dict) -> None:
        self.dim, dtype = kernel["head_dim"] - 8, NUMPY[kernel["dtype"]]
        self.q = random(SEQUENCES, 1, HEADS_Q, self.dim, seed=1).astype(dtype)
        pages = SEQUENCES * COLUMNS
        self.caches = [random(pages, PAGE, HEADS_K, self.dim, seed=s).astype(dtype) for s in (2, 3)]
        self.table = np.random.default_rng(4).permutation(pages).astype(np.int32).reshape(SEQUENCES, COLUMNS)
        self.lengths = np.array([504 + 5 * i % 128 for i in range(SEQUENCES)], np.int32)
        for first, last, keys in zip(GROUPS, GROUPS[1:], SHARED, strict=False):
            self.table[first:last, : -(-keys // PAGE)] = self.table[first, : -(-keys // PAGE)]
        read = np.zeros(pages, bool)
        for row, length in zip(self.table, self.lengths, strict=True):
            read[row[: -(-length // PAGE)]] = True
        for cache in self.caches:
            cache[~read] = np.nan

    @property
    def options(self) -> dict:
        hint = {"shared_groups": GROUPS, "shared_lens": SHARED}
        return {"cache_seqlens": self.lengths, "block_table": self.table, "causal": True, **hint}


def check_shared_keys(step: SharedKeys, kernel: dict, device: str = "cuda") -> None:
    """Run it, and compare with the CPU."""
    assert device == "cpu" or uses(kernel, step), f"{kernel['name']} is not in the plan"
    got = decode(step.q, *(x.copy() for x in step.caches), device, **step.options)
    wanted = libflash.decode(step.q, *(x.copy() for x in step.caches), return_lse=True, **step.options)
    check(got, wanted, kernel)


def uses(kernel: dict, step: SharedKeys) -> bool:
    on_gpu = {name: to_device(x, "cuda") if isinstance(x, np.ndarray) else x for name, x in step.options.items()}
    text = libflash.explain(*(to_device(x, "cuda") for x in (step.q, *step.caches)), op="decode", **on_gpu)
    return f"by {kernel['name']}" in text
