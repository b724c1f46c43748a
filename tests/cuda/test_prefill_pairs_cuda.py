"""Prefill kernels whose thread blocks work in pairs: two query heads of a key head share the loads of keys. No bit of a head
depends on that: each is as in a call with one query head for every key head, which has no pairs.
"""

from __future__ import annotations

import pytest

import libflash

torch = pytest.importorskip("torch")
from gpu_case import DTYPES, same_bits  # noqa: E402  (needs torch)
from gpu_kernels import kernels, parameters  # noqa: E402

KERNELS = kernels("prefill")
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not any(k["usable"] for k in KERNELS), reason="no CUDA device with prefill kernels"
)

HEADS_K, KEYS = 8, 1100
# Query rows of the sequences, and their keys: fewer and more than rows, and not multiples of a tile.
ROWS, LENGTHS = (700, 0, 1, 500, 130, 400), (1100, 900, 333, 129, 1024, 399)
LOUD_ROWS = (5, 690, 1100, 1700)


class Step:
    def __init__(self, kernel: dict, page: int, group: int) -> None:
        generator = torch.Generator("cuda").manual_seed(page + group)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device="cuda", generator=generator).to(DTYPES[kernel["dtype"]])

        self.kernel, self.group = kernel, group
        columns = -(-KEYS // page) if page else 1
        shape = (len(ROWS) * columns, page or KEYS, HEADS_K)
        self.caches = [random(*shape, kernel[name]) for name in ("head_dim", "head_dim_v")]
        self.q = random(sum(ROWS), HEADS_K * group, kernel["head_dim"])
        rows = torch.tensor([0, *ROWS], device="cuda").cumsum(0).int()
        self.options = {"cu_seqlens_q": rows, "cache_seqlens": torch.tensor(LENGTHS, device="cuda").int()}
        if page:
            order = torch.randperm(shape[0], device="cuda", generator=generator)
            self.options["block_table"] = order.int().reshape(len(ROWS), columns)

    def call(self, q: torch.Tensor, **more: object) -> tuple[torch.Tensor, torch.Tensor]:
        options = self.options | more
        assert f"{self.kernel['name']}, tile" in libflash.explain(q, *self.caches, op="decode", **options)
        return libflash.decode(q, *self.caches, return_lse=True, **options)

    def check(self, **more: object) -> None:
        out, lse = self.call(self.q, **more)
        assert torch.isfinite(out.float()).all()
        for head in range(self.group):
            alone = self.call(self.q[:, head :: self.group].contiguous(), **more)
            assert same_bits(out[:, head :: self.group].contiguous(), alone[0])
            assert same_bits(lse[head :: self.group].contiguous(), alone[1])


every_kernel = pytest.mark.parametrize("kernel", parameters(KERNELS))


@every_kernel
@pytest.mark.parametrize("group", [2, 3, 4])
@pytest.mark.parametrize("page", [0, 16, 64, 256])
@pytest.mark.parametrize("more", [{"causal": True}, {"causal": False}, {"causal": True, "window_size": (200, 0)}], ids=str)
def test_each_head_as_alone(kernel: dict, page: int, group: int, more: dict) -> None:
    Step(kernel, page, group).check(**more)


@every_kernel
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("loud", [slice(0, None, 2), slice(1, None, 2), slice(None)], ids=["first", "second", "both"])
def test_recomputation_in_one_head_or_both(kernel: dict, page: int, loud: slice) -> None:
    """Rows whose scores exceed their first maximum by far are recomputed, each head by itself. They are few, because a thread
    block with many of them recomputes the rows of all its work tiles.
    """
    step = Step(kernel, page, 2)
    for row in LOUD_ROWS:
        step.q[row, loud] *= 400
    step.check(causal=True)


@every_kernel
def test_absent_pages(kernel: dict) -> None:
    step = Step(kernel, 16, 2)
    step.options["block_table"][::2, 3] = -1
    step.options["block_table"][:, 5] = 2**31 - 1
    step.check(causal=True)
