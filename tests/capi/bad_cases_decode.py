"""Refusals of decode: the cache, its block table, append, rotary embedding, splits."""

import abi
import numpy as np
from bad_cases import (
    BF16,
    Bad,
    both,
    floats,
    instead,
    ints,
    on_cuda,
    setting,
    sizing,
    striding,
    with_options,
    with_tensor,
    without,
)

DECODE = ("decode",)


def lengths(*values):
    return with_tensor("cache_seqlens", lambda: ints(*values))


def positions(count):
    return both(*(with_tensor(name, lambda: floats(count, 3)) for name in ("rotary_cos", "rotary_sin")))


def all_bf16_but(name):
    def change(case):
        for other, array in list(case.arrays.items()):
            if array.dtype == np.float32 and other not in {name, "lse"}:
                put = case.put if other in case.tensors else case.option
                put(other, array.astype(BF16))

    return change


NO_APPEND = both(without("k_new"), without("v_new"))


def row(name, change, argument, rule, value, **more):
    return Bad(name, DECODE, change, argument, rule, value, **more)


# fmt: off
SHAPES = [
    row(
        "q-ndim", instead("q", lambda: floats(2, 5, 4)),
        "q", "must have 4 dimensions, (batch, seqlen_q, heads_q, head_dim)", "shape (2, 5, 4)",
    ),
    row(
        "k-cache-ndim", instead("k_cache", lambda: floats(3, 12, 2)),
        "k_cache", "must have 4 dimensions, (batch_cache, capacity", "shape (3, 12, 2)",
    ),
    row(
        "v-cache-ndim", instead("v_cache", lambda: floats(3, 12, 2)),
        "v_cache", "must have 4 dimensions, (batch_cache, capacity", "shape (3, 12, 2)",
    ),
    row("k-cache-dtype", setting("k_cache", dtype=abi.FLOAT16), "k_cache", "dtype must be float32", "it is float16"),
    row("v-cache-device", on_cuda("v_cache"), "v_cache", "must be on the device", "it is on cuda:0"),
    row(
        "k-cache-head-dim", instead("k_cache", lambda: floats(3, 12, 2, 7)),
        "k_cache", "shape must be that of v_cache, with the head_dim of q = (3, 12, 2, 8)", "it is (3, 12, 2, 7)",
    ),
    row(
        "v-cache-rows", instead("v_cache", lambda: floats(3, 11, 2, 6)),
        "v_cache", "shape must be that of k_cache, but for head_dim_v = (3, 12, 2, 6)", "it is (3, 11, 2, 6)",
    ),
    row(
        "cache-heads", both(instead("k_cache", lambda: floats(3, 12, 3, 8)), instead("v_cache", lambda: floats(3, 12, 3, 6))),
        "k_cache", "the heads of q must be a multiple of those of k_cache", "q has 4, k_cache has 3",
    ),
    row("head-dim-0", both(sizing("q", 3, 0), sizing("k_cache", 3, 0)), "q", "head_dim must be at least 1", "0"),
    row("head-dim-v-0", sizing("v_cache", 3, 0), "v_cache", "head_dim_v must be at least 1", "0"),
    row(
        "out-shape", sizing("out", 3, 5),
        "out", "shape must be (batch, seqlen_q, heads_q, head_dim_v) = (2, 5, 4, 6)", "it is (2, 5, 4, 5)",
    ),
    row("lse-shape", sizing("lse", 0, 1), "lse", "shape must be (batch, heads_q, seqlen_q) = (2, 4, 5)", "it is (1, 4, 5)"),
    row(
        "few-entries",
        both(without("cache_batch_idx"), sizing("k_cache", 0, 1), sizing("v_cache", 0, 1)),
        "k_cache", "must have an entry for each sequence, unless cache_batch_idx is given", "batch 2, entries 1",
    ),
]

TABLES = [
    row(
        "seqlens-shape", with_tensor("cache_seqlens", lambda: ints(1, 2, 3)),
        "cache_seqlens", "shape must be (batch,) = (2,)", "it is (3,)",
    ),
    row(
        "seqlens-dtype", with_tensor("cache_seqlens", lambda: floats(2)),
        "cache_seqlens", "dtype must be int32", "it is float32",
    ),
    row(
        "batch-idx-shape", with_tensor("cache_batch_idx", lambda: ints(1)),
        "cache_batch_idx", "shape must be (batch,) = (2,)", "it is (1,)",
    ),
    row(
        "leftpad-shape", with_tensor("cache_leftpad", lambda: ints(1)),
        "cache_leftpad", "shape must be (batch,) = (2,)", "it is (1,)",
    ),
    row(
        "table-and-idx", with_tensor("cache_batch_idx", lambda: ints(0, 1)),
        "cache_batch_idx", "cannot be given together with block_table", "both are", base="paged",
    ),
    row("table-device", on_cuda("block_table"), "block_table", "must be on the device", "it is on cuda:0", base="paged"),
    row(
        "table-dtype", setting("block_table", dtype=abi.FLOAT32),
        "block_table", "dtype must be int32", "it is float32", base="paged",
    ),
    row(
        "table-ndim", with_tensor("block_table", lambda: ints(0, 1)),
        "block_table", "must have 2 dimensions, (batch, columns)", "shape (2,)", base="paged",
    ),
    row(
        "table-batch", sizing("block_table", 0, 1),
        "block_table", "shape must be (batch, columns) = (2, 3)", "it is (1, 3)", base="paged",
    ),
    row(
        "page-size-0", both(sizing("k_cache", 1, 0), sizing("v_cache", 1, 0)),
        "k_cache", "page_size must be at least 1", "0", base="paged",
    ),
    row(
        "table-huge", both(sizing("block_table", 1, 1 << 39), striding("block_table", 1, 0)),
        "block_table", "columns times page_size must be below 2^40", "549755813888 x 4", base="paged",
    ),
    row(
        "length-negative", with_tensor("cache_seqlens", lambda: ints(6, -1)),
        "cache_seqlens", "must be at least 0 and at most the capacity", "entry 1 is -1, capacity 12", data=True,
    ),
    row(
        "length-large", with_tensor("cache_seqlens", lambda: ints(13, 1)),
        "cache_seqlens", "must be at least 0 and at most the capacity", "entry 0 is 13, capacity 12", data=True,
    ),
    row(
        "length-large-paged", with_tensor("cache_seqlens", lambda: ints(1, 13)),
        "cache_seqlens", "must be at least 0 and at most the capacity", "entry 1 is 13, capacity 12", base="paged", data=True,
    ),
    row(
        "append-past", with_tensor("cache_seqlens", lambda: ints(6, 11)),
        "k_new", "its rows must fit into the cache after cache_seqlens", "sequence 1: 11 + 2, capacity 12", data=True,
    ),
    row(
        "append-past-paged", with_tensor("cache_seqlens", lambda: ints(11, 0)),
        "k_new", "its rows must fit into the cache after cache_seqlens", "sequence 0: 11 + 2, capacity 12", base="paged",
        data=True,
    ),
    row(
        "leftpad-negative", with_tensor("cache_leftpad", lambda: ints(-1, 0)),
        "cache_leftpad", "must be at least 0 and at most cache_seqlens", "entry 0 is -1 of 6", data=True,
    ),
    row(
        "leftpad-large", with_tensor("cache_leftpad", lambda: ints(0, 10)),
        "cache_leftpad", "must be at least 0 and at most cache_seqlens", "entry 1 is 10 of 9", data=True,
    ),
    row(
        "entry-negative", with_tensor("cache_batch_idx", lambda: ints(0, -1)),
        "cache_batch_idx", "must be at least 0 and below the entries of the cache", "entry 1 is -1 of 3", data=True,
    ),
    row(
        "entry-large", with_tensor("cache_batch_idx", lambda: ints(3, 0)),
        "cache_batch_idx", "must be at least 0 and below the entries of the cache", "entry 0 is 3 of 3", data=True,
    ),
    row(
        "page-negative", with_tensor("block_table", lambda: ints(0, -1, 2, 3, 4, 5).reshape(2, 3)),
        "block_table", "a page must be at least 0 and below the number of pages", "entry (0, 1) is -1 of 8", base="paged",
        data=True,
    ),
    row(
        "page-large", with_tensor("block_table", lambda: ints(0, 1, 2, 3, 4, 8).reshape(2, 3)),
        "block_table", "a page must be at least 0 and below the number of pages", "entry (1, 2) is 8 of 8", base="paged",
        data=True,
    ),
    row(
        "page-of-first-key",
        both(
            with_tensor("block_table", lambda: ints(0, 1, 2, -1, 8, 5).reshape(2, 3)),
            with_tensor("cache_leftpad", lambda: ints(0, 7)),
        ),
        "block_table", "a page must be at least 0 and below the number of pages", "entry (1, 1) is 8 of 8", base="paged",
        data=True,
    ),
    row(
        "leftpad-large-paged", with_tensor("cache_leftpad", lambda: ints(0, 10)),
        "cache_leftpad", "must be at least 0 and at most cache_seqlens", "entry 1 is 10 of 9", base="paged", data=True,
    ),
    row(
        "append-twice", both(with_tensor("cache_batch_idx", lambda: ints(1, 1)), lengths(6, 7)),
        "cache_batch_idx", "two sequences must not append to the same row", "sequences 0 and 1, entry 1, row 7", data=True,
    ),
    row(
        "append-twice-paged",
        both(with_tensor("block_table", lambda: ints(0, 1, 2, 3, 4, 1).reshape(2, 3)), lengths(6, 9)),
        "block_table", "two sequences must not append to the same row", "sequences 0 and 1, page 1, row 2", base="paged",
        data=True,
    ),
    row(
        "append-over-a-key", both(with_tensor("cache_batch_idx", lambda: ints(1, 1)), lengths(6, 2)),
        "cache_batch_idx", "an append must not overwrite a key that a sequence reads",
        "sequence 1 appends to entry 1, row 2, which sequence 0 reads", data=True,
    ),
]

APPENDED = [
    row("v-new-missing", without("v_new"), "v_new", "k_new and v_new are given together or not at all", "it is missing"),
    row("k-new-missing", without("k_new"), "k_new", "k_new and v_new are given together or not at all", "it is missing"),
    row(
        "k-new-dtype", with_tensor("k_new", lambda: floats(2, 2, 2, 8, dtype=BF16)),
        "k_new", "dtype must be float32", "it is bfloat16",
    ),
    row("v-new-device", on_cuda("v_new"), "v_new", "must be on the device", "it is on cuda:0"),
    row(
        "k-new-ndim", with_tensor("k_new", lambda: floats(2, 2, 8)),
        "k_new", "must have 4 dimensions, (batch, seqlen_new", "shape (2, 2, 8)",
    ),
    row(
        "k-new-heads", with_tensor("k_new", lambda: floats(2, 2, 1, 8)),
        "k_new", "shape must be (batch, seqlen_new, heads_k, head_dim) = (2, 2, 2, 8)", "it is (2, 2, 1, 8)",
    ),
    row(
        "v-new-rows", with_tensor("v_new", lambda: floats(2, 3, 2, 6)),
        "v_new", "shape must be (batch, seqlen_new, heads_k, head_dim_v) = (2, 2, 2, 6)", "it is (2, 3, 2, 6)",
    ),
    row(
        "new-many", both(with_tensor("k_new", lambda: floats(2, 13, 2, 8)), with_tensor("v_new", lambda: floats(2, 13, 2, 6))),
        "k_new", "must not have more rows than the cache", "13 of 12",
    ),
    row(
        "sin-missing", without("rotary_sin"),
        "rotary_sin", "rotary_cos and rotary_sin are given together or not at all", "it is missing",
    ),
    row(
        "cos-missing", without("rotary_cos"),
        "rotary_cos", "rotary_cos and rotary_sin are given together or not at all", "it is missing",
    ),
    row(
        "cos-dtype", with_tensor("rotary_cos", lambda: floats(20, 3, dtype=np.float16)),
        "rotary_cos", "dtype must be float32 or that of q, float32", "it is float16",
    ),
    row("sin-device", on_cuda("rotary_sin"), "rotary_sin", "must be on the device", "it is on cuda:0"),
    row(
        "cos-ndim", with_tensor("rotary_cos", lambda: floats(3)),
        "rotary_cos", "must have 2 dimensions, (positions, channels / 2)", "shape (3,)",
    ),
    row(
        "cos-wide", with_tensor("rotary_cos", lambda: floats(20, 5)),
        "rotary_cos", "must rotate at least 2 channels and at most head_dim", "10 of 8",
    ),
    row("cos-empty", sizing("rotary_cos", 1, 0), "rotary_cos", "must rotate at least 2 channels and at most head_dim", "0 of 8"),
    row(
        "sin-shape", with_tensor("rotary_sin", lambda: floats(20, 2)),
        "rotary_sin", "shape must be that of rotary_cos = (20, 3)", "it is (20, 2)",
    ),
    row(
        "sin-dtype",
        all_bf16_but("rotary_sin"),
        "rotary_sin", "dtype must be bfloat16", "it is float32",
    ),
    row("positions-none", positions(0), "rotary_cos", "must have a row for every position", "it has none"),
    row(
        "positions", positions(13),
        "rotary_cos", "must have a row for every position", "sequence 1 needs 14, there are 13", data=True,
    ),
    row(
        "positions-not-causal",
        both(with_options(flags=0), positions(10)),
        "rotary_cos", "must have a row for every position", "sequence 1 needs 11, there are 10", data=True,
    ),
    row(
        "positions-query-only",
        both(NO_APPEND, with_options(flags=0), positions(9)),
        "rotary_cos", "must have a row for every position", "sequence 1 needs 10, there are 9", data=True,
    ),
    row(
        "alibi-shape", with_tensor("alibi_slopes", lambda: floats(1, 4)),
        "alibi_slopes", "shape must be (heads_q,) or (batch, heads_q) = (2, 4)", "it is (1, 4)",
    ),
    row(
        "sink-shape", with_tensor("learnable_sink", lambda: floats(4, 1)),
        "learnable_sink", "shape must be (heads_q,) = (4,)", "it is (4, 1)",
    ),
    row("split-size", with_options(split_size=100), "split_size", "must be 0 (not used) or a positive multiple of 128", "100"),
    row(
        "split-size-negative", with_options(split_size=-128),
        "split_size", "must be 0 (not used) or a positive multiple of 128", "-128",
    ),
    row(
        "invariant-splits", with_options(num_splits=2, flags=abi.INVARIANT_ROWS),
        "num_splits", "must be 0 with FLASH_FLAG_INVARIANT_ROWS", "2",
    ),
    row(
        "split-size-and-count", with_options(split_size=256, num_splits=2),
        "split_size", "cannot be given together with num_splits", "256 and 2",
    ),
]

CASES = [*SHAPES, *TABLES, *APPENDED]
