"""The texts before and after the table: what runs and why, and what the figures mean."""

from __future__ import annotations

import textwrap

import numpy as np

import libflash
from libflash.demo.ask import Answer
from libflash.demo.measure import GUESSES, Measurement
from libflash.demo.model import HEAD_DIM, HEADS, SHARPNESS
from libflash.demo.table import RULE, Comparison, bytes_text, measurements, time_text
from libflash.demo.text import EARLIER_TOPIC, LATER_TOPIC, Text

COLUMN = 12  # as in libflash.explain
MOST_NAMES = 5  # of kernels in a list
MODEL = f"""one causal attention layer, {HEADS} heads of {HEAD_DIM}, float32, nothing trained: each word looks for earlier places
with the same last words, and returns what came next there"""
COLUMNS = f"""time: of a call, the lowest median of some rounds. memory: growth of the process's peak during a call, result
included. error: largest difference from float64. guessed: next words guessed right, always the last {GUESSES} of the text"""


def introduction(text: Text, longest: int, threads: int) -> str:
    found = libflash.info()
    size = f"{len(text.topics)} topics of pydoc_data, {text.characters:,} characters, {len(text.ids):,} words"
    backend = f"cpu, because NumPy's arrays are in host memory; instruction set {found['cpu']['isa']}. CUDA: {found['cuda']}"
    parts = [
        f"libflash {libflash.__version__}: exact attention over the text of Python's own documentation\n",
        item("text", size),
        item("model", MODEL),
        item("threads", f"{threads}, for both methods; NumPy {np.__version__}"),
        item("backend", backend),
        *choice(longest),
    ]
    return "\n".join(parts) + "\n"


def choice(longest: int) -> list[str]:
    """libflash.explain() for the longest text, from the kernel on."""
    x = np.broadcast_to(np.zeros(HEAD_DIM, np.float32), (1, longest, HEADS, HEAD_DIM))  # the shape without the memory
    lines = libflash.explain(x, x, x, causal=True, softmax_scale=SHARPNESS).splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith("kernel")), 0)
    found: list[tuple[str, str, list[str]]] = []  # kernels: on the lines below "not", which have no name
    for line in lines[start:]:
        name, text = line[:COLUMN].strip(), line[COLUMN:].strip()
        if name:
            found.append((name, text, []))
        elif text:
            found[-1][2].extend(text.replace(",", " ").split())
    return [item(name, text + shortened(kernels)) for name, text, kernels in found if name != "threads"]


def shortened(kernels: list[str]) -> str:
    if not kernels:
        return ""
    return ": " + (", ".join(kernels) if len(kernels) <= MOST_NAMES else f"{kernels[0]} and {len(kernels) - 1} others")


def item(name: str, text: str) -> str:
    """A name in the left column and its wrapped text in the right one."""
    margin = " " * COLUMN
    return textwrap.fill(" ".join(text.split()), len(RULE), initial_indent=f"{name:<{COLUMN}}", subsequent_indent=margin)


def conclusion(comparisons: list[Comparison], distance: int | None) -> str:
    parts = [item("columns", COLUMNS), item("numbers", numbers(comparisons)), *gains(comparisons)]
    if distance is not None:
        parts.append(item("meaning", meaning(comparisons, distance)))
    return "\n".join(parts)


def numbers(comparisons: list[Comparison]) -> str:
    shares = [m.error_of_bound for m in measurements(comparisons, "libflash")]
    if not shares:
        return "no result of libflash to compare"
    if not max(shares) <= 1:
        return f"WRONG: libflash differs from float64 by up to {max(shares):.3g} times what float32 rounding explains"
    return f"""the same: every checked value of libflash differs from the float64 result by no more than float32 rounding
        explains (at most {100 * max(shares):.2g} % of that bound)"""


def gains(comparisons: list[Comparison]) -> list[str]:
    """Time and memory at the longest text that both methods ran, and the growth of memory to there."""
    both = [
        (r.standard, r.libflash)
        for r in comparisons
        if isinstance(r.standard, Measurement) and isinstance(r.libflash, Measurement)
    ]
    if not both:
        return []
    standard, own = both[-1]
    where = f"at {own.seqlen} words"
    faster = times(standard.seconds / own.seconds)
    size = f"{bytes_text(own.memory_bytes)} for {bytes_text(standard.memory_bytes)}"
    if own.memory_bytes > 0:
        size += f": {standard.memory_bytes / own.memory_bytes:.0f} times less"
    if len(both) > 1 and min(m.memory_bytes for m in both[-2]) > 0:
        grown = [now.memory_bytes / before.memory_bytes for before, now in zip(both[-2], both[-1], strict=True)]
        half = f"what {both[-2][0].seqlen} words take"
        size += f". Standard attention takes {grown[0]:.1f} times {half}, libflash {grown[1]:.1f} times"
    return [
        item("time", f"{where} {time_text(own.seconds)} for {time_text(standard.seconds)}: {faster}"),
        item("memory", f"{where} {size}"),
    ]


def times(ratio: float) -> str:
    return f"{ratio:.1f} times faster" if ratio >= 1 else f"{1 / ratio:.1f} times slower"


def meaning(comparisons: list[Comparison], distance: int) -> str:
    """How many words are guessed right with a shorter and with a longer context."""
    found = measurements(comparisons, "libflash")
    short = [m for m in found if m.seqlen < distance]
    long = [m for m in found if m.seqlen > distance]
    repeated = f"the passage at the end, from {LATER_TOPIC!r}, also occurs {distance:,} words earlier, in {EARLIER_TOPIC!r}"
    if not (short and long):
        return f"{repeated}; no text above is that long" if short else repeated
    few, many = short[-1], long[0]
    return f"""{repeated}. With a context of {few.seqlen} words {100 * few.guessed:.0f} % of the next words are guessed right,
        with {many.seqlen} words {100 * many.guessed:.0f} %"""


def quotation(phrase: str, answer: Answer) -> str:
    text = f'"{phrase}" ...{answer.words}'
    source = f"(read in {answer.topic!r}; {time_text(answer.seconds_per_word)} a word)"
    return textwrap.indent("\n".join([*textwrap.wrap(text, len(RULE) - 4), source]), "  ")


def failures(comparisons: list[Comparison], answers: list[Answer]) -> list[str]:
    """What went wrong, one line for each failure."""
    failed = [
        f"{r.seqlen} words: {r.libflash}" for r in comparisons if isinstance(r.libflash, str) and r.libflash.startswith("failed")
    ]
    shares = [(f"{m.seqlen} words", m.error_of_bound) for m in measurements(comparisons, "libflash")]
    shares += [("decode", answer.error_of_bound) for answer in answers]
    return failed + [
        f"{where}: {share:.3g} times the rounding bound away from float64" for where, share in shares if not share <= 1
    ]
