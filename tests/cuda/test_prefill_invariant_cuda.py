"""Invariant rows on the GPU: long chunks by the prefill kernels have the bits of the decode kernels, in any chunks and pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import random
from sequences import cu_seqlens

import libflash

torch = pytest.importorskip("torch")
from gpu_case import same_bits, to_device  # noqa: E402  (needs torch)
from gpu_kernels import kernels, parameters  # noqa: E402
from gpu_prefill import CACHED, CAPACITY, HEADS_Q, ROWS, Step, check, uses  # noqa: E402

KERNELS = [k for k in kernels("prefill") if k["head_dim_v"] <= 128]
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not any(k["usable"] for k in KERNELS), reason="no CUDA device with prefill kernels"
)
every_kernel = pytest.mark.parametrize("kernel", parameters(KERNELS))
OPTIONS: dict[str, dict[str, Any]] = {"causal": {}, "window": {"window_size": (90, 0)}, "wide window": {"window_size": (600, 0)}}
LENGTHS = CACHED + np.array(ROWS, np.int32)  # with the new keys
Results = tuple[torch.Tensor, torch.Tensor]


class Filled(Step):
    """On the GPU, with all keys in the cache: chunks of the rows see those that they would see."""

    def __init__(self, kernel: dict, page: int, scale: float = 1, narrower: int = 8) -> None:
        super().__init__(kernel, 0, None, narrower)
        for n, cache in zip("kv", self.caches, strict=True):
            for b, (begin, end) in enumerate(zip(cu_seqlens(ROWS), cu_seqlens(ROWS)[1:], strict=False)):
                cache[b, CACHED[b] : CACHED[b] + end - begin] = self.rows[n][begin:end][: CAPACITY - CACHED[b]]
        self.page = page
        if page:
            self.scatter(None)
        self.q = to_device((self.rows["q"].astype(np.float32) * scale).astype(self.dtype), "cuda")
        self.on_gpu = [to_device(x, "cuda") for x in self.caches]

    def call(self, chunks: list[tuple[int, int, int]], **options: Any) -> Results:
        """Rows [first, last) of sequences, in this order."""
        starts, lengths, rows = cu_seqlens(ROWS), [], []
        for b, first, last in chunks:
            rows.append(self.q[starts[b] + first : starts[b] + last])
            lengths.append(LENGTHS[b] - ROWS[b] + last)
        ints = {"cu_seqlens_q": cu_seqlens(tuple(len(x) for x in rows)), "cache_seqlens": np.array(lengths, np.int32)}
        order = np.array([b for b, *_ in chunks], np.int32)
        ints |= {"block_table": self.table[order]} if self.table is not None else {"cache_batch_idx": order}
        given = {name: to_device(np.ascontiguousarray(x), "cuda") for name, x in ints.items()}
        out, lse = libflash.decode(
            torch.cat(rows), *self.on_gpu, invariant=True, causal=True, return_lse=True, **given, **options
        )
        return out, lse.T.contiguous()


def all_rows(lengths: tuple[int, ...] = ROWS) -> list[tuple[int, int, int]]:
    return [(b, 0, n) for b, n in enumerate(lengths)]


def assert_same(got: Results, wanted: Results) -> None:
    assert all(map(same_bits, got, wanted))


@every_kernel
@pytest.mark.parametrize("page", [0, 16, 32, 256])
@pytest.mark.parametrize("option", OPTIONS)
def test_prefill_has_the_bits_of_decode(kernel: dict, page: int, option: str) -> None:
    step, more = Filled(kernel, page), OPTIONS[option]
    if page in (0, 16):
        more = more | {"learnable_sink": to_device(random(HEADS_Q, seed=5), "cuda")}
    wanted = step.call(all_rows(), backend="sm80", **more)
    assert_same(step.call(all_rows(), **more), wanted)
    starts = cu_seqlens(ROWS)
    order = [5, 1, 3, 0, 7, 4, 2, 6]
    at = torch.cat([torch.arange(starts[b], starts[b + 1]) for b in order]).cuda()
    assert_same(step.call([(b, 0, ROWS[b]) for b in order], **more), tuple(x[at] for x in wanted))
    for size in (100, 257):  # the first and the longest sequence in chunks, both in each call
        for first in range(0, 700, size):
            chunks = [(b, first, min(first + size, ROWS[b])) for b in (0, 5) if first < ROWS[b]]
            at = torch.cat([torch.arange(starts[b] + i, starts[b] + j) for b, i, j in chunks]).cuda()
            assert_same(step.call(chunks, **more), tuple(x[at] for x in wanted))
    for b, i in ((0, 0), (0, 299), (4, 50), (5, 333), (6, 0)):
        row = starts[b] + i
        assert_same(step.call([(b, i, i + 1)], **more), tuple(x[row : row + 1] for x in wanted))


@every_kernel
@pytest.mark.parametrize("scale", [8, 20, 60])
def test_large_scores(kernel: dict, scale: float) -> None:
    """Sums beyond the limit, by which kept maxima are raised between units (20), and beyond the range: work tiles that prefill
    computes again, tiles that decode repeats (60)."""
    step = Filled(kernel, 16, scale)
    assert_same(step.call(all_rows()), step.call(all_rows(), backend="sm80"))


@every_kernel
def test_pages_change_no_bit(kernel: dict) -> None:
    wanted = Filled(kernel, 0).call(all_rows())
    for page in (1, 16, 32, 64, 128, 1024):  # pages of one row go to the decode kernels
        assert_same(Filled(kernel, page).call(all_rows()), wanted)


@every_kernel
def test_against_the_cpu(kernel: dict) -> None:
    step = Step(kernel, 64)
    arrays, options = step.arrays()
    assert uses(kernel, arrays, {**options, "causal": True, "invariant": True})
    q, *caches = (to_device(x, "cuda") for x in arrays)
    given = {name: to_device(x, "cuda") for name, x in options.items()}
    out, lse = libflash.decode(q, *caches, causal=True, invariant=True, return_lse=True, **given)
    own, options = step.arrays()
    wanted = libflash.decode(*own, return_lse=True, causal=True, invariant=True, **options)
    check((out.float().cpu().numpy(), lse.cpu().numpy()), wanted, kernel)


@pytest.mark.parametrize("kernel", parameters([k for k in KERNELS if k["head_dim"] == 128]))
def test_long_sequences(kernel: dict) -> None:
    """With segments of several lengths."""
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16}[kernel["dtype"]]
    length, rows = 70_000, 300
    q = torch.randn(rows, 8, 128, device="cuda", dtype=dtype)
    caches = [torch.randn(1, length, 2, 128, device="cuda", dtype=dtype) for _ in range(2)]
    ints = torch.tensor([length], device="cuda", dtype=torch.int32)
    options = {"cache_seqlens": ints, "causal": True, "invariant": True}
    assert "prefill_sm90" in libflash.explain(q[None], *caches, op="decode", **options)
    options["return_lse"] = True
    out, lse = libflash.decode(q[None], *caches, **options)
    by_decode = libflash.decode(q[None], *caches, backend="sm80", **options)
    assert_same((out, lse), by_decode)
    one = libflash.decode(q[None, 77:78], *caches, **options | {"cache_seqlens": ints - rows + 78})
    assert same_bits(one[0][0, 0], out[0, 77])
    assert same_bits(one[1][0, :, 0].contiguous(), lse[0, :, 77].contiguous())
