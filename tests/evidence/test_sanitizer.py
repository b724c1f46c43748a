"""The verdict about compute-sanitizer, where it works and where it does not."""

from __future__ import annotations

import os
import pathlib
import re
import sys

import limited
import pytest
import sanitizer

CLEAN = "========= COMPUTE-SANITIZER\ncanary clean: no error\n========= ERROR SUMMARY: 0 errors\n"
MEMORY = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at planted_write(int *)+0x70 in canary.cu:22
=========     by thread (127,0,0) in block (0,0,0)
=========     Access at 0x7f6510c00200 is out of bounds
canary memory: unspecified launch failure
========= Target application returned an error
========= ERROR SUMMARY: 1 error
"""
RACE_CLEAN = CLEAN.replace("ERROR SUMMARY: 0 errors", "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)")
RACE = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at planted_race(int *)+0x90 in canary.cu:26
=========     and Read access at planted_race(int *)+0x100 in canary.cu:27 [384 hazards]
=========
canary race: no error
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
BARRIER = """========= COMPUTE-SANITIZER
========= Barrier error detected. Invalid arguments.
=========     at planted_barrier(int *)+0xb0 in canary.cu:32
========= ERROR SUMMARY: 16 errors
========= ERROR SUMMARY: 5 errors were not printed. Use --print-limit option to adjust the number of printed errors
"""
REFUSED = """========= COMPUTE-SANITIZER
========= Error: Device not supported. Please refer to the "Supported Devices" section of the sanitizer documentation
=========
canary memory: unknown error
"""
LIBRARY = MEMORY.replace(
    "planted_write(int *)", "void libflash::cuda::sm80::forward_kernel<forward_sm80_bf16_d64, (bool)0>(Params)"
)


def test_summaries_are_read() -> None:
    texts = (CLEAN, MEMORY, RACE_CLEAN, RACE, BARRIER, REFUSED, "")
    assert [sanitizer.said(text).found for text in texts] == [0, 1, 0, 1, 16, None, None]


@pytest.mark.parametrize(
    ("tool", "clean", "planted", "word"),
    [
        ("memcheck", CLEAN, MEMORY, ""),
        ("racecheck", RACE_CLEAN, RACE, ""),
        ("synccheck", CLEAN, BARRIER, ""),
        ("memcheck", CLEAN, CLEAN, "does not report the planted memory"),
        ("memcheck", CLEAN, MEMORY.replace("planted_write", "other"), "does not report"),
        ("memcheck", MEMORY, MEMORY, "innocent"),
        ("memcheck", REFUSED, REFUSED, "Device not supported"),
        ("racecheck", RACE_CLEAN, RACE_CLEAN, "does not report the planted race"),
        ("racecheck", RACE_CLEAN, "killed", "came to no result"),
        ("synccheck", CLEAN, CLEAN, "does not report the planted barrier"),
    ],
)
def test_verdict_of_the_canary(tool: str, clean: str, planted: str, word: str) -> None:
    verdict = sanitizer.canary_verdict(tool, sanitizer.said(clean), sanitizer.said(planted))
    assert word in verdict
    assert bool(verdict) == bool(word)


def test_memcheck_must_see_the_library_too() -> None:
    assert sanitizer.library_verdict(sanitizer.said(LIBRARY)) == ""
    assert "kernel of the library" in sanitizer.library_verdict(sanitizer.said(CLEAN))
    assert "kernel of the library" in sanitizer.library_verdict(sanitizer.said(MEMORY))
    assert "no result" in sanitizer.library_verdict(sanitizer.said(REFUSED))


def test_results_of_the_runs() -> None:
    ran = "ran: 49 problems, 13 kernels\n"

    def status(text: str, code: int | None) -> str:
        return sanitizer.tool_result("memcheck", limited.Done(code, text, 1.0))["status"]

    assert status(ran + CLEAN, 0) == "clean"
    assert sanitizer.tool_result("memcheck", limited.Done(0, ran + CLEAN, 1.0))["problems"] == 49
    assert status(ran + LIBRARY, sanitizer.FOUND) == "found"
    assert status(CLEAN, 0) == "failed"  # no report that it ran
    assert status(ran + CLEAN, 1) == "failed"  # a wrong result
    assert status(ran, 0) == "failed"  # no report that the tool was active
    assert status(ran, None) == "timed out"


def test_the_sanitizer_stage_passes_only_where_it_could_have_failed() -> None:
    sees = dict.fromkeys(sanitizer.TOOLS, "")
    clean = {name: {"status": "clean"} for name in sanitizer.TOOLS}
    assert sanitizer.judged(sees, clean)[0] == "passed"
    assert sanitizer.judged(sees, clean | {"racecheck": {"status": "found"}})[0] == "failed"
    status, why, data = sanitizer.judged(sees | {"racecheck": "racecheck does not report"}, {"memcheck": clean["memcheck"]})
    assert (status, why) == ("unproven", "racecheck does not report")
    assert data["canary"]["racecheck"].startswith("proves nothing")
    assert sanitizer.judged(sees | {"synccheck": "blind"}, {k: clean[k] for k in ("memcheck", "racecheck")})[0] == "passed"


def test_a_run_can_have_a_library_of_its_own(tmp_path: pathlib.Path) -> None:
    session = sanitizer.Session("unused", 60, tmp_path, {"PYTHONPATH": "installed"})
    command = [sys.executable, "-c", "import os; print(os.environ['PYTHONPATH'])"]
    assert session.run("a", command, pathlib.Path("own")).text.strip() == f"own{os.pathsep}installed"
    assert session.run("b", command).text.strip() == "installed"


def test_parts_of_a_tool() -> None:
    """A tool is clean if all its parts are."""
    clean = {"status": "clean", "found": 0, "seconds": 2.0, "problems": 10, "kernels": 3}
    found = clean | {"status": "found", "found": 4, "says": ["here"]}
    assert sanitizer.together([clean, clean | {"seconds": 3.0}]) == clean | {"seconds": 3.0, "problems": 20, "kernels": 6}
    assert sanitizer.together([clean, found]) == found | {"problems": 20, "kernels": 6}
    late = {"status": "timed out", "found": None, "seconds": 9.0}
    assert sanitizer.together([clean, late])["status"] == "timed out"
    assert sanitizer.together([clean, late])["found"] is None


def test_every_part_runs(tmp_path: pathlib.Path) -> None:
    session, commands = sanitizer.Session("unused", 60, tmp_path, {}), []

    def watch(tool: str, name: str, program: list[str], library: pathlib.Path | None) -> limited.Done:
        commands.append((tool, program[-1], library))
        return limited.Done(0, "ran: 2 problems, 1 kernels\n" + CLEAN, 1.0)

    session.watch = watch  # type: ignore[method-assign, assignment]
    found = sanitizer.runs(session, list(sanitizer.TOOLS), ["program"], pathlib.Path("own"))
    wanted = [(tool, part + 1) for tool, parts in sanitizer.PARTS.items() for part in range(parts)]
    own = {"racecheck": pathlib.Path("own")}
    assert sorted(commands, key=str) == sorted(((t, f"{n}/{sanitizer.PARTS[t]}", own.get(t)) for t, n in wanted), key=str)
    assert all(result["status"] == "clean" for result in found.values())
    assert [result["kernels"] for result in found.values()] == list(sanitizer.PARTS.values())
    assert [name for name, result in found.items() if "build" in result] == ["racecheck"]


@pytest.mark.parametrize(
    ("kernel", "seen"),
    [
        ("forward_sm90_bf16_d64", True),
        ("forward_sm90_f16_d64", False),
        ("backward_sm80_f32_d256", True),
        ("forward_sm80_f64_d128", True),
        ("forward_sm90_bf16_d128_statistics", True),
        ("forward_sm80_f16_d128_statistics", False),
        ("forward_sm80_f32_d64_statistics", False),
        ("forward_sm80_f32_d128_statistics", True),
        ("forward_sm80_f64_d128_statistics", True),
        ("decode_sm90_bf16_d576x512", True),
        ("prefill_sm90_bf16_d64", True),
        ("forward_tangent_sm90_bf16_d128", True),
        ("forward_tangent_sm90_f16_d128", False),
        ("backward_tangent_sm80_f32_d64", False),
        ("backward_tangent_sm80_f32_d128", True),
        ("backward_tangent_sm80_bf16_d512_small", True),
        ("backward_tangent_sm80_f16_d512_small", False),
        ("backward_tangent_sm80_f64_d128", True),
        ("forward_sm80_bf16_d512_small", False),
        ("forward_sm80_bf16_d512_small_statistics", True),
    ],
)
def test_kernels_that_the_slow_tool_sees(kernel: str, seen: bool) -> None:
    option, expression = sanitizer.FEWER["racecheck"]
    assert option == "--kernels"
    assert bool(re.search(expression, kernel)) == seen
