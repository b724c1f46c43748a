"""Threads: as many as requested, always the same bits; calls from many Python threads at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from harness import assert_same_bits, cpu_kernels, gradients, qkv, random

import libflash

OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "all": {"causal": True, "window_size": (100, 0), "softcap": 20.0, "dropout_p": 0.25, "seed": 5},
}


@pytest.mark.parametrize("isa", cpu_kernels())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", OPTIONS)
def test_results_do_not_depend_on_the_number_of_threads(isa: str, dtype: str, options: str) -> None:
    q, k, v = qkv(batch=2, sq=260, sk=300, hq=4, hk=2, d=32, dtype=dtype)
    dout = random(*q.shape, seed=5, dtype=q.dtype)
    bias = random(4, 1, 300, seed=6)
    results = []
    for threads in (1, 2, 3, 7, 16):
        libflash.set_num_threads(threads)
        results.append(gradients(q, k, v, dout, isa, bias=bias, learnable_sink=random(4, seed=7), **OPTIONS[options]))
    for other in results[1:]:
        assert_same_bits(other, results[0])


def test_decode_and_merge_do_not_depend_on_the_number_of_threads() -> None:
    q = random(3, 2, 8, 64)
    k, v = random(3, 2000, 2, 64, seed=1), random(3, 2000, 2, 64, seed=2)
    lengths = np.array([2000, 5, 1300], np.int32)
    results = []
    for threads in (1, 2, 5):
        libflash.set_num_threads(threads)
        out, lse = libflash.decode(q, k, v, cache_seqlens=lengths, return_lse=True)
        merged, merged_lse = libflash.merge([out, out * 2], [lse, lse + 1])
        results.append({"out": out, "lse": lse, "merged": merged, "merged_lse": merged_lse})
    for other in results[1:]:
        assert_same_bits(other, results[0])


def test_set_and_get() -> None:
    default = libflash.get_num_threads()
    assert default == libflash.info()["cpu"]["threads"]
    assert 1 <= default <= 4096
    libflash.set_num_threads(5)
    assert libflash.get_num_threads() == 5
    q, k, v = qkv(batch=8, sq=500, sk=500, d=64)
    text = libflash.explain(q, k, v)
    assert next(line for line in text.splitlines() if line.startswith("threads")).split()[1] == "5"
    libflash.set_num_threads(0)
    assert libflash.get_num_threads() == default


@pytest.mark.parametrize("wanted", [-1, 4097, 10**9, 2**40])
def test_a_bad_number_is_refused_at_once(wanted: int) -> None:
    libflash.set_num_threads(3)
    with pytest.raises(libflash.InvalidError, match=rf"threads is {wanted}; it must be 0 \(the default\) to 4096"):
        libflash.set_num_threads(wanted)
    assert libflash.get_num_threads() == 3
    libflash.set_num_threads(4096)


def test_eight_python_threads() -> None:
    """Different problems at the same time, many times: the bits of each alone."""
    problems = [
        (qkv(sq=100 + 7 * i, sk=150, dtype=("float32", "bfloat16")[i % 2]), {"causal": bool(i % 3), "softmax_scale": 0.1 * i})
        for i in range(8)
    ]
    alone = [gradients(*arrays, np.ones_like(arrays[0]), **options) for arrays, options in problems]
    together = threading.Barrier(8)

    def work(number: int) -> None:
        arrays, options = problems[number]
        together.wait()
        for _ in range(10):
            assert_same_bits(gradients(*arrays, np.ones_like(arrays[0]), **options), alone[number], str(number))

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work, number) for number in range(8)]:
            done.result()


def test_errors_belong_to_their_thread() -> None:
    """Each thread reads the text of its own refused call."""
    q, k, v = qkv()
    together = threading.Barrier(8)

    def work(number: int) -> None:
        together.wait()
        for i in range(200):
            value = -1 - number - 8 * i
            with pytest.raises(libflash.InvalidError, match=rf"softcap.*\({value}\)"):
                libflash.attention(q, k, v, softcap=value)

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work, number) for number in range(8)]:
            done.result()


def test_other_python_threads_go_on() -> None:
    """The library releases the interpreter's lock during a call."""
    q, k, v = qkv(sq=3000, sk=3000, hq=4, hk=4, d=64)
    libflash.set_num_threads(1)
    counted, stop = [0], threading.Event()

    def count() -> None:
        while not stop.is_set():
            counted[0] += 1

    other = threading.Thread(target=count)
    other.start()
    before = counted[0]
    libflash.attention(q, k, v)
    during = counted[0] - before
    stop.set()
    other.join()
    assert during > 1000, f"the other thread counted to {during}"
