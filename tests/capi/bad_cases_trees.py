"""Refusals of decode with trees and positions."""

import abi
from bad_cases import both, floats, ints, on_cuda, setting, sizing, striding, with_options, with_tensor
from bad_cases_decode import row
from bad_cases_packed import packed


# fmt: off
def tree(name, change, argument, rule, value, **more):
    return packed(f"tree-{name}", both(with_tensor("tree_mask", lambda: ints(*range(6)).reshape(6, 1)), change), argument, rule,
                  value, **more)


CASES = [
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
