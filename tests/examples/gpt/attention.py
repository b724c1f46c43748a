"""Causal attention of whole sequences, by libflash or by PyTorch; q, k, v and the result are (batch, seqlen, heads, head_dim)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import libflash.torch
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import libflash

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# Backends to which PyTorch can be restricted; None: its own choice.
BACKENDS = {"default": None, "flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION, "math": SDPBackend.MATH}
CHOSEN = {"Cudnn": "cuDNN", "FlashAttention": "FlashAttention-2", "EfficientAttention": "memory-efficient"}


def by_libflash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return libflash.torch.attention(q, k, v, causal=True)


def by_pytorch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Swap heads and rows without a copy."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def held_to(backend: str) -> contextlib.AbstractContextManager:
    """Restrict PyTorch's attention to that backend."""
    chosen = BACKENDS[backend]
    return contextlib.nullcontext() if chosen is None else sdpa_kernel(chosen)


def pytorch_choice(q: torch.Tensor) -> str:
    """The backend that PyTorch chooses for tensors like q with a gradient, from the name of the recorded backward function."""
    like = q.detach().clone().requires_grad_()
    recorded = by_pytorch(like, like, like).grad_fn.next_functions[0][0].name()
    return next((name for mark, name in CHOSEN.items() if mark in recorded), "plain operations")


def libflash_choice(q: torch.Tensor) -> str:
    """The kernels that run for tensors like q."""
    said = [libflash.explain(q, q, q, causal=True, op=op) for op in ("forward", "backward")]
    lines = [line for text in said for line in text.splitlines() if line.startswith("kernel")]
    return ", ".join(line.split()[1].rstrip(",") for line in lines)
