"""Refusals of merge, block mask lists and information; versions of structs; devices and workspace."""

import abi
import numpy as np
from bad_cases import (
    ALL3,
    BF16,
    B,
    Bad,
    aliasing,
    both,
    build,
    floats,
    instead,
    null,
    on_cuda,
    options_of,
    query,
    setting,
    sizing,
    striding,
    with_options,
    without,
)

MERGE, COMPRESS, INFO = ("merge",), ("compress",), ("kernel_info", "device_info")


def field(**fields):
    """Plain fields of the case."""
    return lambda case: [setattr(case, name, value) for name, value in fields.items()]


# fmt: off
MERGES = [
    Bad("count-0", MERGE, field(count=0), "count", "must be at least 1", "0"),
    Bad("count-negative", MERGE, field(count=-1), "count", "must be at least 1", "-1"),
    Bad("outs-null", MERGE, null("outs"), "outs", "an array of count tensors is required", "NULL"),
    Bad("lses-null", MERGE, null("lses"), "lses", "an array of count tensors is required", "NULL"),
    Bad("flags", MERGE, with_options(flags=1), "flags", "an unknown bit", "unknown bits 1"),
    Bad("reserved", MERGE, with_options(reserved=-1), "reserved", "must be 0", "-1"),
    Bad(
        "backend", MERGE, with_options(backend=b"sm70"),
        "backend", "must be the name of a backend, if it is given", '"sm70", the names are cpu sm80 sm90',
    ),
    Bad("threads", MERGE, with_options(num_threads=-2), "num_threads", "must be 0 (the default) to 4096", "-2"),
    Bad("out-null", MERGE, without("out"), "out", "is required", "NULL"),
    Bad("part-kind", MERGE, setting("outs[1]", dtype=99), "outs[1]", "dtype must be a flash_dtype_t", "99"),
    Bad(
        "part-null", MERGE, setting("lses[1]", data=None),
        "lses[1]", "data may be NULL only if the tensor has no elements", "shape (2, 4, 5)", data=True,
    ),
    Bad(
        "part-ndim", MERGE, instead("outs[0]", lambda: floats(2, 5)),
        "outs[0]", "shape must be (batch, seqlen, heads, head_dim_v) or (total, heads, head_dim_v)", "it is (2, 5)",
    ),
    Bad("head-dim-0", MERGE, sizing("outs[0]", 3, 0), "outs[0]", "head_dim_v must be at least 1", "0"),
    Bad(
        "part-shape", MERGE, sizing("outs[1]", 1, 4),
        "outs[1]", "shape must be (batch, seqlen, heads, head_dim_v) = (2, 5, 4, 6)", "it is (2, 4, 4, 6)",
    ),
    Bad(
        "part-shape-packed", MERGE, sizing("outs[1]", 0, 8),
        "outs[1]", "shape must be (total, heads, head_dim_v) = (9, 4, 6)", "it is (8, 4, 6)", base="packed",
    ),
    Bad(
        "part-dtype", MERGE, setting("outs[1]", dtype=abi.INT32),
        "outs[1]", "dtype must be float16, bfloat16, float32 or float64", "it is int32",
    ),
    Bad("part-device", MERGE, on_cuda("outs[1]"), "outs[1]", "must be on the device", "it is on cuda:0"),
    Bad(
        "part-lse-shape", MERGE, sizing("lses[0]", 2, 4),
        "lses[0]", "shape must be (batch, heads, seqlen) = (2, 4, 5)", "it is (2, 4, 4)",
    ),
    Bad(
        "part-lse-shape-packed", MERGE, sizing("lses[1]", 0, 3),
        "lses[1]", "shape must be (heads, total) = (4, 9)", "it is (3, 9)", base="packed",
    ),
    Bad("part-lse-dtype", MERGE, setting("lses[1]", dtype=abi.FLOAT16), "lses[1]", "dtype must be float32", "it is float16"),
    Bad(
        "part-lse-dtype-f64", MERGE, instead("outs[1]", lambda: floats(2, 5, 4, 6, dtype=np.float64)),
        "lses[1]", "dtype must be float64", "it is float32",
    ),
    Bad("part-lse-device", MERGE, on_cuda("lses[0]"), "lses[0]", "must be on the device", "it is on cuda:0"),
    Bad(
        "out-shape", MERGE, sizing("out", 3, 5),
        "out", "shape must be (batch, seqlen, heads, head_dim_v) = (2, 5, 4, 6)", "it is (2, 5, 4, 5)",
    ),
    Bad("lse-shape", MERGE, setting("lse", ndim=2), "lse", "shape must be (batch, heads, seqlen) = (2, 4, 5)", "it is (2, 4)"),
    Bad(
        "lse-dtype", MERGE, instead("lse", lambda: floats(2, 4, 5, dtype=BF16)),
        "lse", "dtype must be float32", "it is bfloat16",
    ),
    Bad(
        "last-stride", MERGE, striding("outs[0]", 3, 3),
        "outs[0]", "the last dimension must be contiguous (stride 1)", "stride 3",
    ),
    Bad(
        "overlap-part", MERGE, both(instead("out", lambda: floats(2, 5, 4, 6)), aliasing("out", "outs[1]")),
        "out", "an output must not overlap another tensor", "it overlaps outs[1]", data=True,
    ),
    Bad(
        "overlap-lse", MERGE, aliasing("lse", "lses[0]"),
        "lse", "an output must not overlap another tensor", "it overlaps lses[0]", data=True,
    ),
    Bad(
        "kernel", MERGE, with_options(kernel=b"forward_cpu_scalar"),
        "kernel", "must be one of the kernels for merge on the CPU in this build: merge_cpu",
        '"forward_cpu_scalar"', abi.UNSUPPORTED,
    ),
    Bad("backend-cuda", MERGE, with_options(backend=b"sm90"), "backend", "", "", abi.UNSUPPORTED),
]

NAMES = ("row_counts", "row_indices", "col_counts", "col_indices")


def of_lists(name, change):
    return lambda case: change(getattr(case.lists, name))


def cleared(*names):
    return lambda case: [setattr(case.lists, name, abi.Tensor()) for name in names]


COMPRESSIONS = [
    Bad("mask-null", COMPRESS, without("block_mask"), "block_mask", "is required", "NULL"),
    Bad("lists-null", COMPRESS, null("lists"), "lists", "is required", "NULL"),
    Bad("lists-none", COMPRESS, cleared(*NAMES), "lists", "must have the row lists, the column lists or both", "none"),
    Bad("lists-half", COMPRESS, cleared("row_counts"), "block_lists.row_counts", "is required", "NULL"),
    Bad("mask-dtype", COMPRESS, setting("block_mask", dtype=abi.INT32, data=None), "block_mask", "", "shape (2, 1, 3, 4)"),
    Bad(
        "mask-dtype-2", COMPRESS, instead("block_mask", lambda: np.ones((B, 1, 3, 4), np.int32)),
        "block_mask", "dtype must be bool", "it is int32",
    ),
    Bad("mask-ndim", COMPRESS, setting("block_mask", ndim=3), "block_mask", "must have 4 dimensions", "shape (2, 1, 3)"),
    Bad("mask-stride", COMPRESS, striding("block_mask", 2, 8), "block_mask", "must be contiguous", "strides (12, 0, 8, 1)"),
    *(Bad(
        f"dtype-{n}", COMPRESS, of_lists(n, lambda t: setattr(t, "dtype", abi.FLOAT32)),
        f"block_lists.{n}", "dtype must be int32", "it is float32",
    ) for n in NAMES),
    *(Bad(
        f"device-{n}", COMPRESS, of_lists(n, lambda t: setattr(t, "device_type", 1)),
        f"block_lists.{n}", "must be on the device", "it is on cuda:0",
    ) for n in NAMES),
    Bad(
        "row-shape", COMPRESS,
        both(*(of_lists(n, lambda t: t.shape.__setitem__(2, 2)) for n in ("row_counts", "row_indices"))),
        "block_lists.row_indices", "shape must be that of block_mask = (2, 1, 3, 4)", "it is (2, 1, 2, 4)",
    ),
    Bad(
        "col-shape", COMPRESS, of_lists("col_indices", lambda t: t.shape.__setitem__(3, 2)),
        "block_lists.col_indices", "shape must be that of block_mask with the last two dimensions exchanged = (2, 1, 4, 3)",
        "it is (2, 1, 4, 2)",
    ),
    Bad(
        "counts-stride", COMPRESS, of_lists("row_counts", lambda t: t.stride.__setitem__(0, 4)),
        "block_lists.row_counts", "must be contiguous", "strides (4, 0, 1)",
    ),
    Bad(
        "row-stride", COMPRESS, of_lists("row_indices", lambda t: t.stride.__setitem__(0, 13)),
        "block_lists.row_indices", "must be contiguous", "strides (13, 0, 4, 1)",
    ),
    Bad(
        "col-counts-stride", COMPRESS, of_lists("col_counts", lambda t: t.stride.__setitem__(0, 5)),
        "block_lists.col_counts", "must be contiguous", "strides (5, 0, 1)",
    ),
    Bad(
        "col-stride", COMPRESS, of_lists("col_indices", lambda t: t.stride.__setitem__(2, 4)),
        "block_lists.col_indices", "must be contiguous", "strides (12, 0, 4, 1)",
    ),
    Bad(
        "overlap", COMPRESS, lambda case: setattr(case.lists.col_indices, "data", case.lists.row_indices.data),
        "block_lists.row_indices", "an output must not overlap another tensor", "it overlaps block_lists.col_indices",
    ),
]

# Of version 1, and of this library.
SIZES = {"forward": (224, 352), "backward": (224, 352), "decode": (160, 280), "merge": (32, 32), "cache_write": (88, 88)}


def version_cases():
    for function, (size, known) in SIZES.items():
        first = f"{size - 4}, version 1 has {size}"
        yield Bad(
            "version-0", (function,), with_options(struct_size=0),
            "struct_size", "must be sizeof the options struct", f"0, version 1 has {size}", abi.VERSION,
        )
        yield Bad(
            "version-short", (function,), with_options(struct_size=size - 4),
            "struct_size", "must be sizeof the options struct", first, abi.VERSION,
        )
        yield Bad(
            "version-huge", (function,), with_options(struct_size=1 << 31),
            "struct_size", "is larger than any version's", f"2147483648, this library knows {known}", abi.VERSION,
        )
        tail = bytes(9) + b"\x01" + bytes(6)
        yield Bad(
            "version-tail", (function,), field(struct_tail=tail),
            "struct_size", "fields that this library does not know must be 0",
            f"byte {known + 9} of {known + 16} is set, this library knows {known}", abi.VERSION,
        )
    for function, size in (("kernel_info", 72), ("device_info", 280)):
        yield Bad(
            "version-short", (function,), field(info_size=size - 8),
            "struct_size", "must be sizeof the info struct", f"{size - 8}, version 1 has {size}", abi.VERSION,
        )
        yield Bad(
            "version-huge", (function,), field(info_size=4097),
            "struct_size", "must be sizeof the info struct", f"4097, version 1 has {size}", abi.VERSION,
        )


COUNTS = {"kernel_info": abi.lib.flash_kernel_count(), "device_info": abi.lib.flash_device_count()}

INFORMATION = [
    Bad("info-null", INFO, null("info"), "info", "is required", "NULL"),
    *(
        Bad(
            f"index-{n}", (function,), field(index=count if n == "count" else -1),
            "index", "must be at least 0 and below the count", f"{count if n == 'count' else -1} of {count}",
        )
        for function, count in COUNTS.items()
        for n in ("count", "negative")
    ),
]


def needs_workspace(function):
    case = build(function, "dense")
    return query(case, options_of(case))[1] > 0


NEEDS = tuple(function for function in ALL3 if needs_workspace(function))
QUERY_TEXT = "it is {less}, the call needs {needed}"

WORK = [
    Bad(
        "workspace-null", NEEDS, field(short_workspace="null"),
        "workspace", "must not be NULL for this call", "it needs {needed} bytes", abi.WORKSPACE, data=True,
    ),
    Bad(
        "workspace-short", NEEDS, field(short_workspace="short"),
        "workspace_bytes", "must be at least the size that the workspace query returns", QUERY_TEXT, abi.WORKSPACE, data=True,
    ),
    Bad(
        "workspace-misaligned", NEEDS, field(short_workspace="misaligned"),
        "workspace", "must be aligned to 256", "address modulo 256 is 64, the call needs {needed} bytes", abi.WORKSPACE,
        data=True,
    ),
]


def all_on_cuda(device):
    """Every tensor on a device that does not exist."""

    def change(case):
        for one in (*case.tensors.values(), *case.options.values()):
            if isinstance(one, abi.Tensor):
                one.device_type, one.device_id = abi.CUDA_DEVICE, device
        for name in NAMES if case.lists is not None else ():
            getattr(case.lists, name).device_type, getattr(case.lists, name).device_id = abi.CUDA_DEVICE, device

    return change


EVERY = ("forward", "backward", "decode", "merge", "compress", "cache_write")
if COUNTS["device_info"]:
    DEVICES = [
        Bad(
            "device-id", EVERY, all_on_cuda(63),
            "device_id", "must be below the number of devices", f"63 of {COUNTS['device_info']}",
        ),
    ]
else:
    DEVICES = [
        Bad(
            "no-device", EVERY, all_on_cuda(0),
            "device_type", "the tensors are on a GPU, but no GPU is usable", abi.lib.flash_cuda_state().decode(),
            abi.NO_DEVICE,
        ),
    ]

CASES = [*MERGES, *COMPRESSIONS, *version_cases(), *INFORMATION, *WORK, *DEVICES]
