"""Attention over a KV cache in float64, and the merge of results over several key ranges.

A cache is (batch, capacity, heads_k, head_dim), or pages (num_pages, page_size, heads_k, head_dim) with a
`block_table` (batch, columns): position t of sequence b is row t % page_size of page
block_table[b, t // page_size]. A page whose number is out of range is absent: its keys are not visible, and
nothing is written to it. `cache_batch_idx` gives the cache entry of each sequence, if the cache has no pages.

The first `cache_seqlens` positions are filled (default: the whole capacity, or none when there are new keys). New
`k`, `v` go to positions cache_seqlens + i, rounded to the cache's dtype; k is first rotated by that position. q is
rotated by position cache_seqlens + i if causal or windowed, else every row by cache_seqlens. A new row beyond the
capacity is absent, as on an absent page: it is not written and not visible, but it counts in the number of keys. Then
q attends to the cache, new keys included; positions before `cache_leftpad` are hidden, whether or not their page exists.

With `cu_seqlens_q`, q is (total_q, heads_q, head_dim), and k, v are (total_new, heads_k, ...) by `cu_seqlens_new`, which is
`cu_seqlens_q` if not given: each sequence has its own number of rows. `q_positions`, `tree_mask`: see `see_by_position`.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from .reference import NEG_INF, forward


@dataclasses.dataclass
class Gathered:
    """A decode call as a dense problem: `forward(q, k, v, **options)`."""

    q: np.ndarray  # float64, rotated; packed if the call's is
    k: np.ndarray  # (batch, longest, heads_k, head_dim), in the cache's dtype
    v: np.ndarray
    options: dict
    k_cache: np.ndarray  # after the append
    v_cache: np.ndarray


@dataclasses.dataclass
class Decoded:
    out: np.ndarray
    lse: np.ndarray
    k_cache: np.ndarray
    v_cache: np.ndarray


def decode(q: np.ndarray, k_cache: np.ndarray, v_cache: np.ndarray, **options) -> Decoded:
    """Keyword arguments as for `gather`; the caches are not changed, new ones are returned."""
    dense = gather(q, k_cache, v_cache, **options)
    out, lse = forward(dense.q, dense.k, dense.v, **dense.options)
    return Decoded(out, lse, dense.k_cache, dense.v_cache)


def gather(
    q: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    *,
    cache_seqlens: np.ndarray | int | None = None,
    block_table: np.ndarray | None = None,
    cache_batch_idx: np.ndarray | None = None,
    cache_leftpad: np.ndarray | None = None,
    k: np.ndarray | None = None,
    v: np.ndarray | None = None,
    cu_seqlens_q: np.ndarray | None = None,
    cu_seqlens_new: np.ndarray | None = None,
    q_positions: np.ndarray | None = None,
    tree_mask: np.ndarray | None = None,
    cu_seqlens_tree: np.ndarray | None = None,
    rotary_cos: np.ndarray | None = None,
    rotary_sin: np.ndarray | None = None,
    rotary_interleaved: bool = True,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    **score_options,
) -> Gathered:
    """Rotate, append, and gather the keys of each sequence."""
    if block_table is not None and cache_batch_idx is not None:
        raise ValueError("cache_batch_idx names rows of a contiguous cache; with block_table there are none")
    rows = own_rows(q, cu_seqlens_q)
    batch = len(rows)
    cu_seqlens_new = cu_seqlens_q if cu_seqlens_new is None else cu_seqlens_new
    new_rows = [(0, slice(0, 0))] * batch if k is None else own_rows(k, cu_seqlens_new)
    k_cache, v_cache = k_cache.copy(), v_cache.copy()
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    appended = np.array([at[-1].stop - at[-1].start for at in new_rows], dtype=np.int64)
    if cache_seqlens is None:
        cache_seqlens = capacity if k is None else 0
    filled = np.clip(np.broadcast_to(cache_seqlens, (batch,)).astype(np.int64), 0, capacity)
    lengths = filled + appended

    q = q.astype(np.float64)
    if rotary_cos is not None:
        moving = causal or tuple(window_size) != (-1, -1) or tree_mask is not None
        k = None if k is None else k.astype(np.float64)
        for b in range(batch):
            for x, at, advance in ((q, rows[b], moving), (k, new_rows[b], True)):
                if x is None:
                    continue
                positions = filled[b] + np.arange(len(x[at])) * advance
                if q_positions is not None:  # of the query rows, and of the last keys, as many as there are query rows
                    given = q_positions[rows[b]]
                    n = positions - (lengths[b] - len(given)) if x is k else np.arange(len(given))
                    positions = np.where(n >= 0, np.append(given, 0)[np.clip(n, 0, None)], positions)
                x[at] = rotate(x[at], positions, rotary_cos, rotary_sin, rotary_interleaved)

    longest = int(lengths.max(initial=0))
    dense_k = np.zeros((batch, longest, *k_cache.shape[2:]), dtype=k_cache.dtype)
    dense_v = np.zeros((batch, longest, *v_cache.shape[2:]), dtype=v_cache.dtype)
    visible = np.zeros((batch, 1, 1, longest), dtype=bool)
    slots = [cache_slots(b, capacity, k_cache.shape, block_table, cache_batch_idx) for b in range(batch)]
    for b, (blocks, columns, present) in enumerate(slots):
        for i in range(appended[b]):
            t = filled[b] + i
            if t < capacity and present[t]:
                k_cache[blocks[t], columns[t]] = k[new_rows[b]][i].astype(k_cache.dtype)
                v_cache[blocks[t], columns[t]] = v[new_rows[b]][i].astype(v_cache.dtype)
    for b, (blocks, columns, present) in enumerate(slots):
        here = np.flatnonzero(present[: lengths[b]])
        dense_k[b, here] = k_cache[blocks[here], columns[here]]
        dense_v[b, here] = v_cache[blocks[here], columns[here]]
        visible[b, 0, 0, here] = here >= (0 if cache_leftpad is None else cache_leftpad[b])
    options = dict(causal=causal, window_size=window_size, seqused_k=lengths, mask=visible, **score_options)
    if cu_seqlens_q is not None:
        options["cu_seqlens_q"] = cu_seqlens_q
    if q_positions is not None or tree_mask is not None:
        see_by_position(options, q, rows, q_positions, tree_mask, cu_seqlens_tree)
    return Gathered(q, dense_k, dense_v, options, k_cache, v_cache)


def own_rows(x: np.ndarray, cu_seqlens: np.ndarray | None) -> list[tuple]:
    """Index of the rows of each sequence: (batch, slice) in a dense array, (slice,) in a packed one."""
    if cu_seqlens is None:
        return [(b, slice(0, x.shape[1])) for b in range(x.shape[0])]
    return [(slice(int(start), int(stop)),) for start, stop in itertools.pairwise(cu_seqlens)]


def see_by_position(
    options: dict,
    q: np.ndarray,
    rows: list[tuple],
    q_positions: np.ndarray | None,
    tree_mask: np.ndarray | None,
    cu_seqlens_tree: np.ndarray | None,
) -> None:
    """Replaces the causal rule, the window and ALiBi of `options` by a mask and a bias for each pair of a row and a key.

    The last Lq keys of a sequence have the positions of its query rows: q_positions, else Lk - Lq + i. With tree_mask, bit
    j % 32 of word j // 32 of a row says whether it sees the j-th of these keys. Without tree_mask, and for sequences without
    rows in tree_mask, the causal rule compares the indices of keys, not positions.
    """
    lengths, mask = options.pop("seqused_k"), options["mask"]
    causal, (left, right), slopes = options.pop("causal"), options.pop("window_size"), options.pop("alibi_slopes", None)
    longest_q, heads = max((at[-1].stop - at[-1].start for at in rows), default=0), q.shape[-2]
    seen = np.zeros((len(rows), 1, longest_q, mask.shape[-1]), dtype=bool)
    bias = np.zeros((len(rows), heads, longest_q, mask.shape[-1]))
    start_of_tree = 0
    for b, at in enumerate(rows):
        lq, lk = at[-1].stop - at[-1].start, int(lengths[b])
        i, j = np.arange(lq)[:, None], np.arange(lk)[None, :]
        n = j - (lk - lq)  # index among the last lq keys; negative for earlier keys
        position = lk - lq + np.arange(lq) if q_positions is None else q_positions[at].astype(np.int64)
        key_position = np.where(n >= 0, np.append(position, 0)[np.clip(n, -1, lq)], j)
        tree_rows = 0 if tree_mask is None else lq
        if cu_seqlens_tree is not None:
            start_of_tree, stop = (int(c) for c in cu_seqlens_tree[b : b + 2])
            tree_rows = stop - start_of_tree
        visible = np.ones((lq, lk), dtype=bool)
        if tree_rows:
            words = tree_mask[start_of_tree : start_of_tree + lq].astype(np.int64) & 0xFFFFFFFF
            bits = (words[:, :, None] >> np.arange(32)) & 1
            bits = np.append(bits.reshape(lq, -1), np.zeros((lq, 1), np.int64), axis=1)
            visible &= (n < 0) | (bits[i, np.clip(n, -1, None)] == 1)
            start_of_tree += lq
        elif causal or tree_mask is not None:
            visible &= j <= i + lk - lq
        distance = key_position - position[:, None]
        visible &= (distance >= -left) if left >= 0 else True
        visible &= (distance <= right) if right >= 0 else True
        seen[b, 0, :lq, :lk] = visible & mask[b, 0, :, :lk]
        if slopes is not None:
            each = np.asarray(slopes, np.float64)[b if slopes.ndim == 2 else ...]
            bias[b, :, :lq, :lk] = -each[:, None, None] * np.abs(distance)
    options |= {"mask": seen, "seqused_k": lengths}
    if slopes is not None:
        options["bias"] = bias


def cache_slots(
    b: int, capacity: int, shape: tuple, block_table: np.ndarray | None, cache_batch_idx: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For every position of sequence b: index into the cache's first two axes, and whether it exists."""
    t = np.arange(capacity)
    if block_table is not None:
        rows, columns = block_table[b][t // shape[1]].astype(np.int64), t % shape[1]
    else:
        rows, columns = np.full(capacity, b if cache_batch_idx is None else int(cache_batch_idx[b])), t
    return rows, columns, (rows >= 0) & (rows < shape[0])


def rotate(x: np.ndarray, positions: np.ndarray, cos: np.ndarray, sin: np.ndarray, interleaved: bool) -> np.ndarray:
    """Rotate pairs among the first 2 * cos.shape[1] dims of x (..., rows, heads, dim) by the position of each row.

    A pair is (2i, 2i + 1) when interleaved, else (i, i + rotary_dim / 2).
    """
    half = cos.shape[1]
    c, s = (table.astype(np.float64)[positions][..., None, :] for table in (cos, sin))
    first, second = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(half), slice(half, 2 * half))
    x = x.astype(np.float64)
    out = x.copy()
    out[..., first] = x[..., first] * c - x[..., second] * s
    out[..., second] = x[..., first] * s + x[..., second] * c
    return out


@np.errstate(all="ignore")
def merge_weights(lses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(weights, lse): the weight of each part, 0 in a row for which no part has keys, and the merged lse."""
    lses = np.asarray(lses, dtype=np.float64)
    top = lses.max(axis=0, initial=NEG_INF)
    top = np.where(top == NEG_INF, 0.0, top)
    e = np.exp(lses - top)
    total = e.sum(axis=0)
    lse = np.where(total == 0, NEG_INF, top + np.log(np.where(total == 0, 1.0, total)))
    return e / np.where(total == 0, 1.0, total), lse


def merge(outs: np.ndarray, lses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(o, lse) over the union of disjoint key ranges, from each range's own; parts are on axis 0.

    outs (parts, ..., rows, heads, head_dim_v), lses (parts, ..., heads, rows). A part with lse = -inf adds
    nothing, whatever its out contains.
    """
    weights, lse = merge_weights(lses)
    shares = np.swapaxes(weights, -1, -2)[..., None]
    return weighted(shares, np.array([np.asarray(o).astype(np.float64) for o in outs])).sum(axis=0), lse


@np.errstate(all="ignore")
def weighted(shares: np.ndarray, values: np.ndarray) -> np.ndarray:
    return np.where(shares != 0, shares * values, 0.0)


def merge_backward(dout: np.ndarray, dlse: np.ndarray, outs: np.ndarray, lses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(douts, dlses): gradients of `merge`, parts stacked on axis 0."""
    weights, _ = merge_weights(lses)
    o, _ = merge(outs, lses)
    shares = np.swapaxes(weights, -1, -2)
    from_out = weighted(shares, (dout * (np.asarray(outs).astype(np.float64) - o)).sum(axis=-1))
    return weighted(shares[..., None], dout), np.swapaxes(from_out, -1, -2) + weighted(weights, dlse)
