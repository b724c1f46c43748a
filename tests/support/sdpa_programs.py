"""Programs around scaled_dot_product_attention: transforms, nested tensors, layers and the compiler. Each returns its results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right

sdpa = torch.nn.functional.scaled_dot_product_attention
Kind = dict[str, Any]  # dtype and device


def leaves(kind: Kind, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, **kind).requires_grad_() for shape in shapes or [(2, 4, 24, 16)] * 3]


def with_gradients(out: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [out, *torch.autograd.grad(out.float().square().sum(), inputs)]


def autocast(kind: Kind) -> list[torch.Tensor]:
    x = leaves(kind | {"dtype": torch.float32})
    with torch.autocast(kind["device"], torch.bfloat16):
        return with_gradients(sdpa(*x, is_causal=True), x)


def vmap(kind: Kind) -> list[torch.Tensor]:
    x = leaves(kind, *[(3, 2, 4, 24, 16)] * 3)
    return with_gradients(torch.vmap(lambda *x: sdpa(*x, is_causal=True))(*x), x)


def vmap_of_keys(kind: Kind) -> list[torch.Tensor]:
    x = leaves(kind, (2, 4, 24, 16), (3, 2, 4, 24, 16), (3, 2, 4, 24, 16))
    return with_gradients(torch.vmap(sdpa, in_dims=(None, 0, 0))(*x), x)


def functional_gradient(kind: Kind) -> list[torch.Tensor]:
    x = [x.detach() for x in leaves(kind)]
    return list(torch.func.grad(lambda *x: sdpa(*x).float().square().sum(), (0, 1, 2))(*x))


def gradient_of_each(kind: Kind) -> list[torch.Tensor]:
    x = [x.detach() for x in leaves(kind, *[(3, 2, 4, 24, 16)] * 3)]
    return list(torch.vmap(torch.func.grad(lambda *x: sdpa(*x).float().square().sum(), (0, 1, 2)))(*x))


def nested(layout: torch.layout) -> Callable[[Kind], list[torch.Tensor]]:
    def program(kind: Kind) -> list[torch.Tensor]:
        parts = leaves(kind, (5, 4, 16), (1, 4, 16), (17, 4, 16))
        x = torch.nested.as_nested_tensor(parts, layout=layout).transpose(1, 2)
        x = x.contiguous() if layout == torch.strided else x  # the math path requires it
        out = sdpa(x, x, x)
        rows = torch.cat([part.transpose(0, 1) for part in out.unbind()])
        return with_gradients(rows, parts)

    return program


def checkpoint(kind: Kind) -> list[torch.Tensor]:
    x = leaves(kind)
    return with_gradients(torch.utils.checkpoint.checkpoint(sdpa, *x, use_reentrant=False), x)


def deterministic(kind: Kind) -> list[torch.Tensor]:
    x, before = leaves(kind), torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        return with_gradients(sdpa(*x, is_causal=True), x)
    finally:
        torch.use_deterministic_algorithms(before)


def inference(kind: Kind) -> list[torch.Tensor]:
    with torch.inference_mode():
        return [sdpa(*leaves(kind), is_causal=True).clone()]


def lower_right(kind: Kind) -> list[torch.Tensor]:
    x = leaves(kind, (2, 4, 9, 16), (2, 4, 24, 16), (2, 4, 24, 16))
    return with_gradients(sdpa(*x, attn_mask=causal_lower_right(9, 24)), x)


def layer(kind: Kind) -> list[torch.Tensor]:
    x = leaves(kind, (2, 24, 64))[0]
    model = torch.nn.TransformerEncoderLayer(64, 4, 64, dropout=0.0, batch_first=True).to(**kind)
    padding = torch.zeros(2, 24, dtype=torch.bool, device=kind["device"])
    padding[1, 20:] = True
    return with_gradients(model(x, src_key_padding_mask=padding), [x, *model.parameters()])


def no_gradient_arrives(kind: Kind) -> list[torch.Tensor]:
    """A gradient that autograd does not define, beside one that it does."""

    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grad: torch.Tensor) -> None:
            return None

    x = leaves(kind)
    gradients = torch.autograd.grad(Stop.apply(sdpa(*x)).sum() + x[0].sum(), x, allow_unused=True)
    return [g for g in gradients if g is not None]


PROGRAMS: dict[str, Callable[[Kind], list[torch.Tensor]]] = {
    "autocast": autocast,
    "vmap": vmap,
    "vmap of keys": vmap_of_keys,
    "func.grad": functional_gradient,
    "vmap of func.grad": gradient_of_each,
    "nested": nested(torch.strided),
    "nested, jagged": nested(torch.jagged),
    "checkpoint": checkpoint,
    "deterministic": deterministic,
    "inference": inference,
    "lower right": lower_right,
    "layer": layer,
    "no gradient arrives": no_gradient_arrives,
}


def several_calls(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Inputs and results in several memory orders, whose strides the compiler relies on."""
    transposed = [x.relu().transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    first = sdpa(q, k, v, is_causal=True)
    second = sdpa(*transposed, is_causal=True) * 2
    third = sdpa(q * 2, transposed[1], v, attn_mask=bias)
    fourth = sdpa(torch.stack([q, k, v], 3)[:, :, :, 1], k, transposed[2], scale=0.3)
    return (first.relu() - second.relu()).transpose(1, 2).flatten(2) + (third + fourth.sin()).transpose(1, 2).flatten(2)


def calls_without_a_mask(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The same for kernels that take no mask."""
    transposed = [x.relu().transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    result = sdpa(q, k, v, is_causal=True).relu() - sdpa(*transposed, is_causal=True) + sdpa(q * 2, transposed[1], v, scale=0.3)
    return result.transpose(1, 2).flatten(2)


def compiled(kind: Kind, function: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    x = leaves(kind)
    bias = torch.randn(24, 24, **kind)
    return with_gradients(function(*x, bias), x)
