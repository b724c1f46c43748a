"""The evidence of one GPU: tests, accuracy, repeats, sanitizer and benchmarks, into tests/evidence/<gpu>.json.

    python tests/evidence/collect.py                         everything, where the time suffices
    python tests/evidence/collect.py --quick                 a smaller set; the file says so, and CI does not accept it
    python tests/evidence/collect.py --only sanitizer        that stage again, into the existing file
    python tests/evidence/collect.py --out DIR_OR_FILE       another file; with --only, other stages are kept from it or from
                                                             the repository's
    python tests/evidence/collect.py --racecheck-build DIR   racecheck runs the library in DIR

libflash must be installed, built from these sources with all kernels of kernels.table. DIR has a build of the same sources for
racecheck (libflash/cuda/sm90/pipeline.cuh says why):

    pip install --no-deps --target DIR . -C cmake.define.LIBFLASH_RACECHECK=ON

Each stage has its time limit; one that fails is recorded and the next one runs. A call may take TOTAL seconds, fewer than all
stages need:

    one GPU        --only tests repeats sanitizer, then --only benchmark decode shapes accuracy
    two GPUs       --only tests benchmark decode shapes accuracy, then --only sanitizer repeats
    any number     also --only serving, which takes minutes
    several GPUs   also once for each of the stages that need them: context, context_all

The lanes of CHECKS share a GPU and run at the same time; with four GPUs the tests have two of them. The stages of TIMED have a
GPU to themselves: the second one, beside the others, or with one GPU the same one, after all others. The exit code is 0 if every
stage that ran passed. Logs go to build/evidence.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import pathlib
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import junit
import record
import sanitizer
import sources
from limited import Done, run_limited

ROOT = sources.ROOT
FOLDER = record.FOLDER
# Seconds.
LIMITS = {"tests": 520, "accuracy": 300, "repeats": 400, "sanitizer": 450, "benchmark": 320, "decode": 90, "shapes": 120}
LIMITS |= {"serving": 520, "context": 500, "context_all": 420}
QUICK_LIMITS = {"tests": 120, "accuracy": 60, "repeats": 60, "sanitizer": 150, "benchmark": 90, "decode": 40, "shapes": 50}
QUICK_LIMITS |= {"serving": 60, "context": 150, "context_all": 100}
CHECKS = (("tests",), ("sanitizer",), ("repeats",))  # lanes
TIMED = ("benchmark", "decode", "shapes", "serving")  # measure time: nothing else runs on their GPU
AFTER_TIMED = ("accuracy",)  # follows them, on the same GPU: the tests take longer than these stages
TOTAL = 540  # limit of all stages together
WORKER_GIB = 3.5  # memory for each process of the tests. With 40 processes, tests run out of memory on a GPU with 80 GB
# NumPy's threads in stages that run beside others. Exact results are products of small matrices; threads that wait for a
# processor make these many times slower.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
NO_GPU = "no CUDA device"  # the reason with which tests/cuda skips
WAITING = ("test_interop.py",)  # of tests/cuda: tests that measure times and need the machine alone
# Not run: these tests need no GPU, and take minutes of processor time.
ON_HOST = tuple(sorted(path.name for path in (ROOT / "tests/cuda").glob("test_on_host_*.py")))
# These tests need several GPUs. The stage `context` runs them.
ON_ALL = ("test_context_gpus.py", "test_jax_context_gpus.py", "test_two_devices.py")
ALSO_ON_ALL = ("test_jax_cuda.py::test_sharded_over_two_gpus",)  # where the tests see one GPU, it is skipped
TOKENS, QUICK_TOKENS = ("32768", "65536", "131072"), ("32768",)
# The stage `context_all`: arguments of each run of tests/benchmark/context_parallel.py.
ON_MANY = {
    "causal": ("--tokens", "65536", "131072", "--rounds", "2"),
    "longer": ("--tokens", "262144", "--rounds", "1", "--no-peers"),
    "full": ("--tokens", "131072", "--heads", "32/8", "--masks", "full", "--rounds", "1", "--no-peers"),
    "million": (
        "--tokens", "1048576", "--heads", "32/8", "--passes", "forward", "--schemes", "ring", "heads", "auto", "--rounds", "1",
        "--no-peers",
    ),
}  # fmt: skip
QUICK_ON_MANY = {"causal": ("--tokens", "65536", "--rounds", "1")}
TAIL = 15  # lines of a failed stage's log that are printed


class Run:
    """The settings of the stages."""

    def __init__(
        self,
        quick: bool,
        logs: pathlib.Path,
        arch: int,
        lane_gpus: tuple[int, ...] | None = None,
        gpus: int = 1,
        quiet: threading.Event | None = None,
        end: float | None = None,
        racecheck_build: pathlib.Path | None = None,
        gib: float = 80.0,
    ) -> None:
        """`lane_gpus`: the GPUs that the stages see; None: all. `gpus`: of the machine. `quiet`: set when no later stage needs
        the machine alone. `end`: of all stages, by time.monotonic(); None: TOTAL from now. `racecheck_build`: the folder of the
        library for racecheck; None: the installed one. `gib`: memory of a GPU.
        """
        self.gib = gib
        self.racecheck_build = racecheck_build
        self.quiet = quiet or threading.Event()
        self.quick, self.logs, self.arch, self.gpus = quick, logs, arch, gpus
        self.environment = {**os.environ}
        self.spread = len(lane_gpus or ()) > 1
        if lane_gpus is not None:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")  # may be set already
            names = visible.split(",") if visible else [str(gpu) for gpu in range(gpus)]
            self.environment["CUDA_VISIBLE_DEVICES"] = ",".join(names[gpu] for gpu in lane_gpus)
        self.end = self.stage_end = end or time.monotonic() + TOTAL

    def begin(self, stage: str) -> None:
        limit = (QUICK_LIMITS if self.quick else LIMITS)[stage]
        self.stage_end = min(time.monotonic() + limit, self.end)

    def left(self) -> float:
        """Seconds left for the stage."""
        return max(1.0, self.stage_end - time.monotonic())

    def program(self, log: str, command: list[str], **environment: str) -> Done:
        folders = [str(ROOT / "tests"), str(ROOT / "tests" / "support"), str(FOLDER), os.environ.get("PYTHONPATH", "")]
        path = os.pathsep.join(filter(None, folders))
        where = self.logs / f"{log}.log"
        done = run_limited(
            [sys.executable, *command], self.left(), where, {**self.environment, "PYTHONPATH": path, **environment}
        )
        if done.code != 0:
            print("\n".join(f"    {line[:200]}" for line in done.text.splitlines()[-TAIL:]))
        return done


def tests(run: Run) -> tuple[str, str, dict]:
    """First the tests that measure time, alone; then the others, in parallel if xdist is installed."""
    codes, reports = [], []
    shared_out = {"LIBFLASH_TEST_GPUS": run.environment["CUDA_VISIBLE_DEVICES"]} if run.spread else {}
    most = int(run.gib / WORKER_GIB) * (1 + run.spread)
    workers = min(most, os.cpu_count() or 1) if importlib.util.find_spec("xdist") else 1
    timed = [str(ROOT / "tests/cuda" / name) for name in WAITING]
    others = [str(ROOT / "tests/cuda"), *(f"--ignore={ROOT / 'tests/cuda' / name}" for name in WAITING + ON_HOST + ON_ALL)]
    for name, arguments in {"timed": timed, "others": others + ["-n", str(workers)] * (workers > 1)}.items():
        report = run.logs / f"tests-{name}.xml"
        report.unlink(missing_ok=True)
        command = ["-m", "pytest", "-q", "-p", "no:benchmark", "-p", "no:cacheprovider", f"--junit-xml={report}"]
        # The workers share the processors, so each uses one thread.
        environment = shared_out | ({"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"} if workers > 1 else {})
        codes.append(run.program(f"tests-{name}", [*command, *arguments], **environment).code)
        reports += [report.read_text()] if report.exists() else []
        run.quiet.set()
    return tests_verdict(codes, junit.counts(*reports) if len(reports) == len(codes) else {})


def tests_verdict(codes: list[int | None], data: dict) -> tuple[str, str, dict]:
    if None in codes:
        return "timed out", "", data
    if not data:
        return "failed", f"pytest ended with {codes} and not every report", data
    blind = sum(count for reason, count in data.get("skipped_because", {}).items() if NO_GPU in reason)
    if blind:
        return "failed", f"{blind} tests saw no GPU", data
    if any(codes) or data["failed"]:
        return "failed", f"{data['failed']} failed", data
    return ("passed", "", data) if data["passed"] else ("failed", "nothing ran", data)


def by_json(name: str, program: pathlib.Path, run: Run, *arguments: str, **environment: str) -> tuple[str, str, dict]:
    """A stage that runs a program, which writes its result as JSON to the file named after its arguments."""
    return by_command(name, [str(program), *arguments], run, *["--quick"] * run.quick, **environment)


def by_command(name: str, command: list[str], run: Run, *more: str, **environment: str) -> tuple[str, str, dict]:
    """As by_json, with any command; `more` comes after the name of the file."""
    out = run.logs / f"{name}.json"
    out.unlink(missing_ok=True)
    done = run.program(name, [*command, str(out), *more], **environment)
    data = json.loads(out.read_text()) if out.exists() else {}
    if done.code is None:
        return "timed out", "", data
    if done.code == 0 and data:
        data.pop("failures", None)
        return "passed", "", data
    return "failed", (data.get("failures") or [last_words(done.text)])[0].splitlines()[0], data


def last_words(text: str) -> str:
    """The line of the exception, if there is one, because other lines may follow it; else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (raised or lines or ["no output"])[-1][:300]


def accuracy(run: Run) -> tuple[str, str, dict]:
    return by_json("accuracy", FOLDER / "accuracy.py", run, **ONE_THREAD)


def repeats(run: Run) -> tuple[str, str, dict]:
    return by_json("repeats", FOLDER / "repeats.py", run, **ONE_THREAD)


def sanitize(run: Run) -> tuple[str, str, dict]:
    return sanitizer.stage(run.quick, run.left(), run.logs, run.arch, run.environment | ONE_THREAD, run.racecheck_build)


def benchmark(run: Run) -> tuple[str, str, dict]:
    """Device time of every cell, then host time per call; a failure of the latter does not fail the stage."""
    folder = ROOT / "tests/benchmark"
    status, why, data = by_json("benchmark", folder / "gpu_attention.py", run, "--rounds", "3", "--json")
    for name, key in (("host_cost", "host_microseconds"), ("autograd_cost", "autograd_microseconds")):
        made = run.logs / f"{name}.json"
        made.unlink(missing_ok=True)
        if run.program(name, [str(folder / f"{name}.py"), "--device", "cuda", "--json", str(made)]).code == 0:
            data[key] = json.loads(made.read_text())
    return status, why, data


def decode(run: Run) -> tuple[str, str, dict]:
    return by_json("decode", ROOT / "tests/benchmark/gpu_decode.py", run, "--rounds", "3", "--json")


def shapes(run: Run) -> tuple[str, str, dict]:
    return by_json("shapes", ROOT / "tests/benchmark/gpu_shapes.py", run, "--json")


def serving(run: Run) -> tuple[str, str, dict]:
    some = ("--only", "tree,append", "--rounds", "1") if run.quick else ()
    return by_command("serving", [str(ROOT / "tests/benchmark/gpu_serving.py"), *some, "--json"], run)


def context(run: Run) -> tuple[str, str, dict]:
    """Context parallel attention on two GPUs: its tests and those of several devices, then its benchmark."""
    command = ["-m", "pytest", "-q", "-p", "no:benchmark", "-p", "no:cacheprovider"]
    command += [str(ROOT / "tests/cuda" / name) for name in ON_ALL + ALSO_ON_ALL]
    if (done := run.program("context-tests", command)).code != 0:
        return ("timed out" if done.code is None else "failed"), last_words(done.text), {}
    tokens = QUICK_TOKENS if run.quick else TOKENS
    return by_command("context", context_program(2, "--rounds", "3", "--tokens", *tokens), run)


def context_all(run: Run) -> tuple[str, str, dict]:
    """The same benchmark on all GPUs; the cells of all runs up to one that fails."""
    made: dict = {}
    for name, arguments in (QUICK_ON_MANY if run.quick else ON_MANY).items():
        status, why, data = by_command(f"context-{name}", context_program(run.gpus, *arguments), run)
        if status != "passed":
            return status, f"{name}: {why}", made
        rounds = max(data["setting"]["rounds"], made.get("setting", data["setting"])["rounds"])
        made = {"setting": data["setting"] | {"rounds": rounds}, "cells": made.get("cells", []) + data["cells"]}
    return "passed", "", made


def context_program(ranks: int, *arguments: str) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*launcher, str(ROOT / "tests/benchmark/context_parallel.py"), *arguments, "--json"]


STAGES = {
    "tests": tests,
    "accuracy": accuracy,
    "repeats": repeats,
    "benchmark": benchmark,
    "decode": decode,
    "shapes": shapes,
    "sanitizer": sanitize,
    "serving": serving,
    "context": context,
    "context_all": context_all,
}


def phases(names: list[str], gpus: int) -> list[list[tuple[list[str], tuple[int, ...] | None]]]:
    """Phases that run one after the other. Each is a list of lanes that run at the same time: stages, and the GPUs that they see
    (None: all).
    """

    def among(some: tuple[str, ...]) -> list[str]:
        return [name for name in some if name in names]

    if gpus > 1:
        several = among(record.OF_SEVERAL[: 2 if gpus > 2 else 1])
        where = ((0, 3), (2,), (2,)) if gpus >= 4 else ((0,), (0,), (0,) if among(TIMED + AFTER_TIMED) else (1,))
        return [
            [*((among(lane), gpu) for lane, gpu in zip(CHECKS, where, strict=True)), (among(TIMED + AFTER_TIMED), (1,))],
            [(several, None)],
        ]
    return [[(among(lane), None) for lane in CHECKS], [(among(TIMED + AFTER_TIMED), None)]]


def target(out: pathlib.Path | None, gpu: str) -> pathlib.Path:
    name = record.file_name(gpu)
    if out is None:
        return FOLDER / name
    return out if out.suffix == ".json" else out / name


def earlier(path: pathlib.Path, wanted: list[str]) -> dict | None:
    """The file to merge into; a run of all stages starts a new file."""
    if set(wanted) == set(STAGES):
        return None
    for known in (path, FOLDER / path.name):
        if known.exists():
            return json.loads(known.read_text())
    return None


class Collection:
    """The evidence file during a run; stages of several lanes write to it."""

    def __init__(self, path: pathlib.Path, machine: dict, quick: bool, wanted: list[str]) -> None:
        self.path, self.writing = path, threading.Lock()
        self.new: dict = {**machine, "sources": sources.digest(), "quick": quick, "stages": {}}
        self.old = earlier(path, wanted)
        try:
            record.merged(self.old, self.new)
        except ValueError as wrong:
            print(f"{path.name} is replaced: {wrong}", file=sys.stderr)
            self.old = None

    def write(self) -> None:
        record.write(self.path, record.merged(self.old, self.new))

    def add(self, name: str, outcome: tuple[str, str, dict], seconds: float) -> None:
        status, why, data = outcome
        about = {"status": status, "seconds": seconds, "date": datetime.date.today().isoformat()}
        about["driver"] = self.new["setting"]["driver"]
        with self.writing:
            self.new["stages"][name] = about | ({"why": why} if why else {})
            self.new[name] = data
            print(f"{name:10} {status:10} {seconds:6.1f} s  {why}", flush=True)
            self.write()  # after each stage, so that a later failure does not lose it

    def run_stages(self, names: list[str], run: Run) -> None:
        if "tests" not in names:
            run.quiet.wait()
        for name in names:
            start = time.monotonic()
            run.begin(name)
            try:
                outcome = STAGES[name](run)
            except (OSError, ValueError) as wrong:  # for example incomplete JSON
                outcome = "failed", f"{type(wrong).__name__}: {wrong}"[:300], {}
            run.quiet.set()  # also if the tests failed
            self.add(name, outcome, round(time.monotonic() - start, 1))

    def end(self) -> int:
        """The exit code."""
        if sources.digest() != self.new["sources"]:
            for stage in self.new["stages"].values():
                stage |= {"status": "failed", "why": "the sources changed meanwhile"}
            self.write()
            print("the sources changed meanwhile: this is no evidence", file=sys.stderr)
        print(f"{self.path}: {self.path.stat().st_size} bytes, sources {self.new['sources'][:12]}")
        return 0 if all(stage["status"] == "passed" for stage in self.new["stages"].values()) else 1


def collect(options: argparse.Namespace) -> int:
    described = run_limited([sys.executable, str(FOLDER / "machine.py")], 60, options.logs / "machine.log")
    if described.code != 0:
        print(f"cannot measure here: {described.text.strip()[-2000:]}", file=sys.stderr)
        return 2
    machine = json.loads(described.text.strip().splitlines()[-1])
    gpus, gib = machine.pop("gpus", 1), machine.pop("gib", 80.0)
    wanted = [name for name in STAGES if name in (options.only or STAGES)]
    collection = Collection(target(options.out, machine["gpu"]), machine, options.quick, wanted)
    arch, end = machine["setting"]["arch"], time.monotonic() + TOTAL  # of all phases together
    for phase in phases(wanted, gpus):
        quiet = threading.Event()
        if not any("tests" in names for names, _ in phase):
            quiet.set()
        with ThreadPoolExecutor(len(phase)) as pool:
            settings = {"gpus": gpus, "quiet": quiet, "end": end, "racecheck_build": options.racecheck_build, "gib": gib}
            begun = [
                pool.submit(collection.run_stages, names, Run(options.quick, options.logs, arch, lane_gpus, **settings))
                for names, lane_gpus in phase
            ]
            for lane in begun:
                lane.result()
    return collection.end()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller set, about a minute: a look, not evidence")
    parser.add_argument("--only", nargs="+", choices=list(STAGES), metavar="STAGE", help=f"some of: {', '.join(STAGES)}")
    parser.add_argument("--out", type=pathlib.Path, metavar="PATH", help="the file to write (*.json), or its folder")
    parser.add_argument("--racecheck-build", type=pathlib.Path, metavar="DIR", help="a library with LIBFLASH_RACECHECK")
    parser.add_argument("--logs", type=pathlib.Path, default=ROOT / "build/evidence", help="default: build/evidence")
    options = parser.parse_args()
    options.logs = options.logs.resolve()
    options.logs.mkdir(parents=True, exist_ok=True)
    return collect(options)


if __name__ == "__main__":
    sys.exit(main())
