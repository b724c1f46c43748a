"""Decoding problems: a few query rows against a cache. Cache rows that no sequence sees are NaN.

case = decode_cases.quick()[0]
x = case.inputs()
out, lse = libflash.decode(x.q, x.k_cache, x.v_cache, **x.options, return_lse=True)    appends in place
case.check(o=out, lse=lse, k_cache=x.k_cache, v_cache=x.v_cache)
"""

from __future__ import annotations

import copy
import dataclasses
import zlib
from functools import cache, lru_cache
from typing import Protocol

import numpy as np

from . import tolerance
from .fills import GENERIC, random_fill
from .reference import ScoreNumbers
from .reference_decode import Gathered, cache_slots, gather
from .rounding import DTYPES, ROUNDING, stored, widened


@dataclasses.dataclass
class DecodeInputs:
    q: np.ndarray
    k_cache: np.ndarray
    v_cache: np.ndarray
    options: dict


@dataclasses.dataclass(frozen=True)
class DecodeCase(ScoreNumbers):
    name: str
    dtype: str = "bf16"
    lengths: tuple[int, ...] | None = (100,)  # keys in the cache of each sequence; None: the whole capacity
    batch: int = 1  # where lengths is None
    seqlen_q: int | tuple[int, ...] = 1  # a tuple: packed, one length per sequence
    capacity: int = 130
    heads_q: int = 4
    heads_k: int = 2
    head_dim: int = 64
    head_dim_v: int | None = None
    fill: str = "randn"
    page_size: int | None = None
    shared_pages: bool = False  # the first page of every sequence is the same one
    absent_page: bool = False  # the second block table entry of the first sequence is out of range: refused on the CPU
    batch_idx: bool = False  # sequences use a permutation of a larger cache's rows
    leftpad: tuple[int, ...] | None = None
    append: int | tuple[int, ...] = 0  # a tuple: packed, one length per sequence
    slack_rows: int = 0  # packed: rows of q after the last sequence
    positions: bool = False  # give q_positions: those of the tree, or each 0 or 1 above the one before
    tree: bool = False  # a random tree for each sequence; if packed, the first sequence has none and is causal
    rotary: int = 0  # rotated channels
    rotary_interleaved: bool = True
    causal: bool = True
    window_size: tuple[int, int] = (-1, -1)
    alibi: str | None = None
    sink: bool = False

    def __str__(self) -> str:
        return self.name

    @property
    def sequences(self) -> int:
        return self.batch if self.lengths is None else len(self.lengths)

    @property
    def appended(self) -> tuple[int, ...]:
        """New keys of each sequence."""
        return self.append if isinstance(self.append, tuple) else (self.append,) * self.sequences

    def _rows(self, lengths: int | tuple[int, ...], slack: int = 0) -> tuple[int, ...]:
        return (sum(lengths) + slack,) if isinstance(lengths, tuple) else (self.sequences, lengths)

    def inputs(self) -> DecodeInputs:
        """New arrays with the same values in every call."""
        return copy.deepcopy(drawn(self))

    def draw(self) -> DecodeInputs:
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        dim_v = self.head_dim if self.head_dim_v is None else self.head_dim_v
        options = self._options(rng, dim_v)
        if self.page_size is None:
            shape = (self.sequences + 2 * self.batch_idx, self.capacity)
        else:
            shape = (self.sequences * self._columns() + 2, self.page_size)
        q_shape = (*self._rows(self.seqlen_q, self.slack_rows), self.heads_q, self.head_dim)
        shapes = (q_shape, (*shape, self.heads_k, self.head_dim), (*shape, self.heads_k, dim_v))
        q, k_cache, v_cache = (stored(x, self.dtype) for x in random_fill(self.fill, rng, *shapes))
        if self.slack_rows:
            q[-self.slack_rows :] = np.nan
        unseen = ~self._filled(k_cache.shape, options)
        k_cache[unseen] = np.nan
        v_cache[unseen] = np.nan
        return DecodeInputs(q, k_cache, v_cache, options)

    def _columns(self) -> int:
        return -(-self.capacity // self.page_size)

    def _options(self, rng: np.random.Generator, dim_v: int) -> dict:
        options = self.given("causal", "window_size")
        b, wide = self.sequences, DTYPES["fp64" if self.dtype == "fp64" else "fp32"]
        if self.lengths is not None:
            options["cache_seqlens"] = np.array(self.lengths, dtype=np.int32)
        if self.page_size is not None:
            options["block_table"] = self._block_table(rng)
        if self.batch_idx:
            options["cache_batch_idx"] = rng.permutation(b + 2)[:b].astype(np.int32)
        if self.leftpad is not None:
            options["cache_leftpad"] = np.array(self.leftpad, dtype=np.int32)
        if self.append:
            shapes = [(*self._rows(self.append), self.heads_k, d) for d in (self.head_dim, dim_v)]
            options["k"], options["v"] = (stored(rng.standard_normal(shape), self.dtype) for shape in shapes)
        if isinstance(self.seqlen_q, tuple):
            options["cu_seqlens_q"] = np.cumsum((0, *self.seqlen_q)).astype(np.int32)
        if isinstance(self.append, tuple) and self.append != self.seqlen_q:
            options["cu_seqlens_new"] = np.cumsum((0, *self.append)).astype(np.int32)
        if self.positions or self.tree:
            options |= self._tree_options(rng)
        if self.rotary:
            angles = np.arange(self.capacity + 1)[:, None] * 0.1 ** np.linspace(0, 4, self.rotary // 2)
            options["rotary_cos"], options["rotary_sin"] = (stored(f(angles), self.dtype) for f in (np.cos, np.sin))
            options["rotary_interleaved"] = self.rotary_interleaved
        if self.alibi is not None:
            slopes = 2.0 ** -(1 + 7 * rng.random([{"b": b, "h": self.heads_q}[axis] for axis in self.alibi]))
            options["alibi_slopes"] = widened(slopes, "bf16").astype(wide)
        if self.sink:
            options["learnable_sink"] = widened(rng.standard_normal(self.heads_q), "bf16").astype(wide)
        return options

    def _tree_options(self, rng: np.random.Generator) -> dict:
        """A node of a tree sees itself and its ancestors. Its position is the number of earlier keys plus its depth."""
        packed, positions, bits = isinstance(self.seqlen_q, tuple), [], []
        lengths = self.seqlen_q if packed else (self.seqlen_q,) * self.sequences
        words = -(-max(lengths) // 32)
        for b, rows in enumerate(lengths):
            before = max((self.lengths or (self.capacity,) * self.batch)[b] + self.appended[b] - rows, 0)
            sees, depth = np.eye(rows, 32 * words, dtype=bool), np.zeros(rows, np.int64)
            for node in range(1, rows):
                parent = int(rng.integers(node))
                sees[node] |= sees[parent]
                depth[node] = depth[parent] + 1
            in_tree = self.tree and not (packed and b == 0)
            positions.append(before + (depth if in_tree else np.cumsum(rng.integers(0, 2, rows))))
            if in_tree:
                bits.append(sees)
        positions = np.concatenate([*positions, np.zeros(self.slack_rows, np.int64)]).astype(np.int32)
        options = {"q_positions": positions if packed else positions.reshape(self.sequences, self.seqlen_q)}
        if not self.positions:
            del options["q_positions"]
        if self.tree:
            weights = 1 << np.arange(32, dtype=np.uint64)
            rows = np.concatenate(bits).reshape(-1, words, 32)
            options["tree_mask"] = (rows * weights).sum(axis=-1).astype(np.uint32).view(np.int32)
            if packed:
                options["cu_seqlens_tree"] = np.cumsum((0, 0, *lengths[1:])).astype(np.int32)
        return options

    def _block_table(self, rng: np.random.Generator) -> np.ndarray:
        """Pages in any order; block table entries before the first key and after the last are invalid."""
        columns = self._columns()
        table = rng.permutation(self.sequences * columns + 2)[: self.sequences * columns]
        table = table.reshape(self.sequences, columns).astype(np.int32)
        if self.shared_pages:
            table[:, 0] = table[0, 0]
        if self.absent_page:
            table[0, 1] = -1
        for b, length in enumerate(self.lengths or ()):
            table[b, -(-(length + self.appended[b]) // self.page_size) :] = 2**31 - 1
            if self.leftpad is not None:
                some = self.leftpad[b] < length + self.appended[b]
                table[b, : self.leftpad[b] // self.page_size if some else None] = -(2**31)
        return table

    def _filled(self, shape: tuple, options: dict) -> np.ndarray:
        """Bool over the cache's rows: true where some sequence has a key before the call."""
        filled = np.zeros(shape[:2], dtype=bool)
        lengths = [self.capacity] * self.batch if self.lengths is None else self.lengths
        capacity = shape[1] * (1 if self.page_size is None else self._columns())
        for b, length in enumerate(lengths):
            table, rows = options.get("block_table"), options.get("cache_batch_idx")
            page, row, present = cache_slots(b, capacity, shape, table, rows)
            here = np.flatnonzero(present[:length])
            here = here[here >= (0 if self.leftpad is None else self.leftpad[b])]
            filled[page[here], row[here]] = True
        return filled

    def gathered(self) -> Gathered:
        """Read-only arrays, the same ones in every call."""
        return _gathered(self)

    def expected(self, **errors: float) -> tolerance.Expected:
        return _expected(self, tuple(sorted(errors.items())))

    def check(
        self, *, errors: dict[str, float] | None = None, k_cache=None, v_cache=None, **result: object
    ) -> dict[str, tolerance.Report]:
        """Check o and lse, and the caches after the call: appended rows are right, all other bits unchanged."""
        self._check_cache("k_cache", k_cache)
        self._check_cache("v_cache", v_cache)
        return tolerance.check(result, self.expected(**(errors or {})), label=str(self))

    def _check_cache(self, name: str, got: np.ndarray | None) -> None:
        if got is None:
            return
        before, after = getattr(self.inputs(), name), getattr(self.gathered(), name)
        got, bits = np.asarray(got), np.dtype(f"u{before.itemsize}")
        written = (before.view(bits) != after.view(bits)).any(axis=(2, 3))
        stray = (got.view(bits) != before.view(bits)).any(axis=(2, 3)) & ~written
        assert not stray.any(), f"{self}: {name} changed at {np.argwhere(stray)[0]}, where nothing was appended"
        exact, x = (a[written].astype(np.float64) for a in (after, got))
        rotated = bool(self.rotary) and name == "k_cache"  # float32 products, rounded again; other rows are copies
        limit = rotated * (2 * ROUNDING[got.dtype].u * np.abs(exact) + 2.0**-21 * np.abs(exact).max(initial=0))
        assert (np.abs(x - exact) <= limit).all(), f"{self}: appended rows of {name} are wrong"


class Drawn(Protocol):
    """A case whose draw() gives the same numbers in every call."""

    def draw(self) -> DecodeInputs: ...


# Every kernel, split and check asks for the same numbers.
@lru_cache(maxsize=64)
def drawn(case: Drawn) -> DecodeInputs:
    return case.draw()


@lru_cache(maxsize=32)
def _gathered(case: DecodeCase) -> Gathered:
    x = case.inputs()
    gathered = gather(x.q, x.k_cache, x.v_cache, **x.options)
    make_read_only(gathered)
    return gathered


def make_read_only(x: Gathered) -> None:
    for array in (*vars(x).values(), *x.options.values()):
        if isinstance(array, np.ndarray):
            array.flags.writeable = False


@lru_cache(maxsize=32)
def _expected(case: DecodeCase, errors: tuple) -> tolerance.Expected:
    x = case.gathered()
    ulps = 2.0 if case.rotary else 0.0  # q after rotary, and an appended key one unit from the exact one
    generic = case.fill in GENERIC and not case.rotary
    return tolerance.expect(x.q, x.k, x.v, generic=generic, score_ulps=ulps, **dict(errors), **x.options)


@cache
def quick() -> list[DecodeCase]:
    """Every option alone and in the combinations that servers use."""
    several = {"lengths": (0, 1, 63, 64, 65, 130), "capacity": 140}
    options = {
        "plain": {},
        "full": {"lengths": None, "batch": 3},
        "several": several,
        "long": {"lengths": (1500, 3, 900), "capacity": 1600},
        "mqa": {"heads_q": 8, "heads_k": 1, **several},
        "mha": {"heads_q": 3, "heads_k": 3, **several},
        "d128": {"head_dim": 128, **several},
        "dims": {"head_dim": 40, "head_dim_v": 72, **several},
        "rows": {"seqlen_q": 5, **several},
        "rows-free": {"seqlen_q": 5, "causal": False, **several},
        "window": {"seqlen_q": 3, "window_size": (20, 0), **several},
        "scale": {"softmax_scale": 0.3, **several},
        "softcap": {"softcap": 20.0, **several},
        "alibi": {"alibi": "bh", "seqlen_q": 2, **several},
        "sink": {"sink": True, **several},
        "batch-idx": {"batch_idx": True, **several},
        "leftpad": {"leftpad": (0, 0, 5, 64, 12, 100), **several},
        "append": {"append": 1, **several},
        "append-4": {"append": 4, "seqlen_q": 4, **several},
        "append-more": {"append": 7, "seqlen_q": 2, "batch_idx": True, **several},
        "rotary": {"append": 1, "rotary": 64, **several},
        "rotary-halves": {"append": 3, "seqlen_q": 3, "rotary": 32, "rotary_interleaved": False, **several},
        "rotary-free": {"append": 2, "seqlen_q": 2, "rotary": 64, "causal": False, **several},
        "paged-64": {"page_size": 64, **several},
        "paged-16": {"page_size": 16, "seqlen_q": 2, **several},
        "paged-1": {"page_size": 1, **several},
        "paged-256": {"page_size": 256, **several},
        "paged-7": {"page_size": 7, **several},
        "paged-shared": {"page_size": 16, "shared_pages": True, "lengths": (40, 100, 17)},
        "paged-append": {"page_size": 16, "append": 3, "seqlen_q": 3, "rotary": 64, **several},
        "paged-absent": {"page_size": 32, "absent_page": True, "lengths": (100, 50)},
        "paged-all": {"page_size": 16, "window_size": (50, 0), "softcap": 30.0, "sink": True, "alibi": "h", **several},
        "paged-leftpad": {"page_size": 16, "leftpad": (0, 1, 5, 64, 16, 100), **several},
        "paged-leftpad-rows": {"page_size": 7, "leftpad": (0, 0, 63, 20, 14, 129), "seqlen_q": 5, **several},
        "paged-leftpad-append": {"page_size": 16, "leftpad": (0, 1, 5, 64, 16, 100), "append": 3, "rotary": 64, **several},
        "paged-leftpad-step": {"page_size": 64, "leftpad": (0, 1, 63, 64, 3, 130), "append": 1, "rotary": 64, **several},
    }
    packed = {**several, "seqlen_q": (1, 40, 0, 3, 64, 9), "capacity": 200, "slack_rows": 2}
    options |= {
        "packed": packed,
        "packed-steps": {**packed, "seqlen_q": (1, 1, 0, 1, 1, 1), "heads_q": 8},
        "packed-free": {**packed, "causal": False, "window_size": (30, 5)},
        "packed-append": {**packed, "append": packed["seqlen_q"], "batch_idx": True},
        "packed-new": {**packed, "append": (3, 0, 2, 0, 70, 1), "head_dim_v": 40},
        "packed-new-alone": {**several, "capacity": 200, "seqlen_q": 2, "append": (3, 0, 2, 0, 70, 1)},
        "packed-rotary": {**packed, "append": packed["seqlen_q"], "rotary": 32, "rotary_interleaved": False},
        "packed-paged": {**packed, "page_size": 16, "append": packed["seqlen_q"], "rotary": 64},
        "packed-paged-all": {
            **packed, "page_size": 7, "window_size": (50, 0), "softcap": 30.0, "sink": True, "alibi": "bh",
            "append": (1, 40, 3, 0, 64, 0),
        },
        "positions": {**several, "seqlen_q": 5, "positions": True, "alibi": "h", "window_size": (20, 0)},
        "positions-rotary": {**packed, "append": (1, 20, 3, 0, 70, 0), "positions": True, "rotary": 32},
        "tree": {**several, "seqlen_q": 6, "tree": True},
        "tree-steps": {**several, "seqlen_q": 2, "tree": True, "positions": True, "alibi": "bh", "causal": False},
        "tree-append": {**several, "capacity": 140, "seqlen_q": 7, "append": 7, "tree": True, "positions": True, "rotary": 64},
        "tree-packed": {**packed, "append": packed["seqlen_q"], "tree": True, "page_size": 16},
        "tree-packed-all": {
            **packed, "append": packed["seqlen_q"], "tree": True, "positions": True, "rotary": 32, "window_size": (12, 4),
            "alibi": "h", "softcap": 30.0, "sink": True, "page_size": 7,
        },
    }  # fmt: skip
    dtypes = ("bf16", "fp16", "fp32")
    return [
        DecodeCase(f"decode-{name}-{dtype}", dtype, **given)
        for index, (name, given) in enumerate(options.items())
        for dtype in (dtypes[index % 3], dtypes[(index + 1) % 3])
    ]


def by_name(name: str) -> DecodeCase:
    """The case of that name, to repeat it."""
    return next(case for case in quick() if case.name == name)
