"""What replaces PyTorch's attention operators for CUDA, called with CPU tensors: results, layouts and gradients."""

from __future__ import annotations

from typing import Any

import pytest

import libflash

torch = pytest.importorskip("torch")

import libflash.torch  # noqa: E402
from sdpa_operators import CUDNN, EFFICIENT, FLASH, arranged, assert_same_layout, forward_and_backward, on_cpu, on_meta  # noqa: E402
from sdpa_problem import problem  # noqa: E402

ORDERS = [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (0, 1, 3, 2)]


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("head_dim_v", [16, 24])
@pytest.mark.parametrize("name", [FLASH, CUDNN, EFFICIENT])
def test_layout_of_results_is_that_of_the_meta_kernels(name: str, head_dim_v: int, order: tuple[int, ...]) -> None:
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


def test_layout_of_packed_results_is_that_of_the_meta_kernels() -> None:
    q, k, v = (arranged((40, 4, 16), order) for order in ((0, 1, 2), (1, 0, 2), (0, 2, 1)))
    cu = torch.tensor([0, 13, 33], dtype=torch.int32)
    options = (cu, cu, 20, 20, 0.0, True)
    got = on_cpu("_flash_attention_forward", q, k, v, *options, False)
    assert_same_layout(got, on_meta("_flash_attention_forward", q, k, v, *options, False))
    out, lse, *state, _ = got
    gradients = on_cpu("_flash_attention_backward", out, q, k, v, out, lse, *options, *state)
    assert_same_layout(gradients, on_meta("_flash_attention_backward", out, q, k, v, out, lse, *options, *state))
    assert not any(x[33:].any() for x in (out, *gradients))  # rows outside every sequence


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("bias_shape", [None, (20, 33), (4, 20, 33), (2, 4, 20, 33)])
@pytest.mark.parametrize("name", [FLASH, CUDNN, EFFICIENT])
def test_cuda_operator_and_its_gradient(name: str, bias_shape: tuple[int, ...] | None, dropout_p: float) -> None:
    """The flash operator aligns the causal mask bottom-right, the other two top-left."""
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


def test_lse_is_empty_where_it_is_not_requested() -> None:
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


def test_refused_arguments() -> None:
    q, k, v = (x.detach() for x in problem())
    with pytest.raises(libflash.UnsupportedError, match="return_debug_mask"):
        on_cpu(FLASH, q, k, v, 0.0, False, True)
    with pytest.raises(libflash.UnsupportedError, match="return_debug_mask"):
        on_cpu(CUDNN, q, k, v, None, True, 0.0, False, True)
    with pytest.raises(libflash.UnsupportedError, match="block_table"):
        on_cpu("_flash_attention_forward", q, k, v, None, None, 13, 13, 0.0, True, False, block_table=q)
    with pytest.raises(libflash.UnsupportedError, match="dropout_p"):
        on_cpu("_scaled_dot_product_flash_attention_for_cpu", q, k, v, 0.5)
