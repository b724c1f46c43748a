"""For tests of libflash.torch.enable: a problem for scaled_dot_product_attention, and a record of the calls of libflash."""

from __future__ import annotations

from typing import Any

import libflash.torch
import pytest
import torch

from libflash import _torch_sdpa
from libflash import _torch_sdpa_operators as operators

sdpa = torch.nn.functional.scaled_dot_product_attention


def switch_off() -> None:
    """Also forgets which warnings were given."""
    libflash.torch.disable()
    _torch_sdpa._warned.clear()


def record_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The list to which each later call of the compiled module appends its name."""
    calls: list[str] = []

    def recorder(name: str, original: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            calls.append(name)
            return original(*args, **options)

        return call

    for name in ("attention", "attention_backward"):
        monkeypatch.setattr(operators._core, name, recorder(name, getattr(operators._core, name)))
    return calls


def problem(seqlen_q: int = 33, seqlen_k: int = 33, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 4, n, 16, dtype=dtype, requires_grad=True) for n in (seqlen_q, seqlen_k, seqlen_k)]


def out_and_gradients(function: Any, leaves: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    out = function(*leaves)
    return out, *torch.autograd.grad(out.float().square().sum(), leaves)
