"""GPU memory of decode: no byte outside of the outputs and the caches is written or changes a result."""

from __future__ import annotations

import decode_cases
import pytest
from decode_cases import DecodeCase
from gpu_kernels import TYPES, chosen, device_of, in_place_of, kernels, kernels_of_many_rows, parameters, serves
from harness import assert_same_bits
from libflash.conformance import cache_cases
from libflash.conformance.cache_cases import CacheCase

torch = pytest.importorskip("torch")
from gpu_codes import refused  # noqa: E402  (needs torch)
from gpu_memory import GuardedOnGpu, WorkspaceOnGpu  # noqa: E402
from guarded_decode import guarded_decode  # noqa: E402
from memory_harness import Guarded, Workspace  # noqa: E402

ON_CPU = 6  # cases that also run there
CASES, OF_CODES = decode_cases.quick(), [case for case in cache_cases.quick() if not refused(case)]


def runs(cases: list, able: list[list[dict]]) -> list:
    """A kernel for each case, so that every kernel has some cases."""
    pairs = [(case, some[index // 2 % len(some)]) for index, (case, some) in enumerate(zip(cases, able, strict=True)) if some]
    pairs += [(case, in_place_of("decode")) for case in cases[:: len(cases) // ON_CPU]]
    return [pytest.param(*pair, id=f"{pair[0]}-{pair[1]['name']}", marks=parameters([pair[1]])[0].marks) for pair in pairs]


def memory_of(kernel: dict) -> dict:
    if device_of(kernel) == "cpu":
        return {"place": Guarded, "workspace": Workspace}
    return {"place": GuardedOnGpu, "workspace": WorkspaceOnGpu}


ABLE = [chosen(kernels("decode") + kernels_of_many_rows(), case, index) for index, case in enumerate(CASES)]
ABLE_OF_CODES = [[kernel for kernel in kernels("decode") if serves(kernel, case.base)] for case in OF_CODES]


@pytest.mark.parametrize(("case", "kernel"), runs(CASES, ABLE))
def test_decode_stays_inside(case: DecodeCase, kernel: dict) -> None:
    """Guard bands, gaps between rows, rows that must not be written; the same bits with any contents of the workspace; and any
    alignment.
    """
    step = 8 if kernel["backend"] == "sm90" else 1  # elements: sm90 refuses rows that are not aligned to 16 bytes
    results = []
    for content, gap, shift in (("zeros", 0, 0), ("ones", 0, 0), ("random", 3, 0), ("ones", 3 * step, step)):
        after, o, lse = guarded_decode(case.inputs(), kernel["name"], content, gap, shift, **memory_of(kernel))
        case.check(o=o, lse=lse, k_cache=after.k_cache, v_cache=after.v_cache)
        results.append({"o": o, "lse": lse})
    assert_same_bits(results[0], results[1])


@pytest.mark.parametrize(("case", "kernel"), runs(OF_CODES, ABLE_OF_CODES))
def test_decode_over_codes_stays_inside(case: CacheCase, kernel: dict) -> None:
    """Also around scales and rope parts, which an append writes."""
    for content, gap, shift in (("zeros", 0, 0), ("ones", 3, 1)):
        after, o, lse = guarded_decode(case.inputs(), kernel["name"], content, gap, shift, **memory_of(kernel))
        case.check(after, o=o, lse=lse)


@pytest.mark.parametrize("kernel", parameters([*kernels("decode")[:1], in_place_of("decode")]))
def test_the_harness_finds_faults(kernel: dict) -> None:
    """A cache that is described with a row more than it has: the appended row is outside."""
    case, beyond = DecodeCase("beyond", TYPES[kernel["dtype"]], lengths=(130,), capacity=130, append=1), []
    x = case.inputs()

    class Longer(memory_of(kernel)["place"]):  # type: ignore[misc]
        @property
        def view(self):  # type: ignore[no-untyped-def]
            made = super().view
            if self.array.shape == x.k_cache.shape:
                made.shape[1] += 1
                beyond.append(made)
            return made

    with pytest.raises(AssertionError, match="elements changed outside of it"):
        guarded_decode(x, kernel["name"], "zeros", 0, place=Longer, workspace=memory_of(kernel)["workspace"])
    assert beyond
