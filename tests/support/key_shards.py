"""A decode problem divided into shards of its keys, and the whole cache from the shards."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from decode_cases import DecodeInputs
from reference_decode import cache_slots, own_rows

import libflash

UNUSED = np.iinfo(np.int32).max  # a table entry that must not be read


@dataclasses.dataclass
class KeyShards:
    """The caches and options of each shard of a problem: key t is on shard t // keys % count."""

    x: DecodeInputs
    count: int
    keys: int

    def __post_init__(self) -> None:
        options = self.x.options
        self.table = options.get("block_table")
        columns = 1 if self.table is None else self.table.shape[1]
        self.capacity = self.x.k_cache.shape[1] * columns
        rows = own_rows(self.x.q, options.get("cu_seqlens_q"))
        self.batch = len(rows)
        full = np.full(self.batch, 0 if "k" in options else self.capacity, np.int32)
        self.lengths = options.get("cache_seqlens", full)
        appended = np.zeros(self.batch, np.int64)
        if "k" in options:
            cu = options.get("cu_seqlens_new", options.get("cu_seqlens_q"))
            appended[:] = [at[-1].stop - at[-1].start for at in own_rows(options["k"], cu)]
        self.all_keys = self.lengths + appended
        self.caches = {name: [self._divided(name, i) for i in range(self.count)] for name in ("k_cache", "v_cache")}

    def rows_of(self, index: int) -> np.ndarray:
        """The numbers of the keys of a shard, in the order of its rows."""
        t = np.arange(self.capacity)
        return t[t // self.keys % self.count == index]

    def _columns(self, index: int) -> int:
        return max(-(-len(self.rows_of(index)) // self.x.k_cache.shape[1]), 1)

    def _table(self, index: int) -> np.ndarray:
        """Each sequence has its own pages, in descending order. Entries after the last key must not be read."""
        columns, page = self._columns(index), self.x.k_cache.shape[1]
        made = np.arange(self.batch * columns, dtype=np.int32)[::-1].reshape(self.batch, columns).copy()
        for b in range(self.batch):
            here = (self.rows_of(index) < self.all_keys[b]).sum()
            made[b, -(-here // page) :] = UNUSED
        return made

    def _places(self, index: int, b: int) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
        """Places of a sequence's keys in the whole cache and in the shard's."""
        idx, here = self.x.options.get("cache_batch_idx"), self.rows_of(index)
        here = here[here < self.all_keys[b]]
        place, row, present = cache_slots(b, self.capacity, self.x.k_cache.shape, self.table, idx)
        local = np.flatnonzero(present[here])  # a page of keys before cache_leftpad may be absent
        here = here[local]
        if self.table is None:
            return (place[here], row[here]), (place[here], local)
        page = self.x.k_cache.shape[1]
        return (place[here], row[here]), (self._table(index)[b, local // page], local % page)

    def _divided(self, name: str, index: int) -> np.ndarray:
        whole = getattr(self.x, name)
        if self.table is None:
            shape = (whole.shape[0], len(self.rows_of(index)), *whole.shape[2:])
        else:
            shape = (self.batch * self._columns(index), *whole.shape[1:])
        made = np.full(shape, np.nan, whole.dtype)
        for b in range(self.batch):
            of_whole, of_shard = self._places(index, b)
            made[of_shard] = whole[of_whole]
        return made

    def options(self, index: int) -> dict[str, Any]:
        made = {**self.x.options, "cache_seqlens": self.lengths, "shard": (self.count, index, self.keys)}
        if self.table is not None:
            made["block_table"] = self._table(index)
        return made

    def decode(self, **options: Any) -> list[tuple[np.ndarray, np.ndarray]]:
        """out and lse of each shard."""
        made = []
        for i in range(self.count):
            caches = (self.caches[name][i] for name in ("k_cache", "v_cache"))
            made.append(libflash.decode(self.x.q, *caches, return_lse=True, **self.options(i), **options))
        return made

    def joined(self, name: str) -> np.ndarray:
        """The whole cache, with what the shards hold."""
        whole = getattr(self.x, name).copy()
        for index in range(self.count):
            for b in range(self.batch):
                of_whole, of_shard = self._places(index, b)
                whole[of_whole] = self.caches[name][index][of_shard]
        return whole
