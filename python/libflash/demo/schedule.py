"""The lengths that are measured. A measurement that takes too much memory or time is skipped."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from libflash.demo import table
from libflash.demo.measure import Measurement, MeasurementFailed, measure_apart
from libflash.demo.memory import available_bytes
from libflash.demo.model import HEADS
from libflash.demo.progress import Progress
from libflash.demo.standard import scores_bytes
from libflash.demo.table import Comparison, bytes_text, time_text

SHORTEST, LONGEST, QUICK_LONGEST = 512, 32768, 4096
SCORES_LIMIT = 1_500_000_000  # bytes; standard attention does not run for more
SECONDS_LIMIT = 12.0  # for a call


def lengths(text_length: int, longest: int | None, quick: bool) -> list[int]:
    """Powers of two times the shortest, and last the requested length, whatever it is."""
    last = min(longest or LONGEST, text_length, QUICK_LONGEST if quick else sys.maxsize)
    doubling = [SHORTEST << i for i in range(64) if SHORTEST << i <= last]
    return doubling if longest is None or doubling[-1] == last else [*doubling, last]


def comparisons_of(seqlens: list[int], threads: int, patient: bool) -> Iterator[Comparison]:
    """Measure, and print each comparison at once. `patient`: also what takes long."""
    progress = Progress(sum(2 * float(n) ** 2 for n in seqlens))
    progress.clear()
    print(table.heading(), flush=True)
    done: dict[str, Measurement] = {}
    for seqlen in seqlens:
        results: dict[str, Measurement | str] = {}
        for method in ("standard", "libflash"):
            progress.step(f"{method}, {seqlen} words")
            reason = reason_to_skip(method, seqlen, done.get(method), patient)
            results[method] = reason or attempt(method, seqlen, threads, progress)
            result = results[method]
            if isinstance(result, Measurement):
                done[method] = result
            progress.advance(float(seqlen) ** 2)
        comparison = Comparison(seqlen, results["standard"], results["libflash"])
        progress.clear()
        print(table.comparison_line(comparison), flush=True)
        yield comparison


def reason_to_skip(method: str, seqlen: int, last: Measurement | None, patient: bool) -> str:
    """Why this measurement is skipped, from the time of the length before; "" if it is not."""
    if method == "standard" and scores_bytes(seqlen, HEADS) > scores_limit():
        return f"scores: {bytes_text(scores_bytes(seqlen, HEADS))}"
    if last is not None and not patient:
        expected = last.seconds * (seqlen / last.seqlen) ** 2
        if expected > SECONDS_LIMIT:
            return f"would take {time_text(expected)}"
    return ""


def scores_limit() -> float:
    """Bytes: at most half of the available memory."""
    available = available_bytes()
    return SCORES_LIMIT if available is None else min(SCORES_LIMIT, available / 2)


def attempt(method: str, seqlen: int, threads: int, progress: Progress) -> Measurement | str:
    try:
        return measure_apart(method, seqlen, threads, progress.draw)
    except MeasurementFailed as failed:
        return f"failed: {failed}"
