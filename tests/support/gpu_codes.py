"""Arrays of 8-bit codes on a GPU, as torch's types; decode over caches of codes or with rope parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gpu_case import to_device, to_numpy
from libflash.conformance.cache_cases import CacheCase
from libflash.conformance.decode_cases import DecodeInputs
from libflash.conformance.reference_cache import CODES

import libflash

CACHES = ("k_cache", "v_cache", "k_scale", "v_scale", "k_rope_cache")
TORCH_CODES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}


def on_device(x: np.ndarray, device: str = "cuda") -> torch.Tensor:
    for name, dtype in CODES.items():
        if x.dtype == dtype:
            return torch.from_numpy(x.view(np.uint8)).to(device).view(TORCH_CODES[name])
    return to_device(x, device)


def on_host(x: torch.Tensor, like: np.ndarray) -> np.ndarray:
    return x.cpu().view(torch.uint8).numpy().view(like.dtype) if like.dtype.itemsize == 1 else to_numpy(x, like.dtype)


def some_codes(code: str, *shape: int, seed: int) -> torch.Tensor:
    """Codes of finite values up to 30."""
    x = np.random.default_rng(seed).standard_normal(shape) * (30 if code == "int8" else 2)
    return on_device(np.clip(x, -127, 127).astype(np.float32).astype(CODES[code]))


def run(x: DecodeInputs, device: str = "cuda", **more: Any) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of decode; caches and scales of `x` are those after the call."""
    arrays = {"k_cache": x.k_cache, "v_cache": x.v_cache, **x.options}
    given = {name: on_device(a, device) if isinstance(a, np.ndarray) else a for name, a in arrays.items()}
    out, lse = libflash.decode(to_device(x.q, device), **given, return_lse=True, **more)
    for name in CACHES:
        if isinstance(arrays.get(name), np.ndarray):
            arrays[name][...] = on_host(given[name], arrays[name])
    return to_numpy(out, x.q.dtype), lse.cpu().numpy()


def run_cache(case: CacheCase, kernel: str | None, device: str = "cuda", **more: Any) -> dict[str, Any]:
    """The arguments of `case.check`."""
    x = case.inputs()
    out, lse = run(x, device, kernel=kernel, **more)
    return {"after": x, "o": out, "lse": lse}


def refused(case: CacheCase) -> str:
    """What CUDA refuses of the case, by the text of the refusal; empty if it takes it."""
    shape, of_k = case.base, case.base.head_dim - case.rope_dim
    if case.codes and shape.dtype == "fp32":
        return "k_cache of 8 bits with float32 q"
    if case.scale == "groups" and case.group % 16:
        return "k_scale of groups of channels that are not multiples of 16"
    return "k_rope_cache beside a k_cache whose channels are not a multiple of 16" if case.rope_dim and of_k % 16 else ""
