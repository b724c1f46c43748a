"""Small calls on the CPU, which keep a block of workspace from call to call (python/libflash/_small_workspace.pxi)."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import libflash

# (batch, seqlen_q, seqlen_k, heads, head_dim): workspaces from a few KB to more than the block that is kept
SHAPES = [(1, 2, 3, 1, 8), (1, 1, 512, 2, 64), (2, 16, 16, 4, 32), (1, 1, 1024, 1, 256), (1, 1, 9, 1, 8), (1, 1, 96, 8, 512)]


def arrays(shape: tuple[int, ...], dtype: type = np.float64) -> list[np.ndarray]:
    batch, seqlen_q, seqlen_k, heads, head_dim = shape
    rng = np.random.default_rng(seqlen_k)
    return [rng.standard_normal((batch, n, heads, head_dim)).astype(dtype) for n in (seqlen_q, seqlen_k, seqlen_k)]


def call(operation: str, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> list[np.ndarray]:
    if operation == "decode":
        return list(libflash.decode(q, k, v, return_lse=True))
    out, lse = libflash.attention(q, k, v, return_lse=True)
    return [out, lse] if operation == "attention" else list(libflash.attention_backward(out, q, k, v, out, lse))


def same(results: list[np.ndarray], expected: list[np.ndarray]) -> bool:
    return all(x.tobytes() == y.tobytes() for x, y in zip(results, expected, strict=True))


@pytest.mark.parametrize("operation", ["attention", "attention_backward", "decode"])
def test_sizes_that_grow_and_shrink(operation: str) -> None:
    expected = [call(operation, *arrays(shape)) for shape in SHAPES]
    for i in (5, 0, 3, 1, 4, 2, 5, 4, 3, 2, 1, 0):
        assert same(call(operation, *arrays(SHAPES[i])), expected[i]), SHAPES[i]


@pytest.mark.parametrize("operation", ["attention", "attention_backward", "decode"])
def test_nothing_remains_of_the_call_before(operation: str) -> None:
    q, k, v = arrays(SHAPES[2])
    expected = call(operation, q, k, v)
    call(operation, *(np.full_like(x, np.nan) for x in (q, k, v)))
    assert same(call(operation, q, k, v), expected)


def test_a_refused_call_leaves_the_next_one_alone() -> None:
    q, k, v = arrays(SHAPES[0])
    expected = call("attention", q, k, v)
    for _ in range(3):
        with pytest.raises(libflash.InvalidError, match="softcap"):
            libflash.attention(q, k, v, softcap=-1.0)
        with pytest.raises(libflash.UnsupportedError):
            libflash.attention(q, k, v, backend="sm80")
    assert same(call("attention", q, k, v), expected)


def test_threads_share_no_block() -> None:
    """Calls release the GIL while they compute."""
    cases = [(arrays(shape), call("attention", *arrays(shape))) for shape in SHAPES]
    wrong: list[int] = []

    def run(number: int) -> None:
        for i in range(50):
            inputs, expected = cases[(number + i) % len(cases)]
            if not same(call("attention", *inputs), expected):
                wrong.append(number)
                return

    threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
