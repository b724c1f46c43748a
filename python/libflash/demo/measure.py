"""One measurement: one kind of attention over the last n words of the passage, in a process of its own.

So its peak memory is its own, both methods get the same number of threads, and a machine that runs out of memory loses a row
of the table and not the demo.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

import libflash
from libflash.demo.memory import peak_growth
from libflash.demo.model import SHARPNESS, Model
from libflash.demo.standard import exact_rows, standard_attention
from libflash.demo.text import load, passage

METHODS = ("standard", "libflash")
GUESSES = 256  # at the end of the passage: the same words whatever the length
CHECKED_ROWS = 64
REPEAT_SECONDS, MAX_REPEATS, ROUNDS = 0.4, 20, 3
THREAD_VARIABLES = ("LIBFLASH_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclasses.dataclass(frozen=True)
class Measurement:
    method: str
    seqlen: int
    seconds: float  # of a call: see median_seconds()
    memory_bytes: int  # growth of the peak during a call, the result included
    error: float  # largest difference from float64 over the checked rows
    error_of_bound: float  # largest difference divided by what float32 rounding explains; above 1 the numbers are wrong
    guessed: float  # share of next words guessed right


class MeasurementFailed(Exception):
    """The process ended without a result; the text says how."""


def measure(method: str, seqlen: int) -> Measurement:
    """Measure here, in this process."""
    text = load()
    end, _ = passage(text)
    ids = text.ids[end - seqlen : end]
    model = Model(len(text.vocabulary))
    q, k, v = model.queries_keys_values(ids)
    attend = attention_call(method)
    attend(q[:, :64], k[:, :64], v[:, :64])  # loads libraries, which would count as memory of the call
    start = time.perf_counter()
    out, memory_bytes = peak_growth(lambda: attend(q, k, v))
    first = time.perf_counter() - start
    seconds = median_seconds(lambda: attend(q, k, v), first)
    error, error_of_bound = compare(out[0], q[0], k[0], v[0])
    guesses = model.next_word(out[0, -GUESSES - 1 : -1])
    guessed = float((guesses == ids[-len(guesses) :]).mean())
    return Measurement(method, seqlen, seconds, memory_bytes, error, error_of_bound, guessed)


def attention_call(method: str) -> Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]:
    if method == "standard":
        return lambda q, k, v: standard_attention(q, k, v, SHARPNESS)
    return lambda q, k, v: libflash.attention(q, k, v, causal=True, softmax_scale=SHARPNESS)


def median_seconds(call: Callable[[], object], first: float) -> float:
    """Seconds of a call: the lowest median of some rounds of calls, because in the first a library may still start its threads. A
    long call has one round, or none where there is no time for it."""
    if first > 4 * REPEAT_SECONDS:
        return first
    return min(round_of(call) for _ in range(ROUNDS if first < REPEAT_SECONDS else 1))


def round_of(call: Callable[[], object]) -> float:
    """The median of some calls."""
    times: list[float] = []
    while sum(times) < REPEAT_SECONDS and len(times) < MAX_REPEATS:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def compare(out: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[float, float]:
    """(largest difference from float64, the same as a share of the bound) over rows spread evenly from first to last."""
    positions = np.unique(np.linspace(0, len(q) - 1, CHECKED_ROWS).astype(np.int64))
    truth, bound = exact_rows(q[positions], k, v, SHARPNESS, positions)
    difference = np.abs(out[positions] - truth)
    if not np.isfinite(difference).all():
        return float("inf"), float("inf")
    return float(difference.max()), float((difference / bound).max())


def measure_apart(method: str, seqlen: int, threads: int, waiting: Callable[[], None]) -> Measurement:
    """Measure in a fresh process; `waiting` is called a few times a second meanwhile."""
    environment = os.environ | dict.fromkeys(THREAD_VARIABLES, str(threads))
    # This very libflash, also when it is not an installed one.
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-c", "from libflash.demo import measure; measure.child()", method, str(seqlen)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as child:
        try:
            output, complaint = wait(child, waiting)
        except BaseException:  # Ctrl-C too: leave nobody behind
            child.kill()
            raise
    if child.returncode != 0:
        raise MeasurementFailed(failure(child.returncode, complaint))
    return Measurement(**json.loads(output))


def wait(child: subprocess.Popen[str], waiting: Callable[[], None]) -> tuple[str, str]:
    while True:
        try:
            return child.communicate(timeout=0.2)
        except subprocess.TimeoutExpired:
            waiting()


def failure(returncode: int, complaint: str) -> str:
    lines = complaint.strip().splitlines()
    if lines and "MemoryError" in lines[-1]:
        return "out of memory"
    if returncode < 0 and not lines:
        return f"ended by signal {-returncode}: out of memory?"
    return lines[-1] if lines else f"exit code {returncode}"


def child() -> None:
    """What the process of its own runs: method and length from the command line, the measurement as JSON on stdout."""
    try:
        print(json.dumps(dataclasses.asdict(measure(sys.argv[1], int(sys.argv[2])))))
    except KeyboardInterrupt:
        sys.exit(130)
