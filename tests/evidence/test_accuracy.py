"""Entries of the accuracy table, with a CPU kernel in place of a CUDA kernel, and with one whose results are wrong."""

from __future__ import annotations

import accuracy
import harness
import numpy as np
import pytest
from case import Case
from gpu_kernels import KINDS, in_place_of

TENSORS = {"forward": ("o", "lse"), "backward": ("dq", "dk", "dv")}


def right(case: Case, _: str) -> dict[str, np.ndarray]:
    assert (case.head_dim, case.head_dim_v) == (64, 32)
    return harness.run(case)


def of(operation: str, run: object) -> tuple[list[dict], list[str]]:
    kernel = {"name": "k", "operation": operation, "kind": operation, "dtype": "bf16", "head_dim": 64, "head_dim_v": 32}

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


# Tensors of the kinds of kernels that the table has besides forward and backward.
OTHERS = {
    "statistics": ("o", "lse", "max_logit", "entropy"),
    "decode": ("o", "lse", "k_cache", "v_cache"),
    "values in keys": ("o", "lse"),
    "forward_tangent": ("o", "lse", "to", "tlse"),
    "backward_tangent": ("tdq", "tdk", "tdv"),
}


def test_every_kind_has_a_test() -> None:
    assert {*OTHERS, *TENSORS} == set(KINDS)


@pytest.fixture
def runs() -> dict:
    """The functions of RUNS, with CPU kernels in place of CUDA kernels."""
    pytest.importorskip("torch")
    from gpu_runs import RUNS

    return {kind: lambda case, name, kind=kind: RUNS[kind](case, name, device="cpu") for kind in RUNS}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_right_kernel_of_another_kind(kind: str, runs: dict) -> None:
    (entry,), failures = accuracy.table([in_place_of(kind)], ("randn",), runs)
    assert not failures
    for tensor in OTHERS[kind]:
        if not tensor.endswith("_cache"):
            assert 0 < entry[tensor]["t1"] <= 1
            assert 0 < entry[tensor]["rms"] < 2e-2


@pytest.mark.parametrize(("kind", "tensor"), [(kind, tensor) for kind, tensors in OTHERS.items() for tensor in tensors])
def test_a_wrong_kernel_of_another_kind(kind: str, tensor: str, runs: dict) -> None:
    def wrong(case: object, name: str) -> dict:
        result = runs[kind](case, name)
        return result | {tensor: (1.5 * result[tensor].astype(np.float32)).astype(result[tensor].dtype)}

    _, failures = accuracy.table([in_place_of(kind)], ("randn",), {kind: wrong})
    assert failures
    assert all(tensor in failure for failure in failures)
