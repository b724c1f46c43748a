"""Decode with lengths, cache entries and pages out of range, and with appended rows that do not fit: they are absent."""

from __future__ import annotations

import pytest

import libflash

torch = pytest.importorskip("torch")
from gpu_case import DTYPES, bits, same_bits  # noqa: E402  (needs torch)
from gpu_decode import LIMITS, every_kernel_and_many_rows  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@every_kernel_and_many_rows
@pytest.mark.parametrize("append", [0, 3])
def test_numbers_on_the_device_out_of_range(kernel: dict, append: int) -> None:
    """Lengths are clamped to the capacity; rows of invalid entries and pages are absent. Memory around the cache is not
    written.
    """
    dtype = DTYPES[kernel["dtype"]]
    generator = torch.Generator("cuda").manual_seed(0)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    around = [made(12, 40, 2, 32) for _ in range(2)]
    before = [x.clone() for x in around]
    caches = [x[4:8, 4:36] for x in around]
    q = made(4, 2, 4, 32)
    new = {"k": made(4, append, 2, 32), "v": made(4, append, 2, 32)} if append else {}
    numbers = torch.tensor([-5, 10, 2**31 - 1, 40], dtype=torch.int32, device="cuda")
    cut = numbers.clamp(0, 32)
    right = [x.clone() for x in caches]
    wanted = libflash.decode(q, *right, cache_seqlens=cut, kernel=kernel["name"], **new)
    got = libflash.decode(q, *caches, cache_seqlens=numbers, kernel=kernel["name"], **new)
    assert same_bits(got, wanted)
    assert all(same_bits(x.contiguous(), y) for x, y in zip(caches, right, strict=True))
    entries = torch.tensor([3, -1, 4, 0], dtype=torch.int32, device="cuda")
    tables = torch.stack([entries.flip(0), entries], 1)
    for where in ({"cache_batch_idx": entries}, {"block_table": tables}):
        lengths = torch.full((4,), 20, dtype=torch.int32, device="cuda")
        out, lse = libflash.decode(q, *caches, cache_seqlens=lengths, return_lse=True, kernel=kernel["name"], **where, **new)
        if "cache_batch_idx" in where:
            assert not out[1:3].any()
            assert (lse[1:3] == -torch.inf).all()
        assert out.isfinite().all()
    for x, y in zip(around, before, strict=True):
        outside = torch.ones(x.shape[:2], dtype=torch.bool, device="cuda")
        outside[4:8, 4:36] = False
        assert torch.equal(bits(x)[outside], bits(y)[outside])


@every_kernel_and_many_rows
@pytest.mark.parametrize("form", ["own", "entries", "pages", "leftpad", "pages and leftpad"])
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("append", [1, 3])
def test_rows_that_do_not_fit_are_absent(kernel: dict, append: int, rotary: bool, form: str) -> None:
    """Full and nearly full sequences, and one with free rows, against a larger cache where all rows fit."""
    dtype, capacity, lengths = DTYPES[kernel["dtype"]], 96, [96, 95, 40, 94]
    generator = torch.Generator("cuda").manual_seed(3)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    q, options = made(4, append, 4, 64), {"k": made(4, append, 2, 64), "v": made(4, append, 2, 64), "kernel": kernel["name"]}
    options["cache_seqlens"] = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    if rotary:
        angles = torch.arange(capacity + append, device="cuda")[:, None] * 0.1 ** torch.linspace(0, 3, 16, device="cuda")
        options |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    caches = [made(4, capacity, 2, 64) for _ in range(2)]
    larger = [torch.cat([x, torch.full_like(x[:, :32], torch.nan)], 1) for x in caches]
    table = torch.arange(24, dtype=torch.int32, device="cuda").reshape(4, 6)
    forms = {
        "own": {},
        "entries": {"cache_batch_idx": torch.arange(4, dtype=torch.int32, device="cuda")},
        "pages": {"block_table": table},
        "leftpad": {"cache_leftpad": torch.tensor([3, 0, 40, 90], dtype=torch.int32, device="cuda")},
    }
    forms["pages and leftpad"] = forms["pages"] | forms["leftpad"]
    where = forms[form]
    given = [x.reshape(24, 16, 2, 64) if "block_table" in where else x for x in caches]
    wanted_caches = [x.clone() for x in larger]
    libflash.decode(q, *wanted_caches, **options)
    out, lse = libflash.decode(q, *given, return_lse=True, **where, **options)
    for x, y in zip(caches, wanted_caches, strict=True):
        assert same_bits(x, y[:, :capacity].contiguous())
    # Each query row alone, with a cache of exactly the keys that it sees.
    tables = {name: options[name] for name in ("rotary_cos", "rotary_sin") if name in options}
    pad = where.get("cache_leftpad", torch.zeros(4, dtype=torch.int32, device="cuda"))
    for i in range(append):
        for b, length in enumerate(lengths):
            keys = slice(int(pad[b]), min(length + i + 1, capacity))
            row = q[b : b + 1, i : i + 1]
            if tables:
                row = rotated_by_append(row, length + i, tables)
            alone = [x[b : b + 1, keys].contiguous() for x in wanted_caches]
            wanted, wanted_lse = libflash.attention(row, *alone, return_lse=True)
            limit, _ = LIMITS[kernel["dtype"]]
            torch.testing.assert_close(out[b : b + 1, i : i + 1], wanted, rtol=limit, atol=limit)
            torch.testing.assert_close(lse[b : b + 1, :, i : i + 1], wanted_lse, rtol=1e-4, atol=1e-4)


def rotated_by_append(row: torch.Tensor, position: int, tables: dict[str, torch.Tensor]) -> torch.Tensor:
    """A rotated query row: appended as a key to an empty cache with tables that start at its position."""
    cache = [torch.zeros_like(row) for _ in range(2)]
    here = {name: table[position : position + 1].contiguous() for name, table in tables.items()}
    start = torch.zeros(1, dtype=torch.int32, device="cuda")
    libflash.decode(row, *cache, k=row, v=row, cache_seqlens=start, **here)
    return cache[0]
