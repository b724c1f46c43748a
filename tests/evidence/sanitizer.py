"""compute-sanitizer on the kernels: first on planted faults, which it must find, then on the library.

A clean report of a tool counts only if the tool reported its planted fault (canary.cu, in the kernel of that name) and nothing in
the correct kernel; memcheck must also report a write past a tensor in a kernel of libflash (sanitized.py --plant). On some
virtual machines the tools run but detect nothing; the result then says that they prove nothing.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from limited import Done, run_limited

FOLDER = pathlib.Path(__file__).resolve().parent
FOUND = 77  # exit code of the tool where the program itself succeeded and the tool found something
# The slow tool, racecheck, runs fewer kernels: one of the two 16-bit types, because both access the same words of shared memory,
# and only those head dims that differ in how warps share the work. Of statistics and tangents in float32 and float64 it runs one
# head dim.
FEWER_KERNELS = (
    r"_bf16_d(64|128|256|512|576x512)((_small)?_statistics)?$",
    r"^(forward|backward|decode)_sm80_f32_d(64|128|256)$",
    r"_tangent_sm80_(f32_d128|bf16_d512_small)$|_f32_d128_statistics$|_f64_d128(_statistics)?$",
)
FEWER = {"racecheck": ["--kernels", "|".join(FEWER_KERNELS)]}
PARTS = {"memcheck": 3, "racecheck": 4, "synccheck": 2}  # processes that share the kernels

# No leak check: the library allocates nothing on the device, and Python exits without freeing the memory of its frameworks.
# Failed calls of the CUDA API are not reported: frameworks probe for features, and the library reports its own failures.
TOOLS = {
    "memcheck": [
        "--padding",
        "4096",
        "--report-api-errors",
        "no",
    ],  # padding, so that an access just outside is not in the next allocation
    "racecheck": [],
    "synccheck": [],
}
CANARY = {"memcheck": "memory", "racecheck": "race", "synccheck": "barrier"}
PLANTED = {
    "memory": re.compile(r"Invalid __global__ write of size \d+.*?planted_write", re.S),
    "race": re.compile(r"Race reported between .*?planted_race", re.S),
    "barrier": re.compile(r"Barrier error detected.*?planted_barrier", re.S),
    "libflash": re.compile(r"Invalid __global__ write of size \d+.*?libflash::", re.S),
}
# Not "ERROR SUMMARY: 5 errors were not printed", which follows where there were many.
SUMMARY = re.compile(r"(?:RACECHECK|ERROR) SUMMARY: (\d+) (?:hazard|error)s?(?: displayed \(.*\))?\s*$", re.M)
KEPT_LINES = 12


@dataclasses.dataclass(frozen=True)
class Said:
    """The report of a tool; `found` is None if there is no summary."""

    found: int | None
    text: str


def said(text: str) -> Said:
    counts = [int(match.group(1)) for match in SUMMARY.finditer(text)]
    return Said(sum(counts) if counts else None, text)


def canary_verdict(tool: str, clean: Said, planted: Said) -> str:
    """Empty if the tool works here, otherwise why its report does not count."""
    what = CANARY[tool]
    if clean.found is None or planted.found is None:
        return f"{tool} came to no result: {complaint(planted.text if planted.found is None else clean.text)}"
    if clean.found:
        return f"{tool} reports the innocent kernel: {complaint(clean.text)}"
    if not planted.found or not PLANTED[what].search(planted.text):
        return f"{tool} does not report the planted {what}"
    return ""


def library_verdict(planted: Said) -> str:
    """Empty if memcheck reports the write planted in a kernel of the library, otherwise why its report does not count."""
    if planted.found is None:
        return f"memcheck came to no result: {complaint(planted.text)}"
    if not PLANTED["libflash"].search(planted.text):
        return "memcheck does not report the write beyond a tensor that was planted in a kernel of the library"
    return ""


def complaint(text: str) -> str:
    """The first line that names an error, else the first line."""
    lines = [line.removeprefix("=========").strip() for line in text.splitlines()]
    telling = [line for line in lines if re.search(r"error|not supported|invalid|race reported|refus|fail", line, re.I)]
    return (telling or [line for line in lines if line] or ["no output"])[0][:200]


def tool_result(tool: str, done: Done) -> dict[str, object]:
    """The tool's run on the problems: clean, errors found, or not finished."""
    summary = said(done.text)
    ran = re.search(r"ran: (\d+) problems, (\d+) kernels", done.text)
    result: dict[str, object] = {"found": summary.found, "seconds": round(done.seconds, 1)}
    if ran:
        result |= {"problems": int(ran.group(1)), "kernels": int(ran.group(2))}
    if done.code is None:
        return result | {"status": "timed out"}
    if summary.found == 0 and ran and done.code == 0:
        return result | {"status": "clean"}
    reports = [line for line in done.text.splitlines() if line.startswith("=========")] or done.text.splitlines()
    return result | {"status": "found" if summary.found else "failed", "says": reports[:KEPT_LINES]}


def find_tool() -> str | None:
    """On the PATH, or in nvcc's toolkit."""
    nvcc = shutil.which("nvcc")
    beside = [pathlib.Path(nvcc).resolve().parents[1] / "compute-sanitizer/compute-sanitizer"] if nvcc else []
    return shutil.which("compute-sanitizer") or next((str(path) for path in beside if path.exists()), None)


class Session:
    """Runs with one time limit for all of them."""

    def __init__(self, tool: str, limit: float, logs: pathlib.Path, environment: dict[str, str]) -> None:
        self.tool, self.end, self.logs = tool, time.monotonic() + limit, logs
        # Kernels are loaded at their first call: most of PyTorch's thousands of kernels are never called.
        self.environment = {**environment, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CUDA_MODULE_LOADING": "LAZY"}

    def run(self, name: str, command: list[str], library: pathlib.Path | None = None) -> Done:
        """`library`: the folder of the library; None: the installed one."""
        left = max(1.0, self.end - time.monotonic())
        path = os.pathsep.join(filter(None, [str(library or ""), self.environment.get("PYTHONPATH", "")]))
        return run_limited(command, left, self.logs / f"sanitizer-{name}.log", {**self.environment, "PYTHONPATH": path})

    def watch(self, tool: str, name: str, program: list[str], library: pathlib.Path | None = None) -> Done:
        options = ["--tool", tool, *TOOLS[tool], "--error-exitcode", str(FOUND), "--launch-timeout", "60"]
        return self.run(f"{tool}-{name}", [self.tool, *options, *program], library)


def stage(
    quick: bool,
    limit: float,
    logs: pathlib.Path,
    arch: int,
    environment: dict[str, str],
    racecheck_build: pathlib.Path | None = None,
) -> tuple[str, str, dict]:
    """(status, why, data). `racecheck_build`: the folder with the library that racecheck sees."""
    tool = find_tool()
    nvcc = shutil.which("nvcc")
    if tool is None or nvcc is None:
        return "failed", "compute-sanitizer or nvcc is not on the PATH", {}
    session, canary = Session(tool, limit, logs, environment), logs / "canary"
    built = session.run("nvcc", [nvcc, f"-arch=sm_{arch}", "-lineinfo", "-o", str(canary), str(FOLDER / "canary.cu")])
    if built.code != 0:
        return "failed", f"the canary does not compile: {complaint(built.text)}", {}
    proves = {}
    for name, fault in CANARY.items():
        clean, planted = (said(session.watch(name, what, [str(canary), what]).text) for what in ("clean", fault))
        proves[name] = canary_verdict(name, clean, planted)
    program = [sys.executable, str(FOLDER / "sanitized.py")]
    if not proves["memcheck"]:
        proves["memcheck"] = library_verdict(said(session.watch("memcheck", "plant", [*program, "--plant"]).text))
    working = [name for name in TOOLS if not proves[name]]  # a tool whose report does not count is not run
    return judged(proves, runs(session, working, program + ["--quick"] * quick, racecheck_build))


def runs(
    session: Session, tools: list[str], program: list[str], racecheck_build: pathlib.Path | None = None
) -> dict[str, dict[str, object]]:
    """The result of each tool. All parts of all tools run at the same time: they mostly keep processors busy."""
    library = {"racecheck": racecheck_build}

    def watch(name: str, part: int) -> Done:
        arguments = [*FEWER.get(name, []), "--part", f"{part}/{PARTS[name]}"]
        return session.watch(name, f"run-{part}", program + arguments, library.get(name))

    with ThreadPoolExecutor(sum(PARTS.values())) as pool:
        waiting = {name: [pool.submit(watch, name, part + 1) for part in range(PARTS[name])] for name in tools}
    found = {name: together([tool_result(name, one.result()) for one in parts]) for name, parts in waiting.items()}
    for name in tools:
        if library.get(name):
            found[name]["build"] = "LIBFLASH_RACECHECK"
    return found


def together(parts: list[dict[str, object]]) -> dict[str, object]:
    """The result of a tool from those of its parts. The first part that is not clean determines its status."""
    unclean = [part for part in parts if part["status"] != "clean"]
    counts = {name: sum(part.get(name) or 0 for part in parts) for name in ("found", "problems", "kernels")}  # type: ignore[misc]
    if any(part["found"] is None for part in parts):
        counts["found"] = None  # type: ignore[assignment]
    return {**(unclean or parts)[0], **counts, "seconds": max(part["seconds"] for part in parts)}  # type: ignore[type-var]


def judged(proves: dict[str, str], runs: dict[str, dict]) -> tuple[str, str, dict]:
    """Passed only if memcheck and racecheck work and no working tool found an error."""
    data = {
        "canary": {name: "found" if not why else f"proves nothing: {why}" for name, why in proves.items()},
        "runs": runs,
    }
    bad = [f"{name} {run['status']}" for name, run in runs.items() if run["status"] != "clean"]
    if bad:
        return "failed", ", ".join(bad), data
    blind = [why for name, why in proves.items() if why and name != "synccheck"]
    return ("unproven", "; ".join(blind), data) if blind else ("passed", "", data)
