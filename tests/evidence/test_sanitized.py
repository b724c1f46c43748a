"""Kernels serve the problems of sanitized.py, and a wrong result is found."""

from __future__ import annotations

import pytest
from gpu_kernels import with_cpu

torch = pytest.importorskip("torch")
import sanitized  # noqa: E402  (needs torch)


@pytest.mark.parametrize(("operation", "runs"), [("forward", [1] * 4), ("backward", [2] * 4), ("decode", [2] * 2)])
def test_problems_of_a_kernel(operation: str, runs: list[int]) -> None:
    kernel = with_cpu(operation)[-1]
    assert [sanitized.served(case, kernel) for case in sanitized.problems(kernel)] == runs


def test_a_wrong_result_and_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = with_cpu("backward")[-1]
    case = sanitized.problems(kernel)[0]
    real = sanitized.run_backward

    def half_wrong(case: object, name: str, deterministic: bool, device: str) -> dict:
        made = real(case, name, deterministic, device)
        return made | ({"dk": made["dk"] * 2} if deterministic else {})

    def half_refused(case: object, name: str, deterministic: bool, device: str) -> dict:
        if deterministic:
            raise sanitized.libflash.UnsupportedError("deterministic")
        return real(case, name, deterministic, device)

    monkeypatch.setattr(sanitized, "run_backward", half_refused)
    assert sanitized.served(case, kernel) == 1
    monkeypatch.setattr(sanitized, "run_backward", half_wrong)
    with pytest.raises(AssertionError, match="dk: T"):
        sanitized.served(case, kernel)
