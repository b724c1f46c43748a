"""Calls of libflash from within a call of libflash, as those of a signal handler."""

from __future__ import annotations

from operator import index

import pytest

import libflash

torch = pytest.importorskip("torch")

import libflash.torch  # noqa: E402
from torch_problem import qkv  # noqa: E402


class CallsAgain:
    """A number whose conversion calls libflash."""

    def __init__(self, call) -> None:
        self.call, self.results = call, []

    def __index__(self) -> int:
        self.results.append(self.call())
        return 1

    def __float__(self) -> float:
        return float(index(self))


@pytest.mark.parametrize("option", ["window_size", "softmax_scale"])
@pytest.mark.parametrize("call", [libflash.attention, libflash.torch.attention])
@pytest.mark.parametrize("grad", [False, True])
def test_calls_during_a_call_record_gradients(call, grad: bool, option: str) -> None:
    """As those of a signal handler. Windows are converted before PyTorch runs a Function, the scale in its forward if the call
    records gradients. PyTorch itself records none there.
    """
    q, k, v = qkv()
    again = CallsAgain(lambda: libflash.attention(q, k, v))
    plain, nested = {"window_size": ((1, 1), (again, 1)), "softmax_scale": (1.0, again)}[option]
    wanted = call(q, k, v, **{option: plain})
    inputs = (q, k, v) if grad else [x.detach() for x in (q, k, v)]
    for _ in range(2):
        out = call(*inputs, **{option: nested})
        assert torch.equal(out, wanted)
        assert out.requires_grad == grad
    assert again.results
    in_forward = grad and option == "softmax_scale"
    assert all(x.requires_grad != in_forward for x in again.results)
    assert libflash.attention(q, k, v).requires_grad


def test_calls_during_a_call_follow_autocast() -> None:
    q, k, v = qkv(grad=False)

    def call() -> torch.dtype:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return libflash.attention(q, k, v).dtype

    again = CallsAgain(call)
    libflash.torch.attention(q, k, v, window_size=(again, 1))
    assert again.results
    assert set(again.results) == {torch.bfloat16}
