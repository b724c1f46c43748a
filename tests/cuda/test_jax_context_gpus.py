"""libflash.jax.context_parallel_attention on two and four GPUs: equal to one call in float32 on the CPU for every scheme, and the
same bits again. tests/support/jax_context.py runs the problems in a process of its own: none can hold up the other tests.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("jax")

import jax_context

LIMITS = {"float32": 1e-5, "bfloat16": 1e-2}
CASES = [(ranks, name) for ranks in (2, 4) for name in jax_context.problems(ranks)]
RECORDED = "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1"
Results = dict[str, dict[str, Any]] | str  # lines by name, or why there are none


def run(ranks: int, beginning: str = "", flags: str = "") -> Results:
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    command = [sys.executable, jax_context.__file__, str(ranks), beginning]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=False)
    if "Unknown flag" in done.stderr:
        return "this XLA has other names for these flags"
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if lines and (lines[0]["backend"] != "gpu" or lines[0]["devices"] < ranks):
        return f"needs {ranks} GPUs; JAX has {lines[0]['devices']} devices of the kind {lines[0]['backend']}"
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return {line["name"]: line for line in lines[1:]}


@functools.cache
def results(ranks: int) -> Results | Exception:
    """Or why the process failed, so that it is not started again for every test."""
    try:
        return run(ranks)
    except (AssertionError, subprocess.TimeoutExpired, ValueError) as error:
        return error


def made(found: Results | Exception, name: str) -> Any:
    if isinstance(found, Exception):
        raise found
    if isinstance(found, str):
        pytest.skip(found)
    assert "made" in found[name], found[name]["raised"]
    return found[name]["made"]


@pytest.mark.parametrize(("ranks", "name"), CASES)
def test_equal_to_one_call(ranks: int, name: str) -> None:
    limit = LIMITS["float32" if "float32" in name else "bfloat16"]
    for what, error in made(results(ranks), name).items():
        assert error <= limit, f"{what}: {error:.2g}"


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("scheme", ["ring", "heads"])
def test_same_bits_again(ranks: int, scheme: str) -> None:
    assert made(results(ranks), f"again-{scheme}") is True


def test_recorded_into_cuda_graphs() -> None:
    """With XLA options that record custom calls into CUDA graphs, even a single one."""
    found = run(2, "again", RECORDED)
    assert made(found, "again-ring") is True
    assert made(found, "again-heads") is True
