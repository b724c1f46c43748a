"""Second derivatives of libflash.torch in 16 bits where keys have a mean, against float64: no rounded out or tout in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mean_keys import MeanKeys
from tolerance import WHOLE_LIMIT_GRADIENT

torch = pytest.importorskip("torch")

import libflash.torch  # noqa: E402
from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch_calls import Calls  # noqa: E402

from libflash import _torch_kernels  # noqa: E402

A = libflash.torch.attention
func = torch.func
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
Tensors = list[torch.Tensor]

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of PyTorch at its first dual level
    pytest.mark.filterwarnings("ignore:.*performance drop.*"),  # of PyTorch about vmap
]


def gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, **options: Any) -> Any:
    return func.vjp(lambda *x: A(*x, **options), q, k, v)[1](dout)


def jvp_of_vjp(x: Tensors, t: Tensors, **options: Any) -> torch.Tensor:
    return func.jvp(lambda *x: gradients(*x, **options), tuple(x), tuple(t))[1][0]


def vjp_of_jvp(x: Tensors, t: Tensors, **options: Any) -> torch.Tensor:
    """The gradients of out and of its tangent are those that jvp_of_vjp has for dout's tangent and dout."""

    def tangents(*x: torch.Tensor) -> Any:
        return func.jvp(lambda *y: A(*y, **options), x, tuple(t[:3]))

    return func.vjp(tangents, *x[:3])[1]((t[3], x[3]))[0]


def double_backward(x: Tensors, t: Tensors, **options: Any) -> torch.Tensor:
    own = [y.clone().requires_grad_() for y in x]
    first = torch.autograd.grad(A(*own[:3], **options), own[:3], own[3], create_graph=True)
    return torch.autograd.grad(first, own, t[:3])[0]


def mapped(x: Tensors, t: Tensors, **options: Any) -> torch.Tensor:
    """One of two tangents that vmap maps over."""
    batch = [torch.stack([y, -y]) for y in t]
    return func.vmap(lambda *t: jvp_of_vjp(x, list(t), **options))(*batch)[0]


PATHS: dict[str, Callable[..., torch.Tensor]] = {
    "jvp of vjp": jvp_of_vjp, "vjp of jvp": vjp_of_jvp, "double backward": double_backward, "vmap": mapped,
}  # fmt: skip


def tensors(arrays: tuple[np.ndarray, ...], dtype: str) -> Tensors:
    return [torch.from_numpy(x).to(TYPES[dtype]) for x in arrays]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", PATHS)
def test_as_exact_as_its_roundings_allow(name: str, dtype: str) -> None:
    problem = MeanKeys.of(dtype)
    tdq = PATHS[name](tensors(problem.inputs, dtype), tensors(problem.direction, dtype))
    assert problem.ratio(tdq.detach().double().numpy(), moves_dout=name != "double backward") <= WHOLE_LIMIT_GRADIENT


def packed(*lengths: int) -> torch.Tensor:
    return torch.tensor(lengths, dtype=torch.int32)


LAYOUTS = {"bshd": (0, 1, 2, 3), "bhsd": (0, 2, 1, 3), "sbhd": (1, 0, 2, 3)}
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True, "window_size": (4, 0)},
    "bhsd": {"layout": "bhsd", "softcap": 2.0},
    "sbhd": {"layout": "sbhd", "dropout_p": 0.3, "seed": 5},
    "lengths": {"seqused_q": packed(9, 0), "seqused_k": packed(5, 12), "softmax_scale": -0.4},
    "packed": {"cu_seqlens_q": packed(0, 3, 8), "cu_seqlens_k": packed(0, 4, 12)},
    "scores": {"bias": torch.linspace(-1, 1, 108).reshape(9, 12), "mask": torch.arange(12) % 5 != 0},
    "sink": {"learnable_sink": torch.linspace(-1, 1, 4), "mask": torch.arange(9)[:, None] > 2},
}


def small(name: str) -> tuple[Tensors, Tensors]:
    """With rows that belong to no sequence, if packed."""
    generator = torch.Generator().manual_seed(3)

    def random(rows: int, heads: int, channels: int) -> torch.Tensor:
        shape = (rows, heads, channels) if name == "packed" else (2, rows, heads, channels)
        x = torch.randn(shape, generator=generator)
        return x if name == "packed" else x.permute(LAYOUTS[OPTIONS[name].get("layout", "bshd")]).contiguous()

    shapes = (9, 4, 8), (12, 2, 8), (12, 2, 5), (9, 4, 5)
    return [random(*shape) for shape in shapes], [random(*shape) for shape in shapes]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, path: str) -> None:
    """As in float64, where out is not computed again, except for a few roundings."""
    x, t = ([y.half() for y in given] for given in small(name))
    with Calls() as calls:
        tdq = PATHS[path](x, t, **OPTIONS[name])
    assert "attention_delta_tangent" in calls.names
    exact = PATHS[path]([y.double() for y in x], [y.double() for y in t], **OPTIONS[name])
    torch.testing.assert_close(tdq.double(), exact, rtol=0, atol=8 * 2.0**-11 * float(exact.abs().max()))


@pytest.mark.parametrize("dtype", [torch.half, torch.float, torch.double])
def test_only_16_bits_compute_anew(dtype: torch.dtype) -> None:
    x, t = ([y.to(dtype) for y in given] for given in small("causal"))
    with Calls() as calls:
        for path in (jvp_of_vjp, vjp_of_jvp, double_backward):
            path(x, t)
    anew = 3 if dtype == torch.half else 0
    assert calls.names.count("attention_delta_tangent") == anew
    assert calls.names.count("attention_tangent") == (0 if anew else 1)


def test_where_nothing_is_computed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on most GPUs: double backward takes tdelta from the pass that it needs anyway; the others need no further pass."""
    monkeypatch.setattr(_torch_kernels, "computes_out_anew", lambda *given: False)
    x, t = ([y.half() for y in given] for given in small("causal"))
    for path, passes in ((jvp_of_vjp, 0), (vjp_of_jvp, 0), (double_backward, 1)):
        with Calls() as calls:
            tdq = path(x, t)
        assert calls.names.count("attention_delta_tangent") == passes
        exact = path([y.double() for y in x], [y.double() for y in t])
        torch.testing.assert_close(tdq.double(), exact, rtol=0, atol=8 * 2.0**-11 * float(exact.abs().max()))


def test_delta_tangent_is_differentiable_in_the_direction() -> None:
    """A third pass, which the direction of a Hessian-vector product allows: as in float64."""

    def product(dtype: torch.dtype) -> Any:
        x, t = ([y.half().to(dtype) for y in given] for given in small("causal"))
        own, u = [y.clone().requires_grad_() for y in x], [y.clone().requires_grad_() for y in t[:3]]
        first = torch.autograd.grad(A(*own[:3], causal=True), own[:3], own[3], create_graph=True)
        second = torch.autograd.grad(first, own, u, create_graph=True)
        return torch.autograd.grad(second, u, [y.cos() for y in (*x[:3], x[3])])

    with Calls() as calls:
        made = product(torch.half)
    assert calls.names.count("attention_delta_tangent") > 1  # of the second and of the third pass
    for got, wanted in zip(made, product(torch.double), strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=0, atol=8 * 2.0**-11 * float(wanted.abs().max()))


@pytest.mark.filterwarnings("ignore")  # of the compiler's own
def test_in_a_compiled_function() -> None:
    x, t = ([y.half() for y in given] for given in small("causal"))

    def product(*x: torch.Tensor) -> Any:
        return func.grad(lambda *y: sum((g * u).sum() for g, u in zip(gradients(*y), t, strict=False)))(*x)

    seen: list[str] = []

    def record(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(product, backend=aot_autograd(fw_compiler=record), fullgraph=True)
    torch.testing.assert_close(compiled(*x), product(*x))
    assert "libflash.attention_delta_tangent.default" in seen


def test_fake_tensors_have_the_shapes_of_results() -> None:
    x, t = ([y.half() for y in given] for given in small("causal"))
    out, lse = A(*x[:3], return_lse=True)
    inputs = (x[3], *x[:3], out, lse)
    options = {"tq": t[0], "dlse": lse.cos()}
    torch.library.opcheck(torch.ops.libflash.attention_delta_tangent.default, inputs, options | {"tdout": t[3]})
    tout, tlse, tdelta, delta = torch.ops.libflash.attention_delta_tangent(*inputs, **options)
    options |= {"tdelta": tdelta, "delta": delta}
    torch.library.opcheck(torch.ops.libflash.attention_backward_tangent.default, (*inputs, tout, tlse), options)


LENGTHS = {"packed": OPTIONS["packed"], "lengths": {name: x for name, x in OPTIONS["lengths"].items() if name != "softmax_scale"}}


@pytest.mark.parametrize("anew", [True, False])
@pytest.mark.parametrize("name", LENGTHS)
def test_delta_is_that_of_an_exact_out(name: str, anew: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """delta is that of the exact out if the operator computes out again, else that of the given out. It is 0 for rows that do not
    exist, see no key or belong to no sequence."""
    monkeypatch.setattr(_torch_kernels, "computes_out_anew", lambda *given: anew)
    x, t = ([y.half() for y in given] for given in small(name))
    out, lse = A(*x[:3], return_lse=True, **LENGTHS[name])
    dlse = torch.cos(torch.arange(lse.numel())).reshape(lse.shape)
    *_, delta = torch.ops.libflash.attention_delta_tangent(x[3], *x[:3], out, lse, tq=t[0], dlse=dlse, **LENGTHS[name])
    exact = A(*(y.double() for y in x[:3]), **LENGTHS[name]) if anew else out.double()
    wanted = (exact * x[3].double()).sum(-1).transpose(-1, -2) - dlse
    counts = lse > -torch.inf
    assert 0 < counts.sum() < counts.numel()
    torch.testing.assert_close(delta.double(), torch.where(counts, wanted, 0.0), rtol=0, atol=2.0**-18)


def test_delta_takes_the_place_of_dlse() -> None:
    x, t = ([y.half() for y in given] for given in small("causal"))
    out, lse = A(*x[:3], return_lse=True)
    dlse = lse.cos()
    tout, tlse, tdelta, delta = torch.ops.libflash.attention_delta_tangent(x[3], *x[:3], out, lse, tq=t[0], dlse=dlse)
    inputs = (x[3], *x[:3], out, lse, tout, tlse)
    made = torch.ops.libflash.attention_backward_tangent(*inputs, tq=t[0], tdelta=tdelta, delta=delta, dlse=dlse + 7)
    wanted = torch.ops.libflash.attention_backward_tangent(*inputs, tq=t[0], tdelta=tdelta, dlse=dlse)
    for one, other in zip(made[:3], wanted, strict=False):
        torch.testing.assert_close(one, other, rtol=0, atol=8 * 2.0**-11 * float(other.abs().max()))
