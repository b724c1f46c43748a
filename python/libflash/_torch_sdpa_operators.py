"""libflash's kernels for the operators that torch.nn.functional.scaled_dot_product_attention calls once it has chosen a backend.

Tensors are (batch, heads, seqlen, head_dim), except those of _flash_attention_*. Results have the shapes, strides and types that
PyTorch's compiler expects (torch/_meta_registrations.py), for arguments of any strides.

is_causal is aligned top-left, except in the flash operators on CUDA, which come from flash-attn and are aligned bottom-right
(scaled_dot_product_attention calls them only with as many queries as keys).

Argument names are those of PyTorch's schemas; _torch_sdpa.py compares them before it registers anything. A function raises
UnsupportedError or InvalidError before it writes anything; the call then goes to PyTorch's own kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import _core
from . import _torch_sdpa_random as random
from ._errors import InvalidError, UnsupportedError

Tensor = torch.Tensor
Gradients = tuple[Tensor | None, ...]


def rows_contiguous(x: Tensor) -> Tensor:
    """x, or a dense copy if its last dimension is not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def copy_result(x: Tensor, result: Tensor) -> Tensor:
    """Copies to x the result, which the library wrote to rows_contiguous(x). Returns x."""
    return x if x is result else x.copy_(result)


def like_bshd(x: Tensor, head_dim: int | None = None) -> Tensor:
    """Memory of the shape of x in the order (batch, seqlen, heads, head_dim)."""
    batch, heads, seqlen, last = x.shape
    return x.new_empty((batch, seqlen, heads, last if head_dim is None else head_dim)).transpose(1, 2)


def like_order(x: Tensor, head_dim: int) -> Tensor:
    """Memory of the shape of x, but with another head_dim, in the order of the strides of x."""
    shape = (*x.shape[:-1], head_dim)
    if shape == tuple(x.shape):
        return torch.empty_like(x)
    order = sorted(range(4), key=x.stride, reverse=True)
    return torch.empty_permuted(shape, order, dtype=x.dtype, device=x.device)


def forward(query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, **options: Any) -> None:
    """Write out and lse."""
    result = rows_contiguous(out)
    _core.attention(
        rows_contiguous(query), rows_contiguous(key), rows_contiguous(value), out=result, lse=lse, return_lse=True, **options
    )
    copy_result(out, result)


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    like: Callable[[Tensor], Tensor],
    **options: Any,
) -> Gradients:
    """Gradients of query, key and value, in memory that `like` allocates."""
    gradients = [like(x) for x in (query, key, value)]
    results = [rows_contiguous(x) for x in gradients]
    try:
        tensors = [rows_contiguous(x) for x in (grad_out, query, key, value, out)]
        options |= dict(zip(("dq", "dk", "dv"), results, strict=True))
        _core.call_as_operator(_core.attention_backward, (*tensors, lse), options)
    except (UnsupportedError, InvalidError) as refusal:
        if "dropout_p" not in options:
            raise
        raise RuntimeError(f"libflash drew the dropout mask and has no kernel for this backward pass: {refusal}") from refusal
    return tuple(map(copy_result, gradients, results))


def refuse_debug_mask(return_debug_mask: bool) -> None:
    if return_debug_mask:
        raise UnsupportedError("return_debug_mask: libflash does not store the matrix of probabilities")


# -- CPU


def _cpu_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    if dropout_p:
        raise UnsupportedError("dropout_p: this operator returns no random state")
    batch, heads, seqlen, _ = query.shape
    out = torch.empty_like(query)
    lse_type = torch.float64 if query.dtype == torch.float64 else torch.float32
    lse = query.new_empty((batch, seqlen, heads), dtype=lse_type).transpose(1, 2)
    forward(
        query, key, value, out, lse, layout="bhsd", causal=is_causal, causal_align="top_left", softmax_scale=scale,
        bias=attn_mask,
    )  # fmt: skip
    if attn_mask is not None:
        # PyTorch's value for a row that sees no key. PyTorch's backward kernel, which runs once the switch is closed, would make
        # NaN of -inf.
        lse.masked_fill_(lse == -torch.inf, 0.0)
    return out, lse


def _cpu_backward(
    grad_out: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Gradients:
    if grad_out is None:
        return None, None, None
    if dropout_p:
        raise UnsupportedError("dropout_p: this operator has no random state")
    return backward(
        grad_out, query, key, value, out, logsumexp, like_bshd, layout="bhsd", causal=is_causal, causal_align="top_left",
        softmax_scale=scale, bias=attn_mask,
    )  # fmt: skip


# -- CUDA, flash


def _flash_sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    refuse_debug_mask(return_debug_mask)
    state = random.draw(dropout_p, query)
    out = torch.empty_like(query)
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    forward(query, key, value, out, lse, layout="bhsd", causal=is_causal, softmax_scale=scale, **state.options)
    return out, lse, None, None, query.shape[2], key.shape[2], *random.as_rng_state(state), query.new_empty(0)


def _flash_sdpa_backward(
    grad_out: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> Gradients:
    if grad_out is None:
        return None, None, None
    return backward(
        grad_out, query, key, value, out, logsumexp, torch.empty_like, layout="bhsd", causal=is_causal, softmax_scale=scale,
        deterministic=torch.are_deterministic_algorithms_enabled(), **random.redraw(dropout_p, philox_seed, philox_offset),
    )  # fmt: skip


def like_packed(x: Tensor, cum_seq: Tensor | None) -> Tensor:
    """Memory like x. If packed it is zeroed, because the library does not write rows that belong to no sequence."""
    return torch.empty_like(x) if cum_seq is None else torch.zeros_like(x)


def _flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Any, ...]:
    """(batch, seqlen, heads, head_dim) or packed (total, heads, head_dim); called for nested tensors and by varlen_attn."""
    refuse_debug_mask(return_debug_mask)
    if block_table is not None:
        raise UnsupportedError("block_table: a paged cache goes to libflash.torch.decode")
    state = random.draw(dropout_p, query)
    out = like_packed(query, cum_seq_q)
    shape = (query.shape[1], query.shape[0]) if cum_seq_q is not None else (query.shape[0], query.shape[2], query.shape[1])
    lse = query.new_full(shape, -torch.inf, dtype=torch.float32)
    forward(
        query, key, value, out, lse, causal=is_causal, softmax_scale=scale, window_size=(window_size_left, window_size_right),
        cu_seqlens_q=cum_seq_q, cu_seqlens_k=cum_seq_k, seqused_k=seqused_k, alibi_slopes=alibi_slopes,
        num_splits=num_splits or 0, **state.options,
    )  # fmt: skip
    return out, lse, *random.as_rng_state(state), query.new_empty(0)


def _flash_backward(
    grad_out: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> Gradients:
    if grad_out is None:
        return None, None, None
    return backward(
        grad_out, query, key, value, out, logsumexp, lambda x: like_packed(x, cum_seq_q), causal=is_causal, softmax_scale=scale,
        window_size=(window_size_left, window_size_right), cu_seqlens_q=cum_seq_q, cu_seqlens_k=cum_seq_k,
        deterministic=torch.are_deterministic_algorithms_enabled(), **random.redraw(dropout_p, rng_state, unused),
    )  # fmt: skip


# -- CUDA, cuDNN: logsumexp is (batch, heads, seqlen_q, 1)


def _cudnn_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    refuse_debug_mask(return_debug_mask)
    state = random.draw(dropout_p, query)
    out = like_order(query, value.shape[-1])
    lse = query.new_empty((*query.shape[:3], 1), dtype=torch.float32)
    forward(
        query, key, value, out, lse.squeeze(-1), layout="bhsd", causal=is_causal, causal_align="top_left", softmax_scale=scale,
        bias=attn_bias, **state.options,
    )  # fmt: skip
    return out, lse, None, None, query.shape[2], key.shape[2], *random.as_seed_and_offset(state), None


def _cudnn_backward(
    grad_out: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> Gradients:
    if grad_out is None:
        return None, None, None
    if logsumexp.dim() != 4:
        raise UnsupportedError(f"logsumexp has shape {tuple(logsumexp.shape)}; it must be (batch, heads, seqlen_q, 1)")
    return backward(
        grad_out, query, key, value, out, logsumexp.squeeze(-1), torch.empty_like, layout="bhsd", causal=is_causal,
        causal_align="top_left", softmax_scale=scale, bias=attn_bias, deterministic=torch.are_deterministic_algorithms_enabled(),
        **random.redraw(dropout_p, philox_seed, philox_offset),
    )  # fmt: skip


# -- CUDA, memory-efficient: results are in the memory order (batch, seqlen, heads, head_dim), logsumexp is padded


def padded(n: int, multiple: int) -> int:
    """n, rounded up."""
    return -(-n // multiple) * multiple


def _efficient_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    state = random.draw(dropout_p, query)
    batch, heads, seqlen, _ = query.shape
    out = like_bshd(query, value.shape[-1])
    lse = query.new_full((batch, heads, padded(seqlen, 32)), torch.inf, dtype=torch.float32)
    forward(
        query, key, value, out, lse[..., :seqlen], layout="bhsd", causal=is_causal, causal_align="top_left",
        softmax_scale=scale, bias=attn_bias, **state.options,
    )  # fmt: skip
    return out, lse if compute_log_sumexp else lse.new_empty((batch, heads, 0)), *random.as_seed_and_offset(state)


def _efficient_backward(
    grad_out_: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Gradients:
    if grad_out_ is None:
        return None, None, None, None
    dbias = None
    if attn_bias is not None and grad_input_mask[3]:
        keys = attn_bias.shape[-1]
        dbias = attn_bias.new_empty((*attn_bias.shape[:-1], padded(keys, 16)))[..., :keys]
    gradients = backward(
        grad_out_, query, key, value, out, logsumexp[..., : query.shape[2]], like_bshd, layout="bhsd", causal=is_causal,
        causal_align="top_left", softmax_scale=scale, bias=attn_bias, dbias=dbias,
        deterministic=torch.are_deterministic_algorithms_enabled(), **random.redraw(dropout_p, philox_seed, philox_offset),
    )  # fmt: skip
    return *gradients, dbias


# Forward and backward operator of PyTorch, dispatch key, and the two functions for them.
PAIRS: tuple[tuple[str, str, Callable[..., Any], Callable[..., Any]], ...] = (
    ("_scaled_dot_product_flash_attention_for_cpu", "CPU", _cpu_forward, _cpu_backward),
    ("_scaled_dot_product_flash_attention", "CUDA", _flash_sdpa_forward, _flash_sdpa_backward),
    ("_flash_attention", "CUDA", _flash_forward, _flash_backward),
    ("_scaled_dot_product_cudnn_attention", "CUDA", _cudnn_forward, _cudnn_backward),
    ("_scaled_dot_product_efficient_attention", "CUDA", _efficient_forward, _efficient_backward),
)

# The other operators that scaled_dot_product_attention may choose, and why libflash does not serve them.
NOT_SERVED = {
    "_scaled_dot_product_attention_math": "PyTorch chooses its math path inside scaled_dot_product_attention, not in an operator",
    "_efficient_attention_forward": "logsumexp of packed sequences is padded for each sequence",
    "_cudnn_attention_forward": "logsumexp of packed sequences has cuDNN's own order",
    "_flash_attention_forward.quantized": "float8 inputs",
    "_flash_attention_forward_no_dropout_inplace": "not a choice of scaled_dot_product_attention",
    "_scaled_dot_product_fused_attention_overrideable": "for devices that are neither CPU nor CUDA",
}
