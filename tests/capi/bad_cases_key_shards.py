"""Refusals of decode on shards of the keys."""

import abi
import numpy as np
from bad_cases import BF16, Bad, both, floats, instead, ints, sizing, with_options, with_tensor, without


def row(name, change, argument, rule, value, **more):
    return Bad(f"shard-{name}", ("decode",), change, argument, rule, value, **more)


def shard(count, index=0, keys=0):
    return with_options(shard_count=count, shard_index=index, shard_keys=keys)


NEW = both(with_tensor("k_new", lambda: floats(2, 5, 2, 8)), with_tensor("v_new", lambda: floats(2, 5, 2, 6)))

# fmt: off
CASES = [
    row("count", shard(-1), "shard_count", "must be at least 1 (0 counts as 1)", "-1"),
    row("keys", shard(2, 0, -1), "shard_keys", "must be at least 1 (0 counts as 1)", "-1"),
    row("index", shard(2, 2), "shard_index", "must be at least 0 and below shard_count", "2 of 2"),
    row("index-negative", shard(2, -1), "shard_index", "must be at least 0 and below shard_count", "-1 of 2"),
    row("index-of-one", shard(0, 1), "shard_index", "must be at least 0 and below shard_count", "1 of 1"),
    row("huge", shard(1 << 20, 0, 1 << 20), "shard_keys", "times shard_count must be below 2^40", "1048576 x 1048576"),
    row("overflow", shard(1 << 40, 0, 1 << 40), "shard_keys", "times shard_count must be below 2^40",
        "1099511627776 x 1099511627776"),
    row("capacity", shard((1 << 40) - 1), "shard_count", "times the capacity of the cache must be below 2^40",
        "1099511627775 x 12"),
    row(
        "lengths", both(shard(2), without("k_new"), without("v_new"), without("cache_seqlens"), without("cache_leftpad")),
        "cache_seqlens", "is required with shard_count", "NULL",
    ),
    row(
        "fewer-rows", shard(2), "k_new", "must have at least as many rows as q with shard_count: those of all shards", "2 of 5",
        status=abi.UNSUPPORTED,
    ),
    row(
        "fewer-packed", shard(2), "k_new", "must have at least as many rows of a sequence as q with shard_count",
        "sequence 0: 1 of 2", base="packed", data=True,
    ),
    row(
        "past", both(shard(2, 0, 4), NEW, with_tensor("cache_seqlens", lambda: ints(6, 26))),
        "cache_seqlens", "must be at least 0 and at most the capacity", "entry 1 is 26, on this shard 14, capacity 12", data=True,
    ),
    row(
        "append-past", both(shard(2, 1, 4), NEW, with_tensor("cache_seqlens", lambda: ints(6, 26))),
        "k_new", "its rows must fit into the cache after cache_seqlens", "sequence 1: 12 + 3, capacity 12",
        data=True,
    ),
    row(
        "page", both(shard(2, 0, 4), NEW, with_tensor("block_table", lambda: np.array([[0, 9, -1], [3, 4, 5]], np.int32))),
        "block_table", "a page must be at least 0 and below the number of pages", "entry (0, 1) is 9 of 8", data=True,
        base="paged",
    ),
    row(
        "out-type", instead("out", lambda: floats(2, 5, 4, 6, dtype=BF16)),
        "out", "dtype must be float32", "it is bfloat16",
    ),
    row("out-shape", both(shard(2), NEW, sizing("out", 3, 5)), "out", "shape must be (batch, seqlen_q, heads_q, head_dim_v)",
        "it is (2, 5, 4, 5)"),
]
