"""libflash for PyTorch: the same functions, differentiable, compiled and exported without a graph break.

    import libflash.torch
    out = libflash.torch.attention(q, k, v, causal=True)

`libflash.attention` calls this module for tensors that require a gradient, and under autocast, torch.func transforms and
tracing. Inside torch.compile and torch.export call it directly. enable() lets
torch.nn.functional.scaled_dot_product_attention and Hugging Face models run on libflash without a change.

Work goes to PyTorch's current stream. Reverse mode, once: a gradient of a gradient and forward-mode AD raise. torch.func's grad,
vjp, vmap and jacrev work, and DTensors that are sharded by batch or heads stay so.
"""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

import torch

from . import _core
from . import _torch_kernels as kernels
from . import _torch_ops as ops
from ._block_mask import BlockMask
from ._errors import InvalidError
from ._torch_autograd import record, record_merge, refuse_gradients, requires_gradient
from ._torch_bias import CausalBias, causal_options
from ._torch_switch import Switch, disable, enable
from ._torch_types import AttentionOptions, DecodeOptions, MergeOptions, Window

__all__ = ["Switch", "attention", "decode", "disable", "enable", "merge"]

Tensor = torch.Tensor
NO_WINDOW = (-1, -1)
BOOLS = (bool, bool, bool)


def flag(x: Any, name: str) -> bool:
    """A bool of Python or NumPy; a bool of Python without a call that torch.compile cannot trace."""
    return x if type(x) is bool else _core.flag(x, name)


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[AttentionOptions]
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[AttentionOptions]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[AttentionOptions]
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    causal_align: Literal["bottom_right", "top_left"] = "bottom_right",
    window_size: Window = NO_WINDOW,
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
    layout: Literal["bshd", "bhsd", "sbhd"] = "bshd",
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

    seed : int, int64 tensor of two elements (seed, offset), or None
        None draws both from the default generator of q's device (torch.manual_seed) in each call and in each replay of a CUDA
        graph, as PyTorch's own dropout does. A tensor on q's device is read when the kernel runs.
    kernel : the forward's; the backward's is chosen by the library.
    deterministic : bool
        The gradients have the same bits in every run; raises UnsupportedError if no kernel can do that. On the CPU they always
        have.
    out, lse : not for calls that record a gradient, and not cast under autocast.
    bias : also torch.nn.attention.bias.causal_upper_left(...) and causal_lower_right(...)
    Rows of packed tensors that belong to no sequence are 0 (lse: -inf), in results and gradients; rows of a given out stay as
    they are.

    Under autocast q, k and v are cast to its type, as scaled_dot_product_attention's are. There is no stream argument: use
    torch.cuda.stream. There is no gradient for alibi_slopes, no second derivative and no forward-mode derivative: those raise
    UnsupportedError.
    """
    if (type(causal), type(return_lse), type(deterministic)) != BOOLS:
        causal = flag(causal, "causal")
        return_lse, deterministic = flag(return_lse, "return_lse"), flag(deterministic, "deterministic")
    if type(bias) is CausalBias:
        others = {"causal": causal, "window_size": None if window_size is NO_WINDOW else window_size, "seqused_q": seqused_q}
        others |= {"seqused_k": seqused_k, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        causal_align = causal_options(bias, q, k, layout, others)
        causal, bias = True, None
    numbers: dict[str, Any] = {}
    if causal:
        numbers["causal"] = causal
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
        numbers["kernel_name"] = kernel
    if deterministic:
        numbers["deterministic"] = deterministic

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
            for name in kernels.BLOCK_LISTS:
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
        add_random_state(q, seed, offset, numbers, tensors)

    if out is not None or lse is not None:
        return attention_into(q, k, v, out, lse, return_lse, numbers, tensors)
    if torch.is_autocast_enabled("cuda" if q.is_cuda else "cpu"):
        q, k, v = autocast(q, k, v, tensors)
    if not ops.eager(q, k, v, *tensors.values()):
        result = ops.OPERATORS["attention"](q, k, v, **numbers, **tensors)
    elif torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or requires_gradient((alibi_slopes, bias, learnable_sink))
    ):
        result = record(run_attention, q, k, v, numbers | tensors)
    else:
        run = kernels.attention if return_lse else kernels.attention_alone
        result = _core.call_as_operator(run, (q, k, v), numbers | tensors)
    return result if return_lse else result[0]


def run_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    return _core.call_as_operator(kernels.attention, (q, k, v), options)


def attention_into(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, lse: Tensor | None, return_lse: bool, numbers: dict[str, Any],
    tensors: dict[str, Tensor],
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    if out is None:
        raise InvalidError("lse is given and out is not; give both, or out alone")
    if torch.is_grad_enabled() and requires_gradient((q, k, v, out, lse, *tensors.values())):
        raise InvalidError(
            "out and lse cannot be given for tensors that require a gradient; leave them out, or call under torch.no_grad()"
        )
    if lse is None and return_lse:
        lse = q.new_empty(kernels.lse_shape(q, str(numbers.get("layout", "bshd"))), dtype=kernels.lse_type(q))
    if ops.eager(q, k, v, out, lse, *tensors.values()):
        _core.call_as_operator(kernels.attention_out, (q, k, v, out, lse), numbers | tensors)
    else:
        ops.OPERATORS["attention_out"](q, k, v, out, lse, **numbers, **tensors)
    return out if lse is None or not return_lse else (out, lse)


def window(window_size: Any) -> list[int]:
    """(left, right) with -1 for None, as the operators take it."""
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"window_size must be a pair (left, right), not {window_size!r}")
    left, right = window_size
    return [-1 if left is None else left, -1 if right is None else right]


def add_random_state(q: Tensor, seed: Any, offset: int, numbers: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """The dropout mask's seed and offset: as numbers, or as a tensor on q's device, which a graph can compute in each run."""
    if seed is None:
        seed = torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=q.device)
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.shape != (2,):
            raise InvalidError(f"seed is a tensor of {seed.dtype}, shape {tuple(seed.shape)}; it must be int64, (2,)")
        if offset != 0:
            raise InvalidError(f"offset is {offset}; it must be 0 when seed is a tensor, which holds both")
        tensors["rng_state"] = seed if seed.device == q.device else seed.to(q.device)
        return
    for name, value in (("seed", seed), ("offset", offset)):
        if not 0 <= value < 2**64:
            raise InvalidError(f"{name} is {value}; it must be from 0 to 2**64 - 1")
        numbers[name] = value - 2**64 if value >= 2**63 else value  # PyTorch's integers are signed


def autocast(q: Tensor, k: Tensor, v: Tensor, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in autocast's type. Optional float32 tensors stay float32; others are cast too."""
    if q.dtype == torch.float64 or not q.is_floating_point():
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    for name in ("alibi_slopes", "bias", "learnable_sink"):
        if name in tensors and tensors[name].dtype != torch.float32:
            tensors[name] = tensors[name].to(dtype)
    return q.to(dtype), k.to(dtype), v.to(dtype)


@overload
def decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[DecodeOptions]
) -> Tensor: ...
@overload
def decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, return_lse: Literal[True], **options: Unpack[DecodeOptions]
) -> tuple[Tensor, Tensor]: ...
@overload
def decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, return_lse: bool, **options: Unpack[DecodeOptions]
) -> Tensor | tuple[Tensor, Tensor]: ...
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
    window_size: Window = NO_WINDOW,
    softmax_scale: float | None = None,
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    num_splits: int = 0,
    split_size: int = 0,
    return_lse: bool = False,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    backend: str | None = None,
    kernel: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """A few query rows per sequence against a cache of keys and values, for torch.compile and torch.export.

    Arguments, results and errors are those of `libflash.decode` (without stream). With k and v the caches are written in place,
    which compiled graphs know. Forward only: raises UnsupportedError for tensors that require a gradient while gradients are
    recorded, or that carry a tangent.

    Under autocast all tensors are cast to its type, the caches too, unless they are written to: with k and v, q, k and v are cast
    to the type of the caches. With out or lse nothing is cast.
    """
    return_lse = flag(return_lse, "return_lse")
    given = dict(
        cache_seqlens=cache_seqlens, block_table=block_table, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad,
        rotary_cos=rotary_cos, rotary_sin=rotary_sin, alibi_slopes=alibi_slopes, learnable_sink=learnable_sink,
        softmax_scale=softmax_scale, backend=backend, kernel_name=kernel,
    )  # fmt: skip
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if rotary_interleaved is not True:
        options["rotary_interleaved"] = flag(rotary_interleaved, "rotary_interleaved")
    if causal is not True:
        options["causal"] = flag(causal, "causal")
    if window_size is not NO_WINDOW and window_size is not None:
        options["window_size"] = window(window_size)
    if softcap:
        options["softcap"] = softcap
    if num_splits:
        options["num_splits"] = num_splits
    if split_size:
        options["split_size"] = split_size
    if (k is None) != (v is None):
        raise InvalidError("k and v must be given together")
    if out is None and lse is None and torch.is_autocast_enabled("cuda" if q.is_cuda else "cpu"):
        q, k_cache, v_cache, k, v = autocast_decode(q, k_cache, v_cache, k, v, options)
    refuse_gradients(
        "decode", {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "out": out, "lse": lse, **options}
    )
    name, tensors = ("decode", (q, k_cache, v_cache)) if k is None else ("decode_append", (q, k_cache, v_cache, k, v))
    if ops.eager(*tensors, out, lse, *options.values()):
        run = kernels.decode if k is None else kernels.decode_append
        if out is not None or lse is not None:
            options |= {"out": out, "lse": lse}
        result = _core.call_as_operator(run, tensors, options)
    else:
        result = written_to(out, lse, ops.OPERATORS[name](*tensors, **options))
    return result if return_lse else result[0]


def autocast_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None, options: dict[str, Any]
) -> tuple[Any, ...]:
    if q.dtype == torch.float64 or not q.is_floating_point():
        return q, k_cache, v_cache, k, v
    dtype = torch.get_autocast_dtype(q.device.type) if k is None else k_cache.dtype
    for name in ("alibi_slopes", "learnable_sink", "rotary_cos", "rotary_sin"):
        if name in options and options[name].dtype != torch.float32:
            options[name] = options[name].to(dtype)
    return tuple(x if x is None else x.to(dtype) for x in (q, k_cache, v_cache, k, v))


def written_to(out: Tensor | None, lse: Tensor | None, result: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The results, copied to the caller's tensors that were given."""
    return (result[0] if out is None else out.copy_(result[0])), (result[1] if lse is None else lse.copy_(result[1]))


Parts = list[Tensor] | tuple[Tensor, ...]


@overload
def merge(
    outs: Parts, lses: Parts, *, return_lse: Literal[True] = True, **options: Unpack[MergeOptions]
) -> tuple[Tensor, Tensor]: ...
@overload
def merge(outs: Parts, lses: Parts, *, return_lse: Literal[False], **options: Unpack[MergeOptions]) -> Tensor: ...
@overload
def merge(outs: Parts, lses: Parts, *, return_lse: bool, **options: Unpack[MergeOptions]) -> Tensor | tuple[Tensor, Tensor]: ...
def merge(
    outs: Parts,
    lses: Parts,
    *,
    return_lse: bool = True,
    layout: Literal["bshd", "bhsd", "sbhd"] = "bshd",
    out: Tensor | None = None,
    lse: Tensor | None = None,
    backend: str | None = None,
    kernel: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Merge the results of several disjoint ranges of keys; differentiable any number of times in outs and lses.

    Arguments, results and errors are those of `libflash.merge` (without stream). Raises UnsupportedError for tensors that carry a
    tangent. Autocast changes nothing: the types of the parts may differ.
    """
    return_lse = flag(return_lse, "return_lse")
    if len(outs) != len(lses):
        raise InvalidError(f"outs has {len(outs)} tensors and lses {len(lses)}; they must be as many")
    given = {"layout": None if layout == "bshd" else layout, "backend": backend, "kernel_name": kernel}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    records = torch.is_grad_enabled() and requires_gradient((*outs, *lses, out, lse))
    if records and (out is not None or lse is not None):
        raise InvalidError(
            "out and lse cannot be given for tensors that require a gradient; leave them out, or call under torch.no_grad()"
        )
    if not ops.eager(*outs, *lses, out, lse):
        result = written_to(out, lse, ops.OPERATORS["merge"](list(outs), list(lses), **options))
    elif records:
        result = record_merge(run_merge, outs, lses, options)
    else:
        if out is not None or lse is not None:
            options |= {"out": out, "lse": lse}
        result = run_merge(list(outs), list(lses), **options)
    return result if return_lse else result[0]


def run_merge(outs: list[Tensor], lses: list[Tensor], **options: Any) -> Any:
    return _core.call_as_operator(kernels.merge, (outs, lses), options)
