"""PyTorch's own attention operators, served by libflash: what torch.nn.functional.scaled_dot_product_attention calls.

Tensors are (batch, heads, seqlen, head_dim) here. `is_causal` of the CPU operator is top-left aligned; the CUDA operators come
from flash-attn and are bottom-right aligned (scaled_dot_product_attention itself sends them square problems only).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from . import _core
from ._errors import NoDeviceError, UnsupportedError

Tensor = torch.Tensor


def rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


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
    query, key, value = rows_contiguous(query), rows_contiguous(key), rows_contiguous(value)
    out, lse = _core.attention(
        query, key, value, layout="bhsd", causal=is_causal, causal_align="top_left", softmax_scale=scale, bias=attn_mask,
        out=torch.empty_like(query) if query.shape[-1] == value.shape[-1] else None, return_lse=True, **_dropout(dropout_p),
    )  # fmt: skip
    return out, lse.transpose(1, 2).contiguous().transpose(1, 2)  # compiled graphs rely on PyTorch's memory order


def _cpu_backward(
    grad_out: Tensor,
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
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = _core.attention_backward(
        rows_contiguous(grad_out), rows_contiguous(query), rows_contiguous(key), rows_contiguous(value), rows_contiguous(out),
        logsumexp.contiguous(), layout="bhsd", causal=is_causal, causal_align="top_left", softmax_scale=scale, bias=attn_mask,
        dq=_like_bshd(query), dk=_like_bshd(key), dv=_like_bshd(value),
    )  # fmt: skip
    return gradients  # type: ignore[no-any-return]


def _like_bshd(x: Tensor) -> Tensor:
    """The shape of x in memory order (batch, seqlen, heads, head_dim), in which PyTorch returns these gradients."""
    batch, heads, seqlen, head_dim = x.shape
    return x.new_empty((batch, seqlen, heads, head_dim)).transpose(1, 2)


def _cuda_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    query, key, value = rows_contiguous(query), rows_contiguous(key), rows_contiguous(value)
    random = _dropout(dropout_p)
    out, lse = _core.attention(
        query,
        key,
        value,
        layout="bhsd",
        causal=is_causal,
        softmax_scale=scale,
        out=torch.empty_like(query),
        return_lse=True,
        **random,
    )
    return out, lse, None, None, query.shape[2], key.shape[2], *_random_state(random), query.new_empty(0)


def _cuda_backward(
    grad_out: Tensor,
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
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = _core.attention_backward(
        rows_contiguous(grad_out), rows_contiguous(query), rows_contiguous(key), rows_contiguous(value), rows_contiguous(out),
        logsumexp, layout="bhsd", causal=is_causal, softmax_scale=scale, dq=_like_bshd(query), dk=_like_bshd(key),
        dv=_like_bshd(value), deterministic=torch.are_deterministic_algorithms_enabled(), **_dropout(dropout_p, philox_seed),
    )  # fmt: skip
    return gradients  # type: ignore[no-any-return]


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
    """(batch, seqlen, heads, head_dim) or packed (total, heads, head_dim); behind nested tensors and varlen_attn."""
    if block_table is not None:
        raise UnsupportedError("a paged cache goes to libflash.torch.decode")
    random = _dropout(dropout_p)
    out, lse = _core.attention(
        rows_contiguous(query), rows_contiguous(key), rows_contiguous(value), causal=is_causal, softmax_scale=scale,
        window_size=(window_size_left, window_size_right), cu_seqlens_q=cum_seq_q, cu_seqlens_k=cum_seq_k, seqused_k=seqused_k,
        alibi_slopes=alibi_slopes, num_splits=num_splits or 0, return_lse=True, **random,
    )  # fmt: skip
    return out, lse, *_random_state(random), query.new_empty(0)


def _flash_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool, rng_state: Tensor, unused: Tensor, *,
    scale: float | None = None, window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    gradients = _core.attention_backward(
        rows_contiguous(grad_out),
        rows_contiguous(query),
        rows_contiguous(key),
        rows_contiguous(value),
        rows_contiguous(out),
        logsumexp,
        causal=is_causal,
        softmax_scale=scale,
        window_size=(window_size_left, window_size_right),
        cu_seqlens_q=cum_seq_q,
        cu_seqlens_k=cum_seq_k,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **_dropout(dropout_p, rng_state),
    )
    return gradients  # type: ignore[no-any-return]


def _dropout(dropout_p: float, state: Tensor | None = None) -> dict[str, Any]:
    """The dropout options: a fresh seed and offset from the default generator, or those that the forward pass returned."""
    if dropout_p == 0:
        return {}
    if state is None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError("dropout in a CUDA graph would drop the same entries in every replay")
        state = torch.randint(2**63 - 1, (2,), dtype=torch.int64, device="cpu")
    seed, offset = state.tolist()
    return {"dropout_p": dropout_p, "seed": seed, "offset": offset}


def _random_state(random: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Seed and offset in host memory, in the two places where these operators return random state."""
    state = torch.tensor([random.get("seed", 0), random.get("offset", 0)], dtype=torch.int64).to(torch.uint64)
    return state, torch.empty((), dtype=torch.uint64)


OPERATORS: dict[str, tuple[str, Callable[..., Any]]] = {
    "_scaled_dot_product_flash_attention_for_cpu": ("CPU", _cpu_forward),
    "_scaled_dot_product_flash_attention_for_cpu_backward": ("CPU", _cpu_backward),
    "_scaled_dot_product_flash_attention": ("CUDA", _cuda_forward),
    "_scaled_dot_product_flash_attention_backward": ("CUDA", _cuda_backward),
    "_flash_attention_forward": ("CUDA", _flash_forward),
    "_flash_attention_backward": ("CUDA", _flash_backward),
}

_warned: set[str] = set()


def _with_fallback(ours: Callable[..., Any], theirs: Any) -> Callable[..., Any]:
    """Ours, or PyTorch's kernel where libflash has none. A backward pass falls back exactly where its forward pass did: what has
    no forward kernel has no backward kernel, and PyTorch's random state and lse then are its own."""

    def call(keyset: Any, *args: Any, **keywords: Any) -> Any:
        try:
            with torch.no_grad():  # PyTorch's autograd stands above these operators; libflash must not see another one
                return ours(*args, **keywords)
        except (UnsupportedError, NoDeviceError) as refusal:
            if theirs is None:
                raise
            if str(refusal) not in _warned:
                _warned.add(str(refusal))
                warnings.warn(f"scaled_dot_product_attention stays with PyTorch's kernel: {refusal}", stacklevel=2)
        return theirs.call_boxed(keyset, *args, **keywords)

    return call


class Override:
    """The operators in PyTorch's dispatcher, until remove()."""

    def __init__(self) -> None:
        self.library: Any = torch.library.Library("aten", "IMPL")
        for name, (key, ours) in OPERATORS.items():
            has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)
            theirs = torch.library.get_kernel(f"aten::{name}", key) if has_kernel else None
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Warning only once for all operators")  # that we override is the intention
                self.library.impl(name, _with_fallback(ours, theirs), key, with_keyset=True, allow_override=True)

    def remove(self) -> None:
        if self.library is not None:
            self.library._destroy()
            self.library = None


def install() -> Override:
    return Override()
