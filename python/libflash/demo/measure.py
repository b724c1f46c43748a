"""One measurement: one method over the last n words of the passage, in a process of its own.

The peak memory of the process is then that of the method, both methods have the same number of threads, and the demo goes on if
the process runs out of memory.
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
GUESSES = 256  # at the end of the passage: the same words for every length
WARM_UP_WORDS = 256  # enough for the products on which NumPy's BLAS uses all of its threads
CHECKED_ROWS = 64
WARM_UP_SECONDS = 0.1
REPEAT_SECONDS, MAX_REPEATS, ROUNDS = 0.4, 20, 3
THREAD_VARIABLES = ("LIBFLASH_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclasses.dataclass(frozen=True)
class Measurement:
    method: str
    seqlen: int
    seconds: float  # of a call: see median_seconds()
    memory_bytes: int  # growth of the peak during a call, the result included
    error: float  # largest difference from float64 over the checked rows
    error_of_bound: float  # largest ratio of difference and rounding bound of float32; above 1 the result is wrong
    guessed: float  # share of next words guessed right


class MeasurementFailed(Exception):
    """The process ended without a result; the text says why."""


def measure(method: str, seqlen: int) -> Measurement:
    """Measure in this process."""
    text = load()
    end, _ = passage(text)
    ids = text.ids[end - seqlen : end]
    model = Model(len(text.vocabulary))
    q, k, v = model.queries_keys_values(ids)
    attend = attention_call(method)
    warm_up(lambda: attend(*(x[:, :WARM_UP_WORDS] for x in (q, k, v))))
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


def warm_up(call: Callable[[], object]) -> None:
    """Repeat a call until libraries are loaded, and have started their threads and allocated their buffers."""
    start = time.perf_counter()
    call()
    while time.perf_counter() - start < WARM_UP_SECONDS:
        call()


def median_seconds(call: Callable[[], object], first: float) -> float:
    """Seconds of a call: the lowest median of some rounds of calls, since other processes may disturb one of them.

    A long call has one round, or none if there is no time for it: then the result is `first`, the seconds of an earlier call.
    """
    if first > 4 * REPEAT_SECONDS:
        return first
    warm_up(call)
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
    """(largest difference from float64, the same divided by the bound) over rows at equal distances from first to last."""
    positions = np.unique(np.linspace(0, len(q) - 1, CHECKED_ROWS).astype(np.int64))
    exact, bound = exact_rows(q[positions], k, v, SHARPNESS, positions)
    difference = np.abs(out[positions] - exact)
    if not np.isfinite(difference).all():
        return float("inf"), float("inf")
    return float(difference.max()), float((difference / bound).max())


def measure_apart(method: str, seqlen: int, threads: int, waiting: Callable[[], None]) -> Measurement:
    """Measure in a fresh process; `waiting` is called a few times a second meanwhile."""
    environment = os.environ | dict.fromkeys(THREAD_VARIABLES, str(threads))
    # The same libflash, also if it is not installed.
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-c", "from libflash.demo import measure; measure.child()", method, str(seqlen)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as child:
        try:
            output, errors = wait(child, waiting)
        except BaseException:  # also Ctrl-C: the process must end
            child.kill()
            raise
    if child.returncode != 0:
        raise MeasurementFailed(failure(child.returncode, errors))
    return Measurement(**json.loads(output))


def wait(child: subprocess.Popen[str], waiting: Callable[[], None]) -> tuple[str, str]:
    while True:
        try:
            return child.communicate(timeout=0.2)
        except subprocess.TimeoutExpired:
            waiting()


def failure(returncode: int, errors: str) -> str:
    lines = errors.strip().splitlines()
    if lines and "MemoryError" in lines[-1]:
        return "out of memory"
    if returncode < 0 and not lines:
        return f"ended by signal {-returncode}: out of memory?"
    return lines[-1] if lines else f"exit code {returncode}"


def child() -> None:
    """Run in the process of a measurement: method and length from the command line, the measurement as JSON on stdout."""
    try:
        print(json.dumps(dataclasses.asdict(measure(sys.argv[1], int(sys.argv[2])))))
    except KeyboardInterrupt:
        sys.exit(130)
