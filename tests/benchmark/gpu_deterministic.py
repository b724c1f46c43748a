"""What deterministic=True costs in backward on a GPU: its time over that of the default, cell by cell, and the time of the sm80
kernels with it. Before a cell is timed, its results are compared with the first ones bit by bit, from tensors full of NaN.

    python tests/benchmark/gpu_deterministic.py                      bf16, the grid of gpu_attention.py, about a minute
    python tests/benchmark/gpu_deterministic.py --only d=128,causal  these cells

Work and timing are those of gpu_attention.py. A ratio is a time divided by that of the default, so smaller is better.
"""

from __future__ import annotations

import argparse
import statistics
import sys

import torch
from _cells import Cell, gpu_cells
from _gpu_contenders import FAMILY, RESULTS, Call, backward_libflash, own_choice, problem
from _gpu_timing import medians

DEFAULT, FIXED, FIXED_SM80 = "default", "deterministic", "deterministic, sm80"


def same_bits(call: Call, repeats: int) -> None:
    """Raise if a repeated call gives other bits or leaves a NaN."""
    first = [x.clone() for x in call()]
    for _ in range(repeats):
        for x in call():
            x.fill_(float("nan"))
        for name, x, wanted in zip(RESULTS["backward"], call(), first, strict=True):
            if not torch.equal(x, wanted):
                raise ValueError(f"{name} has other bits than in the first call")


def measure(cell: Cell, repeats: int, rounds: int) -> tuple[dict[str, float], float]:
    p = problem(cell)
    calls = {DEFAULT: backward_libflash(p, None), FIXED: backward_libflash(p, None, deterministic=True)}
    if own_choice(p) != FAMILY:
        calls[FIXED_SM80] = backward_libflash(p, None, FAMILY, deterministic=True)
    same_bits(calls[FIXED], repeats)
    return medians(calls, rounds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORDS", help="comma-separated: d=64,S=2048,causal (or full)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--repeats", type=int, default=20, help="calls whose bits are compared (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="replays of each contender, in turn (default: %(default)s)")
    options = parser.parse_args()
    words, ratios = set(filter(None, options.only.split(","))), []
    torch.set_grad_enabled(False)
    torch.cuda.set_stream(torch.cuda.Stream())  # the default stream cannot be captured
    for cell in gpu_cells([options.dtype], ["backward"], quick=False):
        names = [f"d={cell.head_dim}", f"S={cell.seqlen}", "causal" if cell.causal else "full"]
        if not words <= set(names):
            continue
        ms, spread = measure(cell, options.repeats, options.rounds)
        ratios.append(ms[FIXED] / ms[DEFAULT])
        times = ", ".join(f"{name} {1e3 * time:.0f} us" for name, time in ms.items())
        print(f"{' '.join(names)}: {ratios[-1]:.3f}; {times}; spread {spread:.3f}", flush=True)
    if ratios:
        print(f"geometric mean {statistics.geometric_mean(ratios):.3f}, largest {max(ratios):.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
