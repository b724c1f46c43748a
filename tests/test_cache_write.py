"""cache_write: rows of keys and values to slots of a cache. An append of decode writes the same bits."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from harness import BFLOAT16, random
from libflash.conformance.reference_cache import CODES, cache_write

import libflash

TYPES = [np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.float64)]
PAGES, PAGE_SIZE, HEADS, DIM, DIM_V = 6, 5, 2, 16, 24
CACHED, NEW = np.array([7, 0], np.int32), 4
TABLE = np.array([[3, 1, 5], [0, 4, 2]], np.int32)
SCALES = ("none", "one", "heads", "rows", "groups")


def slots_of_append(dtype: Any = np.int64) -> np.ndarray:
    """Where an append of NEW rows after CACHED keys writes."""
    keys = CACHED[:, None] + np.arange(NEW)
    return (np.take_along_axis(TABLE, keys // PAGE_SIZE, 1) * PAGE_SIZE + keys % PAGE_SIZE).reshape(-1).astype(dtype)


def some_scale(kind: str, groups: int) -> np.ndarray | None:
    shapes = {"one": (1,), "heads": (HEADS,), "rows": (PAGES, PAGE_SIZE, HEADS), "groups": (PAGES, PAGE_SIZE, HEADS, groups)}
    return None if kind == "none" else np.abs(random(*shapes[kind], seed=9)) + np.float32(0.5)


def problem(dtype: np.dtype, stored: np.dtype, scale: str) -> dict[str, Any]:
    made = {"k_cache": random(PAGES, PAGE_SIZE, HEADS, DIM, seed=1).astype(stored)}
    made |= {"v_cache": random(PAGES, PAGE_SIZE, HEADS, DIM_V, seed=2).astype(stored)}
    made |= {"k_scale": some_scale(scale, 4), "v_scale": some_scale(scale, 3)}
    made |= {"k": random(2 * NEW, HEADS, DIM, seed=3).astype(dtype), "v": random(2 * NEW, HEADS, DIM_V, seed=4).astype(dtype)}
    return made


def written(x: dict[str, Any], names: tuple[str, ...] = ("k_cache", "v_cache", "k_scale", "v_scale")) -> dict[str, Any]:
    return {name: None if x.get(name) is None else x[name].tobytes() for name in names}


def copied(x: dict[str, Any]) -> dict[str, Any]:
    return {name: None if value is None else value.copy() for name, value in x.items()}


def stored_types(dtype: np.dtype) -> list[np.dtype]:
    return [dtype] if dtype == np.float64 else [dtype, *CODES.values()]


@pytest.mark.parametrize("rotary", [False, True], ids=["plain", "rotary"])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_equals_an_append(dtype: np.dtype, scale: str, rotary: bool) -> None:
    for stored in stored_types(dtype):
        if (stored == np.int8 and scale == "none") or (stored == dtype and scale in ("rows", "groups")):
            continue
        x = problem(dtype, stored, scale)
        appended, slotted = copied(x), copied(x)
        q = random(2, 1, HEADS, DIM, seed=5).astype(dtype)
        tables, more = {}, {}
        if rotary:
            tables = {name: random(20, 3, seed=seed) for name, seed in (("rotary_cos", 6), ("rotary_sin", 7))}
            more = {"positions": (CACHED[:, None] + np.arange(NEW)).reshape(-1).astype(np.int32), "rotary_interleaved": False}
            tables["rotary_interleaved"] = False
        for name in ("k", "v"):
            appended[name] = x[name].reshape(2, NEW, *x[name].shape[1:])
        libflash.decode(q, **appended, cache_seqlens=CACHED, block_table=TABLE, **tables)
        order = np.random.default_rng(1).permutation(2 * NEW)
        slotted["k"], slotted["v"] = x["k"][order], x["v"][order]
        more = {name: value[order] if name == "positions" else value for name, value in (tables | more).items()}
        libflash.cache_write(**slotted, slots=slots_of_append()[order], **more)
        assert written(slotted) == written(appended)
        assert written(slotted) != written(x)


@pytest.mark.parametrize("rotary", [False, True], ids=["plain", "rotary"])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_against_the_oracle(dtype: np.dtype, scale: str, rotary: bool) -> None:
    for stored in stored_types(dtype):
        if (stored == np.int8 and scale == "none") or (stored == dtype and scale in ("rows", "groups")):
            continue
        x, more = problem(dtype, stored, scale), {}
        more["slots"] = np.where(np.arange(2 * NEW) == 3, -1, slots_of_append())
        if rotary:
            more |= {name: random(20, 3, seed=seed) for name, seed in (("rotary_cos", 6), ("rotary_sin", 7))}
            more |= {"positions": np.arange(2 * NEW, dtype=np.int32) + 5, "rotary_interleaved": scale == "one"}
        wanted = cache_write(**x, **more)
        libflash.cache_write(**x, **more)
        assert written(x, ("v_cache", "v_scale")) == written(vars(wanted), ("v_cache", "v_scale"))
        if not rotary or stored.itemsize == 1 or dtype != np.float64:  # a rotation in double is then rounded once more
            assert written(x) == written(vars(wanted))
        np.testing.assert_allclose(x["k_cache"].astype(np.float64), wanted.k_cache.astype(np.float64), rtol=1e-12, atol=1e-14)


def test_rope_parts_against_the_oracle() -> None:
    k, rope = random(3, 2, 8, seed=1).astype(BFLOAT16), random(3, 2, 4, seed=2).astype(BFLOAT16)
    x = {"k_cache": np.zeros((2, 4, 2, 8), CODES["e5m2"]), "k_rope_cache": np.zeros((2, 4, 2, 4), BFLOAT16)}
    x |= {"k_scale": np.zeros((2, 4, 2), np.float32)}
    wanted = cache_write(k, None, v_cache=None, slots=np.array([6, 8, 1]), k_rope=rope, **x)
    libflash.cache_write(k, None, v_cache=None, slots=np.array([6, 8, 1]), k_rope=rope, **x)
    assert written(x, tuple(x)) == written(vars(wanted), tuple(x))
    assert x["k_scale"].any()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pairs", [1, 3, 4])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_rotated_rope_parts(dtype: np.dtype, scale: str, pairs: int, interleaved: bool) -> None:
    """The rope part alone is rotated, as an append of decode and the oracle do."""
    for stored in stored_types(dtype):
        if (stored == np.int8 and scale == "none") or (stored == dtype and scale in ("rows", "groups")):
            continue
        x = problem(dtype, stored, scale)
        x |= {"k_rope_cache": random(PAGES, PAGE_SIZE, HEADS, 8, seed=8).astype(dtype)}
        x |= {"k_rope": random(2 * NEW, HEADS, 8, seed=5).astype(dtype)}
        tables: dict[str, Any] = {name: random(20, pairs, seed=seed) for name, seed in (("rotary_cos", 6), ("rotary_sin", 7))}
        tables["rotary_interleaved"] = interleaved
        more = tables | {"positions": (CACHED[:, None] + np.arange(NEW)).reshape(-1).astype(np.int32), "slots": slots_of_append()}
        appended, names = copied(x), ("k_cache", "v_cache", "k_scale", "v_scale", "k_rope_cache")
        for name in ("k", "v", "k_rope"):
            appended[name] = x[name].reshape(2, NEW, *x[name].shape[1:])
        q = random(2, 1, HEADS, DIM + 8, seed=5).astype(dtype)
        libflash.decode(q, **appended, cache_seqlens=CACHED, block_table=TABLE, **tables)
        wanted = vars(cache_write(**x, **more))
        libflash.cache_write(**x, **more)
        assert written(x, names) == written(appended, names)
        assert written(x, names[:4]) == written(wanted, names[:4])
        np.testing.assert_allclose(x["k_rope_cache"].astype(np.float64), wanted["k_rope_cache"].astype(np.float64), 1e-12, 1e-14)


@pytest.mark.parametrize("dtype", [np.int32, np.int64], ids=str)
@pytest.mark.parametrize("scale", ["none", "rows"])
def test_slots_outside_are_skipped(dtype: Any, scale: str) -> None:
    stored = np.dtype(np.float32) if scale == "none" else CODES["int8"]
    x = problem(np.dtype(np.float32), stored, scale)
    largest = np.iinfo(dtype)
    slots = np.array([-1, 7, largest.max, PAGES * PAGE_SIZE, 29, largest.min, 0, -1], dtype)
    inside, wanted = (slots >= 0) & (slots < PAGES * PAGE_SIZE), copied(x)
    libflash.cache_write(**x, slots=slots)
    libflash.cache_write(**{**wanted, "k": x["k"][inside], "v": x["v"][inside]}, slots=slots[inside])
    assert written(x) == written(wanted)
    before = problem(np.dtype(np.float32), stored, scale)
    untouched = np.setdiff1d(np.arange(PAGES * PAGE_SIZE), slots)
    for name in ("k_cache", "v_cache", *(("k_scale", "v_scale") if scale == "rows" else ())):
        got, was = (y[name].reshape(PAGES * PAGE_SIZE, -1) for y in (x, before))
        assert (got[untouched] == was[untouched]).all()
        assert (got[slots[inside]] != was[slots[inside]]).any()


@pytest.mark.parametrize("count", [0, 1, 5000])
def test_numbers_of_rows(count: int) -> None:
    """5000 rows run on several threads."""
    k, slots = random(count, HEADS, DIM), np.random.default_rng(0).permutation(6000)[:count].astype(np.int32)
    cache = np.zeros((60, 100, HEADS, DIM), np.float32)
    libflash.cache_write(k, None, cache, None, slots)
    wanted = np.zeros_like(cache)
    wanted.reshape(-1, HEADS, DIM)[slots] = k
    assert (cache == wanted).all()


def test_rope_parts_and_keys_alone() -> None:
    """As multi-head latent attention stores them: values are channels of the keys."""
    k, rope = random(3, 1, 8, seed=1).astype(BFLOAT16), random(3, 1, 4, seed=2).astype(BFLOAT16)
    latent, ropes = np.zeros((2, 4, 1, 8), ml_dtypes.float8_e4m3fn), np.zeros((2, 4, 1, 4), BFLOAT16)
    slots = np.array([6, -1, 1])
    libflash.cache_write(k, None, latent, None, slots, k_scale=0.5, k_rope_cache=ropes, k_rope=rope)
    for slot, row in ((6, 0), (1, 2)):
        assert (ropes.reshape(8, 1, 4)[slot] == rope[row]).all()
        wanted = (k[row].astype(np.float32) / np.float32(0.5)).astype(ml_dtypes.float8_e4m3fn)
        assert latent.reshape(8, 1, 8)[slot].tobytes() == wanted.tobytes()
    assert np.count_nonzero(ropes.reshape(8, 4).any(axis=1)) == 2


def test_decode_sees_the_rows() -> None:
    """A write by slots, then decode without new rows, is an append."""
    x = problem(np.dtype(np.float32), np.dtype(np.float32), "none")
    appended, q = copied(x), random(2, NEW, HEADS, DIM, seed=5)
    for name in ("k", "v"):
        appended[name] = x[name].reshape(2, NEW, *x[name].shape[1:])
    wanted = libflash.decode(q, **appended, cache_seqlens=CACHED, block_table=TABLE)
    libflash.cache_write(**x, slots=slots_of_append())
    got = libflash.decode(q, x["k_cache"], x["v_cache"], cache_seqlens=CACHED + NEW, block_table=TABLE)
    assert (got == wanted).all()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"slots": np.array([3, 4, 3, 0, 1, 2, 7, 8])}, r"slots: two rows must not .*rows 0 and 2, slot 3"),
        ({"slots": np.zeros(8, np.float32)}, "slots: dtype must be int32 or int64"),
        ({"k_scale": np.ones((8, HEADS), np.float32)}, "k_scale: must have 1, 3 or 4 dimensions"),
        ({"v_cache": None}, "v_cache: v and v_cache are given together"),
        ({"positions": np.arange(8, dtype=np.int32)}, "^positions: needs rotary_cos and rotary_sin: only the rotary embedding"),
        ({"cache_dtype": "int4"}, "cache_dtype is 'int4'"),
    ],
)
def test_refusals_write_nothing(change: dict[str, Any], text: str) -> None:
    x = problem(np.dtype(np.float32), np.dtype(np.float32), "none") | {"slots": slots_of_append()}
    before = written(x, ("k_cache",))
    with pytest.raises(libflash.InvalidError, match=text):
        libflash.cache_write(**x | change)
    assert written(x, ("k_cache",)) == before


def test_jax_arrays_are_referred() -> None:
    jnp = pytest.importorskip("jax.numpy")
    k = jnp.zeros((1, 1, 4))
    with pytest.raises(libflash.InvalidError, match="use libflash"):
        libflash.cache_write(k, None, k[None], None, jnp.zeros(1, int))
