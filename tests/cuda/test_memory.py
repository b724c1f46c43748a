"""GPU memory: no byte outside the tensors is written or changes a result, and only the caller allocates."""

from __future__ import annotations

import ctypes
from functools import partial

import abi
import cases
import numpy as np
import pytest
from case import Case
from gpu_kernels import kernels, serves
from harness import assert_same_bits, python

import libflash

torch = pytest.importorskip("torch")
from gpu_memory import GuardedOnGpu, WorkspaceOnGpu, growth  # noqa: E402  (needs torch)
from guarded_run import guarded_run  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

PREFIXES = ("only-", "far-rows", "size-packed", "size-17x64", "size-1x129", "dim-7-", "dim-40-72", "dim-97", "poison-unused")
CHOSEN = [case for case in cases.quick() if case.name.startswith(PREFIXES)]


def pairs(chosen: list[Case]) -> list[tuple[Case, tuple[str, str]]]:
    """A forward and a backward kernel for each case, so that every kernel has some cases."""
    found = []
    for index, case in enumerate(chosen):
        forward, backward = ([k["name"] for k in kernels(name) if serves(k, case)] for name in ("forward", "backward"))
        if forward and backward:
            found.append((case, (forward[index % len(forward)], backward[index // 2 % len(backward)])))
    return found


RUNS = pairs(CHOSEN)


@pytest.mark.parametrize(("case", "pair"), RUNS, ids=[f"{case}-{pair[1]}" for case, pair in RUNS])
def test_attention_stays_inside(case: Case, pair: tuple[str, str]) -> None:
    """Guard bands, gaps between rows, elements that must not be written; the same bits with any workspace contents; and any
    alignment.
    """
    gpu = {"place": GuardedOnGpu, "workspace": WorkspaceOnGpu}
    step = 8 if any("_sm90_" in kernel for kernel in pair) else 1  # elements: sm90 refuses rows that are not aligned to 16 bytes
    flags = 0 if "_sm90_" in pair[1] else abi.DETERMINISTIC
    same = [
        guarded_run(case, pair, content, gap, flags=flags, **gpu)
        for content, gap in (("zeros", 0), ("ones", 3 * step), ("random", 0))
    ]
    for other in same[1:]:
        # Without deterministic, dq may differ by rounding errors.
        assert_same_bits(*({name: x for name, x in run.items() if flags or name != "dq"} for run in (other, same[0])))
    case.check(**same[0])
    for content, gap, shift in (("ones", 0, 0), ("random", 3 * step, step)):
        case.check(**guarded_run(case, pair, content, gap, shift, **gpu))


FENCED = """
    import sys
    import cases, torch
    from gpu_memory import Driver, fenced_run
    torch.zeros(1, device="cuda")  # a context
    driver = Driver()
    for name, pair in {runs}:
        case = cases.by_name(name)
        for at_end in (True, False):
            try:
                case.check(**fenced_run(driver, case, pair, at_end))
            except Exception as error:
                sys.exit(f"{{name}} {{pair}} at_end={{at_end}}: {{type(error).__name__}}: {{error}}")
    print("inside")
"""
FENCED_PREFIXES = ("only-", "dim-", "size-17x64", "size-3x", "size-65x64", "heads-", "poison-unused")


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "fp64"])
def test_nothing_is_touched_beyond_the_ends(dtype: str) -> None:
    """Every tensor next to unmapped addresses, in a separate process, which an access outside the tensor would end."""
    chosen = [case for case in cases.quick() if case.name.startswith(FENCED_PREFIXES) and case.dtype == dtype]
    runs = [(case.name, pair) for case, pair in pairs(chosen)]
    assert runs, f"no kernels for {dtype}"
    done = python(FENCED.format(runs=runs))
    assert (done.returncode, done.stdout) == (0, "inside\n"), done.stderr


TRESPASS = """
    import abi, numpy as np, torch
    from gpu_memory import Driver, Fences
    torch.zeros(1, device="cuda")
    x = np.ones((1, 128, 2, 64), np.float16)
    try:
        with Fences(Driver(), at_end=True) as fences:
            q, k, v, out = (fences.place(x) for _ in range(4))
            k.shape[1] = v.shape[1] = 128 + {more}
            fences.call("forward", [q, k, v, out, None], abi.options(abi.AttentionOptions))
            torch.cuda.synchronize()
        print("fine")
    except RuntimeError as error:
        print("illegal" if "illegal memory access" in str(error) else error)
"""


def test_the_harness_finds_faults() -> None:
    """The harness finds a changed byte of a guard band on the GPU, and a read of keys that are described but not allocated."""
    guarded = GuardedOnGpu(np.ones((3, 4), np.float32))
    guarded.check()
    guarded.on_gpu[5] = 0
    with pytest.raises(AssertionError, match="1 elements changed"):
        guarded.check()
    for more, printed in ((0, "fine\n"), (1, "illegal\n")):
        done = python(TRESPASS.format(more=more))
        assert done.stdout == printed, done.stderr


def test_memory_is_linear_in_the_length() -> None:
    """At 1 x 32768 x 2 x 64 the matrix of scores would need 4 GiB in half precision; results and workspace need far less."""
    found = []
    for length in (8192, 32768):
        q, k, v, dout = (torch.randn(1, length, 2, 64, dtype=torch.float16, device="cuda") for _ in range(4))
        out, lse = libflash.attention(q, k, v, causal=True, return_lse=True)
        results = out.nbytes + lse.nbytes
        forward = growth(partial(libflash.attention, q, k, v, causal=True, return_lse=True))
        assert forward <= results + 2**20
        backward = growth(partial(libflash.attention_backward, dout, q, k, v, out, lse, causal=True))
        assert backward <= 64 * 2**20
        found.append((forward, backward))
    for small, large in zip(*found, strict=True):
        assert large <= 4 * small + 2**20


def test_a_short_workspace_is_refused() -> None:
    """One byte less is refused, with the size in the text, and nothing is written."""
    case = cases.by_name("only-visible-1")
    _, kernel = next(pair for other, pair in RUNS if other is case)
    x = case.inputs()
    placed = [GuardedOnGpu(array) for array in (x.dout, x.q, x.k, x.v, x.dout, np.zeros((1, 4, 80), np.float32))]
    outputs = [GuardedOnGpu(array, output=True) for array in (x.q, x.k, x.v)]
    views = [abi.pointer(one.view) for one in (*placed, *outputs)]
    options, size = abi.options(abi.AttentionOptions, kernel=kernel.encode()), ctypes.c_size_t()
    abi.check(abi.lib.flash_attention_backward_workspace_size(*views, ctypes.byref(options), ctypes.byref(size)))
    assert size.value, "this backward needs no workspace: choose another case"
    work = WorkspaceOnGpu(size.value, "ones")
    status = abi.lib.flash_attention_backward(*views, ctypes.byref(options), work.address, size.value - 1, None)
    assert status == abi.WORKSPACE
    assert str(size.value) in abi.last_error()
    torch.cuda.synchronize()
    for one in outputs:
        fetched = one.on_gpu.cpu().numpy()
        assert (fetched.view(one.block.dtype) == one.before).all()
