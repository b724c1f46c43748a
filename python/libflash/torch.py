"""libflash for PyTorch: the same functions, differentiable, compiled and exported without a graph break.

    import libflash.torch
    out = libflash.torch.attention(q, k, v, causal=True)

`libflash.attention` calls this module by itself for tensors that require a gradient. Inside torch.compile and torch.export call
it by name. enable() lets torch.nn.functional.scaled_dot_product_attention and Hugging Face models run on libflash without a
change.

Work goes to PyTorch's current stream. Reverse mode only, once: a gradient of a gradient raises.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from . import _torch_ops as ops
from ._block_mask import BlockMask
from ._errors import InvalidError, UnsupportedError
from ._torch_switch import Switch, disable, enable

__all__ = ["Switch", "attention", "decode", "disable", "enable", "merge"]

Tensor = torch.Tensor
NO_WINDOW = (-1, -1)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    causal_align: str = "bottom_right",
    window_size: tuple[int | None, int | None] | None = NO_WINDOW,
    softmax_scale: float | None = None,
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    block_mask: Tensor | BlockMask | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    offset: int = 0,
    layout: str = "bshd",
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    num_splits: int = 0,
    deterministic: bool = False,
    return_lse: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    backend: str | None = None,
    kernel: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention with gradients for q, k, v, bias and learnable_sink, through out and through lse.

    Arguments, results and errors are those of `libflash.attention`, but for these:

    seed : int, int64 tensor of two elements (seed, offset) in host memory, or None
        None draws both from PyTorch's default generator (torch.manual_seed), anew in each call, as its own dropout does.
    deterministic : bool
        The gradients have the same bits in every run; raises UnsupportedError where that cannot be had. On the CPU they always
        do.
    out, lse : not for calls that record a gradient.
    Rows of packed tensors that belong to no sequence are 0 (lse: -inf), in results and gradients; rows of a given out stay as
    they are.

    Under autocast q, k and v are cast to its type, as scaled_dot_product_attention's are. There is no stream argument: use
    torch.cuda.stream. There is no gradient for alibi_slopes.
    """
    numbers: dict[str, Any] = {}
    if causal:
        numbers["causal"] = True
    if causal_align != "bottom_right":
        numbers["causal_align"] = causal_align
    if window_size is not NO_WINDOW and window_size is not None:
        numbers["window_size"] = window(window_size)
    if softmax_scale is not None:
        numbers["softmax_scale"] = softmax_scale
    if softcap:
        numbers["softcap"] = softcap
    if layout != "bshd":
        numbers["layout"] = layout
    if num_splits:
        numbers["num_splits"] = num_splits
    if max_seqlen_q is not None:
        numbers["max_seqlen_q"] = max_seqlen_q
    if max_seqlen_k is not None:
        numbers["max_seqlen_k"] = max_seqlen_k
    if backend is not None:
        numbers["backend"] = backend
    if kernel is not None:
        numbers["kernel"] = kernel

    tensors: dict[str, Tensor] = {}
    if alibi_slopes is not None:
        tensors["alibi_slopes"] = alibi_slopes
    if bias is not None:
        tensors["bias"] = bias
    if mask is not None:
        tensors["mask"] = mask
    if learnable_sink is not None:
        tensors["learnable_sink"] = learnable_sink
    if block_mask is not None:
        if isinstance(block_mask, BlockMask):
            for name in ops.BLOCK_LISTS:
                tensors[name] = getattr(block_mask, name)
        else:
            tensors["block_mask"] = block_mask
    if cu_seqlens_q is not None:
        tensors["cu_seqlens_q"] = cu_seqlens_q
    if cu_seqlens_k is not None:
        tensors["cu_seqlens_k"] = cu_seqlens_k
    if seqused_q is not None:
        tensors["seqused_q"] = seqused_q
    if seqused_k is not None:
        tensors["seqused_k"] = seqused_k
    if dropout_p:
        numbers["dropout_p"] = dropout_p
        add_random_state(seed, offset, numbers, tensors)

    if torch.is_autocast_enabled("cuda" if q.is_cuda else "cpu"):
        q, k, v = autocast(q, k, v, tensors)
    if torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or requires_gradient(alibi_slopes, bias, learnable_sink)
    ):
        if out is not None or lse is not None:
            raise InvalidError("out and lse cannot be given for tensors that require a gradient")
        if alibi_slopes is not None and alibi_slopes.requires_grad:
            raise UnsupportedError("alibi_slopes requires a gradient, and there is none for it; pass alibi_slopes.detach()")
        result = _Attention.apply(numbers, tuple(tensors), deterministic, q, k, v, *tensors.values())
    elif out is not None or lse is not None:
        if out is None:
            raise InvalidError("lse is given and out is not; give both, or out alone")
        if lse is None and return_lse:
            lse = q.new_empty(ops.lse_shape(q, layout), dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
        ops.attention_out(q, k, v, out=out, lse=lse, **numbers, **tensors)
        return (out, lse) if return_lse else out  # type: ignore[return-value]
    else:
        result = ops.attention(q, k, v, return_lse, **numbers, **tensors)
    return result if return_lse else result[0]


def window(window_size: Any) -> list[int]:
    """(left, right) with -1 for None, as the operators take it."""
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"window_size must be a pair (left, right), not {window_size!r}")
    left, right = window_size
    return [-1 if left is None else left, -1 if right is None else right]


def requires_gradient(*tensors: Tensor | None) -> bool:
    for x in tensors:  # noqa: SIM110  any() of a generator takes three times as long
        if x is not None and x.requires_grad:
            return True
    return False


def add_random_state(seed: Any, offset: int, numbers: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """The dropout mask's seed and offset: as numbers, or as a tensor, which a compiled graph can make anew in each run."""
    if seed is None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "dropout in a CUDA graph would drop the same entries in every replay; give seed to accept that"
            )
        seed = torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device="cpu")
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.shape != (2,) or seed.device.type != "cpu":
            raise InvalidError(
                f"seed is a tensor of {seed.dtype}, shape {tuple(seed.shape)}, on {seed.device}; "
                "it must be int64, (2,), on the CPU"
            )
        tensors["rng_state"] = seed
        return
    for name, value in (("seed", seed), ("offset", offset)):
        if not 0 <= value < 2**64:
            raise InvalidError(f"{name} is {value}; it must be from 0 to 2**64 - 1")
        numbers[name] = value - 2**64 if value >= 2**63 else value  # PyTorch's integers are signed


def autocast(q: Tensor, k: Tensor, v: Tensor, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in autocast's type. What may be float32 beside them stays, other types follow q."""
    if q.dtype == torch.float64 or not q.is_floating_point():
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    for name in ("alibi_slopes", "bias", "learnable_sink"):
        if name in tensors and tensors[name].dtype != torch.float32:
            tensors[name] = tensors[name].to(dtype)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def rows_contiguous(x: Tensor) -> Tensor:
    """Gradients may come in any strides, expanded from a scalar for instance; the library wants dense rows."""
    return x if x.stride(-1) == 1 else x.contiguous()


class _Attention(torch.autograd.Function):
    """(numbers, names, deterministic, q, k, v, *tensors) -> (out, lse), where `names` are the options that `tensors` are."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, numbers: dict[str, Any], names: tuple[str, ...], deterministic: bool, q: Tensor, k: Tensor, v: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out, lse = ops.attention(q, k, v, True, **numbers, **dict(zip(names, tensors, strict=True)))
        ctx.numbers, ctx.names, ctx.deterministic = numbers, names, deterministic
        ctx.save_for_backward(q, k, v, out, lse, *tensors)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        options = dict(zip(ctx.names, tensors, strict=True), **ctx.numbers)
        gradients: dict[str, Tensor | None] = dict.fromkeys(ctx.names)
        wanted = {name for name, needed in zip(ctx.names, ctx.needs_input_grad[6:], strict=True) if needed}
        if ctx.deterministic:
            options["deterministic"] = True
        if dlse is not None:
            options["dlse"] = rows_contiguous(dlse)
        if "bias" in wanted:
            options["need_dbias"] = True
        if "learnable_sink" in wanted:
            options["need_dsink"] = True
        dout = torch.zeros_like(out) if dout is None else rows_contiguous(dout)
        dq, dk, dv, dbias, dsink = ops.attention_backward(dout, q, k, v, out, lse, **options)
        if "bias" in wanted:
            gradients["bias"] = dbias
        if "learnable_sink" in wanted:
            gradients["learnable_sink"] = dsink
        return None, None, None, dq, dk, dv, *gradients.values()


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor | None = None,
    block_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = True,
    causal: bool = True,
    window_size: tuple[int | None, int | None] | None = NO_WINDOW,
    softmax_scale: float | None = None,
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    num_splits: int = 0,
    split_size: int = 0,
    return_lse: bool = False,
    backend: str | None = None,
    kernel: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """A few query rows per sequence against a cache of keys and values, for torch.compile and torch.export.

    Arguments, results and errors are those of `libflash.decode` (without out, lse and stream). With k and v the caches are
    written in place, which compiled graphs know. Forward only: raises UnsupportedError for tensors that require a gradient while
    gradients are recorded.
    """
    given = dict(
        cache_seqlens=cache_seqlens, block_table=block_table, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad,
        rotary_cos=rotary_cos, rotary_sin=rotary_sin, alibi_slopes=alibi_slopes, learnable_sink=learnable_sink,
        softmax_scale=softmax_scale, backend=backend, kernel=kernel,
    )  # fmt: skip
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if not rotary_interleaved:
        options["rotary_interleaved"] = False
    if not causal:
        options["causal"] = False
    if window_size is not NO_WINDOW and window_size is not None:
        options["window_size"] = window(window_size)
    if softcap:
        options["softcap"] = softcap
    if num_splits:
        options["num_splits"] = num_splits
    if split_size:
        options["split_size"] = split_size
    if torch.is_grad_enabled() and requires_gradient(q, k_cache, v_cache, k, v, alibi_slopes, learnable_sink):
        raise UnsupportedError("decode has no gradient; call it under torch.no_grad(), or use attention")
    if k is None and v is None:
        result = ops.decode(q, k_cache, v_cache, **options)
    elif k is None or v is None:
        raise InvalidError("k and v must be given together")
    else:
        result = ops.decode_append(q, k_cache, v_cache, k, v, **options)
    return result if return_lse else result[0]


def merge(
    outs: list[Tensor] | tuple[Tensor, ...],
    lses: list[Tensor] | tuple[Tensor, ...],
    *,
    return_lse: bool = True,
    layout: str = "bshd",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over several disjoint ranges of keys, put together; differentiable in outs and lses.

    Arguments, results and errors are those of `libflash.merge`.
    """
    if len(outs) != len(lses):
        raise InvalidError(f"outs has {len(outs)} tensors and lses {len(lses)}; they must be as many")
    if torch.is_grad_enabled() and requires_gradient(*outs, *lses):
        result = _Merge.apply(layout, *outs, *lses)
    else:
        result = ops.merge(list(outs), list(lses), layout)
    return result if return_lse else result[0]


def as_out(lse: Tensor, layout: str) -> Tensor:
    """lse with the axes of out and one more."""
    if lse.dim() == 2:
        return lse.t().unsqueeze(-1)
    order = {"bshd": (0, 2, 1), "bhsd": (0, 1, 2), "sbhd": (2, 0, 1)}[layout]
    return lse.permute(order).unsqueeze(-1)


def as_lse(x: Tensor, layout: str) -> Tensor:
    """The way back."""
    x = x.squeeze(-1)
    if x.dim() == 2:
        return x.t()
    return x.permute({"bshd": (0, 2, 1), "bhsd": (0, 1, 2), "sbhd": (1, 2, 0)}[layout])


class _Merge(torch.autograd.Function):
    """(layout, *outs, *lses) -> (out, lse)

    With w_n = exp(lse_n - lse): douts_n = w_n dout, dlses_n = w_n (dlse + dout . (outs_n - out)).
    A part with lse_n = -inf has w_n = 0 and takes part in nothing, whatever its outs_n holds.
    """

    @staticmethod
    def forward(ctx: Any, layout: str, *parts: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        count = len(parts) // 2
        out, lse = ops.merge(list(parts[:count]), list(parts[count:]), layout)
        ctx.layout = layout
        ctx.save_for_backward(out, lse, *parts)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:  # type: ignore[override]
        out, lse, *parts = ctx.saved_tensors
        count = len(parts) // 2
        dout = torch.zeros_like(out) if dout is None else dout
        dout, out, lse = dout.to(lse.dtype), out.to(lse.dtype), as_out(lse, ctx.layout)
        slope = -(dout * out).sum(-1, keepdim=True)
        if dlse is not None:
            slope = slope + as_out(dlse, ctx.layout)
        douts, dlses = [], []
        for part, given in zip(parts[:count], parts[count:], strict=True):
            part_lse = as_out(given, ctx.layout)
            counts = part_lse > -float("inf")
            weight = torch.where(counts, (part_lse - lse).exp(), 0.0)
            inner = (dout * torch.where(counts, part, 0.0)).sum(-1, keepdim=True)
            douts.append((weight * dout).to(part.dtype))
            dlses.append(as_lse(weight * (slope + inner), ctx.layout).to(given.dtype))
        return None, *douts, *dlses
