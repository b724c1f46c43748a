"""libflash.jax.decode and merge."""

from __future__ import annotations

import numpy as np
import pytest
from harness import assert_same_bits, random

import libflash

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import libflash.jax  # noqa: E402
from jax_problem import arrays, assert_close, loss_of, problem  # noqa: E402


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
    assert_same_bits(caches[0], before)  # the given arrays are not changed


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


def test_bits_of_int64_trees() -> None:
    """A word of 32 bits with its highest bit set does not fit int32; its bits count."""
    q, cache = arrays((1, 32, 1, 8), (1, 40, 1, 8))
    words = np.tril(np.ones((32, 32), np.int64)) @ (1 << np.arange(32))[:, None]
    words[31] -= 2
    call = lambda words: libflash.jax.decode(q, cache, cache, cache_seqlens=np.array([40]), tree_mask=words)  # noqa: E731
    with jax.enable_x64(True):
        got = call(jnp.asarray(words))
    assert_same_bits(got, call(words.astype(np.int32)))


def test_slots_that_do_not_fit_int32_are_outside_of_the_cache() -> None:
    k, cache = arrays((2, 1, 8), (1, 4, 1, 8))
    assert_same_bits(libflash.jax.cache_write(k, None, cache, None, np.array([2**32, -(2**32)])), cache)
    assert_same_bits(libflash.jax.cache_write(k, None, cache, None, [2**32, -(2**32)]), cache)


def test_slots_as_a_list() -> None:
    k, cache = arrays((2, 1, 8), (1, 4, 1, 8))
    wanted = libflash.jax.cache_write(k, None, cache, None, jnp.array([3, -1]))
    for slots in ([3, -1], (3, -1), [jnp.int32(3), -1], np.array([3, -1])):
        assert_same_bits(libflash.jax.cache_write(k, None, cache, None, slots), wanted)
    assert_same_bits(jax.jit(lambda slot: libflash.jax.cache_write(k, None, cache, None, [slot, -1]))(3), wanted)


def test_what_is_no_slots() -> None:
    k, cache = arrays((2, 1, 8), (1, 4, 1, 8))
    for slots, text in (
        (None, r"slots must be an array of JAX or NumPy, not None"),
        (3, r"slots must be an array of JAX or NumPy, not int \(3\)"),
        ("12", r"slots must be an array of JAX or NumPy, not str \(.12.\)"),
        ([1.0, 2.0], r"slots: dtype must be int32 or int64 \(it is float64\)"),
        (np.array([1, 2], np.uint32), r"slots: dtype must be int32 or int64 \(it is uint32\)"),
        ([[1], [2, 3]], "slots is a list that makes no array of integers: "),
        ([], r"slots: shape must be \(rows of k,\) = \(2,\)"),
        ([1, 2, 3], r"slots: shape must be \(rows of k,\) = \(2,\)"),
    ):
        with pytest.raises((TypeError, libflash.InvalidError), match=text):
            libflash.jax.cache_write(k, None, cache, None, slots)


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


def test_derivatives_of_merge() -> None:
    """Forward mode and second derivatives, against those of attention over all keys."""
    q, k, v, *_ = problem()
    t = jax.tree.map(jnp.cos, (q, k, v))

    def in_parts(q, k, v):
        parts = [libflash.jax.attention(q, k[:, i : i + 3], v[:, i : i + 3], return_lse=True) for i in (0, 3, 6)]
        return libflash.jax.merge(*zip(*parts, strict=True))

    def of(f):
        gradient = jax.grad(loss_of(f), argnums=(0, 1, 2))
        penalty = jax.grad(lambda *x: sum((g**2).sum() for g in gradient(*x)), argnums=(0, 1, 2))
        return jax.jvp(f, (q, k, v), t), jax.jvp(gradient, (q, k, v), t)[1], penalty(q, k, v)

    assert_close(of(in_parts), of(lambda *x: libflash.jax.attention(*x, return_lse=True)), 1e-4)


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


@pytest.mark.parametrize("broken", [jnp.nan, jnp.inf])
def test_merge_keeps_a_broken_lse(broken: float) -> None:
    """A part whose lse is NaN or infinite is not an empty part: the row is NaN, and no other row."""
    out, lse = arrays((1, 2, 3, 4), (1, 3, 2))
    bad, wrong = lse.at[0, 1, 0].set(broken), jnp.zeros_like(lse, bool).at[0, 1, 0].set(True)
    for lses in ([bad, bad], [lse, bad], [bad, lse], [bad, jnp.full_like(lse, -jnp.inf)]):
        merged, total = libflash.jax.merge([out, out], lses)
        assert (jnp.isnan(total) == wrong).all()
        assert (jnp.isnan(merged) == wrong.swapaxes(1, 2)[..., None]).all()


def test_merge_refuses_types_as_the_library() -> None:
    for of_out, of_lse, text in (
        (jnp.int32, jnp.float32, r"outs\[1\]: dtype must be float16, .* \(it is int32\)"),
        (jnp.float32, jnp.int32, r"lses\[1\]: dtype must be float32 \(it is int32\)"),
        (jnp.bfloat16, jnp.bfloat16, r"lses\[1\]: dtype must be float32 \(it is bfloat16\)"),
    ):
        out, lse = arrays((1, 2, 3, 4), (1, 3, 2))
        outs, lses = [out, out.astype(of_out)], [lse, lse.astype(of_lse)]
        for merge, given in ((libflash.jax.merge, jnp.asarray), (libflash.merge, np.asarray)):
            with pytest.raises(libflash.InvalidError, match=text):
                merge([given(x) for x in outs], [given(x) for x in lses])


def test_merge_refuses_what_is_no_list_as_the_library() -> None:
    out, lse = arrays((1, 2, 3, 4), (1, 3, 2))
    for outs, lses, text in (
        (jnp.stack([out, out]), jnp.stack([lse, lse]), "outs must be a list or tuple of arrays, not ArrayImpl"),
        (out, lse, "outs must be a list or tuple of arrays, not ArrayImpl"),
        ([out, out], jnp.stack([lse, lse]), "lses must be a list or tuple of arrays, not ArrayImpl"),
        (None, [lse], "outs must be a list or tuple of arrays, not None"),
        ([out], None, "lses must be a list or tuple of arrays, not None"),
        ({0: out}, [lse], "outs must be a list or tuple of arrays, not dict"),
        ((x for x in [out]), [lse], "outs must be a list or tuple of arrays, not generator"),
        ([out], [lse, lse], "outs has 1 arrays and lses 2; they must have the same length"),
        ([], [], r"outs has 0 arrays; it needs 1 or more"),
        ([out, None], [lse, lse], r"outs\[1\] must be an array .*not None"),
        ([out], [lse.tolist()], r"lses\[0\] must be an array .*list"),
    ):
        for merge in (libflash.jax.merge, libflash.merge, lambda *x: jax.jit(lambda: libflash.jax.merge(*x))()):
            with pytest.raises((TypeError, libflash.InvalidError), match=text):
                merge(outs, lses)


# -- packed rows


def test_packed_decode_is_that_of_the_library() -> None:
    """Also jitted with traced lengths; rows that belong to no sequence are 0, their lse -inf."""
    shapes = (8, 4, 8), (3, 9, 2, 8), (3, 9, 2, 5), (5, 2, 8), (5, 2, 5)
    q, k_cache, v_cache, k, v = (random(*shape, seed=i) for i, shape in enumerate(shapes))
    lengths = {"cu_seqlens_q": [0, 2, 2, 7], "cu_seqlens_new": [0, 2, 2, 5], "cache_seqlens": [4, 9, 6]}
    lengths = {name: np.array(x, np.int32) for name, x in lengths.items()}
    given = [jnp.asarray(x) for x in (q, k_cache, v_cache)]
    new = {"k": jnp.asarray(k), "v": jnp.asarray(v)}

    def step(*arrays, **lengths):
        return libflash.jax.decode(*arrays, return_lse=True, **new, **lengths)

    jitted = jax.jit(step)
    for starts in ([0, 2, 2, 7], [0, 1, 4, 4]):
        lengths["cu_seqlens_q"] = np.array(starts, np.int32)
        caches = k_cache.copy(), v_cache.copy()
        out, lse = np.zeros((8, 4, 5), np.float32), np.full((4, 8), -np.inf, np.float32)
        libflash.decode(q, *caches, k=k, v=v, out=out, lse=lse, **lengths)
        for run in (step, jitted):
            got = run(*given, **{name: jnp.asarray(x) for name, x in lengths.items()})
            assert_same_bits(dict(enumerate(got)), dict(enumerate((out, lse, *caches))))


def test_packed_decode_under_vmap() -> None:
    q, k_cache, v_cache = arrays((2, 6, 4, 8), (3, 9, 2, 8), (3, 9, 2, 8))
    starts = jnp.array([0, 1, 1, 5], jnp.int32)

    def one(q):
        return libflash.jax.decode(q, k_cache, v_cache, cu_seqlens_q=starts)

    assert_same_bits(jax.vmap(one)(q), jnp.stack([one(x) for x in q]))


def test_packed_decode_refuses_other_ranks() -> None:
    q, k_cache, v_cache = arrays((6, 4, 8), (3, 9, 2, 8), (3, 9, 2, 8))
    with pytest.raises(libflash.InvalidError, match="q has 3 dimensions; it needs 4"):
        libflash.jax.decode(q, k_cache, v_cache)
    with pytest.raises(libflash.InvalidError, match="q has 4 dimensions; it needs 3"):
        libflash.jax.decode(q[None], k_cache, v_cache, cu_seqlens_q=jnp.array([0, 6]))
