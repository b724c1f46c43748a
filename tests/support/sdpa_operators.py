"""The functions that replace PyTorch's attention operators for CUDA, called with CPU tensors."""

from __future__ import annotations

from typing import Any

import torch

from libflash import _torch_sdpa

FUNCTIONS = {pair[0].name: pair[0].function for pair in _torch_sdpa._operators()}
FUNCTIONS |= {pair[1].name: pair[1].function for pair in _torch_sdpa._operators()}
FLASH, CUDNN, EFFICIENT = (f"_scaled_dot_product_{name}_attention" for name in ("flash", "cudnn", "efficient"))


def on_cpu(name: str, *args: Any, **options: Any) -> Any:
    with torch.no_grad():
        return FUNCTIONS[name](*args, **options)


def on_meta(name: str, *args: Any, **options: Any) -> Any:
    """Shapes, strides and dtypes that PyTorch's compiler expects."""
    on_meta_device = [x.detach().to("meta") if isinstance(x, torch.Tensor) else x for x in args]
    return getattr(torch.ops.aten, name).default(*on_meta_device, **options)


def assert_same_layout(got: Any, meta: Any) -> None:
    for x, y in zip(got, meta, strict=True):
        if isinstance(y, torch.Tensor):
            assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
        else:
            assert x == y or (y is None and x is None)


def arranged(shape: tuple[int, ...], order: tuple[int, ...]) -> torch.Tensor:
    return torch.empty_permuted(shape, order).normal_()


def forward_and_backward(
    name: str, leaves: list[torch.Tensor], bias: torch.Tensor | None, dropout_p: float, *, causal: bool
) -> tuple[torch.Tensor, ...]:
    """out, the gradients of q, k and v (and bias), dout, and seed and offset of the dropout mask."""
    q, k, v = leaves
    torch.manual_seed(5)
    if name == FLASH:
        results = on_cpu(name, q, k, v, dropout_p, causal, False, scale=0.3)
    elif name == CUDNN:
        results = on_cpu(name, q, k, v, bias, True, dropout_p, causal, False, scale=0.3)
    else:
        results = on_cpu(name, q, k, v, bias, True, dropout_p, causal, scale=0.3)
    assert len(results) == len(getattr(torch.ops.aten, name).default._schema.returns)
    out, lse = results[:2]
    torch.manual_seed(6)
    dout = torch.randn_like(out)
    state = results[2:4] if name == EFFICIENT else results[6:8]
    sizes = (None, None, q.shape[2], k.shape[2])
    if name == FLASH:
        gradients = on_cpu(f"{name}_backward", dout, q, k, v, out, lse, *sizes, dropout_p, causal, *state, scale=0.3)
    elif name == CUDNN:
        gradients = on_cpu(f"{name}_backward", dout, q, k, v, out, lse, *state, bias, *sizes, dropout_p, causal, scale=0.3)
    else:
        wants = [True, True, True, bias is not None]
        gradients = on_cpu(f"{name}_backward", dout, q, k, v, bias, out, lse, *state, dropout_p, wants, causal, scale=0.3)
        assert torch.isposinf(lse[:, :, q.shape[2] :]).all()
    return out, gradients, dout, state
