"""Refusals of forward and backward: shapes against each other, and the options."""

import math

import abi
import numpy as np
from bad_cases import (
    HQ,
    SK,
    SQ,
    B,
    Row,
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
)

FORWARD, BACKWARD, BOTH = ("forward",), ("backward",), ("forward", "backward")
ALL3 = ("forward", "backward", "decode")
NAN, INF = math.nan, math.inf
UNSUPPORTED = abi.UNSUPPORTED


def flags_of(case, extra):
    case.options["flags"] = case.options.get("flags", 0) | extra


def flagged(extra, **fields):
    return lambda case: (flags_of(case, extra), case.options.update(fields))


def with_rng_state(*values):
    return with_tensor("rng_state", lambda: np.array(values or (1, 2), np.int64))


# fmt: off
VALUES = [
    Row("flag-unknown", ALL3, flagged(1 << 31), "flags", "an unknown bit", "unknown bits 2147483648"),
    Row(
        "flag-rotary", BOTH, flagged(abi.ROTARY_INTERLEAVED),
        "flags", "one that this operation does not have", "unknown bits 32",
    ),
    Row("flag-top-left", ("decode",), flagged(abi.TOP_LEFT), "flags", "one that this operation does not have", "unknown bits 2"),
    Row(
        "flag-deterministic", ("decode",), flagged(abi.DETERMINISTIC),
        "flags", "this operation does not have", "unknown bits 16",
    ),
    Row("reserved", ALL3, with_options(reserved=1), "reserved", "must be 0", "1"),
    Row("scale-nan", ALL3, flagged(abi.SCALE, softmax_scale=NAN), "softmax_scale", "must be finite", "nan"),
    Row("scale-inf", ALL3, flagged(abi.SCALE, softmax_scale=-INF), "softmax_scale", "must be finite", "-inf"),
    Row("scale-no-flag", ALL3, with_options(softmax_scale=0.5), "softmax_scale", "needs FLASH_FLAG_SCALE", "0.5"),
    *(
        Row(f"softcap-{v}", ALL3, with_options(softcap=v), "softcap", "must be 0 (off), or positive and finite", str(v))
        for v in (-1.5, NAN, INF)
    ),
    *(
        Row(f"dropout-{v}", BOTH, with_options(dropout_p=v), "dropout_p", "must be at least 0 and below 1", f"{v:g}")
        for v in (-0.25, 1.0, NAN, INF)
    ),
    *(
        Row(
            f"rng-state-{name}", BOTH, both(with_rng_state(), with_options(**{name: 2**64 - 1})),
            name, "must be 0 with rng_state", "18446744073709551615",
        )
        for name in ("seed", "offset")
    ),
    Row("window-left", ALL3, flagged(abi.WINDOW, window_left=-2), "window_left", "must be -1 (unbounded) or more", "-2"),
    Row("window-right", ALL3, flagged(abi.WINDOW, window_right=-9), "window_right", "must be -1 (unbounded) or more", "-9"),
    Row("window-left-no-flag", ALL3, with_options(window_left=3), "window_left", "needs FLASH_FLAG_WINDOW", "3"),
    Row("window-right-no-flag", ALL3, with_options(window_right=4), "window_right", "needs FLASH_FLAG_WINDOW", "4"),
    Row("max-q-negative", BOTH, with_options(max_seqlen_q=-1), "max_seqlen_q", "must be positive, or 0 if not known", "-1"),
    Row("max-k-negative", BOTH, with_options(max_seqlen_k=-7), "max_seqlen_k", "must be positive, or 0 if not known", "-7"),
    Row("splits-negative", ALL3, with_options(num_splits=-1), "num_splits", "must be 0 (the library chooses) to 1024", "-1"),
    Row("splits-many", ALL3, with_options(num_splits=1025), "num_splits", "must be 0 (the library chooses) to 1024", "1025"),
    Row("threads-negative", ALL3, with_options(num_threads=-1), "num_threads", "must be 0 (the default) to 4096", "-1"),
    Row("threads-many", ALL3, with_options(num_threads=4097), "num_threads", "must be 0 (the default) to 4096", "4097"),
    Row("tile-q", BOTH, with_options(tile_q=513), "tile_q", "must be 0 (the library chooses) to 512", "513"),
    Row("tile-k", BOTH, with_options(tile_k=-1), "tile_k", "must be 0 (the library chooses) to 512", "-1"),
    Row(
        "backend-empty", ALL3, with_options(backend=b""),
        "backend", "must be the name of a backend, if it is given", '"", the names are cpu sm80 sm90',
    ),
    Row(
        "dlse-forward", FORWARD, with_tensor("dlse", lambda: floats(B, HQ, SQ)),
        "dlse", "is for backward, not for a forward call", "given",
    ),
    Row(
        "dbias-forward", FORWARD, with_tensor("dbias", lambda: floats(SQ, SK)),
        "dbias", "is for backward, not for a forward call", "given",
    ),
    Row(
        "dsink-forward", FORWARD, with_tensor("dsink", lambda: floats(HQ)),
        "dsink", "is for backward, not for a forward call", "given",
    ),
]

SHAPES = [
    Row(
        "q-ndim", BOTH, instead("q", lambda: floats(2, 5, 4)),
        "q", "must have 4 dimensions, (batch, seqlen_q, heads_q, head_dim)", "shape (2, 5, 4)",
    ),
    Row(
        "k-ndim", BOTH, instead("k", lambda: floats(2, 7, 2)),
        "k", "must have 4 dimensions, (batch, seqlen_k, heads_k", "shape (2, 7, 2)",
    ),
    Row(
        "v-ndim", BOTH, instead("v", lambda: floats(2, 7)),
        "v", "must have 4 dimensions, (batch, seqlen_k, heads_k", "shape (2, 7)",
    ),
    Row("q-ndim-0", BOTH, setting("q", ndim=0), "q", "must have 4 dimensions", "shape ()"),
    Row(
        "k-head-dim", BOTH, instead("k", lambda: floats(2, 7, 2, 9)),
        "k", "shape must be (batch, seqlen_k, heads_k, head_dim) = (2, 7, 2, 8)", "it is (2, 7, 2, 9)",
    ),
    Row(
        "k-batch", BOTH, instead("k", lambda: floats(1, 7, 2, 8)),
        "k", "shape must be (batch, seqlen_k, heads_k, head_dim) = (2, 7, 2, 8)", "it is (1, 7, 2, 8)",
    ),
    Row(
        "v-rows", BOTH, instead("v", lambda: floats(2, 6, 2, 6)),
        "v", "shape must be (batch, seqlen_k, heads_k, head_dim_v) = (2, 7, 2, 6)", "it is (2, 6, 2, 6)",
    ),
    Row(
        "v-heads", BOTH, instead("v", lambda: floats(2, 7, 1, 6)),
        "v", "shape must be (batch, seqlen_k, heads_k, head_dim_v) = (2, 7, 2, 6)", "it is (2, 7, 1, 6)",
    ),
    Row(
        "heads-multiple", BOTH, both(instead("k", lambda: floats(2, 7, 3, 8)), instead("v", lambda: floats(2, 7, 3, 6))),
        "k", "the heads of q must be a multiple of those of k", "q has 4, k has 3",
    ),
    Row(
        "heads-zero", BOTH, both(sizing("k", 2, 0), sizing("v", 2, 0)),
        "k", "the heads of q must be a multiple of those of k", "q has 4, k has 0",
    ),
    Row("head-dim-0", BOTH, both(sizing("q", 3, 0), sizing("k", 3, 0)), "q", "head_dim must be at least 1", "0"),
    Row("head-dim-v-0", BOTH, sizing("v", 3, 0), "v", "head_dim_v must be at least 1", "0"),
    Row(
        "out-shape", BOTH, sizing("out", 1, 4),
        "out", "shape must be (batch, seqlen_q, heads_q, head_dim_v) = (2, 5, 4, 6)", "it is (2, 4, 4, 6)",
    ),
    Row(
        "out-ndim", BOTH, instead("out", lambda: floats(2, 5, 4)),
        "out", "shape must be (batch, seqlen_q, heads_q, head_dim_v) = (2, 5, 4, 6)", "it is (2, 5, 4)",
    ),
    Row("lse-shape", BOTH, sizing("lse", 2, 4), "lse", "shape must be (batch, heads_q, seqlen_q) = (2, 4, 5)", "it is (2, 4, 4)"),
    Row(
        "dout-shape", BACKWARD, sizing("dout", 2, 2),
        "dout", "shape must be (batch, seqlen_q, heads_q, head_dim_v) = (2, 5, 4, 6)", "it is (2, 5, 2, 6)",
    ),
    Row("dq-shape", BACKWARD, sizing("dq", 0, 1), "dq", "shape must be that of q = (2, 5, 4, 8)", "it is (1, 5, 4, 8)"),
    Row("dk-shape", BACKWARD, sizing("dk", 2, 1), "dk", "shape must be that of k = (2, 7, 2, 8)", "it is (2, 7, 1, 8)"),
    Row("dv-shape", BACKWARD, sizing("dv", 1, 1), "dv", "shape must be that of v = (2, 7, 2, 6)", "it is (2, 1, 2, 6)"),
    # Packed.
    Row(
        "packed-q-ndim", BOTH, instead("q", lambda: floats(1, 6, 4, 8)),
        "q", "must have 3 dimensions, (total_q", "shape (1, 6, 4, 8)", base="packed",
    ),
    Row(
        "packed-k-ndim", BOTH, instead("k", lambda: floats(1, 9, 2, 8)),
        "k", "must have 3 dimensions, (total_k", "shape (1, 9, 2, 8)", base="packed",
    ),
    Row(
        "packed-v-ndim", BOTH, instead("v", lambda: floats(9, 6)),
        "v", "must have 3 dimensions, (total_k", "shape (9, 6)", base="packed",
    ),
    Row(
        "packed-k-shape", BOTH, instead("k", lambda: floats(9, 2, 7)),
        "k", "shape must be (total_k, heads_k, head_dim) = (9, 2, 8)", "it is (9, 2, 7)", base="packed",
    ),
    Row(
        "packed-v-shape", BOTH, instead("v", lambda: floats(8, 2, 6)),
        "v", "shape must be (total_k, heads_k, head_dim_v) = (9, 2, 6)", "it is (8, 2, 6)", base="packed",
    ),
    Row(
        "packed-out-shape", BOTH, sizing("out", 0, 5),
        "out", "shape must be (total_q, heads_q, head_dim_v) = (6, 4, 6)", "it is (5, 4, 6)", base="packed",
    ),
    Row(
        "packed-lse-shape", BOTH, setting("lse", ndim=1),
        "lse", "shape must be (heads_q, total_q) = (4, 6)", "it is (4,)", base="packed",
    ),
    Row(
        "packed-dk-shape", BACKWARD, sizing("dk", 0, 1),
        "dk", "shape must be that of k = (9, 2, 8)", "it is (1, 2, 8)", base="packed",
    ),
    Row(
        "packed-k-batch", BOTH, with_tensor("cu_seqlens_q", lambda: ints(0, 2, 3, 5)),
        "cu_seqlens_k", "shape must be (batch + 1,) = (4,)", "it is (3,)", base="packed",
    ),
    Row(
        "packed-k-dense-q", BOTH, with_tensor("cu_seqlens_k", lambda: ints(0, 2)),
        "cu_seqlens_k", "shape must be (batch + 1,) = (3,)", "it is (2,)", base="packed_k",
    ),
    Row(
        "packed-q-dense-k", BOTH, with_tensor("cu_seqlens_q", lambda: ints(0, 2)),
        "k", "shape must be (batch, seqlen_k, heads_k, head_dim) = (1, 7, 2, 8)", "it is (2, 7, 2, 8)", base="packed_q",
    ),
]

LENGTHS = [
    Row(
        "cu-ndim", BOTH, with_tensor("cu_seqlens_q", lambda: ints(0, 2, 5).reshape(1, 3)),
        "cu_seqlens_q", "must have 1 dimension, (batch + 1,)", "shape (1, 3)", base="packed",
    ),
    Row(
        "cu-empty", BOTH, with_tensor("cu_seqlens_q", ints),
        "cu_seqlens_q", "must have batch + 1 entries, so at least one", "it has none", base="packed",
    ),
    Row(
        "cu-dtype", BOTH, setting("cu_seqlens_q", dtype=abi.FLOAT32),
        "cu_seqlens_q", "dtype must be int32", "it is float32", base="packed",
    ),
    Row("cu-device", BOTH, on_cuda("cu_seqlens_k"), "cu_seqlens_k", "must be on the device", "it is on cuda:0", base="packed"),
    Row("cu-stride", BOTH, striding("cu_seqlens_k", 0, 2), "cu_seqlens_k", "must be contiguous", "strides (2,)", base="packed"),
    Row(
        "used-shape", BOTH, with_tensor("seqused_q", lambda: ints(1, 2, 3)),
        "seqused_q", "shape must be (batch,) = (2,)", "it is (3,)",
    ),
    Row(
        "used-k-shape", BOTH, with_tensor("seqused_k", lambda: ints(1)),
        "seqused_k", "shape must be (batch,) = (2,)", "it is (1,)",
    ),
    Row("used-dtype", BOTH, with_tensor("seqused_k", lambda: floats(2)), "seqused_k", "dtype must be int32", "it is float32"),
    Row(
        "cu-start", BOTH, with_tensor("cu_seqlens_q", lambda: ints(1, 2, 5)),
        "cu_seqlens_q", "must start at 0", "entry 0 is 1", base="packed", data=True,
    ),
    Row(
        "cu-decreases", BOTH, with_tensor("cu_seqlens_k", lambda: ints(0, 5, 4)),
        "cu_seqlens_k", "must not decrease", "entries 1 and 2 are 5 and 4", base="packed", data=True,
    ),
    Row(
        "cu-negative", BOTH, with_tensor("cu_seqlens_k", lambda: ints(0, -5, 4)),
        "cu_seqlens_k", "must not decrease", "entries 0 and 1 are 0 and -5", base="packed", data=True,
    ),
    Row(
        "cu-end", BOTH, with_tensor("cu_seqlens_q", lambda: ints(0, 2, 7)),
        "cu_seqlens_q", "must not end past the rows of the packed tensor", "the last entry is 7, q has 6 rows", base="packed",
        data=True,
    ),
    Row(
        "max-q", BOTH, with_options(max_seqlen_q=2),
        "max_seqlen_q", "must be at least every length", "it is 2, sequence 1 has 3", base="packed", data=True,
    ),
    Row(
        "max-k", BOTH, with_options(max_seqlen_k=3),
        "max_seqlen_k", "must be at least every length", "it is 3, sequence 0 has 4", base="packed", data=True,
    ),
    Row(
        "used-negative", BOTH, with_tensor("seqused_q", lambda: ints(5, -1)),
        "seqused_q", "must be at least 0 and at most the rows of its sequence", "entry 1 is -1 of 5", data=True,
    ),
    Row(
        "used-large", BOTH, with_tensor("seqused_k", lambda: ints(8, 0)),
        "seqused_k", "must be at least 0 and at most the rows of its sequence", "entry 0 is 8 of 7", data=True,
    ),
    Row(
        "used-large-packed", BOTH, with_tensor("seqused_q", lambda: ints(2, 4)),
        "seqused_q", "at most the rows of its sequence", "entry 1 is 4 of 3", base="packed", data=True,
    ),
]

RANDOM = [
    Row("rng-state-length", BOTH, with_rng_state(1, 2, 3), "rng_state", "shape must be (seed, offset) = (2,)", "it is (3,)"),
    Row(
        "rng-state-device", BOTH, both(with_rng_state(), on_cuda("rng_state")),
        "rng_state", "must be on the device", "it is on cuda:0",
    ),
    Row(
        "rng-state-stride", BOTH, both(with_rng_state(), striding("rng_state", 0, 2)),
        "rng_state", "must be contiguous", "strides (2,)",
    ),
    Row(
        "rng-state-dtype", BOTH, both(with_rng_state(), setting("rng_state", dtype=abi.INT32)),
        "rng_state", "dtype must be int64", "it is int32",
    ),
]

SUPPORT = [
    Row(
        "kernel-unknown", ALL3, with_options(kernel=b"forward_cpu_mmx"),
        "kernel", "must be one of", '"forward_cpu_mmx"', UNSUPPORTED,
    ),
    Row(
        "kernel-other-operation", ALL3, with_options(kernel=b"merge_cpu"),
        "kernel", "must be one of", '"merge_cpu"', UNSUPPORTED,
    ),
    Row(
        "kernel-other-backend", FORWARD, with_options(kernel=b"forward_cpu_scalar", backend=b"sm80"),
        "kernel", "must be one of the kernels for forward on the CPU of backend sm80 in this build: none",
        '"forward_cpu_scalar"', UNSUPPORTED,
    ),
    Row("kernel-empty", ALL3, with_options(kernel=b""), "kernel", "must be one of", '""', UNSUPPORTED),
    Row(
        "head-dim-513", FORWARD,
        both(*(instead(n, lambda h=h: floats(2, 5 if h == 4 else 7, h, 513)) for n, h in (("q", 4), ("k", 2)))),
        "head_dim", "must be at most 512 on the CPU", "513", UNSUPPORTED,
    ),
    Row(
        "head-dim-v-513", FORWARD, both(instead("v", lambda: floats(2, 7, 2, 513)), instead("out", lambda: floats(2, 5, 4, 513))),
        "head_dim_v", "must be at most 512 on the CPU", "513", UNSUPPORTED,
    ),
]

ROWS = [*VALUES, *SHAPES, *LENGTHS, *RANDOM, *SUPPORT]
