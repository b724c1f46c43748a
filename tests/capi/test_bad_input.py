"""Every refusal: its status, its text, and that nothing was written. bad_cases_*.py have a bad case for each check."""

import bad_cases_attention
import bad_cases_cache_write
import bad_cases_codes
import bad_cases_decode
import bad_cases_key_shards
import bad_cases_other
import bad_cases_packed
import bad_cases_schedule
import bad_cases_scores
import bad_cases_shards
import bad_cases_shared_keys
import bad_cases_tangent
import bad_cases_tensor
import bad_cases_trees
import pytest
from abi import OK, UNSUPPORTED, last_error, lib, status_name
from bad_cases import BOTH, OPTION_TYPES, TANGENTS, Bad, Case, build, call, explain, options_of, query

BAD_CASES: list[Bad] = [
    *bad_cases_tensor.CASES,
    *bad_cases_attention.CASES,
    *bad_cases_scores.CASES,
    *bad_cases_shards.CASES,
    *bad_cases_decode.CASES,
    *bad_cases_codes.CASES,
    *bad_cases_packed.CASES,
    *bad_cases_trees.CASES,
    *bad_cases_shared_keys.CASES,
    *bad_cases_schedule.CASES,
    *bad_cases_key_shards.CASES,
    *bad_cases_cache_write.CASES,
    *bad_cases_other.CASES,
    *bad_cases_tangent.CASES,
]
CASES = [pytest.param(bad, f, id=f"{f}-{bad.base}-{bad.id}") for bad in BAD_CASES for f in bad.functions]
OUTPUTS = {"out", "lse", "dout", "dq", "dk", "dv"}  # explain() has no such arguments
QUERIED = [param for param in CASES if param.values[1] in {"forward", "backward", "decode", "cache_write", *TANGENTS}]


def refused_by_explain(bad: Bad) -> bool:
    if bad_cases_tangent.not_in_explain(bad):
        return False
    return bad.argument not in OUTPUTS | {"bytes"} and not any(f"overlaps {name}" in bad.value for name in OUTPUTS)


def changed_call(bad: Bad, function: str) -> Case:
    case = build(function, bad.base)
    bad.change(case)
    return case


def check_text(bad: Bad, text: str, needed: int = 0) -> None:
    value = bad.value.format(needed=needed, less=needed - 1)
    assert text.startswith(f"{bad.argument}: ") or not bad.argument, text
    assert bad.rule in text, text
    assert f"({value})" in text or not value, text


def test_ids_are_unique() -> None:
    ids = [param.id for param in CASES]
    assert sorted(set(ids)) == sorted(ids)


@pytest.mark.parametrize(
    ("function", "base"),
    [
        *((f, b) for f in (*BOTH, *TANGENTS) for b in ("dense", "packed", "packed_q", "packed_k", "bf16", "f64", "blocks")),
        *(("decode", b) for b in ("dense", "paged", "packed")),
        *(("merge", b) for b in ("dense", "packed")),
        *(("cache_write", b) for b in ("dense", "codes", "rope")),
        *((f, "dense") for f in ("compress", "kernel_info")),
    ],
)
def test_good_calls_pass(function: str, base: str) -> None:
    """The calls that the bad cases change are accepted, so each refusal is about the one change."""
    case = build(function, base)
    assert call(case) == OK, last_error()
    assert last_error() == ""
    if function in OPTION_TYPES and function != "merge":
        assert query(case, options_of(case))[0] == OK, last_error()
    if function in OPTION_TYPES and function not in {"merge", "cache_write"}:
        assert explain(case, options_of(case)) == OK, last_error()


@pytest.mark.parametrize(("bad", "function"), [p for p in CASES if p.values[0].argument not in {"bytes", "text"}])
def test_call(bad: Bad, function: str) -> None:
    case = changed_call(bad, function)
    needed = query(case, options_of(case))[1] if case.short_workspace else 0
    before = {name: array.tobytes() for name, array in case.arrays.items()}
    status = call(case)
    assert status_name(status) == status_name(bad.status), last_error()
    check_text(bad, last_error(), needed)
    for name, array in case.arrays.items():
        assert array.tobytes() == before[name], f"{name} was written"


@pytest.mark.parametrize(("bad", "function"), [p for p in QUERIED if p.values[0].argument != "text"])
def test_workspace_query(bad: Bad, function: str) -> None:
    """The query refuses what the call refuses, with the same text, except where the call must read data."""
    case = changed_call(bad, function)
    status, size = query(case, options_of(case))
    if bad.data:
        assert status == OK, last_error()
    else:
        assert status_name(status) == status_name(bad.status), last_error()
        check_text(bad, last_error())
        assert size == 12345, "bytes was written"


EXPLAINED = [p for p in QUERIED if p.values[1] != "cache_write" and refused_by_explain(p.values[0])]


@pytest.mark.parametrize(("bad", "function"), EXPLAINED)
def test_explain(bad: Bad, function: str) -> None:
    """explain() refuses what the call refuses; it has no outputs, and it explains unsupported calls."""
    case = changed_call(bad, function)
    status = explain(case, options_of(case))
    of_8_bits = bad.argument == "q" and bad.status == UNSUPPORTED  # the types of the other tensors would be unknown
    if bad.data or (status_name(bad.status) in {"UNSUPPORTED", "NO_DEVICE"} and not of_8_bits):
        assert status == OK, last_error()
    else:
        assert status_name(status) == status_name(bad.status), last_error()
        check_text(bad, last_error())


def test_last_error_is_cleared() -> None:
    assert lib.flash_block_mask_compress(None, None, None) != OK
    assert last_error()
    assert call(build("compress", "dense")) == OK
    assert last_error() == ""
