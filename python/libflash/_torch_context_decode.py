"""Decode over a KV cache that is divided among the ranks of a group: each rank has some keys of every sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch._compile import _disable_dynamo as outside_of_compilers

from ._errors import InvalidError
from ._torch_context_check import agree, text_of
from ._torch_context_group import Axis, gather, groups_of

Tensor = torch.Tensor
NOT_HERE = ("out", "lse", "shard")
OWN = ("block_table", "k_scale", "v_scale", "k_rope_cache")  # different on each rank, as the caches are
MOST_NUMBERS = 4096  # the largest array whose contents the ranks compare


@outside_of_compilers
def context_parallel_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None = None,
    *,
    group: Any = None,
    mesh: Any = None,
    shard_keys: int = 1,
    return_lse: bool = False,
    check: bool | None = None,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """A few query rows per sequence against keys that are divided over the ranks of a group. All ranks call it together.

    Key t of a sequence is on rank (t // shard_keys) % ranks; the keys of a rank follow each other in its cache without gaps: see
    "Shards" in section 7 of libflash.h. Each rank computes with its keys; (out, lse) of all ranks are gathered, in one message to
    each rank, and merged on every rank.

    Parameters
    ----------
    q, and k, v and all other options of decode : the same on all ranks, with lengths and positions that count all keys
        cache_seqlens is required unless rows are appended. Not out, lse and shard.
    k_cache, v_cache, block_table : this rank's caches and table, which hold only its keys
    group : ProcessGroup, default the world;  mesh : DeviceMesh of one dimension
    shard_keys : number of consecutive keys that are on the same rank, for example a page
    check : compare shapes and options first, and raise the error of one rank on all ranks; default: on the CPU

    Returns
    -------
    out : as decode's, in the type of q; and lse, float32 or float64, if return_lse. The same bits on all ranks

    Raises
    ------
    As decode.
    """
    from .torch import merge

    axes = groups_of(group, mesh)
    if len(axes) != 1:
        raise InvalidError(f"mesh has {len(axes)} dimensions; decode takes a mesh of one")
    parts: list[tuple[Tensor, Tensor]] = []

    def compute() -> dict[str, str]:
        parts.append(own_part(q, k_cache, v_cache, axes[0], shard_keys, options))
        return described(q, shard_keys, options)

    if check if check is not None else not q.is_cuda:
        agree(axes, q.device, compute)
    else:
        compute()
    out, lse = parts[0]
    if axes[0].size > 1:
        made = [split(x) for x in gather(axes[0], joined(out, lse))]
        out, lse = merge([x for x, _ in made], [x for _, x in made])
    out = out.to(q.dtype)
    return (out, lse) if return_lse else out


def own_part(
    q: Tensor, k_cache: Tensor, v_cache: Tensor | None, axis: Axis, shard_keys: int, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    from .torch import decode

    for name in NOT_HERE:
        if options.get(name) is not None:
            raise InvalidError(f"{name} cannot be given to context_parallel_decode")
    shard = {"shard": (axis.size, axis.rank, shard_keys)} if axis.size > 1 else {}
    given: dict[str, Any] = {**options, **shard, "return_lse": True}
    result: Any = decode(q, k_cache, v_cache, **given)
    out, lse = result
    return out, lse


def described(q: Tensor, shard_keys: int, options: dict[str, Any]) -> dict[str, str]:
    """The values that must be the same on all ranks. Caches and tables may differ."""
    made = {"q": text_of(q), "shard_keys": repr(shard_keys)}
    return made | {name: contents_of(value) for name, value in options.items() if name not in OWN}


def contents_of(value: Any) -> str:
    """The text to compare; for lengths and positions it includes their contents."""
    if not isinstance(value, Tensor):
        return repr(value)
    if value.is_floating_point() or value.numel() > MOST_NUMBERS:
        return text_of(value)
    return f"{text_of(value)} {value.tolist()}"


def joined(out: Tensor, lse: Tensor) -> Tensor:
    """out and lse in one tensor, for one message: lse is a further channel of out."""
    return torch.cat([out, lse.transpose(-1, -2)[..., None]], -1)


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of joined()."""
    return x[..., :-1], x[..., -1].transpose(-1, -2)
