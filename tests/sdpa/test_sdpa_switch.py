"""libflash.torch.enable and disable: nesting, PyTorch's registry of implementations, and the list of what stays with PyTorch."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import libflash

torch = pytest.importorskip("torch")

import libflash.torch  # noqa: E402
import torch.nn.attention as registry  # noqa: E402
from sdpa_problem import out_and_gradients, problem, sdpa  # noqa: E402

from libflash import _torch_sdpa  # noqa: E402
from libflash import _torch_sdpa_operators as operators  # noqa: E402


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


def test_pytorchs_own_activation(calls: list[str]) -> None:
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
    """enable() then only registers its names in transformers."""
    pytest.importorskip("transformers")
    with libflash.torch.enable(sdpa=False):
        sdpa(*problem())
    assert calls == []


def test_what_switches_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(libflash.InvalidError, match="paged is True and no model is given"):
        libflash.torch.enable(paged=True)
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    with pytest.raises(libflash.InvalidError, match="sdpa is False and no model is given"):
        libflash.torch.enable(sdpa=False)
    for name in ("sdpa", "paged"):
        for bad, text in ((None, "None"), ("yes", "'yes'")):
            with pytest.raises(TypeError, match=rf"^{name} must be a bool, not {text}$"):
                libflash.torch.enable(**{name: bad})
    with pytest.raises(TypeError, match=r"^str \('gpt2'\) is no Hugging Face model"):
        libflash.torch.enable("gpt2")
    with pytest.raises(TypeError, match=r"models are given one by one, enable\(a, b\), not in a list"):
        libflash.torch.enable([torch.nn.Linear(1, 1)])
    assert registry.current_flash_attention_impl() is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch at its first dual level
def test_second_derivatives_and_forward_mode_are_refused(calls: list[str]) -> None:
    """By PyTorch, whose operator has only first ones in reverse mode; they are not zero."""
    q, k, v = (x.detach() for x in problem())
    loss = lambda q: sdpa(q, k, v).square().sum()  # noqa: E731
    with libflash.torch.enable():
        assert torch.func.grad(loss)(q).abs().max() > 0
        for second in (torch.func.grad(lambda q: torch.func.grad(loss)(q).square().sum()), torch.func.hessian(loss)):
            with pytest.raises((RuntimeError, NotImplementedError), match=r"not.* implemented|not support"):
                second(q)
    assert "attention" in calls


def test_an_object_that_is_no_model_is_refused() -> None:
    with pytest.raises((TypeError, AttributeError)):
        libflash.torch.enable(object())
    assert registry.current_flash_attention_impl() is None


def test_inside_an_activation_of_the_registry(calls: list[str]) -> None:
    """Closing a switch undoes only what that switch did."""
    registry.activate_flash_attention_impl("libflash")
    try:
        with libflash.torch.enable(), libflash.torch.enable():
            sdpa(*problem())
        assert registry.current_flash_attention_impl() == "libflash"
        sdpa(*problem())
        assert len(calls) == 2
    finally:
        registry.restore_flash_attention_impl()


def test_restored_through_the_registry_while_a_switch_is_open(calls: list[str]) -> None:
    with libflash.torch.enable():
        registry.restore_flash_attention_impl()
        sdpa(*problem())
        assert calls == []
        with libflash.torch.enable():
            sdpa(*problem())
            assert calls == ["attention"]
    assert registry.current_flash_attention_impl() is None


# -- what stays with PyTorch


def test_left_gives_operator_and_reason(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_left_is_empty_where_every_call_is_served() -> None:
    with libflash.torch.enable() as switch:
        out_and_gradients(sdpa, problem())
        assert not any(calls for reasons in switch.left().values() for calls in reasons.values())


def argument_added(query: Any, key: Any, value: Any, dropout_p: float = 0.0) -> None: ...


def argument_removed(
    query: Any, key: Any, value: Any, novel: Any, dropout_p: float = 0.0, is_causal: bool = False, *,
    attn_mask: Any = None, scale: Any = None,
) -> None: ...  # fmt: skip


def other_order(
    key: Any, query: Any, value: Any, dropout_p: float = 0.0, is_causal: bool = False, *, attn_mask: Any = None, scale: Any = None
) -> None: ...


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (argument_added, "its positional argument is_causal is not known to libflash"),
        (argument_removed, "it has no positional argument novel"),
        (other_order, "its arguments come in the order query, key, value"),
    ],
)
def test_an_operator_with_an_unknown_schema_stays_with_pytorch(
    function: Any, reason: str, monkeypatch: pytest.MonkeyPatch, calls: list[str]
) -> None:
    """And so does its backward operator."""
    name, key, _, backward = operators.PAIRS[0]
    monkeypatch.setattr(_torch_sdpa, "PAIRS", [(name, key, function, backward)])
    # Backward operators of an earlier switch stay in place once libflash has drawn a dropout mask.
    monkeypatch.setattr(_torch_sdpa, "_backward_kernels", _torch_sdpa._BackwardKernels())
    with libflash.torch.enable() as switch:
        out_and_gradients(sdpa, problem())
        assert reason in next(iter(switch.left()[name]))
    assert calls == []


def test_every_schema_of_this_pytorch_is_known() -> None:
    for pair in _torch_sdpa._operators():
        assert [operator.refusal() for operator in pair] == [None, None]
