"""The layers of a step: decode calls with the same lengths over caches of their own, which share a schedule."""

from __future__ import annotations

from typing import Any

import torch
from gpu_case import DTYPES
from gpu_kernels import device_of
from sequences import cu_seqlens

import libflash

HEADS_Q, HEADS_K, CAPACITY, LAYERS = 16, 4, 1024, 3
# Query rows of each sequence, with rows of decode beside the chunks or without, and its keys in the cache.
ROWS = {"mixed": (300, 1, 0, 63, 96, 700, 1, 9), "chunks": (512, 300, 0, 0, 0, 349, 0, 0)}
CACHED = (900, 1000, 20, 400, 96, 1024, 1, 700)

Results = list[torch.Tensor]


class Layers:
    """`page`: 0 is a contiguous cache."""

    def __init__(self, kernel: dict, page: int, rows: tuple[int, ...], **more: Any) -> None:
        self.kernel, self.device = kernel, device_of(kernel)
        dtype, dims, sequences = DTYPES[kernel["dtype"]], (kernel["head_dim"], kernel["head_dim_v"]), len(rows)
        generator = torch.Generator().manual_seed(page + sum(rows))

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype).to(self.device)

        shape = (sequences * -(-CAPACITY // page), page) if page else (sequences, CAPACITY)
        self.queries = [random(sum(rows), HEADS_Q, dims[0]) for _ in range(LAYERS)]
        self.caches = [tuple(random(*shape, HEADS_K, dim) for dim in dims) for _ in range(LAYERS)]
        self.options = {**more, "cache_seqlens": self.numbers(CACHED), "cu_seqlens_q": self.numbers(cu_seqlens(rows))}
        if page:
            self.options["block_table"] = torch.randperm(shape[0], generator=generator).int().view(sequences, -1).to(self.device)

    def numbers(self, x: Any) -> torch.Tensor:
        return torch.as_tensor(x).int().to(self.device)

    def set_lengths(self, rows: tuple[int, ...], cached: tuple[int, ...]) -> None:
        """In the arrays that earlier calls, also captured ones, read."""
        self.options["cu_seqlens_q"].copy_(self.numbers(cu_seqlens(rows)))
        self.options["cache_seqlens"].copy_(self.numbers(cached))

    def outputs(self) -> list[Results]:
        """out and lse of each layer, 7 where nothing will be written."""
        dim_v = self.kernel["head_dim_v"]
        return [
            [q.new_full((*q.shape[:-1], dim_v), 7), q.new_full((HEADS_Q, q.shape[0]), 7, dtype=torch.float32)]
            for q in self.queries
        ]

    def explain(self, **more: Any) -> str:
        return libflash.explain(self.queries[0], *self.caches[0], op="decode", **self.options, **more)

    def schedule(self, layer: int = 0, **more: Any) -> torch.Tensor | None:
        """The schedule; None on the CPU, which replaces a GPU in tests of this module."""
        made = libflash.decode_schedule(self.queries[layer], *self.caches[layer], **self.options, **more)
        assert (made is None) == (self.device == "cpu")
        assert made is None or (made.dtype, made.ndim, made.device) == (torch.int32, 1, self.queries[0].device)
        return made

    def run(self, layer: int, to: Results, **more: Any) -> None:
        libflash.decode(self.queries[layer], *self.caches[layer], out=to[0], lse=to[1], return_lse=True, **self.options, **more)

    def results(self, **more: Any) -> list[Results]:
        made = self.outputs()
        for layer, to in enumerate(made):
            self.run(layer, to, **more)
        return made
