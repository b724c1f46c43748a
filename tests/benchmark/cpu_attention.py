"""Forward and backward on the CPU against PyTorch's scaled_dot_product_attention, in one process.

Both get the same numbers, each in its own memory layout, and the same number of threads. They are timed in turn, so that other
work on the machine affects both. Before a cell is timed, the two results are compared.

    python tests/benchmark/cpu_attention.py --json cpu.json     the whole table, some minutes
    python tests/benchmark/cpu_attention.py --quick             small problems, some seconds
    python tests/benchmark/cpu_attention.py --only forward,float32,causal

The ratio is PyTorch's time divided by libflash's: above 1, libflash is faster. It is the ratio of the medians; the last column
has that of the best times, which other work on the machine disturbs least. If the two differ much, the machine was busy.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Callable

import torch
from _cells import Cell, cells
from _report import chosen, name_of, summary

import libflash

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.06}  # for values around 1; wrong results are not timed
PAUSE = 0.005  # seconds between calls, in which spinning threads of the last call go to sleep


@dataclasses.dataclass(frozen=True)
class Contest:
    """One cell's two calls, on the same numbers."""

    torch: Callable[[], list[torch.Tensor]]
    libflash: Callable[[], list[torch.Tensor]]


def contest(cell: Cell) -> Contest:
    """Results of both are in (batch, seqlen, heads, head_dim)."""
    generator = torch.Generator().manual_seed(0)
    shape = (cell.batch, cell.seqlen, cell.heads, cell.head_dim)
    q, k, v, dout = (torch.randn(shape, generator=generator).to(getattr(torch, cell.dtype)) for _ in range(4))
    theirs = [x.transpose(1, 2).contiguous() for x in (q, k, v)]

    def sdpa() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(*theirs, is_causal=cell.causal)

    if cell.direction == "forward":
        return Contest(
            torch=lambda: [sdpa().transpose(1, 2)],
            libflash=lambda: [libflash.attention(q, k, v, causal=cell.causal)],
        )
    for x in theirs:
        x.requires_grad_()
    graph, dout_theirs = sdpa(), dout.transpose(1, 2).contiguous()
    out, lse = libflash.attention(q, k, v, causal=cell.causal, return_lse=True)

    def torch_backward() -> list[torch.Tensor]:
        return [x.transpose(1, 2) for x in torch.autograd.grad(graph, theirs, dout_theirs, retain_graph=True)]

    return Contest(
        torch=torch_backward,
        libflash=lambda: list(libflash.attention_backward(dout, q, k, v, out, lse, causal=cell.causal)),
    )


def compare(cell: Cell, calls: Contest) -> None:
    """Call both once, which also warms them up; raise an exception if the results differ."""
    with torch.set_grad_enabled(cell.direction == "backward"):
        theirs, ours = calls.torch(), calls.libflash()
    for i, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        difference = (a.float() - b.float()).abs().max().item()
        allowed = TOLERANCE[cell.dtype] * max(1.0, a.float().abs().max().item())
        if not difference <= allowed:
            sys.exit(f"{cell}: result {i} differs by {difference:.3g}, more than {allowed:.3g}; nothing is timed")


def seconds(call: Callable[[], object]) -> float:
    time.sleep(PAUSE)
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def run(cell: Cell, rounds: int) -> dict[str, object]:
    """Medians over the rounds. The first contender changes from round to round."""
    calls = contest(cell)
    compare(cell, calls)
    times: dict[str, list[float]] = {"torch": [], "libflash": []}
    with torch.set_grad_enabled(cell.direction == "backward"):
        for i in range(rounds):
            order = ("torch", "libflash") if i % 2 == 0 else ("libflash", "torch")
            for name in order:
                times[name].append(seconds(getattr(calls, name)))
    theirs, ours = (statistics.median(times[name]) for name in ("torch", "libflash"))
    return dataclasses.asdict(cell) | {
        "gflop": round(cell.gflop, 3),
        "torch_ms": round(1e3 * theirs, 3),
        "libflash_ms": round(1e3 * ours, 3),
        "torch_gflops": round(cell.gflop / theirs, 1),
        "libflash_gflops": round(cell.gflop / ours, 1),
        "ratio": round(theirs / ours, 3),
        "ratio_of_best": round(min(times["torch"]) / min(times["libflash"]), 3),
    }


def setting(threads: int, rounds: int) -> dict[str, object]:
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_model(),
        "load_before": round(os.getloadavg()[0], 1),
        "isa": libflash.info()["cpu"]["isa"],
        "threads": threads,
        "rounds": rounds,
        "torch": torch.__version__,
        "libflash": libflash.__version__,
    }


def cpu_model() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2, help="for both (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="calls of each contender, in turn (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="small problems: a look, not a figure to quote")
    parser.add_argument("--only", metavar="WORDS", help="comma-separated: backward,bfloat16,d=64,S=2048,causal (or full)")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the results; table.py reads them")
    parser.add_argument("--at-least", type=float, metavar="RATIO", help="exit code 1 if a cell's ratio is below")
    return parser.parse_args()


def main() -> int:
    options = parse()
    torch.set_num_threads(options.threads)
    libflash.set_num_threads(options.threads)
    about = setting(options.threads, options.rounds)
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    print(f"{'':52}{'PyTorch':>20}{'libflash':>20}")
    print(f"{'cell':52}{'ms':>10}{'GFLOP/s':>10}{'ms':>10}{'GFLOP/s':>10}{'ratio':>8}{'best':>7}")
    if about["load_before"] > 0.3:
        print(f"note: the machine is busy (load {about['load_before']}); these are not figures to quote", file=sys.stderr)
    results = []
    for cell in chosen(cells(options.quick), options.only):
        result = run(cell, options.rounds)
        results.append(result)
        print(
            f"{name_of(result):52}{result['torch_ms']:10.1f}{result['torch_gflops']:10.1f}"
            f"{result['libflash_ms']:10.1f}{result['libflash_gflops']:10.1f}{result['ratio']:8.2f}{result['ratio_of_best']:7.2f}",
            flush=True,
        )
    total = summary(results)
    for name, mean in total["geometric_mean"].items():
        print(f"geometric mean, {name}: {mean:.2f}")
    print(f"worst: {total['worst']['ratio']:.2f} ({total['worst']['cell']})")
    if options.json:
        options.json.write_text(json.dumps({"setting": about, "summary": total, "cells": results}, indent=1) + "\n")
    return 1 if options.at_least is not None and total["worst"]["ratio"] < options.at_least else 0


if __name__ == "__main__":
    sys.exit(main())
