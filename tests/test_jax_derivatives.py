"""Derivatives that libflash.jax does not have raise, under every transformation; none is silently zero or dropped."""

from __future__ import annotations

from typing import Any

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


def third(f: Any, q: jax.Array) -> Any:
    first = jax.grad(lambda q: (f(q) ** 2).sum())
    second = jax.grad(lambda q: (first(q) ** 2).sum())
    return jax.grad(lambda q: (second(q) ** 2).sum())(q)


MISSING = {
    "third": third,
    "forward of forward": lambda f, q: jax.jvp(lambda q: jax.jvp(f, (q,), (q,))[1], (q,), (q,)),
    "jacfwd of jacfwd": lambda f, q: jax.jacfwd(jax.jacfwd(f))(q),
    "tangent of the tangent of a gradient": lambda f, q: jax.jvp(
        lambda q: jax.jvp(jax.grad(lambda q: (f(q) ** 2).sum()), (q,), (q,))[1], (q,), (q,)
    ),
    "gradient of a Hessian": lambda f, q: jax.jacrev(jax.hessian(lambda q: (f(q) ** 2).sum()))(q),
}


@pytest.mark.parametrize("wrap", WRAPPED)
@pytest.mark.parametrize("name", MISSING)
def test_what_is_missing_is_refused(name: str, wrap: str) -> None:
    if wrap == "while" and name in ("third", "gradient of a Hessian"):
        pytest.skip("JAX has no reverse mode of while loops")
    q, *_ = problem()
    f = WRAPPED[wrap](attend)
    for call in (MISSING[name], jax.jit(MISSING[name], static_argnums=0)):
        with pytest.raises((libflash.UnsupportedError, ValueError), match=r"third derivative|forward-mode|Reverse-mode") as seen:
            jax.block_until_ready(call(f, q[:, :1]))
        assert isinstance(seen.value, libflash.UnsupportedError) or wrap == "while"


def test_slopes_have_no_derivative() -> None:
    q, k, v, *_ = problem()
    slopes = jax.numpy.ones(4)
    attention = lambda slopes: libflash.jax.attention(q, k, v, alibi_slopes=slopes)  # noqa: E731
    inner = jax.grad(lambda q, w: libflash.jax.attention(q, k, v, alibi_slopes=w * slopes).sum())
    for wrong in (
        lambda: jax.jvp(attention, (slopes,), (slopes,)),
        lambda: jax.grad(lambda x: attention(x).sum())(slopes),
        lambda: jax.jvp(jax.vmap(attention), (slopes[None],), (slopes[None],)),
        lambda: jax.grad(lambda w: inner(q, w).sum())(1.0),
        lambda: jax.jvp(
            lambda w: jax.jvp(lambda q: libflash.jax.attention(q, k, v, alibi_slopes=w), (q,), (q,)), (slopes,), (slopes,)
        ),
    ):
        with pytest.raises(libflash.UnsupportedError, match="no gradient for alibi_slopes"):
            wrong()
    tangent = jax.jvp(lambda q: libflash.jax.attention(q, k, v, alibi_slopes=slopes), (q,), (q,))[1]
    assert jax.numpy.isfinite(tangent).all()


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
