"""Derivatives inside torch.compile, and of compiled functions: right, or refused. PyTorch's compiler loses tangents of operators
and gradients of transforms without a word, so a new PyTorch may break any of these tests.

With fullgraph=True forward mode is refused; else the compiler ends its graph there, and attention runs as without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import libflash

torch = pytest.importorskip("torch")

import libflash.torch  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch_problem import qkv, tensors  # noqa: E402

func = torch.func
BACKENDS = ["eager", "aot_eager", "inductor"]
Function = Callable[..., Any]

pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler's own

Q, K, V = tensors((1, 3, 2, 4), (1, 4, 1, 4), (1, 4, 1, 3), dtype=torch.float64, grad=False)
T = Q.cos()
START = torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(4, 4)


def attend(q: torch.Tensor) -> torch.Tensor:
    return libflash.torch.attention(q * 1, K, V, causal=True)


def loss(q: torch.Tensor) -> torch.Tensor:
    out, lse = libflash.torch.attention(q * 1, K, V, causal=True, return_lse=True)
    return out.square().sum() + lse.sin().sum()


def compile_it(function: Function, backend: str = "aot_eager", *, fullgraph: bool = False) -> Function:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=fullgraph, backend=backend)


def assert_close(got: Any, wanted: Any) -> None:
    """And not zero, which is what the compiler makes of a derivative that it loses."""
    for x in torch.utils._pytree.tree_leaves(wanted):
        assert x.abs().max() > 0.01
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


# -- forward mode inside a compiled function


def dual_level(q: torch.Tensor, t: torch.Tensor) -> Any:
    """The primals too: a compiled make_dual() of an operator's results gave the tangents in their place."""
    with forward_ad.dual_level():
        made, _ = libflash.torch.attention(forward_ad.make_dual(q, t), K, V, return_lse=True)
        out, tangent = forward_ad.unpack_dual(made)
        return out, tangent


def after_a_break(q: torch.Tensor, t: torch.Tensor) -> Any:
    """The compiler skips a frame with a break inside a transform, and compiles what that calls: not attention."""

    def broken(q: torch.Tensor) -> torch.Tensor:
        q = q * 1
        torch._dynamo.graph_break()
        return attend(q)

    return func.jvp(broken, (q,), (t,))


FORWARD: dict[str, Function] = {
    "jvp": lambda q, t: func.jvp(attend, (q,), (t,)),
    "dual level": dual_level,
    "hessian": lambda q, t: func.hessian(lambda w: loss(w * q))(t[0, 0, 0, 0]),
    "jvp of libflash.attention": lambda q, t: func.jvp(lambda q: libflash.attention(q, K, V), (q,), (t,)),
    "after a break": after_a_break,
    "jvp of grad": lambda q, t: func.jvp(func.grad(loss), (q,), (t,)),
    "grad of jvp": lambda q, t: func.grad(lambda q: func.jvp(loss, (q,), (t,))[1].square())(q),
}


@pytest.mark.parametrize(
    ("name", "backend"),
    [(name, backend) for name in ("jvp", "dual level", "hessian") for backend in BACKENDS]
    + [(name, "aot_eager") for name in list(FORWARD)[3:]],
)
def test_forward_mode_inside_a_compiled_function(name: str, backend: str) -> None:
    assert_close(compile_it(FORWARD[name], backend)(Q, T), FORWARD[name](Q, T))


@pytest.mark.parametrize("name", ["jvp", "dual level", "hessian", "jvp of grad", "grad of jvp"])
def test_a_whole_graph_refuses_forward_mode(name: str) -> None:
    with pytest.raises(Exception, match="forward-mode derivative of attention cannot be compiled"):
        compile_it(FORWARD[name], fullgraph=True)(Q, T)


def mean_flow(stop: bool) -> Function:
    """A loss of an output and its tangent, with or without the tangent's own gradient."""

    def step(weight: torch.Tensor) -> torch.Tensor:
        u, du = func.jvp(lambda q: attend(q @ weight), (Q,), (T,))
        return (u - (du.detach() if stop else du)).square().sum()

    return step


@pytest.mark.parametrize(("stop", "backend"), [(True, "eager"), (True, "inductor"), (True, "aot_eager"), (False, "aot_eager")])
def test_a_compiled_mean_flow_step(stop: bool, backend: str) -> None:
    """The jvp runs without the compiler; its gradient by autograd, and by func.grad within the compiled function."""
    step = mean_flow(stop)
    wanted = func.grad(step)(START)
    leaf = START.clone().requires_grad_()
    assert_close(torch.autograd.grad(compile_it(step, backend)(leaf), leaf)[0], wanted)
    if backend != "eager":  # where PyTorch fails an assertion of its own, with its own operators too
        assert_close(compile_it(func.grad(step), backend)(START), wanted)


# -- reverse mode inside a compiled function


def exact_gradient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    own = q.detach().clone().requires_grad_()
    return torch.autograd.grad(function_with_attention(own, k, v), own)[0]


def function_with_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out, lse = libflash.torch.attention(q * 1, k, v, causal=True, return_lse=True)
    return out.square().sum() + torch.where(lse > -torch.inf, lse, 0).sum()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fullgraph", [True, False])
def test_gradients_inside_a_compiled_function(backend: str, fullgraph: bool) -> None:
    """torch.func.grad, vmap and jacrev compiled: right, never zero."""
    q, k, v = (x[..., :5].contiguous() for x in qkv(grad=False))

    def compiled(function: Function) -> Function:
        return compile_it(function, backend, fullgraph=fullgraph)

    wanted = exact_gradient(q, k, v)
    assert wanted.abs().max() > 0.1
    torch.testing.assert_close(compiled(func.grad(function_with_attention))(q, k, v), wanted)
    singles = [x[:, None] for x in (q, k, v)]
    got = compiled(func.vmap(func.grad(function_with_attention)))(*singles)
    torch.testing.assert_close(got[:, 0], torch.cat([exact_gradient(*(x[i] for x in singles)) for i in range(2)]))
    torch.testing.assert_close(compiled(func.jacrev(function_with_attention))(q, k, v), wanted)


def penalty(q: torch.Tensor) -> torch.Tensor:
    """A loss of a gradient, whose gradient is a second derivative."""
    return loss(q) + func.grad(loss)(q).square().sum()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_training_step_with_a_gradient_penalty(backend: str) -> None:
    """The gradient of a gradient within one graph."""
    wanted = func.grad(penalty)(Q)
    assert_close(compile_it(func.grad(penalty), backend, fullgraph=True)(Q), wanted)
    leaf = Q.clone().requires_grad_()
    assert_close(torch.autograd.grad(compile_it(penalty, backend, fullgraph=True)(leaf), leaf)[0], wanted)


def test_pytorch_refuses_double_backward_through_a_compiled_function() -> None:
    leaf = Q.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(compile_it(loss)(leaf), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        gradient.square().sum().backward()


# -- transforms of a compiled function


def tangent_of_dual(f: Function) -> torch.Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(Q, T))).tangent


LATER: dict[str, Function] = {
    "grad": lambda f: func.grad(f)(Q),
    "jvp": lambda f: func.jvp(f, (Q,), (T,)),
    "hessian": lambda f: func.hessian(f)(Q),
    "jvp of grad": lambda f: func.jvp(func.grad(f), (Q,), (T,)),
    "grad of grad": lambda f: func.grad(lambda q: func.grad(f)(q).square().sum())(Q),
    "vmap of grad": lambda f: func.vmap(func.grad(f))(torch.stack([Q, -Q])),
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_function_under_a_transform(backend: str) -> None:
    """The graph was compiled before, for plain tensors. With fullgraph=True PyTorch refuses the transform."""
    compiled = compile_it(loss, backend)
    compiled(Q)
    # Under nested transforms the backend "eager" fails an assertion of its own after a graph break, with any operator.
    for name in ("grad", "jvp") if backend == "eager" else LATER:
        assert_close(LATER[name](compiled), LATER[name](loss))


def test_a_compiled_function_of_duals() -> None:
    """Outside of torch.func PyTorch runs the compiled graph on duals."""
    compiled = compile_it(loss)
    compiled(Q)
    assert_close(tangent_of_dual(compiled), tangent_of_dual(loss))
