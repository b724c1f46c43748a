"""Calls of libflash from within a call of libflash, as those of a signal handler."""

from __future__ import annotations

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


@pytest.mark.parametrize("call", [libflash.attention, libflash.torch.attention])
@pytest.mark.parametrize("grad", [False, True])
def test_calls_during_a_call_record_gradients(call, grad: bool) -> None:
    """As those of a signal handler, whether the outer call records gradients or not."""
    q, k, v = qkv()
    again = CallsAgain(lambda: libflash.attention(q, k, v))
    wanted = call(q, k, v, window_size=(1, 1))
    inputs = (q, k, v) if grad else [x.detach() for x in (q, k, v)]
    for _ in range(2):
        out = call(*inputs, window_size=(again, 1))
        assert torch.equal(out, wanted)
        assert out.requires_grad == grad
    assert again.results
    assert all(x.requires_grad for x in again.results)
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
