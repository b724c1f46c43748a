"""Attention on a GPU, forward and backward, against PyTorch's FlashAttention-2 and cuDNN, in float32 against its memory-efficient
attention, in one process, by device time. FlashAttention-3 takes part where its module flash_attn_interface can be imported.

Work as in the papers: batch * seqlen = 16384, heads * head_dim = 2048, random-normal values. Calls are replayed from CUDA graphs
of some 30 ms, which exclude host time; each round has all contenders in a random order, and medians over the rounds are
compared. They get the same tensors, (batch, seqlen, heads, head_dim); before a cell is timed, their results are compared row by
row. Backward is the gradient of q, k and v alone, from a forward that is not timed.

    python tests/benchmark/gpu_attention.py --json gpu.json            the whole table, about two minutes
    python tests/benchmark/gpu_attention.py --quick --dtype fp16       sixteen cells
    python tests/benchmark/gpu_attention.py --only d=128,causal --kernel forward_sm80_bf16_d128

A ratio is the peer's time divided by libflash's: above 1, libflash is faster. FlashAttention-2 is divided by the time of the sm80
kernels (`libflash sm80`, timed if libflash chooses another kernel), the other peers by that of libflash's choice. The GPU's
clocks follow its temperature and power, so compare the ratios of one run, not TFLOP/s of different runs. `spread` is the largest
(slowest - fastest) / median among a cell's contenders.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import pathlib
import sys
from collections.abc import Callable

import torch
from _cells import PASSES, Cell, gpu_cells
from _gpu_contenders import HELD, OURS, PEERS, RESULTS, Call, contenders, measured_against, problem
from _gpu_timing import medians
from _report import chosen, direction_and_dtype, name_of, summary

import libflash

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
COLUMNS = (*PEERS, HELD, OURS)
NOTHING = 1e-3  # of a typical row: smaller rows are rounding errors
# The limit of |difference| / |row| for forward; for backward it is twice as large. Two correct results differ by about a third of
# the limit, in float32 by a hundredth. Products of one tf32 instruction would differ by seven times the limit.
ROW_TOLERANCE = {"bfloat16": 0.02, "float16": 0.0025, "float32": 0.0001}


def calls_that_work(made: dict[str, Callable[[], Call]]) -> dict[str, Call]:
    """Call each once. A peer that does not support the problem is removed; libflash must support it."""
    working = {}
    for name, contender in made.items():
        try:
            call = contender()
            call()
            torch.cuda.synchronize()
        except RuntimeError as refused:
            if name in (OURS, HELD) or "CUDA error" in str(refused):
                raise
            print(f"{name}: left out: {str(refused).splitlines()[0]}", file=sys.stderr)
            continue
        working[name] = call
    return working


def worst_row(direction: str, a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest |a - b| / |b| of a row; NaN where there is one.

    A row's gradient can be far smaller than the same row's in other batch entries and heads, with errors of their size. Then |b|
    is the root mean square over batch and heads, or a tenth of a typical row. The first row of a causal dq is exactly 0, and the
    computed one is a rounding error; it is compared with a typical row.
    """
    a, b = a.float(), b.float()
    difference, size = (a - b).norm(dim=-1), b.norm(dim=-1)
    if direction == "backward":
        typical = size.square().mean(dim=(0, 2), keepdim=True).sqrt()
        usual = size.median()
        size = torch.where(typical < NOTHING * usual, usual, size.maximum(typical).clamp(min=0.1 * usual))
    return (difference / size).max().item()


def agree(
    where: str, direction: str, dtype: str, mine: torch.Tensor, other: torch.Tensor, *, slack: float = 1.0, whose: str = ""
) -> None:
    """Raise an exception for a wrong result (batch, seqlen, heads, head_dim). `slack` multiplies the tolerance."""
    difference = worst_row(direction, mine, other)
    if not difference <= ROW_TOLERANCE[dtype] * (2 if direction == "backward" else 1) * slack:
        sys.exit(f"{where}: a row differs{whose} by {difference:.3g}; nothing is timed")


def compare(cell: Cell, calls: dict[str, Call], slack: dict[str, float] | None = None) -> None:
    """Compare the results of all contenders. `slack` multiplies the tolerance of peers that round more often."""
    ours = calls[OURS]()
    for peer in calls.keys() - {OURS}:
        about = {"slack": (slack or {}).get(peer, 1.0), "whose": f" from {peer}'s"}
        for name, mine, other in zip(RESULTS[cell.direction], ours, calls[peer](), strict=True):
            agree(f"{name_of(dataclasses.asdict(cell))}: {name}", cell.direction, cell.dtype, mine, other, **about)


def run(cell: Cell, rounds: int, kernel: str | None) -> dict[str, object]:
    """Medians over the rounds."""
    calls = calls_that_work(contenders(problem(cell), kernel))
    compare(cell, calls)
    ms, spread = medians(calls, rounds)
    return dataclasses.asdict(cell) | figures(cell, ms) | {"spread": round(spread, 3)}


def figures(cell: Cell, ms: dict[str, float]) -> dict[str, object]:
    """The reported figures of a cell, from milliseconds per call."""
    return {
        "ms": {name: float(f"{value:.4g}") for name, value in ms.items()},
        "tflops": {name: round(cell.gflop / value, 1) for name, value in ms.items()},
        "ratio": {name: round(ms[name] / ms[measured_against(name, ms)], 3) for name in PEERS if name in ms},
    }


def kinds(cell: dict) -> list[str]:
    return [*direction_and_dtype(cell), f"{cell['direction']} {cell['dtype']} d={cell['head_dim']}"]


def summaries(results: list[dict]) -> dict[str, dict]:
    """A summary for each peer, over the cells that it supports."""
    peers = dict.fromkeys(peer for cell in results for peer in cell["ratio"])
    return {
        peer: summary([c for c in results if peer in c["ratio"]], lambda cell, peer=peer: cell["ratio"][peer], kinds)
        for peer in peers
    }


def write(path: pathlib.Path | None, about: dict[str, object], results: list[dict]) -> None:
    if path:
        path.write_text(json.dumps({"setting": about, "summary": summaries(results), "cells": results}, indent=1) + "\n")


def setting(rounds: int, kernel: str | None) -> dict[str, object]:
    about = {
        "date": datetime.date.today().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "rounds": rounds,
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "libflash": libflash.__version__,
    }
    return about | ({"kernel": kernel} if kernel else {})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, help="default: bf16, fp32, and fp16 in the cells of --quick")
    parser.add_argument("--direction", nargs="+", choices=PASSES, help="default: both, or that of --kernel")
    parser.add_argument("--rounds", type=int, default=5, help="timed replays of each contender (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a few cells: a look, not a figure to quote")
    parser.add_argument("--only", metavar="WORDS", help="comma-separated: d=64,S=2048,causal (or full)")
    parser.add_argument("--kernel", metavar="NAME", help="this kernel of libflash, not the one it would choose")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the results")
    parser.add_argument("--at-least", type=float, metavar="RATIO", help="exit code 1 if a cell's ratio to a peer is below")
    return parser.parse_args()


def wanted(options: argparse.Namespace) -> list[Cell]:
    of_kernel = [direction for direction in PASSES if (options.kernel or direction).startswith(direction)]
    directions = options.direction or of_kernel or PASSES
    if options.dtype:
        return gpu_cells([DTYPES[name] for name in options.dtype], directions, options.quick)
    most = gpu_cells(["bfloat16", "float32"], directions, options.quick)
    return [*most, *gpu_cells(["float16"], directions, quick=True)]


def line(result: dict) -> str:
    """A dash for a contender that does not support the problem, or is the same kernel as libflash's choice."""
    values = [f"{result['tflops'].get(name, '-'):>{width(name)}}" for name in COLUMNS]
    ratios = [f"{result['ratio'].get(name, '-'):>{width(f'/ {name}')}}" for name in PEERS]
    return f"{name_of(result):52}{''.join(values)}{''.join(ratios)}{result['spread']:8}"


def width(name: str) -> int:
    return max(8, len(name) + 2)


@torch.no_grad()
def main() -> int:
    options = parse()
    if not torch.cuda.is_available():
        sys.exit("no GPU")
    about = setting(options.rounds, options.kernel)
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    torch.set_float32_matmul_precision("highest")  # the default: no tf32 where PyTorch computes in float32
    head = (*COLUMNS, *(f"/ {name}" for name in PEERS), "spread")
    print(f"{'TFLOP/s':52}{''.join(f'{name:>{width(name)}}' for name in head)}")
    results = []
    with torch.cuda.stream(torch.cuda.Stream()):  # the default stream cannot be captured
        for cell in chosen(wanted(options), options.only):
            results.append(run(cell, options.rounds, options.kernel))
            print(line(results[-1]), flush=True)
            write(options.json, about, results)  # after each cell, so that an interrupted run keeps its results
            torch.cuda.empty_cache()
    total = summaries(results)
    for peer, sums in total.items():
        means = ", ".join(f"{name} {mean:.3f}" for name, mean in sums["geometric_mean"].items())
        print(f"against {peer}: geometric mean, {means}; worst {sums['worst']['ratio']:.3f} ({sums['worst']['cell']})")
    if not total:
        sys.exit("no peer computed any of these cells: there is nothing to compare with")
    worst = min(sums["worst"]["ratio"] for sums in total.values())
    return 1 if options.at_least is not None and worst < options.at_least else 0


if __name__ == "__main__":
    sys.exit(main())
