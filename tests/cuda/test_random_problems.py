"""Random problems with options on the kernels for sm_90a: small ones against the exact result, larger ones against the kernels
for sm_80. Always the same problems; the number in a name is the seed.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import cases
import pytest
from case import Case
from gpu_kernels import chosen, device_of, errors_of, in_place_of, kernels, parameters, serves

torch = pytest.importorskip("torch")
from gpu_case import problem, run_backward, run_forward  # noqa: E402  (needs torch)

OPERATIONS = ("forward", "backward")
SMALL, LARGE, ON_CPU = 60, 30, 5  # problems of an operation


def small(seed: int) -> Case:
    """A case of cases.long() in 16 bits, with rows of a multiple of 16 bytes."""
    rng = random.Random(seed)
    of_k, of_v = (rng.choice((64, 128, 8 * rng.randint(1, 32), 8 * rng.randint(1, 64))) for _ in "kv")
    made = cases.random_case(seed)
    fields = {"dtype": rng.choice(cases.HALF), "head_dim": of_k, "head_dim_v": of_v if made.head_dim_v else None}
    fields["fill"] = rng.choice(cases.FACTORS["fill"]).get("fill", "randn")
    return dataclasses.replace(made, name=f"random-rows-of-16-bytes-{seed}", **fields)


def large(seed: int) -> Case:
    """The same with more rows and fewer heads. Without what makes errors of two right kernels differ much: cancellation, and
    softmax that is nearly one-hot.
    """
    made, rng = small(seed), random.Random(seed)

    def longer(lengths: int | tuple[int, ...] | None) -> int | tuple[int, ...] | None:
        return tuple(3 * n for n in lengths) if isinstance(lengths, tuple) else lengths and 3 * lengths

    names = ("seqlen_q", "seqlen_k", "used_q", "used_k")
    fields = {name: longer(getattr(made, name)) for name in names}
    heads_k = rng.choice((1, 2))
    fields |= {"heads_k": heads_k, "heads_q": heads_k * rng.choice((1, 2)), "fill": "randn"}
    scale = None if made.softmax_scale == 1.0 else made.softmax_scale
    return dataclasses.replace(made, name=f"random-large-{seed}", softmax_scale=scale, **fields)


def drawn(operation: str, draw: Callable[[int], Case], count: int, first_seed: int) -> list:
    """Problems that kernels of sm90 serve, each with one of these; and some for the CPU kernel."""
    of_sm90 = [kernel for kernel in kernels(operation) if kernel["backend"] == "sm90"]
    seeds, pairs = range(first_seed, first_seed + 20 * count), []
    for seed in seeds:
        able = chosen(of_sm90, draw(seed), seed)
        if able and len(pairs) < count:
            pairs.append((draw(seed), able[seed % len(able)]))
    pairs += [(draw(seed), in_place_of(operation)) for seed in seeds[:ON_CPU]]
    found = []
    for case, kernel in pairs:
        marks = parameters([kernel])[0].marks
        found.append(pytest.param(case, kernel, id=f"{case}-{kernel['name']}", marks=marks))
    return found


def every(draw: Callable[[int], Case], count: int, first_seed: int) -> pytest.MarkDecorator:
    made = [(x, name) for name in OPERATIONS for x in drawn(name, draw, count, first_seed)]
    return pytest.mark.parametrize(
        ("case", "kernel", "operation"), [pytest.param(*x.values, name, id=f"{name}-{x.id}", marks=x.marks) for x, name in made]
    )


@every(small, SMALL, 1000)
def test_against_the_exact_result(case: Case, kernel: dict, operation: str) -> None:
    """Backward in a fixed order for every other seed."""
    name, device = kernel["name"], device_of(kernel)
    if operation == "forward":
        case.check(**run_forward(case, name, device))
        return
    ordered = device == "cuda" and serves(kernel, case, deterministic=True) and int(case.name.rpartition("-")[2]) % 2 == 0
    case.check(errors=errors_of(name), **run_backward(case, name, ordered, device))


def other_kernel(operation: str, kernel: dict) -> dict[str, str]:
    return {"kernel": f"{operation}_cpu_generic"} if device_of(kernel) == "cpu" else {"backend": "sm80"}


def check_close(got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    """Each row differs by a few percent of its length and the mean length of rows; elements that belong to no sequence are NaN
    in both.
    """
    assert torch.equal(got.isnan(), wanted.isnan()), what
    a, b = (x.double().nan_to_num() for x in (got, wanted))
    sizes = b.norm(dim=-1)
    wrong = (a - b).norm(dim=-1) > 2**-4 * (sizes + sizes[sizes > 0].mean() if (sizes > 0).any() else sizes)
    assert not wrong.any(), f"{what}: {int(wrong.sum())} of {wrong.numel()} rows, first {wrong.nonzero()[0].tolist()}"


@every(large, LARGE, 5000)
def test_beside_sm80(case: Case, kernel: dict, operation: str) -> None:
    """Kernels of both families get the same inputs; on the CPU those of two instruction sets."""
    p = problem(case, device_of(kernel))
    o, lse = p.forward(**(other_kernel("forward", kernel) if operation == "backward" else {"kernel": kernel["name"]}))
    if operation == "forward":
        other, other_lse = p.forward(**other_kernel("forward", kernel))
        check_close(o, other, f"{case} out")
        finite = other_lse.isfinite()
        assert torch.equal(finite, lse.isfinite())
        torch.testing.assert_close(lse[finite], other_lse[finite], rtol=1e-4, atol=1e-3)
        return
    got, wanted = (p.backward(o, lse, **one) for one in ({"kernel": kernel["name"]}, other_kernel("backward", kernel)))
    for name, x in got.items():
        check_close(x, wanted[name], f"{case} {name}")
