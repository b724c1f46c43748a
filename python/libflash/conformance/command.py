"""The command: options, the run with its time limit, the report, the exit code."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import random
import sys
import time
from typing import Any

import libflash
from libflash.demo.progress import Progress

from . import report, summary
from .item import Item
from .items import chosen
from .outcome import FAILS, HOLDS, LOST, NOT_OFFERED, NOT_RUN, Outcome
from .rounding import DTYPES
from .target import Target
from .targets import ADAPTERS, make
from .targets.function import ARRAYS

DESCRIPTION = """The tests of libflash for any implementation of attention: results against a float64 oracle by a derived
tolerance, derivatives in forward mode, inputs with known answers, edge values, NaN and infinity, equal bits in equal calls, bad
input. What the target does not offer is not counted against it."""
TYPES = ("bf16", "fp16", "fp32", "fp64")
SECONDS = 240.0


def main(argv: list[str]) -> int:
    """0: everything that applies holds; 1: something fails; 2: bad options or a missing package; 130: interrupted."""
    try:
        return run(parse(argv))
    except KeyboardInterrupt:
        print("\nlibflash conformance: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of the output has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m libflash conformance", description=DESCRIPTION)
    add = parser.add_argument
    details = ", ".join(f"{name}[:{text}]" if text else name for name, (_, _, text) in ADAPTERS.items())
    add(
        "--target",
        required=True,
        metavar="NAME",
        help=f"{details}; or module:function (see libflash.conformance.targets.function)",
    )
    add("--device", default="cpu", metavar="NAME", help="cpu, cuda, cuda:1, ... (default: %(default)s)")
    add("--arrays", choices=ARRAYS, default="numpy", help="what a module:function takes (default: %(default)s)")
    add("--types", default=",".join(TYPES), metavar="LIST", help="storage types (default: %(default)s)")
    add("--only", default="", metavar="WORDS", help="only checks whose group and name contain each of these, separated by commas")
    add("--seconds", type=float, default=SECONDS, metavar="S", help="stop after this time (default: %(default)g)")
    add("--json", type=pathlib.Path, metavar="FILE", help="write everything there")
    add("--all", action="store_true", help="print every failure")
    options = parser.parse_args(argv)
    options.types = options.types.split(",")
    if unknown := [name for name in options.types if name not in TYPES]:
        parser.error(f"--types: {unknown[0]!r} is not among {', '.join(TYPES)}")
    if not options.seconds > 0:
        parser.error(f"--seconds must be positive, not {options.seconds:g}")
    return options


def run(options: argparse.Namespace) -> int:
    try:
        target = make(options.target, options.device, options.arrays)
    except ValueError as wrong:
        print(f"libflash conformance: {wrong}", file=sys.stderr)
        return 2
    items = chosen(options.types, [word for word in options.only.split(",") if word])
    if not items:
        print(f"libflash conformance: --only {options.only}: no check has these words", file=sys.stderr)
        return 2
    start = time.monotonic()
    outcomes = run_until(target, items, start + options.seconds)
    made = record(target, options, outcomes, time.monotonic() - start)
    if options.json is not None:
        options.json.write_text(json.dumps(made, indent=1) + "\n")
    print(report.text(made, everything=options.all))
    return 1 if made["failures"] else 0


def run_until(target: Target, items: list[Item], end: float) -> list[Outcome]:
    """Run the items until the time `end`, in a shuffled order that is always the same: a run that ends early has some items of
    every group.
    """
    order = list(items)
    random.Random(0).shuffle(order)
    progress = Progress(len(order))
    outcomes: list[Outcome] = []
    works = True
    for item in order:
        if not works or time.monotonic() >= end:
            outcomes.append(Outcome(item.group, item.name, NOT_RUN))
            continue
        progress.step(f"{item.group}: {item.name}")
        outcomes.append(item.outcome(target))
        works = target.works()
        if not works:  # a failure even if the check held: for bad input it expects an exception
            outcomes[-1].status = FAILS
            outcomes[-1].findings.append(LOST)
        progress.advance(1)
    progress.clear()
    return outcomes


def record(target: Target, options: argparse.Namespace, outcomes: list[Outcome], seconds: float) -> dict[str, Any]:
    """What --json writes."""
    ran = [outcome for outcome in outcomes if outcome.status != NOT_RUN]
    lost = [outcome.name for outcome in ran if LOST in outcome.findings]
    return {
        "conformance": 1,  # version of this format
        "target": target.name,
        "versions": dict(target.versions),
        "libflash": libflash.__version__,
        "python": platform.python_version(),
        "device": options.device,
        "types": [name for name in options.types if name in DTYPES],
        "types_left_out": [name for name in options.types if name not in DTYPES],
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "seconds": round(seconds, 1),
        "chosen": len(outcomes),
        "ran": len(ran),
        "held": sum(outcome.status == HOLDS for outcome in ran),
        "groups": summary.groups(outcomes),
        "tensors": summary.tensors(outcomes),
        "failures": summary.failures(outcomes),
        "lost_after": lost[0] if lost else None,  # the check after which the process could not use the GPU any more
        "not_offered": summary.not_offered([outcome for outcome in ran if outcome.status == NOT_OFFERED]),
    }
