"""Refusals of forward_tangent and backward_tangent."""

import abi
import numpy as np
from bad_cases import (
    HQ,
    SK,
    SQ,
    TANGENTS,
    B,
    Bad,
    aliasing,
    both,
    floats,
    null,
    poisoned,
    setting,
    sizing,
    with_tangent,
    with_tensor,
    without,
)

LSE = (B, HQ, SQ)
FORWARD, BACKWARD = ("forward_tangent",), ("backward_tangent",)
ONLY_BACKWARD = "is for backward_tangent, not for forward_tangent"
NO_DELTA = both(without("tangents.delta"), without("tangents.cotangent"))
DELTA, DLSE = with_tensor("delta", lambda: floats(*LSE)), with_tensor("dlse", lambda: floats(*LSE))
WRITTEN_DELTA = with_tensor("delta", lambda: poisoned(*LSE), True)
NO_GRADIENTS = both(without("dq"), without("dk"), without("dv"))


def not_in_explain(bad: Bad) -> bool:
    """explain() supplies what is missing."""
    return bad in REQUIRED or bad.id in {"no-output", "no-out", "from-lse", "dk-alone", "delta-and-gradients"}


def field(**fields):
    """Plain fields of the tangents."""
    return lambda case: case.tangents.update(fields)


# fmt: off
STRUCT = [
    Bad("flags", FORWARD, field(flags=0x80), "tangents.flags", "an unknown bit", "unknown bits 128"),
    Bad("flags", BACKWARD, field(flags=abi.FROM_LSE), "tangents.flags", "an unknown bit", "unknown bits 64"),
    Bad("size", TANGENTS, field(struct_size=135), "struct_size", "must be sizeof the options struct", "135, version 1 has 136",
        status=abi.VERSION),
    Bad("from-lse", FORWARD, both(field(flags=abi.FROM_LSE), without("lse")), "lse", "is required", "NULL"),
    *(Bad(f"forward-{name}", FORWARD, with_tangent(name, lambda: floats(1)), f"tangents.{name}", ONLY_BACKWARD, "given")
      for name in ("dq", "dk", "dv", "dbias", "dsink")),
    Bad("cotangent", FORWARD, without("tangents.cotangent"), "tangents.cotangent", "is required with delta", "NULL"),
    Bad("no-delta-cotangent", FORWARD, without("tangents.delta"), "tangents.cotangent", "needs delta", "there is no delta"),
    Bad("no-delta-dout", FORWARD, NO_DELTA, "tangents.dout", "needs delta", "there is no delta"),
    Bad("no-delta-dlse", FORWARD, both(NO_DELTA, without("tangents.dout")), "tangents.dlse", "needs delta", "there is no delta"),
    Bad("no-output", FORWARD,
        both(NO_DELTA, *(without(f"tangents.{name}") for name in ("dout", "dlse", "out", "lse"))),
        "tangents.out", "out, lse or delta is required", "all are NULL"),
    Bad("delta-alone", FORWARD, both(NO_DELTA, *(without(f"tangents.{name}") for name in ("dout", "dlse")), WRITTEN_DELTA),
        "delta", "needs tangents.delta in forward_tangent", "there is no tangents.delta"),
    Bad("dlse-alone", FORWARD, DLSE, "dlse", "needs delta in forward_tangent", "there is no delta"),
    Bad("delta-and-gradients", BACKWARD, DELTA,
        "delta", "cannot be given together with dq, dk and dv in backward_tangent", "all are"),
    Bad("row-delta-and-dlse", BACKWARD, both(NO_GRADIENTS, DELTA, DLSE),
        "dlse", "is part of delta, so it must not be given with a delta that is read", "given"),
    Bad("cotangent", BACKWARD, with_tangent("cotangent", lambda: floats(1)),
        "tangents.cotangent", "is for forward_tangent, not for backward_tangent", "given"),
    Bad("delta-and-out", BACKWARD, with_tangent("delta", lambda: floats(1)),
        "tangents.delta", "cannot be given together with out", "both are"),
    Bad("delta-and-dlse", BACKWARD, both(with_tangent("delta", lambda: floats(1)), without("tangents.out")),
        "tangents.dlse", "cannot be given together with delta, which contains it", "both are"),
    Bad("no-out", BACKWARD, without("tangents.out"), "tangents.out", "out or delta is required", "both are NULL"),
    Bad("dbias-alone", BACKWARD, both(NO_GRADIENTS, with_tensor("dbias", lambda: floats(SQ, SK), True)),
        "dbias", "needs dq, dk and dv in backward_tangent", "they are NULL"),
    Bad("dsink-alone", BACKWARD, both(NO_GRADIENTS, with_tensor("dsink", lambda: floats(HQ), True)),
        "dsink", "needs dq, dk and dv in backward_tangent", "they are NULL"),
    Bad("dk-alone", BACKWARD, both(without("dq"), without("dv")), "dq", "is required", "NULL"),
]

SHAPES = {
    "q": (3, 9, "that of q = (2, 5, 4, 8)", "it is (2, 5, 4, 9)"),
    "k": (1, 6, "that of k = (2, 7, 2, 8)", "it is (2, 6, 2, 8)"),
    "v": (2, 1, "that of v = (2, 7, 2, 6)", "it is (2, 7, 1, 6)"),
    "out": (3, 5, "(batch, seqlen_q, heads_q, head_dim_v) = (2, 5, 4, 6)", "it is (2, 5, 4, 5)"),
    "lse": (2, 4, "(batch, heads_q, seqlen_q) = (2, 4, 5)", "it is (2, 4, 4)"),
    "dout": (3, 5, "(batch, seqlen_q, heads_q, head_dim_v) = (2, 5, 4, 6)", "it is (2, 5, 4, 5)"),
    "dlse": (2, 4, "(batch, heads_q, seqlen_q) = (2, 4, 5)", "it is (2, 4, 4)"),
    "learnable_sink": (0, 3, "(heads_q,) = (4,)", "it is (3,)"),
}
TENSORS = [
    *(Bad(f"{name}-shape", TANGENTS, sizing(f"tangents.{name}", axis, size), f"tangents.{name}", f"shape must be {rule}", found)
      for name, (axis, size, rule, found) in SHAPES.items()),
    *(Bad(f"{name}-shape", FORWARD, sizing(f"tangents.{name}", *SHAPES[of][:2]), f"tangents.{name}",
          f"shape must be {SHAPES[of][2]}", SHAPES[of][3]) for name, of in {"cotangent": "out", "delta": "lse"}.items()),
    *(Bad(f"{name}-shape", BACKWARD, sizing(f"tangents.{name}", *SHAPES[of][:2]), f"tangents.{name}",
          f"shape must be {SHAPES[of][2]}", SHAPES[of][3]) for name, of in {"dq": "q", "dk": "k", "dv": "v"}.items()),
    *(Bad(f"row-{name}-shape", FORWARD, both(WRITTEN_DELTA, DLSE, sizing(name, *SHAPES["lse"][:2])), name,
          f"shape must be {SHAPES['lse'][2]}", SHAPES["lse"][3]) for name in ("delta", "dlse")),
    Bad("row-delta-shape", BACKWARD, both(NO_GRADIENTS, DELTA, sizing("delta", *SHAPES["lse"][:2])), "delta",
        f"shape must be {SHAPES['lse'][2]}", SHAPES["lse"][3]),
    Bad("row-delta-overlap", FORWARD, both(DELTA, lambda case: case.options.update(delta=case.tangents["delta"])),
        "tangents.delta", "an output must not overlap another tensor", "it overlaps delta", data=True),
    *(Bad(f"{name}-dtype", TANGENTS, with_tangent(name, lambda s=shape: floats(*s, dtype=np.float16)),
          f"tangents.{name}", "dtype must be float32", "it is float16")
      for name, shape in {"q": (2, 5, 4, 8), "k": (2, 7, 2, 8), "v": (2, 7, 2, 6), "bias": (SQ, SK),
                          "learnable_sink": (HQ,)}.items()),
    Bad("bias-shape", TANGENTS, sizing("tangents.bias", 0, 1),
        "tangents.bias", "shape must be that of bias", "it is (1, 7), bias (1, 1, 5, 7)"),
    Bad("bias-none", TANGENTS, without("bias"), "tangents.bias", "needs bias", "there is no bias"),
    Bad("sink-none", TANGENTS, without("learnable_sink"), "tangents.learnable_sink", "needs learnable_sink",
        "there is no learnable_sink"),
    Bad("dbias-shape", BACKWARD, sizing("tangents.dbias", 1, 1),
        "tangents.dbias", "shape must be that of bias", "it is (5, 1), bias (1, 1, 5, 7)"),
    Bad("dsink-shape", BACKWARD, sizing("tangents.dsink", 0, 3),
        "tangents.dsink", "shape must be (heads_q,) = (4,)", "it is (3,)"),
    Bad("device", TANGENTS, setting("tangents.k", device_type=abi.CUDA_DEVICE),
        "tangents.k", "must be on the device of the first tensor, cpu", "it is on cuda:0"),
    Bad("overlap", FORWARD, aliasing("tangents.out", "tangents.cotangent"),
        "tangents.out", "an output must not overlap another tensor", "it overlaps tangents.cotangent", data=True),
    Bad("overlap", BACKWARD, aliasing("tangents.dq", "tangents.q"),
        "tangents.dq", "an output must not overlap another tensor", "it overlaps tangents.q", data=True),
]

# Refused by the call and the query alone.
REQUIRED = [
    Bad("null", TANGENTS, null("tangents"), "tangents", "is required", "NULL"),
    *(Bad(f"{name}-null", BACKWARD, without(f"tangents.{name}"), f"tangents.{name}", "is required", "NULL")
      for name in ("lse", "dq", "dk", "dv")),
]
# fmt: on

CASES = [*STRUCT, *TENSORS, *REQUIRED]
