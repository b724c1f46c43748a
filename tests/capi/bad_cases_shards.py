"""Refusals of calls with a part of a problem: positions, numbers for dropout, continuation, added gradients."""

import abi
import numpy as np
from bad_cases import (
    BACKWARD,
    BOTH,
    FORWARD,
    HQ,
    SK,
    SQ,
    TANGENTS,
    B,
    Bad,
    both,
    floats,
    ints,
    on_cuda,
    setting,
    striding,
    with_options,
    with_tensor,
    without,
)
from bad_cases_attention import flagged

BIG = 1 << 40
LSE = (B, HQ, SQ)


def placed(*changes, **fields):
    return both(flagged(abi.POSITIONS, **fields), *changes)


def rows(length, *values):
    """Positions of B sequences."""
    return lambda: np.array([values or range(length)] * B, np.int32)


def bad_values(side: str, length: int) -> list[Bad]:
    begin, step = f"{side}_begin", f"{side}_step"
    no_flag, range_rule = "needs FLASH_FLAG_POSITIONS", "must be at least 0 and below 2^40"
    step_rule = "must be at least 0 (0 counts as 1) and below 2^40"
    return [
        Bad(f"{begin}-no-flag", BOTH, with_options(**{begin: 4}), begin, no_flag, "4"),
        Bad(f"{step}-no-flag", BOTH, with_options(**{step: 2}), step, no_flag, "2"),
        *(Bad(f"{begin}-{n}", BOTH, placed(**{begin: n}), begin, range_rule, str(n)) for n in (-1, BIG)),
        *(Bad(f"{step}-{n}", BOTH, placed(**{step: n}), step, step_rule, str(n)) for n in (-3, BIG)),
        Bad(
            f"{step}-far",
            BOTH,
            placed(**{step: BIG // 4}),
            step,
            "positions must be below 2^40",
            f"{BIG // 4} for {length} rows",
        ),
    ]


def bad_begins(side: str) -> list[Bad]:
    name = f"{side}_begins"
    given = with_tensor(name, lambda: ints(3, 5))
    too_many, negative = (with_tensor(name, lambda v=v: ints(*v)) for v in ((1, 2, 3), (1, -2)))
    shape, sign = "shape must be (batch,) = (2,)", "must not have negative numbers"
    return [
        Bad(f"{name}-no-flag", BOTH, given, name, "needs FLASH_FLAG_POSITIONS", "given"),
        Bad(
            f"{name}-and-begin",
            BOTH,
            placed(given, **{f"{side}_begin": 4}),
            name,
            "replaces the single number, which must be 0",
            "4",
        ),
        Bad(f"{name}-shape", BOTH, placed(too_many), name, shape, "it is (3,)"),
        Bad(f"{name}-negative", BOTH, placed(negative), name, sign, "entry 1 is -2", data=True),
    ]


def bad_positions(side: str, length: int) -> list[Bad]:
    name = f"{side}_positions"
    given = with_tensor(name, rows(length))
    begins = with_tensor(f"{side}_begins", lambda: ints(3, 5))
    vector, numbers = with_tensor(name, lambda: ints(1, 2)), with_tensor(name, lambda: floats(B, length))
    negative, equal = (
        with_tensor(name, rows(length, *range(-1, length - 1))),
        with_tensor(name, rows(length, 0, *range(length - 1))),
    )
    not_both = "cannot be given together with row_begins or column_begins"
    increasing = "must strictly increase within a sequence"
    return [
        Bad(f"{name}-no-flag", BOTH, given, name, "needs FLASH_FLAG_POSITIONS", "given"),
        Bad(f"{name}-and-begins", BOTH, placed(begins, given), name, not_both, "both are"),
        Bad(f"{name}-and-begin", BOTH, placed(given, **{f"{side}_begin": 1}), name, "replaces begin, which must be 0", "1"),
        Bad(f"{name}-and-step", BOTH, placed(given, **{f"{side}_step": 2}), name, "replaces step, which must be 0 or 1", "2"),
        Bad(f"{name}-shape", BOTH, placed(vector), name, "shape must be (batch, seqlen)", "it is (2,)"),
        Bad(f"{name}-packed-shape", BOTH, placed(vector), name, "shape must be (total,)", "it is (2,)", base="packed"),
        Bad(f"{name}-dtype", BOTH, placed(numbers), name, "dtype must be int32", "it is float32"),
        Bad(f"{name}-device", BOTH, placed(given, on_cuda(name)), name, "must be on the device", "it is on cuda:0"),
        Bad(f"{name}-strides", BOTH, placed(given, striding(name, 0, 0)), name, "must be contiguous", "strides (0, 1)"),
        Bad(
            f"{name}-negative",
            BOTH,
            placed(negative),
            name,
            "must not have negative numbers",
            "row 0 of sequence 0 is -1",
            data=True,
        ),
        Bad(f"{name}-equal", BOTH, placed(equal), name, increasing, "rows 0 and 1 of sequence 0 are 0 and 0", data=True),
    ]


# fmt: off
NUMBERS = [
    Bad(
        "positions-top-left", BOTH, flagged(abi.POSITIONS | abi.TOP_LEFT),
        "flags", "FLASH_FLAG_TOP_LEFT has no meaning with FLASH_FLAG_POSITIONS", "130",
    ),
    Bad("head-begin-negative", BOTH, with_options(head_begin=-1), "head_begin", "must not be negative", "-1"),
    Bad(
        "heads-total-negative", BOTH, with_options(heads_total=-1),
        "heads_total", "must be positive, or 0 if the call has all heads", "-1",
    ),
    Bad("heads-total-large", BOTH, with_options(heads_total=1 << 40), "heads_total", "must be below 2^40", "1099511627776"),
    Bad(
        "head-begin-large", BOTH, with_options(head_begin=(1 << 63) - 1, heads_total=5),
        "head_begin", "must be below 2^40", "9223372036854775807",
    ),
    Bad("head-begin-alone", BOTH, with_options(head_begin=2), "head_begin", "needs heads_total", "2"),
    Bad(
        "heads-total-few", BOTH, with_options(head_begin=2, heads_total=5),
        "heads_total", "must be at least head_begin and the heads of q", "5, head_begin is 2, q has 4",
    ),
    Bad(
        "sequence-numbers-shape", BOTH, with_tensor("sequence_numbers", lambda: ints(1)),
        "sequence_numbers", "shape must be (batch,) = (2,)", "it is (1,)",
    ),
    Bad(
        "sequence-numbers-negative", BOTH, with_tensor("sequence_numbers", lambda: ints(1, -1)),
        "sequence_numbers", "must not have negative numbers", "entry 1 is -1", data=True,
    ),
    Bad("sm-margin-negative", BOTH, with_options(sm_margin=-1), "sm_margin", "must not be negative", "-1"),
    Bad("reserved2", BOTH, with_options(reserved2=1), "reserved2", "must be 0", "1"),
]
RESULTS = [
    Bad("continue-backward", BACKWARD, flagged(abi.CONTINUE), "flags", "this operation does not have", "unknown bits 256"),
    Bad("add-forward", FORWARD, flagged(abi.ADD), "flags", "this operation does not have", "unknown bits 512"),
    Bad(
        "continue-sink", FORWARD, both(flagged(abi.CONTINUE), with_tensor("learnable_sink", lambda: floats(HQ))),
        "learnable_sink", "belongs to the first call, not to one with FLASH_FLAG_CONTINUE", "given",
    ),
    Bad(
        "continue-no-lse", FORWARD, both(flagged(abi.CONTINUE), without("lse")),
        "lse", "is required with FLASH_FLAG_CONTINUE", "NULL",
    ),
    Bad(
        "add-narrow", BACKWARD, flagged(abi.ADD), "dq", "must be float32 with FLASH_FLAG_ADD", "it is bfloat16", base="bf16",
    ),
    *(
        Bad(
            f"wide-{name}", function, setting(name, dtype=abi.FLOAT64),
            name, "dtype must be bfloat16 or float32", "it is float64", base="bf16",
        )
        for function, name in ((FORWARD, "out"), (BACKWARD, "dq"), (BACKWARD, "dk"), (BACKWARD, "dv"))
    ),
    Bad(
        "delta-forward", FORWARD, with_tensor("delta", lambda: floats(*LSE)),
        "delta", "is for backward, not for a forward call", "given",
    ),
    Bad(
        "delta-shape", BACKWARD, with_tensor("delta", lambda: floats(B, SQ, HQ)),
        "delta", "shape must be (batch, heads_q", "it is (2, 5, 4)",
    ),
    Bad(
        "delta-dtype", BACKWARD, with_tensor("delta", lambda: floats(*LSE, dtype=np.float16)),
        "delta", "dtype must be float32", "it is float16",
    ),
    Bad(
        "delta-and-dlse", BACKWARD,
        both(flagged(abi.ADD), with_tensor("delta", lambda: floats(*LSE)), with_tensor("dlse", lambda: floats(*LSE))),
        "dlse", "is part of delta, so it must not be given with a delta that is read", "given",
    ),
    Bad(
        "delta-overlap", BACKWARD,
        both(with_tensor("delta", lambda: floats(*LSE)), lambda case: case.options.update(delta=case.tensors["lse"])),
        "delta", "an output must not overlap another tensor", "it overlaps lse", data=True,
    ),
]
STATISTICS = [
    *(
        Bad(
            f"{name}-{what}", function, with_tensor(name, lambda: floats(*LSE)),
            name, f"is for forward, not for {what}", "given",
        )
        for name in ("max_logit", "entropy")
        for function, what in ((BACKWARD, "a backward call"), (TANGENTS, "tangents"))
    ),
    *(
        Bad(
            f"{name}-continue", FORWARD, both(flagged(abi.CONTINUE), with_tensor(name, lambda: floats(*LSE))),
            name, "is not known with FLASH_FLAG_CONTINUE", "given",
        )
        for name in ("max_logit", "entropy")
    ),
    *(
        Bad(
            f"{name}-dtype", FORWARD, with_tensor(name, lambda: floats(*LSE, dtype=np.float16)),
            name, "dtype must be float32", "it is float16",
        )
        for name in ("max_logit", "entropy")
    ),
    Bad(
        "max_logit-head-dtype", FORWARD, with_tensor("max_logit", lambda: floats(HQ, dtype=np.float64)),
        "max_logit", "dtype must be float32", "it is float64",
    ),
    Bad(
        "max_logit-shape", FORWARD, with_tensor("max_logit", lambda: floats(B, HQ)),
        "max_logit", "shape must be (batch, heads_q", "it is (2, 4)",
    ),
    Bad(
        "max_logit-heads", FORWARD, with_tensor("max_logit", lambda: floats(HQ + 1)),
        "max_logit", "shape must be that of lse, or (heads_q,)", "it is (5,)",
    ),
    Bad(
        "entropy-heads", FORWARD, with_tensor("entropy", lambda: floats(HQ)),
        "entropy", "shape must be (batch, heads_q", "it is (4,)",
    ),
    Bad(
        "entropy-overlap", FORWARD, lambda case: case.options.update(entropy=case.tensors["lse"]),
        "lse", "an output must not overlap another tensor", "it overlaps entropy", data=True,
    ),
]
NO_TANGENT = [
    Bad("positions", TANGENTS, flagged(abi.POSITIONS), "flags", "this operation does not have", "unknown bits 128"),
    Bad("continue", TANGENTS, flagged(abi.CONTINUE), "flags", "this operation does not have", "unknown bits 256"),
    Bad("add", TANGENTS, flagged(abi.ADD), "flags", "this operation does not have", "unknown bits 512"),
    Bad(
        "heads-total", TANGENTS, with_options(heads_total=8),
        "heads_total", "is for forward and backward, not for tangents", "8",
    ),
    Bad(
        "sequence-numbers", TANGENTS, with_tensor("sequence_numbers", lambda: ints(0, 1)),
        "sequence_numbers", "is for forward and backward, not for tangents", "given",
    ),
]
# fmt: on
SIDES = (("row", SQ), ("column", SK))
CASES = [*NUMBERS, *RESULTS, *STATISTICS, *NO_TANGENT]
for _side, _length in SIDES:
    CASES += [*bad_values(_side, _length), *bad_begins(_side), *bad_positions(_side, _length)]
