"""libflash.jax: jit, grad, vmap, sharding, decode, merge."""

from __future__ import annotations

import cases
import numpy as np
import pytest
from case import Case
from convert import jax_run, numpy_of, owned
from harness import assert_same_bits, qkv, random, run, run_python

import libflash

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import libflash.jax  # noqa: E402

from libflash import _jax_ffi  # noqa: E402

# float64 needs jax_enable_x64 and has a test of its own.
OPTIONS = [case for case in [*cases.singles(), *cases.option_pairs()] if case.dtype != "fp64"]
OPTIONS += [cases.by_name("size-batch-0"), cases.by_name("size-packed-empty"), cases.by_name("poison-unused-packed-fp32")]


def arrays(*shapes: tuple[int, ...]) -> list[jax.Array]:
    return [jnp.asarray(random(*shape, seed=i)) for i, shape in enumerate(shapes)]


def problem() -> list[jax.Array]:
    """q, k, v, bias, sink."""
    return arrays((2, 7, 4, 8), (2, 9, 2, 8), (2, 9, 2, 5), (1, 4, 7, 9), (4,))


def everything(q, k, v, bias, sink, **options):
    return libflash.jax.attention(q, k, v, bias=bias, learnable_sink=sink, causal=True, return_lse=True, **options)


def definition(q, k, v, bias, sink):
    """The same in jax.numpy."""
    group = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, group, 2), jnp.repeat(v, group, 2)
    s = jnp.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5 + bias
    visible = jnp.tril(jnp.ones(s.shape[-2:], bool), s.shape[-1] - s.shape[-2])
    s = jnp.where(visible, s, -jnp.inf)
    z = jnp.concatenate([s, jnp.broadcast_to(sink[None, :, None, None], (*s.shape[:3], 1))], -1)
    lse = jax.scipy.special.logsumexp(z, -1)
    return jnp.einsum("bhij,bjhd->bihd", jnp.exp(s - lse[..., None]), v), lse


def loss_of(function):
    def loss(*x):
        out, lse = function(*x)
        return (out * jnp.cos(jnp.arange(out.size, dtype=out.dtype).reshape(out.shape))).sum() + jnp.sin(lse).sum()

    return loss


def assert_close(got: object, wanted: object, tolerance: float = 2e-5) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), got, wanted)


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
    turned = [x.transpose(axes) for x in (q, k, v)]
    out, lse = everything(*turned, bias, sink, layout=layout)
    wanted, wanted_lse = everything(q, k, v, bias, sink)
    assert_same_bits(out, wanted.transpose(axes))
    assert_same_bits(lse, wanted_lse)
    got = jax.grad(lambda *x: everything(*x, layout=layout)[0].sum(), argnums=range(5))(*turned, bias, sink)
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


def test_gradients_only_where_asked_for() -> None:
    """A bias that is not differentiated costs no dbias: the backward call has three results. Either order of asking works."""
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


# -- vmap


def stacked() -> list[jax.Array]:
    return arrays((3, 2, 7, 4, 8), (3, 2, 9, 2, 8), (3, 2, 9, 2, 5), (3, 1, 4, 7, 9), (3, 4))


AXES = {
    "all": (0, 0, 0, 0, 0),
    "shared bias and sink": (0, 0, 0, None, None),
    "queries": (0, None, None, None, None),
    "keys": (None, 0, 0, None, None),
    "bias": (None, None, None, 0, None),
    "sinks": (None, None, None, None, 0),
    "other axes": (1, 2, 3, 4, 1),
}


@pytest.mark.parametrize("name", AXES)
def test_vmap(name: str) -> None:
    """Forward and backward equal one call after the other, whichever operands are mapped."""
    axes = AXES[name]
    x = [v if axis is not None else v[0] for v, axis in zip(stacked(), axes, strict=True)]
    mapped = [v if axis is None else jnp.moveaxis(v, 0, axis) for v, axis in zip(x, axes, strict=True)]

    def both(*x):
        return everything(*x), jax.grad(loss_of(everything), argnums=range(5))(*x)

    got = jax.vmap(both, axes)(*mapped)
    for i in range(3):
        one = both(*(v if axis is None else v[i] for v, axis in zip(x, axes, strict=True)))
        assert_close(jax.tree.map(lambda y, i=i: y[i], got), one, 2e-6)


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd"])
def test_vmap_of_lengths_masks_and_slopes(layout: str) -> None:
    axes = ["bshd".index(axis) for axis in layout]
    q, k, v, *_ = stacked()
    q, k, v = (x.transpose(0, *(axis + 1 for axis in axes)) for x in (q, k, v))
    options = {
        "mask": jnp.asarray(random(3, 2, 1, 7, 9) > -1), "alibi_slopes": jnp.abs(jnp.asarray(random(3, 4))),
        "seqused_k": jnp.array([[9, 4], [3, 9], [0, 8]], jnp.int32), "block_mask": jnp.ones((3, 1, 1, 1, 1), bool),
    }  # fmt: skip
    got = jax.vmap(lambda q, k, v, o: libflash.jax.attention(q, k, v, layout=layout, **o))(q, k, v, options)
    for i in range(3):
        assert_same_bits(got[i], libflash.jax.attention(q[i], k[i], v[i], layout=layout, **{n: x[i] for n, x in options.items()}))


def test_vmap_twice() -> None:
    q, k, v = arrays((2, 3, 1, 5, 2, 8), (2, 3, 1, 5, 2, 8), (2, 3, 1, 5, 2, 8))
    got = jax.vmap(jax.vmap(libflash.jax.attention))(q, k, v)
    assert_same_bits(got.reshape(6, 5, 2, 8), libflash.jax.attention(*(x.reshape(6, 5, 2, 8) for x in (q, k, v))))


def test_vmap_folds_instead_of_looping() -> None:
    q, k, v, *_ = stacked()
    text = str(jax.make_jaxpr(jax.vmap(libflash.jax.attention))(q, k, v))
    assert "scan" not in text
    assert text.count("ffi_call") == 1


def test_vmap_of_packed_arrays_and_of_dropout() -> None:
    """One after the other: the dropout mask of an entry must not depend on its neighbours."""
    q, k, v = arrays((3, 7, 4, 8), (3, 7, 2, 8), (3, 7, 2, 8))
    cu = jnp.array([[0, 3, 7], [0, 7, 7], [0, 1, 2]], jnp.int32)
    packed = lambda q, k, v, cu: libflash.jax.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu)  # noqa: E731
    got = jax.vmap(packed)(q, k, v, cu)
    assert_same_bits(got, jnp.stack([packed(*x) for x in zip(q, k, v, cu, strict=True)]))
    q, k, v, *_ = stacked()
    drop = lambda q, k, v: libflash.jax.attention(q, k, v, dropout_p=0.5, seed=3)  # noqa: E731
    assert_same_bits(jax.vmap(drop)(q, k, v), jnp.stack([drop(*x) for x in zip(q, k, v, strict=True)]))


# -- dropout


def test_seeds() -> None:
    q, k, v = (jnp.asarray(x) for x in qkv())
    wanted = libflash.attention(np.asarray(q), np.asarray(k), np.asarray(v), dropout_p=0.5, seed=2**63 + 5, offset=2**64 - 1)
    assert_same_bits(libflash.jax.attention(q, k, v, dropout_p=0.5, seed=2**63 + 5, offset=2**64 - 1), wanted)
    words = jnp.array([5, 2**31, 2**32 - 1, 2**32 - 1], jnp.uint32)
    assert_same_bits(libflash.jax.attention(q, k, v, dropout_p=0.5, seed=words), wanted)


def test_keys_are_traced() -> None:
    """A new key is a new mask without a new program, and the gradient uses the same mask."""
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


# -- sharding

SHARDED = """
    import jax, jax.numpy as jnp, numpy as np, libflash.jax
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    rng = np.random.default_rng(0)
    q, k, v, sink = (jnp.asarray(rng.standard_normal(s), "float32") for s in ((4, 8, 8, 16), (4, 8, 4, 16), (4, 8, 4, 8), (8,)))
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.{kind},) * 2)
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    Q, K, V = (put(x, "x", None, "y") for x in (q, k, v))
    attention = lambda q, k, v, sink: libflash.jax.attention(q, k, v, learnable_sink=sink, causal=True)
    loss = lambda q, k, v, sink: (attention(q, k, v, sink) ** 2).sum()
    same = lambda x, y: jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5), x, y)
    plain, plain_gradient = attention(q, k, v, sink), jax.grad(loss, argnums=(0, 1, 2, 3))(q, k, v, sink)
"""
DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_sharded_arrays_stay_where_they_are(kind: str) -> None:
    run_python(SHARDED.replace("{kind}", kind) + """
    forward, backward = jax.jit(attention), jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))
    out, gradient = forward(Q, K, V, sink), backward(Q, K, V, sink)
    same(out, plain), same(gradient, plain_gradient)
    for x in (out, *gradient[:3]):
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, P("x", None, "y")), 4), x.sharding
    for program in (forward, backward):
        text = program.lower(Q, K, V, sink).compile().as_text()
        assert "all-gather" not in text and "all-to-all" not in text
        assert "f32[2,8,4,16]" in text
    """, **DEVICES)  # fmt: skip


def test_sharding_gives_way_where_it_must() -> None:
    """Heads that the shards do not divide, a bias that all entries share and its gradient, dropout, packed arrays, pages."""
    run_python(SHARDED.replace("{kind}", "Auto") + """
    one = k[:, :, :1], v[:, :, :1]
    same(jax.jit(attention)(Q, *one, sink), attention(q, *one, sink))
    bias = jnp.asarray(rng.standard_normal((1, 1, 8, 8)), "float32")
    biased = lambda q, k, v, bias: (libflash.jax.attention(q, k, v, bias=bias) ** 2).sum()
    same(jax.jit(jax.grad(biased, argnums=(0, 3)))(Q, K, V, bias), jax.grad(biased, argnums=(0, 3))(q, k, v, bias))
    drop = lambda q, k, v: libflash.jax.attention(q, k, v, dropout_p=0.5, seed=jax.random.key(1))
    same(jax.jit(drop)(Q, K, V), drop(q, k, v))
    cu = jnp.array([0, 3, 8], "int32")
    packed = lambda q, k, v: (libflash.jax.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu) ** 2).sum()
    heads = [put(x[0], None, "y") for x in (q, k, v)]
    same(jax.jit(jax.grad(packed))(*heads), jax.grad(packed)(q[0], k[0], v[0]))
    lengths = jnp.array([3, 8, 1, 5], "int32")
    decode = lambda q, k, v: libflash.jax.decode(q[:, :1], k, v, cache_seqlens=lengths)
    same(jax.jit(decode)(Q, K, V), decode(q, k, v))
    table = jnp.array([[3, 0], [1, 1], [2, 3], [0, 0]], "int32")
    paged = lambda q, k, v: libflash.jax.decode(q[:, :1], k, v, block_table=table, cache_seqlens=lengths)
    same(jax.jit(paged)(Q, K, V), paged(q, k, v))
    """, **DEVICES)  # fmt: skip


def test_shard_map() -> None:
    run_python(SHARDED.replace("{kind}", "Auto") + """
    mapped = jax.shard_map(attention, mesh=mesh, in_specs=(P("x", None, "y"),) * 3 + (P("y"),), out_specs=P("x", None, "y"))
    same(jax.jit(mapped)(Q, K, V, sink), plain)
    gradient = jax.jit(jax.grad(lambda *x: (mapped(*x) ** 2).sum(), argnums=(0, 1, 2, 3)))(Q, K, V, sink)
    same(gradient, plain_gradient)
    """, **DEVICES)  # fmt: skip


# -- decode and merge


def test_decode_is_that_of_the_library() -> None:
    q, k_cache, v_cache, k, v, cos, sin = (
        random(*shape, seed=i)
        for i, shape in enumerate([(2, 3, 4, 8), (2, 9, 2, 8), (2, 9, 2, 5), (2, 3, 2, 8), (2, 3, 2, 5), (9, 2), (9, 2)])
    )
    numbers = {"rotary_interleaved": False, "window_size": (4, 0), "softmax_scale": 0.3, "softcap": 2.0, "num_splits": 2}
    options = {"cache_seqlens": np.array([4, 6], np.int32), "rotary_cos": cos, "rotary_sin": sin, "k": k, "v": v}
    options["learnable_sink"] = np.zeros(4, np.float32)
    given = {name: jnp.asarray(x) for name, x in options.items()}
    caches = jnp.asarray(k_cache), jnp.asarray(v_cache)
    before = k_cache.copy()
    out, lse, *new = libflash.jax.decode(jnp.asarray(q), *caches, return_lse=True, **given, **numbers)
    wanted = libflash.decode(q, k_cache, v_cache, return_lse=True, **options, **numbers)
    assert_same_bits((dict(enumerate((out, lse, *new)))), dict(enumerate((*wanted, k_cache, v_cache))))
    assert_same_bits(caches[0], before)  # the arrays that were given stay as they were


def test_decode_step_with_donated_caches() -> None:
    q, k_cache, v_cache, k, v = arrays((2, 1, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8), (2, 1, 2, 8), (2, 1, 2, 8))

    def step(k_cache, v_cache, lengths):
        return libflash.jax.decode(q, k_cache, v_cache, k=k, v=v, cache_seqlens=lengths)

    donating = jax.jit(step, donate_argnums=(0, 1))
    mine, other = (k_cache.copy(), v_cache.copy()), (k_cache, v_cache)
    for length in (3, 4):
        lengths = jnp.full(2, length, jnp.int32)
        out, *mine = donating(*mine, lengths)
        wanted, *other = step(*other, lengths)
        assert_same_bits(out, wanted)
    assert_same_bits(mine[0], other[0])


def test_decode_under_vmap() -> None:
    q, k_cache, v_cache, k, v = arrays((3, 2, 1, 4, 8), (3, 2, 9, 2, 8), (3, 2, 9, 2, 8), (3, 2, 1, 2, 8), (3, 2, 1, 2, 8))
    lengths = jnp.array([[3, 8], [0, 5], [7, 7]], jnp.int32)
    step = lambda q, kc, vc, k, v, n: libflash.jax.decode(q, kc, vc, k=k, v=v, cache_seqlens=n)  # noqa: E731
    got = jax.vmap(step)(q, k_cache, v_cache, k, v, lengths)
    for i in range(3):
        one = step(q[i], k_cache[i], v_cache[i], k[i], v[i], lengths[i])
        assert_same_bits(dict(enumerate(x[i] for x in got)), dict(enumerate(one)))
    table = jnp.array([[[1, 0]], [[0, 1]], [[1, 1]]], jnp.int32)
    paged = lambda q, table: libflash.jax.decode(q, k_cache[0], v_cache[0], block_table=table)  # noqa: E731
    got = jax.vmap(paged)(q[:, :1], table)
    assert_same_bits(got, jnp.stack([paged(*x) for x in zip(q[:, :1], table, strict=True)]))


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd", "packed"])
def test_merge(layout: str) -> None:
    shape = {"bshd": (2, 3, 4, 5), "bhsd": (2, 4, 3, 5), "sbhd": (3, 2, 4, 5), "packed": (3, 4, 5)}[layout]
    rows = (4, 3) if layout == "packed" else (2, 4, 3)
    outs, lses = [random(*shape, seed=i) for i in range(3)], [random(*rows, seed=9 + i) for i in range(3)]
    lses[1][..., 0] = -np.inf
    for lse in lses:
        lse[..., 1] = -np.inf
    named = {} if layout == "packed" else {"layout": layout}
    got = libflash.jax.merge([jnp.asarray(x) for x in outs], [jnp.asarray(x) for x in lses], **named)
    wanted = libflash.merge(outs, lses, **named)
    for mine, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)


def test_merge_of_parts_is_the_whole() -> None:
    q, k, v, *_ = problem()

    def in_parts(q, k, v):
        parts = [libflash.jax.attention(q, k[:, i : i + 3], v[:, i : i + 3], return_lse=True) for i in (0, 3, 6)]
        return libflash.jax.merge(*zip(*parts, strict=True))

    whole = lambda *x: libflash.jax.attention(*x, return_lse=True)  # noqa: E731
    assert_close(in_parts(q, k, v), whole(q, k, v))
    assert_close(*(jax.grad(loss_of(f), argnums=(0, 1, 2))(q, k, v) for f in (in_parts, whole)))


def test_merge_ignores_empty_parts_whatever_they_hold() -> None:
    out, lse = arrays((1, 2, 3, 4), (1, 3, 2))
    garbage, nothing = jnp.full_like(out, jnp.nan), jnp.full_like(lse, -jnp.inf)

    def loss(out, garbage, lse, nothing):
        merged, total = libflash.jax.merge([out, garbage], [lse, nothing])
        return merged.sum() + total.sum()

    gradients = jax.grad(loss, argnums=(0, 1, 2, 3))(out, garbage, lse, nothing)
    assert_close(gradients[0], jnp.ones_like(out))
    assert not gradients[1].any()
    assert not gradients[3].any()
    merged, total = libflash.jax.merge([garbage] * 2, [nothing] * 2)
    assert not merged.any()
    assert (total == -jnp.inf).all()


# -- refusals


def test_refusals_come_from_the_library_while_tracing() -> None:
    q, k, v, *_ = problem()
    attention = libflash.jax.attention
    for wrap in (
        lambda f: f,
        jax.jit,
        lambda f: jax.vmap(f, in_axes=None, axis_size=2),
        lambda f: lambda *x: jax.eval_shape(f, *x),
    ):
        with pytest.raises(libflash.InvalidError, match=r"v: shape .*\(2, 5, 2, 5\)"):
            wrap(attention)(q, k, v[:, :5])
    refused = [
        (libflash.InvalidError, "softcap", {"softcap": -1.0}),
        (libflash.InvalidError, "layout is 'hbsd'", {"layout": "hbsd"}),
        (libflash.InvalidError, "causal_align is 'left'", {"causal_align": "left"}),
        (libflash.InvalidError, "dropout_p", {"dropout_p": 1.0}),
        (libflash.InvalidError, "seed is -1", {"dropout_p": 0.5, "seed": -1}),
        (libflash.InvalidError, r"seed is float32\[2\]", {"dropout_p": 0.5, "seed": jnp.zeros(2)}),
        (libflash.InvalidError, "bias has 5 dimensions", {"bias": jnp.zeros((1, 1, 1, 1, 1))}),
        (libflash.InvalidError, r"mask is int8\[", {"mask": jnp.zeros((7, 9), jnp.int8)}),
        (libflash.InvalidError, "BlockMask", {"block_mask": libflash.BlockMask(0, 0, 0, 0)}),
        (libflash.UnsupportedError, "no_such_kernel", {"kernel": "no_such_kernel"}),
        (libflash.UnsupportedError, "sm90", {"backend": "sm90"}),
        (TypeError, "window_size", {"window_size": 3}),
        (ValueError, "longer than", {"kernel": "x" * 200}),
    ]
    for kind, text, options in refused:
        with pytest.raises(kind, match=text):
            attention(q, k, v, **options)
    with pytest.raises(libflash.UnsupportedError, match="alibi_slopes"):
        jax.grad(lambda slopes: attention(q, k, v, alibi_slopes=slopes).sum())(jnp.ones(4))
    with pytest.raises(libflash.InvalidError, match="k and v"):
        libflash.jax.decode(q, k, v, k=k)
    with pytest.raises(libflash.InvalidError, match=r"outs\[1\]"):
        libflash.jax.merge([q, k], [jnp.zeros((2, 4, 7))] * 2)


def test_refusals_of_values_come_when_it_runs() -> None:
    """Lengths are data: what is wrong with them shows on the CPU when the program runs, with the library's text."""
    q, k, v = arrays((7, 4, 8), (7, 2, 8), (7, 2, 8))
    cu = jnp.array([0, 3, 99], jnp.int32)
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=r"INVALID_ARGUMENT: cu_seqlens_q.*99"):
        libflash.jax.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu).block_until_ready()


def test_no_second_derivative_and_no_forward_mode() -> None:
    q, k, v, *_ = problem()
    square = lambda q: (libflash.jax.attention(q, k, v) ** 2).sum()  # noqa: E731
    with pytest.raises((TypeError, ValueError, NotImplementedError)):
        jax.grad(lambda q: jax.grad(square)(q).sum())(q)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(square, (q,), (q,))


def test_handlers_check_what_they_get() -> None:
    """Attributes of a wrong type and a wrong number of operands are refused, not read."""
    shape = jax.ShapeDtypeStruct((1, 1, 1, 1), np.float32)
    results = [shape, jax.ShapeDtypeStruct((1, 1, 1), np.float32)]
    x = jnp.zeros(shape.shape)
    refused = {
        "attribute flags must be a 64-bit integer": ((x, x, x), {"flags": np.int32(0)}),
        "attribute softcap must be a 64-bit float": ((x, x, x), {"softcap": np.float32(1)}),
        "attribute kernel must be a text": ((x, x, x), {"kernel": np.int64(1)}),
        "unknown attribute colour": ((x, x, x), {"colour": np.int64(1)}),
        "takes 3 operands and 2 results, not 2 and 2": ((x, x), {}),
        "layout is 7": ((x, x, x), {"layout": np.int64(7)}),
        "at most 4 of a type that libflash has": ((x, x, x.astype(np.int8)), {}),
        "seed must become": ((x, x, x, x), {"operands": np.int64(1 << 16)}),
    }
    for text, (operands, attributes) in refused.items():
        with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=text):
            jax.block_until_ready(jax.ffi.ffi_call("libflash_forward", results)(*operands, **attributes))


def test_shape_check_refuses_garbage() -> None:
    good = ((11, (1, 2, 3, 4)),) * 3
    assert _jax_ffi.workspace_size(0, 0, good, ((11, (1, 2, 3, 4)), (11, (1, 3, 2))), {})[0] == 0
    for arguments in [(9, 0, good, good, {}), (0, 0, ((11, (1,) * 5),) * 3, good, {}), (0, 0, good * 10, good, {})]:
        with pytest.raises(ValueError, match=r".+"):
            _jax_ffi.workspace_size(*arguments)
    for arguments in [(0, 0, (3,), good, {}), (0, 0, good, good, {"flags": "x"}), (0, 0, ((11, ("a",)),) * 3, good, {})]:
        with pytest.raises(TypeError):
            _jax_ffi.workspace_size(*arguments)


def test_threads_may_call_at_once() -> None:
    from concurrent.futures import ThreadPoolExecutor

    q, k, v, *_ = problem()
    function = jax.jit(libflash.jax.attention)
    wanted = np.asarray(function(q, k, v))
    with ThreadPoolExecutor(4) as pool:
        assert all((np.asarray(x) == wanted).all() for x in pool.map(lambda _: function(q, k, v), range(64)))


def test_exports_and_serialises() -> None:
    pytest.importorskip("flatbuffers")
    q, k, v, *_ = problem()
    exported = jax.export.export(
        jax.jit(libflash.jax.attention), disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("libflash_forward")]
    )(q, k, v)
    again = jax.export.deserialize(exported.serialize())
    assert_same_bits(again.call(q, k, v), libflash.jax.attention(q, k, v))


def test_bfloat16_round_trip() -> None:
    x = jnp.arange(7, dtype=jnp.bfloat16)
    assert_same_bits(numpy_of(x), np.asarray(x))
