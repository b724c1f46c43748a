"""libflash.jax on sharded arrays and in shard_map, on four devices of the CPU."""

from __future__ import annotations

import pytest
from harness import run_python

pytest.importorskip("jax")

SHARDED = """
    import jax, jax.numpy as jnp, numpy as np, libflash, libflash.jax
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
    same(libflash.attention(q, K, V, learnable_sink=sink, causal=True), plain)
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


def test_options_that_number_all_batch_entries() -> None:
    """Packed new rows, the rows of trees, groups of sequences; and queries or keys packed alone."""
    run_python(SHARDED.replace("{kind}", "Auto") + """
    lengths, ends = jnp.array([3, 2, 1, 5], "int32"), jnp.array([0, 2, 3, 3, 6], "int32")
    tree = jnp.tile(jnp.array([[1], [3], [5]], "int32"), (4, 1))
    for options in (
        {"k": k[0, :6], "v": v[0, :6], "cu_seqlens_new": ends, "cache_seqlens": lengths},
        {"tree_mask": tree, "cache_seqlens": 3 + lengths},
        {"shared_groups": jnp.arange(5), "shared_lens": jnp.ones(4, "int32")},
    ):
        decode = lambda q, k, v: libflash.jax.decode(q[:, :3], k, v, **options)
        same(jax.jit(decode)(Q, K, V), decode(q, k, v))
    flat = lambda x: x.reshape(-1, *x.shape[2:])[:6]
    attention = libflash.jax.attention
    queries = lambda q, k, v: attention(flat(q), k, v, cu_seqlens_q=jnp.array([0, 1, 1, 2, 6]), return_lse=True)
    keys = lambda q, k, v: attention(q, flat(k), flat(v), cu_seqlens_k=jnp.array([0, 1, 1, 2, 6]), return_lse=True)
    for packed in (queries, keys):
        total = lambda *x: sum((y**2).sum() for y in packed(*x))
        finite = lambda *x: jax.tree.map(jnp.nan_to_num, (packed(*x), jax.grad(total, (0, 1, 2))(*x)))
        same(jax.jit(finite)(Q, K, V), finite(q, k, v))
    """, **DEVICES)  # fmt: skip


def test_shard_map() -> None:
    run_python(SHARDED.replace("{kind}", "Auto") + """
    mapped = jax.shard_map(attention, mesh=mesh, in_specs=(P("x", None, "y"),) * 3 + (P("y"),), out_specs=P("x", None, "y"))
    same(jax.jit(mapped)(Q, K, V, sink), plain)
    gradient = jax.jit(jax.grad(lambda *x: (mapped(*x) ** 2).sum(), argnums=(0, 1, 2, 3)))(Q, K, V, sink)
    same(gradient, plain_gradient)
    """, **DEVICES)  # fmt: skip


SECOND = """
    every, direction = (q, k, v, sink), tuple(jnp.cos(x) for x in (q, k, v, sink))
    def second(f):
        loss = lambda *x: (f(*x) ** 2).sum()
        first = jax.grad(loss, (0, 1, 2, 3))
        penalty = lambda *x: sum((g**2).sum() for g in first(*x))
        return lambda x, t: (jax.jvp(f, x, t), jax.jvp(first, x, t)[1], jax.grad(penalty, (0, 1, 2, 3))(*x))
    def close(x, y):
        limit = 3e-5 if q.dtype == "float32" else 8 * 2.0**-11
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=limit * float(jnp.abs(y).max())), x, y)
    wanted = second(attention)(every, direction)
    on_mesh = lambda x: (put(x[0], "x", None, "y"), put(x[1], "x", None, "y"), put(x[2], "x", None, "y"), x[3])
"""


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_tangents_of_sharded_arrays(kind: str, dtype: str) -> None:
    run_python(SHARDED.replace("{kind}", kind).replace("float32", dtype) + SECOND + """
    program = jax.jit(second(attention))
    close(program(on_mesh(every), on_mesh(direction)), wanted)
    text = program.lower(on_mesh(every), on_mesh(direction)).compile().as_text()
    assert "all-gather" not in text and "all-to-all" not in text
    """, **DEVICES)  # fmt: skip


def test_shardings_in_types() -> None:
    """jax.set_mesh with explicit axes: the sharding is a part of a type, which gradients and tangents must share."""
    run_python(SHARDED.replace("{kind}", "Explicit") + SECOND + """
    x = on_mesh(every), on_mesh(direction)
    sequence = put(q, None, ("x", "y"))
    with jax.set_mesh(mesh):
        close(second(attention)(*x), wanted)
        close(jax.jit(second(attention))(*x), wanted)
        backward = jax.jit(jax.grad(loss, (0, 1, 2, 3)))
        text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*x[0]).compile().as_text()
        mapped = jax.jit(jax.vmap(attention, (0, None, None, None)))(jnp.stack([x[0][0], -x[0][0]]), *x[0][1:])
        got = attention(*x[0]), backward(sequence, *every[1:])
    assert "all-gather" not in text and "all-to-all" not in text
    assert jax.typeof(got[0]).sharding.spec == P("x", None, "y", None)
    same(got[0], plain), same(got[1], plain_gradient)
    same(mapped, jnp.stack([plain, attention(-q, k, v, sink)]))
    """, **DEVICES)  # fmt: skip


def test_caches_with_shardings_in_types() -> None:
    """New caches have the sharding of the old ones, which is a part of their types."""
    run_python(SHARDED.replace("{kind}", "Explicit") + """
    rows, slots = k[:, 0], jnp.array([3, 8, 30, -1], "int32")
    write = lambda cache: libflash.jax.cache_write(rows, None, cache, None, slots)
    append = lambda q, k_cache, v_cache: libflash.jax.decode(
        q[:, :1], k_cache, v_cache, k=k[:, :1], v=v[:, :1], cache_seqlens=jnp.array([3, 0, 7, 1], "int32"))
    wanted = write(k), append(q, k, v)
    with jax.set_mesh(mesh):
        for spec in (("x", None, "y"), (None, "x"), ()):
            caches = put(k, *spec), put(v, *spec)
            for got in (write(caches[0]), jax.jit(write)(caches[0])):
                same(got, wanted[0])
                assert jax.typeof(got).sharding.spec == jax.typeof(caches[0]).sharding.spec
            same(jax.jit(append)(Q, *caches), wanted[1])
    """, **DEVICES)  # fmt: skip


def test_operations_that_jax_cannot_divide_refuse_sharded_arrays() -> None:
    run_python(SHARDED.replace("{kind}", "Auto") + """
    import pytest
    text = "q is a JAX array on 4 devices, .* give all arrays to libflash.jax.attention"
    with pytest.raises(libflash.UnsupportedError, match=text):
        libflash.attention_backward(plain, Q, k, v, plain, jnp.zeros((4, 8, 8)))
    with pytest.raises(libflash.UnsupportedError, match=text):
        libflash.attention_tangent(Q, k, v, q, k, v)
    """, **DEVICES)  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_tangents_in_shard_map(dtype: str) -> None:
    run_python(SHARDED.replace("{kind}", "Auto").replace("float32", dtype) + SECOND + """
    mapped = jax.shard_map(attention, mesh=mesh, in_specs=(P("x", None, "y"),) * 3 + (P("y"),), out_specs=P("x", None, "y"))
    close(jax.jit(second(mapped))(on_mesh(every), on_mesh(direction)), wanted)
    specs = (P("x", None, "y"),) * 3 + (P("y"),)
    inside = lambda x, t: jax.jvp(attention, x, t)
    inside = jax.shard_map(inside, mesh=mesh, in_specs=(specs, specs), out_specs=(P("x", None, "y"),) * 2)
    close(jax.jit(inside)(on_mesh(every), on_mesh(direction)), wanted[0])
    """, **DEVICES)  # fmt: skip
