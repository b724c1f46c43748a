"""Attention over a sequence that is divided among the ranks of a torch.distributed group: each rank has some of the tokens.

The result is the same as on one device, within the error bound of a merge; so are gradients and the dropout mask. The gradient of
a parameter (learnable_sink) is this rank's share, as for any other parameter: the sum over the ranks is the whole gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._compile import _disable_dynamo as outside_of_compilers

from . import _context_layout as layouts
from . import _core
from . import _torch_context_group as groups
from . import _torch_symmetric_memory as symmetric
from ._arguments import integer, real
from ._context_choice import Sizes, can_share_heads, check_scheme, choose, explanation, key_heads_repeated
from ._context_layout import Layout, chunks_by_position
from ._context_shapes import check_shapes, check_tokens, documents_of, refuse_others, sizes_of
from ._errors import InvalidError, UnsupportedError
from ._option_list import SCORE_NUMBERS
from ._torch_autograd import requires_gradient
from ._torch_context_check import agree, text_of
from ._torch_context_group import Axis, Ranks
from ._torch_context_heads import HeadExchange
from ._torch_context_parts import serves
from ._torch_context_positions import lse_shape, wide_type
from ._torch_context_schedule import Schedule
from ._torch_context_transport import Memory
from ._torch_fake import shape_of
from ._torch_options import constant
from ._torch_tangents import tangent_of

Tensor = torch.Tensor
ONCE = "context_parallel_attention has gradients by torch.autograd, once, and {}; attention has all derivatives, of gathered keys"


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call, before anything is sent."""

    scheme: str
    order: str
    cu_seqlens: tuple[int, ...] | None
    causal: bool
    window_size: tuple[int, int]
    deterministic: bool
    numbers: dict[str, Any]  # score options (softmax_scale, ...), dropout_p, seed, offset, backend
    transport: str = "auto"

    @property
    def window(self) -> tuple[int, int]:
        left, right = self.window_size
        return left, 0 if self.causal else right


@outside_of_compilers
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any = None,
    mesh: Any = None,
    scheme: str = "auto",
    order: str = "zigzag",
    cu_seqlens: Any = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    offset: int = 0,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
    check: bool | None = None,
    transport: str = "auto",
    **others: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of this rank's rows over the keys of all ranks of a group, with gradients for q, k, v and learnable_sink.

    All ranks call it together, with shards of equal length: see `shard`. Names and meanings are those of `attention`.

    Parameters
    ----------
    q, k, v : (batch, tokens, heads, head_dim), or with cu_seqlens (tokens, heads, head_dim): this rank's tokens, ascending
    group : ProcessGroup, default the world;  mesh : DeviceMesh of one dimension, or of two, (heads, ring)
    scheme : "ring" (keys are sent during the computation), "halo" (a ring for windows: only neighbours send), "all_gather" (the
        keys of all ranks in one call), "heads" (all tokens, a share of the heads: all-to-all), "heads_ring" (mesh of two
        dimensions), or "auto": see explain_context_parallel
    order : "zigzag" or "contiguous": which tokens a rank has; see `shard`. Of n ranks, rank r has the chunks r and 2n-1-r of 2n
        (zigzag: equal work with a causal mask), or chunk r of n (contiguous)
    cu_seqlens : (documents + 1,) integers: prefix sums of the documents' lengths, over the tokens of all ranks
    seed : int; required with dropout_p, and the same on all ranks: the mask is the same as on one device
    deterministic : the gradients have the same bits in every run with the same number of ranks, as out and lse always have;
        raises UnsupportedError if no kernel supports it
    check : compare shapes and options of all ranks first; default: on the CPU only. Without the check, wrong shards may make the
        call hang or give wrong results.
    transport : how keys are sent along a ring or gathered. "messages": by torch.distributed. "symmetric_memory": all ranks read
        each GPU's memory with copy engines, during the computation. "auto": symmetric memory if all ranks have it; the ranks
        agree on this in the first call of a group. Results have the same bits. The symmetric memory (K and V of a rank and, in
        backward, up to twice their gradients) is kept with the group. It cannot grow during the capture of a graph: call once
        before.

    Returns
    -------
    out : shape of q with v's head_dim; and lse : (batch, heads, tokens) or (heads, tokens), if return_lse; both differentiable

    Raises
    ------
    As attention; InvalidError on all ranks for shards or options that differ. UnsupportedError for bias, mask, block_mask and
    other options of attention that are not named here, for create_graph=True, torch.func and forward-mode AD, and for CUDA
    tensors with alibi_slopes whose shards are not neighbouring tokens: the CUDA kernels support ALiBi only with order
    "contiguous" or scheme "heads".
    """
    given_options = dict(locals())
    scores = {name: given_options[name] for name in SCORE_NUMBERS}
    axes = groups.groups_of(group, mesh)
    arguments: list[Arguments] = []

    def describe() -> dict[str, str]:
        nonlocal q, k, v
        refuse_others(others)
        made = read_arguments(
            scheme, order, cu_seqlens, causal, window_size, scores, dropout_p, seed, offset, backend, deterministic, transport
        )
        arguments.append(made)
        q, k, v = (in_autocast(x, name) for name, x in (("q", q), ("k", k), ("v", v)))
        check_tensors(q, k, v, alibi_slopes, learnable_sink, made, axes)
        return described(q, k, v, alibi_slopes, learnable_sink, made)

    on_cuda = getattr(q, "is_cuda", False)
    if check if check is not None else not on_cuda:
        agree(axes, q.device if on_cuda else torch.device("cpu"), describe)
    else:
        describe()
    given = arguments[0]
    plan = make_plan(q, k, v, given, axes, alibi_slopes)
    if q.is_cuda:
        groups.connect(plan.ranks.ring, q.device)
    plan = replace(plan, memory=symmetric.memory_of(plan.ranks.ring, q.device, given.transport))
    out, lse = ContextParallel.apply(plan, q, k, v, learnable_sink)
    return (out, lse) if return_lse else out


def read_arguments(
    scheme: Any, order: Any, cu_seqlens: Any, causal: Any, window_size: Any, scores: dict[str, Any], dropout_p: Any = 0.0,
    seed: Any = None, offset: Any = 0, backend: Any = None, deterministic: Any = False, transport: Any = "auto",
) -> Arguments:  # fmt: skip
    layouts.check_order(order)
    symmetric.check_transport(transport)
    window = read_window(window_size)
    dropout = read_number(dropout_p, "dropout_p")
    if dropout and seed is None:
        raise InvalidError("seed is None; with dropout_p it must be an integer, the same on all ranks")
    documents = documents_of(cu_seqlens)
    numbers: dict[str, Any] = {name: None if value is None else read_number(value, name) for name, value in scores.items()}
    numbers |= {"dropout_p": dropout, "backend": backend}
    numbers |= {"seed": 0 if seed is None else read_integer(seed, "seed"), "offset": read_integer(offset, "offset")}
    flags = _core.flag(causal, "causal"), window, _core.flag(deterministic, "deterministic")
    return Arguments(scheme, order, documents, *flags, numbers, transport)


def read_number(value: Any, name: str) -> float:
    """Of Python, NumPy or a tensor that requires no gradient."""
    value = constant(value, name)
    try:
        return real(value, name)
    except TypeError:
        raise InvalidError(f"{name} is of type {type(value).__name__}; it must be a number") from None


def read_integer(value: Any, name: str) -> int:
    """Of Python or NumPy."""
    try:
        return integer(value, name)
    except TypeError:
        raise InvalidError(f"{name} is of type {type(value).__name__}; it must be an integer") from None


def read_window(window_size: Any) -> tuple[int, int]:
    try:
        left, right = (
            (-1, -1) if window_size is None else (-1 if size is None else integer(size, "window_size") for size in window_size)
        )
    except (TypeError, ValueError):
        left = right = -2
    if min(left, right) < -1:
        raise InvalidError(f"window_size is {window_size!r}; it must be a pair of keys to the left and right, -1 for all")
    return left, right


def in_autocast(x: Any, name: str) -> Tensor:
    """The tensor in autocast's type, as attention casts it."""
    if not isinstance(x, Tensor):
        raise InvalidError(f"{name} must be a tensor, not {type(x).__name__}")
    if x.is_meta:
        raise InvalidError(f"{name} is on the device meta; it must have data, on a CPU or a GPU")
    if torch._C._are_functorch_transforms_active() or tangent_of(x) is not None:
        raise UnsupportedError(ONCE.format("torch.func and forward-mode AD cannot be used"))
    if hasattr(x, "to_local"):
        raise InvalidError(f"{name} is a {type(x).__name__}; it must be a plain tensor, this rank's shard: {name}.to_local()")
    device = "cuda" if x.is_cuda else "cpu"
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64 or not x.is_floating_point():
        return x
    return x.to(torch.get_autocast_dtype(device))


def check_tensors(
    q: Tensor, k: Tensor, v: Tensor, alibi_slopes: Tensor | None, learnable_sink: Tensor | None, given: Arguments,
    axes: tuple[Axis, ...],
) -> None:  # fmt: skip
    for name, x in (("alibi_slopes", alibi_slopes), ("learnable_sink", learnable_sink)):
        if x is not None and not isinstance(x, Tensor):
            raise InvalidError(f"{name} must be a tensor, not {type(x).__name__}")
    check_shards(q, k, v, given, axes, alibi_slopes)
    if alibi_slopes is not None and alibi_slopes.requires_grad:
        raise UnsupportedError("alibi_slopes requires a gradient, and there is none for it; pass alibi_slopes.detach()")
    for name, heads in (("alibi_slopes", alibi_slopes), ("learnable_sink", learnable_sink)):
        if heads is not None and heads.shape[-1] != q.shape[-2]:
            raise InvalidError(f"{name} has shape {tuple(heads.shape)}; its last size must be the {q.shape[-2]} heads of q")
    check_call(q, k, v, alibi_slopes, learnable_sink, given)


def check_shards(
    q: Tensor, k: Tensor, v: Tensor, given: Arguments, axes: tuple[Axis, ...], alibi_slopes: Tensor | None
) -> tuple[Sizes, str, str, Ranks]:
    """Refuse shapes that the scheme cannot divide, and options that the device does not support. Returns the sizes, the scheme,
    the reason for the scheme, and its ranks.
    """
    check_shapes(q, k, v, packed=given.cu_seqlens is not None)
    sizes = sizes_of(q, k, v, mesh_of(axes))
    check_scheme(given.scheme, sizes, given.order, given.window)
    chosen, why = chosen_scheme(q, k, v, given, axes, alibi_slopes)
    ranks = groups.ranks_of(axes, chosen)
    check_tokens(sizes, given.order, given.cu_seqlens)
    key_heads_repeated(sizes.heads_q, sizes.heads_k, ranks.heads.size, given.scheme)
    if q.is_cuda:
        check_cuda(alibi_slopes, given, ranks)
    return sizes, chosen, why, ranks


def check_call(
    q: Tensor, k: Tensor, v: Tensor, alibi_slopes: Tensor | None, learnable_sink: Tensor | None, given: Arguments
) -> None:
    """Refuse early what the library would refuse only after the first messages have been sent."""
    options = {name: value for name, value in given.numbers.items() if value is not None}
    options |= {"causal": given.causal, "window_size": given.window_size}
    heads = {"alibi_slopes": alibi_slopes, "learnable_sink": learnable_sink}
    options |= {name: shape_of(x) for name, x in heads.items() if x is not None}
    if given.cu_seqlens is not None:
        documents = dense_shape(q, (len(given.cu_seqlens),), torch.int32)
        options |= {"cu_seqlens_q": documents, "cu_seqlens_k": documents}
    results = (dense_shape(q, (*q.shape[:-1], v.shape[-1]), q.dtype), dense_shape(q, lse_shape(q), wide_type(q)))
    _core.check_attention(*(shape_of(x) for x in (q, k, v)), *results, None, **options)


def dense_shape(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> _core.TensorShape:
    """The shape of a tensor without data, on the device of `like`."""
    strides = torch.empty(shape, device="meta").stride()
    return _core.TensorShape(shape, strides, str(dtype).removeprefix("torch."), like.device.type)


def check_cuda(alibi_slopes: Tensor | None, given: Arguments, ranks: Ranks) -> None:
    """Refuse early what the CUDA kernels would refuse only after the first messages have been sent."""
    if alibi_slopes is not None and ranks.ring.size > 1 and given.order != "contiguous":
        raise UnsupportedError(
            "alibi_slopes is given and the tokens of a rank are not neighbours, which the CUDA kernels do not know: on GPUs use "
            "order='contiguous', or scheme='heads' with a group of one dimension"
        )


def described(
    q: Tensor, k: Tensor, v: Tensor, alibi_slopes: Tensor | None, learnable_sink: Tensor | None, given: Arguments
) -> dict[str, str]:
    """The values that must be the same on all ranks."""
    tensors = {"q": q, "k": k, "v": v, "alibi_slopes": alibi_slopes, "learnable_sink": learnable_sink}
    made = {name: "None" if x is None else text_of(x) for name, x in tensors.items()}
    names = ("scheme", "order", "cu_seqlens", "causal", "window_size", "deterministic", "transport")
    made |= {name: repr(getattr(given, name)) for name in names}
    made |= {name: repr(value) for name, value in given.numbers.items()}
    return made | {"requires_grad": repr(needs_gradients(q, k, v, learnable_sink))}


def needs_gradients(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and requires_gradient(tensors)


def mesh_of(axes: tuple[Axis, ...]) -> tuple[int, ...]:
    return tuple(axis.size for axis in axes)


def chosen_scheme(
    q: Tensor, k: Tensor, v: Tensor, given: Arguments, axes: tuple[Axis, ...], alibi_slopes: Tensor | None
) -> tuple[str, str]:
    if given.scheme != "auto":
        return given.scheme, "requested"
    sizes = sizes_of(q, k, v, mesh_of(axes))
    options = given.numbers | {"alibi_slopes": alibi_slopes}
    in_parts = serves(q, given.cu_seqlens is not None, given.window, given.causal, options)
    if q.is_cuda and not in_parts and len(axes) == 1 and axes[0].size > 1 and can_share_heads(sizes):
        return "heads", "a ring needs kernels that know positions, which are slower on GPUs than those of whole sequences"
    copied_forward = q.is_cuda and given.transport != "messages" and not needs_gradients(q, k, v)
    return choose(sizes, given.order, given.window, copied_forward)


def explain_context_parallel(
    q: Tensor, k: Tensor, v: Tensor, *, group: Any = None, mesh: Any = None, scheme: str = "auto", order: str = "zigzag",
    cu_seqlens: Any = None, causal: bool = False, window_size: Any = (-1, -1), alibi_slopes: Tensor | None = None,
    dropout_p: float = 0.0, transport: str = "auto",
) -> str:  # fmt: skip
    """Explain which scheme context_parallel_attention uses for these shards and options, why, how many bytes a rank sends, and
    the transport of keys. It matters whether q, k or v requires a gradient; other options do not affect the choice. Sends
    nothing: before the first call of a group, the text names the transport that this rank expects.
    """
    axes = groups.groups_of(group, mesh)
    scores = dict.fromkeys(SCORE_NUMBERS)
    given = read_arguments(scheme, order, cu_seqlens, causal, window_size, scores, dropout_p, seed=0, transport=transport)
    sizes, chosen, why, ranks = check_shards(q, k, v, given, axes, alibi_slopes)
    carried = symmetric.described(ranks.ring, q.device, transport) if ranks.ring.size > 1 else None
    return explanation(chosen, why, sizes, order, carried)


@dataclass(frozen=True)
class Plan:
    """Everything that is decided before the first message."""

    ranks: Ranks
    layout: Layout
    heads: HeadExchange
    repeat: int
    gathered: bool
    window: tuple[int, int]
    options: dict[str, Any]
    memory: Memory | None = None

    @property
    def token_dim(self) -> int:
        return 0 if self.layout.cu_seqlens is not None else 1

    def to_heads(self, x: Tensor, repeat: int = 1) -> Tensor:
        return self.heads.to_heads(x, self.token_dim, self.token_dim + 1, repeat)

    def to_tokens(self, x: Tensor, repeat: int = 1) -> Tensor:
        return self.heads.to_tokens(x, self.token_dim, self.token_dim + 1, repeat)

    def lse_to_heads(self, x: Tensor) -> Tensor:
        return self.heads.to_heads(x, self.token_dim + 1, self.token_dim)

    def lse_to_tokens(self, x: Tensor) -> Tensor:
        return self.heads.to_tokens(x, self.token_dim + 1, self.token_dim)

    def schedule(self, sink: Tensor | None) -> Schedule:
        share = None if sink is None else self.heads.share(sink)
        return Schedule(self.ranks, self.layout, self.window, self.gathered, self.options, share, self.memory)


def make_plan(q: Tensor, k: Tensor, v: Tensor, given: Arguments, axes: tuple[Axis, ...], alibi_slopes: Tensor | None) -> Plan:
    scheme = chosen_scheme(q, k, v, given, axes, alibi_slopes)[0]
    ranks = groups.ranks_of(axes, scheme)
    layout = Layout(given.order, q.shape[-3] * ranks.size, ranks.size, given.cu_seqlens)
    members = ranks.members(ranks.ring.rank)
    heads = HeadExchange(ranks.heads, chunks_by_position(given.order, members, ranks.size))
    share = q.shape[-2] // ranks.heads.size
    options = {name: value for name, value in given.numbers.items() if value is not None}
    options |= {"causal": given.causal, "window_size": given.window_size, "deterministic": given.deterministic}
    if given.numbers["dropout_p"]:
        options |= {"head_begin": ranks.heads.rank * share, "heads_total": q.shape[-2]}
    if alibi_slopes is not None:
        options["alibi_slopes"] = heads.share(alibi_slopes.detach())
    repeat = key_heads_repeated(q.shape[-2], k.shape[-2], ranks.heads.size)
    return Plan(ranks, layout, heads, repeat, scheme == "all_gather", given.window, options)


class ContextParallel(torch.autograd.Function):
    """(plan, q, k, v, learnable_sink) -> (out, lse). One level of differentiation."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        inner_q, inner_k, inner_v = plan.to_heads(q), plan.to_heads(k, plan.repeat), plan.to_heads(v, plan.repeat)
        out, lse = plan.schedule(sink).forward(inner_q, inner_k, inner_v)
        ctx.plan = plan
        ctx.save_for_backward(inner_q, inner_k, inner_v, out, lse, sink)
        ctx.set_materialize_grads(False)
        out, lse = plan.to_tokens(out), plan.lse_to_tokens(lse)
        ctx.shapes = out.shape, lse.shape
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise UnsupportedError(ONCE.format("create_graph=True cannot be given"))
        plan: Plan = ctx.plan
        q, k, v, out, lse, sink = ctx.saved_tensors
        # All ranks must send the same gradients: none may omit a gradient that another rank computes.
        dout = plan.to_heads(torch.zeros(ctx.shapes[0], dtype=out.dtype, device=out.device) if dout is None else dout)
        if dlse is not None or plan.ranks.heads.size > 1:
            dlse = plan.lse_to_heads(torch.zeros(ctx.shapes[1], dtype=lse.dtype, device=lse.device) if dlse is None else dlse)
        schedule = plan.schedule(sink)
        dsink = None if sink is None or not ctx.needs_input_grad[4] else torch.zeros_like(schedule.sink)
        dout = dout if dout.stride(-1) == 1 else dout.contiguous()
        dq, dk, dv = schedule.backward(dout, q, k, v, out, lse, dlse, dsink)
        whole = None
        if dsink is not None:
            whole = torch.zeros_like(sink)
            share = dsink.shape[0]
            whole[plan.ranks.heads.rank * share : (plan.ranks.heads.rank + 1) * share] = dsink
        return None, plan.to_tokens(dq), plan.to_tokens(dk, plan.repeat), plan.to_tokens(dv, plan.repeat), whole


# -- shards of tensors


def shard(x: Tensor, group: Any = None, *, mesh: Any = None, dim: int = 1, order: str = "zigzag") -> Tensor:
    """This rank's part of a tensor that has all tokens along `dim`: its shard for context_parallel_attention with this order."""
    ranks = _ring(group, mesh)
    return layouts.take_shard(x, dim, order, ranks.shard, ranks.size)  # type: ignore[no-any-return]


def unshard(x: Tensor, group: Any = None, *, mesh: Any = None, dim: int = 1, order: str = "zigzag") -> Tensor:
    """The inverse of `shard`: all tokens, from the parts of all ranks. Not differentiable."""
    ranks = _ring(group, mesh)
    columns = groups.gather(ranks.heads, x.detach())
    shards = [part for column in groups.gather(ranks.ring, torch.stack(columns)) for part in column]
    return layouts.join_shards(shards, dim, order)  # type: ignore[no-any-return]


def positions(tokens: int, group: Any = None, *, mesh: Any = None, order: str = "zigzag") -> Tensor:
    """The numbers (int64) of this rank's tokens among all `tokens`, for rotary embedding and labels."""
    ranks = _ring(group, mesh)
    layouts.check_order(order)
    layouts.check_tokens(integer(tokens, "tokens"), order, ranks.size)
    return torch.from_numpy(layouts.tokens_of(order, tokens, ranks.shard, ranks.size).copy())


def _ring(group: Any, mesh: Any) -> Ranks:
    return groups.ranks_of(groups.groups_of(group, mesh), "ring")
