"""Kernels serve the problems of sanitized.py, and a wrong result is found."""

from __future__ import annotations

import pytest
from gpu_kernels import KINDS, in_place_of

torch = pytest.importorskip("torch")
import sanitized  # noqa: E402  (needs torch)

SERVED = {
    "forward": [1] * 4,
    "backward": [2] * 4,
    "decode": [2] * 2 + [1] * 5,
    "statistics": [1] * 2,
    "values in keys": [2] * 2,
    "forward_tangent": [1] * 2,
    "backward_tangent": [1] * 2,
    "prefill": [1] * 4,
    "decode_prefix": [1],
}


def test_every_kind_has_problems() -> None:
    assert SERVED.keys() == {*KINDS, *sanitized.PARTS_OF_DECODE}


@pytest.mark.parametrize("kind", SERVED)
def test_problems_of_a_kernel(kind: str) -> None:
    kernel = in_place_of(kind)
    assert [sanitized.served(case, kernel) for case in sanitized.problems(kernel)] == SERVED[kind]


def test_cache_write(monkeypatch: pytest.MonkeyPatch) -> None:
    sanitized.run_cache_write("cpu")
    real = sanitized.libflash.cache_write

    def shifted(*rows: object, **given: object) -> None:
        real(*rows, **(given if rows else given | {"slots": given["slots"] + 1}))

    monkeypatch.setattr(sanitized.libflash, "cache_write", shifted)
    with pytest.raises(AssertionError, match="cache_write: k_cache"):
        sanitized.run_cache_write("cpu")


def test_a_wrong_result_and_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = in_place_of("backward")
    case = sanitized.problems(kernel)[0]
    real = sanitized.RUNS["backward"]

    def half_wrong(case: object, name: str, *, deterministic: bool, device: str) -> dict:
        made = real(case, name, deterministic, device)
        return made | ({"dk": made["dk"] * 2} if deterministic else {})

    def half_refused(case: object, name: str, *, deterministic: bool, device: str) -> dict:
        if deterministic:
            raise sanitized.libflash.UnsupportedError("deterministic")
        return real(case, name, deterministic, device)

    monkeypatch.setitem(sanitized.RUNS, "backward", half_refused)
    assert sanitized.served(case, kernel) == 1
    monkeypatch.setitem(sanitized.RUNS, "backward", half_wrong)
    with pytest.raises(AssertionError, match="dk: T"):
        sanitized.served(case, kernel)


def test_a_prefill_kernel_that_is_not_in_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an error, because the problem would not run the kernel."""
    kernel = in_place_of("prefill")
    monkeypatch.setattr(sanitized, "device_of", lambda _: "cuda")
    monkeypatch.setattr("gpu_prefill.uses", lambda *_: False)
    with pytest.raises(AssertionError, match="is not in the plan"):
        sanitized.served(sanitized.problems(kernel)[0], kernel)
