"""cache_write on a GPU: the bits that the CPU writes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import BFLOAT16, random
from libflash.conformance.reference_cache import CODES

import libflash

torch = pytest.importorskip("torch")
from gpu_codes import on_device, on_host  # noqa: E402  (needs torch)
from test_cache_write import HEADS, PAGE_SIZE, PAGES, SCALES, problem, stored_types  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

TYPES = [np.dtype(np.float16), BFLOAT16, np.dtype(np.float32)]
WRITTEN = ("k_cache", "v_cache", "k_scale", "v_scale", "k_rope_cache")
ROTARY = ("none", "halves", "interleaved")


def copied(x: dict[str, Any]) -> dict[str, Any]:
    return {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in x.items()}


def on_gpu(x: dict[str, Any]) -> dict[str, Any]:
    return {name: on_device(value) if isinstance(value, np.ndarray) else value for name, value in x.items()}


def check(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    """NaN numbers may differ in their bits, NaN codes of e4m3 and int8's zeros may not."""
    for name in WRITTEN:
        value = wanted.get(name)
        if value is None:
            continue
        result, unsigned = on_host(got[name], value), np.dtype(f"u{value.itemsize}")
        nan = np.isnan(result.astype(np.float32)) & np.isnan(value.astype(np.float32))
        allowed = nan & (value.itemsize > 1 or value.dtype == CODES["e5m2"])
        different = (result.view(unsigned) != value.view(unsigned)) & ~allowed
        assert not different.any(), f"{name}: {different.sum()} of {different.size}"


def check_write(x: dict[str, Any]) -> None:
    """Both devices write the same."""
    wanted, given = copied(x), on_gpu(copied(x))
    libflash.cache_write(**wanted)
    libflash.cache_write(**given)
    check(given, wanted)
    assert any(x.get(name) is not None and wanted[name].tobytes() != x[name].tobytes() for name in WRITTEN)


def special(x: dict[str, Any]) -> dict[str, Any]:
    """With zeros, infinities and NaN in rows; in channels that no rotation touches."""
    for name in ("k", "v"):
        x[name][0] = 0
        for row, value in ((1, np.nan), (2, np.inf), (3, -np.inf), (4, -0.0), (5, 3e4)):
            x[name][row, 0, -1] = value
    return x


@pytest.mark.parametrize("rotary", ROTARY)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_bits_of_the_cpu(dtype: np.dtype, scale: str, rotary: str) -> None:
    for stored in stored_types(dtype):
        if (stored == np.int8 and scale == "none") or (stored == dtype and scale in ("rows", "groups")):
            continue
        x: dict[str, Any] = special(problem(dtype, stored, scale))
        x["slots"] = np.array([7, -1, 0, 29, 30, 12, 3, 11], np.int32 if rotary == "none" else np.int64)
        if rotary != "none":
            x |= {"rotary_cos": random(20, 3, seed=6), "rotary_sin": random(20, 3, seed=7)}
            x |= {"positions": np.arange(8, dtype=np.int32) + 9, "rotary_interleaved": rotary == "interleaved"}
        check_write(x)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_number_has_the_code_of_the_cpu(dtype: np.dtype, code: str) -> None:
    """All numbers of 16 bits; float32: their upper halves with several lower halves."""
    bits = np.arange(1 << 16, dtype=np.uint32)
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    k = (bits[:, None] << 16 | lower).view(np.float32) if dtype == np.float32 else bits.astype(np.uint16).view(dtype)
    k = k.reshape(-1, 1, 64)
    cache = np.zeros((1, len(k), 1, 64), CODES[code])
    for factor in (1, 0.37):
        check_write({"k": k, "v": None, "k_cache": cache, "v_cache": None, "slots": np.arange(len(k))[::-1].copy(),
                     "k_scale": np.full(1, factor, np.float32)})  # fmt: skip


@pytest.mark.parametrize("count", [0, 1, 5000])
def test_numbers_of_rows(count: int) -> None:
    k, slots = random(count, HEADS, 128), np.random.default_rng(0).permutation(6000)[:count].astype(np.int32)
    cache = np.zeros((60, 100, HEADS, 128), np.float32)
    given, wanted = on_device(cache), cache.copy()
    libflash.cache_write(on_device(k), None, given, None, on_device(slots))
    wanted.reshape(-1, HEADS, 128)[slots] = k
    assert (given.cpu().numpy() == wanted).all()


@pytest.mark.parametrize("rotary", ROTARY)
def test_rope_parts_and_keys_alone(rotary: str) -> None:
    """A rotary embedding rotates the rope part alone."""
    x: dict[str, Any] = {"k": random(3, 1, 512, seed=1).astype(BFLOAT16), "v": None, "v_cache": None}
    x |= {"k_rope": random(3, 1, 64, seed=2).astype(BFLOAT16), "k_rope_cache": np.zeros((2, 4, 1, 64), BFLOAT16)}
    x |= {"k_cache": np.zeros((2, 4, 1, 512), CODES["e4m3"]), "k_scale": np.zeros((2, 4, 1, 4), np.float32)}
    if rotary != "none":
        x |= {"rotary_cos": random(20, 20, seed=6), "rotary_sin": random(20, 20, seed=7)}
        x |= {"positions": np.array([3, 9, 19], np.int32), "rotary_interleaved": rotary == "interleaved"}
    check_write(x | {"slots": np.array([6, 8, 1])})


@pytest.mark.parametrize("slots", [np.int32, np.int64])
def test_slots_outside_and_strides(slots: type) -> None:
    """Slots that are not in the cache; heads before rows; keys, values and scales in one buffer of each row."""
    largest = np.iinfo(slots)
    where = torch.tensor([-1, 7, largest.max, PAGES * PAGE_SIZE, 29, largest.min, 0, -1], device="cuda").to(
        torch.int32 if slots is np.int32 else torch.int64
    )
    buffer = torch.zeros(PAGES, HEADS, PAGE_SIZE, 48, dtype=torch.uint8, device="cuda")
    k_cache, v_cache = (buffer[..., a:b].transpose(1, 2) for a, b in ((0, 16), (16, 40)))
    scales = [buffer.view(torch.float32)[..., n].transpose(1, 2) for n in (10, 11)]
    k, v = (torch.randn(8, HEADS, dim, device="cuda", dtype=torch.float16) for dim in (16, 24))
    libflash.cache_write(k, v, k_cache, v_cache, where, k_scale=scales[0], v_scale=scales[1], cache_dtype="e4m3")
    wanted = [torch.zeros(PAGES, PAGE_SIZE, HEADS, dim, dtype=torch.uint8) for dim in (16, 24)]
    wanted_scales = [torch.zeros(PAGES, PAGE_SIZE, HEADS) for _ in range(2)]
    libflash.cache_write(k.cpu(), v.cpu(), *wanted, where.cpu(), k_scale=wanted_scales[0], v_scale=wanted_scales[1],
                         cache_dtype="e4m3")  # fmt: skip
    for got, right in zip((k_cache, v_cache, *scales), (*wanted, *wanted_scales), strict=True):
        assert torch.equal(got.cpu(), right)
        assert right.any()


def test_positions_outside_the_tables() -> None:
    """The last row of the tables; the CPU refuses them."""
    table = {"rotary_cos": random(5, 3, seed=6), "rotary_sin": random(5, 3, seed=7)}
    x: dict[str, Any] = problem(np.dtype(np.float16), np.dtype(np.float16), "none") | table
    x |= {"slots": np.arange(8), "positions": np.array([0, 4, 5, 100, 1 << 30, 2, 4, 4], np.int32)}
    wanted, given = copied(x), on_gpu(copied(x))
    wanted["positions"] = np.minimum(x["positions"], 4)
    libflash.cache_write(**wanted)
    libflash.cache_write(**given)
    check(given, wanted)


def test_refusals_and_graphs() -> None:
    k = torch.randn(3, 2, 16, device="cuda", dtype=torch.float64)
    cache, slots = torch.zeros(2, 4, 2, 16, device="cuda", dtype=torch.float64), torch.arange(3, device="cuda")
    with pytest.raises(libflash.UnsupportedError, match="cache_write of float64 runs on the CPU only"):
        libflash.cache_write(k, None, cache, None, slots)
    k, cache = k.half(), cache.half()
    libflash.cache_write(k, None, cache.clone(), None, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        libflash.cache_write(k, None, cache, None, slots)
    slots += 4
    graph.replay()
    assert torch.equal(cache.view(8, 2, 16)[4:7], k)
    assert not cache.view(8, 2, 16)[:4].any()
