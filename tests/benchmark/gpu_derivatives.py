"""Tangents, double backward, float64, head_dim 512 and statistics of rows on a GPU: ratios of device times of calls that take
turns in one process.

jvp         attention and its tangent in one call: time over that of forward
double      tangent of backward: time over that of backward; `both` has the tangent of forward too
math        torch.func.jvp over attention with all scores in memory, S=2048: its time over that of libflash's tangent
triton      the kernel of jvp_flash_attention, where that is installed, S=2048: its time over that of libflash's tangent
float64     TFLOP/s over those of the product of two 4096 x 4096 matrices, S=4096
wide        head_dim 512: TFLOP/s over those of head_dim 256, S=4096
stats       forward that also writes the largest scores of rows or heads: time over that of forward; with the entropy of each row
            too: time over that with the largest scores of rows

    python tests/benchmark/gpu_derivatives.py --json derivatives.json     everything, less than a minute
    python tests/benchmark/gpu_derivatives.py --quick                     some cells of each
    python tests/benchmark/gpu_derivatives.py --only jvp wide

bf16 unless stated; heads * head_dim = 2048, batch * seqlen = 16384 (math and float64: 8192), random-normal values. "/ sm80": over
the time of the sm80 kernels, where forward or backward has others too. Calls are replayed from CUDA graphs; medians; `spread` is
the largest (slowest - fastest) / median among a cell's calls. Results are compared before they are timed. A call that the library
refuses, or that fails, is reported and left out; the exit status is 1 if there was one.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable

import torch
from _derivatives import SECTIONS, Contest, makers
from _gpu_timing import medians
from _report import reason
from gpu_shapes import begin, figures, line, parse, summaries, write

REPLAY_MS = 10.0
WANTED = {  # of every cell: ("at most" or "at least", value)
    "jvp S<2048": ("at most", 2.6),
    "jvp d=64": ("at most", 2.6),
    "jvp d=128": ("at most", 3.0),
    "jvp d=256": ("at most", 3.6),
    "double / sm80": ("at most", 3.3),
    "double": ("at most", 3.3),
    "math": ("at least", 5.0),
    "triton": ("at least", 1.5),
    "float64": ("at least", 0.5),
    "wide forward": ("at least", 0.7),
    "wide backward": ("at least", 0.6),
    "row maxima d=64": ("at most", 1.15),
    "row maxima d=128": ("at most", 1.08),
    "row maxima d=256": ("at most", 1.03),
    "entropy": ("at most", 1.03),
}


def that_work(contest: Contest) -> tuple[Contest, dict[str, str]]:
    """The contest without calls that raise an exception, and why those did."""
    failed: dict[str, str] = {}
    for name, call in contest.calls.items():
        try:
            call()
        except Exception as failure:
            failed[name] = reason(failure)
    calls = {name: call for name, call in contest.calls.items() if name not in failed}
    ratios = {figure: pair for figure, pair in contest.ratios.items() if not failed.keys() & set(pair)}
    gflop = {name: work for name, work in contest.gflop.items() if name in calls}
    return dataclasses.replace(contest, calls=calls, ratios=ratios, gflop=gflop), failed


def check(contest: Contest, some_failed: bool) -> None:
    """Raise an exception for a wrong result, or one that cannot be checked although every call works."""
    try:
        contest.check()
    except AssertionError:
        raise
    except Exception:
        if not some_failed:
            raise


def run(contest: Contest, rounds: int) -> dict[str, object]:
    kept, failed = that_work(contest)
    about: dict[str, object] = {"name": contest.name} | ({"failed": failed} if failed else {})
    if not kept.ratios:
        return about | {"ratio": {}}
    check(contest, bool(failed))
    needed = {name for pair in kept.ratios.values() for name in pair}
    ms, spread = medians({name: call for name, call in kept.calls.items() if name in needed}, rounds, REPLAY_MS)
    kept = dataclasses.replace(kept, gflop={name: work for name, work in kept.gflop.items() if name in needed})
    return about | figures(kept, ms) | {"spread": round(spread, 3)}


def attempt(section: str, name: str, make: Callable[[], Contest], rounds: int) -> dict:
    """One cell's result. An exception is a result too: the other cells must still be timed."""
    try:
        return {"section": section} | run(make(), rounds)
    except Exception as failure:
        return {"section": section, "name": name, "failed": {"all": reason(failure)}, "ratio": {}}


def report(result: dict) -> None:
    if result["ratio"]:
        print(line(result), flush=True)
    for name, why in result.get("failed", {}).items():
        print(f"{result['section']:9}{result['name']:26}{name} left out: {why}", flush=True)


def conclusion(figure: str, sums: dict[str, float]) -> str:
    text = f"{figure}: {sums['smallest']:.3f} to {sums['largest']:.3f}, geometric mean {sums['geometric_mean']:.3f}"
    return text + (f" (wanted: {' '.join(map(str, WANTED[figure]))}; {verdict(figure, sums)})" if figure in WANTED else "")


def verdict(figure: str, sums: dict[str, float]) -> str:
    """Whether every cell is as wanted."""
    relation, value = WANTED[figure]
    met = sums["largest"] <= value if relation == "at most" else sums["smallest"] >= value
    return "met" if met else "missed"


@torch.no_grad()
def main() -> int:
    options = parse(__doc__, SECTIONS)
    about = begin(options.rounds)
    results: list[dict] = []
    with torch.cuda.stream(torch.cuda.Stream()):  # the default stream cannot be captured
        for section in options.only or SECTIONS:
            for name, make in makers(section, options.quick):
                results.append(attempt(section, name, make, options.rounds))
                report(results[-1])
                write(options.json, about, results)
                torch.cuda.empty_cache()  # the memory of graphs, for the next cell
    for figure, sums in summaries(results).items():
        print(conclusion(figure, sums))
    return 1 if any("failed" in result for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
