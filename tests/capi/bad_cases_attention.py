"""Refusals of forward and backward: shapes that disagree, and the options."""

import math

import abi
import numpy as np
from bad_cases import (
    ALL3,
    BACKWARD,
    BOTH,
    FORWARD,
    HQ,
    SK,
    SQ,
    B,
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
)

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
    Bad("flag-unknown", ALL3, flagged(1 << 31), "flags", "an unknown bit", "unknown bits 2147483648"),
    Bad(
        "flag-rotary", BOTH, flagged(abi.ROTARY_INTERLEAVED),
        "flags", "one that this operation does not have", "unknown bits 32",
    ),
    Bad("flag-top-left", ("decode",), flagged(abi.TOP_LEFT), "flags", "one that this operation does not have", "unknown bits 2"),
    Bad(
        "flag-deterministic", ("decode",), flagged(abi.DETERMINISTIC),
        "flags", "this operation does not have", "unknown bits 16",
    ),
    Bad("reserved", ALL3, with_options(reserved=1), "reserved", "must be 0", "1"),
    Bad("scale-nan", ALL3, flagged(abi.SCALE, softmax_scale=NAN), "softmax_scale", "must be finite", "nan"),
    Bad("scale-inf", ALL3, flagged(abi.SCALE, softmax_scale=-INF), "softmax_scale", "must be finite", "-inf"),
    Bad("scale-no-flag", ALL3, with_options(softmax_scale=0.5), "softmax_scale", "needs FLASH_FLAG_SCALE", "0.5"),
    *(
        Bad(f"softcap-{v}", ALL3, with_options(softcap=v), "softcap", "must be 0 (off), or positive and finite", str(v))
        for v in (-1.5, NAN, INF)
    ),
    *(
        Bad(f"dropout-{v}", BOTH, with_options(dropout_p=v), "dropout_p", "must be at least 0 and below 1", f"{v:g}")
        for v in (-0.25, 1.0, NAN, INF)
    ),
    *(
        Bad(
            f"rng-state-{name}", BOTH, both(with_rng_state(), with_options(**{name: 2**64 - 1})),
            name, "must be 0 with rng_state", "18446744073709551615",
        )
        for name in ("seed", "offset")
    ),
    Bad("window-left", ALL3, flagged(abi.WINDOW, window_left=-2), "window_left", "must be -1 (unbounded) or more", "-2"),
    Bad("window-right", ALL3, flagged(abi.WINDOW, window_right=-9), "window_right", "must be -1 (unbounded) or more", "-9"),
    Bad("window-left-no-flag", ALL3, with_options(window_left=3), "window_left", "needs FLASH_FLAG_WINDOW", "3"),
    Bad("window-right-no-flag", ALL3, with_options(window_right=4), "window_right", "needs FLASH_FLAG_WINDOW", "4"),
    Bad("max-q-negative", BOTH, with_options(max_seqlen_q=-1), "max_seqlen_q", "must be positive, or 0 if not known", "-1"),
    Bad("max-k-negative", BOTH, with_options(max_seqlen_k=-7), "max_seqlen_k", "must be positive, or 0 if not known", "-7"),
    Bad("splits-negative", ALL3, with_options(num_splits=-1), "num_splits", "must be 0 (the library chooses) to 1024", "-1"),
    Bad("splits-many", ALL3, with_options(num_splits=1025), "num_splits", "must be 0 (the library chooses) to 1024", "1025"),
    Bad("threads-negative", ALL3, with_options(num_threads=-1), "num_threads", "must be 0 (the default) to 4096", "-1"),
    Bad("threads-many", ALL3, with_options(num_threads=4097), "num_threads", "must be 0 (the default) to 4096", "4097"),
    Bad("tile-q", BOTH, with_options(tile_q=513), "tile_q", "must be 0 (the library chooses) to 512", "513"),
    Bad("tile-k", BOTH, with_options(tile_k=-1), "tile_k", "must be 0 (the library chooses) to 512", "-1"),
    Bad(
        "backend-empty", ALL3, with_options(backend=b""),
        "backend", "must be the name of a backend, if it is given", '"", the names are cpu sm80 sm90',
    ),
    Bad(
        "dlse-forward", FORWARD, with_tensor("dlse", lambda: floats(B, HQ, SQ)),
        "dlse", "is for backward, not for a forward call", "given",
    ),
    Bad(
        "dbias-forward", FORWARD, with_tensor("dbias", lambda: floats(SQ, SK)),
        "dbias", "is for backward, not for a forward call", "given",
    ),
    Bad(
        "dsink-forward", FORWARD, with_tensor("dsink", lambda: floats(HQ)),
        "dsink", "is for backward, not for a forward call", "given",
    ),
]

SHAPES = [
    Bad(
        "q-ndim", BOTH, instead("q", lambda: floats(2, 5, 4)),
        "q", "must have 4 dimensions, (batch, seqlen_q, heads_q, head_dim)", "shape (2, 5, 4)",
    ),
    Bad(
        "k-ndim", BOTH, instead("k", lambda: floats(2, 7, 2)),
        "k", "must have 4 dimensions, (batch, seqlen_k, heads_k", "shape (2, 7, 2)",
    ),
    Bad(
        "v-ndim", BOTH, instead("v", lambda: floats(2, 7)),
        "v", "must have 4 dimensions, (batch, seqlen_k, heads_k", "shape (2, 7)",
    ),
    Bad("q-ndim-0", BOTH, setting("q", ndim=0), "q", "must have 4 dimensions", "shape ()"),
    Bad(
        "k-head-dim", BOTH, instead("k", lambda: floats(2, 7, 2, 9)),
        "k", "shape must be (batch, seqlen_k, heads_k, head_dim) = (2, 7, 2, 8)", "it is (2, 7, 2, 9)",
    ),
    Bad(
        "k-batch", BOTH, instead("k", lambda: floats(1, 7, 2, 8)),
        "k", "shape must be (batch, seqlen_k, heads_k, head_dim) = (2, 7, 2, 8)", "it is (1, 7, 2, 8)",
    ),
    Bad(
        "v-rows", BOTH, instead("v", lambda: floats(2, 6, 2, 6)),
        "v", "shape must be (batch, seqlen_k, heads_k, head_dim_v) = (2, 7, 2, 6)", "it is (2, 6, 2, 6)",
    ),
    Bad(
        "v-heads", BOTH, instead("v", lambda: floats(2, 7, 1, 6)),
        "v", "shape must be (batch, seqlen_k, heads_k, head_dim_v) = (2, 7, 2, 6)", "it is (2, 7, 1, 6)",
    ),
    Bad(
        "heads-multiple", BOTH, both(instead("k", lambda: floats(2, 7, 3, 8)), instead("v", lambda: floats(2, 7, 3, 6))),
        "k", "the heads of q must be a multiple of those of k", "q has 4, k has 3",
    ),
    Bad(
        "heads-zero", BOTH, both(sizing("k", 2, 0), sizing("v", 2, 0)),
        "k", "the heads of q must be a multiple of those of k", "q has 4, k has 0",
    ),
    Bad("head-dim-0", BOTH, both(sizing("q", 3, 0), sizing("k", 3, 0)), "q", "head_dim must be at least 1", "0"),
    Bad("head-dim-v-0", BOTH, sizing("v", 3, 0), "v", "head_dim_v must be at least 1", "0"),
    Bad(
        "out-shape", BOTH, sizing("out", 1, 4),
        "out", "shape must be (batch, seqlen_q, heads_q, head_dim_v) = (2, 5, 4, 6)", "it is (2, 4, 4, 6)",
    ),
    Bad(
        "out-ndim", BOTH, instead("out", lambda: floats(2, 5, 4)),
        "out", "shape must be (batch, seqlen_q, heads_q, head_dim_v) = (2, 5, 4, 6)", "it is (2, 5, 4)",
    ),
    Bad("lse-shape", BOTH, sizing("lse", 2, 4), "lse", "shape must be (batch, heads_q, seqlen_q) = (2, 4, 5)", "it is (2, 4, 4)"),
    Bad(
        "dout-shape", BACKWARD, sizing("dout", 2, 2),
        "dout", "shape must be (batch, seqlen_q, heads_q, head_dim_v) = (2, 5, 4, 6)", "it is (2, 5, 2, 6)",
    ),
    Bad("dq-shape", BACKWARD, sizing("dq", 0, 1), "dq", "shape must be that of q = (2, 5, 4, 8)", "it is (1, 5, 4, 8)"),
    Bad("dk-shape", BACKWARD, sizing("dk", 2, 1), "dk", "shape must be that of k = (2, 7, 2, 8)", "it is (2, 7, 1, 8)"),
    Bad("dv-shape", BACKWARD, sizing("dv", 1, 1), "dv", "shape must be that of v = (2, 7, 2, 6)", "it is (2, 1, 2, 6)"),
    # Packed.
    Bad(
        "packed-q-ndim", BOTH, instead("q", lambda: floats(1, 6, 4, 8)),
        "q", "must have 3 dimensions, (total_q", "shape (1, 6, 4, 8)", base="packed",
    ),
    Bad(
        "packed-k-ndim", BOTH, instead("k", lambda: floats(1, 9, 2, 8)),
        "k", "must have 3 dimensions, (total_k", "shape (1, 9, 2, 8)", base="packed",
    ),
    Bad(
        "packed-v-ndim", BOTH, instead("v", lambda: floats(9, 6)),
        "v", "must have 3 dimensions, (total_k", "shape (9, 6)", base="packed",
    ),
    Bad(
        "packed-k-shape", BOTH, instead("k", lambda: floats(9, 2, 7)),
        "k", "shape must be (total_k, heads_k, head_dim) = (9, 2, 8)", "it is (9, 2, 7)", base="packed",
    ),
    Bad(
        "packed-v-shape", BOTH, instead("v", lambda: floats(8, 2, 6)),
        "v", "shape must be (total_k, heads_k, head_dim_v) = (9, 2, 6)", "it is (8, 2, 6)", base="packed",
    ),
    Bad(
        "packed-out-shape", BOTH, sizing("out", 0, 5),
        "out", "shape must be (total_q, heads_q, head_dim_v) = (6, 4, 6)", "it is (5, 4, 6)", base="packed",
    ),
    Bad(
        "packed-lse-shape", BOTH, setting("lse", ndim=1),
        "lse", "shape must be (heads_q, total_q) = (4, 6)", "it is (4,)", base="packed",
    ),
    Bad(
        "packed-dk-shape", BACKWARD, sizing("dk", 0, 1),
        "dk", "shape must be that of k = (9, 2, 8)", "it is (1, 2, 8)", base="packed",
    ),
    Bad(
        "packed-k-batch", BOTH, with_tensor("cu_seqlens_q", lambda: ints(0, 2, 3, 5)),
        "cu_seqlens_k", "shape must be (batch + 1,) = (4,)", "it is (3,)", base="packed",
    ),
    Bad(
        "packed-k-dense-q", BOTH, with_tensor("cu_seqlens_k", lambda: ints(0, 2)),
        "cu_seqlens_k", "shape must be (batch + 1,) = (3,)", "it is (2,)", base="packed_k",
    ),
    Bad(
        "packed-q-dense-k", BOTH, with_tensor("cu_seqlens_q", lambda: ints(0, 2)),
        "k", "shape must be (batch, seqlen_k, heads_k, head_dim) = (1, 7, 2, 8)", "it is (2, 7, 2, 8)", base="packed_q",
    ),
]

LENGTHS = [
    Bad(
        "cu-ndim", BOTH, with_tensor("cu_seqlens_q", lambda: ints(0, 2, 5).reshape(1, 3)),
        "cu_seqlens_q", "must have 1 dimension, (batch + 1,)", "shape (1, 3)", base="packed",
    ),
    Bad(
        "cu-empty", BOTH, with_tensor("cu_seqlens_q", ints),
        "cu_seqlens_q", "must have batch + 1 entries, so at least one", "it has none", base="packed",
    ),
    Bad(
        "cu-dtype", BOTH, setting("cu_seqlens_q", dtype=abi.FLOAT32),
        "cu_seqlens_q", "dtype must be int32", "it is float32", base="packed",
    ),
    Bad("cu-device", BOTH, on_cuda("cu_seqlens_k"), "cu_seqlens_k", "must be on the device", "it is on cuda:0", base="packed"),
    Bad("cu-stride", BOTH, striding("cu_seqlens_k", 0, 2), "cu_seqlens_k", "must be contiguous", "strides (2,)", base="packed"),
    Bad(
        "used-shape", BOTH, with_tensor("seqused_q", lambda: ints(1, 2, 3)),
        "seqused_q", "shape must be (batch,) = (2,)", "it is (3,)",
    ),
    Bad(
        "used-k-shape", BOTH, with_tensor("seqused_k", lambda: ints(1)),
        "seqused_k", "shape must be (batch,) = (2,)", "it is (1,)",
    ),
    Bad("used-dtype", BOTH, with_tensor("seqused_k", lambda: floats(2)), "seqused_k", "dtype must be int32", "it is float32"),
    Bad(
        "cu-start", BOTH, with_tensor("cu_seqlens_q", lambda: ints(1, 2, 5)),
        "cu_seqlens_q", "must start at 0", "entry 0 is 1", base="packed", data=True,
    ),
    Bad(
        "cu-decreases", BOTH, with_tensor("cu_seqlens_k", lambda: ints(0, 5, 4)),
        "cu_seqlens_k", "must not decrease", "entries 1 and 2 are 5 and 4", base="packed", data=True,
    ),
    Bad(
        "cu-negative", BOTH, with_tensor("cu_seqlens_k", lambda: ints(0, -5, 4)),
        "cu_seqlens_k", "must not decrease", "entries 0 and 1 are 0 and -5", base="packed", data=True,
    ),
    Bad(
        "cu-end", BOTH, with_tensor("cu_seqlens_q", lambda: ints(0, 2, 7)),
        "cu_seqlens_q", "must not end past the rows of the packed tensor", "the last entry is 7, q has 6 rows", base="packed",
        data=True,
    ),
    Bad(
        "max-q", BOTH, with_options(max_seqlen_q=2),
        "max_seqlen_q", "must be at least every length", "it is 2, sequence 1 has 3", base="packed", data=True,
    ),
    Bad(
        "max-k", BOTH, with_options(max_seqlen_k=3),
        "max_seqlen_k", "must be at least every length", "it is 3, sequence 0 has 4", base="packed", data=True,
    ),
    Bad(
        "used-negative", BOTH, with_tensor("seqused_q", lambda: ints(5, -1)),
        "seqused_q", "must be at least 0 and at most the rows of its sequence", "entry 1 is -1 of 5", data=True,
    ),
    Bad(
        "used-large", BOTH, with_tensor("seqused_k", lambda: ints(8, 0)),
        "seqused_k", "must be at least 0 and at most the rows of its sequence", "entry 0 is 8 of 7", data=True,
    ),
    Bad(
        "used-large-packed", BOTH, with_tensor("seqused_q", lambda: ints(2, 4)),
        "seqused_q", "at most the rows of its sequence", "entry 1 is 4 of 3", base="packed", data=True,
    ),
]

RANDOM = [
    Bad("rng-state-length", BOTH, with_rng_state(1, 2, 3), "rng_state", "shape must be (seed, offset) = (2,)", "it is (3,)"),
    Bad(
        "rng-state-device", BOTH, both(with_rng_state(), on_cuda("rng_state")),
        "rng_state", "must be on the device", "it is on cuda:0",
    ),
    Bad(
        "rng-state-stride", BOTH, both(with_rng_state(), striding("rng_state", 0, 2)),
        "rng_state", "must be contiguous", "strides (2,)",
    ),
    Bad(
        "rng-state-dtype", BOTH, both(with_rng_state(), setting("rng_state", dtype=abi.INT32)),
        "rng_state", "dtype must be int64", "it is int32",
    ),
]

SUPPORT = [
    Bad(
        "kernel-unknown", ALL3, with_options(kernel=b"forward_cpu_mmx"),
        "kernel", "must be one of", '"forward_cpu_mmx"', UNSUPPORTED,
    ),
    Bad(
        "kernel-other-operation", ALL3, with_options(kernel=b"merge_cpu"),
        "kernel", "must be one of", '"merge_cpu"', UNSUPPORTED,
    ),
    Bad(
        "kernel-other-backend", FORWARD, with_options(kernel=b"forward_cpu_scalar", backend=b"sm80"),
        "kernel", "must be one of the kernels for forward on the CPU of backend sm80 in this build: none",
        '"forward_cpu_scalar"', UNSUPPORTED,
    ),
    Bad("kernel-empty", ALL3, with_options(kernel=b""), "kernel", "must be one of", '""', UNSUPPORTED),
    Bad(
        "head-dim-513", FORWARD,
        both(*(instead(n, lambda h=h: floats(2, 5 if h == 4 else 7, h, 513)) for n, h in (("q", 4), ("k", 2)))),
        "head_dim", "must be at most 512 on the CPU", "513", UNSUPPORTED,
    ),
    Bad(
        "head-dim-v-513", FORWARD, both(instead("v", lambda: floats(2, 7, 2, 513)), instead("out", lambda: floats(2, 5, 4, 513))),
        "head_dim_v", "must be at most 512 on the CPU", "513", UNSUPPORTED,
    ),
]

CASES = [*VALUES, *SHAPES, *LENGTHS, *RANDOM, *SUPPORT]
