"""libflash.attention_tangent, attention_backward and attention_backward_tangent while PyTorch records gradients or transforms:
they call the operators, which are differentiable (_torch_tangents.py)."""

from __future__ import annotations

from typing import Any

import torch

from . import _torch_ops as ops
from ._errors import UnsupportedError
from ._torch_options import given_options, known_options, real
from .torch import add_random_state, check_unused_random_state

Tensor = torch.Tensor
KNOWN = known_options("attention")


def operator_options(q: Tensor, options: dict[str, Any], others: dict[str, Tensor | None]) -> dict[str, Any]:
    """The options of a call of libflash, as arguments of the operators. `others`: tensors that attention does not have."""
    options = dict(options)
    dropout_p, seed, offset = (options.pop(name) for name in ("dropout_p", "seed", "offset"))
    numbers, tensors = given_options("attention", KNOWN, options)
    if dropout_p:
        numbers["dropout_p"] = real(dropout_p, "dropout_p")
        add_random_state(q, seed, offset, numbers, tensors)
    else:
        check_unused_random_state(dropout_p, seed, offset)
    slopes = tensors.get("alibi_slopes")
    if torch.is_grad_enabled() and slopes is not None and slopes.requires_grad:
        raise UnsupportedError("alibi_slopes requires a gradient, and there is none for it; pass alibi_slopes.detach()")
    return numbers | tensors | {name: x for name, x in others.items() if x is not None}


def refuse_written(function: str, written: dict[str, Any]) -> None:
    for name, x in written.items():
        if x is not None and x is not False:
            raise UnsupportedError(
                f"{function} cannot be given {name} where PyTorch records gradients or transforms: results are new tensors"
            )


def attention_tangent(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, lse: Tensor | None, along: dict[str, Tensor | None],
    written: dict[str, Any], options: dict[str, Any],
) -> tuple[Tensor, ...]:  # fmt: skip
    refuse_written("attention_tangent", written)
    given = operator_options(q, options, along)
    if out is None or lse is None:
        made: tuple[Tensor, ...] = ops.OPERATORS["attention_with_tangent"](q, k, v, **given)
        return made
    return out, lse, *ops.OPERATORS["attention_tangent"](q, k, v, out, lse, **given)


def attention_backward(
    inputs: tuple[Tensor, ...], dlse: Tensor | None, written: dict[str, Any], options: dict[str, Any]
) -> tuple[Tensor, ...]:
    refuse_written("attention_backward", written)
    made: tuple[Tensor, ...] = ops.OPERATORS["attention_backward"](
        *inputs, **operator_options(inputs[1], options, {"dlse": dlse})
    )
    return made[:3]


def attention_backward_tangent(
    inputs: tuple[Tensor, ...], along: dict[str, Tensor | None], written: dict[str, Any], options: dict[str, Any]
) -> tuple[Tensor, ...]:
    refuse_written("attention_backward_tangent", written)
    given = operator_options(inputs[1], options, along)
    made: tuple[Tensor, ...] = ops.OPERATORS["attention_backward_tangent"](*inputs, **given)
    return made[:3]
