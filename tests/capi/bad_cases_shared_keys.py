"""Refusals of decode's hint that sequences share their first keys."""

import numpy as np
from bad_cases import Bad, both, floats, ints, on_cuda, striding, with_tensor


def row(name, change, argument, rule, value, *, groups=(0, 2), lens=(0,), **more):
    """`change` of a call with the hint."""
    hint = both(with_tensor("shared_groups", lambda: ints(*groups)), with_tensor("shared_lens", lambda: ints(*lens)))
    return Bad(f"shared-{name}", ("decode",), both(hint, change), argument, rule, value, **more)


def alone(name, make):
    return Bad(f"{name}-alone", ("decode",), with_tensor(name, make), *OTHER[name], "it is missing")


def nothing(case):
    """The hint itself is what is wrong."""


# fmt: off
OTHER = {
    "shared_groups": ("shared_lens", "must be given together with shared_groups"),
    "shared_lens": ("shared_groups", "must be given together with shared_lens"),
}
CASES = [
    alone("shared_groups", lambda: ints(0, 2)),
    alone("shared_lens", lambda: ints(0)),
    row(
        "groups-ndim", with_tensor("shared_groups", lambda: np.zeros((2, 1), np.int32)),
        "shared_groups", "must have 1 dimension, (groups + 1,)", "shape (2, 1)",
    ),
    row(
        "groups-none", with_tensor("shared_groups", lambda: np.zeros(0, np.int32)),
        "shared_groups", "must have groups + 1 entries, so at least one", "it has none",
    ),
    row(
        "groups-dtype", with_tensor("shared_groups", lambda: floats(2)),
        "shared_groups", "dtype must be int32", "it is float32",
    ),
    row(
        "lens-dtype", with_tensor("shared_lens", lambda: floats(1)), "shared_lens", "dtype must be int32", "it is float32",
    ),
    row("groups-device", on_cuda("shared_groups"), "shared_groups", "must be on the device", "it is on cuda:0"),
    row("lens-device", on_cuda("shared_lens"), "shared_lens", "must be on the device", "it is on cuda:0"),
    row(
        "groups-strided", striding("shared_groups", 0, 0), "shared_groups", "must be contiguous", "strides (0,)",
    ),
    row(
        "lens-shape", nothing, "shared_lens", "shape must be (groups,) = (1,)", "it is (2,)", lens=(0, 0),
    ),
    row(
        "groups-negative", nothing,
        "shared_groups", "must not have negative numbers", "entry 0 is -1", groups=(-1, 2), data=True,
    ),
    row(
        "groups-descend", nothing,
        "shared_groups", "must not descend", "entries 1 and 2 are 2 and 1", groups=(0, 2, 1), lens=(0, 0), data=True,
    ),
    row(
        "groups-past", nothing,
        "shared_groups", "must not end past the sequences", "the last entry is 3, batch 2", groups=(0, 3), data=True,
    ),
    row(
        "lens-negative", nothing, "shared_lens", "must not have negative numbers", "entry 0 is -1", lens=(-1,), data=True,
    ),
    row(
        "lens-past", nothing, "shared_lens", "must be at most cache_seqlens of each sequence of the group",
        "entry 0 is 7, sequence 0 has 6", lens=(7,), data=True, base="paged",
    ),
    row(
        "entries", nothing, "shared_groups", "sequences of a group must have the same cache entry",
        "sequences 0 and 1 have 2 and 0", lens=(1,), data=True,
    ),
    row(
        "pages", with_tensor("block_table", lambda: np.array([[0, 1, 2], [0, 3, 4]], np.int32)),
        "shared_groups", "sequences of a group must have the same pages for their shared keys",
        "sequences 0 and 1 have 1 and 3 in column 1", lens=(5,), data=True, base="paged",
    ),
]
