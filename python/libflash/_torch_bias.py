"""torch.nn.attention.bias.CausalBias: a tensor subclass whose memory is not used; it means a causal mask."""

from __future__ import annotations

import sys
from typing import Any, Literal

import torch

from ._errors import InvalidError, UnsupportedError

PLAIN = (type(None), torch.Tensor, torch.nn.Parameter)


def is_causal_bias(bias: Any) -> bool:
    """Whether the bias is a CausalBias, whose module the caller has then imported. Importing it here would more than double the
    time of `import libflash.torch`, because it imports the compiler of PyTorch."""
    if type(bias) in PLAIN:
        return False
    module = sys.modules.get("torch.nn.attention.bias")
    return module is not None and type(bias) is module.CausalBias


def causal_options(bias: Any, q: Any, k: Any, layout: str, others: dict[str, Any]) -> Literal["bottom_right", "top_left"]:
    """The causal_align with the same meaning as `bias`. `others`: options that `bias` cannot be combined with."""
    for name, value in others.items():
        if value is not None and value is not False:
            raise UnsupportedError(f"bias is a CausalBias, which cannot be combined with {name}; use causal= and causal_align=")
    axis = {"bshd": 1, "bhsd": 2, "sbhd": 0}.get(layout, 1)
    lengths = q.shape[axis], k.shape[axis]
    if (bias.seq_len_q, bias.seq_len_kv) != lengths:
        raise InvalidError(
            f"bias is a CausalBias for ({bias.seq_len_q}, {bias.seq_len_kv}) queries and keys; there are {lengths}"
        )
    return "top_left" if bias.variant.name == "UPPER_LEFT" else "bottom_right"
