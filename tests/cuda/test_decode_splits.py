"""Decode with any number of splits, and with more thread blocks than run at once: the result of one split."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from harness import random

import libflash

torch = pytest.importorskip("torch")
from gpu_case import DTYPES, same_bits  # noqa: E402  (needs torch)
from gpu_decode import LIMITS, NUMPY, SPLITS, decode, every_kernel_and_many_rows  # noqa: E402
from test_decode import LENGTHS, cached, queries  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@every_kernel_and_many_rows
@pytest.mark.parametrize("split", [{"num_splits": n} for n in (2, 7, 100, 1024)] + SPLITS[2:], ids=str)
def test_m7_any_split_is_the_unsplit_result(kernel: dict, split: dict) -> None:
    """Also with more splits than keys, and for a row with a sink and no key."""
    dtype = NUMPY[kernel["dtype"]]
    q, (k, v), sink = queries(dtype), cached(dtype), random(6, seed=5)
    options = dict(cache_seqlens=LENGTHS, learnable_sink=sink, kernel=kernel["name"])
    wanted, got = decode(q, k, v, num_splits=1, **options), decode(q, k, v, **split, **options)
    o_limit, lse_limit = LIMITS[kernel["dtype"]]
    np.testing.assert_allclose(got[0].astype(np.float64), wanted[0].astype(np.float64), rtol=o_limit, atol=o_limit)
    np.testing.assert_allclose(got[1], wanted[1], rtol=lse_limit, atol=lse_limit)
    np.testing.assert_allclose(got[1][2], np.broadcast_to(sink[:, None], (6, 2)), rtol=1e-6)
    assert not got[0][2].astype(np.float64).any()


class Many:
    """Many sequences of different lengths, with or without an appended row."""

    def __init__(self, kernel: dict, sequences: int, keys: int) -> None:
        self.sequences, self.keys = sequences, keys
        self.kernel, dtype, dim = kernel["name"], DTYPES[kernel["dtype"]], kernel["head_dim"]
        self.generator = torch.Generator("cuda").manual_seed(0)
        dim_v = kernel["head_dim_v"]
        shapes = ((1, 16, dim), (keys, 8, dim), (keys, 8, dim_v), (1, 8, dim), (1, 8, dim_v))
        self.q, self.k, self.v, k, v = (self.random(sequences, *shape).to(dtype) for shape in shapes)
        self.news = {"k": k, "v": v}, {f"rotary_{name}": self.random(keys, dim // 4) for name in ("cos", "sin")}

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device="cuda")

    def lengths(self) -> Iterator[torch.Tensor]:
        """All long, some short, most empty."""
        for least in (self.keys - 50, 0):
            yield torch.randint(least, self.keys, (self.sequences,), generator=self.generator, device="cuda", dtype=torch.int32)
        yield torch.where(self.random(self.sequences) < 1.0, 0, self.keys - 1).int()

    def decode(
        self, which: slice, lengths: torch.Tensor, caches: list[torch.Tensor], step: bool, **options: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`caches` are contiguous, or pages if there is a block table."""
        if step:
            options |= {name: x[which] for name, x in self.news[0].items()} | self.news[1]
        if "block_table" not in options:
            caches = [x[which] for x in caches]
        options |= {"cache_seqlens": lengths[which], "kernel": self.kernel, "return_lse": True}
        return libflash.decode(self.q[which], *caches, **options)


@every_kernel_and_many_rows
@pytest.mark.parametrize("split", [{"num_splits": 1}, {"split_size": 512}], ids=str)
def test_more_thread_blocks_than_run_at_once(kernel: dict, split: dict) -> None:
    """In later waves thread blocks start with fewer loads in flight: the same bits as with one wave."""
    many = Many(kernel, 48, 1100)
    for lengths in many.lengths():
        for step in (False, True):
            caches, others = ([many.k.clone(), many.v.clone()] for _ in range(2))
            together = many.decode(slice(None), lengths, caches, step, **split)
            for few in map(slice, range(0, 48, 8), range(8, 56, 8)):
                got = many.decode(few, lengths, others, step, **split)
                assert all(same_bits(x, y[few]) for x, y in zip(got, together, strict=True))
            assert all(map(same_bits, caches, others))


@every_kernel_and_many_rows
@pytest.mark.parametrize(("sequences", "keys"), [(56, 1100), (16, 2100), (1, 1100)])
@pytest.mark.parametrize("page", [0, 16])
def test_splits_that_the_library_chooses(kernel: dict, sequences: int, keys: int, page: int) -> None:
    """By default the library may choose two key heads per thread block and any number of splits: the result of one split."""
    many, limits, which = Many(kernel, sequences, keys), LIMITS[kernel["dtype"]], slice(None)
    for lengths in many.lengths():
        for step in (False, True):
            caches, others = ([many.k.clone(), many.v.clone()] for _ in range(2))
            wanted = many.decode(which, lengths, others, step, num_splits=1)
            options = {}
            if page:
                padded = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % page)) for x in caches]
                order = torch.randperm(padded[0].shape[0] * padded[0].shape[1] // page, device="cuda")
                caches = [x.reshape(-1, page, *x.shape[2:])[order] for x in padded]
                options["block_table"] = order.argsort().reshape(sequences, -1).int()
            got = many.decode(which, lengths, caches, step, **options)
            for x, y, limit in zip(got, wanted, limits, strict=True):
                torch.testing.assert_close(x, y, rtol=limit, atol=limit)
            if page:
                table = options["block_table"].long()
                caches = [x[table].reshape(sequences, -1, *x.shape[2:])[:, :keys] for x in caches]
            assert all(map(same_bits, caches, others))
