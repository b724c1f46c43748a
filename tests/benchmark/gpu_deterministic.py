"""What deterministic=True costs in backward on a GPU: its time over that of the default, cell by cell, and the time of the sm80
kernels with it. Before a cell is timed, its results are compared with the first ones bit by bit, from tensors full of NaN.

    python tests/benchmark/gpu_deterministic.py                      bf16, the grid of gpu_attention.py, about a minute
    python tests/benchmark/gpu_deterministic.py --only d=128,causal  these cells
    python tests/benchmark/gpu_deterministic.py --options            each option, S=2048, about a minute

Work and timing are those of gpu_attention.py; options are those of gpu_shapes.py, a causal window of 512 keys and eight query
heads for each key head. A ratio is a time divided by that of the default, so smaller is better.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import sys
from collections.abc import Iterator

import torch
from _cells import Cell, gpu_cells
from _gpu_contenders import FAMILY, RESULTS, Call, Problem, backward_libflash, own_choice, problem
from _gpu_timing import medians
from _report import mask_name
from _shapes import HEAD_DIMS, OPTIONS, arguments, cell, grouped

DEFAULT, FIXED, FIXED_SM80 = "default", "deterministic", "deterministic, sm80"
PLAIN, WINDOW, GROUPED = "", "window", "grouped"
OPTION_SEQLEN = 2048
# Whether causal, for each option.
OPTION_MASKS = dict.fromkeys(OPTIONS, (False,))
OPTION_MASKS |= {WINDOW: (True,), GROUPED: (False, True), "alibi": (True,), "dropout": (False, True)}


@dataclasses.dataclass(frozen=True)
class Case:
    cell: Cell
    option: str

    @property
    def words(self) -> list[str]:
        return [
            f"d={self.cell.head_dim}",
            f"S={self.cell.seqlen}",
            mask_name(self.cell.causal),
            *[self.option] * bool(self.option),
        ]


def plain_cases(dtype: str) -> list[Case]:
    return [Case(cell, PLAIN) for cell in gpu_cells([dtype], ["backward"], quick=False)]


def option_cases(dtype: str) -> Iterator[Case]:
    for option, masks in OPTION_MASKS.items():
        for head_dim, causal in itertools.product((*HEAD_DIMS, 256), masks):
            found = cell(head_dim, OPTION_SEQLEN, causal, dtype)
            yield Case(dataclasses.replace(found, direction="backward"), option)


def problem_of(case: Case) -> tuple[Problem, dict[str, object]]:
    p = problem(case.cell)
    if case.option == GROUPED:
        return grouped(p), {}
    if case.option == WINDOW:
        return p, {"window_size": (511, 0)}
    return p, arguments(case.option, p) if case.option else {}


def same_bits(call: Call, repeats: int) -> None:
    """Raise if a repeated call gives other bits or leaves a NaN."""
    first = [x.clone() for x in call()]
    for _ in range(repeats):
        for x in call():
            x.fill_(float("nan"))
        for name, x, wanted in zip(RESULTS["backward"], call(), first, strict=True):
            if not torch.equal(x, wanted):
                raise ValueError(f"{name} has other bits than in the first call")


def measure(case: Case, repeats: int, rounds: int) -> tuple[dict[str, float], float]:
    p, given = problem_of(case)
    fixed = {"given": given, "deterministic": True}
    calls = {DEFAULT: backward_libflash(p, None, given=given), FIXED: backward_libflash(p, None, **fixed)}
    if own_choice(p, deterministic=True, **given) != FAMILY:
        calls[FIXED_SM80] = backward_libflash(p, None, FAMILY, **fixed)
    same_bits(calls[FIXED], repeats)
    return medians(calls, rounds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORDS", help="comma-separated: d=64,S=2048,causal (or full), an option")
    parser.add_argument("--options", action="store_true", help="with options in place of the grid")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--repeats", type=int, default=20, help="calls whose bits are compared (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="replays of each contender, in turn (default: %(default)s)")
    options = parser.parse_args()
    words, ratios = set(filter(None, options.only.split(","))), []
    if not torch.cuda.is_available():
        sys.exit("no GPU")
    torch.set_grad_enabled(False)
    torch.cuda.set_stream(torch.cuda.Stream())  # the default stream cannot be captured
    for case in option_cases(options.dtype) if options.options else plain_cases(options.dtype):
        if not words <= set(case.words):
            continue
        ms, spread = measure(case, options.repeats, options.rounds)
        ratios.append(ms[FIXED] / ms[DEFAULT])
        times = ", ".join(f"{name} {1e3 * time:.0f} us" for name, time in ms.items())
        print(f"{' '.join(case.words)}: {ratios[-1]:.3f}; {times}; spread {spread:.3f}", flush=True)
    if ratios:
        print(f"geometric mean {statistics.geometric_mean(ratios):.3f}, largest {max(ratios):.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
