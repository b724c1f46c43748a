"""flash_set_interrupt: on which thread and when the function is called, and what its results do."""

from __future__ import annotations

import ctypes as c
import threading
from collections.abc import Iterator

import abi
import numpy as np
import pytest

LONG = 24_000  # rows and keys of a call that takes a second or more


def forward(threads: int = 1, length: int = 2000) -> tuple[int, np.ndarray]:
    size = (1, length, 2, 64)
    x, out = np.ones(size, np.float32), np.full(size, np.nan, np.float32)
    options = abi.options(abi.AttentionOptions, num_threads=threads)
    tensors = [abi.pointer(abi.tensor(array)) for array in (x, x, x, out)]
    bytes_needed = c.c_size_t()
    abi.check(abi.lib.flash_attention_forward_workspace_size(*tensors, None, c.byref(options), c.byref(bytes_needed)))
    scratch = np.empty(bytes_needed.value + 256, np.uint8)
    at = scratch.ctypes.data + -scratch.ctypes.data % 256
    return abi.lib.flash_attention_forward(*tensors, None, c.byref(options), at, bytes_needed, None), out


@pytest.fixture
def callers() -> Iterator[list[int]]:
    """The threads on which the function was called."""
    yield []
    abi.lib.flash_set_interrupt(abi.INTERRUPT(), None)


def set_check(callers: list[int], results: list[int]) -> object:
    """A function that returns these values in order, then 0. The caller keeps it alive."""

    def check(context: int) -> int:
        assert context == 77
        callers.append(threading.get_ident())
        return results.pop(0) if results else 0

    made = abi.INTERRUPT(check)
    abi.lib.flash_set_interrupt(made, 77)
    return made


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("result", [1, -1])
def test_a_nonzero_result_ends_the_call(callers: list[int], threads: int, result: int) -> None:
    kept = set_check(callers, [0, result])
    status, out = forward(threads, LONG)
    assert status == abi.CANCELLED
    assert "interrupt check" in abi.last_error()
    assert not np.isfinite(out).all()
    assert callers == [threading.get_ident()] * 2
    status, out = forward(threads)
    assert status == abi.OK
    assert (out == 1).all()
    del kept


def test_other_calls_do_not_call_the_function(callers: list[int]) -> None:
    kept = set_check(callers, [1] * 1000)
    results = []
    other = threading.Thread(target=lambda: results.append(forward(2)[0]))
    other.start()
    other.join()
    abi.lib.flash_set_interrupt(abi.INTERRUPT(), None)
    results.append(forward()[0])
    assert results == [abi.OK, abi.OK]
    assert callers == []
    del kept
