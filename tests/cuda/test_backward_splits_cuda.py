"""Key tiles of backward that several thread blocks divide: few key heads, so that without splits most multiprocessors of a large
GPU would be idle. Against the float64 reference, and with the same bits in repeated calls.
"""

from __future__ import annotations

import pytest
from case import Case
from gpu_kernels import TYPES, device_of, parameters, supports, widths, with_cpu

torch = pytest.importorskip("torch")
from gpu_case import problem  # noqa: E402  (needs torch)
from gpu_repeats import check_repeats  # noqa: E402

import libflash  # noqa: E402

GROUPED = {"batch": 1, "seqlen_q": 550, "seqlen_k": 600, "heads_q": 4, "heads_k": 1}
OPTIONS = {
    "causal": GROUPED | {"causal": True},
    "full": GROUPED,
    "one-head": {"batch": 1, "seqlen_q": 2000, "seqlen_k": 300, "causal": True, "causal_align": "top_left"},
    "last-wave": {"batch": 1, "seqlen_q": 520, "seqlen_k": 1280, "heads_q": 15, "heads_k": 15},  # whole key tiles, then splits
    "window": GROUPED | {"window_size": (350, 50)},
    "used": GROUPED | {"used_q": (500,), "used_k": (530,), "causal": True},
    "packed": {"seqlen_q": (400, 0, 3, 350), "seqlen_k": (450, 60, 0, 300), "heads_q": 4, "heads_k": 1, "causal": True},
    "sink": GROUPED | {"sink": True, "dlse": True, "causal": True},
    "alibi": GROUPED | {"alibi": "h", "causal": True},
    "dropout": GROUPED | {"dropout_p": 0.25, "seed": 3},
}
REPEATS = 5


def case_of(kernel: dict, name: str) -> Case:
    return Case(f"splits-{name}", TYPES[kernel["dtype"]], **widths(kernel), **OPTIONS[name])


def runs() -> list:
    """Kernels whose dK/dV kernel has splits, and a CPU kernel."""
    found = []
    for parameter in parameters([k for k in with_cpu("backward") if k["backend"] in ("sm90", "cpu") and k["head_dim"] <= 256]):
        kernel = parameter.values[0]
        for name in OPTIONS if kernel["backend"] == "sm90" else ("causal", "packed", "one-head"):
            if supports(kernel, case_of(kernel, name)):
                found.append(pytest.param(kernel, name, id=f"{parameter.id}-{name}", marks=parameter.marks))
    return found


@pytest.mark.parametrize(("kernel", "name"), runs())
def test_splits(kernel: dict, name: str) -> None:
    case = case_of(kernel, name)
    p = problem(case, device_of(kernel))
    if kernel["backend"] == "sm90" and torch.cuda.get_device_properties(0).multi_processor_count > 100:
        text = libflash.explain(p.q, p.k, p.v, op="backward", kernel=kernel["name"], **p.options)
        assert "splits of their queries" in text
    check_repeats(case, p, kernel, REPEATS)
