"""Refusals of decode: caches of 8 bits, scales, values that are channels of keys, rope parts of keys."""

import abi
import ml_dtypes
import numpy as np
from bad_cases import BF16, aliasing, both, floats, instead, on_cuda, poisoned, setting, striding, with_tensor, without
from bad_cases_decode import NO_APPEND, row


# fmt: off
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
    """v_cache begins at the address of k_cache: its 6 channels are the first of the keys."""
    aliasing("v_cache", "k_cache")(case)
    case.get("v_cache").stride[:] = case.get("k_cache").stride[:]


def wide_view_of_k(case):
    """v_cache has the rows of k_cache and one channel more than q."""
    instead("v_cache", lambda: floats(3, 12, 2, 9))(case)
    instead("out", lambda: poisoned(2, 5, 4, 9))(case)
    with_tensor("v_new", lambda: floats(2, 2, 2, 9))(case)
    view_of_k(case)


def scale(name, *shape):
    return with_tensor(name, lambda: floats(*shape))


CASES = [
    row(
        "k-cache-e4m3-f64", both(in_codes(E4M3), *(instead(x, lambda s=s: floats(*s, dtype=np.float64)) for x, s in {
            "q": (2, 5, 4, 8), "out": (2, 5, 4, 6), "lse": (2, 4, 5)}.items())),
        "k_cache", "dtype must be float64", "it is float8_e4m3fn",
    ),
    row("q-int32", setting("q", dtype=abi.INT32), "q", "dtype must be float16", "it is int32"),
    *(row(f"q-{name}", setting("q", dtype=dtype), "q", "8 bits are for caches only; dtype must be float16", f"it is {name}",
          status=abi.UNSUPPORTED)
      for name, dtype in (("int8", abi.INT8), ("float8_e4m3fn", abi.E4M3), ("float8_e5m2", abi.E5M2))),
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
        "view-channels", wide_view_of_k,
        "v_cache", "as a view of k_cache must have at most the channels of the keys", "9 of 8", data=True,
    ),
    row(
        "view-channels-no-append", both(wide_view_of_k, NO_APPEND),
        "v_cache", "as a view of k_cache must have at most the channels of the keys", "9 of 8", data=True,
    ),
    row(
        "view-with-v-scale",
        both(in_codes(E4M3), view_of_k, without("v_new"), scale("k_scale", 3, 12, 2), scale("v_scale", 3, 12, 2)),
        "v_scale", "must be NULL if v_cache is a view of k_cache and an append computes k_scale", "it is given",
    ),
    row(
        "view-with-v-scale-of-rows",
        both(in_codes(E4M3), view_of_k, without("v_new"), scale("v_scale", 3, 12, 2)),
        "v_scale", "must have 1 or 2 dimensions if v_cache is a view of k_cache and keys are appended", "it has 3",
    ),
    row(
        "view-groups", both(view_of_k, NO_APPEND, scale("k_scale", 3, 12, 2, 2)),
        "v_scale", "is required if head_dim_v is not a multiple of the channels that share a scale of k_cache", "6 and 4",
        data=True,
    ),
    row(
        "view-groups-append",
        both(in_codes(E4M3), view_of_k, without("v_new"), scale("k_scale", 3, 12, 2, 2)),
        "head_dim_v", "must be a multiple of the channels that share a scale of k_cache if an append computes k_scale", "6 and 4",
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
        both(ROPE, with_tensor("rotary_cos", lambda: floats(20, 2)), with_tensor("rotary_sin", lambda: floats(20, 2))),
        "rotary_cos", "must rotate at least 2 channels and at most those of k_rope_cache", "4 of 3",
    ),
]
