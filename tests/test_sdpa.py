"""libflash.torch.enable: PyTorch's scaled_dot_product_attention on libflash."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import libflash

torch = pytest.importorskip("torch")

import libflash.torch  # noqa: E402
import torch.nn.attention as registry  # noqa: E402

from libflash import _torch_sdpa  # noqa: E402

sdpa = torch.nn.functional.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def leave_nothing_behind() -> Iterator[None]:
    yield
    libflash.torch.disable()
    _torch_sdpa._warned.clear()


def spy(name: str, original: Any, seen: list[str]) -> Any:
    def call(*args: Any, **options: Any) -> Any:
        seen.append(name)
        return original(*args, **options)

    return call


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What reaches the library."""
    seen: list[str] = []
    for name in ("attention", "attention_backward"):
        monkeypatch.setattr(_torch_sdpa._core, name, spy(name, getattr(_torch_sdpa._core, name), seen))
    return seen


def problem(seqlen_q: int = 33, seqlen_k: int = 33, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 4, n, 16, dtype=dtype, requires_grad=True) for n in (seqlen_q, seqlen_k, seqlen_k)]


def both(function: Any, leaves: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    out = function(*leaves)
    return out, *torch.autograd.grad(out.float().square().sum(), leaves)


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
    """Masks and the top-left alignment of is_causal included."""
    leaves, options = problem(*sizes), MASKS[name](*sizes)
    wanted = both(lambda *x: sdpa(*x, **options), leaves)
    assert calls == []
    with libflash.torch.enable():
        got = both(lambda *x: sdpa(*x, **options), leaves)
    assert calls == ["attention", "attention_backward"]
    torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_types(dtype: torch.dtype, calls: list[str]) -> None:
    leaves = problem(dtype=dtype)
    with libflash.torch.enable():
        got = both(lambda *x: sdpa(*x, is_causal=True), leaves)
    assert len(calls) == 2
    exact = [x.detach().double().requires_grad_() for x in leaves]
    wanted = both(lambda *x: sdpa(*x, is_causal=True), exact)
    tolerance = {torch.float64: 1e-10, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close([x.double() for x in got], list(wanted), rtol=tolerance, atol=tolerance)
    assert got[0].dtype == got[1].dtype == dtype


def test_a_row_without_keys_is_zero(calls: list[str]) -> None:
    mask = torch.ones(33, 33, dtype=torch.bool)
    mask[5] = False
    with libflash.torch.enable():
        out, *gradients = both(lambda *x: sdpa(*x, attn_mask=mask), problem())
    assert calls
    assert not out[:, :, 5].any()
    assert all(torch.isfinite(x).all() for x in gradients)


def test_whole_layers(calls: list[str]) -> None:
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
    """The shapes and strides that PyTorch's compiler counts on."""
    leaves = problem(20, 33)
    wanted = both(lambda *x: sdpa(*x, is_causal=True), leaves)
    torch._dynamo.reset()
    with libflash.torch.enable():
        got = both(
            torch.compile(lambda *x: sdpa(*x, is_causal=True).relu() * 1 - (-sdpa(*x, is_causal=True)).relu(), backend=backend),
            leaves,
        )
    assert len(calls) >= 2
    torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5)


def test_strided_inputs() -> None:
    leaves = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in problem()]
    turned = [x.detach().transpose(2, 3).contiguous().transpose(2, 3).requires_grad_() for x in problem()]
    wanted = both(sdpa, problem())
    with libflash.torch.enable():
        for x in (leaves, turned):
            torch.testing.assert_close(both(sdpa, x), wanted, rtol=2e-5, atol=2e-5)


# -- what the library has no kernel for


def test_falls_back_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise libflash.UnsupportedError("head_dim: no kernel here")

    leaves = problem()
    wanted = both(sdpa, leaves)
    monkeypatch.setattr(_torch_sdpa._core, "attention", refuse)
    monkeypatch.setattr(_torch_sdpa._core, "attention_backward", refuse)
    with libflash.torch.enable():
        with pytest.warns(UserWarning, match="stays with PyTorch's kernel: head_dim: no kernel here"):
            got = both(sdpa, leaves)
        torch.testing.assert_close(both(sdpa, leaves), got)  # without another warning: those are errors here
    torch.testing.assert_close(got, wanted)


# -- on and off


def test_is_registered_and_not_active() -> None:
    assert "libflash" in registry.list_flash_attention_impls()
    assert registry.current_flash_attention_impl() is None


def test_switches_nest(calls: list[str]) -> None:
    x = problem()
    outer = libflash.torch.enable()
    with libflash.torch.enable():
        sdpa(*x)
    sdpa(*x)
    assert len(calls) == 2
    assert registry.current_flash_attention_impl() == "libflash"
    outer.close()
    outer.close()
    sdpa(*x)
    assert len(calls) == 2
    assert registry.current_flash_attention_impl() is None


def test_disable_closes_all(calls: list[str]) -> None:
    libflash.torch.enable()
    libflash.torch.enable()
    libflash.torch.disable()
    sdpa(*problem())
    assert calls == []
    libflash.torch.enable()
    sdpa(*problem())
    assert calls == ["attention"]


def test_the_public_way_of_pytorch(calls: list[str]) -> None:
    registry.activate_flash_attention_impl("libflash")
    sdpa(*problem())
    registry.restore_flash_attention_impl()
    sdpa(*problem())
    assert calls == ["attention"]


def test_another_implementation_comes_back(calls: list[str]) -> None:
    class Other:
        removed = 0

        def remove(self) -> None:
            self.removed += 1

    other = Other()
    registry.register_flash_attention_impl("other", register_fn=lambda: other)
    registry.activate_flash_attention_impl("other")
    with libflash.torch.enable():
        assert other.removed == 1
    assert registry.current_flash_attention_impl() == "other"
    registry.restore_flash_attention_impl()
    del registry._registry._FLASH_ATTENTION_IMPLS["other"]


def test_without_sdpa(calls: list[str]) -> None:
    with libflash.torch.enable(sdpa=False):
        sdpa(*problem())
    assert calls == []


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises((TypeError, AttributeError)):
        libflash.torch.enable(object())
    assert registry.current_flash_attention_impl() is None


# -- the CUDA operators, called on the CPU: what they return and how they take it back


def on_cpu(name: str) -> Any:
    function = _torch_sdpa.OPERATORS[name][1]
    return torch.no_grad()(function)


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_cuda_operator_and_its_gradient(dropout_p: float) -> None:
    q, k, v = (x.detach() for x in problem(20, 33))
    torch.manual_seed(5)
    results = on_cpu("_scaled_dot_product_flash_attention")(q, k, v, dropout_p, True, False, scale=0.3)
    assert len(results) == len(torch.ops.aten._scaled_dot_product_flash_attention.default._schema.returns)
    out, lse, cu_q, cu_k, max_q, max_k, seed, offset, _ = results
    assert (max_q, max_k, lse.shape) == (20, 33, (2, 4, 20))
    dout = torch.randn_like(out)
    got = on_cpu("_scaled_dot_product_flash_attention_backward")(
        dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout_p, True, seed, offset, scale=0.3
    )
    options = {"causal": True, "softmax_scale": 0.3, "layout": "bhsd"}
    if dropout_p:
        options |= {"dropout_p": dropout_p, "seed": int(seed[0]), "offset": int(seed[1])}
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted = libflash.torch.attention(*leaves, **options)
    torch.testing.assert_close(out, wanted.detach())
    torch.testing.assert_close(got, torch.autograd.grad(wanted, leaves, dout))


def test_packed_cuda_operator_and_its_gradient() -> None:
    q, k, v = (x.detach()[0].transpose(0, 1).contiguous() for x in problem(20, 20))
    cu = torch.tensor([0, 7, 7, 20], dtype=torch.int32)
    results = on_cpu("_flash_attention_forward")(
        q, k, v, cu, cu, 13, 13, 0.25, True, False, window_size_left=5, window_size_right=0
    )
    assert len(results) == len(torch.ops.aten._flash_attention_forward.default._schema.returns)
    out, lse, state, unused, _ = results
    dout = torch.randn_like(out)
    got = on_cpu("_flash_attention_backward")(
        dout, q, k, v, out, lse, cu, cu, 13, 13, 0.25, True, state, unused, window_size_left=5, window_size_right=0
    )
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted = libflash.torch.attention(
        *leaves, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True, window_size=(5, 0), dropout_p=0.25, seed=state.to(torch.int64)
    )
    torch.testing.assert_close(out, wanted.detach())
    torch.testing.assert_close(got, torch.autograd.grad(wanted, leaves, dout))
    with pytest.raises(libflash.UnsupportedError, match="paged"):
        on_cpu("_flash_attention_forward")(q, k, v, cu, cu, 13, 13, 0.0, True, False, block_table=cu)
