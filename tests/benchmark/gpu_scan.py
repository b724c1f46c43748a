"""Random problems on a GPU against cuDNN and, where it is installed, FlashAttention-3. It finds slow shapes that no fixed list of
cells has.

same        as many keys as query rows
lengths     other numbers of keys than of query rows
head_dims   any multiple of 8 from 32 to 256
fp16        like `same`, in fp16

    python tests/benchmark/gpu_scan.py --json scan.json                 30 seconds for each family and direction
    python tests/benchmark/gpu_scan.py --only lengths --directions backward --seconds 60 --seed 1

A ratio is the peer's time divided by libflash's: above 1, libflash is faster. bf16 unless stated. The results are compared row by
row before they are timed; a problem whose results differ is printed, not timed, and the exit code is then 1. Calls are replayed
from CUDA graphs of a few milliseconds, contenders in a random order, medians. Such short replays find a slow shape but give no
figure to quote: time that shape with one of the other programs.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import pathlib
import statistics
import sys
import time

import torch
from _cells import PASSES
from _gpu_contenders import FA3, HELD, OURS
from _gpu_timing import medians
from _scan import FAMILIES, Shape, contenders, shapes
from gpu_attention import calls_that_work, compare, figures, setting

REPLAY_MS, SHOWN = 3.0, 12
RIVALS = ("cudnn", FA3, HELD)
# Of the tolerance. With few heads a row of a gradient is sometimes much smaller than its errors' usual size: in 6000 random
# problems on a CPU the largest correct difference was three times the tolerance. A wrong index gives far more.
SLACK = {"forward": 1.0, "backward": 4.0}


def run(shape: Shape, rounds: int) -> dict[str, object]:
    calls, about = calls_that_work(contenders(shape)), dataclasses.asdict(shape) | {"name": shape.name}
    try:
        compare(shape, calls, dict.fromkeys(calls, SLACK[shape.direction]))
    except SystemExit as differs:
        print(differs, flush=True)
        return about | {"differs": str(differs), "ratio": {}}
    ms, spread = medians(calls, rounds, REPLAY_MS)
    made = figures(shape, ms)
    if HELD in ms:
        made["ratio"][HELD] = round(ms[HELD] / ms[OURS], 3)
    return about | made | {"spread": round(spread, 3)}


def scan(family: str, direction: str, options: argparse.Namespace) -> list[dict]:
    """The results of as many problems as `seconds` allow, at least one."""
    results: list[dict] = []
    end = time.monotonic() + options.seconds
    for shape in shapes(family, direction, options.seed):
        results.append({"family": family} | run(shape, options.rounds))
        if time.monotonic() >= end:
            return results
    return results


def report(title: str, results: list[dict]) -> None:
    for rival in RIVALS:
        found = sorted((r for r in results if rival in r["ratio"]), key=lambda r: r["ratio"][rival])
        if not found:
            continue
        ratios = [r["ratio"][rival] for r in found]
        print(
            f"{title}, over {rival}: {len(found)} problems, geometric mean {statistics.geometric_mean(ratios):.3f}; the slowest:"
        )
        for result in found[:SHOWN]:
            print(f"  {result['ratio'][rival]:6.3f}  {result['name']}  {result['ms']}  spread {result['spread']}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES), metavar="FAMILY", help=", ".join(FAMILIES))
    parser.add_argument(
        "--directions", nargs="+", choices=PASSES, default=list(PASSES), metavar="DIRECTION", help=", ".join(PASSES)
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="of each family and direction (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="replays of each call, in turn (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="another draw of problems (default: %(default)s)")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the results")
    return parser.parse_args()


@torch.no_grad()
def main() -> int:
    options = parse()
    if not torch.cuda.is_available():
        sys.exit("no GPU")
    about = setting(options.rounds, None) | {"seed": options.seed}
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    gc.freeze()  # a capture collects garbage; imported objects shall not be searched
    results: list[dict] = []
    with torch.cuda.stream(torch.cuda.Stream()):  # the default stream cannot be captured
        for family in options.only:
            for direction in options.directions:
                found = scan(family, direction, options)
                report(f"{family} {direction}", found)
                results += found
                if options.json:
                    options.json.write_text(json.dumps({"setting": about, "problems": results}, indent=1) + "\n")
    return int(any("differs" in result for result in results))


if __name__ == "__main__":
    sys.exit(main())
