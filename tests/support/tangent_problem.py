"""Runs of forward_tangent and backward_tangent through the C interface."""

from __future__ import annotations

from collections.abc import Callable

import abi
import numpy as np
from case import Inputs
from harness import empty_like
from reference_tangent import Tangents


def c_options(x: Inputs) -> dict:
    """The fields of the C options for Python's keywords."""
    given = dict(x.options)
    flags = abi.CAUSAL if given.pop("causal", False) else 0
    if given.pop("causal_align", "bottom_right") == "top_left":
        flags |= abi.TOP_LEFT
    if "window_size" in given:
        flags |= abi.WINDOW
        given["window_left"], given["window_right"] = given.pop("window_size")
    if "softmax_scale" in given:
        flags |= abi.SCALE
    return {"flags": flags, **given}


def lse_like(x: Inputs) -> np.ndarray:
    shape = (x.q.shape[1], x.q.shape[0]) if x.q.ndim == 3 else (x.q.shape[0], x.q.shape[2], x.q.shape[1])
    return np.full(shape, np.nan, np.float64 if x.q.dtype == np.float64 else np.float32)


def out_like(x: Inputs) -> np.ndarray:
    return np.full((*x.q.shape[:-1], x.v.shape[-1]), np.nan, x.q.dtype)


def given(t: Tangents, *names: str) -> dict[str, np.ndarray]:
    return {name: a for name in names if (a := getattr(t, name)) is not None}


def run_forward(
    x: Inputs, t: Tangents, isa: str, *, primal: dict[str, np.ndarray] | None = None, delta: bool = False, **tiles: int
) -> dict[str, np.ndarray]:
    """o, lse, to, tlse (and tdelta and delta). `primal`: o and lse to start from (FROM_LSE)."""
    return forward_by(abi.forward_tangent, x, t, f"forward_tangent_cpu_{isa}", primal=primal, delta=delta, **tiles)


def forward_by(
    call: Callable[..., None],
    x: Inputs,
    t: Tangents,
    kernel: str | None,
    *,
    primal: dict[str, np.ndarray] | None = None,
    delta: bool = False,
    **tiles: int,
) -> dict[str, np.ndarray]:
    """The same by `call`, which has the arguments of abi.forward_tangent."""
    made = {"to": out_like(x), "tlse": lse_like(x)}
    o, lse = (out_like(x), lse_like(x)) if primal is None else (primal["o"], primal["lse"])
    fields = given(t, "q", "k", "v", "bias", "learnable_sink") | {"out": made["to"], "lse": made["tlse"]}
    options = c_options(x)
    if delta:
        made |= {"tdelta": lse_like(x), "delta": lse_like(x)}
        fields |= given(t, "dout", "dlse") | {"delta": made["tdelta"], "cotangent": x.dout}
        options |= {"delta": made["delta"]} | ({} if x.dlse is None else {"dlse": x.dlse})
    fields["flags"] = 0 if primal is None else abi.FROM_LSE
    named = {} if kernel is None else {"kernel": kernel.encode()}
    call(x.q, x.k, x.v, o, lse, fields, **named, **tiles, **options)
    return {"o": o, "lse": lse, **made}


def run_backward(
    x: Inputs, t: Tangents, isa: str, forward: dict[str, np.ndarray], *, gradients: bool = False, **tiles: int
) -> dict[str, np.ndarray]:
    """tdq, tdk, tdv, tdbias, tdsink, and with `gradients` dq, ... `forward`: as run_forward() returned it."""
    return backward_by(abi.backward_tangent, x, t, f"backward_tangent_cpu_{isa}", forward, gradients=gradients, **tiles)


def backward_by(
    call: Callable[..., None],
    x: Inputs,
    t: Tangents,
    kernel: str | None,
    forward: dict[str, np.ndarray],
    *,
    gradients: bool = False,
    **tiles: int,
) -> dict[str, np.ndarray]:
    """The same by `call`, which has the arguments of abi.backward_tangent."""
    made = {"tdq": empty_like(x.q), "tdk": empty_like(x.k), "tdv": empty_like(x.v)}
    fields = given(t, "q", "k", "v", "bias", "learnable_sink", "dout")
    fields |= {"dq": made["tdq"], "dk": made["tdk"], "dv": made["tdv"], "lse": forward["tlse"]}
    fields |= {"delta": forward["tdelta"]} if "tdelta" in forward else {"out": forward["to"], **given(t, "dlse")}
    options = c_options(x) | tiles
    if "delta" in forward and not gradients:
        options["delta"] = forward["delta"]
    elif x.dlse is not None:
        options["dlse"] = x.dlse
    primal: tuple = (None, None, None)
    if gradients:
        primal = made["dq"], made["dk"], made["dv"] = empty_like(x.q), empty_like(x.k), empty_like(x.v)
    for name, of in {"dbias": "bias", "dsink": "learnable_sink"}.items():
        if of not in x.options:
            continue
        made["t" + name] = fields[name] = empty_like(x.options[of])
        if gradients:
            made[name] = options[name] = empty_like(x.options[of])
    named = {} if kernel is None else {"kernel": kernel.encode()}
    call(x.dout, x.q, x.k, x.v, forward["o"], forward["lse"], primal, fields, **named, **options)
    return made
