"""Tangents of long sequences: correct in some rows, in memory linear in the length."""

from __future__ import annotations

import pytest

import libflash

torch = pytest.importorskip("torch")
from gpu_memory import growth  # noqa: E402  (needs torch)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTH = 32768 if DEVICE == "cuda" else 700  # the most keys that the tangent kernels for float16 take
# No rows with a few keys but one: there the rounding of out can change dout . out by as much as the gradient.
ROWS = [0, LENGTH // 3, LENGTH // 2 + 5, LENGTH - 2, LENGTH - 1]
HEADS = 2


def rows_of_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """out of the rows ROWS of one head, in float64."""
    scores = q @ k.T * q.shape[-1] ** -0.5
    if causal:
        after = torch.arange(LENGTH, device=DEVICE) > torch.tensor(ROWS, device=DEVICE)[:, None]
        scores = scores.masked_fill(after, -torch.inf)
    return scores.softmax(-1) @ v


def assert_near(got: torch.Tensor, wanted: torch.Tensor, rounding: float) -> None:
    error = (got.double() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
    assert error < 8 * rounding, error.item()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # of torch.func.jvp itself
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_tangents(dtype: str, head_dim: int, causal: bool) -> None:
    """The matrix of scores of one head would need 2 GiB in 16 bits."""
    generator = torch.Generator(DEVICE).manual_seed(head_dim)
    made = (torch.randn(1, LENGTH, HEADS, head_dim, generator=generator, device=DEVICE) for _ in range(7))
    q, k, v, dout, *along = (x.to(getattr(torch, dtype)) for x in made)
    rounding = 2**-11 if dtype == "float16" else 2**-8
    out, lse, tout, tlse = libflash.attention_tangent(q, k, v, *along, causal=causal)
    tdq, _, _ = libflash.attention_backward_tangent(dout, q, k, v, out, lse, tout, tlse, *along, causal=causal)
    for head in range(HEADS):
        q_rows, tq_rows, dout_rows = (x[0, ROWS, head].double() for x in (q, along[0], dout))
        others = [x[0, :, head].double() for x in (k, v, along[1], along[2])]

        def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return rows_of_attention(q, k, v, causal)

        def gradient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor = dout_rows) -> torch.Tensor:
            return torch.func.vjp(lambda q: forward(q, k, v), q)[1](dout)[0]

        point, direction = (q_rows, *others[:2]), (tq_rows, *others[2:])
        for function, got in ((forward, tout), (gradient, tdq)):
            assert_near(got[0, ROWS, head], torch.func.jvp(function, point, direction)[1], rounding)
    if DEVICE == "cpu":
        return
    inputs = 8 * q.nbytes
    assert growth(lambda: libflash.attention_tangent(q, k, v, *along, causal=causal)) <= inputs
    more = growth(lambda: libflash.attention_backward_tangent(dout, q, k, v, out, lse, tout, tlse, *along, causal=causal))
    assert more <= 4 * inputs
