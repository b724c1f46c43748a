"""Calls of an inference engine's step on a GPU: prefill chunks, mixed steps, decodes of unequal lengths, trees, 8-bit caches.

    python tests/benchmark/gpu_serving.py --json serving.json       every cell, some minutes
    python tests/benchmark/gpu_serving.py --only chunk,page=16      some of them
    python tests/benchmark/gpu_serving.py --only mla,append         two kinds

32 query heads, 8 key heads, head_dim 128, bfloat16; packed rows (cu_seqlens_q), lengths and block table on the device, pages in
random order. Inputs that the L2 cache could keep are rotated: each call reads other copies. Calls are replayed from
CUDA graphs; contenders take turns; medians. Each line has the time of the call and of what it is compared with, and its target:

    chunk     rows of one sequence after keys in pages, also over codes, against the dense forward call for the same operations
    mixed     chunks beside decodes (the target's case: 4 of 2048 rows, 60 decodes, 8k keys), against the chunks alone and the
              decodes alone
    lengths   256 decodes with log-uniform lengths from 100 to 100k, against the bytes of K and V at 4.4 TB/s
    tree      trees of 8, 16 and 64 nodes, against one row for each sequence
    codes     caches of 8 bits (e4m3 with a scale for each head, int8 with one for each row), against bfloat16
    mla       128 decodes with one key head of head_dim 576, whose first 512 channels are the values; beside it PyTorch's kernels
              that take the problem, without pages
    invariant decodes and chunks with invariant=True, against the same calls without
    append    decodes that also rotate and append the new row, microseconds more than the plain call
    prefix    64 decodes whose first 8k keys are the same pages, with that hint against without

A call that the library refuses, or whose result is wrong, is reported; the other cells are timed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import statistics
import sys

import torch
from _gpu_timing import medians
from _report import reason
from _serving_cells import CALLS, SDPA, Call, Calls, Cell, cells, contenders
from gpu_attention import setting

KINDS = tuple(CALLS)
READ_TB_PER_S = 4.4
ROUNDS_OF_DIFFERENCES = 15  # differences are a few microseconds of several hundred
SAME_RESULT = {
    "chunk": ("forward",),
    "mla": tuple(SDPA),
    "invariant": ("free",),
    "append": ("plain",),
    "prefix": ("no hint",),
}


def in_turn(copies: list[Call]) -> Call:
    """Calls one after another, each with inputs of its own."""
    following = itertools.cycle(copies)

    def call() -> torch.Tensor:
        return next(following)()

    return call


def that_work(calls: Calls) -> tuple[Calls, dict[str, str]]:
    """Without peers that raise an exception, and why those did."""
    failed: dict[str, str] = {}
    for name, copies in calls.items():
        try:
            copies[0]()
        except Exception as failure:
            if name == "call":
                raise
            failed[name] = reason(failure)
    return {name: copies for name, copies in calls.items() if name not in failed}, failed


def compare(cell: Cell, calls: Calls) -> None:
    """Raise an exception for a wrong result, where a peer has the same."""
    for peer in SAME_RESULT.get(cell.kind, ()):
        if peer not in calls:
            continue
        got, wanted = (calls[name][0]().float() for name in ("call", peer))
        difference = ((got.view_as(wanted) - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max().item()
        if not difference <= 0.02:
            sys.exit(f"{cell.name}: a row differs from {peer}'s by {difference:.3g}; nothing is timed")


def verdict(cell: Cell, ms: dict[str, float]) -> tuple[str, float]:
    """What the target is about, and the figure that it bounds."""
    call = ms["call"]
    if cell.kind == "chunk":
        return "rate / forward's, >= 0.95", ms["forward"] / call
    if cell.kind == "mixed":
        return "time / longer part, <= 1.1", call / max(ms["chunks"], ms["decodes"])
    if cell.kind == "lengths":
        return "time / bytes at 4.4 TB/s, <= 1.1", call / (cell.bytes / READ_TB_PER_S / 1e9)
    if cell.kind == "tree":
        return "time / one row's, <= 1.05", call / ms["one row"]
    if cell.kind == "mla":
        return f"ms, <= {cell.wanted_ms}", call
    if cell.kind == "invariant":
        return "time / free choice's, geometric mean <= 1.05", call / ms["free"]
    if cell.kind == "append":
        return "us more than the plain call, <= 2", (call - ms["plain"]) * 1e3
    if cell.kind == "prefix":
        return "time without hint / time, >= 8", ms["no hint"] / call
    return "bf16's time / time, >= 1.8 from 64k keys", ms["bf16"] / call


def run(cell: Cell, rounds: int) -> dict[str, object]:
    calls, failed = that_work(contenders(cell))
    compare(cell, calls)
    rounds = max(rounds, ROUNDS_OF_DIFFERENCES) if cell.kind == "append" else rounds
    ms, spread = medians({name: in_turn(copies) for name, copies in calls.items()}, rounds)
    target, figure = verdict(cell, ms)
    figures = {"tb_per_s": round(cell.bytes / ms["call"] / 1e9, 2), "tflop_per_s": round(cell.operations / ms["call"] / 1e9, 1)}
    us = {name: round(value * 1e3, 1) for name, value in ms.items()}
    about = {"kind": cell.kind, "name": cell.name, "us": us, **figures} | ({"failed": failed} if failed else {})
    return about | {"target": target, "figure": round(figure, 3), "spread": round(spread, 3)}


def attempt(cell: Cell, rounds: int) -> dict[str, object]:
    """The result of a cell. An exception is one too: the other cells must still be timed."""
    try:
        return run(cell, rounds)
    except (Exception, SystemExit) as failure:
        return {"kind": cell.kind, "name": cell.name, "failed": {"call": reason(failure)}}


def lines(result: dict) -> list[str]:
    failed = [f"{result['kind']:10}{result['name']:36}{name} left out: {why}" for name, why in result.get("failed", {}).items()]
    if "figure" not in result:
        return failed
    us = ", ".join(f"{name} {value}" for name, value in result["us"].items())
    rates = f"{result['tflop_per_s']:7.1f} TFLOP/s {result['tb_per_s']:5.2f} TB/s"
    about = f"{result['kind']:10}{result['name']:36}{result['figure']:7.3f} ({result['target']}) {rates}"
    return [f"{about} spread {result['spread']:.3f}  us: {us}", *failed]


def conclusion(results: list[dict]) -> list[str]:
    """The mean of `invariant`, the kind whose target is about all its cells."""
    ratios = [r["figure"] for r in results if r["kind"] == "invariant" and "figure" in r]
    return [f"invariant: geometric mean {statistics.geometric_mean(ratios):.3f} (<= 1.05)"] if ratios else []


def has(cell: Cell, words: list[str]) -> bool:
    """Whether the cell is of one of the kinds among the words, and its name has all the other words."""
    kinds = [word for word in words if word in KINDS]
    return (not kinds or cell.kind in kinds) and all(word in cell.name.split() for word in words if word not in KINDS)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="replays of each contender, in turn (default: %(default)s)")
    parser.add_argument("--only", metavar="WORDS", default="", help="comma-separated: chunk,rows=512,page=16; several kinds: any")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the results")
    return parser.parse_args()


@torch.no_grad()
def main() -> int:
    options = parse()
    if not torch.cuda.is_available():
        sys.exit("no GPU")
    words = options.only.split(",") if options.only else []
    wanted = [cell for cell in cells() if has(cell, words)]
    if not wanted:
        sys.exit(f"no cell has all of: {options.only}; a cell is, for one: {cells()[0].kind} {cells()[0].name}")
    about = setting(options.rounds, None)
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    results: list[dict] = []
    with torch.cuda.stream(torch.cuda.Stream()):  # the default stream cannot be captured
        for cell in wanted:
            results.append(attempt(cell, options.rounds))
            print(*lines(results[-1]), sep="\n", flush=True)
            if options.json:  # after each cell, so that an interrupted run keeps its results
                options.json.write_text(json.dumps({"setting": about, "cells": results}, indent=1) + "\n")
            torch.cuda.empty_cache()
    for text in conclusion(results):
        print(text)
    return 1 if any("figure" not in result for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
