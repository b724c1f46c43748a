"""Problems on a GPU that gpu_attention.py does not have: ratios of device times of calls that take turns in one
process.

packed    16 sequences of 1 to 8192 rows, their lengths on the device: TFLOP/s over those of a dense call. That one has sequences
          of 4096 rows, as many as come nearest to the same number of operations; both are counted exactly
heads     eight query heads per key head: time over that of as many key heads as query heads
product   TFLOP/s over those of the product of two 8192 x 8192 matrices
fp16      time of bf16 over that of fp16, also of the product
blocks    half of the 128 x 128 blocks masked at random, as lists: time over that of the dense call
options   forward and backward with softcap, ALiBi (causal), bias, mask, dropout: time of the sm80 kernels over that of libflash's
          choice; with bias and mask time of cuDNN, with dropout also of FlashAttention-2, over libflash's
shared    backward of one sequence and of eight, eight query heads per key head: TFLOP/s over those of 16384 tokens with as many
          key heads as query heads; and, where it is installed, the time of FlashAttention-3 over libflash's
few       512 to 2048 rows, forward and backward: time of cuDNN over libflash's; and, where it is installed, of FlashAttention-3

    python tests/benchmark/gpu_shapes.py --json shapes.json         everything, about a minute
    python tests/benchmark/gpu_shapes.py --quick                    some cells of each
    python tests/benchmark/gpu_shapes.py --only packed blocks

Forward and bf16 unless stated; heads * head_dim = 2048, batch * seqlen = 16384 unless stated, random-normal
values. Calls are replayed from CUDA graphs; medians; `spread` is the largest (slowest - fastest) / median among a cell's calls.
Results that no other program compares are compared before they are timed.
"""

from __future__ import annotations

import argparse
import gc
import json
import pathlib
import statistics
import sys
from collections.abc import Iterable

import torch
from _gpu_timing import medians
from _shapes import SECTIONS, Contest, contests
from gpu_attention import setting

REPLAY_MS = 10.0
WANTED = {  # of every cell
    "packed": "0.92 or more",
    "heads": "at most 1.00, but for the spread",
    "product d=128": "0.95 or more",
    "fp16": "0.97 or more",
    "blocks": "at most 0.60",
}


def run(contest: Contest, rounds: int) -> dict[str, object]:
    contest.check()
    ms, spread = medians(contest.calls, rounds, REPLAY_MS)
    return {"name": contest.name} | figures(contest, ms) | {"spread": round(spread, 3)}


def figures(contest: Contest, ms: dict[str, float]) -> dict[str, object]:
    """The reported figures, from milliseconds per call."""
    time = {name: value / contest.gflop.get(name, 1.0) for name, value in ms.items()}
    return {
        "ms": {name: float(f"{value:.4g}") for name, value in ms.items()},
        "tflops": {name: round(work / ms[name], 1) for name, work in contest.gflop.items()},
        "ratio": {figure: round(time[above] / time[below], 3) for figure, (above, below) in contest.ratios.items()},
    }


def summaries(results: list[dict]) -> dict[str, dict]:
    """A summary for each figure, over the cells that have it."""
    found: dict[str, list[float]] = {}
    for result in results:
        for figure, ratio in result["ratio"].items():
            found.setdefault(figure, []).append(ratio)
    return {
        figure: {"geometric_mean": round(statistics.geometric_mean(ratios), 3), "smallest": min(ratios), "largest": max(ratios)}
        for figure, ratios in found.items()
    }


def line(result: dict) -> str:
    ratios = ", ".join(f"{figure} {ratio:.3f}" for figure, ratio in result["ratio"].items())
    times = ", ".join(f"{name} {ms}" for name, ms in result["ms"].items())
    return f"{result['section']:9}{result['name']:26}{ratios:34}{result['spread']:6.3f}  {times}"


def conclusion(figure: str, sums: dict[str, float]) -> str:
    wanted = f" (wanted: {WANTED[figure]})" if figure in WANTED else ""
    return f"{figure}: {sums['smallest']:.3f} to {sums['largest']:.3f}, geometric mean {sums['geometric_mean']:.3f}{wanted}"


def parse(about: str | None, sections: Iterable[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="replays of each call, in turn (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="some cells: a look, not a figure to quote")
    parser.add_argument("--only", nargs="+", choices=sections, metavar="SECTION", help=f"some of: {', '.join(sections)}")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the results")
    return parser.parse_args()


def begin(rounds: int) -> dict[str, object]:
    """Print the setting and the head of the table; returns the setting."""
    if not torch.cuda.is_available():
        sys.exit("no GPU")
    about = setting(rounds, None)
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    print(f"{'':35}{'ratio':34}spread  milliseconds")
    gc.freeze()  # a capture collects garbage; imported objects shall not be searched
    torch.manual_seed(0)
    return about


def write(path: pathlib.Path | None, about: dict[str, object], results: list[dict]) -> None:
    """After each cell, so that an interrupted run keeps its results."""
    if path:
        path.write_text(json.dumps({"setting": about, "summary": summaries(results), "cells": results}, indent=1) + "\n")


@torch.no_grad()
def main() -> int:
    options = parse(__doc__, SECTIONS)
    about = begin(options.rounds)
    results: list[dict] = []
    with torch.cuda.stream(torch.cuda.Stream()):  # the default stream cannot be captured
        for section in options.only or SECTIONS:
            for contest in contests(section, options.quick):
                results.append({"section": section} | run(contest, options.rounds))
                print(line(results[-1]), flush=True)
                write(options.json, about, results)
    for figure, sums in summaries(results).items():
        print(conclusion(figure, sums))
    return 0


if __name__ == "__main__":
    sys.exit(main())
