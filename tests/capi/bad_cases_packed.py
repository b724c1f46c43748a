"""Refusals of decode with packed rows."""

from bad_cases import both, floats, instead, ints, on_cuda, sizing, with_tensor, without
from bad_cases_codes import ROPE, scale, view_of_k
from bad_cases_decode import NO_APPEND, lengths, positions, row


# fmt: off
def packed(name, change, argument, rule, value, **more):
    return row(name, change, argument, rule, value, base="packed", **more)


PACKED_ROPE = both(
    ROPE, with_tensor("k_new", lambda: floats(4, 2, 5)), with_tensor("k_rope_new", lambda: floats(4, 2, 3)),
)

CASES = [
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
]
