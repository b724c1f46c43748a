"""Every refusal: its status, the words it says, and that nothing was written. One row per check (bad_rows_*.py)."""

import bad_rows_attention
import bad_rows_decode
import bad_rows_other
import bad_rows_scores
import bad_rows_tensor
import pytest
from abi import OK, last_error, lib, status_name
from bad_cases import OPTION_TYPES, Case, Row, build, call, explain, options_of, query

ROWS: list[Row] = [
    *bad_rows_tensor.ROWS,
    *bad_rows_attention.ROWS,
    *bad_rows_scores.ROWS,
    *bad_rows_decode.ROWS,
    *bad_rows_other.ROWS,
]
CASES = [pytest.param(row, f, id=f"{f}-{row.base}-{row.id}") for row in ROWS for f in row.functions]
OUTPUTS = {"out", "lse", "dout", "dq", "dk", "dv"}  # which explain does not take
QUERIED = [param for param in CASES if param.values[1] in {"forward", "backward", "decode"}]


def of_explain(row: Row) -> bool:
    return row.argument not in OUTPUTS | {"bytes"} and not any(f"overlaps {name}" in row.value for name in OUTPUTS)


def spoilt(row: Row, function: str) -> Case:
    case = build(function, row.base)
    row.change(case)
    return case


def check_text(row: Row, text: str, needed: int = 0) -> None:
    value = row.value.format(needed=needed, less=needed - 1)
    assert text.startswith(f"{row.argument}: ") or not row.argument, text
    assert row.rule in text, text
    assert f"({value})" in text or not value, text


def test_ids_are_unique() -> None:
    ids = [param.id for param in CASES]
    assert sorted(set(ids)) == sorted(ids)


@pytest.mark.parametrize(
    ("function", "base"),
    [
        *((f, b) for f in ("forward", "backward") for b in ("dense", "packed", "packed_q", "packed_k", "bf16", "f64", "blocks")),
        *(("decode", b) for b in ("dense", "paged")),
        *(("merge", b) for b in ("dense", "packed")),
        *((f, "dense") for f in ("compress", "kernel_info")),
    ],
)
def test_good_calls_pass(function: str, base: str) -> None:
    """What the rows spoil is right before: each refusal is of the one thing that its row changes."""
    case = build(function, base)
    assert call(case) == OK, last_error()
    assert last_error() == ""
    if function in OPTION_TYPES and function != "merge":
        assert query(case, options_of(case))[0] == OK, last_error()
        assert explain(case, options_of(case)) == OK, last_error()


@pytest.mark.parametrize(("row", "function"), [p for p in CASES if p.values[0].argument not in {"bytes", "text"}])
def test_call(row: Row, function: str) -> None:
    case = spoilt(row, function)
    needed = query(case, options_of(case))[1] if case.short_workspace else 0
    before = {name: array.tobytes() for name, array in case.arrays.items()}
    status = call(case)
    assert status_name(status) == status_name(row.status), last_error()
    check_text(row, last_error(), needed)
    for name, array in case.arrays.items():
        assert array.tobytes() == before[name], f"{name} was written"


@pytest.mark.parametrize(("row", "function"), [p for p in QUERIED if p.values[0].argument != "text"])
def test_workspace_query(row: Row, function: str) -> None:
    """The query refuses what the call refuses, with the same words, unless only data can show it."""
    case = spoilt(row, function)
    status, size = query(case, options_of(case))
    if row.data:
        assert status == OK, last_error()
    else:
        assert status_name(status) == status_name(row.status), last_error()
        check_text(row, last_error())
        assert size == 12345, "bytes was written"


@pytest.mark.parametrize(("row", "function"), [p for p in QUERIED if of_explain(p.values[0])])
def test_explain(row: Row, function: str) -> None:
    """Explain refuses what the call refuses, but has no outputs, and explains what is unsupported."""
    case = spoilt(row, function)
    status = explain(case, options_of(case))
    if row.data or status_name(row.status) in {"UNSUPPORTED", "NO_DEVICE"}:
        assert status == OK, last_error()
    else:
        assert status_name(status) == status_name(row.status), last_error()
        check_text(row, last_error())


def test_last_error_is_cleared() -> None:
    assert lib.flash_block_mask_compress(None, None, None) != OK
    assert last_error()
    assert call(build("compress", "dense")) == OK
    assert last_error() == ""
