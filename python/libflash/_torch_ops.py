"""libflash as PyTorch operators: torch.ops.libflash.attention and its kin, which torch.compile and torch.export take as they are.

An operator is a schema, one implementation (the library finds the device in the tensors), and a fake one that gives the shapes of
the results. No gradients here: libflash/torch.py puts them around. Calling through `Library.define` costs a third of what
`torch.library.custom_op` does.

Results have the memory order that the library allocates: dense, in the order of the axes of the caller's layout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from . import _core
from ._block_mask import BlockMask

Tensor = torch.Tensor

# What forward and backward share. An argument at its default is not handed to the implementation, so a short call stays short.
_OPTIONS = """
    bool causal=False, str causal_align="bottom_right", SymInt[2] window_size=[-1, -1], float? softmax_scale=None,
    float softcap=0.0, Tensor? alibi_slopes=None, Tensor? bias=None, Tensor? mask=None, Tensor? learnable_sink=None,
    Tensor? block_mask=None, Tensor? row_counts=None, Tensor? row_indices=None, Tensor? col_counts=None,
    Tensor? col_indices=None, float dropout_p=0.0, SymInt seed=0, SymInt offset=0, Tensor? rng_state=None, str layout="bshd",
    Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None,
    Tensor? seqused_q=None, Tensor? seqused_k=None, SymInt num_splits=0, str? backend=None, str? kernel=None
"""
_DECODE_OPTIONS = """
    Tensor? cache_seqlens=None, Tensor? block_table=None, Tensor? cache_batch_idx=None, Tensor? cache_leftpad=None,
    Tensor? rotary_cos=None, Tensor? rotary_sin=None, bool rotary_interleaved=True, bool causal=True,
    SymInt[2] window_size=[-1, -1], float? softmax_scale=None, float softcap=0.0, Tensor? alibi_slopes=None,
    Tensor? learnable_sink=None, SymInt num_splits=0, SymInt split_size=0, str? backend=None, str? kernel=None
"""
_SCHEMAS = (
    f"attention(Tensor q, Tensor k, Tensor v, *, {_OPTIONS}) -> (Tensor out, Tensor lse)",
    f"attention_out(Tensor q, Tensor k, Tensor v, *, Tensor(a!) out, Tensor(b!)? lse, {_OPTIONS}) -> ()",
    "attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, *, Tensor? dlse=None, "
    f"bool deterministic=False, bool need_dbias=False, bool need_dsink=False, {_OPTIONS}) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsink)",
    f"decode(Tensor q, Tensor k_cache, Tensor v_cache, *, {_DECODE_OPTIONS}) -> (Tensor out, Tensor lse)",
    "decode_append(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, *, "
    f"{_DECODE_OPTIONS}) -> (Tensor out, Tensor lse)",
    'merge(Tensor[] outs, Tensor[] lses, *, str layout="bshd") -> (Tensor out, Tensor lse)',
)
BLOCK_LISTS = ("row_counts", "row_indices", "col_counts", "col_indices")

library = torch.library.Library("libflash", "DEF")


def _native(options: dict[str, Any]) -> dict[str, Any]:
    """From the operator's arguments, which the dispatcher understands, to those of libflash.attention."""
    if "row_counts" in options:
        options["block_mask"] = BlockMask(*(options.pop(name) for name in BLOCK_LISTS))
    if "rng_state" in options:
        options["seed"], options["offset"] = options.pop("rng_state").tolist()
    for name in ("seed", "offset"):
        if name in options:
            options[name] %= 1 << 64  # PyTorch's integers are signed
    return options


def _attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Packed rows that belong to no sequence are not written by the library. A gradient that flows through them must not be
    garbage, so they are 0 here (lse: -inf), and so are their gradients."""
    filled: dict[str, Any] = {}
    if "cu_seqlens_q" in options:
        filled["out"] = q.new_zeros((*q.shape[:-1], v.shape[-1]))
        filled["lse"] = torch.full(lse_shape(q, "bshd"), -torch.inf, dtype=_lse_type(q), device=q.device)
    out, lse = _core.attention(q, k, v, return_lse=True, **filled, **_native(options))
    return out, lse


def _attention_out(q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, lse: Tensor | None, **options: Any) -> None:
    _core.attention(q, k, v, out=out, lse=lse, return_lse=lse is not None, **_native(options))


def _gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    need_dbias: bool = False,
    need_dsink: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    bias, sink = options.get("bias"), options.get("learnable_sink")
    dbias = bias.new_empty(bias.shape) if need_dbias and bias is not None else None
    dsink = sink.new_empty(sink.shape) if need_dsink and sink is not None else None
    filled: dict[str, Any] = {}
    if "cu_seqlens_q" in options:
        filled["dq"] = q.new_zeros(q.shape)
    if "cu_seqlens_k" in options:
        filled |= {"dk": k.new_zeros(k.shape), "dv": v.new_zeros(v.shape)}
    dq, dk, dv = _core.attention_backward(dout, q, k, v, out, lse, dbias=dbias, dsink=dsink, **filled, **_native(options))
    return dq, dk, dv, dbias, dsink


def _attention_backward(*arguments: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """An operator returns tensors only: empty ones for what was not asked for."""
    gradients = _gradients(*arguments, **options)
    return tuple(arguments[1].new_empty(0) if x is None else x for x in gradients)


def _decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    out, lse = _core.decode(q, k_cache, v_cache, return_lse=True, **options)
    return out, lse


def _decode_append(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    out, lse = _core.decode(q, k_cache, v_cache, k=k, v=v, return_lse=True, **options)
    return out, lse


def _merge(outs: list[Tensor], lses: list[Tensor], *, layout: str = "bshd") -> tuple[Tensor, Tensor]:
    out, lse = _core.merge(outs, lses, layout=layout)  # type: ignore[call-overload]
    return out, lse


def _lse_type(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def lse_shape(q: Tensor, layout: str) -> tuple[int, ...]:
    """(batch, heads_q, seqlen_q), or (heads_q, total_q) if packed."""
    if q.dim() == 3:
        return q.shape[1], q.shape[0]
    if layout == "bhsd":
        return q.shape[0], q.shape[1], q.shape[2]
    if layout == "sbhd":
        return q.shape[1], q.shape[2], q.shape[0]
    return q.shape[0], q.shape[2], q.shape[1]


def _attention_fake(q: Tensor, k: Tensor, v: Tensor, *, layout: str = "bshd", **options: Any) -> tuple[Tensor, Tensor]:
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, q.new_empty(lse_shape(q, layout), dtype=_lse_type(q))


def _attention_out_fake(q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, lse: Tensor | None, **options: Any) -> None:
    return None


def _attention_backward_fake(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    need_dbias: bool = False,
    need_dsink: bool = False,
    bias: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dbias = bias.new_empty(bias.shape) if need_dbias and bias is not None else q.new_empty(0)
    dsink = learnable_sink.new_empty(learnable_sink.shape) if need_dsink and learnable_sink is not None else q.new_empty(0)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dbias, dsink


def _decode_fake(q: Tensor, k_cache: Tensor, v_cache: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return _attention_fake(q, k_cache, v_cache)


def _decode_append_fake(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    return _attention_fake(q, k_cache, v_cache)


def _merge_fake(outs: list[Tensor], lses: list[Tensor], *, layout: str = "bshd") -> tuple[Tensor, Tensor]:
    return outs[0].new_empty(outs[0].shape), outs[0].new_empty(lses[0].shape, dtype=_lse_type(outs[0]))


def _below_autograd(function: Callable[..., Any]) -> Callable[..., Any]:
    """An operator called by its own name does not go through libflash/torch.py, and must not get there from inside."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return function(*args, **options)
        with torch.no_grad():
            return function(*args, **options)

    return call


def _register() -> None:
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
    for schema in _SCHEMAS:
        name = schema.partition("(")[0]
        library.define(schema, tags=tags)
        for key in ("CPU", "CUDA"):
            library.impl(name, _below_autograd(globals()[f"_{name}"]), key)
        torch.library.register_fake(f"libflash::{name}", globals()[f"_{name}_fake"], lib=library)


_register()

OPERATORS = {schema.partition("(")[0]: getattr(torch.ops.libflash, schema.partition("(")[0]).default for schema in _SCHEMAS}

_profiling = torch._C._autograd._profiler_enabled
_plain = (Tensor, torch.nn.Parameter)
_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)


def eager(q: Tensor) -> bool:
    """True for plain tensors if nobody watches: no tracing, no compiling, no dispatch mode, no profiler. The library is then
    called straight away: an operator with thirty arguments costs 8 us more."""
    return not torch.compiler.is_compiling() and _modes() == 0 and type(q) in _plain and not q.is_meta and not _profiling()


def attention(q: Tensor, k: Tensor, v: Tensor, return_lse: bool, **options: Any) -> Any:
    """(out, lse); in eager mode out alone unless return_lse. Records no gradient."""
    if eager(q):
        if return_lse or "cu_seqlens_q" in options:
            return _attention(q, k, v, **options)
        return (_core.attention(q, k, v, **_native(options)),)
    return OPERATORS["attention"](q, k, v, **options)


def attention_out(q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, lse: Tensor | None, **options: Any) -> None:
    (_attention_out if eager(q) else OPERATORS["attention_out"])(q, k, v, out=out, lse=lse, **options)


def attention_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **options: Any) -> Any:
    return (_gradients if eager(q) else OPERATORS["attention_backward"])(dout, q, k, v, out, lse, **options)


def decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, **options: Any) -> Any:
    return (_decode if eager(q) else OPERATORS["decode"])(q, k_cache, v_cache, **options)


def decode_append(q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    return (_decode_append if eager(q) else OPERATORS["decode_append"])(q, k_cache, v_cache, k, v, **options)


def merge(outs: list[Tensor], lses: list[Tensor], layout: str) -> Any:
    return (_merge if eager(outs[0]) else OPERATORS["merge"])(outs, lses, layout=layout)
