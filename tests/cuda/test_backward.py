"""Backward on the GPU: the cases of the CPU kernels against the same float64 reference; NaN and strides.

Here and in the other files of this folder, tests of every kernel also run with one CPU kernel, so that they run without a GPU.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import cases
import pytest
from case import Case
from gpu_kernels import TYPES, chosen, device_of, errors_of, kernels, parameters, serves, supports, with_cpu

import libflash

torch = pytest.importorskip("torch")
from gpu_case import problem, run_backward, same_sums, to_numpy  # noqa: E402  (needs torch)

EVERY_KERNEL = parameters(with_cpu("backward"))
CUDA_KERNELS = parameters(kernels("backward"))
DETERMINISTIC_SHARE = 3

# A NaN reaches other rows of its tile, because the matrix instruction multiplies it by 0: test_nan_stays_in_its_tile.
CASES = [case for case in cases.quick() if case.poison in (None, "unused")]


def runs() -> list:
    """Every case with some kernels that serve it; every third also with deterministic=True, different ones for each kernel."""
    marks = {parameter.values[0]["name"]: parameter.marks for parameter in CUDA_KERNELS}
    found = []
    for index, case in enumerate(CASES):
        for number, kernel in enumerate(chosen(kernels("backward"), case, index)):
            both = (index + number) % DETERMINISTIC_SHARE == 0 and serves(kernel, case, deterministic=True)
            for deterministic in (False, True)[: 1 + both]:
                name = f"{case}-{kernel['name']}{'-deterministic' * deterministic}"
                found.append(pytest.param(case, kernel["name"], deterministic, id=name, marks=marks[kernel["name"]]))
    return found


@pytest.mark.parametrize(("case", "kernel", "deterministic"), runs())
def test_case(case: Case, kernel: str, deterministic: bool) -> None:
    case.check(errors=errors_of(kernel), **run_backward(case, kernel, deterministic))


@pytest.mark.parametrize("poisoned", ["q", "dout", "k", "v"])
@pytest.mark.parametrize("kernel", EVERY_KERNEL)
def test_nan_stays_in_its_tile(kernel: dict, poisoned: str) -> None:
    """Causal, tiles of at most 128: tiles that see no NaN, and the other head, have the same bits."""
    case = Case("nan", TYPES[kernel["dtype"]], 1, 700, 700, head_dim=kernel["head_dim"], causal=True)
    p = problem(case, device_of(kernel))
    ordered = supports(kernel, case, deterministic=True)
    clean = p.backward(*p.forward(), kernel["name"], deterministic=ordered)
    row = 400 if poisoned in ("q", "dout") else 690
    getattr(p, poisoned)[0, row, 0] = torch.nan
    dirty = p.backward(*p.forward(), kernel["name"], deterministic=ordered)
    if poisoned in ("q", "dout"):
        unmoved = {"dq": torch.arange(700) != row, "dk": torch.arange(700) >= 512, "dv": torch.arange(700) >= 512}
    else:
        unmoved = {"dq": torch.arange(700) < 640}
    for name, rows in unmoved.items():
        assert same_sums(clean[name][0, rows, 0], dirty[name][0, rows, 0], ordered or name != "dq"), name
    assert dirty["dq"][0, row, 0].isnan().all()
    for name, x in dirty.items():
        assert same_sums(clean[name][:, :, 1], x[:, :, 1], ordered or name != "dq"), name


def heads_first(x: torch.Tensor) -> torch.Tensor:
    """The same numbers in memory as (batch, heads, rows, channels)."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def odd_rows(x: torch.Tensor) -> torch.Tensor:
    """The same values in rows that vector loads cannot read."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 3), torch.nan, dtype=x.dtype, device=x.device)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


@pytest.mark.parametrize("layout", [heads_first, odd_rows])
@pytest.mark.parametrize("kernel", EVERY_KERNEL)
def test_strides(kernel: dict, layout: Callable) -> None:
    """Of every tensor; and of dout alone, where a row may stand for all."""
    case = Case("strides", TYPES[kernel["dtype"]], 2, 150, 170, 4, 2, kernel["head_dim"], causal=True)
    ordered = supports(kernel, case, deterministic=True)
    p = problem(case, device_of(kernel))
    o, lse = p.forward()
    names = ("q", "k", "v", "dout")
    for name in names:
        setattr(p, name, layout(getattr(p, name)))
    made = {f"d{name}": layout(torch.full_like(getattr(p, name), torch.nan)) for name in "qkv"}
    options = {"causal": True, "kernel": kernel["name"]}
    if layout is odd_rows and not supports(kernel, dataclasses.replace(case, head_dim=33)):
        with pytest.raises(libflash.UnsupportedError, match=r"^q: its address and its strides must be multiples of 16 bytes"):
            libflash.attention_backward(p.dout, p.q, p.k, p.v, layout(o), layout(lse), **made, **options)
        return
    libflash.attention_backward(p.dout, p.q, p.k, p.v, layout(o), layout(lse), **made, **options)
    case.check(**{name: to_numpy(x, p.inputs.q.dtype) for name, x in made.items()})

    repeated = p.dout[:, :1].expand_as(p.dout)
    results = [
        libflash.attention_backward(dout, p.q, p.k, p.v, o, lse, deterministic=ordered, **options)
        for dout in (repeated, repeated.contiguous())
    ]
    for name, one, other in zip(("dq", "dk", "dv"), *results, strict=True):
        assert same_sums(one, other, ordered or name != "dq"), name


# Capabilities that some kernels lack, by the field of a case that needs them.
OPTIONS = {
    "q": {"head_dim": 33},
    "softcap": {"softcap": 20.0},
    "dropout_p": {"dropout_p": 0.25},
    "alibi_slopes": {"alibi": "h"},
    "bias": {"bias": "hqk"},
    "mask": {"mask": "qk"},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kernel", parameters([k for k in kernels("backward") if k["backend"] == "sm90"]))
def test_unsupported_options(kernel: dict, option: str) -> None:
    """The kernel is refused with a reason, and another kernel is chosen."""
    if supports(kernel, Case("", **OPTIONS[option])):
        pytest.skip("the kernel supports it")
    case = Case(f"unknown-{option}", TYPES[kernel["dtype"]], **OPTIONS[option])
    with pytest.raises(libflash.UnsupportedError, match=rf"^{option}: .*\[{kernel['name']}\]"):
        run_backward(case, kernel["name"], False)
    case.check(**run_backward(case, None, False))
