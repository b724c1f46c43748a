"""libflash.jax.context_parallel_attention on four devices of the CPU: equal to one device for every scheme, order and option."""

from __future__ import annotations

import pytest
from harness import run_python

pytest.importorskip("jax")

DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
PRELUDE = """
    import jax, jax.numpy as jnp, numpy as np, libflash, libflash.jax as lj
    from jax.sharding import AxisType, PartitionSpec as P
    jax.config.update("jax_enable_x64", True)

    def mesh_of(scheme, ranks):
        if scheme == "heads_ring":
            mesh = jax.make_mesh((2, ranks // 2), ("heads", "cp"), axis_types=(AxisType.Auto,) * 2)
            return mesh, ("heads", "cp"), ("cp", "heads")
        return jax.make_mesh((ranks,), ("cp",), axis_types=(AxisType.Auto,)), "cp", "cp"

    def tensors(shape, packed, dtype="float64"):
        batch, tokens, hq, hk, d, dv = shape
        rng, lead = np.random.default_rng(5), (tokens,) if packed else (batch, tokens)
        made = (rng.standard_normal((*lead, h, c)).astype(dtype) for h, c in ((hq, d), (hk, d), (hk, dv), (hq, dv)))
        lse = (hq, tokens) if packed else (batch, hq, tokens)
        return (*made, rng.standard_normal(lse).astype("float64" if dtype == "float64" else "float32"))

    def divided(scheme, order, ranks=4, cu=None, **options):
        \"\"\"(q, k, v, sink, slopes) of the whole problem -> (out, lse) of the whole problem.\"\"\"
        mesh, axis, spec = mesh_of(scheme, ranks)
        dim = 0 if cu is not None else 1
        tokens, rows = P(*(None,) * dim, spec), P(*(None,) * (dim + 1), spec)

        def local(q, k, v, sink, slopes):
            return lj.context_parallel_attention(
                q, k, v, axis_name=axis, scheme=scheme, order=order, cu_seqlens=cu, learnable_sink=sink, alibi_slopes=slopes,
                return_lse=True, **options)
        mapped = jax.shard_map(local, mesh=mesh, in_specs=(tokens,) * 3 + (P(),) * 2, out_specs=(tokens, rows))

        def whole(q, k, v, sink, slopes):
            out, lse = mapped(*(lj.shard(x, ranks, dim=dim, order=order) for x in (q, k, v)), sink, slopes)
            return lj.unshard(out, ranks, dim=dim, order=order), lj.unshard(lse, ranks, dim=dim + 1, order=order)
        return whole

    def wanted(q, k, v, g, gl, sink, slopes, cu=None, **options):
        options |= {} if cu is None else {"cu_seqlens_q": np.int32(cu), "cu_seqlens_k": np.int32(cu)}
        out, lse = libflash.attention(q, k, v, learnable_sink=sink, alibi_slopes=slopes, return_lse=True, **options)
        more = {} if sink is None else {"dsink": np.empty_like(sink)}
        options |= {"learnable_sink": sink, "alibi_slopes": slopes, "dlse": np.where(np.isfinite(lse), gl, 0)}
        grads = libflash.attention_backward(g, q, k, v, out, lse, **options, **more)
        return (out, lse, *grads[:3], *more.values())

    def compare(scheme, order, shape=(2, 48, 4, 2, 8, 6), ranks=4, sink=False, slopes=False, cu=None, bound=1e-12, **options):
        q, k, v, g, gl = tensors(shape, cu is not None)
        s = np.linspace(-1, 1, shape[2]) if sink else None
        a = np.linspace(0.1, 0.5, shape[2]) if slopes else None
        whole = divided(scheme, order, ranks, cu, **options)
        sides = (0, 1, 2, 3) if sink else (0, 1, 2)

        @jax.jit
        def run(q, k, v, s):
            def loss(q, k, v, s):
                out, lse = whole(q, k, v, s, a)
                return (out * g).sum() + (jnp.where(jnp.isfinite(lse), lse, 0) * gl).sum(), (out, lse)
            gradients, made = jax.grad(loss, argnums=sides, has_aux=True)(q, k, v, s)
            return (*made, *gradients)
        name = f"{scheme} {order} {options} {shape} sink={sink} cu={cu}"
        got, want = run(q, k, v, s), wanted(q, k, v, g, gl, s, a, cu, **options)
        assert len(got) == len(want), name
        for n, (x, y) in enumerate(zip(got, want)):
            np.testing.assert_allclose(np.asarray(x), y, rtol=bound, atol=bound * 10, err_msg=f"{name}: result {n}")
        return got
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
    """Parts are summed in float32: results of four devices are as near to float64 as those of one."""
    run_python(PRELUDE + """
    import ml_dtypes
    q, k, v, g, _ = tensors((2, 128, 4, 2, 16, 16), False)
    q, k, v = (x.astype(ml_dtypes.bfloat16) for x in (q, k, v))
    exact = np.asarray(libflash.attention(*(x.astype("float64") for x in (q, k, v)), causal=True))
    error = lambda out: np.abs(np.asarray(out, "float64") - np.asarray(exact)).max()
    one = error(libflash.attention(q, k, v, causal=True))
    out, lse = jax.jit(divided("ring", "zigzag", causal=True))(q, k, v, None, None)
    assert out.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
    assert error(out) <= 1.2 * one, (error(out), one)
    gradients = lambda f, *x: jax.jit(jax.grad(lambda *x: (f(*x).astype(float) * g).sum(), argnums=(0, 1, 2)))(*x)
    wide = gradients(lambda q, k, v: lj.attention(q, k, v, causal=True), *(x.astype("float64") for x in (q, k, v)))
    alone = gradients(lambda q, k, v: lj.attention(q, k, v, causal=True), q, k, v)
    ring = gradients(lambda q, k, v: divided("ring", "zigzag", causal=True)(q, k, v, None, None)[0], q, k, v)
    for exact, one, four in zip(wide, alone, ring):
        assert four.dtype == jnp.bfloat16
        assert error(four) <= 1.2 * error(one), (error(four), error(one))
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
    refused("scheme is 'tree'; it must be one of", scheme="tree")
    refused("order is 'striped'", order="striped")
    refused("order 'zigzag' needs a multiple of 8", shape=(2, 44, 4, 2, 8, 6))
    refused("q has 3 heads; scheme 'heads' needs a multiple of the 4", scheme="heads", shape=(2, 48, 3, 3, 8, 6))
    refused("scheme is 'halo'; it needs order='contiguous'", scheme="halo")
    refused("seed is None; with dropout_p", dropout_p=0.5)
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
        jax.hessian(whole)(q)
    except (TypeError, libflash.UnsupportedError):
        pass
    else:
        raise AssertionError("a second derivative of the ring was not refused")
    for scheme, options in (("ring", {}), ("all_gather", {}), ("heads", dict(dropout_p=0.5, seed=1))):
        whole = lambda q: divided(scheme, "zigzag", **options)(q, k, v, None, None)[0].sum()
        try:
            jax.grad(lambda q: (jax.grad(whole)(q) ** 2).sum())(q)
        except libflash.UnsupportedError as error:
            assert "context_parallel_attention has no second derivative" in str(error)
        else:
            raise AssertionError(f"a gradient of a gradient was not refused: {scheme}")
    """, **DEVICES)  # fmt: skip
