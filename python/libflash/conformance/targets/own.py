"""libflash itself with NumPy arrays: attention, attention_backward and decode, by default or by chosen kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

import libflash
from libflash._option_list import options_of

from .. import needs
from ..case import Inputs
from ..decode_cases import DecodeInputs
from ..reference_tangent import Tangents
from ..target import JVP, JVP_OF_GRADIENTS, Results, Target

DECODE_OPTIONS = frozenset(option.name for option in options_of("decode"))


def empty_like(x: np.ndarray) -> np.ndarray:
    """An output of NaN, which shows unwritten elements."""
    return np.full(x.shape, np.nan, x.dtype)


def run_forward(x: Inputs, **options: Any) -> Results:
    o, lse = libflash.attention(x.q, x.k, x.v, return_lse=True, **x.options, **options)
    return {"o": o, "lse": lse}


def run_backward(x: Inputs, forward: Results, **options: Any) -> Results:
    """All gradients, written into outputs that contain NaN."""
    assert x.dout is not None
    made: dict[str, Any] = {"dq": empty_like(x.q), "dk": empty_like(x.k), "dv": empty_like(x.v)}
    for name, given in {"dbias": "bias", "dsink": "learnable_sink"}.items():
        if given in x.options:
            made[name] = empty_like(x.options[given])
    libflash.attention_backward(x.dout, x.q, x.k, x.v, forward["o"], forward["lse"], dlse=x.dlse, **made, **x.options, **options)
    return made


def run_tangents(x: Inputs, t: Tangents, forward: dict[str, Any], backward: dict[str, Any]) -> Results:
    """`forward` and `backward`: options of the two operations."""
    direction: dict[str, Any] = {"tq": t.q, "tk": t.k, "tv": t.v, "tbias": t.bias, "tsink": t.learnable_sink}
    out, lse, to, tlse = libflash.attention_tangent(x.q, x.k, x.v, **direction, **x.options, **forward)
    made = {"to": to, "tlse": tlse}
    if x.dout is None:
        return made
    sums = {"tdbias": "bias", "tdsink": "learnable_sink"}
    written: dict[str, Any] = {name: empty_like(x.options[of]) for name, of in sums.items() if of in x.options}
    direction |= {"tdout": t.dout, "tdlse": t.dlse, "dlse": x.dlse}
    gradients = libflash.attention_backward_tangent(
        x.dout, x.q, x.k, x.v, out, lse, to, tlse, **direction, **written, **x.options, **backward
    )
    return made | dict(zip(("tdq", "tdk", "tdv"), gradients, strict=True)) | written


class Own(Target):
    def __init__(self, isa: str | None = None, device: str = "cpu") -> None:
        """`isa`: run only the CPU kernels of this instruction set, whose names end with it."""
        if device != "cpu":
            raise ValueError(f"NumPy's arrays are on the CPU, not on {device}; libflash.torch runs on GPUs")
        self.name = "libflash" + (f":{isa}" if isa else "")
        self.versions = {"libflash": libflash.__version__, "numpy": np.__version__}
        self.offers = needs.ALL
        self.offers_decode = DECODE_OPTIONS
        self.offers_tangents = frozenset((JVP, JVP_OF_GRADIENTS))
        operations = ("forward", "backward", "decode", "forward_tangent", "backward_tangent")
        self.kernels: dict[str, dict[str, str]] = {name: {} for name in operations}
        if isa:
            self.kernels = {name: {"kernel": f"{name}_cpu_{isa}"} for name in self.kernels}

    def results(self, x: Inputs) -> Results:
        made = run_forward(x, **self.kernels["forward"])
        return made if x.dout is None else made | run_backward(x, made, **self.kernels["backward"])

    def tangents(self, x: Inputs, t: Tangents) -> Results:
        return run_tangents(x, t, self.kernels["forward_tangent"], self.kernels["backward_tangent"])

    def decoded(self, x: DecodeInputs) -> Results:
        options = x.options | self.kernels["decode"]
        o, lse = libflash.decode(x.q, x.k_cache, x.v_cache, return_lse=True, **options)
        return {"o": o, "lse": lse, "k_cache": x.k_cache, "v_cache": x.v_cache}
