"""libflash for PyTorch: the same functions, differentiable, compiled and exported without a graph break.

    import libflash.torch
    out = libflash.torch.attention(q, k, v, causal=True)

`libflash.attention` calls this module for tensors that require a gradient, and under autocast, torch.func transforms and
tracing. Inside torch.compile and torch.export call it directly. enable() lets
torch.nn.functional.scaled_dot_product_attention and Hugging Face models run on libflash without a change.

Work goes to PyTorch's current stream. torch.func's grad, vjp, vmap, jacrev, jvp, jacfwd and hessian work, and so do
forward-mode AD and gradients of gradients (create_graph=True). DTensors that are sharded by batch or heads stay sharded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any, Literal, Unpack, overload

import torch

from . import _torch_version  # noqa: F401  refuses versions that are too old for the modules below

# isort: split

from . import _core
from . import _torch_kernels as kernels
from . import _torch_ops as ops
from ._arguments import check_parts, described, shortened
from ._errors import InvalidError, UnsupportedError
from ._option_list import FLOATS, names_of
from ._option_types import AttentionOptions, DecodeOptions, MergeOptions, Results
from ._scalar import is_scalar
from ._torch_autograd import record, record_merge, refuse_gradients, requires_gradient
from ._torch_bias import causal_options, is_causal_bias
from ._torch_context import context_parallel_attention, explain_context_parallel, positions, shard, unshard
from ._torch_context_decode import context_parallel_decode
from ._torch_dtensor import beside, is_dtensor, refuse_written
from ._torch_eager import eager
from ._torch_options import (
    check_dispatched,
    direct_options,
    flag,
    given_options,
    integer,
    known_options,
    real,
    require_inputs,
    require_tensors,
    signed_as,
)
from ._torch_switch import Switch, disable, enable
from ._torch_tangents import carries_tangent

__all__ = [
    "Switch", "attention", "cache_write", "context_parallel_attention", "context_parallel_decode", "decode", "disable", "enable",
    "explain_context_parallel", "merge", "positions", "shard", "unshard",
]  # fmt: skip

Tensor = torch.Tensor
ATTENTION, DECODE = known_options("attention"), known_options("decode")
DIRECT_ATTENTION = direct_options("attention")
DIRECT_DECODE = direct_options("decode")
INT_OR_NONE = (int, type(None))


class _Options(AttentionOptions[Tensor], Results[Tensor], total=False):
    seed: int | Tensor | None
    deterministic: bool
    max_logit: Tensor | None
    entropy: Tensor | None


@overload
def attention(q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[_Options]) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[_Options]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[_Options]
) -> Tensor | tuple[Tensor, Tensor]: ...
@signed_as("attention", seed="int | Tensor | None")
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, dropout_p: float = 0.0, seed: int | Tensor | None = None, offset: int = 0, **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Exact attention with gradients for q, k, v, bias and learnable_sink, through out and through lse.

    Arguments, results and errors are those of `libflash.attention`, except for these:

    seed : int, int64 tensor of two elements (seed, offset), or None
        None draws both from the default generator of q's device (torch.manual_seed) in each call and in each replay of a CUDA
        graph, as PyTorch's own dropout does. A tensor on q's device is read when the kernel runs. For DTensors the seed is an
        integer, the same on all ranks, or a DTensor.
    kernel : the forward kernel; the library chooses the backward kernel.
    deterministic : bool
        The gradients have the same bits in every run; raises UnsupportedError if no kernel supports it. On the CPU they always
        do.
    out, lse : not allowed if the call records a gradient; not cast under autocast.
    max_logit, entropy : also written if the call records a gradient; not supported inside torch.compile, torch.func and DTensor.
    bias : also torch.nn.attention.bias.causal_upper_left(...) and causal_lower_right(...)
        Mask with -inf or with `mask`. Gradients of a row whose scores are all near -1e6 or below (finfo.min) are wrong: backward
        computes the softmax again from lse = maximum + log(sum), and such a maximum absorbs log(sum).
    Rows of packed tensors that belong to no sequence are 0 (lse: -inf), in results and gradients; rows of a given out stay as
    they are.

    Under autocast q, k and v are cast to its type, as in scaled_dot_product_attention. There is no stream argument: use
    torch.cuda.stream. The gradient for alibi_slopes, third derivatives, and forward mode of forward mode raise UnsupportedError.
    Forward mode within torch.compile causes a graph break; fullgraph=True refuses it.
    """
    if not torch.compiler.is_compiling() and not dropout_p:
        if type(dropout_p) is not float or type(seed) not in INT_OR_NONE or seed or type(offset) is not int or offset:
            check_unused_random_state(dropout_p, seed, offset)
        result: Tensor | tuple[Tensor, Tensor] = _core.call_directly(_core.attention, (q, k, v), options, DIRECT_ATTENTION)
        if result is not NotImplemented:
            return result
    return attention_with_pytorch(q, k, v, dropout_p, seed, offset, **options)


def attention_with_pytorch(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float | torch.SymFloat = 0.0, seed: int | Tensor | None = 0, offset: int = 0, *,
    return_lse: bool = False, out: Tensor | None = None, lse: Tensor | None = None, max_logit: Tensor | None = None,
    entropy: Tensor | None = None, **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """attention while PyTorch records, casts, transforms or traces, and with options that the library does not have.
    libflash.attention calls it in these cases. The defaults are its own: seed is 0."""
    return_lse = flag(return_lse, "return_lse")
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor) and out is None and lse is None):
        require_tensors(q=q, k=k, v=v, out=out, lse=lse)
        require_inputs(q=q, k=k, v=v)
    if is_causal_bias(options.get("bias")):
        with_causal_bias(q, k, options)
    numbers, tensors = given_options("attention", ATTENTION, options) if options else ({}, {})
    if isinstance(dropout_p, torch.SymFloat) or dropout_p:  # the truth of a symbolic number fixes it
        numbers["dropout_p"] = real(dropout_p, "dropout_p")
        add_random_state(q, seed, offset, numbers, tensors)
    elif type(dropout_p) is not float or type(seed) not in INT_OR_NONE or seed or type(offset) is not int or offset:
        check_unused_random_state(dropout_p, seed, offset)

    statistics: dict[str, Tensor] = {}
    if max_logit is not None or entropy is not None:
        statistics = {name: x for name, x in (("max_logit", max_logit), ("entropy", entropy)) if x is not None}
        check_statistics(statistics, (q, k, v, out, lse, *tensors.values()))
    if out is not None or lse is not None:
        return attention_into(q, k, v, out, lse, return_lse, numbers, tensors, statistics)
    if torch.is_autocast_enabled("cuda" if q.is_cuda else "cpu"):
        q, k, v = autocast(q, k, v, tensors)
    if not eager(q, k, v, *tensors.values()):
        require_inputs(q=q, k=k, v=v)
        check_dispatched({"q": q, "k": k, "v": v, **tensors})
        result = ops.OPERATORS["attention"](q, k, v, **numbers, **tensors)
    elif torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or requires_gradient(tensors.values())
    ):
        run = functools.partial(run_attention, statistics=statistics) if statistics else run_attention
        result = record(run, q, k, v, numbers, tensors)
    else:
        kernel = kernels.attention if return_lse else kernels.attention_alone
        result = _core.call_as_operator(kernel, (q, k, v), numbers | tensors | statistics)
    return result if return_lse else result[0]


def record_plain(q: Tensor, k: Tensor, v: Tensor, return_lse: bool = False, **flags: bool) -> Tensor | tuple[Tensor, Tensor]:
    """attention_with_pytorch where a gradient of plain tensors is recorded and PyTorch has nothing else to do."""
    # torch.compile compiles what a function that it cannot trace calls.
    if torch.compiler.is_compiling() or k is None or v is None:
        return attention_with_pytorch(q, k, v, return_lse=return_lse, **flags)
    result: tuple[Tensor, Tensor] = record(run_attention, q, k, v, flags, {})
    return result if return_lse else result[0]


def run_attention(inputs: tuple[Tensor, ...], options: dict[str, Any], statistics: dict[str, Tensor] | None = None) -> Any:
    return _core.call_as_operator(kernels.attention, inputs, options | statistics if statistics else options)


def check_statistics(statistics: dict[str, Tensor], others: Iterable[Any]) -> None:
    """Refuse statistics, which the call itself writes, in traces, which would miss the writes, and with derivatives."""
    require_tensors(**statistics)
    for name, x in statistics.items():
        if torch.compiler.is_compiling() or not eager(x, *others) or carries_tangent((x, *others)):
            raise UnsupportedError(
                f"{name} cannot be given inside torch.compile, torch.export, torch.func and forward-mode AD, nor with DTensors "
                "and other subclasses of Tensor; call attention without it there, and once more with it under torch.no_grad()"
            )
        if x.requires_grad:
            raise UnsupportedError(f"{name} is an output without a gradient, and the given tensor requires one")


def attention_into(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, lse: Tensor | None, return_lse: bool, numbers: dict[str, Any],
    tensors: dict[str, Tensor], statistics: dict[str, Tensor],
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    if out is None:
        raise InvalidError("lse is given and out is not; give both, or out alone")
    if torch.is_grad_enabled() and requires_gradient((q, k, v, out, lse, *tensors.values())):
        raise InvalidError(
            "out and lse cannot be given for tensors that require a gradient; leave them out, or call under torch.no_grad()"
        )
    if lse is None and return_lse:
        lse = q.new_empty(kernels.lse_shape(q, str(numbers.get("layout", "bshd"))), dtype=kernels.lse_type(q))
    if eager(q, k, v, out, lse, *tensors.values()):
        _core.call_as_operator(kernels.attention_out, (q, k, v, out, lse), numbers | tensors | statistics)
    else:
        check_dispatched({"q": q, "k": k, "v": v, "out": out, "lse": lse, **tensors})
        refuse_written("attention_out", "out", out)
        ops.OPERATORS["attention_out"](q, k, v, out, lse, **numbers, **tensors)
    return out if lse is None or not return_lse else (out, lse)


def with_causal_bias(q: Tensor, k: Tensor, options: dict[str, Any]) -> None:
    """Replace a bias of torch.nn.attention.bias by causal and causal_align."""
    names = ("causal", "causal_align", "window_size", "seqused_q", "seqused_k", "cu_seqlens_q", "cu_seqlens_k")
    others = {name: options.get(name) for name in names}
    options["causal_align"] = causal_options(options.pop("bias"), q, k, options.get("layout", "bshd"), others)
    options["causal"] = True


def add_random_state(q: Tensor, seed: Any, offset: int, numbers: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Add the dropout mask's seed and offset: as numbers, or as a tensor on q's device, which a graph can compute in each run."""
    if is_dtensor(q) and not is_dtensor(seed) and (seed is None or isinstance(seed, Tensor)):
        given = "None" if seed is None else "a plain tensor"
        raise InvalidError(f"seed is {given}; for DTensors with dropout_p it must be an integer or a DTensor, equal on all ranks")
    if seed is None:
        seed = torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64, device=q.device)
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.shape != (2,):
            raise InvalidError(f"seed is a tensor of {seed.dtype}, shape {tuple(seed.shape)}; it must be int64, (2,)")
        if offset != 0:
            raise InvalidError(f"offset is {offset}; it must be 0 when seed is a tensor, which holds both")
        tensors["rng_state"] = seed if seed.device == q.device else seed.to(q.device)
        return
    for name, value in (("seed", unsigned(seed, "seed")), ("offset", unsigned(offset, "offset"))):
        numbers[name] = value - 2**64 if value >= 2**63 else value  # PyTorch's integers are signed


def unsigned(x: Any, name: str) -> int | torch.SymInt:
    value = integer(x, name)
    if not 0 <= value < 2**64:
        raise InvalidError(f"{name} is {shortened(value)}; it must be from 0 to 2**64 - 1")
    return value


def check_unused_random_state(dropout_p: Any, seed: Any, offset: Any) -> None:
    """Refuse, without dropout, numbers that dropout refuses. Where torch.compile traces, only types are checked: it would compile
    again for another value of a number that is compared."""
    if real(dropout_p, "dropout_p") is None:
        raise TypeError("dropout_p must be a number, not None")
    check = integer if torch.compiler.is_compiling() else unsigned
    if seed is not None and not isinstance(seed, Tensor):
        check(seed, "seed")
    check(offset, "offset")


def autocast(q: Tensor, k: Tensor, v: Tensor, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in autocast's type. Optional float32 tensors stay float32; other tensors are cast, too."""
    if q.dtype == torch.float64 or not q.is_floating_point():
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    for name in names_of(FLOATS, "attention"):
        if name in tensors and tensors[name].dtype != torch.float32:
            tensors[name] = tensors[name].to(dtype)
    return q.to(dtype), k.to(dtype), v.to(dtype)


@overload
def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None = None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[DecodeOptions[Tensor]],
) -> Tensor: ...
@overload
def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[DecodeOptions[Tensor]],
) -> tuple[Tensor, Tensor]: ...
@overload
def decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor | None = None, *, return_lse: bool, **options: Unpack[DecodeOptions[Tensor]]
) -> Tensor | tuple[Tensor, Tensor]: ...
@signed_as("decode")
def decode(q: Tensor, k_cache: Tensor, v_cache: Tensor | None = None, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
    """A few query rows per sequence against a cache of keys and values, for torch.compile and torch.export.

    Arguments, results and errors are those of `libflash.decode` (without stream). With k and v the caches are written in place;
    compiled graphs take this into account. Forward only: raises UnsupportedError for tensors that require a gradient while
    gradients are recorded, or that carry a tangent.

    Rows of packed tensors that belong to no sequence are 0 (lse: -inf); rows of a given out stay as they are.

    Under autocast q and the caches are cast to its type, unless q is float64; optional tensors of float32 stay as they are.
    Caches that are written are not cast: with k and v, q, k and v are cast to the type of the caches. Caches of 8 bits and scales
    are not cast. With out or lse nothing is cast.
    """
    if not torch.compiler.is_compiling():
        result: Tensor | tuple[Tensor, Tensor] = _core.call_directly(_core.decode, (q, k_cache, v_cache), options, DIRECT_DECODE)
        if result is not NotImplemented:
            return result
    return decode_with_pytorch(q, k_cache, v_cache, **options)


def decode_with_pytorch(
    q: Tensor, k_cache: Tensor, v_cache: Tensor | None, *, k: Tensor | None = None, v: Tensor | None = None,
    k_rope: Tensor | None = None, return_lse: bool = False, out: Tensor | None = None, lse: Tensor | None = None, **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    return_lse = flag(return_lse, "return_lse")
    require_tensors(q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, k_rope=k_rope, out=out, lse=lse)
    require_inputs(q=q, k_cache=k_cache)
    numbers, tensors = given_options("decode", DECODE, with_tensor_scales(options, q))
    check_new_rows(k, v, k_rope, v_cache, options)
    if out is None and lse is None and torch.is_autocast_enabled("cuda" if q.is_cuda else "cpu"):
        q, k_cache, v_cache, k, v, k_rope = autocast_decode(q, k_cache, v_cache, k, v, k_rope, tensors)
    refuse_gradients(
        "decode",
        {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "k_rope": k_rope, "out": out, "lse": lse, **tensors},
    )
    name = "decode"
    inputs: tuple[Tensor | None, ...] = (q, k_cache, v_cache)
    if k is not None:
        name, inputs = "decode_append", (*inputs, k, v)
        if parts := written_parts(tensors):
            name, inputs = "decode_append_parts", (*inputs, *(parts.get(x) for x in WRITTEN_PARTS), k_rope)
    given = numbers | tensors
    if eager(*inputs, out, lse, *tensors.values()):
        run = getattr(kernels, name)
        if out is not None or lse is not None:
            given |= {"out": out, "lse": lse}
        result = _core.call_as_operator(run, inputs, given)
    else:
        if out is not None and out.dtype != (dtype := kernels.decode_type(q, given)):
            raise UnsupportedError(
                f"out is {out.dtype}; where PyTorch compiles, traces or transforms it must be {dtype}: the type of q, or "
                "float32 of a shard"
            )
        given_tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "k_rope": k_rope, "out": out, "lse": lse}
        check_dispatched(given_tensors | tensors)
        if k is not None:
            refuse_written(name, "k_cache", k_cache)
        result = ops.OPERATORS[name](*inputs, **given)
        check_written(out, lse, result)
        if "cu_seqlens_q" in tensors:
            result = without_other_rows(out, lse, result, tensors["cu_seqlens_q"])
        result = written_to(out, lse, result)
    return result if return_lse else result[0]


def with_tensor_scales(options: dict[str, Any], first: Tensor) -> dict[str, Any]:
    """Convert scales that are numbers, or tensors without dimensions, to tensors with one dimension, for the operators."""
    for name in ("k_scale", "v_scale"):
        x = options.get(name)
        if isinstance(x, Tensor):
            options[name] = x.reshape(1) if x.dim() == 0 else x
        elif is_scalar(x):
            if not math.isfinite(x):
                raise InvalidError(f"{name} is {x}; it must be finite")
            options[name] = beside(first, torch.tensor([float(x)], dtype=torch.float32, device=first.device))
        elif x is not None and not hasattr(x, "__dlpack__"):
            raise TypeError(f"{name} must be a tensor or a number, not {described(x)}")
    return options


def cache_write(
    k: Tensor,
    v: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor | None,
    slots: Tensor,
    *,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    k_rope_cache: Tensor | None = None,
    k_rope: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = True,
    positions: Tensor | None = None,
    cache_dtype: Literal["e4m3", "e5m2"] | None = None,
    backend: str | None = None,
    kernel: str | None = None,
) -> None:
    """Write new rows of keys and values to slots of a cache, in place, for torch.compile and torch.export.

    Arguments and errors are those of `libflash.cache_write` (without stream). Compiled graphs take into account that the caches
    are written. There is no gradient: raises UnsupportedError for tensors that require a gradient while gradients are recorded.
    """
    require_tensors(
        k=k, v=v, k_cache=k_cache, v_cache=v_cache, slots=slots, k_rope_cache=k_rope_cache, k_rope=k_rope, rotary_cos=rotary_cos,
        rotary_sin=rotary_sin, positions=positions,
    )  # fmt: skip
    options: dict[str, Any] = dict(
        k_scale=k_scale, v_scale=v_scale, rotary_cos=rotary_cos, rotary_sin=rotary_sin, positions=positions, k_rope=k_rope,
        cache_dtype=cache_dtype, backend=backend,
    )  # fmt: skip
    require_inputs(k=k, k_cache=k_cache, slots=slots)
    options = {name: x for name, x in with_tensor_scales(options, k).items() if x is not None}
    require_tensors(k_scale=options.get("k_scale"), v_scale=options.get("v_scale"))
    if not flag(rotary_interleaved, "rotary_interleaved"):
        options["rotary_interleaved"] = False
    if kernel is not None:
        options["kernel_name"] = kernel
    scales = [name for name in ("k_scale", "v_scale") if name in options and options[name].dim() > 2]
    rows: dict[str, Any] = {name: options.pop(name) for name in scales}
    written = (rows.get("k_scale"), rows.get("v_scale"), k_rope_cache)
    inputs = (k, v, k_cache, v_cache, slots, *written)
    refuse_gradients(
        "cache_write",
        {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "k_rope_cache": k_rope_cache, **rows, **options},
    )
    if eager(*inputs, *(x for x in options.values() if isinstance(x, Tensor))):
        _core.call_as_operator(kernels.cache_write, inputs, options)
    else:
        given = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "slots": slots, "k_rope_cache": k_rope_cache}
        check_dispatched(given | rows | options)
        refuse_written("cache_write", "k_cache", k_cache)
        ops.OPERATORS["cache_write"](*inputs, **options)


WRITTEN_PARTS = ("k_scale", "v_scale", "k_rope_cache")


def written_parts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Removes from the options, and returns, the further tensors that an append writes: scales of rows, and k_rope_cache."""
    written = [name for name in WRITTEN_PARTS if name in tensors and (name == "k_rope_cache" or tensors[name].dim() > 2)]
    return {name: tensors.pop(name) for name in written}


def check_new_rows(
    k: Tensor | None, v: Tensor | None, k_rope: Tensor | None, v_cache: Tensor | None, options: dict[str, Any]
) -> None:
    if v_cache is None and v is not None:
        raise InvalidError("v is given without v_cache: the values are channels of k_cache, to which k is appended")
    if v_cache is not None and (k is None) != (v is None):
        raise InvalidError(f"k and v must be given together ({'k' if k is None else 'v'} is None)")
    if k_rope is not None and (k is None or options.get("k_rope_cache") is None):
        raise InvalidError("k_rope is given without k or without k_rope_cache, to which it is appended")


def autocast_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    k_rope: Tensor | None,
    tensors: dict[str, Tensor],
) -> tuple[Any, ...]:
    """Cast the tensors of decode. Caches of 8 bits are never cast: their elements are codes."""
    if q.dtype == torch.float64 or not q.is_floating_point():
        return q, k_cache, v_cache, k, v, k_rope
    codes = k_cache.element_size() == 1
    rope = tensors.get("k_rope_cache")
    dtype = torch.get_autocast_dtype(q.device.type)
    if k is not None and not codes:
        dtype = k_cache.dtype
    elif k is not None and rope is not None:
        dtype = rope.dtype
    for name in names_of(FLOATS, "decode"):
        if name in tensors and tensors[name].dtype != torch.float32:
            tensors[name] = tensors[name].to(dtype)
    if rope is not None and k is None:
        tensors["k_rope_cache"] = rope.to(dtype)
    written = k is not None  # a cast would be a copy, to which the rows were lost
    caches = (k_cache, v_cache) if codes or written else (x if x is None else x.to(dtype) for x in (k_cache, v_cache))
    return q.to(dtype), *caches, *(x if x is None else x.to(dtype) for x in (k, v, k_rope))


def without_other_rows(out: Tensor | None, lse: Tensor | None, result: tuple[Tensor, Tensor], cu_seqlens: Tensor) -> Any:
    """The results; in rows that belong to no sequence, what the caller's tensors hold."""
    other = kernels.rows_outside(cu_seqlens, result[0].shape[0])
    made = result[0] if out is None else torch.where(other[:, None, None], out, result[0])
    return made, (result[1] if lse is None else torch.where(other, lse, result[1]))


def check_written(out: Tensor | None, lse: Tensor | None, result: tuple[Tensor, Tensor]) -> None:
    """Refuse tensors to which copy_ would broadcast or convert the results."""
    for name, given, made in (("out", out, result[0]), ("lse", lse, result[1])):
        if given is not None and given.shape != made.shape:
            raise InvalidError(f"{name} has shape {tuple(given.shape)}; it must be {tuple(made.shape)}")
        if given is not None and given.dtype != made.dtype:
            raise UnsupportedError(
                f"{name} is {given.dtype}; where PyTorch compiles, traces or transforms it must be {made.dtype}"
            )


def written_to(out: Tensor | None, lse: Tensor | None, result: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The results, copied to the caller's tensors if given."""
    return (result[0] if out is None else out.copy_(result[0])), (result[1] if lse is None else lse.copy_(result[1]))


Parts = list[Tensor] | tuple[Tensor, ...]


@overload
def merge(
    outs: Parts, lses: Parts, *, return_lse: Literal[True] = True, **options: Unpack[MergeOptions[Tensor]]
) -> tuple[Tensor, Tensor]: ...
@overload
def merge(outs: Parts, lses: Parts, *, return_lse: Literal[False], **options: Unpack[MergeOptions[Tensor]]) -> Tensor: ...
@overload
def merge(
    outs: Parts, lses: Parts, *, return_lse: bool, **options: Unpack[MergeOptions[Tensor]]
) -> Tensor | tuple[Tensor, Tensor]: ...
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
    """Merge the results of several disjoint ranges of keys; differentiable any number of times in outs and lses, in
    reverse and in forward mode.

    Arguments, results and errors are those of `libflash.merge` (without stream). Autocast has no effect: the types of the parts
    may differ.
    """
    return_lse = flag(return_lse, "return_lse")
    check_parts(outs, lses)
    parts: dict[str, Any] = {}
    for i, (one, its_lse) in enumerate(zip(outs, lses, strict=True)):
        parts |= {f"outs[{i}]": one, f"lses[{i}]": its_lse}
    require_tensors(**parts, out=out, lse=lse)
    if not isinstance(layout, str):
        raise InvalidError(f"layout is {shortened(layout)}; it must be 'bshd', 'bhsd' or 'sbhd'")
    given = {"layout": None if layout == "bshd" else layout, "backend": backend, "kernel_name": kernel}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    records = torch.is_grad_enabled() and requires_gradient((*outs, *lses, out, lse))
    if records and (out is not None or lse is not None):
        raise InvalidError(
            "out and lse cannot be given for tensors that require a gradient; leave them out, or call under torch.no_grad()"
        )
    if not eager(*outs, *lses, out, lse):
        check_dispatched(parts | {"out": out, "lse": lse})
        made = ops.OPERATORS["merge"](list(outs), list(lses), **options)
        check_written(out, lse, made)
        result = written_to(out, lse, made)
    elif records:
        result = record_merge(run_merge, outs, lses, options)
    else:
        if out is not None or lse is not None:
            options |= {"out": out, "lse": lse}
        result = run_merge(list(outs), list(lses), **options)
    return result if return_lse else result[0]


def run_merge(outs: list[Tensor], lses: list[Tensor], **options: Any) -> Any:
    return _core.call_as_operator(kernels.merge, (outs, lses), options)
