"""Refusals of decode's schedule. tests/plan/test_decode_schedule_plans.py has those that only a call with long chunks makes."""

import numpy as np
from bad_cases import Bad, both, floats, ints, on_cuda, striding, with_tensor


def row(name, change, rule, value, argument="schedule", **more):
    return Bad(
        f"schedule-{name}",
        ("decode",),
        both(with_tensor("schedule", lambda: ints(0, 0, 0)), change),
        argument,
        rule,
        value,
        **more,
    )


def in_out(case):
    """The schedule is a part of out."""
    case.get("schedule").data = case.get("out").data + 4


# fmt: off
CASES = [
    row("device", on_cuda("schedule"), "must be on the device", "it is on cuda:0"),
    row("dtype", with_tensor("schedule", lambda: floats(3)), "dtype must be int32", "it is float32"),
    row(
        "ndim", with_tensor("schedule", lambda: np.zeros((3, 1), np.int32)),
        "must have 1 dimension, (n,)", "shape (3, 1)",
    ),
    row("strided", striding("schedule", 0, 2), "must be contiguous", "strides (2,)"),
    row(
        "overlap", in_out, "an output must not overlap another tensor", "it overlaps schedule", argument="out", data=True,
    ),
]
