"""libflash.torch: autograd on PyTorch's tensors, and decode."""

from __future__ import annotations

import torch

import libflash
import libflash.torch

from .. import needs
from ..case import Inputs
from ..convert import numpy_of, torch_of, torch_results, torch_tangents
from ..decode_cases import DecodeInputs
from ..reference_tangent import Tangents
from ..target import JVP, JVP_OF_GRADIENTS, Results, Target
from .own import DECODE_OPTIONS


class OwnTorch(Target):
    def __init__(self, detail: str | None, device: str) -> None:
        self.name, self.device = "libflash.torch", device
        self.versions = {"libflash": libflash.__version__, "torch": torch.__version__}
        self.offers = needs.ALL
        self.offers_decode = DECODE_OPTIONS
        self.offers_tangents = frozenset((JVP, JVP_OF_GRADIENTS))
        self.reads_contents = device == "cpu"
        self.mixes_tiles = device != "cpu"  # as libflash.h states

    def results(self, x: Inputs) -> Results:
        return torch_results(x, libflash.torch.attention, self.device)

    def repeatable(self, x: Inputs) -> Results:
        return torch_results(x, libflash.torch.attention, self.device, deterministic=True)

    def errors(self, x: Inputs) -> dict[str, float]:
        """On GPUs the backward kernels of the largest head_dims compute dS from the rounded P."""
        return {"p_roundings": 1} if self.device != "cpu" and max(x.q.shape[-1], x.v.shape[-1]) > 128 else {}

    def tangents(self, x: Inputs, t: Tangents) -> Results:
        return torch_tangents(x, t, libflash.torch.attention, self.device)

    def decoded(self, x: DecodeInputs) -> Results:
        options = {name: torch_of(value, self.device) for name, value in x.options.items()}
        q, k_cache, v_cache = (torch_of(value, self.device) for value in (x.q, x.k_cache, x.v_cache))
        o, lse = libflash.torch.decode(q, k_cache, v_cache, return_lse=True, **options)
        made = {"o": o, "lse": lse, "k_cache": k_cache, "v_cache": v_cache}
        return {name: numpy_of(value) for name, value in made.items()}
