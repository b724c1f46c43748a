"""libflash.jax: numbers, gradients, dropout."""

from __future__ import annotations

import cases
import numpy as np
import pytest
from case import Case
from convert import jax_run, numpy_of, owned
from harness import assert_same_bits, qkv, run, run_python

import libflash

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import libflash.jax  # noqa: E402
from jax_problem import arrays, assert_close, definition, everything, loss_of, problem  # noqa: E402

# float64 needs jax_enable_x64 and has its own test.
OPTIONS = [case for case in [*cases.singles(), *cases.option_pairs()] if case.dtype != "fp64"]
OPTIONS += [cases.by_name("size-batch-0"), cases.by_name("size-packed-empty"), cases.by_name("poison-unused-packed-fp32")]


# -- numbers


@pytest.mark.parametrize("case", OPTIONS, ids=str)
def test_every_option_against_the_reference(case: Case) -> None:
    got = jax_run(case, libflash.jax.attention)
    case.check(**got)
    got.pop("dsink", None)  # summed by XLA
    wanted = run(case)
    assert_same_bits(owned(case, got), owned(case, {name: wanted[name] for name in got}), str(case))


def test_rows_of_no_sequence_are_zero() -> None:
    case = cases.by_name("poison-unused-packed-fp32")
    got = jax_run(case, libflash.jax.attention)
    rows_q, rows_k = sum(case.seqlen_q), sum(case.seqlen_k)
    assert not got["o"][rows_q:].any()
    assert (got["lse"][:, rows_q:] == -np.inf).all()
    assert not got["dq"][rows_q:].any()
    assert not any(got[name][rows_k:].any() for name in ("dk", "dv"))


def test_gradient_of_the_sink_ignores_rows_of_no_sequence() -> None:
    q, k, v, sink = arrays((2, 6, 4, 8), (2, 5, 2, 8), (2, 5, 2, 8), (4,))
    used = jnp.array([4, 6], jnp.int32)
    _, vjp = jax.vjp(lambda sink: libflash.jax.attention(q, k, v, learnable_sink=sink, seqused_q=used), sink)
    assert_same_bits(*(vjp(q.at[0, 4:].set(poison))[0] for poison in (0, jnp.nan)))


def test_strict_promotion() -> None:
    q, k, v, sink = arrays((1, 6, 4, 8), (1, 5, 2, 8), (1, 5, 2, 8), (4,))

    def loss(q, sink):
        out, lse = libflash.jax.merge(*zip(libflash.jax.attention(q, k, v, learnable_sink=sink, return_lse=True), strict=True))
        return out.sum() + lse.sum()

    gradient = lambda: jax.jvp(jax.grad(loss, argnums=(0, 1)), (q, sink), (q, sink))  # noqa: E731
    wanted = gradient()
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        assert_close(gradient(), wanted)


def test_float64() -> None:
    assert run_python("""
        import jax
        jax.config.update("jax_enable_x64", True)
        import cases, libflash.jax
        from convert import jax_run
        for name in ("sink", "bias", "dlse"):
            case = next(case for case in cases.option_pairs() if case.dtype == "fp64" and getattr(case, name))
            case.check(**jax_run(case, libflash.jax.attention))
        print("good")
    """) == "good\n"  # fmt: skip


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd"])
def test_layouts(layout: str) -> None:
    axes = ["bshd".index(axis) for axis in layout]
    q, k, v, bias, sink = problem()
    transposed = [x.transpose(axes) for x in (q, k, v)]
    out, lse = everything(*transposed, bias, sink, layout=layout)
    wanted, wanted_lse = everything(q, k, v, bias, sink)
    assert_same_bits(out, wanted.transpose(axes))
    assert_same_bits(lse, wanted_lse)
    got = jax.grad(lambda *x: everything(*x, layout=layout)[0].sum(), argnums=range(5))(*transposed, bias, sink)
    wanted = jax.grad(lambda *x: everything(*x)[0].sum(), argnums=range(5))(q, k, v, bias, sink)
    assert_close(got, (*(x.transpose(axes) for x in wanted[:3]), *wanted[3:]), 1e-6)


def test_gradients_agree_with_the_definition() -> None:
    x = problem()
    assert_close(everything(*x), definition(*x))
    got = jax.jit(jax.grad(loss_of(everything), argnums=range(5)))(*x)
    assert_close(got, jax.grad(loss_of(definition), argnums=range(5))(*x))


def test_gradient_through_lse_alone() -> None:
    x = problem()
    got = jax.grad(lambda *x: everything(*x)[1].sum(), argnums=(0, 1, 3, 4))(*x)
    assert_close(got, jax.grad(lambda *x: definition(*x)[1].sum(), argnums=(0, 1, 3, 4))(*x))


def test_only_requested_gradients_are_computed() -> None:
    """A bias that is not differentiated costs no dbias: the backward call has three results. Either order of argnums works."""
    q, k, v, bias, sink = problem()
    loss = lambda q, bias: everything(q, k, v, bias, sink)[0].sum()  # noqa: E731
    for arguments, results in ((0, 3), ((0, 1), 4), (0, 3)):
        text = jax.jit(jax.grad(loss, argnums=arguments)).lower(q, bias).as_text()
        (call,) = [line for line in text.splitlines() if "@libflash_backward" in line]
        assert call.count("tensor<", call.rindex("->")) == results


def test_remat() -> None:
    x = problem()
    got = jax.grad(loss_of(jax.checkpoint(everything)), argnums=range(5))(*x)
    assert_close(got, jax.grad(loss_of(everything), argnums=range(5))(*x), 1e-6)


@pytest.mark.parametrize("seqlens", [(0, 5), (5, 0), (0, 0)])
def test_no_rows_or_no_keys(seqlens: tuple[int, int]) -> None:
    q, k, v = arrays((2, seqlens[0], 4, 8), (2, seqlens[1], 2, 8), (2, seqlens[1], 2, 8))
    out, lse = libflash.jax.attention(q, k, v, return_lse=True)
    assert not out.any()
    assert (lse == -jnp.inf).all()
    for gradient in jax.grad(lambda *x: libflash.jax.attention(*x).sum(), argnums=(0, 1, 2))(q, k, v):
        assert not gradient.any()


# -- dropout


def test_seeds() -> None:
    q, k, v = (jnp.asarray(x) for x in qkv())
    wanted = libflash.attention(np.asarray(q), np.asarray(k), np.asarray(v), dropout_p=0.5, seed=2**63 + 5, offset=2**64 - 1)
    assert_same_bits(libflash.jax.attention(q, k, v, dropout_p=0.5, seed=2**63 + 5, offset=2**64 - 1), wanted)
    words = jnp.array([5, 2**31, 2**32 - 1, 2**32 - 1], jnp.uint32)
    assert_same_bits(libflash.jax.attention(q, k, v, dropout_p=0.5, seed=words), wanted)


def test_keys_are_traced() -> None:
    """A new key gives a new mask without a new compilation, and the gradient uses the same mask."""
    q, k, v = (jnp.asarray(x) for x in qkv())
    traces = []

    @jax.jit
    def step(v, key):
        traces.append(1)
        return jax.value_and_grad(lambda v: libflash.jax.attention(q, k, v, dropout_p=0.5, seed=key).sum())(v)

    results = [step(v, jax.random.key(i)) for i in (0, 1, 0)]
    assert len(traces) == 1
    assert results[0][0] != results[1][0]
    assert_same_bits(results[0][1], results[2][1])
    value, gradient = results[0]  # linear in v
    np.testing.assert_allclose((gradient * v).sum(), value, rtol=1e-4)


def test_threads_may_call_at_once() -> None:
    from concurrent.futures import ThreadPoolExecutor

    q, k, v, *_ = problem()
    function = jax.jit(libflash.jax.attention)
    wanted = np.asarray(function(q, k, v))
    with ThreadPoolExecutor(4) as pool:
        assert all((np.asarray(x) == wanted).all() for x in pool.map(lambda _: function(q, k, v), range(64)))


def test_bfloat16_round_trip() -> None:
    x = jnp.arange(7, dtype=jnp.bfloat16)
    assert_same_bits(numpy_of(x), np.asarray(x))
