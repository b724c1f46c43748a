"""Attention on a GPU against PyTorch's FlashAttention-2 and cuDNN, in one process, by device time.

Work as in the papers: batch * seqlen = 16384, heads * head_dim = 2048, random-normal values. Calls are replayed from CUDA graphs
of some 30 ms, so that no host time is in the figures; the contenders take turns, and medians over the rounds are compared. They
get the same tensors, (batch, seqlen, heads, head_dim); before a cell is timed, their results are compared row by row.

    python tests/benchmark/gpu_attention.py --json gpu.json            the whole table, about a minute
    python tests/benchmark/gpu_attention.py --quick --dtype fp16       eight cells
    python tests/benchmark/gpu_attention.py --only d=128,causal --kernel forward_sm80_bf16_d128

A ratio is the peer's time divided by libflash's: above 1, libflash is faster. The card's clocks follow its temperature and power,
so the ratios of one run are the figure, not the TFLOP/s. `spread` is the largest (slowest - fastest) / median among a cell's
contenders.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import pathlib
import statistics
import sys
from collections.abc import Callable

import torch
from _cells import Cell, gpu_cells
from _report import chosen, direction_and_dtype, name_of, summary
from torch.nn.attention import SDPBackend, sdpa_kernel

import libflash

DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
ROW_TOLERANCE = {"bfloat16": 0.02, "float16": 0.0025}  # |difference| / |row|; two right results differ by a third of it at most
REPLAY_MS, MOST_CALLS = 30.0, 400
OURS = "libflash"

Call = Callable[[], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Problem:
    """One cell's tensors, (batch, seqlen, heads, head_dim)."""

    cell: Cell
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def problem(cell: Cell) -> Problem:
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (cell.batch, cell.seqlen, cell.heads, cell.head_dim)
    q, k, v = (torch.randn(shape, generator=generator, device="cuda").to(getattr(torch, cell.dtype)) for _ in range(3))
    return Problem(cell, q, k, v)


def forward_sdpa(backend: SDPBackend) -> Callable[[Problem], Call]:
    def contender(p: Problem) -> Call:
        q, k, v = (x.transpose(1, 2) for x in (p.q, p.k, p.v))

        def call() -> torch.Tensor:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=p.cell.causal).transpose(1, 2)

        return call

    return contender


def forward_libflash(kernel: str | None) -> Callable[[Problem], Call]:
    def contender(p: Problem) -> Call:
        out = torch.empty_like(p.q)
        return lambda: libflash.attention(p.q, p.k, p.v, causal=p.cell.causal, out=out, kernel=kernel)

    return contender


def contenders(direction: str, kernel: str | None) -> dict[str, Callable[[Problem], Call]]:
    """Peers first, libflash last. A new direction is a new entry here."""
    directions = {
        "forward": {
            "fa2": forward_sdpa(SDPBackend.FLASH_ATTENTION),
            "cudnn": forward_sdpa(SDPBackend.CUDNN_ATTENTION),
            OURS: forward_libflash(kernel),
        }
    }
    return directions[direction]


def calls_that_work(cell: Cell, kernel: str | None) -> dict[str, Call]:
    """Each called once; a peer that does not know this problem is left out, libflash may not be."""
    p = problem(cell)
    working = {}
    for name, contender in contenders(cell.direction, kernel).items():
        call = contender(p)
        try:
            call()
            torch.cuda.synchronize()
        except RuntimeError as refused:
            if name == OURS or "CUDA error" in str(refused):
                raise
            print(f"{name}: left out: {str(refused).splitlines()[0]}", file=sys.stderr)
            continue
        working[name] = call
    return working


def worst_row(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest |a - b| / |b| of a row; NaN where there is one."""
    a, b = a.float(), b.float()
    return ((a - b).square().sum(-1) / b.square().sum(-1)).sqrt().max().item()


def compare(cell: Cell, calls: dict[str, Call]) -> None:
    """Refuses to time a wrong result."""
    ours = calls[OURS]()
    for name in calls.keys() - {OURS}:
        difference = worst_row(ours, calls[name]())
        if not difference <= ROW_TOLERANCE[cell.dtype]:
            sys.exit(f"{name_of(dataclasses.asdict(cell))}: a row differs from {name}'s by {difference:.3g}; nothing is timed")


def elapsed_ms(work: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def graph(call: Call) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of as many calls as take REPLAY_MS, and their number."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()  # loads and tunes what a capture may not
        once = elapsed_ms(lambda: [call() for _ in range(3)]) / 3
    torch.cuda.synchronize()
    count = min(MOST_CALLS, max(1, round(REPLAY_MS / max(once, 1e-3))))
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for _ in range(count):
            call()
    return captured, count


def run(cell: Cell, rounds: int, kernel: str | None) -> dict[str, object]:
    """Medians over the rounds; who goes first changes from round to round."""
    calls = calls_that_work(cell, kernel)
    compare(cell, calls)
    graphs = {name: graph(call) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for captured, _ in graphs.values():
        captured.replay()
    for i in range(rounds):
        names = list(graphs)
        for name in names[i % len(names) :] + names[: i % len(names)]:
            captured, count = graphs[name]
            times[name].append(elapsed_ms(captured.replay) / count)
    ms = {name: statistics.median(values) for name, values in times.items()}
    return dataclasses.asdict(cell) | figures(cell, ms) | {"spread": round(max(map(relative_spread, times.values())), 3)}


def relative_spread(values: list[float]) -> float:
    return (max(values) - min(values)) / statistics.median(values)


def figures(cell: Cell, ms: dict[str, float]) -> dict[str, object]:
    """What is reported of a cell's milliseconds a call."""
    return {
        "ms": {name: float(f"{value:.4g}") for name, value in ms.items()},
        "tflops": {name: round(cell.gflop / value, 1) for name, value in ms.items()},
        "ratio": {name: round(value / ms[OURS], 3) for name, value in ms.items() if name != OURS},
    }


def kinds(cell: dict) -> list[str]:
    return [*direction_and_dtype(cell), f"{cell['direction']} {cell['dtype']} d={cell['head_dim']}"]


def summaries(results: list[dict]) -> dict[str, dict]:
    """For each peer, over the cells that it knows."""
    peers = dict.fromkeys(peer for cell in results for peer in cell["ratio"])
    return {
        peer: summary([c for c in results if peer in c["ratio"]], lambda cell, peer=peer: cell["ratio"][peer], kinds)
        for peer in peers
    }


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
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bf16"], help="default: bf16")
    parser.add_argument("--direction", nargs="+", choices=["forward"], default=["forward"])
    parser.add_argument("--rounds", type=int, default=5, help="replays of each contender, in turn (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a few cells: a look, not a figure to quote")
    parser.add_argument("--only", metavar="WORDS", help="comma-separated: d=64,S=2048,causal (or full)")
    parser.add_argument("--kernel", metavar="NAME", help="this kernel of libflash, not the one it would choose")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the results")
    parser.add_argument("--at-least", type=float, metavar="RATIO", help="exit code 1 if a cell's ratio to a peer is below")
    return parser.parse_args()


def line(result: dict) -> str:
    values = [f"{result['tflops'].get(name, float('nan')):9.1f}" for name in ("fa2", "cudnn", OURS)]
    ratios = [f"{result['ratio'].get(name, float('nan')):8.3f}" for name in ("fa2", "cudnn")]
    return f"{name_of(result):52}{''.join(values)}{''.join(ratios)}{result['spread']:8.3f}"


@torch.no_grad()
def main() -> int:
    options = parse()
    if not torch.cuda.is_available():
        sys.exit("no GPU")
    about = setting(options.rounds, options.kernel)
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    print(f"{'TFLOP/s':52}{'fa2':>9}{'cudnn':>9}{OURS:>9}{'/ fa2':>8}{'/ cudnn':>8}{'spread':>8}")
    results = []
    every = gpu_cells([DTYPES[name] for name in options.dtype], options.direction, options.quick)
    for cell in chosen(every, options.only):
        results.append(run(cell, options.rounds, options.kernel))
        print(line(results[-1]), flush=True)
        torch.cuda.empty_cache()
    total = summaries(results)
    for peer, sums in total.items():
        means = ", ".join(f"{name} {mean:.3f}" for name, mean in sums["geometric_mean"].items())
        print(f"against {peer}: geometric mean, {means}; worst {sums['worst']['ratio']:.3f} ({sums['worst']['cell']})")
    if options.json:
        options.json.write_text(json.dumps({"setting": about, "summary": total, "cells": results}, indent=1) + "\n")
    if not total:
        sys.exit("no peer computed any of these cells: there is nothing to compare with")
    worst = min(sums["worst"]["ratio"] for sums in total.values())
    return 1 if options.at_least is not None and worst < options.at_least else 0


if __name__ == "__main__":
    sys.exit(main())
