"""Tangents and second derivatives on the CPU: times over those of forward and of backward, in one process.

jvp       attention and its tangent in one call, over attention: at most 3.1
second    the tangents of attention, from its saved result, and of backward, as gradients of gradients need them, over backward:
          at most 3.2

    python tests/benchmark/cpu_derivatives.py --json derivatives.json     the whole table, two minutes
    python tests/benchmark/cpu_derivatives.py --quick                     small problems, some seconds

The calls are timed in turn. A ratio is that of the best times of processor time of all threads, which other work on the machine
disturbs least; one thread by default. Before a cell is timed, its results are compared with plain formulas. Exit code 1 if a
figure, the geometric mean over all cells of a kind, is above the limit.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable

import torch
from _cells import Cell, cells
from _derivatives import compare, first_head, name_of, plain, plain_backward
from _derivatives_table import LIMITS
from cpu_attention import TOLERANCE, setting

import libflash

Call = Callable[[], tuple[torch.Tensor, ...]]


def calls_of(cell: Cell) -> dict[str, Call]:
    """The calls to time; raises an exception if a result is wrong."""
    generator = torch.Generator().manual_seed(0)
    shape = (cell.batch, cell.seqlen, cell.heads, cell.head_dim)
    q, k, v, dout, *along = (torch.randn(shape, generator=generator).to(getattr(torch, cell.dtype)) for _ in range(7))
    causal = cell.causal
    out, lse = libflash.attention(q, k, v, causal=causal, return_lse=True)
    first = (dout, q, k, v, out, lse)

    def second() -> tuple[torch.Tensor, ...]:
        _, _, tout, tlse = libflash.attention_tangent(q, k, v, *along, out=out, lse=lse, causal=causal)
        return libflash.attention_backward_tangent(*first, tout, tlse, *along, causal=causal)

    calls: dict[str, Call] = {
        "forward": lambda: libflash.attention(q, k, v, causal=causal, return_lse=True),
        "jvp": lambda: libflash.attention_tangent(q, k, v, *along, causal=causal)[::2],
        "backward": lambda: libflash.attention_backward(*first, causal=causal),
        "second": second,
    }
    x, t = first_head(q, k, v), first_head(*along)
    (do,) = first_head(dout)
    moved = torch.func.jvp(lambda *x: plain(*x, causal), x, t)
    compare("tangent", first_head(*calls["jvp"]()), moved, TOLERANCE[cell.dtype])
    wanted = torch.func.jvp(lambda *x: plain_backward(*x, do, causal), x, t)[1]
    compare("tangent of backward", first_head(*second()), wanted, TOLERANCE[cell.dtype])
    return calls


def run(cell: Cell, rounds: int) -> dict[str, object]:
    times: dict[str, list[float]] = {}
    calls = calls_of(cell)
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.process_time()
            call()
            times.setdefault(name, []).append(time.process_time() - start)
    best = {name: min(x) for name, x in times.items()}
    ratio = {"jvp": best["jvp"] / best["forward"], "second": best["second"] / best["backward"]}
    return {"cell": f"{cell.dtype} {name_of(cell)}", "ms": {name: round(1e3 * x, 3) for name, x in best.items()}, "ratio": ratio}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1, help="of libflash (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="calls of each kind, in turn (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="small problems: a look, not a figure to quote")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the results")
    return parser.parse_args()


def main() -> int:
    options = parse()
    torch.set_num_threads(options.threads)
    libflash.set_num_threads(options.threads)
    about = setting(options.threads, options.rounds)
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    rows = []
    for cell in cells(options.quick):
        if cell.direction == "forward" and cell.seqlen <= 2048:  # plain formulas keep all scores
            rows.append(run(cell, options.rounds))
            print(rows[-1]["cell"].ljust(34), "   ".join(f"{name} {x:.2f}" for name, x in rows[-1]["ratio"].items()), flush=True)
    means = {name: statistics.geometric_mean(row["ratio"][name] for row in rows) for name in LIMITS}
    for name, limit in LIMITS.items():
        largest = max(row["ratio"][name] for row in rows)
        verdict = "met" if means[name] <= limit else "missed"
        print(f"{name}: geometric mean {means[name]:.2f}, largest {largest:.2f} (wanted: at most {limit}; {verdict})")
    if options.json:
        options.json.write_text(json.dumps({"setting": about, "summary": means, "cells": rows}, indent=1) + "\n")
    return int(any(means[name] > limit for name, limit in LIMITS.items()))


if __name__ == "__main__":
    sys.exit(main())
