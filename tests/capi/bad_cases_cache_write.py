"""Refusals of flash_cache_write."""

import abi
import numpy as np
from bad_cases import (
    BF16,
    Bad,
    D,
    both,
    floats,
    instead,
    ints,
    on_cuda,
    sizing,
    striding,
    with_options,
    with_tensor,
    without,
)

WRITE = ("cache_write",)


def slots(*values):
    return instead("slots", lambda: np.array(values, np.int64))


# fmt: off
CASES = [
    Bad("flags", WRITE, with_options(flags=abi.CAUSAL), "flags", "an unknown bit", "unknown bits 1"),
    Bad("reserved", WRITE, with_options(reserved=3), "reserved", "must be 0", "3"),
    Bad("threads", WRITE, with_options(num_threads=-2), "num_threads", "must be 0 (the default) to 4096", "-2"),
    Bad(
        "backend", WRITE, with_options(backend=b"sm70"),
        "backend", "must be the name of a backend, if it is given", '"sm70", the names are cpu sm80 sm90',
    ),
    Bad(
        "kernel", WRITE, with_options(kernel=b"decode_cpu_scalar"),
        "kernel", "must be one of the kernels for cache_write on the CPU in this build: cache_write_cpu",
        '"decode_cpu_scalar"', abi.UNSUPPORTED,
    ),
    *(Bad(f"null-{name}", WRITE, without(name), name, "is required", "NULL") for name in ("k_new", "k_cache", "slots")),
    Bad("v-new-missing", WRITE, without("v_new"), "v_new", "v_new and v_cache are given together or not at all", "it is missing"),
    Bad(
        "v-cache-missing", WRITE, without("v_cache"),
        "v_cache", "v_new and v_cache are given together or not at all", "it is missing",
    ),
    Bad(
        "rope-missing", WRITE, without("k_rope_new"),
        "k_rope_new", "k_rope_cache and k_rope_new are given together or not at all", "it is missing", base="rope",
    ),
    Bad(
        "rotary-half", WRITE, without("rotary_sin"),
        "rotary_sin", "rotary_cos and rotary_sin are given together or not at all", "it is missing",
    ),
    Bad(
        "positions-alone", WRITE, both(without("rotary_cos"), without("rotary_sin")),
        "positions", "needs rotary_cos and rotary_sin: only the rotary embedding uses the positions of rows", "there are none",
    ),
    Bad("positions-missing", WRITE, without("positions"), "positions", "is required with rotary_cos and rotary_sin", "NULL"),
    Bad(
        "k-new-type", WRITE, instead("k_new", lambda: np.ones((4, 2, D), np.int32)),
        "k_new", "dtype must be float16, bfloat16, float32 or float64", "it is int32",
    ),
    Bad("k-new-ndim", WRITE, instead("k_new", lambda: floats(4, 2)), "k_new", "must have 3 dimensions", "shape (4, 2)"),
    Bad("k-new-heads", WRITE, sizing("k_new", 1, 1), "k_new", "shape must be (rows, heads_k, channels of k_cache) = (4, 2, 8)",
        "it is (4, 1, 8)"),
    Bad("v-new-rows", WRITE, sizing("v_new", 0, 3), "v_new", "shape must be that of k_new", "it is (3, 2, 6)"),
    Bad("v-new-type", WRITE, instead("v_new", lambda: floats(4, 2, 6, dtype=BF16)), "v_new", "dtype must be float32",
        "it is bfloat16"),
    Bad("v-new-device", WRITE, on_cuda("v_new"), "v_new", "must be on the device", "it is on cuda:0"),
    Bad("k-cache-ndim", WRITE, instead("k_cache", lambda: floats(8, 4, 2)), "k_cache", "must have 4 dimensions",
        "shape (8, 4, 2)"),
    Bad("k-cache-device", WRITE, on_cuda("k_cache"), "k_cache", "must be on the device", "it is on cuda:0"),
    Bad("v-cache-device", WRITE, on_cuda("v_cache"), "v_cache", "must be on the device", "it is on cuda:0"),
    Bad("v-cache-ndim", WRITE, instead("v_cache", lambda: floats(8, 4, 2)), "v_cache", "must have 4 dimensions",
        "shape (8, 4, 2)"),
    Bad("v-cache-pages", WRITE, sizing("v_cache", 0, 7), "v_cache", "shape must be that of k_cache, but for channels",
        "it is (7, 4, 2, 6)"),
    Bad(
        "cache-type", WRITE, instead("k_cache", lambda: floats(8, 4, 2, D, dtype=BF16)),
        "k_cache", "dtype must be float32, that of k_new, or float8_e4m3fn, float8_e5m2 or int8", "it is bfloat16",
    ),
    Bad(
        "cache-types-differ", WRITE, instead("v_cache", lambda: floats(8, 4, 2, 6, dtype=np.int8)),
        "v_cache", "dtype must be that of k_cache, float32", "it is int8",
    ),
    Bad("slots-type", WRITE, instead("slots", lambda: floats(4)), "slots", "dtype must be int32 or int64", "it is float32"),
    Bad("slots-shape", WRITE, sizing("slots", 0, 3), "slots", "shape must be (rows of k_new,) = (4,)", "it is (3,)"),
    Bad("slots-stride", WRITE, striding("slots", 0, 2), "slots", "must be contiguous", "strides (2,)"),
    Bad("slots-device", WRITE, on_cuda("slots"), "slots", "must be on the device", "it is on cuda:0"),
    Bad("slots-twice", WRITE, slots(7, 3, -1, 7), "slots", "two rows must not be written to the same slot",
        "rows 0 and 3, slot 7", data=True),
    Bad(
        "scale-of-sequences", WRITE, with_tensor("k_scale", lambda: floats(4, 2)),
        "k_scale", "must have 1, 3 or 4 dimensions", "shape (4, 2)",
    ),
    Bad("scale-missing", WRITE, without("v_scale"), "v_scale", "is required for an int8 cache", "NULL", base="codes"),
    Bad("scale-heads", WRITE, with_tensor("k_scale", lambda: floats(3)), "k_scale", "shape must be (1,) or (heads_k,) = (2,)",
        "it is (3,)"),
    Bad(
        "scales-of-rows", WRITE, with_tensor("k_scale", lambda: floats(8, 4, 2)),
        "k_scale", "scales of rows are computed by an append, which needs an 8-bit cache", "the cache is float32",
    ),
    Bad(
        "v-scale-alone", WRITE, both(without("v_new"), without("v_cache")),
        "v_scale", "needs v_cache", "there is none", base="codes",
    ),
    Bad("rope-device", WRITE, on_cuda("k_rope_cache"), "k_rope_cache", "must be on the device", "it is on cuda:0", base="rope"),
    Bad(
        "rope-type", WRITE, with_tensor("k_rope_cache", lambda: floats(8, 4, 2, 3, dtype=BF16)),
        "k_rope_cache", "dtype must be float32", "it is bfloat16", base="rope",
    ),
    Bad(
        "rope-channels", WRITE, sizing("k_rope_new", 2, 2),
        "k_rope_new", "shape must be that of k_new, with the channels of its cache", "it is (4, 2, 2)", base="rope",
    ),
    Bad(
        "rope-and-rotary", WRITE,
        both(*(with_tensor(name, lambda: floats(20, 2)) for name in ("rotary_cos", "rotary_sin")),
             with_tensor("positions", lambda: ints(0, 1, 2, 3))),
        "rotary_cos", "must rotate at least 2 channels and at most those of k_rope_cache", "4 of 3", base="rope",
    ),
    Bad("positions-type", WRITE, with_tensor("positions", lambda: floats(4)), "positions", "dtype must be int32",
        "it is float32"),
    Bad("positions-shape", WRITE, sizing("positions", 0, 2), "positions", "shape must be (rows of k_new,) = (4,)", "it is (2,)"),
    Bad("positions-stride", WRITE, striding("positions", 0, 2), "positions", "must be contiguous", "strides (2,)"),
    Bad("positions-device", WRITE, on_cuda("positions"), "positions", "must be on the device", "it is on cuda:0"),
    Bad(
        "position-outside", WRITE, with_tensor("positions", lambda: ints(3, 0, 20, 0)),
        "positions", "must be at least 0 and below the rows of rotary_cos", "row 2 has 20, there are 20", data=True,
    ),
    Bad(
        "rotary-none", WRITE, both(*(with_tensor(name, lambda: floats(0, 4)) for name in ("rotary_cos", "rotary_sin"))),
        "rotary_cos", "must have a row for every position", "it has none",
    ),
    Bad(
        "rotary-channels", WRITE, both(*(with_tensor(name, lambda: floats(20, 5)) for name in ("rotary_cos", "rotary_sin"))),
        "rotary_cos", "must rotate at least 2 channels and at most head_dim", "10 of 8",
    ),
    Bad(
        "overlap", WRITE, lambda case: setattr(case.get("v_cache"), "data", case.get("k_cache").data),
        "k_cache", "an output must not overlap another tensor", "it overlaps v_cache", data=True,
    ),
]
