"""libflash.jax in forward mode and differentiated twice, in float64: against JAX's derivatives of attention in jax.numpy, and for
all options against the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from second_problem import RELATIVE, SecondProblem, chosen

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import libflash.jax  # noqa: E402
from jax_problem import assert_close, definition, loss_of  # noqa: E402

EVERY = tuple(range(5))


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


def problem(seed: int = 0) -> list[Any]:
    """q, k, v, bias (shared by the batch) and sink: two query heads for a key head."""
    rng = np.random.default_rng(seed)
    shapes = (2, 3, 4, 4), (2, 5, 2, 4), (2, 5, 2, 3), (1, 4, 3, 5), (4,)
    return [jnp.asarray(rng.standard_normal(shape)) for shape in shapes]


def own(q: Any, k: Any, v: Any, bias: Any, sink: Any) -> Any:
    return libflash.jax.attention(q, k, v, bias=bias, learnable_sink=sink, causal=True, return_lse=True)


def close(got: Any, wanted: Any) -> None:
    def one(x: Any, y: Any) -> None:
        x, y = np.asarray(x), np.asarray(y)
        assert x.shape == y.shape
        np.testing.assert_allclose(x, y, rtol=0, atol=RELATIVE * max(1.0, float(np.abs(y).max(initial=0))))

    jax.tree.map(one, got, wanted)


# -- every transformation, by libflash and in jax.numpy

Loss = Callable[..., Any]


def penalty(loss: Loss) -> Loss:
    """The sum of the squared gradients."""
    return lambda *x: sum((g**2).sum() for g in jax.grad(loss, EVERY)(*x))


def loss_of_tangent(a: Loss) -> Loss:
    """A loss of out, lse and of their tangents."""

    def loss(*x: Any) -> Any:
        (out, lse), (tout, tlse) = jax.jvp(a, x, tuple(problem(1)))
        return (out * jnp.sin(tout)).sum() + (lse * tlse**2).sum()

    return loss


def hessian_vector(loss: Loss, x: list[Any]) -> Any:
    return jax.jvp(jax.grad(loss, EVERY), tuple(x), tuple(problem(1)))[1]


TRANSFORMATIONS: dict[str, Callable[[Loss, list[Any]], Any]] = {
    "jvp": lambda a, x: jax.jvp(a, x, problem(1)),
    "linearize": lambda a, x: jax.linearize(a, *x)[1](*problem(1)),
    "transpose of linearize": lambda a, x: jax.linear_transpose(jax.linearize(a, *x)[1], *x)(a(*x)),
    "jacfwd": lambda a, x: jax.jacfwd(a, (0, 2, 4))(*x),
    "jacrev": lambda a, x: jax.jacrev(a, (1, 3))(*x),
    "hessian": lambda a, x: jax.hessian(loss_of(a), (0, 4))(*x),
    "hessian of v and bias": lambda a, x: jax.hessian(loss_of(a), (2, 3))(*x),
    "jacrev of jacrev": lambda a, x: jax.jacrev(jax.jacrev(loss_of(a), (0, 1)), (2, 4))(*x),
    "jacrev of jacfwd": lambda a, x: jax.jacrev(jax.jacfwd(loss_of(a), (0, 4)), (1, 3))(*x),
    "jvp of grad": lambda a, x: hessian_vector(loss_of(a), x),
    "linearize of grad": lambda a, x: jax.linearize(jax.grad(loss_of(a), EVERY), *x)[1](*problem(1)),
    "grad of grad": lambda a, x: jax.grad(penalty(loss_of(a)), EVERY)(*x),
    "grad of jvp": lambda a, x: jax.grad(loss_of_tangent(a), EVERY)(*x),
    "vmap of jvp": lambda a, x: jax.vmap(lambda t: jax.jvp(lambda q: a(q, *x[1:]), (x[0],), (t,)))(jnp.stack([x[0], 2 * x[0]])),
    "jvp of vmap": lambda a, x: jax.jvp(
        jax.vmap(lambda q, b: a(q, *x[1:3], b, x[4])), *[[jnp.stack([y, 2 * y]) for y in (x[0], x[3])]] * 2
    ),
    "vmap of Hessian-vector": lambda a, x: jax.vmap(lambda s: hessian_vector(loss_of(a), [*x[:4], s]))(jnp.stack([x[4], -x[4]])),
    "grad of grad of vmap": lambda a, x: jax.grad(
        penalty(lambda *y: jax.vmap(loss_of(a), (0, None, 0, None, 0))(*y).sum()), EVERY
    )(*[jnp.stack([y, 2 * y]) if i % 2 == 0 else y for i, y in enumerate(x)]),
}
WRAPPED: dict[str, Callable[[Loss], Loss]] = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": lambda f: lambda *x: jax.tree.map(lambda y: y[0], jax.lax.scan(lambda c, _: (c, f(*x)), 0, None, length=1)[1]),
    "cond": lambda f: lambda *x: jax.lax.cond(x[0].sum() < 1e9, f, f, *x),
}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_transformations(name: str) -> None:
    transform = TRANSFORMATIONS[name]
    close(transform(own, problem()), transform(definition, problem()))


@pytest.mark.parametrize("name", ["jvp", "linearize", "hessian", "jvp of grad", "grad of grad", "grad of jvp"])
@pytest.mark.parametrize("wrap", list(WRAPPED)[1:])
def test_wrapped(wrap: str, name: str) -> None:
    """Attention inside jit, checkpoint and control flow."""
    transform = TRANSFORMATIONS[name]
    close(transform(WRAPPED[wrap](own), problem()), transform(definition, problem()))


def test_the_whole_compiled() -> None:
    for name in ("hessian", "grad of grad", "grad of jvp", "vmap of Hessian-vector"):
        transform = TRANSFORMATIONS[name]
        close(jax.jit(lambda x, transform=transform: transform(own, x))(problem()), transform(definition, problem()))


def test_without_jit() -> None:
    with jax.disable_jit():
        for name in ("jvp", "jvp of grad", "grad of grad", "grad of jvp"):
            close(TRANSFORMATIONS[name](own, problem()), TRANSFORMATIONS[name](definition, problem()))


@pytest.mark.parametrize("moved", range(5), ids=["q", "k", "v", "bias", "sink"])
def test_one_input_moves(moved: int) -> None:
    """Absent tangents are zero: what moves alone, and what the double backward asks for alone."""
    x, t = problem(), problem(1)

    def of(a: Loss) -> Any:
        def alone(y: Any) -> Any:
            return a(*x[:moved], y, *x[moved + 1 :])

        first = jax.grad(loss_of(alone))
        return (
            jax.jvp(alone, (x[moved],), (t[moved],)),
            jax.jvp(first, (x[moved],), (t[moved],)),
            jax.vjp(first, x[moved])[1](t[moved]),
        )

    close(of(own), of(definition))


@pytest.mark.parametrize("result", range(2), ids=["out", "lse"])
def test_one_result_alone(result: int) -> None:
    def of(a: Loss) -> Any:
        loss = lambda *x: (a(*x)[result] ** 3).sum()  # noqa: E731
        return hessian_vector(loss, problem()), jax.grad(penalty(loss), EVERY)(*problem())

    close(of(own), of(definition))


def test_the_tangent_of_a_cotangent() -> None:
    """The backward pass is linear in dout and dlse: what moves is only them."""
    x = problem()

    def of(a: Loss) -> Any:
        out, pull = jax.vjp(a, *x)
        double = jax.linear_transpose(pull, out)(tuple(problem(2)))
        return (
            jax.jvp(pull, (out,), (jax.tree.map(jnp.cos, out),)),
            double,
            jax.jacrev(lambda w: pull((w * out[0], out[1]))[0])(2.0),
        )

    close(of(own), of(definition))


def test_mean_flow() -> None:
    """A loss with the tangent of the network as a constant, and its gradient: one tangent, one backward pass."""
    x, t = problem(), problem(1)

    def of(a: Loss) -> Any:
        def loss(*y: Any) -> Any:
            (out, _), (tout, _) = jax.jvp(a, y, tuple(t))
            return ((out - jax.lax.stop_gradient(out + 0.3 * tout)) ** 2).sum()

        return jax.value_and_grad(loss, EVERY)(*x)

    close(jax.jit(of, static_argnums=0)(own), of(definition))


# -- all options, against the oracle


@pytest.mark.parametrize("name", chosen(0))
def test_options(name: str) -> None:
    """jvp, jvp of vjp, and the transposes of both."""
    problem = SecondProblem(name)

    def attention(leaves: dict[str, Any]) -> Any:
        leaves = dict(leaves)
        q, k, v = (leaves.pop(n) for n in "qkv")
        return libflash.jax.attention(q, k, v, return_lse=True, **leaves, **problem.options)

    def backward(leaves: Any, y: Any) -> Any:
        return jax.vjp(attention, leaves)[1](y)[0]

    @jax.jit
    def everything(inputs: Any, direction: Any, y: Any, ty: Any) -> Any:
        forward = jax.jvp(attention, (inputs,), (direction,))
        both = jax.jvp(backward, (inputs, y), (direction, ty))
        double = jax.vjp(backward, inputs, y)[1](direction)
        _, pull = jax.vjp(lambda x, tx: jax.jvp(attention, (x,), (tx,)), inputs, direction)
        of_tangent = pull((ty, y))
        return forward, both, double, of_tangent

    wanted = problem.forward()
    gradients, moved = problem.backward(along_cotangents=True)
    given = problem.inputs, problem.direction, problem.cotangents, problem.moved_cotangents
    forward, both, double, of_tangent = everything(*given)
    problem.check([*forward[0], *forward[1]], wanted, ("o", "lse", "o", "lse"))
    problem.check_gradients(both[0], gradients)
    problem.check_gradients(both[1], moved)
    problem.check_gradients(double[0], problem.backward(along_cotangents=False)[1])
    problem.check(double[1], wanted[2:], ("o", "lse"))
    problem.check_gradients(of_tangent[0], moved)
    problem.check_gradients(of_tangent[1], gradients)


# -- more


def test_third_derivatives_of_the_sink_alone() -> None:
    """They need no second tangent of attention, so they are supported, and right."""
    x = problem()

    def of(a: Loss) -> Any:
        out = lambda sink: (a(*x[:4], sink)[0] ** 2).sum()  # noqa: E731
        return jax.jvp(jax.grad(lambda s: jax.jvp(out, (s,), (s,))[1]), (x[4],), (x[4],))

    close(of(own), of(definition))


def test_16_bits() -> None:
    """The tangents of out and lse that the second derivative needs are not rounded: the error is that of the results."""
    x = [y.astype(jnp.bfloat16) for y in problem()]
    t = [y.astype(jnp.bfloat16) for y in problem(1)]
    dout, dlse = own(*x)

    def backward(*y: Any) -> Any:
        return jax.vjp(own, *y)[1]((dout, dlse))

    made = jax.jvp(backward, tuple(x), tuple(t))[1]
    up = lambda ys: [jnp.asarray(y, jnp.float64) for y in ys]  # noqa: E731
    wanted = jax.jvp(lambda *y: jax.vjp(definition, *y)[1](tuple(up((dout, dlse)))), tuple(up(x)), tuple(up(t)))[1]
    assert_close([np.asarray(y, np.float64) for y in made[:4]], [np.asarray(y) for y in wanted[:4]], 3e-2)
