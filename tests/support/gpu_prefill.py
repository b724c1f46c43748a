"""A decode call with long chunks, for prefill kernels on a GPU."""

from __future__ import annotations

import numpy as np
from gpu_case import to_device
from gpu_codes import on_device
from gpu_decode import LIMITS, NUMPY, decode
from harness import random
from libflash.conformance.reference_cache import CODES
from sequences import cu_seqlens

import libflash

HEADS_Q, HEADS_K, CAPACITY = 32, 8, 1024
# Query rows of each sequence (long chunks, single rows, lengths in between, no rows), and its keys in the cache.
ROWS, CACHED = (300, 1, 0, 63, 96, 700, 1, 9), np.array([500, 1000, 20, 400, 0, 324, 1, 700], np.int32)


class Step:
    """Arrays of a call, with caches of `code` if it is given. Cache rows that the call must not read are NaN."""

    def __init__(
        self,
        kernel: dict,
        page: int,
        window: int | None = None,
        narrower: int = 8,
        rows: tuple[int, ...] = ROWS,
        cached: np.ndarray = CACHED,
        code: str = "",
    ) -> None:
        self.dtype, self.page = NUMPY[kernel["dtype"]], page
        dim, dim_v, total = kernel["head_dim"] - narrower, kernel["head_dim_v"], sum(rows)
        shapes = {"q": (HEADS_Q, dim), "k": (HEADS_K, dim), "v": (HEADS_K, dim_v)}
        self.rows = {n: random(total, *shape, seed=i).astype(self.dtype) for i, (n, shape) in enumerate(shapes.items())}
        stored = CODES[code] if code else self.dtype
        self.caches = [random(len(rows), CAPACITY, HEADS_K, x, seed=7 + i).astype(stored) for i, x in enumerate((dim, dim_v))]
        for b, length in enumerate(cached):
            first = max(0, length - (window if window is not None else CAPACITY))
            for cache in self.caches:
                cache[b, length:] = np.nan
                cache[b, : first // max(page, 1) * page if page else 0] = np.nan
        self.lengths = {"cu_seqlens_q": cu_seqlens(rows), "cache_seqlens": cached}
        self.table = None
        if page:
            self.scatter(window)

    def scatter(self, window: int | None) -> None:
        columns = CAPACITY // self.page
        sequences = len(self.caches[0])
        order = np.random.default_rng(3).permutation(sequences * columns).astype(np.int32)
        self.table = order.reshape(sequences, columns)
        for i, cache in enumerate(self.caches):
            pages = np.empty_like(cache.reshape(-1, self.page, *cache.shape[2:]))
            pages[order] = cache.reshape(pages.shape)
            self.caches[i] = pages
        self.lengths["block_table"] = self.table

    def arrays(self) -> tuple[tuple, dict]:
        own = [x.copy() for x in self.caches]
        return (self.rows["q"], *own), {**self.lengths, "k": self.rows["k"], "v": self.rows["v"]}


def check_step(step: Step, kernel: dict, device: str = "cuda", **more: object) -> None:
    """Run the step, whose long chunks the prefill kernel must process, and compare with the CPU."""
    arrays, options = step.arrays()
    assert uses(kernel, arrays, {**options, **more}, device), f"{kernel['name']} is not in the plan"
    got = decode(*arrays, device, **options, **more)
    own, options = step.arrays()
    wanted = libflash.decode(*own, return_lse=True, **options, **more)
    check(got, wanted, kernel)
    for cache, other in zip(arrays[1:], own[1:], strict=True):
        np.testing.assert_array_equal(cache.view(np.uint8), other.view(np.uint8))


def check(got: tuple, wanted: tuple, kernel: dict) -> None:
    limit = 2 * LIMITS[kernel["dtype"]][0]
    np.testing.assert_allclose(got[0].astype(np.float32), wanted[0].astype(np.float32), rtol=limit, atol=limit)
    np.testing.assert_allclose(got[1], wanted[1], rtol=2e-5, atol=2e-5)


def copies_caches(kernel: dict) -> bool:
    """Whether the prefill kernel has an instance that copies keys and values, and converts codes."""
    return kernel["head_dim"] == kernel["head_dim_v"] and kernel["head_dim"] in (64, 128)


def uses(kernel: dict, arrays: tuple, options: dict, device: str = "cuda") -> bool:
    """Whether the plan has this prefill kernel. The CPU has none."""
    there = {name: to_device(x, device) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    text = libflash.explain(*(on_device(x, device) for x in arrays), op="decode", **there)
    return device == "cpu" or f"{kernel['name']}, tile" in text
