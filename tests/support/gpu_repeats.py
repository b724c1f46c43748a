"""Repeated backward calls of one kernel."""

from __future__ import annotations

from case import Case
from gpu_case import Problem, same_bits, to_numpy
from gpu_kernels import supports


def check_repeats(case: Case, p: Problem, kernel: dict, repeats: int) -> None:
    """The same bits in every call: of all gradients with deterministic=True, of dk and dv without it. Also the case's own
    tolerance.
    """
    o, lse = p.forward()
    for deterministic in (True, False):
        if not supports(kernel, case, deterministic):
            continue
        first = p.backward(o, lse, kernel["name"], deterministic)
        for _ in range(repeats - 1):
            again = p.backward(o, lse, kernel["name"], deterministic)
            for tensor in first if deterministic else ("dk", "dv"):
                assert same_bits(first[tensor], again[tensor]), tensor
        case.check(**{tensor: to_numpy(x, p.inputs.q.dtype) for tensor, x in first.items()})
