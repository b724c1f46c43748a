"""libflash.attention_tangent and attention_backward_tangent with NumPy arrays: identities, layouts, refusals."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from harness import assert_same_bits, random
from reference_tangent import Tangents, backward_tangent, forward_tangent

import libflash

SHAPES = {"q": (2, 20, 4, 16), "k": (2, 33, 2, 16), "v": (2, 33, 2, 24)}
OPTIONS = {"causal": True, "softcap": 3.0}


def assert_all_same(got: Any, wanted: Any) -> None:
    for one, other in zip(got, wanted, strict=True):
        assert_same_bits(one, other)


def arrays(seed: int) -> dict[str, np.ndarray]:
    return {name: random(*shape, seed=seed + i, dtype="float64") for i, (name, shape) in enumerate(SHAPES.items())}


X, T, U = arrays(0), arrays(10), arrays(20)
DOUT = random(2, 20, 4, 24, seed=30, dtype="float64")
DLSE = random(2, 4, 20, seed=31, dtype="float64")


def tangent(t: dict[str, np.ndarray], **more: Any) -> tuple[np.ndarray, ...]:
    return libflash.attention_tangent(*X.values(), *t.values(), **OPTIONS, **more)


def second(t: dict[str, np.ndarray], **more: Any) -> tuple[np.ndarray, ...]:
    """The Hessian of <DOUT, out> + <DLSE, lse> times t."""
    out, lse, tout, tlse = tangent(t)
    return libflash.attention_backward_tangent(DOUT, *X.values(), out, lse, tout, tlse, *t.values(), dlse=DLSE, **OPTIONS, **more)


def inner(a: Any, b: Any) -> float:
    return float(sum((x * y).sum() for x, y in zip(a, b, strict=True)))


def test_the_tangent_and_the_gradient_are_adjoint() -> None:
    out, lse, tout, tlse = tangent(T)
    gradients = libflash.attention_backward(DOUT, *X.values(), out, lse, dlse=DLSE, **OPTIONS)
    assert inner((DOUT, DLSE), (tout, tlse)) == pytest.approx(inner(gradients, T.values()), rel=1e-12)


def test_the_hessian_is_symmetric() -> None:
    assert inner(U.values(), second(T)) == pytest.approx(inner(T.values(), second(U)), rel=1e-11)


def test_the_gradients_come_with_the_tangents() -> None:
    made = {f"d{name}": np.full_like(x, np.nan) for name, x in X.items()}
    assert_all_same(list(second(T, **made)), list(second(T)))
    out, lse = libflash.attention(*X.values(), return_lse=True, **OPTIONS)
    assert_all_same(list(made.values()), list(libflash.attention_backward(DOUT, *X.values(), out, lse, dlse=DLSE, **OPTIONS)))


@pytest.mark.parametrize("factor", [2.0**-30, -1.0, 2.0**30])
def test_linear_in_the_direction(factor: float) -> None:
    """Bit for bit, because the factors are powers of two."""
    scaled = {name: x * factor for name, x in T.items()}
    assert_all_same(list(tangent(scaled)[2:]), [x * factor for x in tangent(T)[2:]])
    assert_all_same(list(second(scaled)), [x * factor for x in second(T)])


def test_equal_keys_do_not_move_the_output() -> None:
    """Constant tangents of k along the keys move every score of a row alike: out stays, lse moves by scale q.tk."""
    tk = np.broadcast_to(random(1, 1, 1, 16, dtype="float64"), X["k"].shape).copy()
    _, _, tout, tlse = libflash.attention_tangent(*X.values(), tk=tk)
    np.testing.assert_allclose(tout, 0, atol=1e-14)
    np.testing.assert_allclose(tlse, np.swapaxes((X["q"] * tk[0, 0, 0]).sum(-1), 1, 2) / 4, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("layout", "axes"), [("bhsd", (0, 2, 1, 3)), ("sbhd", (1, 0, 2, 3))])
def test_layouts(layout: str, axes: tuple[int, ...]) -> None:
    def moved(x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x.transpose(axes))

    given = [moved(x) for x in X.values()], [moved(x) for x in T.values()]
    out, lse, tout, tlse = libflash.attention_tangent(*given[0], *given[1], layout=layout, **OPTIONS)
    wanted = tangent(T)
    assert_all_same([out, lse, tout, tlse], [moved(wanted[0]), wanted[1], moved(wanted[2]), wanted[3]])
    made = libflash.attention_backward_tangent(
        moved(DOUT), *given[0], out, lse, tout, tlse, *given[1], dlse=DLSE, layout=layout, **OPTIONS
    )
    assert_all_same(list(made), [moved(x) for x in second(T)])


def test_from_a_saved_lse() -> None:
    out, lse, tout, tlse = tangent(T)
    out.flags.writeable = lse.flags.writeable = False
    again = tangent(T, out=out, lse=lse)
    assert again[0] is out
    assert again[1] is lse
    np.testing.assert_allclose(again[2], tout, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(again[3], tlse, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("from_lse", [False, True])
def test_tdelta_and_delta(layout: str, from_lse: bool) -> None:
    """They are what their definitions say, and take the place of tout and tdlse, and of dlse."""
    axes = (0, 1, 2, 3) if layout == "bshd" else (0, 2, 1, 3)
    x, t = ([np.ascontiguousarray(y.transpose(axes)) for y in given.values()] for given in (X, T))
    dout, tdout, tdlse = np.ascontiguousarray(DOUT.transpose(axes)), np.cos(DOUT).transpose(axes).copy(), np.sin(DLSE)
    options = OPTIONS | {"layout": layout}
    out, lse = libflash.attention(*x, return_lse=True, **options)
    tdelta, delta, delta_without_dlse = (np.full_like(lse, np.nan) for _ in range(3))
    given = {"out": out, "lse": lse} if from_lse else {}
    given |= {"dout": dout, "tdout": tdout, "tdlse": tdlse, "tdelta": tdelta}
    libflash.attention_tangent(*x, *t, **given, delta=delta_without_dlse, **options)
    *_, tout, tlse = libflash.attention_tangent(*x, *t, **given, delta=delta, dlse=DLSE, **options)

    def of_rows(products: np.ndarray) -> np.ndarray:
        return products.sum(-1).swapaxes(1, 2) if layout == "bshd" else products.sum(-1)

    np.testing.assert_allclose(tdelta, of_rows(tdout * out + dout * tout) - tdlse, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(delta, of_rows(dout * out) - DLSE, rtol=1e-12, atol=1e-12)
    assert_same_bits(delta, delta_without_dlse - DLSE)
    inputs = (dout, *x, out, lse)
    by_both = libflash.attention_backward_tangent(*inputs, None, tlse, *t, tdout=tdout, tdelta=tdelta, delta=delta, **options)
    by_tdelta = libflash.attention_backward_tangent(*inputs, None, tlse, *t, tdout=tdout, tdelta=tdelta, dlse=DLSE, **options)
    by_tout = libflash.attention_backward_tangent(*inputs, tout, tlse, *t, tdout=tdout, tdlse=tdlse, dlse=DLSE, **options)
    for made in (by_tdelta, by_both):
        for one, other in zip(made, by_tout, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-12)


def test_delta_is_read_instead_of_dlse_and_out() -> None:
    """A shift of delta is that of -dlse; dlse is then not looked at."""
    out, lse, tout, tlse = tangent(T)
    delta = np.swapaxes((DOUT * out).sum(-1), 1, 2) - DLSE
    inputs = (DOUT, *X.values(), out, lse, tout, tlse, *T.values())
    made = libflash.attention_backward_tangent(*inputs, delta=delta + 0.5, dlse=np.full_like(lse, np.nan), **OPTIONS)
    wanted = libflash.attention_backward_tangent(*inputs, dlse=DLSE - 0.5, **OPTIONS)
    for one, other in zip(made, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-12)


def test_delta_is_refused_with_gradients() -> None:
    made = {f"d{name}": np.zeros_like(x) for name, x in X.items()}
    with pytest.raises(libflash.InvalidError, match="delta: cannot be given together with dq, dk and dv in backward_tangent"):
        second(T, **made, delta=DLSE)
    assert not any(x.any() for x in made.values())


def test_values_with_bias_and_sink() -> None:
    bias, sink, tbias, tsink = (random(*s, seed=40 + i, dtype="float64") for i, s in enumerate(((20, 33), (4,)) * 2))
    extra = {"bias": bias, "learnable_sink": sink}
    t = Tangents(*T.values(), bias=tbias, learnable_sink=tsink, dout=-DOUT, dlse=2 * DLSE)
    out, lse, tout, tlse = tangent(T, tbias=tbias, tsink=tsink, **extra)
    exact = forward_tangent(*X.values(), t, **OPTIONS, **extra)
    for got, wanted in zip((out, lse, tout, tlse), exact, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-11, atol=1e-12)
    made = {"tdbias": np.empty_like(bias), "tdsink": np.empty_like(sink)}
    more = {"tbias": tbias, "tsink": tsink, "tdout": -DOUT, "tdlse": 2 * DLSE, "dlse": DLSE}
    found = libflash.attention_backward_tangent(
        DOUT, *X.values(), out, lse, tout, tlse, *T.values(), **more, **made, **OPTIONS, **extra
    )
    _, wanted = backward_tangent(DOUT, *X.values(), t, dlse=DLSE, **OPTIONS, **extra)
    for got, exact in zip((*found, *made.values()), (wanted.dq, wanted.dk, wanted.dv, wanted.dbias, wanted.dsink), strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kernel", [None, "backward_tangent_cpu_scalar"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_nan_reaches_the_tangent_of_dsink(dtype: type, kernel: str | None) -> None:
    """As it reaches dsink: only in the head that has the NaN."""
    x = [y.astype(dtype) for y in X.values()]
    x[0][1, 7, 2, 3] = np.nan
    sink = np.array([0.5, -np.inf, 1, -1], dtype)
    directions = {"tsink": np.ones_like(sink), "learnable_sink": sink}
    out, lse, tout, tlse = libflash.attention_tangent(*x, **directions)
    dsink, tdsink = np.zeros_like(sink), np.zeros_like(sink)
    dout = DOUT.astype(dtype)
    libflash.attention_backward(dout, *x, out, lse, learnable_sink=sink, dsink=dsink)
    libflash.attention_backward_tangent(dout, *x, out, lse, tout, tlse, **directions, tdsink=tdsink, kernel=kernel)
    assert np.isnan(dsink).tolist() == [False, False, True, False]
    assert np.isnan(tdsink).tolist() == [False, False, True, False]
    assert tdsink[1] == 0
    assert tdsink[0] != 0


def test_in_a_new_thread() -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(second(T)))
    thread.start()
    thread.join()
    assert_all_same(found, list(second(T)))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"tq": T["q"][:1]}, "tq: shape must be that of q"),
        ({"tv": T["v"].astype(np.float32)}, "tv: dtype must be float64"),
        ({"tbias": DLSE}, "tbias: needs bias"),
        ({"tsink": DLSE[0, :, 0]}, "tsink: needs learnable_sink"),
        ({"out": DOUT}, "out and lse must be given together"),
        ({"dout": DOUT}, "dout and tdelta must be given together"),
        ({"tdelta": DLSE.copy()}, "dout and tdelta must be given together"),
        ({"dout": DOUT[:1], "tdelta": DLSE.copy()}, "dout: shape must be"),
        ({"tdout": DOUT}, "tdout: needs delta"),
        ({"delta": DLSE.copy()}, "delta: needs tdelta in forward_tangent"),
        ({"dlse": DLSE}, "dlse needs delta"),
        ({"dout": DOUT, "tdelta": DLSE.copy(), "dlse": DLSE}, "dlse needs delta"),
        ({"dout": DOUT, "tdelta": DLSE.copy(), "delta": DLSE[:1].copy()}, "delta: shape must be (batch, heads_q, seqlen_q)"),
    ],
)
def test_refusals(change: dict[str, np.ndarray], text: str) -> None:
    with pytest.raises(libflash.InvalidError) as refused:
        libflash.attention_tangent(*X.values(), **{"tk": T["k"], **change})
    assert str(refused.value).startswith(text)


def test_unknown_options_are_refused() -> None:
    out, lse, tout, tlse = tangent(T)
    for name in ("casual", "return_lse", "stream"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            tangent(T, **{name: None})
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            libflash.attention_backward_tangent(DOUT, *X.values(), out, lse, tout, tlse, **{name: None})


@pytest.mark.parametrize(("name", "value"), [("row_begin", 2), ("column_begin", 0), ("head_begin", 1), ("resume", True)])
def test_parts_of_problems_are_refused(name: str, value: object) -> None:
    """An earlier version ignored them."""
    with pytest.raises(libflash.UnsupportedError, match=f"{name} cannot be given to attention_tangent"):
        libflash.attention_tangent(*X.values(), T["q"], **{name: value})
    libflash.attention_tangent(*X.values(), T["q"], row_begin=None, row_step=1, resume=False)
