"""tests/benchmark/context_parallel.py on gloo processes; it compares every contender's results with one rank's itself."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

FOLDER = pathlib.Path(__file__).parent / "benchmark"


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch has no gloo")
@pytest.mark.parametrize(("ranks", "mask", "more"), [(2, "causal", ()), (4, "full", ("--no-peers",))])
def test_every_scheme_runs(tmp_path: pathlib.Path, ranks: int, mask: str, more: tuple[str, ...]) -> None:
    launcher = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    program = [str(FOLDER / "context_parallel.py"), "--device", "cpu", "--tokens", "64", "--heads", "4/2", "--head-dim", "16"]
    done = subprocess.run(
        [*launcher, *program, "--masks", mask, *more, "--rounds", "1", "--json", str(tmp_path / "cells.json")],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    forward, both = json.loads((tmp_path / "cells.json").read_text())["cells"]
    assert (forward["backward"], both["backward"]) == (False, True)
    wanted = {"one rank", "ring", "all_gather", "heads", "auto", "plain ring" if mask == "causal" else "heads_ring"}
    for cell in (forward, both):
        assert wanted <= cell["ms"].keys(), done.stdout
        assert cell["causal"] == (mask == "causal")
        assert min(cell["predicted_ms"].values()) > 0
