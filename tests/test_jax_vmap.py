"""libflash.jax under vmap: attention, its gradients, decode."""

from __future__ import annotations

import pytest
from harness import assert_same_bits, random

import libflash

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import libflash.jax  # noqa: E402
from jax_problem import arrays, assert_close, everything, loss_of  # noqa: E402


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


def test_decode_under_vmap() -> None:
    q, k_cache, v_cache, k, v = arrays((3, 2, 1, 4, 8), (3, 2, 9, 2, 8), (3, 2, 9, 2, 8), (3, 2, 1, 2, 8), (3, 2, 1, 2, 8))
    lengths = jnp.array([[3, 8], [0, 5], [7, 7]], jnp.int32)
    step = lambda q, kc, vc, k, v, n: libflash.jax.decode(q, kc, vc, k=k, v=v, cache_seqlens=n)  # noqa: E731
    got = jax.vmap(step)(q, k_cache, v_cache, k, v, lengths)
    for i in range(3):
        one = step(q[i], k_cache[i], v_cache[i], k[i], v[i], lengths[i])
        assert_same_bits(dict(enumerate(x[i] for x in got)), dict(enumerate(one)))
    shared = lambda q, n: libflash.jax.decode(q, k_cache[0], v_cache[0], shared_groups=jnp.arange(3), shared_lens=n)  # noqa: E731
    assert_same_bits(jax.vmap(shared)(q, lengths), jnp.stack([shared(*x) for x in zip(q, lengths, strict=True)]))
    table = jnp.array([[[1, 0]], [[0, 1]], [[1, 1]]], jnp.int32)
    paged = lambda q, table: libflash.jax.decode(q, k_cache[0], v_cache[0], block_table=table)  # noqa: E731
    got = jax.vmap(paged)(q[:, :1], table)
    assert_same_bits(got, jnp.stack([paged(*x) for x in zip(q[:, :1], table, strict=True)]))
