"""The functions of the flash-attn package, and of libflash.flash_attn, which has the same functions."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from ..case import Inputs
from ..convert import numpy_of, torch_of, torch_results
from ..decode_cases import DecodeInputs
from ..target import NotOffered, Results, Target

# Its causal rule and window end at the bottom right. Dropout draws masks of its own; lse has no gradient.
OFFERS = frozenset(
    ("fp16", "bf16", "causal", "causal bottom_right", "window_size", "window_size bottom_right", "softmax_scale", "softcap",
     "alibi_slopes", "cu_seqlens_q", "cu_seqlens_k", "grouped heads", "gradients")
)  # fmt: skip
OFFERS_DECODE = frozenset(
    ("cache_seqlens", "block_table", "cache_batch_idx", "cache_leftpad", "k", "v", "rotary_cos", "rotary_sin",
     "rotary_interleaved", "causal", "window_size", "softmax_scale", "softcap", "alibi_slopes")
)  # fmt: skip
REFUSALS = ("only support", "not support")  # words of its refusals of what it does not have


class FlashAttn(Target):
    package = "flash_attn"
    offers = OFFERS
    offers_decode = OFFERS_DECODE

    def __init__(self, detail: str | None, device: str) -> None:
        self.module = importlib.import_module(self.package)
        self.name, self.device = self.package, device
        top = importlib.import_module(self.package.partition(".")[0])
        self.versions = {top.__name__: top.__version__, "torch": torch.__version__}
        self.reads_contents = device == "cpu"
        self.mixes_tiles = device != "cpu" and self.package == "libflash.flash_attn"  # as libflash.h states

    def results(self, x: Inputs) -> Results:
        return self.with_options(x)

    def repeatable(self, x: Inputs) -> Results:
        return self.with_options(x, deterministic=True)

    def with_options(self, x: Inputs, **more: Any) -> Results:
        try:
            return torch_results(x, self.attention, self.device, **more)
        except RuntimeError as error:
            if any(text in str(error) for text in REFUSALS):
                raise NotOffered(str(error)) from error
            raise

    def attention(self, q: Any, k: Any, v: Any, *, return_lse: bool, seed: int = 0, **options: Any) -> Any:
        """With the arguments of libflash.torch.attention."""
        options.pop("causal_align", None)  # see needs.same_lengths
        o, lse = self.called(q, k, v, return_attn_probs=return_lse, **options)[:2]
        return o, without_keys(lse)

    def called(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        if "cu_seqlens_q" in options:
            bounds = [options.pop("cu_seqlens_q"), options.pop("cu_seqlens_k")]
            longest = [int((cu[1:] - cu[:-1]).max()) if len(cu) > 1 else 0 for cu in bounds]
            return self.module.flash_attn_varlen_func(q, k, v, *bounds, *longest, **options)
        return self.module.flash_attn_func(q, k, v, **options)

    def decoded(self, x: DecodeInputs) -> Results:
        options = {"causal": True} | {name: torch_of(value, self.device) for name, value in x.options.items()}
        q, k_cache, v_cache = (torch_of(value, self.device) for value in (x.q, x.k_cache, x.v_cache))
        o, lse = self.module.flash_attn_with_kvcache(q, k_cache, v_cache, return_softmax_lse=True, **options)
        made = {"o": o, "lse": without_keys(lse), "k_cache": k_cache, "v_cache": v_cache}
        return {name: numpy_of(value) for name, value in made.items()}


def without_keys(lse: Any) -> Any:
    """The package has +inf where no key is visible."""
    return torch.where(lse == torch.inf, -torch.inf, lse)


class DropIn(FlashAttn):
    """libflash.flash_attn, which has more types and shapes."""

    package = "libflash.flash_attn"
    offers = OFFERS | {"fp32", "fp64", "two head_dims", "empty tensors", "learnable_sink", "dlse"}
