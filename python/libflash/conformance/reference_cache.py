"""Decode over a cache of codes: a cached value is its code times a scale. New rows are quantised when they are appended.

Codes are float8_e4m3fn, float8_e5m2 or int8, or numbers of q's type. The shape of scales is (1), (heads_k), (batch, heads_k),
(blocks, rows, heads_k) or (blocks, rows, heads_k, groups), where a block is an entry or page of the cache. An append divides new
values by scales of one or two dimensions. It computes and writes scales of three or four dimensions: the largest magnitude of a
row or group, divided by the largest code.

`k_rope_cache` has the last channels of the keys in q's type; a rotary embedding rotates these channels of q and of new keys.
Without `v_cache`, the values are the first `head_dim_v` channels of `k_cache`, with its scales unless `v_scale` is given.
"""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np

from .reference_decode import Gathered, gather, own_rows, rotate

CODES = {
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "int8": np.dtype(np.int8),
}
LARGEST = {CODES["e4m3"]: 448.0, CODES["e5m2"]: 57344.0, CODES["int8"]: 127.0}


@dataclasses.dataclass
class GatheredCodes(Gathered):
    """k and v are the real values in float64; the caches and scales are those after the append."""

    dtype: np.dtype  # of q
    k_scale: np.ndarray | None
    v_scale: np.ndarray | None
    k_rope_cache: np.ndarray | None


@np.errstate(all="ignore")
def to_codes(x: np.ndarray, scale: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """x / scale in float32 (float64 for float64), rounded to nearest even, saturated. Zeros stay zeros; int8 has 0 for NaN."""
    wide = x if x.dtype == np.float64 else x.astype(np.float32)
    quotient = np.where(wide == 0, wide, wide / scale.astype(wide.dtype))
    if dtype not in LARGEST:
        return quotient.astype(dtype)
    quotient = np.clip(quotient, -LARGEST[dtype], LARGEST[dtype])
    return (np.rint(np.nan_to_num(quotient)) if dtype == np.int8 else quotient).astype(dtype)


@np.errstate(all="ignore")
def row_scales(x: np.ndarray, groups: int, dtype: np.dtype) -> np.ndarray:
    """float32 (..., groups) for x (..., channels). A NaN makes the scale NaN for int8, and does not count for the others."""
    parts = np.abs(x.astype(np.float32)).reshape(*x.shape[:-1], groups, -1)
    largest = parts.max(axis=-1) if dtype == np.int8 else np.nan_to_num(parts, nan=0.0, posinf=np.inf).max(axis=-1)
    return largest / np.float32(LARGEST[dtype])


def spread(scale: np.ndarray | None, sequence: np.ndarray, block: np.ndarray, row: np.ndarray, channels: int) -> np.ndarray:
    """The scales (n, heads_k or 1, channels or 1) of n cached rows; row i is row[i] of block[i], as read by sequence[i]."""
    if scale is None:
        return np.ones((1, 1, 1), np.float32)
    if scale.ndim == 1:
        return scale[None, :, None]
    if scale.ndim == 2:
        return scale[sequence][:, :, None]
    found = scale[block, row]
    return found[..., None] if scale.ndim == 3 else np.repeat(found, channels // scale.shape[3], axis=-1)


def new_rows(q: np.ndarray, cache: np.ndarray, rows: np.ndarray | None, options: dict) -> Gathered:
    """Where gather() appends new rows. In the result, k_cache is empty except for the new rows, rotated and in q's type; v_cache
    is 1 + the sequence's number at the new rows and 0 elsewhere.
    """
    channels = q.shape[-1] if rows is None else rows.shape[-1]
    empty = np.zeros((*cache.shape[:3], channels), q.dtype), np.zeros((*cache.shape[:2], 1, 1), np.int64)
    if rows is None:
        return gather(q, *empty, **options)
    cu_seqlens = options.get("cu_seqlens_new", options.get("cu_seqlens_q"))
    sequence = np.zeros((*rows.shape[:-2], 1, 1), np.int64)
    for b, at in enumerate(own_rows(rows, cu_seqlens)):
        sequence[at] = 1 + b
    return gather(q, *empty, k=rows, v=sequence, **options)


def append(cache: np.ndarray, scale: np.ndarray | None, new: Gathered) -> None:
    """Write the new rows to `cache` and, if every row has scales of its own, their scales to `scale`."""
    sequence = new.v_cache[:, :, 0, 0]
    block, row = np.nonzero(sequence)
    store(cache, scale, new.k_cache[block, row], sequence[block, row] - 1, block, row)


def store(
    cache: np.ndarray, scale: np.ndarray | None, x: np.ndarray, sequence: np.ndarray, block: np.ndarray, row: np.ndarray
) -> None:
    """Write n rows x of sequences to rows of the cache's blocks."""
    if scale is not None and scale.ndim > 2:
        found = row_scales(x, 1 if scale.ndim == 3 else scale.shape[3], cache.dtype)
        scale[block, row] = found[..., 0] if scale.ndim == 3 else found
    if scale is None and cache.dtype == x.dtype:
        cache[block, row] = x
    elif len(x):
        cache[block, row] = to_codes(x, spread(scale, sequence, block, row, x.shape[-1]), cache.dtype)


@dataclasses.dataclass
class Written:
    """The caches and scales after a call of cache_write; None for those that it does not have."""

    k_cache: np.ndarray
    v_cache: np.ndarray | None
    k_scale: np.ndarray | None
    v_scale: np.ndarray | None
    k_rope_cache: np.ndarray | None


def cache_write(
    k: np.ndarray,
    v: np.ndarray | None,
    k_cache: np.ndarray,
    v_cache: np.ndarray | None,
    slots: np.ndarray,
    *,
    k_scale: np.ndarray | None = None,
    v_scale: np.ndarray | None = None,
    k_rope_cache: np.ndarray | None = None,
    k_rope: np.ndarray | None = None,
    rotary_cos: np.ndarray | None = None,
    rotary_sin: np.ndarray | None = None,
    rotary_interleaved: bool = True,
    positions: np.ndarray | None = None,
) -> Written:
    """New row i goes to row slots[i] % rows of block slots[i] // rows, where a block has `rows` rows. If the slot is outside of
    the cache, the row is not written.
    """
    caches = (None if x is None else x.copy() for x in (k_cache, v_cache, k_scale, v_scale, k_rope_cache))
    made = Written(*caches)  # type: ignore[arg-type]
    here = np.flatnonzero((slots >= 0) & (slots < k_cache.shape[0] * k_cache.shape[1]))
    block, row = np.divmod(np.asarray(slots)[here].astype(np.int64), k_cache.shape[1])
    none = np.zeros(len(here), np.int64)  # a slot does not name a sequence
    rotated = k if k_rope is None else k_rope
    if rotary_cos is not None:
        turned = rotate(rotated[here], positions[here], rotary_cos, rotary_sin, rotary_interleaved).astype(k.dtype)
    else:
        turned = rotated[here]
    store(made.k_cache, made.k_scale, turned if k_rope is None else k[here], none, block, row)
    if v is not None:
        store(made.v_cache, made.v_scale, v[here], none, block, row)
    if k_rope is not None:
        store(made.k_rope_cache, None, turned, none, block, row)
    return made


def scale_of_view(k_scale: np.ndarray | None, channels: int, head_dim_v: int) -> np.ndarray | None:
    if k_scale is None or k_scale.ndim < 4:
        return k_scale
    return k_scale[..., : head_dim_v // (channels // k_scale.shape[3])]


def gather_codes(
    q: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray | None = None,
    *,
    k: np.ndarray | None = None,
    v: np.ndarray | None = None,
    k_scale: np.ndarray | None = None,
    v_scale: np.ndarray | None = None,
    k_rope_cache: np.ndarray | None = None,
    k_rope: np.ndarray | None = None,
    head_dim_v: int | None = None,
    **options,
) -> GatheredCodes:
    """gather() for caches of codes. It calls gather() to find where new rows are written, and which rows each sequence sees."""
    caches = [None if x is None else x.copy() for x in (k_cache, v_cache, k_rope_cache, k_scale, v_scale)]
    k_cache, v_cache, k_rope_cache, k_scale, v_scale = caches
    plain = {name: x for name, x in options.items() if not name.startswith("rotary_")}
    rotated = new_rows(q, k_cache, k, options if k_rope_cache is None else plain)
    if k is not None:
        append(k_cache, k_scale, rotated)
        if v is not None:
            append(v_cache, v_scale, new_rows(q, v_cache, v, plain))
    if k_rope_cache is not None:
        channels = k_cache.shape[3]
        rope = new_rows(q[..., channels:], k_rope_cache, k_rope, options)
        rotated.q[..., channels:] = rope.q
        if k is not None:
            append(k_rope_cache, None, rope)
    plain["cache_seqlens"] = rotated.options["seqused_k"]
    if v_cache is None:
        v_scale = scale_of_view(k_scale, k_cache.shape[3], head_dim_v) if v_scale is None else v_scale
    values = k_cache[..., :head_dim_v] if v_cache is None else v_cache
    real_k = real(q, k_cache, k_scale, plain)
    if k_rope_cache is not None:
        real_k = np.concatenate([real_k, real(q, k_rope_cache, None, plain)], axis=-1)
    return GatheredCodes(
        rotated.q, real_k, real(q, values, v_scale, plain), rotated.options, k_cache, v_cache, q.dtype, k_scale,
        v_scale if v_cache is not None else None, k_rope_cache,
    )  # fmt: skip


@np.errstate(all="ignore")
def real(q: np.ndarray, cache: np.ndarray, scale: np.ndarray | None, options: dict) -> np.ndarray:
    """The values of each sequence's keys (batch, longest, heads_k, channels) in float64."""
    block, row = (np.broadcast_to(x[..., None, None], (*cache.shape[:2], 1, 1)) for x in np.indices(cache.shape[:2]))
    codes = gather(q, cache.astype(np.float64), cache.astype(np.float64), **options).k
    where = gather(q, block.astype(np.int64), row.astype(np.int64), **options)
    out = np.empty(codes.shape)
    for b in range(len(codes)):
        at = where.k[b, :, 0, 0], where.v[b, :, 0, 0]
        out[b] = codes[b] * spread(scale, np.full(len(at[0]), b), *at, cache.shape[3]).astype(np.float64)
    return out
