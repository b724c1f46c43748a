"""Repeated backward calls give the same bits: all gradients with deterministic=True, dk and dv without it.

Without it, dq, dbias and dsink are added in the order in which thread blocks arrive.
"""

from __future__ import annotations

import pytest
from case import Case
from gpu_kernels import TYPES, device_of, parameters, supports, widths, with_cpu

torch = pytest.importorskip("torch")
from gpu_case import problem  # noqa: E402  (needs torch)
from gpu_repeats import check_repeats  # noqa: E402

REPEATS = {"cuda": 20, "cpu": 2}
DENSE = {"batch": 2, "seqlen_q": 300, "seqlen_k": 333, "heads_q": 4, "heads_k": 2}
PACKED = {"seqlen_q": (190, 0, 3, 257), "seqlen_k": (130, 260, 0, 300), "heads_q": 4, "heads_k": 2, "slack_rows": 5}
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "causal-top-left": {"causal": True, "causal_align": "top_left"},
    "window": {"window_size": (70, 30)},
    "one-key-head": {"heads_k": 1, "causal": True},
    "a-head-each": {"heads_k": 4},
    "used": {"used_q": (300, 170), "used_k": (0, 290), "causal": True},
    "blocks": {"block_mask": "bh"},
    "blocks-for-all": {"block_mask": "", "causal": True},
    "mask": {"mask": "bhqk"},
    "dropout": {"dropout_p": 0.25, "seed": 2**40 + 7, "offset": 2**35 + 1},
    "softcap": {"softcap": 20.0},
    "alibi": {"alibi": "bh"},
    "sink": {"sink": True, "causal": True},
    "dlse": {"dlse": True},
    "everything": {"bias": "hk", "sink": True, "dlse": True, "dropout_p": 0.5, "softcap": 30.0, "alibi": "h", "mask": "qk"},
} | {f"bias-{letters or 'one'}": {"bias": letters} for letters in ("bhqk", "hqk", "bqk", "bhk", "bhq", "qk", "b", "")}
CASES = {name: DENSE | options for name, options in OPTIONS.items()}
CASES |= {f"packed-{name}": PACKED | OPTIONS[name] for name in ("causal", "sink", "dropout", "dlse", "bias-hqk", "bias-one")}


EVERY = 4  # each case runs on every n-th kernel, the next case on others


def case_of(kernel: dict, name: str) -> Case:
    return Case(f"repeat-{name}", TYPES[kernel["dtype"]], **widths(kernel), **CASES[name])


def runs() -> list:
    found = []
    for i, name in enumerate(CASES):
        able = [kernel for kernel in with_cpu("backward") if supports(kernel, case_of(kernel, name))]
        for kernel in parameters(able)[i % EVERY :: EVERY]:
            found.append(pytest.param(*kernel.values, name, id=f"{kernel.id}-{name}", marks=kernel.marks))
    return found


@pytest.mark.parametrize(("kernel", "name"), runs())
def test_the_same_bits_again(kernel: dict, name: str) -> None:
    case = case_of(kernel, name)
    check_repeats(case, problem(case, device_of(kernel)), kernel, REPEATS[device_of(kernel)])
