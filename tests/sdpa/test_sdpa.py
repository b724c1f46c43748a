"""PyTorch's scaled_dot_product_attention on libflash, after libflash.torch.enable: results and gradients."""

from __future__ import annotations

from typing import Any

import pytest

import libflash

torch = pytest.importorskip("torch")

import libflash.torch  # noqa: E402
from sdpa_problem import out_and_gradients, problem, sdpa  # noqa: E402

from libflash import _torch_sdpa_operators as operators  # noqa: E402

MASKS = {
    "none": lambda q, k: {},
    "causal": lambda q, k: {"is_causal": True},
    "scale": lambda q, k: {"scale": 0.3},
    "bool": lambda q, k: {"attn_mask": torch.rand(q, k) < 0.7},
    "bool, all axes": lambda q, k: {"attn_mask": torch.rand(2, 4, q, k) < 0.7},
    "float": lambda q, k: {"attn_mask": torch.randn(2, 1, q, k)},
    "expanded": lambda q, k: {"attn_mask": (torch.rand(2, 1, 1, k) < 0.7).expand(2, 4, q, k)},
}


@pytest.mark.parametrize("sizes", [(33, 33), (20, 33), (33, 20)])
@pytest.mark.parametrize("name", MASKS)
def test_same_numbers_as_pytorch(name: str, sizes: tuple[int, int], calls: list[str]) -> None:
    """With every kind of mask; is_causal is top-left aligned."""
    leaves, options = problem(*sizes), MASKS[name](*sizes)
    wanted = out_and_gradients(lambda *x: sdpa(*x, **options), leaves)
    assert calls == []
    with libflash.torch.enable():
        got = out_and_gradients(lambda *x: sdpa(*x, **options), leaves)
    assert calls == ["attention", "attention_backward"]
    torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_types(dtype: torch.dtype, calls: list[str]) -> None:
    leaves = problem(dtype=dtype)
    with libflash.torch.enable():
        got = out_and_gradients(lambda *x: sdpa(*x, is_causal=True), leaves)
    assert len(calls) == 2
    exact = [x.detach().double().requires_grad_() for x in leaves]
    wanted = out_and_gradients(lambda *x: sdpa(*x, is_causal=True), exact)
    tolerance = {torch.float64: 1e-10, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close([x.double() for x in got], list(wanted), rtol=tolerance, atol=tolerance)
    assert got[0].dtype == got[1].dtype == dtype


def test_a_row_without_keys_is_zero(calls: list[str]) -> None:
    mask = torch.ones(33, 33, dtype=torch.bool)
    mask[5] = False
    with libflash.torch.enable():
        out, *gradients = out_and_gradients(lambda *x: sdpa(*x, attn_mask=mask), problem())
    assert calls
    assert not out[:, :, 5].any()
    assert all(torch.isfinite(x).all() for x in gradients)


def test_transformer_layer(calls: list[str]) -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    x = torch.randn(2, 9, 32)
    wanted = layer(x)
    with libflash.torch.enable():
        got = layer(x)
    assert "attention" in calls
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_models(backend: str, calls: list[str]) -> None:
    """Shapes and strides are those that PyTorch's compiler expects."""
    leaves = problem(20, 33)
    wanted = out_and_gradients(lambda *x: sdpa(*x, is_causal=True), leaves)
    torch._dynamo.reset()
    with libflash.torch.enable():
        got = out_and_gradients(
            torch.compile(lambda *x: sdpa(*x, is_causal=True).relu() * 1 - (-sdpa(*x, is_causal=True)).relu(), backend=backend),
            leaves,
        )
    assert len(calls) >= 2
    torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5)


def test_subclasses_of_tensor(calls: list[str]) -> None:
    """A subclass acts before the operators that libflash replaces."""

    class Traced(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return super().__torch_function__(function, types, args, kwargs or {})

    leaves = problem()
    mask = torch.randn(33, 33)
    wanted = out_and_gradients(lambda *x: sdpa(*x, attn_mask=mask), leaves)
    with libflash.torch.enable():
        traced = mask.as_subclass(Traced)
        got = out_and_gradients(lambda *x: sdpa(*(y.as_subclass(Traced) for y in x), attn_mask=traced), leaves)
    assert calls == ["attention", "attention_backward"]
    assert isinstance(got[0], Traced)
    torch.testing.assert_close([x.as_subclass(torch.Tensor) for x in got], list(wanted), rtol=2e-5, atol=2e-5)


def test_strided_inputs() -> None:
    leaves = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in problem()]
    transposed = [x.detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_() for x in problem()]
    wanted = out_and_gradients(sdpa, problem())
    with libflash.torch.enable():
        for x in (leaves, transposed):
            torch.testing.assert_close(out_and_gradients(sdpa, x), wanted, rtol=2e-5, atol=2e-5)


def test_falls_back_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise libflash.UnsupportedError("head_dim: no kernel here")

    leaves = problem()
    wanted = out_and_gradients(sdpa, leaves)
    monkeypatch.setattr(operators._core, "attention", refuse)
    monkeypatch.setattr(operators._core, "attention_backward", refuse)
    with libflash.torch.enable():
        with pytest.warns(UserWarning, match="stays with PyTorch's kernel: head_dim: no kernel here"):
            got = out_and_gradients(sdpa, leaves)
        torch.testing.assert_close(out_and_gradients(sdpa, leaves), got)  # without another warning: those are errors here
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("masked", [False, True])
def test_backward_after_the_switch_is_closed(masked: bool, calls: list[str]) -> None:
    """Also if a row sees no key: its lse is that of PyTorch's kernel, 0."""
    leaves = problem()
    mask = torch.ones(33, 33, dtype=torch.bool).index_fill(0, torch.tensor([5]), False) if masked else None
    wanted = out_and_gradients(lambda *x: sdpa(*x, attn_mask=mask), leaves)
    with libflash.torch.enable():
        out = sdpa(*leaves, attn_mask=mask)
    gradients = torch.autograd.grad(out.square().sum(), leaves)
    assert calls == ["attention"]
    torch.testing.assert_close((out, *gradients), wanted, rtol=2e-5, atol=2e-5)
