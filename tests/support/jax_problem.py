"""Small problems as JAX arrays, and attention in jax.numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import libflash.jax
import numpy as np
from harness import random


def arrays(*shapes: tuple[int, ...]) -> list[jax.Array]:
    return [jnp.asarray(random(*shape, seed=i)) for i, shape in enumerate(shapes)]


def problem() -> list[jax.Array]:
    """q, k, v, bias, sink."""
    return arrays((2, 7, 4, 8), (2, 9, 2, 8), (2, 9, 2, 5), (1, 4, 7, 9), (4,))


def everything(q, k, v, bias, sink, **options):
    return libflash.jax.attention(q, k, v, bias=bias, learnable_sink=sink, causal=True, return_lse=True, **options)


def definition(q, k, v, bias, sink):
    """Attention in jax.numpy."""
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
