"""Refusals of decode: the cache, its block table, append, rotary embedding, splits."""

import abi
import ml_dtypes
import numpy as np
from bad_cases import (
    BF16,
    Bad,
    aliasing,
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
        "split-size-and-count", with_options(split_size=256, num_splits=2),
        "split_size", "cannot be given together with num_splits", "256 and 2",
    ),
]


def in_codes(dtype):
    """Caches of 8 bits."""
    return both(*(instead(name, lambda shape=shape: np.zeros(shape, dtype)) for name, shape in CACHES.items()))


CACHES = {"k_cache": (3, 12, 2, 8), "v_cache": (3, 12, 2, 6)}
INT8, E4M3, E5M2 = np.int8, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
NO_ROTARY = both(without("rotary_cos"), without("rotary_sin"))
ROPE = both(
    NO_ROTARY,
    instead("k_cache", lambda: floats(3, 12, 2, 5)),
    with_tensor("k_new", lambda: floats(2, 2, 2, 5)),
    with_tensor("k_rope_cache", lambda: floats(3, 12, 2, 3), output=True),
    with_tensor("k_rope_new", lambda: floats(2, 2, 2, 3)),
)


def view_of_k(case):
    """v_cache is the first 6 channels of k_cache."""
    aliasing("v_cache", "k_cache")(case)
    case.get("v_cache").stride[:] = case.get("k_cache").stride[:]


def scale(name, *shape):
    return with_tensor(name, lambda: floats(*shape))


SCALED = [
    row(
        "k-cache-e4m3-f64", both(in_codes(E4M3), *(instead(x, lambda s=s: floats(*s, dtype=np.float64)) for x, s in {
            "q": (2, 5, 4, 8), "out": (2, 5, 4, 6), "lse": (2, 4, 5)}.items())),
        "k_cache", "dtype must be float64", "it is float8_e4m3fn",
    ),
    row("q-int8", setting("q", dtype=abi.INT8), "q", "dtype must be float16", "it is int8"),
    row("k-cache-device", on_cuda("k_cache"), "k_cache", "must be on the device", "it is on cuda:0"),
    row(
        "v-cache-other-codes", both(in_codes(E4M3), instead("v_cache", lambda: np.zeros((3, 12, 2, 6), E5M2))),
        "v_cache", "dtype must be that of k_cache, float8_e4m3fn", "it is float8_e5m2",
    ),
    row("k-new-codes", with_tensor("k_new", lambda: np.zeros((2, 2, 2, 8), E4M3)),
        "k_new", "dtype must be float32", "it is float8_e4m3fn"),
    row("int8-k-scale", in_codes(INT8), "k_scale", "is required for an int8 cache", "NULL"),
    row("int8-v-scale", both(in_codes(INT8), scale("k_scale", 1)), "v_scale", "is required for an int8 cache", "NULL"),
    row(
        "scale-ndim", both(in_codes(INT8), scale("k_scale")),
        "k_scale", "must have 1 to 4 dimensions", "shape ()",
    ),
    row("scale-dtype", with_tensor("k_scale", lambda: floats(2, dtype=BF16)),
        "k_scale", "dtype must be float32", "it is bfloat16"),
    row("scale-device", both(scale("v_scale", 2), on_cuda("v_scale")), "v_scale", "must be on the device", "it is on cuda:0"),
    row("scale-heads", scale("k_scale", 3), "k_scale", "shape must be (1,) or (heads_k,) = (2,)", "it is (3,)"),
    row("scale-batch", scale("v_scale", 3, 2), "v_scale", "shape must be (batch, heads_k) = (2, 2)", "it is (3, 2)"),
    row(
        "scale-rows", both(in_codes(INT8), scale("k_scale", 3, 11, 2)),
        "k_scale", "shape must be (entries or pages, rows, heads_k) = (3, 12, 2)", "it is (3, 11, 2)",
    ),
    row(
        "scale-groups-heads", both(in_codes(INT8), scale("k_scale", 3, 12, 1, 2)),
        "k_scale", "shape must be (entries or pages, rows, heads_k, groups) = (3, 12, 2, 2)", "it is (3, 12, 1, 2)",
    ),
    row(
        "scale-groups", both(in_codes(INT8), scale("k_scale", 3, 12, 2, 4), scale("v_scale", 3, 12, 2, 4)),
        "v_scale", "the number of groups must divide the channels of the cache", "4 groups of 6",
    ),
    row(
        "scale-groups-0", both(in_codes(INT8), scale("k_scale", 3, 12, 2, 0)),
        "k_scale", "the number of groups must divide the channels of the cache", "0 groups of 8",
    ),
    row(
        "scale-of-rows-without-codes", scale("k_scale", 3, 12, 2),
        "k_scale", "scales of rows are computed by an append, which needs an 8-bit cache", "the cache is float32",
    ),
    row(
        "scale-written-twice", both(in_codes(INT8), scale("k_scale", 3, 12, 2), striding("k_scale", 0, 0)),
        "k_scale", "an output may not repeat (stride 0)", "strides (0, 2, 1)",
    ),
    row(
        "scale-overlaps",
        both(in_codes(INT8), scale("k_scale", 3, 12, 2), scale("v_scale", 3, 12, 2), aliasing("v_scale", "k_scale")),
        "k_scale", "an output must not overlap another tensor", "it overlaps v_scale", data=True,
    ),
    row(
        "view-with-v-new", view_of_k,
        "k_cache", "an output must not overlap another tensor", "it overlaps v_cache", data=True,
    ),
    row(
        "view-with-v-scale",
        both(in_codes(E4M3), view_of_k, without("v_new"), scale("k_scale", 3, 12, 2), scale("v_scale", 3, 12, 2)),
        "v_scale", "must be NULL if v_cache is a view of k_cache and an append computes k_scale", "it is given",
    ),
    row(
        "view-groups", both(view_of_k, NO_APPEND, scale("k_scale", 3, 12, 2, 2)),
        "v_scale", "is required if head_dim_v is not a multiple of the channels that share a scale of k_cache", "6 and 4",
    ),
    row("rope-new-missing", both(ROPE, without("k_rope_new")),
        "k_rope_new", "k_new and k_rope_new are given together", "it is missing"),
    row("rope-k-new-missing", both(ROPE, NO_APPEND), "k_new", "k_new and k_rope_new are given together", "it is missing"),
    row(
        "rope-cache-missing", with_tensor("k_rope_new", lambda: floats(2, 2, 2, 3)),
        "k_rope_cache", "k_rope_new is appended to it", "it is missing",
    ),
    row("rope-device", both(ROPE, on_cuda("k_rope_cache")), "k_rope_cache", "must be on the device", "it is on cuda:0"),
    row("rope-dtype", both(ROPE, with_tensor("k_rope_cache", lambda: floats(3, 12, 2, 3, dtype=BF16))),
        "k_rope_cache", "dtype must be float32", "it is bfloat16"),
    row("rope-ndim", both(ROPE, with_tensor("k_rope_cache", lambda: floats(3, 12, 3))),
        "k_rope_cache", "must have 4 dimensions", "shape (3, 12, 3)"),
    row("rope-pages", both(ROPE, with_tensor("k_rope_cache", lambda: floats(2, 12, 2, 3))),
        "k_rope_cache", "shape must be that of k_cache, with the last channels of the keys = (3, 12, 2, 3)",
        "it is (2, 12, 2, 3)"),
    row("rope-empty", both(ROPE, with_tensor("k_rope_cache", lambda: floats(3, 12, 2, 0))),
        "k_rope_cache", "must have at least 1 channel and fewer than q", "0 of 8"),
    row("rope-all", both(ROPE, with_tensor("k_rope_cache", lambda: floats(3, 12, 2, 8))),
        "k_rope_cache", "must have at least 1 channel and fewer than q", "8 of 8"),
    row("rope-channels", both(ROPE, with_tensor("k_rope_cache", lambda: floats(3, 12, 2, 4))),
        "k_cache", "shape must be that of v_cache, with the channels of q that k_rope_cache lacks = (3, 12, 2, 4)",
        "it is (3, 12, 2, 5)"),
    row("rope-new-device", both(ROPE, on_cuda("k_rope_new")), "k_rope_new", "must be on the device", "it is on cuda:0"),
    row("rope-new-dtype", both(ROPE, with_tensor("k_rope_new", lambda: floats(2, 2, 2, 3, dtype=BF16))),
        "k_rope_new", "dtype must be float32", "it is bfloat16"),
    row("rope-new-shape", both(ROPE, with_tensor("k_rope_new", lambda: floats(2, 2, 2, 2))),
        "k_rope_new", "shape must be (batch, seqlen_new, heads_k, channels of k_rope_cache) = (2, 2, 2, 3)",
        "it is (2, 2, 2, 2)"),
    row("rope-k-new", both(ROPE, with_tensor("k_new", lambda: floats(2, 2, 2, 8))),
        "k_new", "shape must be (batch, seqlen_new, heads_k, channels of k_cache) = (2, 2, 2, 5)", "it is (2, 2, 2, 8)"),
    row(
        "rope-and-rotary",
        both(ROPE, with_tensor("rotary_cos", lambda: floats(20, 3)), with_tensor("rotary_sin", lambda: floats(20, 3))),
        "rotary_cos", "cannot be given together with k_rope_cache, whose keys are rotated already", "",
        status=abi.UNSUPPORTED,
    ),
]

def packed(name, change, argument, rule, value, **more):
    return row(name, change, argument, rule, value, base="packed", **more)


PACKED_ROPE = both(
    ROPE, with_tensor("k_new", lambda: floats(4, 2, 5)), with_tensor("k_rope_new", lambda: floats(4, 2, 3)),
)

PACKED = [
    packed(
        "q-ndim", instead("q", lambda: floats(1, 6, 4, 8)),
        "q", "must have 3 dimensions, (total_q, heads_q, head_dim) with cu_seqlens_q", "shape (1, 6, 4, 8)",
    ),
    packed(
        "out-shape", sizing("out", 0, 5),
        "out", "shape must be (total_q, heads_q, head_dim_v) = (6, 4, 6)", "it is (5, 4, 6)",
    ),
    packed("lse-shape", sizing("lse", 1, 5), "lse", "shape must be (heads_q, total_q) = (4, 6)", "it is (4, 5)"),
    packed(
        "cu-dtype", with_tensor("cu_seqlens_q", lambda: floats(3)),
        "cu_seqlens_q", "dtype must be int32", "it is float32",
    ),
    packed("cu-device", on_cuda("cu_seqlens_q"), "cu_seqlens_q", "must be on the device", "it is on cuda:0"),
    packed(
        "cu-ndim", with_tensor("cu_seqlens_q", lambda: ints(0, 2, 5).reshape(1, 3)),
        "cu_seqlens_q", "must have 1 dimension, (batch + 1,)", "shape (1, 3)",
    ),
    packed(
        "cu-empty", sizing("cu_seqlens_q", 0, 0),
        "cu_seqlens_q", "must have batch + 1 entries, so at least one", "it has none",
    ),
    packed(
        "cu-batch", with_tensor("cu_seqlens_q", lambda: ints(0, 2, 5, 6)),
        "cache_seqlens", "shape must be (batch,) = (3,)", "it is (2,)",
    ),
    packed(
        "cu-start", with_tensor("cu_seqlens_q", lambda: ints(1, 2, 5)),
        "cu_seqlens_q", "must start at 0", "entry 0 is 1", data=True,
    ),
    packed(
        "cu-order", with_tensor("cu_seqlens_q", lambda: ints(0, 4, 3)),
        "cu_seqlens_q", "must not decrease", "entries 1 and 2 are 4 and 3", data=True,
    ),
    packed(
        "cu-end", with_tensor("cu_seqlens_q", lambda: ints(0, 2, 7)),
        "cu_seqlens_q", "must not end past the rows of the packed tensor", "the last entry is 7, q has 6 rows", data=True,
    ),
    packed(
        "new-dtype", with_tensor("cu_seqlens_new", lambda: floats(3)),
        "cu_seqlens_new", "dtype must be int32", "it is float32",
    ),
    packed(
        "new-shape", with_tensor("cu_seqlens_new", lambda: ints(0, 1, 3, 4)),
        "cu_seqlens_new", "shape must be (batch + 1,) = (3,)", "it is (4,)",
    ),
    packed(
        "new-end", with_tensor("cu_seqlens_new", lambda: ints(0, 1, 5)),
        "cu_seqlens_new", "must not end past the rows of the packed tensor", "the last entry is 5, k_new has 4 rows", data=True,
    ),
    packed(
        "new-end-by-q", without("cu_seqlens_new"),
        "cu_seqlens_q", "must not end past the rows of the packed tensor", "the last entry is 5, k_new has 4 rows", data=True,
    ),
    packed("new-alone", NO_APPEND, "cu_seqlens_new", "needs k_new and v_new", "there are none"),
    packed(
        "k-new-ndim", with_tensor("k_new", lambda: floats(2, 2, 2, 8)),
        "k_new", "must have 3 dimensions, (total_new, heads_k, head_dim) with cu_seqlens", "shape (2, 2, 2, 8)",
    ),
    packed(
        "k-new-heads", with_tensor("k_new", lambda: floats(4, 1, 8)),
        "k_new", "shape must be (total_new, heads_k, head_dim) = (4, 2, 8)", "it is (4, 1, 8)",
    ),
    packed(
        "v-new-rows", with_tensor("v_new", lambda: floats(5, 2, 6)),
        "v_new", "shape must be (total_new, heads_k, head_dim_v) = (4, 2, 6)", "it is (5, 2, 6)",
    ),
    packed("append-past", lengths(6, 11), "k_new", "its rows must fit into the cache after cache_seqlens",
           "sequence 1: 11 + 2, capacity 12", data=True),
    packed(
        "positions", positions(11),
        "rotary_cos", "must have a row for every position", "sequence 1 needs 12, there are 11", data=True,
    ),
    packed(
        "rope-new-dense", both(PACKED_ROPE, with_tensor("k_rope_new", lambda: floats(2, 2, 2, 3))),
        "k_rope_new", "shape must be (total_new, heads_k, channels of k_rope_cache) = (4, 2, 3)", "it is (2, 2, 2, 3)",
    ),
    packed(
        "rope-new-rows", both(PACKED_ROPE, with_tensor("k_rope_new", lambda: floats(5, 2, 3))),
        "k_rope_new", "shape must be (total_new, heads_k, channels of k_rope_cache) = (4, 2, 3)", "it is (5, 2, 3)",
    ),
    packed(
        "rope-k-new", both(PACKED_ROPE, with_tensor("k_new", lambda: floats(4, 2, 8))),
        "k_new", "shape must be (total_new, heads_k, channels of k_cache) = (4, 2, 5)", "it is (4, 2, 8)",
    ),
    packed(
        "rope-new-device", both(PACKED_ROPE, on_cuda("k_rope_new")), "k_rope_new", "must be on the device", "it is on cuda:0",
    ),
    packed("scale-batch", scale("v_scale", 3, 2), "v_scale", "shape must be (batch, heads_k) = (2, 2)", "it is (3, 2)"),
    packed(
        "view-with-v-new", view_of_k,
        "k_cache", "an output must not overlap another tensor", "it overlaps v_cache", data=True,
    ),
    packed(
        "leftpad", with_tensor("cache_leftpad", lambda: ints(0, 0)),
        "cache_leftpad", "cannot be given together with packed rows", "both are", status=abi.UNSUPPORTED,
    ),
]


def tree(name, change, argument, rule, value, **more):
    return packed(f"tree-{name}", both(with_tensor("tree_mask", lambda: ints(*range(6)).reshape(6, 1)), change), argument, rule,
                  value, **more)


TREES = [
    packed(
        "positions-shape", with_tensor("q_positions", lambda: ints(1, 2, 3)),
        "q_positions", "shape must be (total_q,) = (6,)", "it is (3,)",
    ),
    row(
        "positions-shape", with_tensor("q_positions", lambda: ints(*range(10))),
        "q_positions", "shape must be (batch, seqlen_q) = (2, 5)", "it is (10,)",
    ),
    packed(
        "positions-dtype", with_tensor("q_positions", lambda: floats(6)),
        "q_positions", "dtype must be int32", "it is float32",
    ),
    packed("positions-device", both(with_tensor("q_positions", lambda: ints(*range(6))), on_cuda("q_positions")),
           "q_positions", "must be on the device", "it is on cuda:0"),
    packed(
        "positions-strided", both(with_tensor("q_positions", lambda: ints(*range(6))), striding("q_positions", 0, 0)),
        "q_positions", "must be contiguous", "strides (0,)",
    ),
    packed(
        "positions-negative", with_tensor("q_positions", lambda: ints(0, 1, 2, -3, 4, 5)),
        "q_positions", "must be at least 0", "row 1 of sequence 1 has -3", data=True,
    ),
    packed(
        "positions-past-tables", with_tensor("q_positions", lambda: ints(0, 1, 2, 20, 4, 5)),
        "rotary_cos", "must have a row for every position", "sequence 1 needs 21, there are 20", data=True,
    ),
    tree("dtype", setting("tree_mask", dtype=abi.FLOAT32), "tree_mask", "dtype must be int32", "it is float32"),
    tree("device", on_cuda("tree_mask"), "tree_mask", "must be on the device", "it is on cuda:0"),
    tree(
        "ndim", with_tensor("tree_mask", lambda: ints(*range(6))),
        "tree_mask", "must have 2 dimensions, (rows, words)", "shape (6,)",
    ),
    tree(
        "rows", sizing("tree_mask", 0, 5),
        "tree_mask", "shape must be (query rows, words) without cu_seqlens_tree = (6, 1)", "it is (5, 1)",
    ),
    tree(
        "words", sizing("tree_mask", 1, 0),
        "tree_mask", "must have a bit for each query row of a sequence", "sequence 0 has 2 rows, 0 bits", data=True,
    ),
    tree(
        "cu-shape", with_tensor("cu_seqlens_tree", lambda: ints(0, 2)),
        "cu_seqlens_tree", "shape must be (batch + 1,) = (3,)", "it is (2,)",
    ),
    tree(
        "cu-end", with_tensor("cu_seqlens_tree", lambda: ints(0, 2, 7)),
        "cu_seqlens_tree", "must not end past the rows of the packed tensor", "the last entry is 7, tree_mask has 6 rows",
        data=True,
    ),
    tree(
        "cu-rows", with_tensor("cu_seqlens_tree", lambda: ints(0, 2, 4)),
        "cu_seqlens_tree", "a sequence must have as many rows as query rows, or none", "sequence 1 has 2, q has 3", data=True,
    ),
    packed(
        "tree-cu-alone", with_tensor("cu_seqlens_tree", lambda: ints(0, 2, 5)),
        "cu_seqlens_tree", "needs tree_mask", "there is none",
    ),
    tree(
        "window", with_options(flags=abi.CAUSAL | abi.WINDOW, window_left=3, window_right=0),
        "tree_mask", "needs q_positions where a window is given", "there are none", status=abi.UNSUPPORTED,
    ),
]

CASES = [*SHAPES, *TABLES, *APPENDED, *SCALED, *PACKED, *TREES]
