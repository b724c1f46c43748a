"""libflash.torch.enable: PyTorch's scaled_dot_product_attention on libflash."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest

import libflash

torch = pytest.importorskip("torch")

import libflash.torch  # noqa: E402
import torch.nn.attention as registry  # noqa: E402

from libflash import _torch_sdpa, _torch_sdpa_random  # noqa: E402
from libflash import _torch_sdpa_operators as operators  # noqa: E402

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
        monkeypatch.setattr(operators._core, name, spy(name, getattr(operators._core, name), seen))
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


def test_subclasses_of_tensor(calls: list[str]) -> None:
    """What a subclass does, it has done above these operators."""

    class Traced(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return super().__torch_function__(function, types, args, kwargs or {})

    leaves = problem()
    mask = torch.randn(33, 33)
    wanted = both(lambda *x: sdpa(*x, attn_mask=mask), leaves)
    with libflash.torch.enable():
        traced = mask.as_subclass(Traced)
        got = both(lambda *x: sdpa(*(y.as_subclass(Traced) for y in x), attn_mask=traced), leaves)
    assert calls == ["attention", "attention_backward"]
    assert isinstance(got[0], Traced)
    torch.testing.assert_close([x.as_subclass(torch.Tensor) for x in got], list(wanted), rtol=2e-5, atol=2e-5)


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
    monkeypatch.setattr(operators._core, "attention", refuse)
    monkeypatch.setattr(operators._core, "attention_backward", refuse)
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


def test_inside_an_activation_of_the_registry(calls: list[str]) -> None:
    """A switch ends what it began, and nothing else."""
    registry.activate_flash_attention_impl("libflash")
    try:
        with libflash.torch.enable(), libflash.torch.enable():
            sdpa(*problem())
        assert registry.current_flash_attention_impl() == "libflash"
        sdpa(*problem())
        assert len(calls) == 2
    finally:
        registry.restore_flash_attention_impl()


def test_restored_by_hand_while_a_switch_is_open(calls: list[str]) -> None:
    with libflash.torch.enable():
        registry.restore_flash_attention_impl()
        sdpa(*problem())
        assert calls == []
        with libflash.torch.enable():
            sdpa(*problem())
            assert calls == ["attention"]
    assert registry.current_flash_attention_impl() is None


# -- what was left to PyTorch


def test_left_tells_what_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise libflash.UnsupportedError("head_dim: no kernel here")

    monkeypatch.setattr(operators._core, "attention", refuse)
    x = problem()
    outer = libflash.torch.enable()
    with pytest.warns(UserWarning, match="stays with PyTorch's kernel"):
        sdpa(*x)
    with libflash.torch.enable() as inner:
        sdpa(*x)
        name = "_scaled_dot_product_flash_attention_for_cpu"
        assert inner.left()[name] == {"head_dim: no kernel here": 1}
        assert outer.left()[name] == {"head_dim: no kernel here": 2}
    assert "inside scaled_dot_product_attention" in str(outer.left()["_scaled_dot_product_attention_math"])
    outer.close()


def test_nothing_is_left_of_calls_that_are_served() -> None:
    with libflash.torch.enable() as switch:
        both(sdpa, problem())
        assert not any(calls for reasons in switch.left().values() for calls in reasons.values())


def new_argument(query: Any, key: Any, value: Any, dropout_p: float = 0.0) -> None: ...


def lost_argument(
    query: Any, key: Any, value: Any, novel: Any, dropout_p: float = 0.0, is_causal: bool = False, *,
    attn_mask: Any = None, scale: Any = None,
) -> None: ...  # fmt: skip


def other_order(
    key: Any, query: Any, value: Any, dropout_p: float = 0.0, is_causal: bool = False, *, attn_mask: Any = None, scale: Any = None
) -> None: ...


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (new_argument, "its positional argument is_causal is not known to libflash"),
        (lost_argument, "it has no positional argument novel"),
        (other_order, "its arguments come in the order query, key, value"),
    ],
)
def test_an_operator_with_another_schema_is_left(
    function: Any, reason: str, monkeypatch: pytest.MonkeyPatch, calls: list[str]
) -> None:
    """With its backward operator."""
    name, key, _, backward = operators.PAIRS[0]
    monkeypatch.setattr(_torch_sdpa, "PAIRS", [(name, key, function, backward)])
    with libflash.torch.enable() as switch:
        both(sdpa, problem())
        assert reason in next(iter(switch.left()[name]))
    assert calls == []


def test_every_schema_of_this_pytorch_is_understood() -> None:
    for pair in _torch_sdpa._operators():
        assert [operator.refusal() for operator in pair] == [None, None]


# -- the CUDA operators, called on the CPU: what they return and how they take it back

FUNCTIONS = {pair[0].name: pair[0].function for pair in _torch_sdpa._operators()}
FUNCTIONS |= {pair[1].name: pair[1].function for pair in _torch_sdpa._operators()}
FLASH, CUDNN, EFFICIENT = (f"_scaled_dot_product_{name}_attention" for name in ("flash", "cudnn", "efficient"))


def on_cpu(name: str, *args: Any, **options: Any) -> Any:
    with torch.no_grad():
        return FUNCTIONS[name](*args, **options)


def on_meta(name: str, *args: Any, **options: Any) -> Any:
    """What PyTorch's compiler counts on."""
    turned = [x.detach().to("meta") if isinstance(x, torch.Tensor) else x for x in args]
    return getattr(torch.ops.aten, name).default(*turned, **options)


def assert_same_layout(got: Any, meta: Any) -> None:
    for x, y in zip(got, meta, strict=True):
        if isinstance(y, torch.Tensor):
            assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
        else:
            assert x == y or (y is None and x is None)


def arranged(shape: tuple[int, ...], order: tuple[int, ...]) -> torch.Tensor:
    return torch.empty_permuted(shape, order).normal_()


ORDERS = [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (0, 1, 3, 2)]


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("head_dim_v", [16, 24])
@pytest.mark.parametrize("name", [FLASH, CUDNN, EFFICIENT])
def test_results_are_laid_out_as_the_compiler_expects(name: str, head_dim_v: int, order: tuple[int, ...]) -> None:
    if name == FLASH and head_dim_v != 16:
        return
    q, k, v = (arranged(shape, order) for shape in ((2, 4, 20, 16), (2, 4, 33, 16), (2, 4, 33, head_dim_v)))
    bias = None if name == FLASH else torch.randn(2, 4, 20, 33)
    forward = () if name == FLASH else (bias, True)
    got, meta = on_cpu(name, q, k, v, *forward), on_meta(name, q, k, v, *forward)
    assert_same_layout(got, meta)
    out, lse = got[:2]
    backward = {
        FLASH: (out, lse, None, None, 20, 33, 0.0, False, *got[6:8]),
        CUDNN: (out, lse, *got[6:8], bias, None, None, 20, 33, 0.0, False),
        EFFICIENT: (bias, out, lse, *got[2:4], 0.0, [True] * 4),
    }[name]
    assert_same_layout(
        on_cpu(f"{name}_backward", torch.ones_like(out), q, k, v, *backward),
        on_meta(f"{name}_backward", torch.ones_like(out), q, k, v, *backward),
    )


def test_packed_results_are_laid_out_as_the_compiler_expects() -> None:
    q, k, v = (arranged((40, 4, 16), order) for order in ((0, 1, 2), (1, 0, 2), (0, 2, 1)))
    cu = torch.tensor([0, 13, 33], dtype=torch.int32)
    options = (cu, cu, 20, 20, 0.0, True)
    got = on_cpu("_flash_attention_forward", q, k, v, *options, False)
    assert_same_layout(got, on_meta("_flash_attention_forward", q, k, v, *options, False))
    out, lse, *state, _ = got
    gradients = on_cpu("_flash_attention_backward", out, q, k, v, out, lse, *options, *state)
    assert_same_layout(gradients, on_meta("_flash_attention_backward", out, q, k, v, out, lse, *options, *state))
    assert not any(x[33:].any() for x in (out, *gradients))  # rows of no sequence


def forward_and_backward(
    name: str, leaves: list[torch.Tensor], bias: torch.Tensor | None, dropout_p: float, *, causal: bool
) -> tuple[torch.Tensor, ...]:
    """out, its gradients for a dout, and seed and offset of the mask."""
    q, k, v = leaves
    torch.manual_seed(5)
    if name == FLASH:
        results = on_cpu(name, q, k, v, dropout_p, causal, False, scale=0.3)
    elif name == CUDNN:
        results = on_cpu(name, q, k, v, bias, True, dropout_p, causal, False, scale=0.3)
    else:
        results = on_cpu(name, q, k, v, bias, True, dropout_p, causal, scale=0.3)
    assert len(results) == len(getattr(torch.ops.aten, name).default._schema.returns)
    out, lse = results[:2]
    torch.manual_seed(6)
    dout = torch.randn_like(out)
    state = results[2:4] if name == EFFICIENT else results[6:8]
    sizes = (None, None, q.shape[2], k.shape[2])
    if name == FLASH:
        gradients = on_cpu(f"{name}_backward", dout, q, k, v, out, lse, *sizes, dropout_p, causal, *state, scale=0.3)
    elif name == CUDNN:
        gradients = on_cpu(f"{name}_backward", dout, q, k, v, out, lse, *state, bias, *sizes, dropout_p, causal, scale=0.3)
    else:
        wants = [True, True, True, bias is not None]
        gradients = on_cpu(f"{name}_backward", dout, q, k, v, bias, out, lse, *state, dropout_p, wants, causal, scale=0.3)
        assert torch.isposinf(lse[:, :, q.shape[2] :]).all()
    return out, gradients, dout, state


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("bias_shape", [None, (20, 33), (4, 20, 33), (2, 4, 20, 33)])
@pytest.mark.parametrize("name", [FLASH, CUDNN, EFFICIENT])
def test_cuda_operator_and_its_gradient(name: str, bias_shape: tuple[int, ...] | None, dropout_p: float) -> None:
    """Causality is bottom-right in flash's operator and top-left in the others."""
    if name == FLASH and bias_shape is not None:
        return
    leaves = [x.detach() for x in problem(20, 33)]
    bias = None if bias_shape is None else torch.randn(bias_shape)
    if name == EFFICIENT and bias is not None:
        bias = bias.expand(2, 4, 20, 33)
    out, gradients, dout, state = forward_and_backward(name, leaves, bias, dropout_p, causal=True)
    options: dict[str, Any] = {"causal": True, "softmax_scale": 0.3, "layout": "bhsd"}
    if name != FLASH:
        options["causal_align"] = "top_left"
    if dropout_p:
        options |= {"dropout_p": dropout_p, "seed": int(state[0].flatten()[0]), "offset": int(state[1])}
    leaves = [x.clone().requires_grad_() for x in leaves]
    if bias is not None:
        options["bias"] = bias.clone().requires_grad_()
        if name == EFFICIENT:
            leaves.append(options["bias"])
    wanted = libflash.torch.attention(*leaves[:3], **options)
    torch.testing.assert_close(out, wanted.detach())
    torch.testing.assert_close(tuple(x for x in gradients if x is not None), torch.autograd.grad(wanted, leaves, dout))


@pytest.mark.parametrize("name", [FLASH, CUDNN, EFFICIENT])
def test_without_a_gradient_of_out_there_is_none(name: str) -> None:
    schema = getattr(torch.ops.aten, f"{name}_backward").default._schema
    arguments = [None] * sum(not x.kwarg_only for x in schema.arguments)
    assert on_cpu(f"{name}_backward", *arguments) == (None,) * len(schema.returns)


def test_statistics_only_if_asked_for() -> None:
    q, k, v = (x.detach() for x in problem())
    results = on_cpu(EFFICIENT, q, k, v, None, False)
    assert_same_layout(results, on_meta(EFFICIENT, q, k, v, None, False))
    assert results[1].shape == (2, 4, 0)


def test_packed_cuda_operator_and_its_gradient() -> None:
    q, k, v = (x.detach()[0].transpose(0, 1).contiguous() for x in problem(20, 20))
    cu = torch.tensor([0, 7, 7, 20], dtype=torch.int32)
    window = {"window_size_left": 5, "window_size_right": 0}
    results = on_cpu("_flash_attention_forward", q, k, v, cu, cu, 13, 13, 0.25, True, False, **window)
    assert len(results) == len(torch.ops.aten._flash_attention_forward.default._schema.returns)
    out, lse, state, unused, _ = results
    dout = torch.randn_like(out)
    got = on_cpu(
        "_flash_attention_backward", dout, q, k, v, out, lse, cu, cu, 13, 13, 0.25, True, state, unused, **window
    )  # fmt: skip
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted = libflash.torch.attention(
        *leaves, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True, window_size=(5, 0), dropout_p=0.25, seed=state.to(torch.int64)
    )
    torch.testing.assert_close(out, wanted.detach())
    torch.testing.assert_close(got, torch.autograd.grad(wanted, leaves, dout))


def test_what_the_operators_refuse() -> None:
    q, k, v = (x.detach() for x in problem())
    with pytest.raises(libflash.UnsupportedError, match="return_debug_mask"):
        on_cpu(FLASH, q, k, v, 0.0, False, True)
    with pytest.raises(libflash.UnsupportedError, match="return_debug_mask"):
        on_cpu(CUDNN, q, k, v, None, True, 0.0, False, True)
    with pytest.raises(libflash.UnsupportedError, match="block_table"):
        on_cpu("_flash_attention_forward", q, k, v, None, None, 13, 13, 0.0, True, False, block_table=q)
    with pytest.raises(libflash.UnsupportedError, match="dropout_p"):
        on_cpu("_scaled_dot_product_flash_attention_for_cpu", q, k, v, 0.5)


# -- whose dropout mask it is


@pytest.mark.parametrize("name", [FLASH, CUDNN, EFFICIENT])
def test_a_mask_that_pytorch_drew_is_not_drawn_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = (torch.tensor(7), torch.tensor(4))
    monkeypatch.setattr(_torch_sdpa_random, "as_rng_state", lambda state: theirs)
    monkeypatch.setattr(_torch_sdpa_random, "as_seed_and_offset", lambda state: theirs)
    with pytest.raises(libflash.UnsupportedError, match="PyTorch's kernel drew the mask"):
        forward_and_backward(name, [x.detach() for x in problem()], None, 0.5, causal=False)


def test_a_mask_of_ours_does_not_go_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise libflash.UnsupportedError("deterministic: no kernel here")

    monkeypatch.setattr(operators._core, "attention_backward", refuse)
    with pytest.raises(RuntimeError, match=r"libflash drew the dropout mask and has no kernel.*deterministic: no kernel here"):
        forward_and_backward(EFFICIENT, [x.detach() for x in problem()], None, 0.5, causal=False)


@pytest.mark.parametrize("keys", [33, 150])
def test_the_mask_itself(keys: int) -> None:
    """As PyTorch's tests ask for it: entries above dropout_p are kept."""
    q, k, v = (x.detach() for x in problem(20, keys))
    torch.manual_seed(5)
    out, _, seed, offset = on_cpu(EFFICIENT, q, k, v, None, True, 0.3)
    with torch.no_grad():
        mask = _torch_sdpa.fill_mask(torch.empty(2, 4, 20, keys), 0.3, seed.item(), offset.item())
    p = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1)
    torch.testing.assert_close((p * (mask > 0.3) / 0.7) @ v, out)
    assert abs((mask == 0).float().mean() - 0.3) < 0.02
    with pytest.raises(libflash.UnsupportedError, match="PyTorch's kernel drew the mask"):
        _torch_sdpa.fill_mask(mask, 0.3, 7, 4)


@pytest.mark.parametrize("name", [FLASH, CUDNN, EFFICIENT])
def test_a_mask_in_a_captured_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state stays in tensors, which the library reads when it runs; who drew it is told without reading one."""
    monkeypatch.setattr(_torch_sdpa_random, "capturing", lambda x: True)
    leaves = [x.detach() for x in problem()]
    out, gradients, dout, (first, second) = forward_and_backward(name, leaves, None, 0.5, causal=False)
    monkeypatch.setattr(_torch_sdpa_random, "MARK", None)  # a number that was read would not fit
    assert _torch_sdpa_random.is_ours(second)
    assert not _torch_sdpa_random.is_ours(second.clone())
    leaves = [x.clone().requires_grad_() for x in leaves]
    numbers = {"seed": int(first.flatten()[0]), "offset": int(second)}
    wanted = libflash.torch.attention(*leaves, layout="bhsd", softmax_scale=0.3, dropout_p=0.5, **numbers)
    torch.testing.assert_close(out, wanted.detach())
    torch.testing.assert_close(tuple(gradients[:3]), torch.autograd.grad(wanted, leaves, dout))


@pytest.fixture
def backward_kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(_torch_sdpa_random, "masks", type(_torch_sdpa_random.masks)())
    kernels = _torch_sdpa._BackwardKernels()
    kernels.start([])
    return kernels


def test_backward_operators_stay_for_masks_of_ours(backward_kernels: Any) -> None:
    operator = next(pair[1] for pair in _torch_sdpa._operators() if pair[1].name == f"{EFFICIENT}_backward")
    seen = []
    operator.function = lambda *args: seen.append("libflash")
    operator.function.__signature__ = inspect.signature(FUNCTIONS[operator.name])
    operator.original = lambda: type("Kernel", (), {"call_boxed": staticmethod(lambda *args: seen.append("PyTorch"))})
    kernel = backward_kernels.kernel(operator)
    mine, theirs = ([None] * 7 + [seed, offset, 0.5, [True] * 4] for seed, offset in (
        _torch_sdpa_random.as_seed_and_offset(_torch_sdpa_random.draw(0.5, torch.zeros(1))), (torch.tensor(7), torch.tensor(4))
    ))  # fmt: skip
    kernel(None, *theirs)
    backward_kernels.stop()
    assert backward_kernels.library is not None
    kernel(None, *theirs)
    kernel(None, *mine)
    assert seen == ["libflash", "PyTorch", "libflash"]


def test_backward_operators_go_where_no_mask_was_drawn(backward_kernels: Any) -> None:
    backward_kernels.stop()
    assert backward_kernels.library is None


def test_backward_pass_after_the_switch(calls: list[str]) -> None:
    leaves = problem()
    wanted = both(sdpa, leaves)
    with libflash.torch.enable():
        out = sdpa(*leaves)
    gradients = torch.autograd.grad(out.square().sum(), leaves)
    assert calls == ["attention"]
    torch.testing.assert_close((out, *gradients), wanted, rtol=2e-5, atol=2e-5)
