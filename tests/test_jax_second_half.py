"""Second derivatives of libflash.jax in 16 bits where keys have a mean, against float64: no rounded out or tout in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mean_keys import MeanKeys
from tolerance import WHOLE_LIMIT_GRADIENT

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import libflash.jax  # noqa: E402

from libflash import _jax_calls  # noqa: E402

TYPES = {"bf16": jnp.bfloat16, "fp16": jnp.float16}


def gradients(q: Any, k: Any, v: Any, dout: Any, **options: Any) -> Any:
    return jax.vjp(lambda *x: libflash.jax.attention(*x, **options), q, k, v)[1](dout)


def jvp_of_vjp(x: Any, t: Any, **options: Any) -> Any:
    return jax.jvp(lambda *x: gradients(*x, **options), tuple(x), tuple(t))[1][0]


def double_backward(x: Any, t: Any, **options: Any) -> Any:
    return jax.vjp(lambda *x: gradients(*x, **options), *x)[1](tuple(t[:3]))[0]


def compiled(x: Any, t: Any, **options: Any) -> Any:
    return jax.jit(lambda x, t: double_backward(x, t, **options))(x, t)


def mapped(x: Any, t: Any, **options: Any) -> Any:
    """One of two tangents that vmap maps over."""
    return jax.vmap(lambda *t: jvp_of_vjp(x, t, **options))(*(jnp.stack([y, -y]) for y in t))[0]


PATHS: dict[str, Callable[..., Any]] = {
    "jvp of vjp": jvp_of_vjp, "double backward": double_backward, "jit": compiled, "vmap": mapped,
}  # fmt: skip
MOVES_DOUT = ("jvp of vjp", "vmap")


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", PATHS)
def test_as_exact_as_its_roundings_allow(name: str, dtype: str) -> None:
    problem = MeanKeys.of(dtype)
    tdq = PATHS[name](*([jnp.asarray(y, TYPES[dtype]) for y in x] for x in (problem.inputs, problem.direction)))
    assert problem.ratio(np.asarray(tdq, np.float64), moves_dout=name in MOVES_DOUT) <= WHOLE_LIMIT_GRADIENT


LAYOUTS = {"bshd": (0, 1, 2, 3), "bhsd": (0, 2, 1, 3), "sbhd": (1, 0, 2, 3)}
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True, "window_size": (4, 0)},
    "bhsd": {"layout": "bhsd", "softcap": 2.0},
    "sbhd": {"layout": "sbhd", "dropout_p": 0.3, "seed": 5},
    "lengths": {"seqused_q": np.array([9, 0], np.int32), "seqused_k": np.array([5, 12], np.int32), "softmax_scale": -0.4},
    "packed": {"cu_seqlens_q": np.array([0, 3, 8], np.int32), "cu_seqlens_k": np.array([0, 4, 12], np.int32)},
    "scores": {"bias": np.linspace(-1, 1, 108, dtype=np.float32).reshape(9, 12), "mask": np.arange(12) % 5 != 0},
    "sink": {"learnable_sink": np.linspace(-1, 1, 4, dtype=np.float32), "mask": np.arange(9)[:, None] > np.full(12, 2)},
}


def small(name: str) -> list[list[np.ndarray]]:
    """Inputs and a direction; with rows that belong to no sequence, if packed."""
    rng = np.random.default_rng(3)

    def random(rows: int, heads: int, channels: int) -> np.ndarray:
        if name == "packed":
            return rng.standard_normal((rows, heads, channels)).astype(np.float16)
        x = rng.standard_normal((2, rows, heads, channels)).astype(np.float16)
        return np.ascontiguousarray(x.transpose(LAYOUTS[OPTIONS[name].get("layout", "bshd")]))

    shapes = (9, 4, 8), (12, 2, 8), (12, 2, 5), (9, 4, 5)
    return [[random(*shape) for shape in shapes] for _ in range(2)]


@pytest.fixture
def computed_anew(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The types of the calls that compute out again."""
    types: list[str] = []
    out_anew = _jax_calls.out_anew

    def record(call: Any, operands: Any, **more: Any) -> bool:
        anew = out_anew(call, operands, **more)
        types.extend([operands[1].dtype.name] if anew else [])
        return anew

    monkeypatch.setattr(_jax_calls, "out_anew", record)
    return types


@pytest.mark.parametrize("path", ["jvp of vjp", "double backward"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, path: str, computed_anew: list[str]) -> None:
    """As in float32, where out is not computed again, except for a few roundings."""
    given = small(name)
    tdq, exact = (
        np.asarray(PATHS[path](*([jnp.asarray(y, dtype) for y in x] for x in given), **OPTIONS[name]), np.float64)
        for dtype in (jnp.float16, jnp.float32)
    )
    assert set(computed_anew) == {"float16"}
    np.testing.assert_allclose(tdq, exact, rtol=0, atol=8 * 2.0**-11 * np.abs(exact).max())


def test_where_nothing_is_computed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on most GPUs."""
    monkeypatch.setattr(_jax_calls, "computes_out_anew", lambda *given: False)
    given = small("bhsd")
    for path in (jvp_of_vjp, double_backward):
        tdq, exact = (
            np.asarray(path(*([jnp.asarray(y, dtype) for y in x] for x in given), layout="bhsd"), np.float64)
            for dtype in (jnp.float16, jnp.float32)
        )
        np.testing.assert_allclose(tdq, exact, rtol=0, atol=8 * 2.0**-11 * np.abs(exact).max())


def test_grad_of_grad_keeps_the_tangents_of_cotangents(computed_anew: list[str]) -> None:
    """The results of WITH_TANGENTS, from the pass that computes out again."""
    x, t = small("causal")
    product = lambda *x: sum((g * u).sum() for g, u in zip(gradients(*x), t, strict=False))  # noqa: E731
    got, exact = (jax.grad(product, (0, 1, 2, 3))(*(jnp.asarray(y, dtype) for y in x)) for dtype in (jnp.float16, jnp.float32))
    for one, other in zip(got, exact, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=8 * 2.0**-11 * np.abs(other).max())
    assert set(computed_anew) == {"float16"}
