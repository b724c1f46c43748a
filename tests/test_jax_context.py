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
