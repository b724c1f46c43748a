"""Programs with libflash.jax exported by jax.export, with known and with symbolic dimensions."""

from __future__ import annotations

import pytest
from harness import assert_same_bits, run_python

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import libflash.jax  # noqa: E402
from jax_problem import arrays, everything, loss_of, problem  # noqa: E402

import libflash  # noqa: E402

CHECKS = [jax.export.DisabledSafetyCheck.custom_call(name) for name in libflash.jax.CUSTOM_CALLS]


def export(function, *operands, checks=CHECKS):
    return jax.export.export(jax.jit(function), disabled_checks=checks)(*operands)


def spec(shape: str, dtype: str = "float32", scope=None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape, scope=scope), dtype)


def same(got, wanted) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert_same_bits(x, y)


def test_the_names_of_the_custom_calls() -> None:
    """The names that the docstring lists: all that are needed, and no others."""
    q, k, v, *_ = problem()

    def every(q, k, v):
        step = libflash.jax.decode(q[:, :1], k, v)
        caches = libflash.jax.cache_write(k[0], v[0], k, v, jnp.arange(k.shape[1], dtype=jnp.int32))
        gradient = jax.grad(lambda q: (libflash.jax.attention(q, k, v) ** 2).sum())
        tangent = jax.jvp(lambda q: libflash.jax.attention(q, k, v), (q,), (q,))
        return jax.jvp(gradient, (q,), (q,)), tangent, step, caches

    assert export(every, q, k, v)
    for i in range(len(CHECKS)):
        with pytest.raises(ValueError, match=f"@{libflash.jax.CUSTOM_CALLS[i]}"):
            export(every, q, k, v, checks=CHECKS[:i] + CHECKS[i + 1 :])
    assert "libflash.jax.CUSTOM_CALLS" in libflash.jax.__doc__


def test_exports_and_serialises() -> None:
    pytest.importorskip("flatbuffers")
    x = problem()
    gradient = jax.grad(loss_of(everything), argnums=range(5))
    exported = jax.export.deserialize(export(gradient, *x).serialize())
    same(exported.call(*x), jax.jit(gradient)(*x))


def test_symbolic_dimensions() -> None:
    """One program for every batch and every length: forward and gradients."""
    scope = jax.export.SymbolicScope()
    q, k, v = (spec(shape, scope=scope) for shape in ("b, s, 4, 8", "b, t, 2, 8", "b, t, 2, 5"))
    bias, sink = spec("1, 4, s, t", scope=scope), spec("4", scope=scope)
    both = lambda *x: (everything(*x), jax.grad(loss_of(everything), argnums=range(5))(*x))  # noqa: E731
    exported = export(both, q, k, v, bias, sink)
    for b, s, t in ((2, 5, 7), (1, 3, 3), (3, 130, 200)):
        x = arrays((b, s, 4, 8), (b, t, 2, 8), (b, t, 2, 5), (1, 4, s, t), (4,))
        same(exported.call(*x), jax.jit(both)(*x))


def test_symbolic_dimensions_of_packed_arrays_and_of_caches() -> None:
    packed = lambda q, cu: libflash.jax.attention(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, return_lse=True)  # noqa: E731
    scope = jax.export.SymbolicScope()
    exported = export(packed, spec("total, 2, 8", scope=scope), spec("entries", "int32", scope))
    for cu in ([0, 2, 7], [0, 9]):
        x = *arrays((9, 2, 8)), jnp.array(cu, jnp.int32)
        same(exported.call(*x), packed(*x))

    step = lambda q, kc, vc, k, v, n: libflash.jax.decode(q, kc, vc, k=k, v=v, cache_seqlens=n)  # noqa: E731
    scope = jax.export.SymbolicScope()
    shapes = "b, 1, 4, 8", "b, t, 2, 8", "b, t, 2, 8", "b, 1, 2, 8", "b, 1, 2, 8"
    exported = export(step, *(spec(shape, scope=scope) for shape in shapes), spec("b", "int32", scope))
    x = *arrays((2, 1, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8), (2, 1, 2, 8), (2, 1, 2, 8)), jnp.array([3, 4], jnp.int32)
    same(exported.call(*x), jax.jit(step)(*x))


def test_symbolic_dimensions_under_vmap() -> None:
    scope = jax.export.SymbolicScope()
    q, k = spec("n, b, s, 4, 8", scope=scope), spec("n, b, t, 2, 8", scope=scope)
    exported = export(jax.vmap(libflash.jax.attention), q, k, k)
    x = arrays((3, 2, 5, 4, 8), (3, 2, 6, 2, 8), (3, 2, 6, 2, 8))
    same(exported.call(*x), jax.vmap(libflash.jax.attention)(*x))


def test_what_is_wrong_with_symbolic_dimensions_shows_when_it_runs() -> None:
    scope = jax.export.SymbolicScope()
    exported = export(libflash.jax.attention, *(spec(f"b, {s}, 2, 8", scope=scope) for s in "stu"))
    good = arrays((2, 3, 2, 8), (2, 5, 2, 8), (2, 5, 2, 8))
    same(exported.call(*good), libflash.jax.attention(*good))
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=r"INVALID_ARGUMENT: v: shape .*\(2, 5, 2, 8\)"):
        jax.block_until_ready(exported.call(*good[:2], *arrays((2, 6, 2, 8))))
    with pytest.raises(libflash.InvalidError, match="q has 3 dimensions"):
        export(libflash.jax.attention, spec("s, 2, 8"), *good[1:])


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="here gradients can be exported for a GPU")
def test_platforms_of_programs() -> None:
    """Without a GPU, gradients for one would have no scratch memory; there are no kernels for other platforms."""
    q, k, v, *_ = problem()
    functions = {
        "attention": lambda: libflash.jax.attention(q, k, v),
        "decode": lambda: libflash.jax.decode(q[:, :1], k, v),
        "cache_write": lambda: libflash.jax.cache_write(k[0], v[0], k, v, jnp.arange(k.shape[1], dtype=jnp.int32)),
    }
    for name, function in functions.items():
        with pytest.raises(libflash.UnsupportedError, match=rf"libflash\.jax\.{name} .* for the platform 'tpu'"):
            jax.export.export(jax.jit(function), disabled_checks=CHECKS, platforms=["cpu", "tpu"])()
        for platforms in (["cpu"], ["cuda"], ["cpu", "cuda"]):
            assert jax.export.export(jax.jit(function), disabled_checks=CHECKS, platforms=platforms)().platforms == tuple(
                platforms
            )
    gradient = jax.grad(lambda x: libflash.jax.attention(x, k, v).sum())
    jax.export.export(jax.jit(gradient), disabled_checks=CHECKS, platforms=["cpu"])(q)
    with pytest.raises(libflash.UnsupportedError, match=r"gradients of .* cannot be exported for 'cuda' where JAX has no GPU"):
        jax.export.export(jax.jit(gradient), disabled_checks=CHECKS, platforms=["cpu", "cuda"])(q)


def test_a_program_for_several_devices_needs_shard_map() -> None:
    """Rules for arrays that jit shards cannot be exported; the error says so, of gradients too."""
    run_python("""
        import jax, jax.numpy as jnp, numpy as np, libflash, libflash.jax
        from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
        checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in libflash.jax.CUSTOM_CALLS]
        mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
        q = jax.device_put(jnp.ones((4, 8, 8, 16)), NamedSharding(mesh, P("x", None, "y")))
        attention = lambda q: libflash.jax.attention(q, q, q, causal=True)
        gradient = jax.grad(lambda q: attention(q).sum())
        decode = lambda q: libflash.jax.decode(q[:, :1], q, q)
        for name, function in (("attention", attention), ("attention", gradient), ("decode", decode)):
            try:
                jax.export.export(jax.jit(function), disabled_checks=checks)(q)
            except libflash.UnsupportedError as error:
                text = str(error)
            else:
                raise AssertionError(f"not refused: {name}")
            assert text.startswith(f"libflash.jax.{name} cannot be exported in a program for 4 devices"), text
            assert "call it inside jax.shard_map" in text, text
            mapped = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P("x", None, "y"), out_specs=P("x", None, "y")))
            exported = jax.export.export(mapped, disabled_checks=checks)(q)
            np.testing.assert_array_equal(exported.call(q), jax.jit(function)(q))
    """, XLA_FLAGS="--xla_force_host_platform_device_count=4")  # fmt: skip


def test_programs_are_exported_beside_several_devices() -> None:
    """A program for one device, exported by a process with four."""
    run_python("""
        import jax, jax.numpy as jnp, numpy as np, libflash.jax
        checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in libflash.jax.CUSTOM_CALLS]
        q = jnp.ones((2, 3, 2, 8))
        symbolic = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, s, 2, 8"), q.dtype)
        exported = jax.export.export(jax.jit(libflash.jax.attention), disabled_checks=checks)(*[symbolic] * 3)
        np.testing.assert_array_equal(exported.call(q, q, q), libflash.jax.attention(q, q, q))
    """, XLA_FLAGS="--xla_force_host_platform_device_count=4")  # fmt: skip
