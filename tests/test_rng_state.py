"""Seed and offset of dropout in an array: the same mask as with the values, and read when the call runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness import qkv, random

import libflash

SEED, OFFSET = 2**63 + 2**40 + 7, 2**64 - 2**35 + 1  # with the bit that makes an int64 negative
KERNELS = [kernel for kernel in libflash.info()["kernels"] if kernel["operation"] == "forward" and kernel["usable"]]
CPU = [kernel["name"] for kernel in KERNELS if kernel["backend"] == "cpu"]


def state(seed: int = SEED, offset: int = OFFSET, dtype: type = np.int64) -> np.ndarray:
    return np.array([seed, offset], np.uint64).view(dtype)


def results(kernel: str, **options: Any) -> list[np.ndarray]:
    """out, lse, dq, dk, dv."""
    q, k, v = qkv(sq=70, sk=90)
    out, lse = libflash.attention(q, k, v, dropout_p=0.25, return_lse=True, kernel=kernel, **options)
    backward = kernel.replace("forward", "backward")
    dout = random(*out.shape, seed=5)
    return [out, lse, *libflash.attention_backward(dout, q, k, v, out, lse, dropout_p=0.25, kernel=backward, **options)]


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
@pytest.mark.parametrize("kernel", CPU)
def test_same_mask_as_by_value(kernel: str, dtype: type) -> None:
    by_value, by_array = results(kernel, seed=SEED, offset=OFFSET), results(kernel, seed=state(dtype=dtype))
    for one, other in zip(by_value, by_array, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("change", [(SEED + 1, OFFSET), (SEED, OFFSET + 1), (OFFSET, SEED)])
def test_both_numbers_count(change: tuple[int, int]) -> None:
    assert (results(CPU[0], seed=state())[0] != results(CPU[0], seed=state(*change))[0]).any()


def test_read_at_each_call() -> None:
    numbers = state()
    first = results(CPU[0], seed=numbers)
    numbers[:] = state(3, 4)
    np.testing.assert_array_equal(results(CPU[0], seed=numbers)[0], results(CPU[0], seed=3, offset=4)[0])
    numbers[:] = state()
    np.testing.assert_array_equal(results(CPU[0], seed=numbers)[0], first[0])


def torch_array(numbers: np.ndarray) -> Any:
    return pytest.importorskip("torch").from_numpy(numbers.copy())


def jax_array(numbers: np.ndarray) -> Any:
    jax = pytest.importorskip("jax")
    with jax.enable_x64(True):
        return jax.numpy.asarray(numbers)


@pytest.mark.parametrize("make", [torch_array, jax_array])
def test_arrays_of_other_libraries(make: Callable[[np.ndarray], Any]) -> None:
    np.testing.assert_array_equal(results(CPU[0], seed=make(state()))[0], results(CPU[0], seed=SEED, offset=OFFSET)[0])


def test_scalars_are_numbers() -> None:
    wanted = results(CPU[0], seed=7)[0]
    for seed in (np.uint64(7), np.array(7), np.int32(7)):
        np.testing.assert_array_equal(results(CPU[0], seed=seed)[0], wanted)


def test_explain_takes_the_array() -> None:
    q, k, v = qkv()
    for op in ("forward", "backward"):
        by_value = libflash.explain(q, k, v, op=op, dropout_p=0.5, seed=1, offset=2)
        assert libflash.explain(q, k, v, op=op, dropout_p=0.5, seed=state()) == by_value


@pytest.mark.parametrize(
    ("seed", "text"),
    [
        (np.array([1, 2, 3]), r"seed is an array of shape \(3,\); an array must hold two numbers, seed and offset"),
        (np.array([[1, 2]]), r"seed is an array of shape \(1, 2\)"),
        (np.array([1, 2], np.int32), r"seed has dtype int32; int64 or uint64 is needed"),
        (np.array([1.0, 2.0]), r"seed has dtype float64; int64 or uint64 is needed"),
        (np.arange(4)[::2], r"seed: must be contiguous"),
    ],
)
def test_refused(seed: np.ndarray, text: str) -> None:
    q, k, v = qkv()
    out = np.full_like(q, 7)
    with pytest.raises(libflash.InvalidError, match=text):
        libflash.attention(q, k, v, dropout_p=0.5, seed=seed, out=out)
    assert (out == 7).all()


def test_offset_beside_an_array_is_refused() -> None:
    with pytest.raises(libflash.InvalidError, match="offset is 5; it must be 0 when seed is an array"):
        libflash.attention(*qkv(), dropout_p=0.5, seed=state(), offset=5)
