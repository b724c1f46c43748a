"""Refusals of a single tensor, whatever the operation."""

import abi
from bad_cases import (
    ALL3,
    BACKWARD,
    BF16,
    BOTH,
    FORWARD,
    Bad,
    aliasing,
    both,
    floats,
    instead,
    ints,
    null,
    on_cuda,
    setting,
    sizing,
    striding,
    with_options,
    with_tensor,
    without,
)

# fmt: off
CASES = [
    # Missing.
    *(Bad(f"{n}-null", BOTH, without(n), n, "is required", "NULL") for n in "qkv"),
    Bad("out-null", ALL3, without("out"), "out", "is required", "NULL"),
    *(Bad(f"{n}-null", BACKWARD, without(n), n, "is required", "NULL") for n in ("dout", "lse", "dq", "dk", "dv")),
    *(Bad(f"{n}-null", ("decode",), without(n), n, "is required", "NULL") for n in ("q", "k_cache", "v_cache")),
    # Kind.
    Bad("dtype-unknown", ALL3, setting("q", dtype=11), "q", "dtype must be a flash_dtype_t", "11"),
    Bad("dtype-none", ALL3, setting("out", dtype=0), "out", "dtype must be a flash_dtype_t", "0"),
    Bad("dtype-negative", FORWARD, setting("lse", dtype=-1), "lse", "dtype must be a flash_dtype_t", "-1"),
    Bad("device-unknown", ALL3, setting("q", device_type=2), "q", "device_type must be a flash_device_type_t", "2"),
    Bad("device-id-cpu", ALL3, setting("q", device_id=1), "q", "device_id must be 0 on the CPU", "1"),
    Bad("device-id-negative", ALL3, setting("q", device_type=1, device_id=-1), "q", "not negative on CUDA", "-1"),
    Bad("ndim-5", ALL3, setting("q", ndim=5), "q", "ndim must be 0 to 4", "5"),
    Bad("ndim-negative", ALL3, setting("q", ndim=-1), "q", "ndim must be 0 to 4", "-1"),
    # Sizes and strides.
    Bad("size-negative", ALL3, sizing("q", 1, -5), "q", "no size may be negative", "shape (2, -5, 4, 8)"),
    Bad("size-huge", BOTH, sizing("k", 1, 1 << 40), "k", "each size must be below 2^40", "shape (2, 1099511627776, 2, 8)"),
    Bad(
        "bytes-overflow", BOTH, both(sizing("k", 0, 1 << 31), sizing("k", 1, 1 << 31)),
        "k", "its size in bytes must be below 2^63", "shape (2147483648, 2147483648, 2, 8)",
    ),
    Bad(
        "bytes-overflow-empty", BOTH, both(sizing("q", 0, 0), sizing("q", 1, 1 << 39), sizing("q", 2, 1 << 39)),
        "q", "its size in bytes must be below 2^63", "shape (0, 549755813888, 549755813888, 8)",
    ),
    Bad("stride-negative", BOTH, striding("k", 0, -112), "k", "no stride may be negative", "strides (-112, 16, 8, 1)"),
    Bad(
        "stride-overflow", BOTH, striding("k", 0, 1 << 62),
        "k", "its extent in bytes must be below 2^63", "strides (4611686018427387904, 16, 8, 1)",
    ),
    Bad(
        "stride-overflow-sum", BOTH, both(striding("k", 0, (1 << 63) - 1), striding("k", 1, (1 << 60))),
        "k", "its extent in bytes must be below 2^63", "strides (9223372036854775807, 1152921504606846976, 8, 1)",
    ),
    *(
        Bad(f"last-stride-{n}", f, striding(n, 3, 2), n, "the last dimension must be contiguous (stride 1)", "stride 2")
        for n, f in (("q", ALL3), ("k", BOTH), ("v", BOTH), ("out", ALL3), ("dout", BACKWARD), ("dq", BACKWARD), ("dk", BACKWARD),
                     ("dv", BACKWARD), ("k_cache", ("decode",)), ("v_cache", ("decode",)), ("k_new", ("decode",)),
                     ("v_new", ("decode",)))
    ),
    *(
        Bad(
            f"last-stride-{n}", ("decode",), striding(n, 1, 2),
            n, "the last dimension must be contiguous (stride 1)", "stride 2",
        )
        for n in ("rotary_cos", "rotary_sin")
    ),
    Bad("last-stride-0", BOTH, striding("v", 3, 0), "v", "the last dimension must be contiguous (stride 1)", "stride 0"),
    Bad("out-repeats", FORWARD, striding("out", 1, 0), "out", "an output may not repeat (stride 0)", "strides (120, 0, 6, 1)"),
    Bad("lse-repeats", FORWARD, striding("lse", 0, 0), "lse", "an output may not repeat (stride 0)", "strides (0, 5, 1)"),
    *(
        Bad(f"{n}-repeats", BACKWARD, striding(n, 0, 0), n, "an output may not repeat (stride 0)", v)
        for n, v in (("dq", "strides (0, 32, 8, 1)"), ("dk", "strides (0, 16, 8, 1)"), ("dv", "strides (0, 12, 6, 1)"))
    ),
    Bad(
        "cache-repeats", ("decode",), striding("k_cache", 0, 0),
        "k_cache", "an output may not repeat (stride 0)", "strides (0, 16, 8, 1)",
    ),
    # Data.
    Bad(
        "end-of-memory", FORWARD, setting("k", data=(1 << 64) - 64),
        "k", "it must end inside the address space", "bytes 896", data=True,
    ),
    *(
        Bad(
            f"data-null-{n}", f, setting(n, data=None),
            n, "data may be NULL only if the tensor has no elements", "shape (2, 5, 4, 8)" if n == "q" else "shape (2, 5, 4, 6)",
            data=True,
        )
        for n, f in (("q", ALL3), ("out", ALL3))
    ),
    Bad(
        "misaligned", BOTH, aliasing("k", "k", 2),
        "k", "data must be aligned to its element size", "address modulo 4 is 2", data=True,
    ),
    Bad(
        "misaligned-bf16", BOTH, aliasing("k", "k", 1),
        "k", "data must be aligned to its element size", "address modulo 2 is 1", data=True, base="bf16",
    ),
    # Overlap.
    *(
        Bad(
            f"overlap-{a}-{b}", f, aliasing(a, b, at),
            a, "an output must not overlap another tensor", f"it overlaps {b}", data=True,
        )
        for a, b, f, at in (
            ("out", "q", FORWARD, 0), ("out", "k", FORWARD, 16), ("out", "v", FORWARD, 0), ("lse", "q", FORWARD, 0),
            ("out", "lse", FORWARD, 8), ("dq", "q", BACKWARD, 0), ("dk", "k", BACKWARD, 64), ("dv", "v", BACKWARD, 0),
            ("dq", "dout", BACKWARD, 4), ("dq", "dk", BACKWARD, 0), ("dk", "dv", BACKWARD, 0), ("dv", "out", BACKWARD, 0),
            ("dq", "lse", BACKWARD, 0), ("k_cache", "q", ("decode",), 0), ("v_cache", "k_new", ("decode",), 0),
            ("k_cache", "v_cache", ("decode",), 0), ("out", "q", ("decode",), 0), ("out", "cache_seqlens", ("decode",), 0),
        )
    ),
    Bad(
        "overlap-length", FORWARD, both(with_tensor("cu_seqlens_q", lambda: ints(0, 2, 5)), aliasing("lse", "cu_seqlens_q")),
        "lse", "an output must not overlap another tensor", "it overlaps cu_seqlens_q", base="packed", data=True,
    ),
    Bad(
        "overlap-interleaved", BACKWARD, both(aliasing("dk", "dq", 4), striding("dk", 1, 32), striding("dk", 0, 160)),
        "dq", "an output must not overlap another tensor", "it overlaps dk", data=True,
    ),
    Bad(
        "overlap-self", FORWARD, striding("out", 1, 12),
        "out", "an output must not overlap itself", "strides in bytes (480, 48, 24, 4) of sizes (2, 5, 4, 6)", data=True,
    ),
    # Devices.
    Bad("device-k", BOTH, on_cuda("k"), "k", "must be on the device of the first tensor, cpu", "it is on cuda:0"),
    Bad("device-v", BOTH, on_cuda("v"), "v", "must be on the device of the first tensor, cpu", "it is on cuda:0"),
    Bad("device-out", ALL3, on_cuda("out"), "out", "must be on the device of the first tensor, cpu", "it is on cuda:0"),
    Bad("device-q", ALL3, on_cuda("q"), "", "must be on the device of the first tensor, cuda:0", "it is on cpu"),
    Bad("device-lse", ALL3, on_cuda("lse"), "lse", "must be on the device of the first tensor, cpu", "it is on cuda:0"),
    *(
        Bad(f"device-{n}", BACKWARD, on_cuda(n), n, "must be on the device", "it is on cuda:0")
        for n in ("dout", "dq", "dk", "dv")
    ),
    # Types.
    Bad("q-int", ALL3, setting("q", dtype=abi.INT32), "q", "dtype must be float16, bfloat16, float32 or float64", "it is int32"),
    Bad("k-dtype", BOTH, instead("k", lambda: floats(2, 7, 2, 8, dtype=BF16)), "k", "dtype must be float32", "it is bfloat16"),
    Bad("v-dtype", BOTH, setting("v", dtype=abi.FLOAT16), "v", "dtype must be float32", "it is float16"),
    Bad("out-dtype", ALL3, setting("out", dtype=abi.BFLOAT16), "out", "dtype must be float32", "it is bfloat16"),
    Bad("lse-dtype", ALL3, setting("lse", dtype=abi.BFLOAT16), "lse", "dtype must be float32", "it is bfloat16"),
    Bad(
        "lse-dtype-bf16", BOTH, setting("lse", dtype=abi.BFLOAT16),
        "lse", "dtype must be float32", "it is bfloat16", base="bf16",
    ),
    Bad("lse-dtype-f64", BOTH, setting("lse", dtype=abi.FLOAT32), "lse", "dtype must be float64", "it is float32", base="f64"),
    *(
        Bad(f"{n}-dtype", BACKWARD, setting(n, dtype=abi.FLOAT16), n, "dtype must be float32", "it is float16")
        for n in ("dout", "dq", "dk", "dv")
    ),
    # The queries' own arguments.
    Bad("bytes-null", ALL3, null("bytes"), "bytes", "is required", "NULL"),
    Bad("text-null", ALL3, null("text"), "text", "may be NULL only if capacity is 0", "capacity 4096"),
    # The workspace.
    Bad(
        "backend-name", ALL3, with_options(backend=b"gpu"),
        "backend", "must be the name of a backend, if it is given", '"gpu", the names are cpu sm80 sm90',
    ),
]
