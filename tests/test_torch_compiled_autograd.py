"""Compiled autograd: PyTorch compiles the backward pass of calls that were recorded without a compiler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import libflash.torch  # noqa: E402  (needs torch)
from torch._dynamo import compiled_autograd  # noqa: E402

# PyTorch's own, while it compiles.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")

ROWS, HEADS, HEAD_DIM = 9, 2, 16
# Calls of the same shapes, one after the other: a backward pass compiled for one must not serve another.
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "scale": {"softmax_scale": 0.7},
    "causal again": {"causal": True},
    "window": {"window_size": (3, 2)},
    "softcap": {"softcap": 2.0},
    "dropout": {"dropout_p": 0.5, "seed": 3},
    "another seed": {"dropout_p": 0.5, "seed": 4},
}


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def inputs(rows: int = ROWS) -> list[torch.Tensor]:
    return [torch.randn(1, rows, HEADS, HEAD_DIM, requires_grad=True) for _ in range(3)]


def gradients(tensors: list[torch.Tensor], out: torch.Tensor, dout: torch.Tensor, backend: str = "") -> list[torch.Tensor]:
    """backward() of `out`, compiled if there is a backend. torch.autograd.grad is not compiled."""
    for x in tensors:
        x.grad = None
    if backend:
        with compiled_autograd._enable(torch.compile(backend=backend)):
            out.backward(dout)
    else:
        out.backward(dout)
    return [x.grad.clone() for x in tensors]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_one_call_after_another(backend: str) -> None:
    torch.manual_seed(0)
    for rows in (ROWS, ROWS + 3):
        for name, options in CALLS.items():
            qkv = inputs(rows)
            dout = torch.randn(1, rows, HEADS, HEAD_DIM)
            got, wanted = (
                gradients(qkv, libflash.torch.attention(*qkv, **options), dout, compiler) for compiler in (backend, "")
            )
            for x, y in zip(got, wanted, strict=True):
                assert torch.equal(x, y), name


def test_gradients_of_options() -> None:
    torch.manual_seed(1)
    qkv = inputs()
    bias = torch.randn(1, HEADS, ROWS, ROWS, requires_grad=True)
    sink = torch.randn(HEADS, requires_grad=True)
    tensors = [*qkv, bias, sink]

    def loss() -> torch.Tensor:
        out, lse = libflash.torch.attention(*qkv, bias=bias, learnable_sink=sink, return_lse=True)
        return out.square().sum() + lse.sum()

    got, wanted = (gradients(tensors, loss(), torch.ones(()), backend) for backend in ("aot_eager", ""))
    for x, y in zip(got, wanted, strict=True):
        torch.testing.assert_close(x, y)


def test_merge() -> None:
    torch.manual_seed(2)
    qkv = inputs()

    def merged() -> torch.Tensor:
        q, k, v = qkv
        halves = [libflash.torch.attention(q, k[:, part], v[:, part], return_lse=True) for part in (slice(4), slice(4, None))]
        return libflash.torch.merge([out for out, _ in halves], [lse for _, lse in halves])[0]

    dout = torch.randn(1, ROWS, HEADS, HEAD_DIM)
    got, wanted = (gradients(qkv, merged(), dout, backend) for backend in ("aot_eager", ""))
    for x, y in zip(got, wanted, strict=True):
        torch.testing.assert_close(x, y)


def test_with_a_compiled_forward() -> None:
    """As training loops have it: the switch of torch._dynamo.config."""
    torch.manual_seed(3)
    qkv = inputs()
    dout = torch.randn(1, ROWS, HEADS, HEAD_DIM)
    wanted = gradients(qkv, libflash.torch.attention(*qkv, causal=True), dout)
    for x in qkv:
        x.grad = None

    def step(*given: torch.Tensor) -> None:
        libflash.torch.attention(*given, causal=True).backward(dout)

    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(step, backend="aot_eager")(*qkv)
    for x, y in zip(qkv, wanted, strict=True):
        assert torch.equal(x.grad, y)
