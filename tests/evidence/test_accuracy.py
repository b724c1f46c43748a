"""Entries of the accuracy table, with a CPU kernel in place of a CUDA kernel, and with one whose results are wrong."""

from __future__ import annotations

import accuracy
import harness
import numpy as np
import pytest
from case import Case

TENSORS = {"forward": ("o", "lse"), "backward": ("dq", "dk", "dv")}


def right(case: Case, _: str) -> dict[str, np.ndarray]:
    assert (case.head_dim, case.head_dim_v) == (64, 32)
    return harness.run(case)


def of(operation: str, run: object) -> tuple[list[dict], list[str]]:
    kernel = {"name": "k", "operation": operation, "dtype": "bf16", "head_dim": 64, "head_dim_v": 32}

    def wanted(case: Case, name: str) -> dict[str, np.ndarray]:
        return {tensor: x for tensor, x in run(case, name).items() if tensor in TENSORS[operation]}

    return accuracy.table([kernel], ("randn",), {operation: wanted})


@pytest.mark.parametrize("operation", TENSORS)
def test_a_right_kernel(operation: str) -> None:
    (entry,), failures = of(operation, right)
    assert not failures
    assert (entry["kernel"], entry["cases"]) == ("k", 3)
    for tensor in TENSORS[operation]:
        assert 0 < entry[tensor]["t1"] <= 1
        if tensor != "lse":
            assert 1e-3 < entry[tensor]["rms"] < 6e-3
            assert entry[tensor]["two_times"] <= 1


@pytest.mark.parametrize(("operation", "tensor"), [("forward", "o"), ("backward", "dq"), ("backward", "dk"), ("backward", "dv")])
def test_a_wrong_kernel(operation: str, tensor: str) -> None:
    def wrong(case: Case, name: str) -> dict[str, np.ndarray]:
        result = right(case, name)
        return result | ({tensor: 1.02 * result[tensor]} if case.causal else {})

    (entry,), failures = of(operation, wrong)
    assert len(failures) == 2
    assert all(f"{tensor}: T" in failure for failure in failures)
    assert tensor in entry  # of the case with a right result
