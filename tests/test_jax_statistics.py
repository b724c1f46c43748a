"""max_logit and entropy as results of libflash.jax.attention: those of the eager call, under every transformation, and no silent
zero where a loss uses them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from harness import assert_same_bits, random, run_python
from reference_statistics import statistics

import libflash

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import libflash.jax  # noqa: E402
from jax_problem import arrays, assert_close, problem  # noqa: E402

BOTH = ("max_logit", "entropy")
NO_DERIVATIVE = "has no derivative: call jax.lax.stop_gradient"


def attention(*x: Any, **options: Any) -> Any:
    return libflash.jax.attention(*x, return_stats=BOTH, **options)


def eager(q: Any, k: Any, v: Any, **options: Any) -> tuple[np.ndarray, ...]:
    """What libflash.attention writes for the same arrays of NumPy."""
    q, k, v = (np.asarray(x) for x in (q, k, v))
    given = {name: np.asarray(x) if isinstance(x, jax.Array) else x for name, x in options.items()}
    out, lse = libflash.attention(q, k, v, return_lse=True, **given)
    made = [np.full_like(lse, fill) for fill in (-np.inf, 0)]
    libflash.attention(q, k, v, max_logit=made[0], entropy=made[1], **given)
    return out, *made


def same(got: Any, wanted: Any) -> None:
    got, wanted = jax.tree.leaves(got), jax.tree.leaves(wanted)
    assert len(got) == len(wanted)
    for x, y in zip(got, wanted, strict=True):
        assert_same_bits(np.asarray(x), np.asarray(y))


def options_of_cases() -> dict[str, dict[str, Any]]:
    *_, bias, sink = problem()
    mask = jnp.asarray(random(2, 1, 7, 9, seed=8) > 0).at[:, :, 3].set(False)
    return {
        "plain": {},
        "causal": {"causal": True, "softcap": 3.0, "softmax_scale": 0.7},
        "bias and sink": {"bias": bias, "learnable_sink": sink},
        "mask": {"mask": mask, "alibi_slopes": sink},
        "lengths": {"seqused_q": jnp.array([7, 2], "int32"), "seqused_k": jnp.array([0, 5], "int32")},
        "dropout": {"dropout_p": 0.4, "seed": 5},
    }


@pytest.mark.parametrize("name", options_of_cases())
def test_same_bits_as_the_eager_call(name: str) -> None:
    options = options_of_cases()[name]
    q, k, v, *_ = problem()
    wanted = eager(q, k, v, **options)
    same(attention(q, k, v, **options), wanted)
    same(jax.jit(lambda *x: attention(*x, **options))(q, k, v), wanted)
    given = {x: options[x] for x in ("causal", "softcap", "softmax_scale", "bias", "mask", "alibi_slopes") if x in options}
    if len(given) == len(options):
        rows, largest, entropy = statistics(*map(np.asarray, (q, k, v)), **{x: np.asarray(y) for x, y in given.items()})
        assert_close(wanted[1:], (rows, entropy))
        assert_close(wanted[1].max((0, 2)), largest)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_types_and_layouts(dtype: str) -> None:
    q, k, v = (x.astype(dtype) for x in problem()[:3])
    wanted = eager(q, k, v)
    assert wanted[1].dtype == np.float32
    for layout, order in (("bshd", (0, 1, 2, 3)), ("bhsd", (0, 2, 1, 3)), ("sbhd", (1, 0, 2, 3))):
        got = attention(*(x.transpose(order) for x in (q, k, v)), layout=layout)
        same(got[1:], wanted[1:])
    assert np.asarray(got[0]).dtype == np.dtype(getattr(ml_dtypes, dtype, dtype))


def test_order_and_number_of_results() -> None:
    q, k, v, *_ = problem()
    out, top, entropy = attention(q, k, v)
    run = libflash.jax.attention
    lse = run(q, k, v, return_lse=True)[1]
    for asked, wanted in {("entropy",): (entropy,), ("max_logit",): (top,), ("entropy", "max_logit"): (entropy, top)}.items():
        same(run(q, k, v, return_stats=asked), (out, *wanted))
        same(run(q, k, v, return_lse=True, return_stats=list(asked)), (out, lse, *wanted))
    same(run(q, k, v, return_stats=()), out)


def test_packed() -> None:
    """Rows that belong to no sequence: -inf and 0."""
    q, k, v = arrays((9, 4, 8), (9, 2, 8), (9, 2, 5))
    cu = jnp.array([0, 4, 4, 7], "int32")
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    wanted = eager(q, k, v, **options)
    got = attention(q, k, v, **options)
    rows = np.array([7, 8])
    assert (np.asarray(got[1])[:, rows] == -np.inf).all()
    assert (np.asarray(got[2])[:, rows] == 0).all()
    same(got[1:], wanted[1:])


def test_rows_without_keys_and_nan() -> None:
    q, k, v, *_ = problem()
    out, top, entropy = attention(q, k[:, :0], v[:, :0])
    assert (top == -jnp.inf).all()
    assert (entropy == 0).all()
    assert (out == 0).all()
    q = q.at[0, 3, 1, 2].set(jnp.nan)
    out, lse, top, entropy = libflash.jax.attention(q, k, v, return_lse=True, return_stats=BOTH)
    for x in (top, entropy):
        np.testing.assert_array_equal(np.isnan(x), np.isnan(lse))
    assert np.isnan(top[0, 1, 3])
    assert np.isnan(jax.jit(lambda x: x.max((0, 2)))(top)[1])


def test_what_is_no_statistic() -> None:
    q, k, v, *_ = problem()
    for given, text in {
        "max_logit": "return_stats must be a tuple of names, not str",
        ("lse",): "return_stats has 'lse'; it may have 'max_logit' and 'entropy'",
        ("entropy", "entropy"): "each name may be there once",
    }.items():
        with pytest.raises((TypeError, libflash.InvalidError), match=text):
            libflash.jax.attention(q, k, v, return_stats=given)


# -- vmap


@pytest.mark.parametrize("axes", [(0, None, None), (1, 0, 2), (None, 0, None)])
def test_vmap(axes: tuple[int | None, ...]) -> None:
    x = [y if axis is None else jnp.stack([y, 1.5 * y, y - 1], axis) for y, axis in zip(problem()[:3], axes, strict=True)]
    got = jax.jit(jax.vmap(lambda *x: attention(*x, causal=True), axes))(*x)
    each = [
        attention(*(y if axis is None else y.take(i, axis) for y, axis in zip(x, axes, strict=True)), causal=True)
        for i in range(3)
    ]
    for i, part in enumerate(each):
        same(tuple(y[i] for y in got), part)


def test_vmap_one_by_one() -> None:
    q, k, v = arrays((3, 9, 4, 8), (9, 2, 8), (9, 2, 5))
    cu = jnp.array([0, 4, 9], "int32")
    got = jax.vmap(lambda q: attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu))(q)
    same(tuple(y[1] for y in got), attention(q[1], k, v, cu_seqlens_q=cu, cu_seqlens_k=cu))


# -- derivatives

WRAPPED = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "vmap": lambda f: lambda *x: jax.tree.map(lambda y: y[0], jax.vmap(f)(*(y[None] for y in x))),
    "scan": lambda f: lambda *x: jax.tree.map(lambda y: y[0], jax.lax.scan(lambda c, _: (c, f(*c)), x, None, length=1)[1]),
    "cond": lambda f: lambda *x: jax.lax.cond(x[0].sum() < 1e9, f, f, *x),
}


@pytest.mark.parametrize("wrap", WRAPPED)
def test_gradients_beside_statistics(wrap: str) -> None:
    """QK-clip: the loss does not use the statistics, which are an output beside it."""
    x = problem()[:3]

    def beside(*x: Any) -> Any:
        out, *more = attention(*x, causal=True)
        return out, jax.lax.stop_gradient(more)

    wrapped = WRAPPED[wrap](beside)
    plain = lambda *x: (libflash.jax.attention(*x, causal=True) ** 2).sum()  # noqa: E731

    def loss(*x: Any) -> Any:
        out, more = wrapped(*x)
        return (out**2).sum(), more

    for transform in (lambda f: f, jax.jit):
        gradient, more = transform(jax.grad(loss, (0, 1, 2), has_aux=True))(*x)
        same(gradient, jax.grad(plain, (0, 1, 2))(*x))
        same(more, list(attention(*x, causal=True)[1:]))
        _, tangent, more = transform(lambda *x: jax.jvp(loss, x, x, has_aux=True))(*x)
        assert_close(tangent, jax.jvp(plain, x, x)[1])
        same(more, list(attention(*x, causal=True)[1:]))


def test_second_derivatives_beside_statistics() -> None:
    x = problem()[:3]
    plain = lambda q: (libflash.jax.attention(q, *x[1:]) ** 2).sum()  # noqa: E731

    def loss(q: Any) -> Any:
        out, top, entropy = attention(q, *x[1:])
        return (out**2).sum() + jax.lax.stop_gradient(top.max() + entropy.sum())

    for second in (
        lambda f: jax.jvp(jax.grad(f), x[:1], x[:1])[1],
        lambda f: jax.grad(lambda q: (jax.grad(f)(q) ** 2).sum())(*x[:1]),
    ):
        assert_close(second(loss), second(plain))


@pytest.mark.parametrize("wrap", WRAPPED)
@pytest.mark.parametrize("name", BOTH)
def test_a_loss_of_statistics_is_refused(name: str, wrap: str) -> None:
    x = problem()[:3]
    wrapped = WRAPPED[wrap](lambda *x: libflash.jax.attention(*x, return_stats=(name,)))

    def loss(*x: Any) -> Any:
        out, statistic = wrapped(*x)
        return out.sum() + statistic.max()

    for transform in (lambda f: f, jax.jit):
        for i in (0, 1):
            with pytest.raises(libflash.UnsupportedError, match=f"{name} {NO_DERIVATIVE}"):
                transform(jax.grad(loss, argnums=i))(*x)
        assert jnp.isnan(transform(lambda *x: jax.jvp(loss, x, x)[1])(*x))
    second = lambda q: jax.grad(lambda q: loss(q, *x[1:]))(q).sum()  # noqa: E731
    with pytest.raises(libflash.UnsupportedError, match=NO_DERIVATIVE):
        jax.grad(second)(x[0])


def test_what_statistics_do_not_depend_on() -> None:
    """They do not depend on v, and max_logit does not depend on the sink: these gradients are not refused."""
    q, k, v, _, sink = problem()

    def loss(v: Any, sink: Any) -> Any:
        out, top = libflash.jax.attention(q, k, v, learnable_sink=sink, return_stats=("max_logit",))
        return (out**2).sum() + top.sum()

    plain = lambda v, sink: (libflash.jax.attention(q, k, v, learnable_sink=sink) ** 2).sum()  # noqa: E731
    same(jax.grad(loss, (0, 1))(v, sink), jax.grad(plain, (0, 1))(v, sink))
    with pytest.raises(libflash.UnsupportedError, match=f"entropy {NO_DERIVATIVE}"):
        jax.grad(lambda sink: attention(q, k, v, learnable_sink=sink)[2].sum())(sink)


# -- several devices, export


def test_sharded_and_in_shard_map() -> None:
    run_python("""
        import jax, jax.numpy as jnp, numpy as np, libflash.jax
        from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
        rng = np.random.default_rng(0)
        q, k, v = (jnp.asarray(rng.standard_normal(s), "float32") for s in ((4, 8, 8, 16), (4, 8, 4, 16), (4, 8, 4, 8)))
        f = lambda *x: libflash.jax.attention(*x, causal=True, return_stats=("entropy", "max_logit"))
        heads = lambda *x: f(*x)[2].max((0, 2))
        same = lambda x, y: jax.tree.map(np.testing.assert_array_equal, x, y)
        wanted = f(q, k, v)
        for kind in (AxisType.Auto, AxisType.Explicit):
            mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind,) * 2)
            x = [jax.device_put(y, NamedSharding(mesh, P("x", None, "y"))) for y in (q, k, v)]
            got = jax.jit(f)(*x)
            same(got, wanted)
            same(jax.jit(heads)(*x), heads(q, k, v))
            for y in got[1:]:
                assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("x", "y")), 3), y.sharding
            text = jax.jit(f).lower(*x).compile().as_text()
            assert "all-gather" not in text and "all-to-all" not in text
            if kind is AxisType.Auto:
                spec, rows = P("x", None, "y"), P("x", "y")
                mapped = jax.shard_map(f, mesh=mesh, in_specs=(spec,) * 3, out_specs=(spec, rows, rows))
                same(jax.jit(mapped)(*x), wanted)
                all_heads = lambda *x: jax.lax.pmax(jax.lax.stop_gradient(f(*x)[2].max((0, 2))), "x")
                pair = lambda *x: (f(*x)[0], all_heads(*x))
                mapped = jax.shard_map(pair, mesh=mesh, in_specs=(spec,) * 3, out_specs=(spec, P("y")))
                same(jax.jit(mapped)(*x), (wanted[0], heads(q, k, v)))
                loss = lambda *x: ((y := mapped(*x))[0].sum(), y[1])
                gradient, more = jax.jit(jax.grad(loss, has_aux=True))(*x)
                np.testing.assert_allclose(gradient, jax.grad(lambda q: f(q, k, v)[0].sum())(q), rtol=1e-5, atol=1e-5)
                same(more, heads(q, k, v))
    """, XLA_FLAGS="--xla_force_host_platform_device_count=4")  # fmt: skip


@pytest.mark.parametrize("sizes", ["known", "symbolic"])
def test_export(sizes: str) -> None:
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in libflash.jax.CUSTOM_CALLS]
    x = problem()[:3]
    shapes = x
    if sizes == "symbolic":
        scope = jax.export.SymbolicScope()
        texts = ("b, s, 4, 8", "b, t, 2, 8", "b, t, 2, 5")
        shapes = [jax.ShapeDtypeStruct(jax.export.symbolic_shape(text, scope=scope), "float32") for text in texts]
    exported = jax.export.export(jax.jit(attention), disabled_checks=checks)(*shapes)
    same(exported.call(*x), attention(*x))
