"""Refusals of the score options of forward and backward: slopes, bias, masks, sinks, block masks, and their gradients."""

import abi
import numpy as np
from bad_cases import BACKWARD, BOTH, DV, FORWARD, B, Bad, D, both, floats, ints, on_cuda, striding, with_options, with_tensor


def ones(*shape):
    return lambda: np.ones(shape, np.bool_)


# fmt: off
SCORES = [
    Bad(
        "alibi-shape", BOTH, with_tensor("alibi_slopes", lambda: floats(5)),
        "alibi_slopes", "shape must be (heads_q,) = (4,)", "it is (5,)",
    ),
    Bad(
        "alibi-shape-2", BOTH, with_tensor("alibi_slopes", lambda: floats(3, 4)),
        "alibi_slopes", "shape must be (heads_q,) or (batch, heads_q) = (2, 4)", "it is (3, 4)",
    ),
    Bad(
        "alibi-dtype", BOTH, with_tensor("alibi_slopes", lambda: ints(1, 2, 3, 4)),
        "alibi_slopes", "dtype must be float32 or that of q, float32", "it is int32",
    ),
    Bad(
        "alibi-dtype-2", BOTH, with_tensor("alibi_slopes", lambda: floats(2, 4, dtype=np.float16)),
        "alibi_slopes", "float32 or that of q, bfloat16", "it is float16", base="bf16",
    ),
    Bad(
        "alibi-device", BOTH, both(with_tensor("alibi_slopes", lambda: floats(4)), on_cuda("alibi_slopes")),
        "alibi_slopes", "must be on the device", "it is on cuda:0",
    ),
    Bad(
        "alibi-device-2", BOTH, both(with_tensor("alibi_slopes", lambda: floats(2, 4)), on_cuda("alibi_slopes")),
        "alibi_slopes", "must be on the device", "it is on cuda:0",
    ),
    Bad(
        "sink-shape", BOTH, with_tensor("learnable_sink", lambda: floats(2)),
        "learnable_sink", "shape must be (heads_q,) = (4,)", "it is (2,)",
    ),
    Bad(
        "sink-dtype", BOTH, with_tensor("learnable_sink", lambda: floats(4, dtype=np.float64)),
        "learnable_sink", "dtype must be float32 or that of q", "it is float64",
    ),
    *(
        Bad(
            f"bias-{'x'.join(map(str, s))}", BOTH, with_tensor("bias", lambda s=s: floats(*s)),
            "bias", "each size must be 1 or that of (batch, heads_q, seqlen_q, seqlen_k)", v,
        )
        for s, v in (
            ((5, 6), "seqlen_k is 7, shape (5, 6)"), ((4, 7), "seqlen_q is 5, shape (4, 7)"),
            ((2, 5, 7), "heads_q is 4, shape (2, 5, 7)"), ((3, 4, 5, 7), "batch is 2, shape (3, 4, 5, 7)"),
            ((6, 7), "seqlen_q is 5, shape (6, 7)"), ((0, 7), "seqlen_q is 5, shape (0, 7)"),
        )
    ),
    Bad("bias-dtype", BOTH, with_tensor("bias", ones(5, 7)), "bias", "dtype must be float32 or that of q, float32", "it is bool"),
    Bad(
        "bias-device", BOTH, both(with_tensor("bias", lambda: floats(5, 7)), on_cuda("bias")),
        "bias", "must be on the device", "it is on cuda:0",
    ),
    Bad(
        "bias-short-max", BOTH, both(with_tensor("bias", lambda: floats(2, 4)), with_options(max_seqlen_q=3)),
        "bias", "each size must be 1 or that of", "seqlen_q is 3 or more, shape (2, 4)", base="packed",
    ),
    Bad(
        "bias-short", BOTH, with_tensor("bias", lambda: floats(2, 4)),
        "bias", "must cover the largest lengths of the packed sequences", "largest 3 x 4, given 2 x 4", base="packed", data=True,
    ),
    Bad(
        "mask-short", BOTH, with_tensor("mask", ones(3, 3)),
        "mask", "must cover the largest lengths of the packed sequences", "largest 3 x 4, given 3 x 3", base="packed", data=True,
    ),
    Bad("mask-dtype", BOTH, with_tensor("mask", lambda: floats(5, 7)), "mask", "dtype must be bool", "it is float32"),
    Bad(
        "mask-shape", BOTH, with_tensor("mask", ones(1, 3, 5, 7)),
        "mask", "each size must be 1 or that of", "heads_q is 4, shape (1, 3, 5, 7)",
    ),
    # Backward.
    Bad(
        "dlse-shape", BACKWARD, with_tensor("dlse", lambda: floats(2, 5, 4)),
        "dlse", "shape must be (batch, heads_q, seqlen_q) = (2, 4, 5)", "it is (2, 5, 4)",
    ),
    Bad(
        "dlse-dtype", BACKWARD, with_tensor("dlse", lambda: floats(2, 4, 5, dtype=np.float16)),
        "dlse", "dtype must be float32", "it is float16",
    ),
    Bad("dbias-no-bias", BACKWARD, with_tensor("dbias", lambda: floats(5, 7)), "dbias", "needs bias", "there is no bias"),
    Bad(
        "dbias-shape", BACKWARD,
        both(with_tensor("bias", lambda: floats(1, 1, 5, 7)), with_tensor("dbias", lambda: floats(4, 5, 7))),
        "dbias", "shape must be that of bias", "it is (4, 5, 7), bias (1, 1, 5, 7)",
    ),
    Bad(
        "dbias-sizes", BACKWARD, both(with_tensor("bias", lambda: floats(5, 7)), with_tensor("dbias", lambda: floats(7, 5))),
        "dbias", "each size must be 1 or that of", "seqlen_q is 5, shape (7, 5)",
    ),
    Bad(
        "dbias-dtype", BACKWARD,
        both(with_tensor("bias", lambda: floats(5, 7)), with_tensor("dbias", lambda: floats(5, 7, dtype=np.float16))),
        "dbias", "dtype must be float32", "it is float16",
    ),
    Bad(
        "dbias-device", BACKWARD,
        both(with_tensor("bias", lambda: floats(5, 7)), with_tensor("dbias", lambda: floats(5, 7)), on_cuda("dbias")),
        "dbias", "must be on the device", "it is on cuda:0",
    ),
    Bad(
        "dbias-repeats", BACKWARD,
        both(with_tensor("bias", lambda: floats(5, 7)), with_tensor("dbias", lambda: floats(5, 7)), striding("dbias", 0, 0)),
        "dbias", "an output may not repeat (stride 0)", "strides (0, 1)",
    ),
    Bad(
        "dbias-overlap", BACKWARD,
        both(with_tensor("bias", lambda: floats(5, 7)), lambda case: case.options.update(dbias=case.options["bias"])),
        "dbias", "an output must not overlap another tensor", "it overlaps bias", data=True,
    ),
    Bad(
        "dsink-no-sink", BACKWARD, with_tensor("dsink", lambda: floats(4)),
        "dsink", "needs learnable_sink", "there is no learnable_sink",
    ),
    Bad(
        "dsink-shape", BACKWARD, both(with_tensor("learnable_sink", lambda: floats(4)), with_tensor("dsink", lambda: floats(3))),
        "dsink", "shape must be (heads_q,) = (4,)", "it is (3,)",
    ),
    Bad(
        "dsink-dtype", BACKWARD,
        both(with_tensor("learnable_sink", lambda: floats(4)), with_tensor("dsink", lambda: floats(4, dtype=np.float16))),
        "dsink", "dtype must be float32", "it is float16",
    ),
]

# fmt: on
BLOCK_SHAPE = "shape must be (batch or 1, heads_q or 1, ceil(seqlen_q / 128), ceil(seqlen_k / 128))"


def of_lists(name, change):
    """Changes one of the four tensors of the lists."""
    return lambda case: change(getattr(case.options["block_lists"], name))


def entry(name, *values):
    """Writes into the arrays of the lists."""
    return lambda case: case.arrays[name].reshape(-1).__setitem__(slice(0, len(values)), values)


def many_blocks(*counts_and_indices):
    """Lists of a 1 x 3 block mask, for a key side of three blocks."""

    def change(case):
        for name in ("k", "v"):
            case.put(name, np.zeros((B, 300, 2, D if name == "k" else DV), np.float32))
        case.options["block_lists"], kept = abi.compress(np.ones((1, 1, 1, 3), np.bool_))
        case.arrays.update(zip(("row_counts", "row_indices", "col_counts", "col_indices"), kept, strict=True))
        for one in counts_and_indices:
            one(case)

    return change


def cleared(*names):
    def change(case):
        for name in names:
            setattr(case.options["block_lists"], name, abi.Tensor())

    return change


# fmt: off
BLOCKS = [
    Bad(
        "blocks-dtype", BOTH, with_tensor("block_mask", lambda: ints(1).reshape(1, 1, 1, 1)),
        "block_mask", "dtype must be bool", "it is int32",
    ),
    Bad(
        "blocks-ndim", BOTH, with_tensor("block_mask", ones(1, 1)),
        "block_mask", "must have 4 dimensions, (batch or 1", "shape (1, 1)",
    ),
    Bad(
        "blocks-device", BOTH, both(with_tensor("block_mask", ones(1, 1, 1, 1)), on_cuda("block_mask")),
        "block_mask", "must be on the device", "it is on cuda:0",
    ),
    *(
        Bad(f"blocks-{'x'.join(map(str, s))}", BOTH, with_tensor("block_mask", ones(*s)), "block_mask", BLOCK_SHAPE, v)
        for s, v in (
            ((3, 1, 1, 1), "full size (2, 4, 1, 1), given 3 x 1 of 1 x 1 blocks"),
            ((1, 2, 1, 1), "full size (2, 4, 1, 1), given 1 x 2 of 1 x 1 blocks"),
            ((1, 1, 2, 1), "full size (2, 4, 1, 1), given 1 x 1 of 2 x 1 blocks"),
            ((1, 1, 1, 0), "full size (2, 4, 1, 1), given 1 x 1 of 1 x 0 blocks"),
        )
    ),
    Bad(
        "blocks-short", BOTH, with_tensor("block_mask", ones(1, 1, 1, 0)),
        "block_mask", "must cover the largest lengths of the packed sequences", "largest 3 x 4, given 1 x 0 blocks",
        base="packed", data=True,
    ),
    Bad(
        "lists-and-mask", BOTH, with_tensor("block_mask", ones(1, 1, 1, 1)),
        "block_lists", "cannot be given together with block_mask", "both are", base="blocks",
    ),
    Bad(
        "lists-no-rows", BOTH, cleared("row_counts", "row_indices"),
        "block_lists.row_counts", "is required, with row_indices", "zero", base="blocks",
    ),
    Bad(
        "lists-no-cols", BACKWARD, cleared("col_counts", "col_indices"),
        "block_lists.col_counts", "is required in backward, with col_indices", "zero", base="blocks",
    ),
    Bad("lists-half", BOTH, cleared("row_indices"), "block_lists.row_indices", "is required", "NULL", base="blocks"),
    Bad("lists-half-2", BOTH, cleared("col_counts"), "block_lists.col_counts", "is required", "NULL", base="blocks"),
    *(
        Bad(
            f"lists-dtype-{n}", BOTH, of_lists(n, lambda t: setattr(t, "dtype", abi.FLOAT32)),
            f"block_lists.{n}", "dtype must be int32", "it is float32", base="blocks",
        )
        for n in ("row_counts", "row_indices", "col_counts", "col_indices")
    ),
    *(
        Bad(
            f"lists-device-{n}", BOTH, of_lists(n, lambda t: setattr(t, "device_type", 1)),
            f"block_lists.{n}", "must be on the device", "it is on cuda:0", base="blocks",
        )
        for n in ("row_counts", "row_indices", "col_counts", "col_indices")
    ),
    Bad(
        "lists-counts-ndim", BOTH, of_lists("row_counts", lambda t: setattr(t, "ndim", 2)),
        "block_lists.row_counts", "must have 3 dimensions", "shape (1, 4)", base="blocks",
    ),
    Bad(
        "lists-indices-ndim", BOTH, of_lists("row_indices", lambda t: setattr(t, "ndim", 3)),
        "block_lists.row_indices", "must have 4 dimensions", "shape (1, 4, 1)", base="blocks",
    ),
    Bad(
        "lists-indices-shape", BOTH, of_lists("row_indices", lambda t: t.shape.__setitem__(1, 3)),
        "block_lists.row_indices", "shape must be that of the counts with one more dimension = (1, 4, 1, 1)",
        "it is (1, 3, 1, 1)", base="blocks",
    ),
    Bad(
        "lists-blocks", BOTH, of_lists("row_indices", lambda t: t.shape.__setitem__(3, 2)),
        "block_lists.row_indices", BLOCK_SHAPE, "full size (2, 4, 1, 1), given 1 x 4 of 1 x 2 blocks", base="blocks",
    ),
    Bad(
        "lists-cols-shape", BOTH, of_lists("col_indices", lambda t: t.shape.__setitem__(3, 2)),
        "block_lists.col_indices", "shape must be that of row_indices with the last two dimensions exchanged = (1, 4, 1, 1)",
        "it is (1, 4, 1, 2)", base="blocks",
    ),
    Bad(
        "lists-count-negative", BOTH, entry("row_counts", -1),
        "block_lists.row_counts", "a count must be at least 0 and at most the number of blocks", "entry (0, 0, 0) is -1 of 1",
        base="blocks", data=True,
    ),
    Bad(
        "lists-count-large", BOTH, entry("col_counts", 1, 2),
        "block_lists.col_counts", "a count must be at least 0 and at most the number of blocks", "entry (0, 1, 0) is 2 of 1",
        base="blocks", data=True,
    ),
    Bad(
        "lists-index-negative", BOTH, entry("row_indices", 0, 0, -1),
        "block_lists.row_indices", "a block must be at least 0 and below the number of blocks", "entry (0, 2, 0, 0) is -1 of 1",
        base="blocks", data=True,
    ),
    Bad(
        "lists-index-large", BOTH, entry("col_indices", 1),
        "block_lists.col_indices", "a block must be at least 0 and below the number of blocks", "entry (0, 0, 0, 0) is 1 of 1",
        base="blocks", data=True,
    ),
    Bad(
        "lists-descend", FORWARD, many_blocks(entry("row_indices", 0, 2, 1)),
        "block_lists.row_indices", "each list must be in ascending order", "entry (0, 0, 0, 2) is 1 after 2", data=True,
    ),
    Bad(
        "lists-twice", FORWARD, many_blocks(entry("row_indices", 0, 0, 1)),
        "block_lists.row_indices", "each list must be in ascending order", "entry (0, 0, 0, 1) is 0 after 0", data=True,
    ),
]

CASES = [*SCORES, *BLOCKS]
