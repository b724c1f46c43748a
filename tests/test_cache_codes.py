"""Decode on the CPU over caches of 8-bit codes, with scales, rope parts of keys, and values that are channels of keys."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from harness import BFLOAT16, assert_same_bits, random
from libflash.conformance import cache_cases
from libflash.conformance.cache_cases import CacheCase
from libflash.conformance.decode_cases import DecodeInputs
from libflash.conformance.reference_cache import CODES, LARGEST, row_scales, spread, to_codes

import libflash

KERNELS = [k["name"] for k in libflash.info()["kernels"] if k["operation"] == "decode" and k["backend"] == "cpu" and k["usable"]]
SPLITS = [{}, {"num_splits": 3}, {"split_size": 128}]
TYPES = [np.dtype(np.float16), BFLOAT16, np.dtype(np.float32)]
every_kernel = pytest.mark.parametrize("kernel", KERNELS)
every_code = pytest.mark.parametrize("code", CODES)
every_type = pytest.mark.parametrize("dtype", TYPES, ids=str)


@every_kernel
@pytest.mark.parametrize("case", cache_cases.quick(), ids=str)
def test_case(case: CacheCase, kernel: str) -> None:
    for split in SPLITS:
        x = case.inputs()
        o, lse = libflash.decode(x.q, x.k_cache, x.v_cache, return_lse=True, kernel=kernel, **split, **x.options)
        case.check(x, o=o, lse=lse)


def all_codes(code: str) -> np.ndarray:
    return np.arange(256, dtype=np.uint8).view(CODES[code])


@every_kernel
@every_code
@every_type
def test_every_code_has_its_value(kernel: str, code: str, dtype: np.dtype) -> None:
    """One key a sequence: out is its value, lse its score."""
    codes = all_codes(code).reshape(256, 1, 1, 1)
    q, one = np.ones((256, 1, 1, 1), dtype), np.ones(1, np.float32)
    for rows in (1, 9):
        o, lse = libflash.decode(q.repeat(rows, 1), codes, codes, k_scale=one, v_scale=one, softmax_scale=1.0, causal=False,
                                 return_lse=True, kernel=kernel)  # fmt: skip
        wanted = np.broadcast_to(codes.astype(np.float64), o.shape)
        infinite = np.isinf(wanted)
        np.testing.assert_array_equal(np.where(infinite, 0, o.astype(np.float64)), np.where(infinite, 0, wanted))
        np.testing.assert_array_equal(
            lse[~infinite[:, :, :, 0].swapaxes(1, 2)], wanted[..., 0].swapaxes(1, 2)[~infinite[..., 0].swapaxes(1, 2)]
        )


@every_kernel
@every_type
@pytest.mark.parametrize("case", [case for case in cache_cases.quick() if case.codes and not case.base.rotary], ids=str)
def test_codes_equal_a_cache_of_their_values(case: CacheCase, dtype: np.dtype, kernel: str) -> None:
    """Bit for bit: a cache of q's type with the values of the codes and the same scales. A call that appends leaves codes in the
    cache; the call after it without the append reads them, and has the same bits."""
    for split in SPLITS:
        x = in_type(case.inputs(), dtype)
        given = {"kernel": kernel, **split}
        codes = decoded(x.q, x.k_cache, x.v_cache, **given, **x.options)
        options = after_append(case, x.options)
        values = [None if c is None else c.astype(np.float32).astype(dtype) for c in (x.k_cache, x.v_cache)]
        plain = decoded(x.q, *values, **given, **options)
        assert_same_bits(codes[0], plain[0])
        assert_same_bits(codes[1], plain[1])


def in_type(x: DecodeInputs, dtype: np.dtype) -> DecodeInputs:
    """The inputs with q and all that has its type in another one."""
    own = {name: x.options[name].astype(dtype) for name in ("k", "v", "k_rope", "k_rope_cache") if name in x.options}
    return dataclasses.replace(x, q=x.q.astype(dtype), options=x.options | own)


def after_append(case: CacheCase, options: dict[str, Any]) -> dict[str, Any]:
    """The options of the call that finds in its caches what a call with these options appended."""
    assert not case.base.rotary, "without the append, rotary positions would begin after the new keys"
    dropped = ("k", "v", "k_rope", "cu_seqlens_new")
    lengths = options["cache_seqlens"] + np.array(case.base.appended, np.int32)
    return {name: value for name, value in options.items() if name not in dropped} | {"cache_seqlens": lengths}


def decoded(q: np.ndarray, k_cache: np.ndarray, v_cache: np.ndarray | None, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Rows that belong to no sequence, which are not written, are 0."""
    out = np.zeros((*q.shape[:-1], options["head_dim_v"] if v_cache is None else v_cache.shape[-1]), q.dtype)
    lse = np.zeros((*q.shape[:-3], q.shape[-2], q.shape[-3]), np.float32)
    libflash.decode(q, k_cache, v_cache, out=out, lse=lse, return_lse=True, **options)
    return out, lse


def problem(dtype: np.dtype, code: str, rows: int = 2, batch: int = 3, keys: int = 150, dim: int = 64) -> DecodeInputs:
    """heads_q 4, heads_k 2; codes of random values of the scale 1."""
    q = random(batch, rows, 4, dim, seed=1).astype(dtype)
    one = np.full(1, 4 / LARGEST[CODES[code]], np.float32)
    k, v = (to_codes(random(batch, keys, 2, dim, seed=s), one, CODES[code]) for s in (2, 3))
    return DecodeInputs(q, k, v, {"cache_seqlens": np.array([keys, 1, 77], np.int32)})


@every_kernel
@every_code
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_scales_of_one_dimension_equal_those_of_more(kernel: str, code: str, rows: int) -> None:
    x = problem(BFLOAT16, code, rows)
    heads = np.array([0.01, 0.03], np.float32)
    places, keys = x.k_cache.shape[:2]
    wanted = libflash.decode(x.q, x.k_cache, x.v_cache, k_scale=heads, v_scale=heads, return_lse=True, kernel=kernel, **x.options)
    rows_of = np.broadcast_to(heads, (places, keys, 2))
    buffer = np.full((places, keys, 2, 5), np.nan, np.float32)
    buffer[..., 3] = heads
    for scale in (
        np.broadcast_to(heads, (places, 2)),
        rows_of,
        rows_of.copy(),
        buffer[..., 3],
        rows_of[..., None],
        buffer[..., 3:4],
    ):
        got = libflash.decode(
            x.q, x.k_cache, x.v_cache, k_scale=scale, v_scale=scale, return_lse=True, kernel=kernel, **x.options
        )
        assert_same_bits(got[0], wanted[0])
        assert_same_bits(got[1], wanted[1])


@every_kernel
@every_code
def test_a_scale_of_a_power_of_two_scales_the_result(kernel: str, code: str) -> None:
    x = problem(np.dtype(np.float32), code)
    one = np.ones(1, np.float32)
    plain = libflash.decode(x.q, x.k_cache, x.v_cache, k_scale=one, v_scale=one, kernel=kernel, softmax_scale=0.01, **x.options)
    scaled = libflash.decode(
        x.q, x.k_cache, x.v_cache, k_scale=one / 16, v_scale=one * 8, kernel=kernel, softmax_scale=0.16, **x.options
    )
    assert_same_bits(scaled, plain * np.float32(8))


@every_kernel
def test_scales_of_keys_that_a_row_does_not_see_do_not_matter(kernel: str) -> None:
    x = problem(np.dtype(np.float32), "int8", rows=3)
    scale = np.full(x.k_cache.shape[:3], 0.01, np.float32)
    options = {"window_size": (5, 0), "kernel": kernel, **x.options}
    for rows in (3, 9):
        q = np.repeat(x.q, rows // 3, axis=1)
        wanted = libflash.decode(q, x.k_cache, x.v_cache, k_scale=scale, v_scale=scale, **options)
        broken = scale.copy()
        broken[0, 149] = np.nan  # the last row alone sees the last key
        got = libflash.decode(q, x.k_cache, x.v_cache, k_scale=broken, v_scale=broken, **options)
        assert np.isnan(got[0, -1]).all()
        assert_same_bits(got[0, :-1], wanted[0, :-1])
        assert_same_bits(got[1:], wanted[1:])


# -- append


def edge_values(dtype: np.dtype, channels: int) -> np.ndarray:
    """Ties between codes, values past the largest, small ones, zeros of both signs, infinities: (rows, channels)."""
    rng = np.random.default_rng(5)
    codes = np.concatenate([all_codes(code).astype(np.float64) for code in CODES])
    codes = np.unique(codes[np.isfinite(codes)])
    middle = (codes[1:] + codes[:-1]) / 2
    special = [0.0, -0.0, 449, -470, 1e5, -6e4, 464, 480, 127.5, -128, 126.5, np.inf, -np.inf, 2.0**-9, 2.0**-10, 3 * 2.0**-11]
    x = np.concatenate([codes, middle, np.nextafter(middle, np.inf), special, rng.standard_normal(500) * 100])
    x = np.concatenate([x, np.zeros(-len(x) % channels)])
    with np.errstate(over="ignore"):
        return x.astype(dtype).reshape(-1, channels)


@every_kernel
@every_code
@every_type
@pytest.mark.parametrize("scale", [1.0, 0.37, 0.0, -2.0])
def test_append_rounds_as_numpy_does(kernel: str, code: str, dtype: np.dtype, scale: float) -> None:
    new = edge_values(dtype, 16)[None, :, None]
    caches = [np.zeros((1, new.shape[1] + 2, 1, 16), CODES[code]) for _ in range(2)]
    given = np.array([scale], np.float32)
    libflash.decode(np.zeros((1, 1, 1, 16), dtype), *caches, k=new, v=new[:, ::-1].copy(), k_scale=given, v_scale=given,
                    cache_seqlens=np.array([1], np.int32), kernel=kernel)  # fmt: skip
    for cache, rows in zip(caches, (new, new[:, ::-1]), strict=True):
        wanted = to_codes(rows, given, CODES[code])
        nan = np.isnan(wanted.astype(np.float32))
        np.testing.assert_array_equal(cache[:, 1:-1].view(np.uint8)[~nan], wanted.view(np.uint8)[~nan])
        assert np.isnan(cache[:, 1:-1].astype(np.float32)[nan]).all()
        assert not cache[:, [0, -1]].astype(np.float32).any()


@every_kernel
@every_code
@pytest.mark.parametrize("groups", [None, 1, 4])
def test_append_computes_scales_of_rows(kernel: str, code: str, groups: int | None) -> None:
    dtype = np.dtype(np.float32)
    new = np.concatenate([random(1, 5, 2, 16, seed=4) * 300, np.zeros((1, 1, 2, 16))], axis=1).astype(dtype)
    new[0, 1, 0, 3], new[0, 2, 0, 5] = np.nan, np.inf
    shape = (1, 8, 2) if groups is None else (1, 8, 2, groups)
    scales = [np.full(shape, 7, np.float32) for _ in range(2)]
    caches = [np.zeros((1, 8, 2, 16), CODES[code]) for _ in range(2)]
    libflash.decode(np.zeros((1, 1, 2, 16), dtype), *caches, k=new, v=new * 2, k_scale=scales[0], v_scale=scales[1],
                    cache_seqlens=np.array([1], np.int32), kernel=kernel)  # fmt: skip
    for n, (cache, scale) in enumerate(zip(caches, scales, strict=True)):
        rows = new * (1 + n)
        wanted = row_scales(rows, groups or 1, CODES[code])
        np.testing.assert_array_equal(scale[:, 1:7], wanted if groups else wanted[..., 0])
        assert (scale[:, [0, 7]] == 7).all()
        codes = to_codes(rows[0], spread(scale, np.zeros(6, int), np.zeros(6, int), np.arange(1, 7), 16), CODES[code])
        np.testing.assert_array_equal(cache[0, 1:7].astype(np.float32), codes.astype(np.float32))
    assert (scales[0][0, 6] == 0).all()
    assert np.isnan(scales[0][0, 2, 0]).any() == (code == "int8")


@every_kernel
@every_code
def test_appended_keys_are_rotated_before_they_are_rounded(kernel: str, code: str) -> None:
    x = problem(BFLOAT16, code)
    angles = np.arange(200)[:, None] * 0.1 ** np.linspace(0, 3, 16)
    rotary = {"rotary_cos": np.cos(angles).astype(np.float32), "rotary_sin": np.sin(angles).astype(np.float32)}
    new = {name: random(3, 4, 2, 64, seed=s).astype(BFLOAT16) for name, s in (("k", 8), ("v", 9))}
    options = {"cache_seqlens": np.array([100, 1, 77], np.int32), **rotary, **new, "kernel": kernel}
    plain = [np.zeros(x.k_cache.shape, BFLOAT16) for _ in range(2)]
    libflash.decode(x.q, *plain, **options)
    scale = np.array([0.02, 0.01], np.float32)
    libflash.decode(x.q, x.k_cache, x.v_cache, k_scale=scale, v_scale=scale, **options)
    for got, rotated in zip((x.k_cache, x.v_cache), plain, strict=True):
        for b, first in enumerate((100, 1, 77)):
            wanted = to_codes(rotated[b, first : first + 4], scale[None, :, None], CODES[code])
            assert_same_bits(got[b, first : first + 4].view(np.uint8), wanted.view(np.uint8))


@every_kernel
@pytest.mark.parametrize("paged", [False, True])
def test_a_refused_append_changes_nothing(kernel: str, paged: bool) -> None:
    x = problem(BFLOAT16, "int8")
    shape = x.k_cache.shape[:3]
    scales = [np.full(shape, 0.5, np.float32) for _ in range(2)]
    new = random(3, 4, 2, 64, seed=8).astype(BFLOAT16)
    more = {"block_table": np.arange(3, dtype=np.int32)[:, None]} if paged else {}
    before = [a.copy() for a in (x.k_cache, x.v_cache, *scales)]
    for lengths in ([147, 0, 0], [150, 150, 150], [151, 0, 0]):
        with pytest.raises(libflash.InvalidError, match=r"^(k|cache_seqlens): "):
            libflash.decode(x.q, x.k_cache, x.v_cache, k=new, v=new, k_scale=scales[0], v_scale=scales[1], kernel=kernel,
                            cache_seqlens=np.array(lengths, np.int32), **more)  # fmt: skip
    if paged:
        with pytest.raises(libflash.InvalidError, match="block_table"):
            libflash.decode(x.q, x.k_cache, x.v_cache, k=new, v=new, k_scale=scales[0], v_scale=scales[1], kernel=kernel,
                            cache_seqlens=np.zeros(3, np.int32), block_table=np.array([[0], [7], [1]], np.int32))  # fmt: skip
    for array, old in zip((x.k_cache, x.v_cache, *scales), before, strict=True):
        assert_same_bits(array, old)


# -- MLA


def inline_views(slots: np.ndarray) -> dict[str, np.ndarray]:
    """Codes, scales and rope parts of slots (pages, rows, 1, 656) of bytes."""
    return {
        "k_cache": slots[..., :512].view(ml_dtypes.float8_e4m3fn),
        "k_scale": slots[..., 512:528].view(np.float32),
        "k_rope_cache": slots[..., 528:656].view(BFLOAT16),
    }


@every_kernel
@pytest.mark.parametrize("heads", [1, 3, 16, 63, 64, 126, 128])
def test_inline_slots_of_656_bytes(kernel: str, heads: int) -> None:
    """512 codes, 4 scales of 128 channels each, 64 channels of rope: views of one buffer, equal to arrays of their own."""
    slots = np.zeros((7, 16, 1, 656), np.uint8)
    views = inline_views(slots)
    options = {"block_table": np.array([[5, 2], [0, 6]], np.int32), "head_dim_v": 512, "kernel": kernel, "return_lse": True}
    new = {"k": random(2, 20, 1, 512, seed=1).astype(BFLOAT16), "k_rope": random(2, 20, 1, 64, seed=2).astype(BFLOAT16)}
    q = random(2, 2, heads, 576, seed=3).astype(BFLOAT16)
    own = {name: view.copy() for name, view in views.items()}
    inline = libflash.decode(q, **views, **new, **options)
    apart = libflash.decode(q, **own, **new, **options)
    for name, view in views.items():
        assert_same_bits(view.copy(), own[name])
        assert view.astype(np.float32).any()
    assert_same_bits(inline[0], apart[0])
    assert_same_bits(inline[1], apart[1])
    real = own["k_cache"].astype(np.float32) * own["k_scale"].repeat(128, axis=-1)
    joined = np.concatenate([real, own["k_rope_cache"].astype(np.float32)], axis=-1)
    lengths = np.full(2, 20, np.int32)
    wanted = libflash.decode(q.astype(np.float32), joined, joined[..., :512].copy(), cache_seqlens=lengths,
                             block_table=options["block_table"])  # fmt: skip
    np.testing.assert_allclose(inline[0].astype(np.float32), wanted, rtol=2.0**-6, atol=2.0**-7)


@every_kernel
@every_type
def test_a_view_of_k_equals_a_copy(kernel: str, dtype: np.dtype) -> None:
    cache = random(2, 40, 1, 576, seed=1).astype(dtype)
    q = random(2, 3, 4, 576, seed=3).astype(dtype)
    for more in ({}, {"seqlen": 1}):
        rows = q[:, : more.get("seqlen", 3)]
        view = libflash.decode(rows, cache, head_dim_v=512, kernel=kernel)
        assert_same_bits(view, libflash.decode(rows, cache, cache[..., :512], kernel=kernel))
        assert_same_bits(view, libflash.decode(rows, cache, cache[..., :512].copy(), kernel=kernel))


# -- arrays of libraries


@every_code
def test_bytes_with_cache_dtype(code: str) -> None:
    x = problem(BFLOAT16, code)
    scale = {"k_scale": np.array([0.01], np.float32), "v_scale": np.array([0.02], np.float32)}
    wanted = libflash.decode(x.q, x.k_cache, x.v_cache, **scale, **x.options)
    raw = [c.view(np.uint8) for c in (x.k_cache, x.v_cache)]
    if code == "int8":
        with pytest.raises(libflash.InvalidError, match=r"k_cache has dtype uint8"):
            libflash.decode(x.q, *raw, **scale, **x.options)
        return
    assert_same_bits(libflash.decode(x.q, *raw, cache_dtype=code, **scale, **x.options), wanted)
    other = "e5m2" if code == "e4m3" else "e4m3"
    with pytest.raises(libflash.InvalidError, match="cache_dtype is"):
        libflash.decode(x.q, x.k_cache, x.v_cache, cache_dtype=other, **scale, **x.options)


def test_codes_are_for_caches_alone() -> None:
    x = problem(BFLOAT16, "e4m3")
    with pytest.raises(libflash.UnsupportedError, match=r"q: 8 bits are for caches only; .*it is float8_e4m3fn"):
        libflash.decode(x.k_cache[:, :1], x.k_cache, x.v_cache)
    with pytest.raises(libflash.InvalidError, match=r"q: dtype must be float16.*it is float8_e4m3fn"):
        libflash.attention(x.k_cache, x.k_cache, x.v_cache)
    with pytest.raises(libflash.InvalidError, match=r"k: dtype must be bfloat16.*it is float8_e4m3fn"):
        libflash.attention(x.q[:, :, :2], x.k_cache, x.v_cache)
    int8 = problem(BFLOAT16, "int8")
    with pytest.raises(libflash.InvalidError, match="k_scale: is required for an int8 cache"):
        libflash.decode(int8.q, int8.k_cache, int8.v_cache)
    with pytest.raises(libflash.InvalidError, match="v_cache: dtype must be that of k_cache, float8_e4m3fn"):
        libflash.decode(x.q, x.k_cache, int8.v_cache)


def test_read_only_scales_are_read_and_not_written() -> None:
    x = problem(BFLOAT16, "int8")
    new = random(3, 2, 2, 64, seed=8).astype(BFLOAT16)
    lengths = np.array([100, 1, 77], np.int32)
    heads, rows = np.array([0.01], np.float32), np.full(x.k_cache.shape[:3], 0.01, np.float32)
    heads.flags.writeable = rows.flags.writeable = False
    libflash.decode(x.q, x.k_cache, x.v_cache, k_scale=rows, v_scale=rows, cache_seqlens=lengths)
    libflash.decode(x.q, x.k_cache, x.v_cache, k=new, v=new, k_scale=heads, v_scale=heads, cache_seqlens=lengths)
    with pytest.raises(libflash.InvalidError, match="k_scale is read-only"):
        libflash.decode(x.q, x.k_cache, x.v_cache, k=new, v=new, k_scale=rows, v_scale=rows, cache_seqlens=lengths)


ONE_FOR_ALL = [0.5, 1, np.float32(0.5), np.float64(0.5), np.int32(2), np.array(0.5, np.float32)]


@pytest.mark.parametrize("scale", ONE_FOR_ALL, ids=lambda x: type(x).__name__)
def test_a_number_is_one_scale_for_all(scale: Any) -> None:
    """Numbers of Python and NumPy, and arrays without dimensions, in decode, explain and cache_write."""
    x = problem(BFLOAT16, "int8")
    array = np.full(1, scale, np.float32)
    given, wanted = ({"k_scale": s, "v_scale": s} for s in (scale, array))
    assert_same_bits(
        libflash.decode(x.q, x.k_cache, x.v_cache, **given, **x.options),
        libflash.decode(x.q, x.k_cache, x.v_cache, **wanted, **x.options),
    )
    plans = [libflash.explain(x.q, x.k_cache, x.v_cache, op="decode", **s, **x.options) for s in (given, wanted)]
    assert plans[0] == plans[1]
    rows, slots = random(2, 2, 64, seed=8).astype(BFLOAT16), np.array([3, 5])
    written = [[c.copy() for c in (x.k_cache, x.v_cache)] for _ in range(2)]
    for caches, s in zip(written, (given, wanted), strict=True):
        libflash.cache_write(rows, rows, *caches, slots, **s)
    for got, one in zip(*written, strict=True):
        assert_same_bits(got, one)


@pytest.mark.parametrize("scale", [True, np.True_, "1"], ids=repr)
def test_what_is_no_scale(scale: Any) -> None:
    x = problem(BFLOAT16, "e4m3")
    with pytest.raises(TypeError, match=r"v_scale must be (a number or )?an array.*, not"):
        libflash.decode(x.q, x.k_cache, x.v_cache, v_scale=scale, **x.options)


def test_explain_takes_the_caches_of_decode() -> None:
    x = problem(BFLOAT16, "e4m3")
    plan = libflash.explain(x.q, x.k_cache, x.v_cache, op="decode", **x.options)
    raw = [c.view(np.uint8) for c in (x.k_cache, x.v_cache)]
    assert libflash.explain(x.q, *raw, op="decode", cache_dtype="e4m3", **x.options) == plan
    view = libflash.explain(x.q, x.k_cache, None, op="decode", head_dim_v=32, **x.options)
    assert view == libflash.explain(x.q, x.k_cache, x.v_cache[..., :32], op="decode", **x.options)
    with pytest.raises(libflash.InvalidError, match="head_dim_v is 32"):
        libflash.explain(x.q, x.k_cache, x.v_cache, op="decode", head_dim_v=32)


def test_seeded_defects_are_found() -> None:
    """The check of the cases sees a wrong code, a wrong scale and a wrong result."""
    case = next(case for case in cache_cases.quick() if case.codes == "int8" and case.scale == "rows" and case.base.append)
    x = case.inputs()
    o, lse = libflash.decode(x.q, x.k_cache, x.v_cache, return_lse=True, **x.options)
    case.check(x, o=o, lse=lse)
    for name in ("k_cache", "v_cache"):
        broken = dataclasses.replace(x, **{name: getattr(x, name).copy()})
        getattr(broken, name)[-1, -1, 0, 0] ^= 1
        with pytest.raises(AssertionError, match=name):
            case.check_written(broken)
    scales = x.options["v_scale"].copy()
    scales[tuple(np.argwhere(~np.isnan(scales))[0])] *= 2
    with pytest.raises(AssertionError, match="v_scale"):
        case.check_written(dataclasses.replace(x, options={**x.options, "v_scale": scales}))
    with pytest.raises(AssertionError):
        case.check(x, o=o * 1.1, lse=lse)
