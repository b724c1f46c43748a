"""Rows that no sequence uses do not reach a result: NaN in them gives the same bits. Forward and backward, several tiles."""

from __future__ import annotations

import dataclasses

import pytest
from case import Case, used_rows
from gpu_kernels import TYPES, device_of, parameters, supporting, supports, widths, with_cpu

torch = pytest.importorskip("torch")
from gpu_case import Problem, problem, same_bits, same_sums, to_numpy  # noqa: E402  (needs torch)

HEADS = {"heads_q": 4, "heads_k": 2}
DENSE = {"batch": 3, "seqlen_q": 300, "seqlen_k": 333, "used_q": (190, 300, 0), "used_k": (130, 0, 333)}
PACKED = {"seqlen_q": (190, 0, 259, 70), "seqlen_k": (130, 40, 0, 300), "slack_rows": 9}
OPTIONS = {
    "dense": DENSE,
    "dense-causal": DENSE | {"causal": True, "dlse": True},
    "dense-window": DENSE | {"window_size": (70, 30), "sink": True},
    "dense-rare": DENSE | {"bias": "bhqk", "softcap": 20.0, "dropout_p": 0.25, "mask": "bk"},
    "packed": PACKED | {"dlse": True},
    "packed-causal": PACKED | {"causal": True, "sink": True},
    "packed-used": PACKED | {"used_q": (190, 0, 131, 1), "used_k": (1, 40, 0, 257), "causal": True},
    "packed-rare": PACKED | {"bias": "hqk", "alibi": "h", "dropout_p": 0.25},
}


def unused(p: Problem, case: Case) -> dict[str, torch.Tensor]:
    """Bool over the rows of q-like and k-like tensors."""
    sides = {"q": (p.inputs.q, case.seqlen_q, case.used_q), "k": (p.inputs.k, case.seqlen_k, case.used_k)}
    return {side: torch.from_numpy(~used_rows(case, *about)).to(p.q.device) for side, about in sides.items()}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kernel", parameters(supporting(with_cpu("forward"), used_k=(1,))))
def test_forward(kernel: dict, name: str) -> None:
    case = Case(f"unused-{name}", TYPES[kernel["dtype"]], **widths(kernel), **HEADS, **OPTIONS[name])
    if not supports(kernel, case):
        pytest.skip("the kernel does not have these options")
    clean, poisoned = (problem(c, device_of(kernel)) for c in (case, dataclasses.replace(case, poison="unused")))
    for one, other in zip(clean.forward(kernel["name"]), poisoned.forward(kernel["name"]), strict=True):
        assert same_bits(one, other)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kernel", parameters(supporting(with_cpu("backward"), used_k=(1,))))
def test_backward(kernel: dict, name: str) -> None:
    case = Case(f"unused-{name}", TYPES[kernel["dtype"]], head_dim=kernel["head_dim"], **HEADS, **OPTIONS[name])
    if not supports(kernel, case):
        pytest.skip("the kernel does not have these options")
    clean, poisoned = (problem(c, device_of(kernel)) for c in (case, dataclasses.replace(case, poison="unused")))
    o, lse = clean.forward()
    ordered = supports(kernel, case, deterministic=True)
    wanted = clean.backward(o, lse, kernel["name"], deterministic=ordered)
    nobody = unused(clean, case)
    per_row = [lse, *([] if poisoned.dlse is None else [poisoned.dlse])]
    o[nobody["q"]] = torch.nan
    for x in per_row:
        x.transpose(-1, -2)[nobody["q"]] = torch.nan
    found = poisoned.backward(o, lse, kernel["name"], deterministic=ordered)
    for tensor, x in wanted.items():
        if tensor == "dq":
            assert same_sums(x[~nobody["q"]], found[tensor][~nobody["q"]], ordered)
            assert same_bits(x[nobody["q"]], found[tensor][nobody["q"]])
        else:
            assert same_bits(x, found[tensor]), tensor
    for tensor, side in {"dq": "q", "dk": "k", "dv": "k"}.items():
        rows = found[tensor][nobody[side]]
        assert case.packed or not rows.any(), f"{tensor}: rows past a length are 0"
    case.check(**{tensor: to_numpy(x, clean.inputs.q.dtype) for tensor, x in found.items()})
