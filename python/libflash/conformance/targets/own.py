"""libflash itself with NumPy arrays: attention, attention_backward and decode, by default or by chosen kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

import libflash

from .. import needs
from ..case import Inputs
from ..decode_cases import DecodeInputs
from ..target import Results, Target

DECODE_OPTIONS = frozenset(
    ("cache_seqlens", "block_table", "cache_batch_idx", "cache_leftpad", "k", "v", "rotary_cos", "rotary_sin",
     "rotary_interleaved", "causal", "window_size", "softmax_scale", "softcap", "alibi_slopes", "learnable_sink",
     "cu_seqlens_q", "cu_seqlens_new", "q_positions", "tree_mask", "cu_seqlens_tree")
)  # fmt: skip


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


class Own(Target):
    def __init__(self, isa: str | None = None, device: str = "cpu") -> None:
        """`isa`: the CPU kernels of one instruction set, the end of their names."""
        if device != "cpu":
            raise ValueError(f"NumPy's arrays are on the CPU, not on {device}; libflash.torch runs on GPUs")
        self.name = "libflash" + (f":{isa}" if isa else "")
        self.versions = {"libflash": libflash.__version__, "numpy": np.__version__}
        self.offers = needs.ALL
        self.offers_decode = DECODE_OPTIONS
        self.kernels: dict[str, dict[str, str]] = {name: {} for name in ("forward", "backward", "decode")}
        if isa:
            self.kernels = {name: {"kernel": f"{name}_cpu_{isa}"} for name in self.kernels}

    def results(self, x: Inputs) -> Results:
        made = run_forward(x, **self.kernels["forward"])
        return made if x.dout is None else made | run_backward(x, made, **self.kernels["backward"])

    def decoded(self, x: DecodeInputs) -> Results:
        options = x.options | self.kernels["decode"]
        o, lse = libflash.decode(x.q, x.k_cache, x.v_cache, return_lse=True, **options)
        return {"o": o, "lse": lse, "k_cache": x.k_cache, "v_cache": x.v_cache}
