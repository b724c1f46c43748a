"""Everything that the kit can run."""

from __future__ import annotations

from collections.abc import Iterator

from . import cases, decode_cases, tangent_cases
from .checks import bad_input, broken_values, edges, exact
from .item import Item, of_case, of_check, of_decode_case, of_tangent, refused, repeated
from .rounding import DTYPES

LARGE = ("large-bf16-randn-2048", "large-fp16-randn-2048")  # enough keys to reveal a dq accumulated in the storage type
AGAIN = ("heads-", "only-visible", "only-lengths", "fill-randn", "dim-128")  # names of the cases that are also repeated


def items() -> Iterator[Item]:
    quick = cases.quick()
    yield from (of_case(case) for case in quick)
    yield from (of_case(cases.by_name(name)) for name in LARGE)
    yield from (of_check("exact answers", check) for check in exact.checks())
    for check in edges.checks():
        yield of_check("rows without a key" if check.function is edges.row_without_visible_key else "edge values", check)
    yield from (of_check("NaN and infinity", check, apart=broken_values.needs_apart(check)) for check in broken_values.checks())
    yield from (of_decode_case(case) for case in decode_cases.quick() if not case.absent_page)
    yield from (of_tangent(case) for case in tangent_cases.quick()[::3])
    again = [case for case in quick if case.name.startswith(AGAIN) and not case.slack_rows]  # slack rows are not written
    yield from (repeated(case, gradients) for case in again for gradients in (False, True))
    yield from (refused(row, dtype) for row in bad_input.ROWS for dtype in ("fp32", "bf16"))


def chosen(types: list[str], words: list[str]) -> list[Item]:
    """Items of these types whose group and name contain every word; types that this Python lacks are left out."""
    known = [item for item in items() if item.dtype in DTYPES and item.dtype in types]
    return [item for item in known if all(word in f"{item.group} {item.name}" for word in words)]
