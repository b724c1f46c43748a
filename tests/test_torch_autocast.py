"""libflash.torch under torch.autocast."""

from __future__ import annotations

import pytest

import libflash

torch = pytest.importorskip("torch")

import libflash.torch  # noqa: E402
from torch_problem import qkv, tensors  # noqa: E402


def test_autocast_runs_in_low_precision() -> None:
    q, k, v = qkv()
    (bias,) = tensors((1, 4, 7, 9))
    with torch.autocast("cpu", torch.bfloat16):
        out = libflash.torch.attention(q, k, v, bias=bias)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, libflash.torch.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), bias=bias))
    dq, dbias = torch.autograd.grad(out.float().sum(), (q, bias))
    assert dq.dtype == dbias.dtype == torch.float32


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("call", [libflash.attention, libflash.torch.attention])
def test_autocast_casts_with_and_without_a_gradient(call, grad: bool) -> None:
    q, k, v = qkv(grad=grad)
    slopes = torch.linspace(0.1, 1, 4)
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = call(q, k, v, alibi_slopes=slopes, return_lse=True)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(out, call(q.bfloat16(), k.bfloat16(), v.bfloat16(), alibi_slopes=slopes))
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        assert call(q, k, v).dtype == torch.float32


def test_autocast_leaves_calls_with_out_alone() -> None:
    q, k, v = qkv(grad=False)
    for call in (libflash.attention, libflash.torch.attention):
        with torch.autocast("cpu", torch.bfloat16):
            out = call(q, k, v, out=torch.empty(2, 7, 4, 5))
        assert torch.equal(out, call(q, k, v))


def test_autocast_leaves_float64_alone() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert libflash.torch.attention(*qkv(torch.float64)).dtype == torch.float64
