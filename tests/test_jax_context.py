"""libflash.jax.context_parallel_attention on four devices of the CPU: equal to one device for every scheme, order and option."""

from __future__ import annotations

import pytest
from harness import run_python

pytest.importorskip("jax")

DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
PRELUDE = """
    import jax, jax.numpy as jnp, numpy as np, libflash, libflash.jax as lj
    from jax_context import compare, divided, tensors
    jax.config.update("jax_enable_x64", True)
"""
PLACES = (
    ("ring", "zigzag"), ("ring", "contiguous"), ("all_gather", "zigzag"), ("heads", "zigzag"), ("heads_ring", "zigzag"),
    ("auto", "contiguous"),
)  # fmt: skip
CASES = """
    compare(scheme, order)
    compare(scheme, order, window_size=(7, 3), slopes=True)
    compare(scheme, order, causal=True, softcap=3.0, softmax_scale=0.7, sink=True, slopes=True, shape=(1, 32, 4, 1, 8, 8))
    compare(scheme, order, causal=True, dropout_p=0.25, seed=2**40 + 3, offset=5)
    compare(scheme, order, causal=True, sink=True, cu=(0, 1, 22, 22, 41, 48), dropout_p=0.5, seed=11)
"""


@pytest.mark.parametrize(("scheme", "order"), PLACES)
def test_equal_to_one_device(scheme: str, order: str) -> None:
    run_python(f"{PRELUDE}\n    scheme, order = {scheme!r}, {order!r}\n{CASES}", **DEVICES)


def test_windows_that_end_at_the_edge_of_a_shard_and_beyond() -> None:
    run_python(PRELUDE + """
    for left in (12, 13, 25):
        compare("halo", "contiguous", causal=True, window_size=(left, -1), slopes=True, sink=True)
    program = jax.jit(lambda *x: divided("halo", "contiguous", causal=True, window_size=(12, -1))(*x, None, None)[0])
    q, k, v, *_ = tensors((2, 48, 4, 2, 8, 6), False)
    text = program.lower(q, k, v).compile().as_text()
    assert text.count("source_target_pairs={{0,1},{1,2},{2,3}}") in (1, 2), text  # one step, not three
    """, **DEVICES)  # fmt: skip


def test_rounding_of_bfloat16() -> None:
    """Parts are summed in float32: results of four devices are as near to float64 as those of one. Sums of bfloat16 gradients
    have 1.2 times the error."""
    run_python(PRELUDE + """
    import ml_dtypes
    q, k, v, g, _ = tensors((2, 128, 4, 2, 16, 16), False)
    q, k, v = (x.astype(ml_dtypes.bfloat16) for x in (q, k, v))
    exact = np.asarray(libflash.attention(*(x.astype("float64") for x in (q, k, v)), causal=True))
    error = lambda got, exact: np.sqrt(np.mean((np.asarray(got, "float64") - np.asarray(exact)) ** 2))
    one = error(libflash.attention(q, k, v, causal=True), exact)
    gradients = lambda f, *x: jax.jit(jax.grad(lambda *x: (f(*x).astype(float) * g).sum(), argnums=(0, 1, 2)))(*x)
    whole = lambda q, k, v: lj.attention(q, k, v, causal=True)
    wide = gradients(whole, *(x.astype("float64") for x in (q, k, v)))
    alone = gradients(whole, q, k, v)
    for scheme in ("ring", "all_gather"):
        shards = divided(scheme, "zigzag", causal=True)
        out, lse = jax.jit(shards)(q, k, v, None, None)
        assert out.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
        assert error(out, exact) <= 1.1 * one, (scheme, error(out, exact), one)
        for right, single, four in zip(wide, alone, gradients(lambda q, k, v: shards(q, k, v, None, None)[0], q, k, v)):
            assert four.dtype == jnp.bfloat16
            assert error(four, right) <= 1.1 * error(single, right), (scheme, error(four, right), error(single, right))
    """, **DEVICES)  # fmt: skip


def test_seeds_of_keys_and_recomputation() -> None:
    run_python(PRELUDE + """
    q, k, v, g, _ = tensors((2, 48, 4, 2, 8, 6), False)
    key = jax.random.key(3)
    loss = lambda f: lambda q: (f(q, k, v, None, None)[0] * g).sum()
    rings = [divided(scheme, "zigzag", causal=True, dropout_p=0.5, seed=key) for scheme in ("ring", "heads", "all_gather")]
    first, *others = [np.asarray(jax.jit(jax.grad(loss(f)))(q)) for f in rings]
    one = jax.jit(jax.grad(lambda q: (lj.attention(q, k, v, causal=True, dropout_p=0.5, seed=key) * g).sum()))(q)
    for x in (*others, np.asarray(one), np.asarray(jax.jit(jax.grad(jax.checkpoint(loss(rings[0]))))(q))):
        np.testing.assert_allclose(x, first, rtol=1e-12, atol=1e-12)
    twice = [np.asarray(jax.jit(jax.grad(loss(rings[0])))(q)) for _ in range(2)]
    assert np.array_equal(*twice)
    """, **DEVICES)  # fmt: skip


def test_nan_in_a_row_stays_in_this_row() -> None:
    run_python(PRELUDE + """
    q, k, v, *_ = tensors((1, 48, 2, 2, 8, 8), False)
    q[0, 30, 1, 2] = np.nan
    out, lse = divided("ring", "zigzag")(q, k, v, None, None)
    rows = np.isnan(q).any(-1)
    assert (np.isnan(out).all(-1) == rows).all() and (np.isnan(lse)[0] == rows[0].T).all()
    """, **DEVICES)  # fmt: skip


def test_one_device_is_attention() -> None:
    run_python(PRELUDE + """
    q, k, v, *_ = tensors((2, 48, 4, 2, 8, 6), False, "float32")
    for scheme in ("ring", "heads", "all_gather"):
        out, lse = divided(scheme, "zigzag", ranks=1, causal=True, deterministic=True)(q, k, v, None, None)
        assert np.array_equal(out, libflash.attention(q, k, v, causal=True)), scheme
    """)  # fmt: skip


def test_heads_that_do_not_divide_take_a_ring_on_gpus() -> None:
    run_python(PRELUDE + """
    jax.default_backend = lambda: "gpu"
    for heads, scheme in ((4, "heads"), (3, "ring")):
        text = lj.explain_context_parallel(*tensors((2, 48, heads, heads, 8, 6), False)[:3], ranks=(4,))
        assert text.startswith(f"scheme     {scheme}"), text
    """)  # fmt: skip


def test_forward_mode_with_heads() -> None:
    """Equal to one device, for every input that has a derivative."""
    run_python(PRELUDE + """
    q, k, v, *_ = tensors((2, 48, 4, 2, 8, 6), False)
    x = tuple(jnp.asarray(y) for y in (q, k, v, np.linspace(-1, 1, 4)))
    directions = tuple(jnp.cos(y) for y in x)
    whole = divided("heads", "zigzag", ranks=2, causal=True)
    shards = lambda *x: whole(*x, None)
    one = lambda *x: lj.attention(*x[:3], learnable_sink=x[3], causal=True, return_lse=True)
    wanted = jax.jvp(one, x, directions)
    linear = lambda f: lambda *x: (f(*x), jax.linearize(f, *x)[1](*directions))
    for got in (jax.jit(lambda *x: jax.jvp(shards, x, directions))(*x), jax.jit(linear(shards))(*x)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12), got, wanted)
    """, **DEVICES)  # fmt: skip


FORWARD_MODE = """
    q, k, v, *_ = tensors((2, 48, 4, 2, 8, 6), False)
    x = (q, k, v, np.linspace(-1, 1, 4))
    whole = divided(scheme, order, **options)
    f = lambda *x: whole(*x, None)
    of_q = lambda q: f(q, *x[1:])[0]
    scaled = lambda a: of_q(q * a).sum()

    def refused(transform, *arguments):
        try:
            transform(*arguments)
        except libflash.UnsupportedError as error:
            text = f"context_parallel_attention has no forward-mode derivative (jvp, linearize, jacfwd) {named}; it has one with "
            assert text + "scheme 'heads' and without dropout_p only" in str(error), error
        else:
            raise AssertionError("not refused")
"""


@pytest.mark.parametrize(
    ("scheme", "order", "options"),
    [
        ("ring", "zigzag", {}), ("halo", "contiguous", {"causal": True, "window_size": (12, -1)}), ("all_gather", "zigzag", {}),
        ("heads_ring", "zigzag", {}), ("heads", "zigzag", {"dropout_p": 0.5, "seed": 1}),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_forward_mode_of_other_schemes_is_refused(scheme: str, order: str, options: dict) -> None:
    """For every input that has a derivative."""
    named = f"with scheme {scheme!r}" + (" and dropout_p" if options.get("dropout_p") else "")
    given = f"scheme, order, options, named = {scheme!r}, {order!r}, {options!r}, {named!r}"
    run_python(f"{PRELUDE}\n    {given}\n{FORWARD_MODE}" + """
    for i in range(4):
        one = lambda y: f(*x[:i], y, *x[i + 1:])
        refused(jax.jit(lambda y: jax.jvp(one, (y,), (y,))), x[i])
    refused(jax.jit(lambda q: jax.linearize(of_q, q)[1](q)), q)
    """, **DEVICES)  # fmt: skip


def test_forward_mode_is_refused_in_every_transform_and_reverse_mode_works() -> None:
    given = 'scheme, order, options, named = "ring", "zigzag", {}, "with scheme \'ring\'"'
    run_python(f"{PRELUDE}\n    {given}\n{FORWARD_MODE}" + """
    refused(lambda: jax.jvp(of_q, (q,), (q,)))
    refused(jax.linearize(of_q, q)[1], q)
    refused(jax.jit(jax.jacfwd(scaled)), 1.0)
    refused(jax.jit(jax.hessian(scaled)), 1.0)
    refused(jax.jit(jax.grad(lambda a: jax.jvp(scaled, (a,), (a,))[1])), 1.0)
    refused(jax.jit(jax.vmap(lambda a: jax.jvp(scaled, (a,), (a,))[1])), np.ones(2))
    refused(jax.jit(lambda q: jax.jvp(jax.checkpoint(of_q), (q,), (q,))), q)
    gradient = jax.jit(jax.grad(scaled))(1.0)
    for other in (jax.vmap(jax.grad(scaled)), jax.grad(lambda a: jax.vmap(scaled)(a).sum())):
        np.testing.assert_allclose(jax.jit(other)(np.ones(2)), [gradient, gradient], rtol=1e-12)
    """, **DEVICES)  # fmt: skip


def test_the_scheme_that_auto_chooses_is_named() -> None:
    run_python(PRELUDE + """
    q, k, v, *_ = tensors((2, 48, 4, 2, 8, 6), False)
    whole = lambda q: divided("auto", "contiguous", causal=True, window_size=(12, -1))(q, k, v, None, None)[0]
    try:
        jax.jit(lambda q: jax.jvp(whole, (q,), (q,)))(q)
    except libflash.UnsupportedError as error:
        assert "with scheme 'halo'; it has one" in str(error), error
    else:
        raise AssertionError("not refused")
    """, **DEVICES)  # fmt: skip


def test_sizes_and_axes_that_are_refused() -> None:
    run_python(PRELUDE + """
    from functools import partial
    q, k, v, *_ = tensors((1, 8, 2, 2, 4, 4), False)
    mesh = jax.make_mesh((2,), ("cp",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    P = jax.sharding.PartitionSpec

    def attention(**options):
        local = lambda q: lj.context_parallel_attention(q, q, q, **{"axis_name": "cp"} | options)
        return jax.shard_map(local, mesh=mesh, in_specs=P(None, "cp"), out_specs=P(None, "cp"))(q)

    def refused(text, call, kind=libflash.InvalidError):
        try:
            call()
        except kind as error:
            assert text in str(error), error
        else:
            raise AssertionError(f"not refused: {text}")
    rule = "; it must be the name of one mesh axis, or a tuple of two names, (heads, ring)"
    for axis in (["cp"], 3, None, ("a", "b", "c"), (), ("cp", "cp")):
        refused(f"axis_name is {axis!r}{rule}", partial(attention, axis_name=axis))
    refused(f"axis_name is traced (int64[]){rule}", lambda: jax.jit(lambda x: attention(axis_name=x))(1))
    unknown = libflash.UnsupportedError
    refused("dropout_p is traced", lambda: jax.jit(lambda x: attention(dropout_p=x))(0.5), unknown)
    refused("cu_seqlens is traced", lambda: jax.jit(lambda x: attention(cu_seqlens=[0, x]))(8), unknown)
    explain = partial(lj.explain_context_parallel, q, k, v)
    refused("ranks must be a tuple (n,) or (heads, ring), not 2", partial(explain, ranks=2), TypeError)
    refused("ranks must be a tuple (n,) or (heads, ring), not (1, 1, 1)", partial(explain, ranks=(1, 1, 1)), TypeError)
    refused("ranks[1] is 0; it must be at least 1", partial(explain, ranks=(2, 0)))
    refused("ranks[0] is traced", lambda: jax.jit(lambda n: explain(ranks=(n,)))(2), unknown)
    refused("ranks is traced", lambda: jax.jit(lambda n: explain(ranks=n))(2), unknown)
    for i, name in enumerate("qkv"):
        given = [x.tolist() if j == i else x for j, x in enumerate((q, k, v))]
        text = f"{name} must be an array or a jax.ShapeDtypeStruct, not list"
        refused(text, partial(lj.explain_context_parallel, *given, ranks=(2,)), TypeError)
    for move in (lj.shard, lj.unshard):
        refused("ranks is 0; it must be at least 1", partial(move, q, 0))
        refused("ranks must be an integer, not float", partial(move, q, 2.0), TypeError)
        refused("ranks is traced", lambda: jax.jit(lambda n: move(q, n))(2), unknown)
        refused("dim is 4; it must be an axis of x, which has 4 dimensions", partial(move, q, 2, dim=4))
        refused("dim is -5; it must be an axis of x", partial(move, q, 2, dim=-5))
        refused("dim must be an integer, not str", partial(move, q, 2, dim="s"), TypeError)
        refused("dim is traced", lambda: jax.jit(lambda n: move(q, 2, dim=n))(1), unknown)
        refused("x must be an array of JAX or NumPy", partial(move, q.tolist(), 2), TypeError)
    refused("axis_name has 'cp', which is no mesh axis here", lambda: lj.context_parallel_attention(q, q, q, axis_name="cp"))
    refused("tokens is -8; it must not be negative", partial(lj.positions, -8, 2))
    refused("tokens must be an integer, not bool", partial(lj.positions, True, 1), TypeError)
    refused("tokens must be an integer, not float", partial(lj.positions, 8.0, 2), TypeError)
    refused("tokens is traced", lambda: jax.jit(lambda n: lj.positions(n, 2))(8), unknown)
    assert np.array_equal(lj.shard(q, 2, dim=-3), lj.shard(q, 2, dim=1))
    """, **DEVICES)  # fmt: skip


def test_refusals() -> None:
    run_python(PRELUDE + """
    q, k, v, *_ = tensors((2, 48, 4, 2, 8, 6), False)

    def refused(text, kind=libflash.InvalidError, shape=None, ranks=4, scheme="ring", order="zigzag", sink=None, **options):
        arrays = (q, k, v) if shape is None else tensors(shape, options.get("cu") is not None)[:3]
        try:
            divided(scheme, order, ranks, **options)(*arrays, sink, None)
        except kind as error:
            assert text in str(error), error
        else:
            raise AssertionError(f"not refused: {text}")
    refused("scheme is 'tree'; it must be 'auto', 'ring', 'halo'", scheme="tree")
    for name, value in (("bias", np.zeros((1, 4, 12, 48))), ("mask", np.ones((12, 48), bool)), ("layout", "bhsd")):
        refused(f"{name} cannot be given to context_parallel_attention", libflash.UnsupportedError, **{name: value})
    refused("unexpected keyword argument 'biass'", TypeError, biass=1)
    refused("order is 'striped'", order="striped")
    refused("order 'zigzag' needs a multiple of 8", shape=(2, 44, 4, 2, 8, 6))
    refused("q has 3 heads; scheme 'heads' needs a multiple of the 4", scheme="heads", shape=(2, 48, 3, 3, 8, 6))
    refused("scheme is 'halo'; it needs order='contiguous'", scheme="halo")
    refused("seed is None; with dropout_p", dropout_p=0.5)
    refused("seed is -1; it must be from 0", seed=-1)
    for name in ("softmax_scale", "softcap", "dropout_p"):
        refused(f"{name} must be a number, not bool", TypeError, **{name: False})
    refused("cu_seqlens ends at 40; the ranks have 48", cu=(0, 40), shape=(1, 48, 4, 2, 8, 6))
    refused("cu_seqlens is (0, 9, 4, 48); it must", cu=(0, 9, 4, 48), shape=(1, 48, 4, 2, 8, 6))
    refused("learnable_sink has shape (3,); it must be (4,)", sink=np.zeros(3))
    for shape, scheme, rule in (
        ((2, 48, 3, 3, 8, 6), "auto", "q has 3 heads; a mesh of two dimensions, (heads, ring), needs a multiple of the 2"),
        ((2, 48, 3, 3, 8, 6), "heads_ring", "q has 3 heads; scheme 'heads_ring' needs a multiple of the 2"),
        ((2, 48, 6, 3, 8, 6), "auto", "k has 3 heads; a mesh of two dimensions, (heads, ring), needs a multiple or a divisor"),
    ):
        try:
            lj.explain_context_parallel(*tensors(shape, False)[:3], ranks=(2, 2), scheme=scheme)
        except libflash.InvalidError as error:
            assert rule in str(error), error
        else:
            raise AssertionError(f"not refused: {rule}")
    text = lj.explain_context_parallel(q, k, v, ranks=(4,), causal=True)
    assert text.startswith("scheme     heads") or "divide" in text, text
    packed = tensors((1, 48, 4, 2, 8, 6), True)[:3]
    assert lj.explain_context_parallel(*packed, ranks=(1,), cu_seqlens=(0, 7, 48)).startswith("scheme     ring")
    slopes = np.linspace(0.1, 0.5, 4)
    for scheme in ("ring", "all_gather", "heads"):
        whole = divided(scheme, "zigzag")
        assert np.isfinite(jax.jit(jax.grad(lambda q: whole(q, k, v, None, slopes)[0].sum()))(q)).all()
        try:
            jax.jit(jax.grad(lambda slopes: whole(q, k, v, None, slopes)[0].sum()))(slopes)
        except libflash.UnsupportedError as error:
            assert "no gradient for alibi_slopes" in str(error)
        else:
            raise AssertionError("a gradient of alibi_slopes was not refused")
    whole = lambda q: divided("ring", "zigzag")(q, k, v, None, None)[0].sum()
    try:
        jax.eval_shape(jax.hessian(whole), q)
    except (TypeError, libflash.UnsupportedError):
        pass
    else:
        raise AssertionError("a second derivative of the ring was not refused")
    for scheme, options in (("ring", {}), ("all_gather", {}), ("heads", dict(dropout_p=0.5, seed=1))):
        whole = lambda q: divided(scheme, "zigzag", **options)(q, k, v, None, None)[0].sum()
        try:
            jax.eval_shape(jax.grad(lambda q: (jax.grad(whole)(q) ** 2).sum()), q)  # without compiling what is refused
        except libflash.UnsupportedError as error:
            assert "context_parallel_attention has no second derivative" in str(error)
        else:
            raise AssertionError(f"a gradient of a gradient was not refused: {scheme}")
    """, **DEVICES)  # fmt: skip
