"""Options of wrong types are refused with PyTorch's gradients, autocast and modes as without them, also values that equal the
default.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import libflash

torch = pytest.importorskip("torch")

import libflash.torch  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

REFUSALS = (TypeError, ValueError, NotImplementedError)  # the errors of libflash are subclasses


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function: Callable[..., Any], _: Any, args: Any = (), options: Any = None) -> Any:
        return function(*args, **(options or {}))


def refusal(call: Callable[[], object]) -> tuple[type, str]:
    with pytest.raises(REFUSALS) as caught:
        call()
    return caught.type, str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": 0.0},
        {"causal": -0.0},
        {"return_lse": 0.0},
        {"num_splits": 0.0},
        {"num_splits": False},
        {"num_splits": True},
        {"max_seqlen_k": True},
        {"window_size": (True, 0)},
        {"dropout_p": 0.5, "seed": True},
        {"seed": False},
        {"offset": True},
        {"dropout_p": None},
        *({name: value} for name in ("softmax_scale", "softcap", "dropout_p") for value in (True, False, np.True_, np.False_)),
        {"dropout_p": 0.5, "seed": 0.0},
        {"seed": 0.0},
        {"seed": "x"},
        {"seed": -1},
        {"seed": 2**64},
        {"offset": 2**64},
        {"offset": 0.0},
        {"offset": None},
    ],
    ids=str,
)
def test_attention_with_gradients_refuses_the_same(options: dict[str, Any]) -> None:
    q = torch.ones(1, 3, 2, 4)
    wanted = refusal(lambda: libflash.attention(q, q, q, **options))
    assert refusal(lambda: libflash.torch.attention(q, q, q, **options)) == wanted
    q.requires_grad_()
    assert refusal(lambda: libflash.torch.attention(q, q, q, **options)) == wanted
    assert refusal(lambda: libflash.attention(q, q, q, **options)) == wanted
    with Mode():
        assert refusal(lambda: libflash.attention(q, q, q, **options)) == wanted


def test_a_tensor_of_a_bool_is_no_number() -> None:
    """It is refused, although Python's operator.index and float accept it."""
    q = torch.ones(1, 3, 2, 4)
    for tensor in (q, q.clone().requires_grad_()):
        with pytest.raises(TypeError, match=r"num_splits must be an integer, not (Tensor|bool)"):
            libflash.attention(tensor, q, q, num_splits=torch.tensor(True))
        for name in ("softmax_scale", "softcap", "dropout_p"):
            with pytest.raises(TypeError, match=f"{name} must be a number, not Tensor"):
                libflash.attention(tensor, q, q, **{name: torch.tensor(False)})


@pytest.mark.parametrize(
    "options", [{"softcap": True}, {"dropout_p": False}, {"dropout_p": True}, {"seed": 0.0}, {"seed": -1}], ids=str
)
def test_differentiable_gradients_refuse_the_same(options: dict[str, Any]) -> None:
    """attention_backward and attention_tangent by PyTorch's operators."""
    q = torch.ones(1, 3, 2, 4)
    out, lse = libflash.attention(q, q, q, return_lse=True)
    dout = q.clone().requires_grad_()
    assert refusal(lambda: libflash.attention_backward(dout, q, q, q, out, lse, **options)) == refusal(
        lambda: libflash.attention_backward(q, q, q, q, out, lse, **options)
    )
    assert refusal(lambda: libflash.attention_tangent(dout, q, q, q, q, q, **options)) == refusal(
        lambda: libflash.attention_tangent(q, q, q, q, q, q, **options)
    )


def test_bools_are_no_real_numbers_in_a_compiled_call() -> None:
    q = torch.ones(1, 3, 2, 4)
    for name in ("softmax_scale", "softcap", "dropout_p"):
        compiled = torch.compile(libflash.torch.attention, backend="eager")
        for value in (True, False):
            with pytest.raises(TypeError, match=f"{name} must be a number, not bool"):
                compiled(q, q, q, **{name: value})


@pytest.mark.parametrize("options", [{"row_step": 1.0}, {"head_begin": 0.0}, {"sm_margin": 0.0}, {"resume": 0.0}], ids=str)
def test_options_of_parts_are_refused_by_name(options: dict[str, Any]) -> None:
    q = torch.ones(1, 3, 2, 4, requires_grad=True)
    with pytest.raises(libflash.UnsupportedError, match=f"{next(iter(options))} cannot be given where PyTorch"):
        libflash.attention(q, q, q, **options)


def test_statistics_must_be_tensors() -> None:
    q = torch.ones(1, 3, 2, 4, requires_grad=True)
    with pytest.raises(TypeError, match=r"max_logit must be a torch\.Tensor, not str"):
        libflash.attention(q, q, q, max_logit="x")


@pytest.mark.parametrize(
    "options",
    [
        {"causal": 1.0},
        {"rotary_interleaved": 1.0},
        {"invariant": 0.0},
        {"num_splits": 0.0},
        {"split_size": 0.0},
        {"split_size": False},
        {"num_splits": True},
        {"shard": (2, False, 1)},
        {"softmax_scale": False},
        {"softcap": True},
        {"softcap": np.False_},
    ],
    ids=str,
)
def test_decode_under_autocast_refuses_the_same(options: dict[str, Any]) -> None:
    q, cache = torch.ones(1, 1, 2, 4), torch.ones(1, 8, 2, 4)
    wanted = refusal(lambda: libflash.decode(q, cache, cache, **options))
    with torch.autocast("cpu", torch.bfloat16):
        assert refusal(lambda: libflash.decode(q, cache, cache, **options)) == wanted


def test_decode_without_a_cache() -> None:
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match=r"k_cache must be a torch\.Tensor, not None"):
        libflash.decode(torch.ones(1, 1, 2, 4), None, None)


def test_none_for_a_tensor_that_every_call_has() -> None:
    x = torch.ones(1, 4, 2, 4)
    for name in ("q", "k", "v"):
        with pytest.raises(TypeError, match=rf"^{name} must be a torch\.Tensor, not None$"):
            libflash.torch.attention(**({"q": x, "k": x, "v": x} | {name: None}))
    with pytest.raises(TypeError, match=r"^k must be a torch\.Tensor, not None$"):
        libflash.torch.cache_write(None, x[0], x, x, torch.zeros(4, dtype=torch.int64), k_scale=2.0)


def test_texts_must_be_strings() -> None:
    q = torch.ones(1, 3, 2, 4, requires_grad=True)
    out, lse = libflash.attention(q.detach(), q.detach(), q.detach(), return_lse=True)
    with pytest.raises(libflash.InvalidError, match="layout is 0; it must be a string"):
        libflash.torch.attention(q, q, q, layout=0)
    with Mode():
        mode = refusal(lambda: libflash.merge([out], [lse], layout=0))
    assert mode == refusal(lambda: libflash.merge([out], [lse], layout=0))


def test_a_block_mask_of_numpy() -> None:
    """Beside tensors that require a gradient, as beside others."""
    q = torch.randn(1, 200, 2, 8, generator=torch.Generator().manual_seed(1))
    blocks = np.tril(np.ones((1, 1, 2, 2), bool))
    mask = libflash.compress_block_mask(blocks)
    wanted = libflash.attention(q, q, q, block_mask=mask)
    assert torch.equal(libflash.attention(q.requires_grad_(), q, q, block_mask=mask), wanted)
