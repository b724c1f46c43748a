"""Decode on the CPU: bytes of cache read in a second, for packed sequences of unequal lengths, pages and 8-bit codes beside a
plain cache.

One query row for each of 8 sequences. The plain call has equal lengths and a contiguous cache of q's type. The others read as
many keys, or as many of another type. A byte of codes counts as a byte, and a scale as its four. All calls are made in turn in
one process; a time is the best of processor time, which other work on the machine disturbs least.

    python tests/benchmark/cpu_decode.py                 a minute; one thread
    python tests/benchmark/cpu_decode.py --quick         small problems: a look, not a figure to quote

The ratio is the rate of bytes divided by that of the plain call of the same type of q: above 1, a byte costs less. "Per key" is
the same for keys: a cache of 8 bits has half the bytes of 16 bits.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from cpu_attention import cpu_model

import libflash

HEADS_Q, HEADS_K, DIM, PAGE = 32, 8, 128, 16
BATCH = 8
LARGE, SMALL = 4096, 64  # keys of each sequence, in the mean
TYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
CODES = {
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "int8": np.dtype(np.int8),
}
SPREAD = np.array([0.03, 0.06, 0.12, 0.25, 0.5, 1, 2, 4.04])  # of the lengths, about log-uniform; the mean is 1
TOLERANCE = 0.02  # between a cache of codes and one of their values


@dataclasses.dataclass(frozen=True)
class Contender:
    name: str
    call: Callable[[], np.ndarray]
    bytes: int  # of cache and scales that a call reads
    keys: int


def contenders(dtype: str, keys: int) -> list[Contender]:
    """The plain call first."""
    rng, kind = np.random.default_rng(0), TYPES[dtype]
    unequal = (SPREAD * keys).astype(np.int32)
    unequal[-1] += BATCH * keys - unequal.sum()
    q = rng.standard_normal((BATCH, 1, HEADS_Q, DIM), np.float32).astype(kind)
    # codes first, so that all caches have values that every type has
    few = {name: rng.integers(-7, 8, (BATCH * keys, HEADS_K, DIM), np.int8) for name in ("k", "v")}
    plain = {name: x.astype(kind) for name, x in few.items()}
    scales = {"softmax_scale": 0.01}

    def entries(caches: dict[str, np.ndarray]) -> list[np.ndarray]:
        return [x.reshape(BATCH, keys, HEADS_K, DIM) for x in caches.values()]

    def pages(caches: dict[str, np.ndarray], lengths: np.ndarray) -> tuple[list[np.ndarray], dict[str, Any]]:
        """Sequences one after the other in pages; the last page of one is not full."""
        counts = -(-lengths // PAGE)
        table = np.full((BATCH, counts.max()), -1, np.int32)
        starts = np.concatenate([[0], np.cumsum(counts)])
        own = [np.zeros((starts[-1] * PAGE, HEADS_K, DIM), x.dtype) for x in caches.values()]
        first = 0
        for b, length in enumerate(lengths):
            table[b, : counts[b]] = np.arange(starts[b], starts[b + 1])
            for to, x in zip(own, caches.values(), strict=True):
                to[starts[b] * PAGE : starts[b] * PAGE + length] = x[first : first + length]
            first += length
        return [x.reshape(-1, PAGE, HEADS_K, DIM) for x in own], {"block_table": table, "cache_seqlens": lengths}

    def contender(name: str, rows: np.ndarray, caches: list[np.ndarray], given: int = 0, **options: Any) -> Contender:
        size = 2 * BATCH * keys * HEADS_K * DIM * caches[0].itemsize + given
        return Contender(name, lambda: libflash.decode(rows, *caches, **scales, **options), size, BATCH * keys)

    equal = np.full(BATCH, keys, np.int32)
    starts = np.arange(BATCH + 1, dtype=np.int32)
    in_pages, table = pages(plain, equal)
    ragged, ragged_table = pages(plain, unequal)
    found = [
        contender("plain", q, entries(plain)),
        contender("packed", q[:, 0], entries(plain), cu_seqlens_q=starts, cache_seqlens=equal),
        contender("pages", q, in_pages, **table),
        contender("ragged pages", q[:, 0], ragged, cu_seqlens_q=starts, **ragged_table),
    ]
    for name, code in CODES.items():
        caches = entries({which: x.astype(code) for which, x in few.items()})
        heads = np.ones(HEADS_K, np.float32)
        rows = np.ones((BATCH, keys, HEADS_K), np.float32)
        for how, scale in (("heads", heads), ("rows", rows)):
            size = 2 * scale.nbytes if how == "rows" else 0
            found.append(contender(f"{name}, scales of {how}", q, caches, size, k_scale=scale, v_scale=scale))
    codes, codes_table = pages({which: x.astype(CODES["e4m3"]) for which, x in few.items()}, unequal)
    one = np.ones(HEADS_K, np.float32)
    found.append(contender("e4m3, ragged pages", q[:, 0], codes, cu_seqlens_q=starts, k_scale=one, v_scale=one, **codes_table))
    return found


def compare(calls: list[Contender]) -> None:
    """Call each once, which also warms it up. Those over the same keys of the same sequences must agree; wrong results are not
    timed."""
    results = {one.name: one.call().astype(np.float64).reshape(BATCH, HEADS_Q, DIM) for one in calls}
    for name, result in results.items():
        like = "ragged pages" if "ragged" in name else "plain"
        difference = np.abs(result - results[like]).max()
        if not difference <= TOLERANCE * max(1.0, np.abs(results[like]).max()):
            sys.exit(f"{name}: the result differs by {difference:.3g} from that of {like}; nothing is timed")


def times(calls: list[Contender], rounds: int) -> dict[str, float]:
    """The best processor time of each, in turn."""
    best = dict.fromkeys((one.name for one in calls), float("inf"))
    for _ in range(rounds):
        for one in calls:
            start = time.process_time()
            one.call()
            best[one.name] = min(best[one.name], time.process_time() - start)
    return best


def figures(calls: list[Contender], best: dict[str, float]) -> list[dict[str, Any]]:
    plain = calls[0]
    rate = plain.bytes / best[plain.name]
    return [
        {
            "call": one.name,
            "ms": 1e3 * best[one.name],
            "gb_s": one.bytes / best[one.name] / 1e9,
            "ratio": one.bytes / best[one.name] / rate,
            "per_key": best[plain.name] / plain.keys * one.keys / best[one.name],
        }
        for one in calls
    ]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="calls of each, in turn (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="small problems: a look, not a figure to quote")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=list(TYPES), help="of q")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    libflash.set_num_threads(1)  # the processor time of several would count their waiting
    load = os.getloadavg()[0]
    print(f"libflash {libflash.__version__}, {cpu_model()} ({libflash.info()['cpu']['isa']}), 1 thread, load before {load:.1f}\n")
    print("| q | cache | ms | GB/s | ratio | per key |\n|---|---|---:|---:|---:|---:|")
    for dtype in options.types:
        calls = contenders(dtype, SMALL if options.quick else LARGE)
        compare(calls)
        for row in figures(calls, times(calls, options.rounds)):
            numbers = f"{row['ms']:.2f} | {row['gb_s']:.1f} | {row['ratio']:.2f} | {row['per_key']:.2f}"
            print(f"| {dtype} | {row['call']} | {numbers} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
