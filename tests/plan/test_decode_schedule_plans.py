"""The schedule of decode for described GPUs: its size, its refusals, and what `explain` says."""

from __future__ import annotations

import ctypes as c
from typing import Any

import abi
import pytest
from described import ADDRESS, DEVICES, explain, tensor

CACHE = tensor(4, 8192, 8, 128)
PACKED, DENSE, SHORT = tensor(1000, 32, 128), tensor(4, 80, 32, 128), tensor(4, 1, 32, 128)
CU = {"cu_seqlens_q": tensor(5, dtype=abi.INT32)}
GIVEN = "tile order from the schedule: "


def bytes_of(units: int) -> int:
    """Four numbers, and four for each unit."""
    return 16 * (1 + units)


def arguments(q: abi.Tensor, cache: abi.Tensor, **options: Any) -> list[Any]:
    out = tensor(*list(q.shape)[: q.ndim - 1], cache.shape[3], address=ADDRESS << 10)
    return [*map(c.pointer, (q, cache, cache, out)), None, abi.options(abi.DecodeOptions, **options)]


def size_of(lib: c.CDLL, q: abi.Tensor, cache: abi.Tensor = CACHE, device: str = "H200", **options: Any) -> int:
    lib.describe(*DEVICES[device])
    size = c.c_size_t()
    status = lib.flash_attention_decode_schedule_size(*arguments(q, cache, **options), c.byref(size))
    assert status == abi.OK, lib.flash_last_error().decode()
    return size.value


def schedule_of(size: int, address: int = ADDRESS << 11) -> abi.Tensor:
    return tensor(size // 4, dtype=abi.INT32, address=address)


def test_size(lib: c.CDLL) -> None:
    """Tiles of 128 query rows, of 32 heads or of 16 pairs of them; packed, a sequence may end with a part of a tile."""
    assert size_of(lib, DENSE) == bytes_of(4 * 16)
    assert size_of(lib, PACKED, **CU) == bytes_of((7 + 4) * 16)
    assert size_of(lib, PACKED, flags=abi.INVARIANT_ROWS, **CU) == bytes_of((7 + 4) * 32)  # without pairs
    q, cache = tensor(1000, 24, 128), tensor(4, 8192, 8, 128)
    assert size_of(lib, q, cache, **CU) == bytes_of((7 + 4) * 24)  # three heads share a key head: without pairs


def test_nothing_to_compute(lib: c.CDLL) -> None:
    assert size_of(lib, SHORT) == 0
    assert size_of(lib, PACKED, device="A100", **CU) == 0
    assert size_of(lib, PACKED, num_splits=2, **CU) == 0


def test_strides_do_not_matter(lib: c.CDLL) -> None:
    heads_first = tensor(4, 8192, 8, 128)
    heads_first.stride[1], heads_first.stride[2] = 128, 8192 * 128
    assert size_of(lib, PACKED, heads_first, **CU) == size_of(lib, PACKED, **CU)


def workspace(lib: c.CDLL, q: abi.Tensor, **options: Any) -> int:
    """Returns the status; the text is the last error. As decode itself, the query looks at the schedule."""
    lib.describe(*DEVICES["H200"])
    size = c.c_size_t()
    status = lib.flash_attention_decode_workspace_size(*arguments(q, CACHE, **options), c.byref(size))
    return size.value if status == abi.OK else -status


def test_the_workspace_is_the_same(lib: c.CDLL) -> None:
    assert workspace(lib, PACKED, **CU) == workspace(lib, PACKED, schedule=schedule_of(bytes_of(176)), **CU) > 0


def test_a_schedule_that_is_too_small_is_refused(lib: c.CDLL) -> None:
    needed = bytes_of(176)
    assert workspace(lib, PACKED, schedule=schedule_of(needed - 4), **CU) == -abi.INVALID
    assert lib.flash_last_error().decode() == (
        f"schedule: must have at least the bytes that flash_attention_decode_schedule_size returns ({needed - 4} of {needed})"
    )
    assert workspace(lib, PACKED, schedule=schedule_of(needed + 4), **CU) > 0
    assert workspace(lib, SHORT, schedule=schedule_of(4)) >= 0, "the call does not read it"


def test_a_misaligned_schedule_is_refused(lib: c.CDLL) -> None:
    misaligned = schedule_of(bytes_of(176), address=(ADDRESS << 11) + 4)
    assert workspace(lib, PACKED, schedule=misaligned, **CU) == -abi.INVALID
    assert lib.flash_last_error().decode() == "schedule: data must be aligned to 16 bytes (address modulo 16 is 4)"
    assert workspace(lib, SHORT, schedule=misaligned) >= 0


def write(lib: c.CDLL, to: abi.Tensor, **options: Any) -> str:
    """The error of the call that writes a schedule; "" if it succeeds."""
    lib.describe(*DEVICES["H200"])
    status = lib.flash_attention_decode_schedule(*arguments(PACKED, CACHE, **{**CU, **options}), to, None)
    return "" if status == abi.OK else lib.flash_last_error().decode()


def test_the_call_that_writes_checks_it_alike(lib: c.CDLL) -> None:
    needed = bytes_of(176)
    lib.scheduled_order_blocks.restype = c.c_int64
    assert write(lib, schedule_of(needed)) == ""
    assert lib.scheduled_order_blocks() == 1, "it is computed, by one thread block"
    assert write(lib, schedule_of(needed), schedule=schedule_of(needed)) == ""
    assert lib.scheduled_order_blocks() == 1, "and not copied from the schedule of the options"
    assert "must have at least the bytes" in write(lib, schedule_of(needed - 4))
    assert "must be aligned to 16 bytes" in write(lib, schedule_of(needed, address=(ADDRESS << 11) + 8))
    lengths = {"cu_seqlens_q": tensor(5, dtype=abi.INT32, address=(ADDRESS << 11) + needed - 4)}
    assert write(lib, schedule_of(needed), **lengths) == (
        "schedule: an output must not overlap another tensor (it overlaps cu_seqlens_q)"
    )


@pytest.mark.parametrize(("units", "blocks"), [(176, 1), (8448, 16)])
def test_explain_says_where_the_order_comes_from(lib: c.CDLL, units: int, blocks: int) -> None:
    """Copied by several thread blocks of, in a described GPU, 1104 threads."""
    lib.describe(*DEVICES["H200"])
    rows = 1000 if units == 176 else 128 * 524
    arrays = tensor(rows, 32, 128), CACHE, CACHE
    text = explain(lib, "decode", arrays, schedule=schedule_of(bytes_of(units)), **CU)
    assert f"{GIVEN}{min(blocks, -(-units // 1104))} thread blocks" in text
    assert "tile order: " not in text
    without = explain(lib, "decode", arrays, **CU)
    assert "tile order: 1 thread blocks" in without
    assert GIVEN not in without
    keep = [line for line in text.splitlines() if "tile order" not in line]
    assert keep == [line for line in without.splitlines() if "tile order" not in line]


def test_explain_of_a_call_that_does_not_read_it(lib: c.CDLL) -> None:
    lib.describe(*DEVICES["H200"])
    text = explain(lib, "decode", (SHORT, CACHE, CACHE), schedule=schedule_of(4))
    assert text == explain(lib, "decode", (SHORT, CACHE, CACHE))
