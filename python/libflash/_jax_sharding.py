"""Operations on sharded arrays under jit: shards of the batch and of the heads stay on their devices.

Without these rules XLA would gather everything on every device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from ._jax_axes import operand_labels, result_labels, result_operands
from ._jax_calls import CACHE_WRITE, DECODE, Call, Shape, run, shape_of


def partitioned(call: Call, whole: bool, *operands: Any) -> list[Any]:
    """The operation with rules for sharded arrays; without rules if `whole`, because a program with them cannot be exported."""
    if whole:
        return run(call, *operands)
    shapes = tuple(shape_of(x) for x in operands)
    return partition_rule(call, shapes)(*operands)


def typed(call: Call, operands: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """The results with their shardings as a part of their types, on meshes with explicit axes (jax.set_mesh): a gradient or
    tangent has the sharding of its primal, results per row have that of q along the batch and the heads."""
    explicit = getattr(jax.sharding.get_abstract_mesh(), "explicit_axes", ())
    if not explicit:
        return list(results)
    labels, outcome = operand_labels(call, operands), result_labels(call, operands)
    given = dict(zip((*call.fixed, *call.names), operands, strict=True))
    along = {} if call.operation == CACHE_WRITE else dict(zip(labels[call.fixed.index("q")], spec_of(given["q"]), strict=True))
    like = result_operands(call, operands)

    def one(x: Any, label: str, name: str | None) -> Any:
        spec = [along.get(axis) if axis in "bh" else None for axis in label] if name is None else spec_of(given[name])
        return jax.sharding.reshard(x, PartitionSpec(*spec))

    return [one(*x) for x in zip(results, outcome, like, strict=True)]


def spec_of(x: Any) -> tuple[Any, ...]:
    """The sharding in the type of x, one entry for each axis."""
    spec = tuple(jax.typeof(x).sharding.spec)
    return (*spec, *(None,) * (x.ndim - len(spec)))


@functools.lru_cache(maxsize=1024)
def partition_rule(call: Call, shapes: tuple[Shape, ...]) -> Callable[..., list[Any]]:
    labels, outcome = operand_labels(call, shapes), result_labels(call, shapes)
    by_name = dict(zip((*call.fixed, *call.names), zip(labels, shapes, strict=True), strict=True))
    heads_q, heads_k = (
        size_of(*by_name[name], axis) for name, axis in (("q", "h"), (call.fixed[call.fixed.index("q") + 1], "k"))
    )
    free = shardable(call, by_name)

    def specs(mesh: Any, arguments: Any) -> tuple[list[Any], list[Any]]:
        """The shardings of all arguments and results, from the sharding of q."""
        q = call.fixed.index("q")
        spec = tuple(arguments[q].sharding.spec)
        spec = (*spec, *(None,) * (len(labels[q]) - len(spec)))
        axes = {axis: spec[labels[q].index(axis)] if axis in free else None for axis in "bh" if axis in labels[q]}
        head_shards = shards(mesh, axes.get("h"))
        if heads_k % head_shards:
            axes["h"] = None
        if "b" in axes and by_name["q"][1].shape[by_name["q"][0].index("b")] % shards(mesh, axes["b"]):
            axes["b"] = None
        axes["k"] = axes.get("h")

        def sharding(label: str) -> Any:
            return NamedSharding(mesh, PartitionSpec(*(axes.get(axis) for axis in label)))

        return [sharding(label) for label in labels], [sharding(label) for label in outcome]

    def partition(mesh: Any, arguments: Any, results: Any) -> tuple[Any, ...]:
        inward, outward = specs(mesh, arguments)
        return mesh, functools.partial(run, call), outward, tuple(inward)

    def infer(mesh: Any, arguments: Any, results: Any) -> Any:
        return specs(mesh, arguments)[1]

    rule = custom_partitioning(functools.partial(run, call))
    text, factors, replicated = shardy_rule(labels, outcome, heads_k, heads_q // max(heads_k, 1), free)
    rule.def_partition(
        partition=partition,
        infer_sharding_from_operands=infer,
        sharding_rule=text,
        need_replication_factors=replicated,
        **factors,
    )
    return rule  # type: ignore[no-any-return]


def shardable(call: Call, by_name: dict[str, tuple[str, Shape]]) -> set[str]:
    """Which of batch and heads may be sharded: those along which the shards are independent and need not be summed."""
    if call.options.dropout_p > 0:  # the mask depends on the batch entry and head in the whole array
        return set()
    free = {"h"} if call.packed else {"b", "h"}
    if call.operation == DECODE and "t" in by_name["k_cache"][0] and by_name["k_cache"][0][0] == "p":
        free.discard("b")  # all batch entries share the pages
    if not {"cu_seqlens_new", "tree_mask", "shared_groups"}.isdisjoint(call.names):
        free.discard("b")  # these number all batch entries, or have the rows of all
    if call.options.need_dbias:
        free -= {axis for axis in "bh" if axis.upper() in by_name["bias"][0]}
    return free


def size_of(label: str, x: Shape, axis: str) -> int:
    return int(x.shape[label.index(axis)])


def shards(mesh: Any, axes: Any) -> int:
    names = () if axes is None else axes if isinstance(axes, tuple) else (axes,)
    return math.prod(mesh.shape[name] for name in names)


def shardy_rule(
    labels: list[str], outcome: list[str], heads_k: int, group: int, free: set[str]
) -> tuple[str, dict[str, int], tuple[str, ...]]:
    """The rule for XLA's partitioner: its text, sizes of factors, and the factors that are not sharded, in the order of the text.

    Query heads are (key head, member of its group), so that a shard has a key head and all of its query heads. Every other axis
    is a separate factor.
    """
    order: dict[str, None] = {}

    def factors_of(index: int, label: str) -> str:
        made = []
        for position, axis in enumerate(label):
            if axis == "h":  # an axis must not combine a factor of size 1 with another factor
                factors = ["k", "g"] if min(heads_k, group) > 1 else ["k" if heads_k > 1 else "g"]
            else:
                factors = [axis if axis in "bk" else f"x{index}_{position}"]
            order.update(dict.fromkeys(factors))
            made.append(f"({' '.join(factors)})" if len(factors) > 1 else factors[0])
        return " ".join(made)

    sides = [[factors_of(i, label) for i, label in enumerate(labels)]]
    sides += [[factors_of(len(labels) + i, label) for i, label in enumerate(outcome)]]
    text = " -> ".join(", ".join(side) for side in sides)
    split = {"b"} & free | ({"k"} if "h" in free else set())
    sizes = {"g": group} if min(heads_k, group) > 1 else {}
    return text, sizes, tuple(factor for factor in order if factor not in split)
