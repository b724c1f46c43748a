"""Derivatives that libflash.jax does not have raise, under every transformation; none is silently zero or dropped."""

from __future__ import annotations

import pytest

import libflash

jax = pytest.importorskip("jax")

import libflash.jax  # noqa: E402
from jax_problem import assert_close, definition, everything, problem  # noqa: E402

WRAPPED = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "vmap": lambda f: lambda q: jax.vmap(f)(q[None])[0],
    "scan": lambda f: lambda q: jax.lax.scan(lambda x, _: (x, f(x)), q, None, length=1)[1][0],
    "cond": lambda f: lambda q: jax.lax.cond(q.sum() < 1e9, f, f, q),
    "while": lambda f: lambda q: jax.lax.fori_loop(0, 1, lambda i, x: f(x), q),
}


def attend(q: jax.Array) -> jax.Array:
    _, k, v, *_ = problem()
    return libflash.jax.attention(q, k, v[..., :1].repeat(8, -1))


@pytest.mark.parametrize("wrap", WRAPPED)
@pytest.mark.parametrize("name", ["jvp", "linearize", "jacfwd", "hessian"])
def test_forward_mode_is_refused(name: str, wrap: str) -> None:
    q, *_ = problem()
    f = WRAPPED[wrap](attend)
    call = {
        "jvp": lambda: jax.jvp(f, (q,), (q,)),
        "linearize": lambda: jax.linearize(f, q)[1](q),
        "jacfwd": lambda: jax.jacfwd(f)(q),
        "hessian": lambda: jax.hessian(lambda q: (f(q) ** 2).sum())(q),
    }[name]
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=r"forward-mode|no derivative of its own|Reverse-mode"):
        jax.block_until_ready(call())


@pytest.mark.parametrize("operand", range(5), ids=["q", "k", "v", "bias", "sink"])
def test_forward_mode_is_refused_for_each_operand(operand: int) -> None:
    x = problem()
    tangents = [y if i == operand else y * 0 for i, y in enumerate(x)]
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda y: everything(*x[:operand], y, *x[operand + 1 :])[1], (x[operand],), (tangents[operand],))


@pytest.mark.parametrize("wrap", [name for name in WRAPPED if name != "while"])
def test_a_second_derivative_is_refused(wrap: str) -> None:
    """Also the gradient penalty, and where only what comes after attention is differentiated twice."""
    q, *_ = problem()
    f = WRAPPED[wrap](attend)
    first = jax.grad(lambda q: (f(q) ** 2).sum())
    penalty = jax.grad(lambda q: (first(q) ** 2).sum())
    for again in (penalty, jax.jacrev(first), jax.jit(penalty), lambda q: jax.vmap(penalty)(q[None])):
        with pytest.raises(libflash.UnsupportedError, match=r"no derivative of its own .*jax\.numpy"):
            again(q)
    with pytest.raises(libflash.UnsupportedError, match="no derivative of its own"):
        jax.grad(lambda w: jax.grad(lambda q: (w * f(q)).sum())(q).sum())(2.0)


def test_what_is_said_to_be_constant_is() -> None:
    """With stop_gradient, as the error texts advise, each of them works."""
    q, k, v, *_ = problem()
    first = jax.grad(lambda q: (attend(q) ** 2).sum())
    assert_close(jax.grad(lambda q: (first(jax.lax.stop_gradient(q)) * q).sum())(q), first(q))
    out, tangent = jax.jvp(lambda q: attend(jax.lax.stop_gradient(q)) + q, (q,), (q,))
    assert_close((out, tangent), (attend(q) + q, q))
    step = lambda q: libflash.jax.decode(*jax.lax.stop_gradient((q[:, :1], k, v))).sum() + q.sum()  # noqa: E731
    assert (jax.grad(step)(q) == 1).all()


def test_decode_has_no_gradient() -> None:
    q, k, v, *_ = problem()
    q = q[:, :1]
    for i in range(3):
        with pytest.raises(libflash.UnsupportedError, match=r"decode has no gradient: use libflash\.jax\.attention to train"):
            jax.grad(lambda *x: libflash.jax.decode(*x).sum(), argnums=i)(q, k, v)
    for wrong in (
        lambda: jax.jvp(lambda q: libflash.jax.decode(q, k, v), (q,), (q,)),
        lambda: jax.jit(jax.grad(lambda q: libflash.decode(q, k, v).sum()))(q),
        lambda: jax.vmap(jax.grad(lambda q: libflash.jax.decode(q, k, v).sum()))(q[None]),
    ):
        with pytest.raises(libflash.UnsupportedError, match="decode has no gradient"):
            wrong()


def test_reverse_mode_over_batches_of_cotangents() -> None:
    """jacrev maps the backward pass over cotangents."""
    x = problem()
    got = jax.jacrev(lambda *x: everything(*x)[1][0, 0, :2], argnums=(0, 1, 3))(*x)
    assert_close(got, jax.jacrev(lambda *x: definition(*x)[1][0, 0, :2], argnums=(0, 1, 3))(*x))
