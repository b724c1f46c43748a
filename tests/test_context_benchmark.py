"""tests/benchmark/context_parallel.py on gloo processes; it compares every contender's results with one rank's itself."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import subprocess
import sys

import pytest
from benchmark_program import FOLDER, program

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)


TRANSPORTS = ("auto", "messages", "symmetric_memory")


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch has no gloo")
@pytest.mark.parametrize(
    ("ranks", "mask", "more"), [(2, "causal", ("--window", "3")), (4, "full", ("--no-peers", "--transports", *TRANSPORTS))]
)
def test_every_scheme_runs(tmp_path: pathlib.Path, ranks: int, mask: str, more: tuple[str, ...]) -> None:
    launcher = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    program = [str(FOLDER / "context_parallel.py"), "--device", "cpu", "--tokens", "64", "--heads", "4/2", "--head-dim", "16"]
    done = subprocess.run(
        [*launcher, *program, "--masks", mask, *more, "--rounds", "1", "--json", str(tmp_path / "cells.json")],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    written = json.loads((tmp_path / "cells.json").read_text())
    assert written["setting"]["window_ms"] == (3 if "--window" in more else 0)
    forward, both = written["cells"]
    assert (forward["backward"], both["backward"]) == (False, True)
    wanted = {"one rank", "ring", "all_gather", "heads", "auto", "plain ring" if mask == "causal" else "heads_ring"}
    if mask == "full":
        wanted |= {"ring, messages", "all_gather, messages", "heads_ring, messages"}
        assert "ring, symmetric_memory: left out: transport is 'symmetric_memory'" in done.stdout
    for cell in (forward, both):
        assert wanted <= cell["ms"].keys(), done.stdout
        assert cell["causal"] == (mask == "causal")
        assert min(cell["predicted_ms"].values()) > 0


def test_windows_and_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window has as many calls as its time takes; a longer call is one itself; every round has another order, and every rank
    the same ones.
    """
    timing = program("_rank_timing")
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x, operation: None)
    took = {"short": 0.004, "middle": 0.02, "long": 0.3}
    now, called = [0.0], []
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def call(name: str) -> None:
        called.append(name)
        now[0] += took[name]

    def run() -> dict[str, float]:
        called.clear()
        return timing.Clock(torch.device("cpu"), 100).medians({name: lambda name=name: call(name) for name in took}, 4)

    assert run() == pytest.approx({name: 1000 * seconds for name, seconds in took.items()})
    windows = [(name, len(list(group))) for name, group in itertools.groupby(called)]
    sizes = {"short": 25, "middle": 5, "long": 1}
    estimates, windows = windows[:3], windows[3:]
    assert estimates == [("short", 4), ("middle", 4), ("long", 1)]
    assert sum(count for name, count in windows if name == "short") == 4 * sizes["short"]
    assert sum(count for name, count in windows if name == "middle") == 4 * sizes["middle"]
    assert sum(count for name, count in windows if name == "long") == 3  # and the first one
    rounds = [[]]
    for name, count in windows:
        for _ in range(count // sizes[name]):
            rounds[-1].append(name)
            if len(rounds[-1]) == (2 if len(rounds) == 1 else 3):
                rounds.append([])
    assert len({tuple(x) for x in rounds[1:4]}) > 1
    first = called.copy()
    run()
    assert called == first
