"""libflash.jax: attention and its derivative as one compiled program, and decode."""

from __future__ import annotations

from typing import Any

import jax

import libflash
import libflash.jax

from .. import needs
from ..case import Inputs
from ..convert import jax_results, jax_tangents, numpy_of
from ..decode_cases import DecodeInputs
from ..reference_tangent import Tangents
from ..target import JVP, JVP_OF_GRADIENTS, Results, Target
from .jax_device import on_device
from .own import DECODE_OPTIONS


class OwnJax(Target):
    def __init__(self, detail: str | None, device: str) -> None:
        self.name, self.device = "libflash.jax", on_device(device)
        self.versions = {"libflash": libflash.__version__, "jax": jax.__version__}
        self.offers = needs.ALL - {"fp64"}  # JAX has it with jax_enable_x64 only
        self.offers_decode = DECODE_OPTIONS
        self.offers_tangents = frozenset((JVP, JVP_OF_GRADIENTS))
        self.reads_contents = device == "cpu"
        self.mixes_tiles = device != "cpu"  # as libflash.h states

    def results(self, x: Inputs) -> Results:
        with jax.default_device(self.device):
            return jax_results(x, libflash.jax.attention)

    def repeatable(self, x: Inputs) -> Results:
        with jax.default_device(self.device):
            return jax_results(x, libflash.jax.attention, deterministic=True)

    def tangents(self, x: Inputs, t: Tangents) -> Results:
        with jax.default_device(self.device):
            return jax_tangents(x, t, libflash.jax.attention)

    def decoded(self, x: DecodeInputs) -> Results:
        with jax.default_device(self.device):
            arrays = [jax.numpy.asarray(array) for array in (x.q, x.k_cache, x.v_cache)]
            made: Any = libflash.jax.decode(*arrays, return_lse=True, **x.options)
            names = ["o", "lse", *(["k_cache", "v_cache"] if "k" in x.options else [])]
            return dict(zip(names, map(numpy_of, made), strict=True))
