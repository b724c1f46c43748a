"""Tangents on the GPU: the cases of the CPU kernels against the same float64 reference; from PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tangent_bounds
import tangent_cases
from case import Case
from gpu_kernels import TYPES, chosen, device_of, kernels, parameters, supporting, with_cpu
from tangent_cases import TangentCase, tangents_of
from tangent_problem import backward_by, forward_by

import libflash

torch = pytest.importorskip("torch")
import gpu_tangent  # noqa: E402  (needs torch)
from gpu_case import problem, same_bits, to_device, to_numpy  # noqa: E402
from gpu_tangent import check_backward, check_forward  # noqa: E402

EVERY_KERNEL = parameters(with_cpu("forward_tangent"))
CUDA_KERNELS = parameters(kernels("forward_tangent"))
BACKWARD_KERNELS = parameters(with_cpu("backward_tangent"))
# A NaN reaches other rows of its tile, because the matrix instruction multiplies it by 0: test_nan_stays_in_its_tile.
CASES = [tangent for tangent in tangent_cases.quick() if tangent.case.poison in (None, "unused")]
ON_HOST = functools.partial(gpu_tangent.forward_tangent, device="cpu")
BACKWARD_ON_HOST = functools.partial(gpu_tangent.backward_tangent, device="cpu")


def runs(operation: str) -> list:
    """Every case with some kernels that serve it."""
    marks = {parameter.values[0]["name"]: parameter.marks for parameter in parameters(kernels(operation))}
    return [
        pytest.param(tangent, kernel["name"], id=f"{tangent}-{kernel['name']}", marks=marks[kernel["name"]])
        for tangent in CASES
        for kernel in chosen(kernels(operation), tangent.case, tangent.number)
    ]


@pytest.mark.parametrize(("tangent", "kernel"), runs("forward_tangent"))
def test_case(tangent: TangentCase, kernel: str) -> None:
    check_forward(tangent, kernel)


@pytest.mark.parametrize(("tangent", "kernel"), runs("backward_tangent"))
def test_case_of_backward(tangent: TangentCase, kernel: str) -> None:
    check_backward(tangent, kernel)


def test_the_helpers_on_the_host() -> None:
    for tangent in CASES[:4]:
        check_forward(tangent, None, "cpu")
        check_backward(tangent, None, "cpu")


@pytest.mark.parametrize("absent", [("dout",), ("q", "dout"), ("k",), ("v", "dout"), ("q", "k", "v")], ids="-".join)
@pytest.mark.parametrize("kernel", BACKWARD_KERNELS)
def test_backward_without_some_tangents(kernel: dict, absent: tuple[str, ...]) -> None:
    """An absent tangent is zero; double backward has none of dout. A second call has the same bits."""
    case = Case("absent", TYPES[kernel["dtype"]], 2, 300, 330, 4, 2, kernel["head_dim"], causal=True, dlse=True)
    x = case.inputs()
    t = tangents_of(case, x, *absent)
    of_gpu = device_of(kernel) == "cuda"
    forward = forward_by(gpu_tangent.forward_tangent if of_gpu else ON_HOST, x, t, None)
    run = gpu_tangent.backward_tangent if of_gpu else BACKWARD_ON_HOST
    made, again = (backward_by(run, x, t, kernel["name"], forward) for _ in range(2))
    tangent_bounds.check(made, tangent_bounds.expect(x.q, x.k, x.v, t, dout=x.dout, dlse=x.dlse, **x.options))
    for name, a in made.items():
        assert a.tobytes() == again[name].tobytes(), name


@pytest.mark.parametrize("kernel", BACKWARD_KERNELS)
def test_backward_of_heads_first(kernel: dict) -> None:
    case = Case("heads first", TYPES[kernel["dtype"]], 2, 150, 170, 4, 2, kernel["head_dim"], causal=True)
    p, t = given(case, device_of(kernel))
    x = p.inputs
    out, lse, tout, tlse = libflash.attention_tangent(p.q, p.k, p.v, **t, **p.options)
    q, k, v, dout, out, tout = (y.transpose(1, 2).contiguous().transpose(1, 2) for y in (p.q, p.k, p.v, p.dout, out, tout))
    of_inputs = {name: y.transpose(1, 2).contiguous().transpose(1, 2) for name, y in t.items()}
    gradients = libflash.attention_backward_tangent(
        dout, q, k, v, out, lse, tout, tlse, **of_inputs, kernel=kernel["name"], **p.options
    )
    wanted = tangent_bounds.expect(x.q, x.k, x.v, tangents_of(case, x, "dout", "dlse"), dout=x.dout, **x.options)
    made = {name: to_numpy(y, x.q.dtype) for name, y in zip(("tdq", "tdk", "tdv"), gradients, strict=True)}
    tangent_bounds.check(made, wanted)


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True, "dlse": True},
    "every": {"softcap": 8.0, "alibi": "h", "mask": "qk", "block_mask": "h", "sink": True, "dropout_p": 0.3, "seed": 5},
    "packed": {"batch": 1, "seqlen_q": (70, 0, 131, 9), "seqlen_k": (200, 7, 0, 64), "used_q": (61, 0, 131, 9), "slack_rows": 6},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kernel", parameters(supporting(with_cpu("backward_tangent"), bias="hqk")))
def test_dbias(kernel: dict, options: str) -> None:
    """Of a bias that is broadcast over any dimensions; a second call has the same bits."""
    for letters in ("bhqk", "hqk", "qk", "bhk", "hq", ""):
        fields = {"batch": 2, "seqlen_q": 150, "seqlen_k": 170} | OPTIONS[options]
        fields |= {"heads_q": 4, "head_dim": kernel["head_dim"], "bias": letters}
        case = Case(f"{options}-{letters}", TYPES[kernel["dtype"]], **fields)
        x = case.inputs()
        t = tangents_of(case, x)
        of_gpu = device_of(kernel) == "cuda"
        forward = forward_by(gpu_tangent.forward_tangent if of_gpu else ON_HOST, x, t, None)
        run = gpu_tangent.backward_tangent if of_gpu else BACKWARD_ON_HOST
        made, again = (backward_by(run, x, t, kernel["name"], forward) for _ in range(2))
        tangent_bounds.check(made, tangent_bounds.expect(x.q, x.k, x.v, t, dout=x.dout, dlse=x.dlse, **x.options), str(case))
        for name, a in made.items():
            assert a.tobytes() == again[name].tobytes(), (name, letters)


def given(case: Case, device: str) -> tuple:
    """The problem and the direction as tensors."""
    p = problem(case, device)
    t = tangents_of(case, p.inputs)
    return p, {name: to_device(getattr(t, name[1:]), device) for name in ("tq", "tk", "tv")}


@pytest.mark.parametrize("kernel", EVERY_KERNEL)
def test_delta_is_the_sum_of_its_products(kernel: dict) -> None:
    """tdelta = tdout . out + dout . tout - tdlse and delta = dout . out - dlse, where float32 sums and rounded results allow."""
    case = Case("delta", TYPES[kernel["dtype"]], 2, 150, 170, 4, 2, kernel["head_dim"], causal=True, dlse=True)
    x = case.inputs()
    t = tangents_of(case, x)
    run = gpu_tangent.forward_tangent if device_of(kernel) == "cuda" else ON_HOST
    made = forward_by(run, x, t, kernel["name"], delta=True)
    o, to, dout, tdout = (np.asarray(y, np.float64) for y in (made["o"], made["to"], x.dout, t.dout))
    unit = {"f16": 2.0**-11, "bf16": 2.0**-8, "f32": 2.0**-20, "f64": 2.0**-49}[kernel["dtype"]]
    for name, products, less in (("tdelta", (tdout * o, dout * to), t.dlse), ("delta", (dout * o,), x.dlse)):
        exact = np.moveaxis(sum(products).sum(-1), -1, 1) - less
        scale = np.moveaxis(sum(map(abs, products)).sum(-1), -1, 1) + abs(less)
        assert (abs(made[name] - exact) <= 2 * unit * scale + 1e-30).all(), name


@pytest.mark.parametrize("poisoned", ["tq", "tk", "tv"])
@pytest.mark.parametrize("kernel", EVERY_KERNEL)
def test_nan_stays_in_its_tile(kernel: dict, poisoned: str) -> None:
    """Causal, tiles of at most 128: rows of tiles that do not see the NaN, and the other head, have the same bits."""
    case = Case("nan", TYPES[kernel["dtype"]], 1, 700, 700, 2, head_dim=kernel["head_dim"], causal=True)
    p, t = given(case, device_of(kernel))
    options = {"kernel": kernel["name"]} | p.options
    _, _, clean, clean_lse = libflash.attention_tangent(p.q, p.k, p.v, **t, **options)
    t[poisoned][0, 300, 0] = torch.nan
    _, _, dirty, dirty_lse = libflash.attention_tangent(p.q, p.k, p.v, **t, **options)
    assert dirty[0, 300, 0].isnan().all()
    reached = torch.arange(700) >= 256
    if poisoned == "tq":
        reached &= torch.arange(700) < 384
    assert same_bits(clean[0, ~reached, 0], dirty[0, ~reached, 0])
    assert same_bits(clean[:, :, 1], dirty[:, :, 1])
    assert same_bits(clean_lse[:, 1], dirty_lse[:, 1])


@pytest.mark.parametrize("kernel", EVERY_KERNEL)
def test_strides_and_repeats(kernel: dict) -> None:
    """Heads first, and, but for TMA, rows that vector loads cannot read; a second call has the same bits."""
    case = Case("strides", TYPES[kernel["dtype"]], 2, 150, 170, 4, 2, kernel["head_dim"], causal=True)
    p, t = given(case, device_of(kernel))
    options = {"kernel": kernel["name"]} | p.options
    made = libflash.attention_tangent(p.q, p.k, p.v, **t, **options)
    for x, y in zip(made, libflash.attention_tangent(p.q, p.k, p.v, **t, **options), strict=True):
        assert same_bits(x, y)

    def heads_first(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    def odd_rows(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(x, (0, 3), value=torch.nan)[..., : x.shape[-1]]

    x = p.inputs
    expected = tangent_bounds.expect(x.q, x.k, x.v, tangents_of(case, x), dout=x.dout, **x.options)
    for layout in (heads_first,) if kernel["backend"] == "sm90" else (heads_first, odd_rows):
        q, k, v = map(layout, (p.q, p.k, p.v))
        _, _, tout, tlse = libflash.attention_tangent(q, k, v, **{name: layout(y) for name, y in t.items()}, **options)
        tangent_bounds.check({"to": to_numpy(tout, x.q.dtype), "tlse": tlse.cpu().numpy()}, expected, layout.__name__)


@pytest.mark.parametrize("kernel", CUDA_KERNELS)
def test_large_tangents(kernel: dict) -> None:
    """Linear: 4096 times the direction has 4096 times the tangents, though fp16 cannot hold P ts."""
    case = Case("large", TYPES[kernel["dtype"]], 1, 200, 300, 2, head_dim=kernel["head_dim"])
    p, t = given(case, device_of(kernel))
    options = {"kernel": kernel["name"]} | p.options
    _, _, _, one = libflash.attention_tangent(p.q, p.k, p.v, tq=t["tq"], **options)
    _, _, tout, many = libflash.attention_tangent(p.q, p.k, p.v, tq=t["tq"] * 4096, **options)
    assert torch.isfinite(many).all()
    assert torch.isfinite(tout).all()
    assert (many - 4096 * one).abs().max() <= 2**-12 * many.abs().max()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    ("shape", "dim"), [((2, 2, 60, 60), 64), ((2, 1, 60), 64), ((1, 60), 64), ((60, 1), 64), ((2, 60, 60), 320)], ids=str
)
def test_second_derivatives_of_pytorch(shape: tuple[int, ...], dim: int) -> None:
    """A Hessian-vector product, also with respect to a bias, against attention by single operations.

    A bias that is the same for all keys changes nothing: its derivatives are rounding errors, so errors are measured by the
    largest derivative of all inputs.
    """
    from libflash.torch import attention

    made = torch.Generator(device="cuda").manual_seed(5)
    of_inputs = [torch.randn(2, 60, 2, dim, device="cuda", generator=made) for _ in range(6)]
    of_bias = [torch.randn(shape, device="cuda", generator=made) for _ in range(2)]
    inputs, u = [[*of_inputs[i::2], of_bias[i]] for i in range(2)]

    def eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        s = torch.einsum("bihc,bjhc->bhij", q, k) / dim**0.5 + bias
        hidden = torch.ones(60, 60, dtype=torch.bool, device="cuda").triu(1)
        return torch.einsum("bhij,bjhc->bihc", s.masked_fill(hidden, -torch.inf).softmax(-1), v)

    def own(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v, bias=bias, causal=True)

    def product(f: Callable) -> tuple[torch.Tensor, ...]:
        x = [y.clone().requires_grad_() for y in inputs]
        gradients = torch.autograd.grad(f(*x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(sum((g * y).sum() for g, y in zip(gradients, u, strict=True)), x)

    expected = product(eager)
    largest = max(wanted.abs().max() for wanted in expected)
    for got, wanted in zip(product(own), expected, strict=True):
        assert (got - wanted).abs().max() <= 1e-4 * largest


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch.func's own use
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dim", [64, 320])
def test_forward_mode_of_pytorch(dim: int) -> None:
    """torch.func.jvp against the explicit function, and against a difference quotient."""
    from libflash.torch import attention

    made = torch.Generator(device="cuda").manual_seed(3)
    q, k, v, *t = (torch.randn(2, 100, 4, dim, device="cuda", generator=made) for _ in range(6))
    out, tout = torch.func.jvp(lambda *x: attention(*x, causal=True), (q, k, v), tuple(t))
    wanted = libflash.attention_tangent(q, k, v, *t, causal=True)
    assert torch.allclose(out, wanted[0], atol=1e-5)
    assert torch.allclose(tout, wanted[2], atol=1e-5)
    step = 1e-2
    ahead, behind = (
        libflash.attention(*(x + sign * step * y for x, y in zip((q, k, v), t, strict=True)), causal=True) for sign in (1, -1)
    )
    assert torch.allclose(tout, (ahead - behind) / (2 * step), atol=2e-2)
