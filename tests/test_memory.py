"""No byte outside the tensors is written or changes a result; memory grows by the size of the workspace at most."""

from __future__ import annotations

import json

import abi
import cases
import decode_cases
import numpy as np
import pytest
from case import Case
from decode_cases import DecodeCase
from guarded_decode import guarded_decode
from guarded_run import guarded_run
from harness import assert_same_bits, cpu_kernels, python, random, run_python
from libflash.conformance import cache_cases
from libflash.conformance.cache_cases import CacheCase
from memory_harness import Fenced, Guarded, each

PREFIXES = ("only-", "far-rows", "size-packed", "size-17x64", "size-1x129", "dim-7-", "dim-40-72", "dim-97", "poison-unused")
CHOSEN = [case for case in cases.quick() if case.name.startswith(PREFIXES)]
ISAS = cpu_kernels()


def two_kernels(index: int) -> tuple[str, ...]:
    """One instruction set per case in turn, so that each has some cases and the test is short."""
    return tuple(dict.fromkeys((ISAS[index % len(ISAS)], ISAS[(index // len(ISAS) + index + 1) % len(ISAS)])))


ATTENTION = [(case, isa) for index, case in enumerate(CHOSEN) for isa in two_kernels(index)]
CONTENTS = ("zeros", "ones", "random")


@pytest.mark.parametrize(("case", "isa"), ATTENTION, ids=[f"{case}-{isa}" for case, isa in ATTENTION])
def test_attention_stays_inside(case: Case, isa: str) -> None:
    """Guard bands, gaps between rows, elements that must not be written; and the same bits with any workspace contents."""
    kernels = f"forward_cpu_{isa}", f"backward_cpu_{isa}"
    results = [guarded_run(case, kernels, content, gap) for content, gap in zip(CONTENTS, (0, 3, 0), strict=True)]
    for other in results[1:]:
        assert_same_bits(other, results[0])
    case.check(**results[0])


DECODE = [
    (case, isa)
    for index, case in enumerate(decode_cases.quick())
    if not case.absent_page  # refused on the CPU
    for isa in two_kernels(index)[:1]
]


CODES = [(case, two_kernels(index)[0]) for index, case in enumerate(cache_cases.quick())][::2]


@pytest.mark.parametrize(("case", "isa"), DECODE, ids=[f"{case}-{isa}" for case, isa in DECODE])
def test_decode_stays_inside(case: DecodeCase, isa: str) -> None:
    results = []
    for content, gap in zip(CONTENTS, (0, 3, 0), strict=True):
        after, o, lse = guarded_decode(case.inputs(), f"decode_cpu_{isa}", content, gap)
        case.check(o=o, lse=lse, k_cache=after.k_cache, v_cache=after.v_cache)
        results.append({"o": o, "lse": lse})
    for other in results[1:]:
        assert_same_bits(other, results[0])


@pytest.mark.parametrize(("case", "isa"), CODES, ids=[f"{case}-{isa}" for case, isa in CODES])
def test_decode_over_codes_stays_inside(case: CacheCase, isa: str) -> None:
    """Also scales and rope parts, which an append writes."""
    after, o, lse = guarded_decode(case.inputs(), f"decode_cpu_{isa}", "ones", 3, shift=1)
    case.check(after, o=o, lse=lse)


def test_merge_stays_inside() -> None:
    for dtype in (np.float32, np.float16, np.float64):
        wide = np.float64 if dtype == np.float64 else np.float32
        outs = [Guarded(random(2, 33, 3, 17, seed=i, dtype=dtype), gap=i) for i in range(3)]
        lses = [Guarded(random(2, 3, 33, seed=i, dtype=wide), gap=i) for i in range(3)]
        out, lse = Guarded(outs[0].array.copy(), 2, output=True), Guarded(lses[0].array.copy(), 2, output=True)
        abi.merge([x.array for x in outs], [x.array for x in lses], out.array, lse.array)
        for one in (*outs, *lses, out, lse):
            one.check()


FENCED = """
    import sys
    import cases, decode_cases, libflash
    import numpy as np
    from harness import run_backward, run_forward
    from memory_harness import Fenced, each
    for at_end in (True, False):
        for case in cases.quick():
            if not case.name.startswith({prefixes}):
                continue
            place, x = Fenced(at_end), case.inputs()
            for name in ("q", "k", "v", "dout"):
                setattr(x, name, place(getattr(x, name)))
            x.options = each(x.options, place)
            forward = run_forward(x, kernel="forward_cpu_{isa}")
            forward = {{name: place(value) for name, value in forward.items()}}
            run_backward(x, forward, kernel="backward_cpu_{isa}")
        for case in decode_cases.quick()[::3]:
            if case.absent_page:
                continue
            place, x = Fenced(at_end), case.inputs()
            libflash.decode(place(x.q), place(x.k_cache), place(x.v_cache), kernel="decode_cpu_{isa}", **each(x.options, place))
    print("inside")
"""


@pytest.mark.parametrize("isa", cpu_kernels())
def test_nothing_is_read_beyond_the_ends(isa: str) -> None:
    """Every input next to a page that cannot be read, in a separate process, which a read outside the input would end."""
    prefixes = ("only-", "dim-", "size-17x64", "size-3x", "size-65x64", "heads-")
    assert run_python(FENCED.format(isa=isa, prefixes=prefixes)) == "inside\n"


def test_the_fence_bites() -> None:
    """The harness works: an access one element too far ends the process, and a changed guard band is found."""
    done = python("""
        import numpy as np
        from memory_harness import Fenced
        x = Fenced(True)(np.ones(7, np.float32))
        print(np.lib.stride_tricks.as_strided(x, (8,)).sum())
    """)
    assert done.returncode < 0, "killed by a signal"
    inside = Guarded(np.ones((3, 4), np.float32), gap=2)
    inside.check()
    np.lib.stride_tricks.as_strided(inside.array, (3, 5), inside.array.strides)[1, 4] = 5
    with pytest.raises(AssertionError, match="1 elements changed"):
        inside.check()
    with pytest.raises(AssertionError, match="12 of 12 elements not written"):
        Guarded(np.ones((3, 4), np.float32), output=True).check()


PEAK = """
    import ctypes, json, re
    import abi, numpy as np, libflash

    def peak():
        return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

    def now():
        return int(re.search(r"VmRSS:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

    def measure(call):
        open("/proc/self/clear_refs", "w").write("5")  # the peak so far is forgotten
        before = now()
        call()
        return peak() - before

    def size(name, *arrays):
        bytes = ctypes.c_size_t()
        options = abi.options(abi.AttentionOptions, flags=abi.CAUSAL)
        views = abi._views(arrays)
        abi.check(getattr(abi.lib, f"flash_attention_{name}_workspace_size")(*views, ctypes.byref(options), ctypes.byref(bytes)))
        return bytes.value

    def problem(length):
        rng = np.random.default_rng(0)
        q, k, v, dout = (rng.standard_normal((1, length, 2, 64), dtype="float32") for _ in range(4))
        return q, k, v, dout, np.ones_like(q), np.ones((1, 2, length), "float32"), *(np.ones_like(q) for _ in "qkv")

    def forward(x):
        libflash.attention(*x[:3], causal=True, out=x[4], lse=x[5])

    def backward(x):
        libflash.attention_backward(x[3], *x[:3], x[4], x[5], causal=True, dq=x[6], dk=x[7], dv=x[8])

    small = problem(600)
    forward(small), backward(small)  # code, stacks and arenas of the allocator are there now
    found = []
    x = problem(32768)
    found.append((measure(lambda: forward(x)), size("forward", *x[:3], x[4], x[5])))
    x = problem(8192)
    forward(x)
    found.append((measure(lambda: backward(x)), size("backward", x[3], *x[:3], *x[4:9])))
    print(json.dumps(found))
"""


def test_peak_memory_is_the_workspace() -> None:
    """1 x 2 x 32768 x 64 causal forward, and a backward: the process grows by no more than the size from the workspace query.
    The matrix of scores would be 8 GiB. 1 MiB is left for the stacks of threads and the allocator."""
    for grown, workspace in json.loads(run_python(PEAK)):
        assert grown <= workspace + 2**20, f"grew by {grown} bytes, the workspace is {workspace}"
        assert workspace < 64 * 2**20


def test_fenced_arrays_are_what_they_were() -> None:
    for at_end in (True, False):
        placed = each({"a": np.arange(5), "b": 3}, Fenced(at_end))
        np.testing.assert_array_equal(placed["a"], np.arange(5))
        assert placed["b"] == 3
