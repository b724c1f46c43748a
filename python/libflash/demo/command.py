"""The command: options, the order of the steps, the exit code."""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
from collections.abc import Callable

import libflash
from libflash.demo import chart, report, schedule
from libflash.demo.ask import Answer, Reader
from libflash.demo.model import Model
from libflash.demo.progress import Progress
from libflash.demo.table import Comparison
from libflash.demo.text import Text, load, passage

DESCRIPTION = """Exact attention over the text of Python's own documentation: libflash compared with standard attention
in NumPy: results, time and memory for growing lengths of the text, and what a longer context gains."""

QUESTIONS = ("The try statement specifies exception handlers", "Numbers are immutable; once created")
ANSWER_WORDS = 24


def main(argv: list[str]) -> int:
    options = parse(argv)
    try:
        return run(options)
    except KeyboardInterrupt:
        print("\nlibflash demo: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m libflash demo", description=DESCRIPTION)
    add = parser.add_argument
    add("--out", type=pathlib.Path, default="libflash-demo.png", metavar="FILE.png", help="the chart (default: %(default)s)")
    add("--max-seqlen", type=at_least(schedule.SHORTEST), metavar="N",
        help=f"longest text, in words (default: {schedule.LONGEST}, or what takes seconds)")  # fmt: skip
    add("--threads", type=at_least(1), default=processors(), metavar="N", help="for both methods (default: %(default)s)")
    add("--ask", action="append", metavar="PHRASE", help="a phrase to continue, instead of the two that are built in")
    add("--quick", action="store_true", help=f"no more than {schedule.QUICK_LONGEST} words: a few seconds")
    options = parser.parse_args(argv)
    folder = options.out.resolve().parent
    if options.out.is_dir() or not (folder.is_dir() and os.access(folder, os.W_OK)):
        parser.error(f"--out: cannot write a file {options.out}")
    return options


def at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number, {least} or more, not {text!r}")
        return int(text)

    return number


def processors() -> int:
    """The number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run(options: argparse.Namespace) -> int:
    libflash.set_num_threads(options.threads)
    text = load()
    end, distance = passage(text)
    lengths = schedule.lengths(end, options.max_seqlen, options.quick)
    print(report.introduction(text, lengths[-1], options.threads), flush=True)
    comparisons = list(schedule.comparisons_of(lengths, options.threads, patient=options.max_seqlen is not None))
    print("\n" + report.conclusion(comparisons, distance), flush=True)
    model = Model(len(text.vocabulary))
    answers = continue_phrases(text, model, options.ask or list(QUESTIONS))
    draw(comparisons, distance, options.out)
    return verdict(comparisons, answers)


def continue_phrases(text: Text, model: Model, phrases: list[str]) -> list[Answer]:
    """Continue each phrase, with the whole text in the cache."""
    progress = Progress(len(phrases) + 1)
    progress.step(f"reading all {len(text.ids):,} words")
    reader = Reader(text, model, spare=1024)
    progress.clear()
    print(f"\nAll {len(text.ids):,} words in a cache (libflash.decode); a phrase, and how the text goes on:")
    answers = []
    for phrase in phrases:
        progress.advance(1)
        progress.step("continuing a phrase")
        try:
            answer = reader.ask(phrase, ANSWER_WORDS)
        except ValueError as error:
            progress.clear()
            print(f"\n  {error}")
            continue
        progress.clear()
        print("\n" + report.quotation(phrase, answer), flush=True)
        answers.append(answer)
    return answers


def draw(comparisons: list[Comparison], distance: int | None, path: pathlib.Path) -> None:
    try:
        chart.save(comparisons, distance, "Exact attention over the text of Python's documentation", path)
    except ModuleNotFoundError as missing:
        print(f"\nchart: not drawn, {missing.name} is not installed; the table above has all of its figures")
    else:
        print(f"\nchart: {path}")


def verdict(comparisons: list[Comparison], answers: list[Answer]) -> int:
    """Print what went wrong to stderr. Returns the exit code."""
    wrong = report.failures(comparisons, answers)
    for failure in wrong:
        print(f"libflash demo: {failure}", file=sys.stderr)
    return 1 if wrong else 0
