"""Tensors given to libflash.torch: outputs, tensors with a flag or a subclass, PyTorch's own bias."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import libflash

torch = pytest.importorskip("torch")

import libflash.torch  # noqa: E402
from torch_problem import qkv, tensors  # noqa: E402


def test_out_and_lse_are_written() -> None:
    q, k, v = qkv(grad=False)
    wanted, wanted_lse = libflash.torch.attention(q, k, v, return_lse=True)
    out, lse = torch.full_like(wanted, torch.nan), torch.full_like(wanted_lse, torch.nan)
    assert libflash.torch.attention(q, k, v, out=out) is out
    assert torch.equal(out, wanted)
    result = libflash.torch.attention(q, k, v, out=out.zero_(), lse=lse, return_lse=True)
    assert result[0] is out
    assert result[1] is lse
    assert torch.equal(lse, wanted_lse)
    assert torch.equal(libflash.torch.attention(q, k, v, out=out, return_lse=True)[1], wanted_lse)


def test_written_tensors_are_noticed_by_autograd() -> None:
    """A tensor that was saved for a gradient and then written to must not go unnoticed."""
    q, k, v = qkv(grad=False)
    out, lse = libflash.attention(q, k, v, return_lse=True)
    calls = {
        "adapter": lambda: libflash.torch.attention(q, k, v, out=out, lse=lse, return_lse=True),
        "plain": lambda: libflash.attention(q, k, v, out=out, lse=lse, return_lse=True),
        "operator": lambda: torch.ops.libflash.attention_out(q, k, v, out, lse),
        "decode": lambda: libflash.decode(q, k, v, out=out, lse=lse, return_lse=True),
        "merge": lambda: libflash.merge([out.clone()], [lse.clone()], out=out, lse=lse),
        "adapter-merge": lambda: libflash.torch.merge([out.clone()], [lse.clone()], out=out, lse=lse),
    }
    for name, call in calls.items():
        for x in (out, lse):
            factor = torch.ones((), requires_grad=True)
            product = x * factor
            call()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.sum().backward()
            assert name
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    libflash.attention_backward(out, q, k, v, out, lse, dq=gradients[0], dk=gradients[1], dv=gradients[2])
    assert [x._version for x in gradients] == [1, 1, 1]


def test_out_must_not_require_a_gradient() -> None:
    q, k, v = qkv(grad=False)
    for call in (libflash.attention, libflash.torch.attention):
        with pytest.raises(libflash.InvalidError, match="out and lse"):
            call(q, k, v, out=torch.empty(2, 7, 4, 5, requires_grad=True))


def negative(x: torch.Tensor) -> torch.Tensor:
    """-x as a view."""
    return torch._neg_view(x.detach()).requires_grad_(x.requires_grad)


@pytest.mark.parametrize("grad", [False, True])
def test_negative_views_have_their_values(grad: bool) -> None:
    q, k, v = qkv(grad=grad)
    bias, sink = tensors((7, 9), (4,), grad=False)
    for call in (libflash.attention, libflash.torch.attention):
        got = call(negative(q), negative(k), negative(v), bias=negative(bias), learnable_sink=negative(sink))
        assert torch.equal(got, call(-q, -k, -v, bias=-bias, learnable_sink=-sink))
        complex_q = torch.complex(torch.zeros_like(q), -q)
        assert torch.equal(call(complex_q.conj().imag.contiguous(), k, v), call(q, k, v))
    with torch.no_grad():
        assert torch.equal(libflash.torch.decode(q, negative(k), v), libflash.torch.decode(q, -k, v))


def test_negative_outputs_are_refused() -> None:
    q, k, v = qkv(grad=False)
    out = torch.full((2, 7, 4, 5), 3.0)
    for call in (libflash.attention, libflash.torch.attention):
        with pytest.raises(libflash.InvalidError, match="out is a negative view"):
            call(q, k, v, out=torch._neg_view(out))
    with pytest.raises(libflash.InvalidError, match="k_cache is a negative view"):
        libflash.torch.decode(q, negative(k), v, k=k, v=v)
    assert (out == 3).all()
    with pytest.raises(libflash.InvalidError, match="complex"):
        libflash.torch.attention(q, k, v, out=torch.zeros(2, 7, 4, 5, dtype=torch.complex64).conj())


class Meaningful(torch.Tensor):
    """A subclass that replaces operators."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return super().__torch_function__(function, types, args, kwargs or {})


class Plain(torch.Tensor):
    pass


def test_subclasses_with_behaviour_of_their_own_are_refused_by_name() -> None:
    q, k, v = qkv(grad=False)
    odd = {
        "k": lambda call: call(q, k.as_subclass(Meaningful), v),
        "v": lambda call: call(q, k, v.as_subclass(Meaningful)),
        "bias": lambda call: call(q, k, v, bias=torch.zeros(7, 9).as_subclass(Meaningful)),
        "mask": lambda call: call(q, k, v, mask=torch.ones(7, 9, dtype=torch.bool).as_subclass(Meaningful)),
        "seqused_k": lambda call: call(q, k, v, seqused_k=torch.tensor([1, 2], dtype=torch.int32).as_subclass(Meaningful)),
        "out": lambda call: call(q, k, v, out=torch.empty(2, 7, 4, 5).as_subclass(Meaningful)),
    }
    for name, refused in odd.items():
        for call in (libflash.attention, libflash.torch.attention):
            with pytest.raises(TypeError, match=rf"{name} is a .*Meaningful, a subclass of torch.Tensor"):
                refused(call)
    with pytest.raises(TypeError, match=r"k_cache is a .*Meaningful"):
        libflash.torch.decode(q, k.as_subclass(Meaningful), v)
    assert torch.equal(libflash.attention(q.as_subclass(Plain), torch.nn.Parameter(k, False), v), libflash.attention(q, k, v))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.parametrize("grad", [False, True])
def test_nested_tensors_are_refused_by_name(layout: torch.layout, grad: bool) -> None:
    nested = torch.nested.nested_tensor([torch.zeros(n, 2, 8) for n in (3, 5)], layout=layout, requires_grad=grad)
    for call in (libflash.attention, libflash.torch.attention):
        with pytest.raises(TypeError, match=r"^q is a nested tensor; pass packed sequences"):
            call(nested, nested, nested)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_beside_others_are_refused_by_name(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.zeros(7, 4, 8)] * 2, layout=layout)
    x, slots, lse = torch.zeros(2, 7, 4, 8), torch.tensor([0, 1]), torch.zeros(2, 4, 7)
    calls = {
        "bias": lambda: libflash.torch.attention(x, x, x, bias=nested),
        "out": lambda: libflash.torch.attention(x, x, x, out=nested),
        "v_cache": lambda: libflash.torch.decode(x, x, nested),
        "cache_seqlens": lambda: libflash.torch.decode(x, x, x, cache_seqlens=nested),
        r"outs\[1\]": lambda: libflash.torch.merge([x, nested], [lse, lse]),
        "lse": lambda: libflash.torch.merge([x, x], [lse, lse], out=x.clone(), lse=nested),
        "k_rope_cache": lambda: libflash.torch.cache_write(x[0], x[0], x.clone(), x.clone(), slots, k_rope_cache=nested),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=rf"^{name} is a nested tensor; pass packed sequences"):
            call()


@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")
@pytest.mark.parametrize("call", [libflash.torch.attention])
def test_causal_bias_of_pytorch(call) -> None:
    from torch.nn.attention.bias import causal_lower_right, causal_upper_left

    q, k, v = qkv()
    assert torch.equal(call(q, k, v, bias=causal_lower_right(7, 9)), call(q, k, v, causal=True))
    assert torch.equal(call(q, k, v, bias=causal_upper_left(7, 9)), call(q, k, v, causal=True, causal_align="top_left"))
    transposed = [x.transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(
        call(*transposed, layout="bhsd", bias=causal_lower_right(7, 9)), call(*transposed, layout="bhsd", causal=True)
    )
    with pytest.raises(libflash.InvalidError, match=r"CausalBias for \(6, 6\)"):
        call(q, k, v, bias=causal_lower_right(6, 6))
    with pytest.raises(libflash.UnsupportedError, match="cannot be combined with window_size"):
        call(q, k, v, bias=causal_lower_right(7, 9), window_size=(2, 0))
    with pytest.raises(libflash.UnsupportedError, match="cannot be combined with causal_align"):
        call(q, k, v, bias=causal_lower_right(7, 9), causal_align="top_left")
    with pytest.raises(TypeError, match=r"bias is a .*CausalBias"):
        libflash.attention(q.detach(), k.detach(), v.detach(), bias=causal_lower_right(7, 9))


def other_arrays(call: Any, named: dict[str, Any], name: str) -> None:
    with pytest.raises(TypeError, match=rf"^{re.escape(name)} must be a torch.Tensor, not ndarray \(int32, shape \(3,\)\)$"):
        call(**{**named, name: np.zeros(3, np.int32)})


@pytest.mark.parametrize("name", ["k", "seqused_k", "alibi_slopes", "mask", "block_mask", "out"])
def test_attention_takes_tensors_alone(name: str) -> None:
    other_arrays(libflash.torch.attention, dict(zip("qkv", qkv(grad=False), strict=True)), name)


@pytest.mark.parametrize("name", ["q", "v_cache", "k", "cache_seqlens", "tree_mask", "k_scale", "k_rope_cache", "lse"])
def test_decode_takes_tensors_alone(name: str) -> None:
    """Not PyTorch's RuntimeError about arguments of an operator."""
    q, k, v = qkv(grad=False)
    other_arrays(libflash.torch.decode, {"q": q, "k_cache": k, "v_cache": v, "k": k[:, :1], "v": v[:, :1]}, name)


@pytest.mark.parametrize("name", ["v", "k_cache", "slots", "v_scale", "positions"])
def test_cache_write_takes_tensors_alone(name: str) -> None:
    rows, cache = torch.zeros(2, 2, 8), [torch.zeros(1, 4, 2, 8) for _ in "kv"]
    given = {"k": rows, "v": rows, "k_cache": cache[0], "v_cache": cache[1], "slots": torch.tensor([0, 1])}
    other_arrays(libflash.torch.cache_write, given, name)


def test_merge_takes_tensors_alone() -> None:
    out, lse = torch.zeros(1, 3, 2, 8), torch.zeros(1, 2, 3)
    with pytest.raises(TypeError, match=r"^outs\[1\] must be a torch.Tensor, not ndarray \(float32, shape \(.*\)\)$"):
        libflash.torch.merge([out, out.numpy()], [lse, lse])
    with pytest.raises(TypeError, match=r"^lses\[0\] must be a torch.Tensor, not ndarray \(float32, shape \(.*\)\)$"):
        libflash.torch.merge([out, out], [lse.numpy(), lse])
