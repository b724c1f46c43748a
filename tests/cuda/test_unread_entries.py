"""Entries of a block table that decode must not read: before a window, before cache_leftpad and after the last key. They hold the
largest number, and pages that only they could name hold NaN.
"""

from __future__ import annotations

from typing import Any

import pytest
from gpu_kernels import device_of, in_place_of, of_many_rows, parameters

import libflash

torch = pytest.importorskip("torch")
from gpu_case import DTYPES, same_bits  # noqa: E402  (needs torch)
from gpu_codes import TORCH_CODES  # noqa: E402
from gpu_decode import KERNELS_AND_MANY_ROWS, ints  # noqa: E402

LENGTHS, CAPACITY, HEADS_Q, HEADS_K, DIM = (700, 3, 129, 512, 0), 768, 4, 2, 64
UNREAD = 2**31 - 1
every_kernel = pytest.mark.parametrize("kernel", parameters([*KERNELS_AND_MANY_ROWS, in_place_of("decode")]))
Options = dict[str, Any]


def first_keys(rows: int, options: Options) -> list[int]:
    """The first key that a row of each sequence sees."""
    left = options.get("window_size", (CAPACITY, 0))[0]
    pads = options["cache_leftpad"].tolist() if "cache_leftpad" in options else [0] * len(LENGTHS)
    return [max(n - rows - left, pad, 0) for n, pad in zip(LENGTHS, pads, strict=True)]


def spoilt(
    caches: list[torch.Tensor], table: torch.Tensor, page: int, first: list[int]
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Copies without the entries and pages that no row needs."""
    wanted = torch.full_like(table, UNREAD)
    for b, (begin, end) in enumerate(zip(first, LENGTHS, strict=True)):
        if begin < end:
            some = slice(begin // page, -(-end // page))
            wanted[b, some] = table[b, some]
    read = wanted[wanted != UNREAD].long()
    made = []
    for cache in caches:
        is_code = cache.element_size() == 1  # PyTorch has no indexing of float8 on every device
        before = cache.view(torch.uint8) if is_code else cache
        other = torch.full_like(before, 0x7F if is_code else torch.nan)  # e4m3 has this code for NaN
        other[read] = before[read]
        made.append(other.view(cache.dtype))
    return made, wanted


FORMS = ["dense", "packed", "invariant", "tree", "e4m3"]
WHERE = ["window", "padding", "window and padding"]


@every_kernel
@pytest.mark.parametrize("form", FORMS)
def test_entries_that_no_row_needs(kernel: dict, form: str) -> None:
    if of_many_rows(kernel) and form not in ("dense", "packed"):
        pytest.skip("the kernel has not these options beside a window")
    if form == "e4m3" and kernel["dtype"] == "f32":
        pytest.skip("the kernel has no caches of 8 bits")
    for page in (16, 64) if of_many_rows(kernel) else (1, 7, 16, 64):
        for where in WHERE:
            check(kernel, form, where, page)


def check(kernel: dict, form: str, where: str, page: int) -> None:
    device, dtype = device_of(kernel), DTYPES[kernel["dtype"]]
    generator = torch.Generator().manual_seed(page)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    rows, columns = 3, -(-CAPACITY // page)
    q, pages = made(len(LENGTHS), rows, HEADS_Q, DIM), len(LENGTHS) * columns
    caches = [made(pages, page, HEADS_K, DIM) for _ in range(2)]
    table = torch.randperm(pages, generator=generator).to(torch.int32).view(len(LENGTHS), columns).to(device)
    options: Options = {"cache_seqlens": ints(kernel, *LENGTHS), "kernel": kernel["name"], "return_lse": True, "causal": True}
    if "window" in where:
        options["window_size"] = (100, 0)
    if "padding" in where:
        options["cache_leftpad"] = ints(kernel, 650, 0, 65, 300, 0)
    first = first_keys(rows, options)
    if form == "packed":
        q = q.reshape(-1, HEADS_Q, DIM)
        options["cu_seqlens_q"] = ints(kernel, *range(0, len(q) + 1, rows))
    if form == "invariant":
        options["invariant"] = True
    if form == "tree":
        positions = torch.tensor([[max(n - rows, 0) + i for i in range(rows)] for n in LENGTHS], dtype=torch.int32)
        options |= {"tree_mask": ints(kernel, *[7, 3, 5] * len(LENGTHS)).view(-1, 1), "q_positions": positions.to(device)}
    if form == "e4m3":
        caches = [x.to(TORCH_CODES[form]) for x in caches]
    others, unread = spoilt(caches, table, page, first)
    assert (unread == UNREAD).any()
    wanted = libflash.decode(q, *caches, block_table=table, **options)
    got = libflash.decode(q, *others, block_table=unread, **options)
    assert all(same_bits(a, b) for a, b in zip(got, wanted, strict=True)), (where, page)
    assert wanted[0].isfinite().all()
