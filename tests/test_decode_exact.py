"""Decode on the CPU gives answers that are known without the oracle, in every form of the call: contiguous caches and pages, rows
of equal number and packed ones, trees, caches of q's type and of 8-bit codes.
"""

from __future__ import annotations

import dataclasses
import itertools
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from harness import BFLOAT16
from libflash.conformance.reference_cache import CODES
from rounding import ROUNDING
from sequences import cu_seqlens
from test_decode import KERNELS
from test_decode_trees import words

import libflash

HEADS_Q, HEADS_K, DIM, CAPACITY, PAGE = 4, 2, 256, 210, 7
LENGTHS = (200, 0, 37, 64)  # the second sequence has a row and no key
EQUAL_ROWS, PACKED_ROWS = (9, 9, 9, 9), (5, 1, 9, 40)
SCALE = np.float32(2)  # of codes: a power of two, so that every value is exact
SPLITS: list[dict[str, Any]] = [{}, {"num_splits": 3}, {"split_size": 128}, {"invariant": True}]
TYPES = [np.dtype(np.float32), np.dtype(np.float16), BFLOAT16]  # in turn: 32 forms have each option with each type
FORMS = list(itertools.product(("contiguous", "pages"), ("equal", "packed"), ("causal", "tree"), ("values", *CODES)))

every_kernel = pytest.mark.parametrize("kernel", KERNELS)
every_form = pytest.mark.parametrize(
    ("form", "dtype"), [pytest.param(form, TYPES[i % 3], id="-".join((*form, str(TYPES[i % 3])))) for i, form in enumerate(FORMS)]
)


@dataclasses.dataclass
class Form:
    """How the rows and keys of sequences are passed to a call, and which keys each row sees."""

    pages: bool
    rows: tuple[int, ...]  # of each sequence
    packed: bool
    code: str | None
    visible: list[np.ndarray]  # of each sequence: (its rows, its keys)
    tree_mask: np.ndarray | None

    @classmethod
    def of(cls, cache: str, rows: str, rule: str, stored: str) -> Form:
        rng = np.random.default_rng(3)
        packed, tree, visible, bits = rows == "packed", rule == "tree", [], []
        lengths = PACKED_ROWS if packed else EQUAL_ROWS
        for lq, lk in zip(lengths, LENGTHS, strict=True):
            rule_of_rows = np.tril(np.ones((lq, lq), bool))
            if tree:
                rule_of_rows = rule_of_rows & (rng.random((lq, lq)) < 0.5)
                bits.append(np.pad(rule_of_rows, ((0, 0), (0, max(lengths) - lq))))
            earlier = np.ones((lq, max(lk - lq, 0)), bool)
            visible.append(np.concatenate([earlier, rule_of_rows[:, lq - min(lq, lk) :]], axis=1))
        mask = np.concatenate([words(x) for x in bits]) if tree else None
        return cls(cache == "pages", lengths, packed, None if stored == "values" else stored, visible, mask)

    def problem(self, q: list[np.ndarray], k: list[np.ndarray], v: list[np.ndarray], dtype: np.dtype) -> Problem:
        """From q (rows, heads, DIM), k and v (keys, heads, DIM) of each sequence."""
        caches, where = zip(*(self._cache(x, dtype) for x in (k, v)), strict=True)
        options: dict[str, Any] = {**where[0], "cache_seqlens": np.array(LENGTHS, np.int32)}
        if self.code:
            options |= {"k_scale": np.full(1, SCALE), "v_scale": np.full(1, SCALE)}
        if self.tree_mask is not None:
            options["tree_mask"] = self.tree_mask
        if self.packed:
            options["cu_seqlens_q"] = cu_seqlens(self.rows)
        arrays = [(np.concatenate(q) if self.packed else np.stack(q)).astype(dtype), *caches]
        for x in arrays:
            x.flags.writeable = False
        return Problem(self, v, arrays, options)

    def _cache(self, rows: list[np.ndarray], dtype: np.dtype) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """What no sequence has is NaN; in int8, a code that would show in every sum."""
        cache = np.full((len(rows), CAPACITY, HEADS_K, DIM), np.nan if self.code != "int8" else 113 * SCALE)
        for b, x in enumerate(rows):
            cache[b, : len(x)] = x
        stored = (cache / SCALE).astype(CODES[self.code]) if self.code else cache.astype(dtype)
        if not self.pages:
            return stored, {}
        table = np.random.default_rng(4).permutation(len(rows) * CAPACITY // PAGE).astype(np.int32)
        pages = np.empty((len(table), PAGE, HEADS_K, DIM), stored.dtype)
        pages[table] = stored.reshape(pages.shape)
        return pages, {"block_table": table.reshape(len(rows), -1)}


@dataclasses.dataclass
class Problem:
    """What all kernels and splits have in common: making it takes longer than a call."""

    form: Form
    v: list[np.ndarray]  # of each sequence
    arrays: list[np.ndarray]  # q and the caches, read-only
    options: dict[str, Any]

    def call(self, **options: Any) -> list[tuple]:
        """(out, lse) of each sequence in float64."""
        results = libflash.decode(*self.arrays, return_lse=True, **self.options, **options)
        out, lse = (x.astype(np.float64) for x in results)
        if not self.form.packed:
            return list(zip(out, lse, strict=True))
        ends = cu_seqlens(self.form.rows)
        return [(out[start:end], lse[:, start:end]) for start, end in itertools.pairwise(ends)]


def of_q_heads(x: np.ndarray) -> np.ndarray:
    """(.., heads_k, DIM) for the query heads that share each key head."""
    return np.repeat(x, HEADS_Q // HEADS_K, axis=-2)


def means(visible: np.ndarray, values: np.ndarray) -> np.ndarray:
    """(rows, heads_q, DIM): the mean of the values that each row sees, 0 if there are none."""
    sums = np.einsum("ij,jhd->ihd", visible.astype(np.float64), values)
    return of_q_heads(sums / np.maximum(visible.sum(axis=1), 1)[:, None, None])


def check_counts(visible: np.ndarray, lse: np.ndarray) -> None:
    """exp(lse) is the number of visible keys."""
    with np.errstate(divide="ignore"):
        wanted = np.log(visible.sum(axis=1))
    np.testing.assert_allclose(lse, np.broadcast_to(wanted, lse.shape), rtol=2e-6, atol=1e-6)


@every_kernel
@every_form
def test_one_hot_values_count_the_keys(form: tuple[str, ...], dtype: np.dtype, kernel: str) -> None:
    """With keys of zeros, channel c of out is the part of the visible keys whose index is c modulo a prime number."""
    x = one_hot_values(form, dtype)
    for split in SPLITS:
        for (out, lse), visible, values in zip(x.call(kernel=kernel, **split), x.form.visible, x.v, strict=True):
            counts = out / 4 * visible.sum(axis=1)[:, None, None]
            wanted = of_q_heads(np.einsum("ij,jhd->ihd", visible, values / 4))
            np.testing.assert_array_equal(np.rint(counts), wanted)
            np.testing.assert_allclose(counts, wanted, rtol=max(4 * ROUNDING[dtype].u, 2e-6))
            check_counts(visible, lse)


@lru_cache(maxsize=2)
def one_hot_values(form: tuple[str, ...], dtype: np.dtype) -> Problem:
    x, rng = Form.of(*form), np.random.default_rng(1)
    q = [rng.standard_normal((n, HEADS_Q, DIM)) for n in x.rows]
    k = [np.zeros((n, HEADS_K, DIM)) for n in LENGTHS]
    v = [np.zeros((n, HEADS_K, DIM)) for n in LENGTHS]
    for values, (head, prime) in itertools.product(v, enumerate((13, 251))):
        keys = np.arange(len(values))
        values[keys, head, keys % prime] = 4  # code 2
    return x.problem(q, k, v, dtype)


@every_kernel
@every_form
def test_equal_keys_give_the_mean_of_the_values(form: tuple[str, ...], dtype: np.dtype, kernel: str) -> None:
    """Equal scores, not zero: out is the mean of the visible values, which are even integers, and lse is the score plus the
    logarithm of their number.
    """
    x = equal_keys(form, dtype)
    bound = 8 * max(2 * ROUNDING[dtype].u, 2.0**-20)
    for split in SPLITS:
        results = x.call(kernel=kernel, softmax_scale=2.0**-9, **split)  # a score of 1
        for (out, lse), visible, values in zip(results, x.form.visible, x.v, strict=True):
            np.testing.assert_allclose(out, means(visible, values), rtol=0, atol=bound)
            check_counts(visible, lse - 1)


@lru_cache(maxsize=2)
def equal_keys(form: tuple[str, ...], dtype: np.dtype) -> Problem:
    x, rng = Form.of(*form), np.random.default_rng(2)
    q, k = [np.ones((n, HEADS_Q, DIM)) for n in x.rows], [np.full((n, HEADS_K, DIM), 2.0) for n in LENGTHS]
    v = [2.0 * rng.integers(-4, 5, (n, HEADS_K, DIM)) for n in LENGTHS]
    return x.problem(q, k, v, dtype)


@every_kernel
@every_form
def test_orthogonal_keys_pick_a_value(form: tuple[str, ...], dtype: np.dtype, kernel: str) -> None:
    """Every key has a channel of its own. A row with a large query in the channel of a key that it sees gets the value of that
    key, bit for bit. If it does not see the key, it gets the mean of those that it sees.
    """
    x, chosen = orthogonal_keys(form, dtype)
    found = hidden = 0
    bound = 8 * max(2 * ROUNDING[dtype].u, 2.0**-20)
    for split in SPLITS:
        results = x.call(kernel=kernel, softmax_scale=1.0, **split)
        for (out, lse), visible, values, keys in zip(results, x.form.visible, x.v, chosen, strict=True):
            if not len(values):
                assert not out.any()
                assert (lse == -np.inf).all()
                continue
            seen = visible[np.arange(len(keys))[:, None], keys]
            picked = of_q_heads(values)[keys, np.arange(HEADS_Q)]
            np.testing.assert_array_equal(out[seen], picked[seen])
            assert (lse.T[seen] == 256).all()
            np.testing.assert_allclose(out[~seen], means(visible, values)[~seen], rtol=0, atol=bound)
            found, hidden = found + seen.sum(), hidden + (~seen).sum()
    assert found
    assert hidden


@lru_cache(maxsize=2)
def orthogonal_keys(form: tuple[str, ...], dtype: np.dtype) -> tuple[Problem, list[np.ndarray]]:
    """And the number of the key that each row and head of a sequence picks."""
    x, rng = Form.of(*form), np.random.default_rng(5)
    channels = [np.stack([rng.permutation(DIM)[:n] for _ in range(HEADS_K)], axis=1) for n in LENGTHS]
    k = [16.0 * np.eye(DIM)[at] for at in channels]
    v = [2.0 * rng.integers(-4, 5, (n, HEADS_K, DIM)) for n in LENGTHS]
    q, chosen = [], []
    for rows, own in zip(x.rows, channels, strict=True):
        keys = rng.integers(max(len(own) - 2 * rows, 0), max(len(own), 1), (rows, HEADS_Q))  # some are hidden
        at = of_q_heads(own[:, :, None])[keys, np.arange(HEADS_Q), 0] if len(own) else keys
        q.append(16.0 * np.eye(DIM)[at])
        chosen.append(keys)
    return x.problem(q, k, v, dtype), chosen
