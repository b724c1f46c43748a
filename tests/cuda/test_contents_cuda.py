"""Forward, backward and the tangents with prefix sums in device memory that nothing has checked (unchecked_sums.py): each call
ends, nothing outside of the tensors and the workspace is written, and sequences that share no row with others have their results.

The calls run in another process with a time limit: a kernel that waits for ever would block this one.
"""

from __future__ import annotations

import subprocess

import pytest
from gpu_kernels import in_place_of, kernels
from harness import python
from unchecked_sums import CONTENTS, OUTPUTS, TYPES, check, flags_of

torch = pytest.importorskip("torch")

PROGRAM = """
    from unchecked_sums import main
    import torch
    torch.zeros(1, device="cuda")  # a context
    main({operation!r}, {kernels!r})
"""
FIELDS = ("name", "backend", "dtype", "head_dim", "head_dim_v")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("backend", ["sm80", "sm90"])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("operation", OUTPUTS)
def test_on_the_gpu(operation: str, dtype: str, backend: str) -> None:
    every = [k for k in kernels(operation) if (k["dtype"], k["backend"]) == (dtype, backend) and k["usable"]]
    if not every:
        pytest.skip("no such kernel runs here")
    chosen = [{name: kernel[name] for name in FIELDS} for kernel in every]
    try:
        done = python(PROGRAM.format(operation=operation, kernels=chosen))
    except subprocess.TimeoutExpired as late:
        pytest.fail(f"a call did not end: {(late.stdout or b'').decode()[-300:]}")
    assert done.returncode == 0, f"{done.stdout[-300:]}\n{done.stderr[-3000:]}"
    assert done.stdout.endswith("all ended\n")
    assert len(done.stdout.splitlines()) == len(chosen) * len(CONTENTS) * len(flags_of(operation)) + 1


@pytest.mark.parametrize("operation", OUTPUTS)
def test_on_the_cpu(operation: str) -> None:
    """It refuses all contents but those in order, which show that the rest of the test is right."""
    kernel = in_place_of(operation)
    for flags in flags_of(operation):
        assert check(operation, kernel, CONTENTS["in order"], flags) == 5
