"""flash_attention_decode_schedule and its size on the CPU, where a call has nothing to compute beforehand."""

from __future__ import annotations

import ctypes as c

import abi
import numpy as np
import pytest
from abi import INVALID, OK, last_error, lib
from bad_cases import Case, build, call, options_of

TENSORS = ("q", "k_cache", "v_cache", "out", "lse")


def arguments(case: Case) -> list[object]:
    return [*(abi.pointer(case.tensors[name]) for name in TENSORS), options_of(case)]


def size_of(case: Case) -> int:
    size = c.c_size_t(12345)
    assert lib.flash_attention_decode_schedule_size(*arguments(case), c.byref(size)) == OK, last_error()
    return size.value


@pytest.mark.parametrize("base", ["dense", "paged", "packed"])
def test_nothing_is_computed_beforehand(base: str) -> None:
    """The size is 0, a schedule is not written, and any schedule is accepted without effect."""
    case, with_schedule = build("decode", base), build("decode", base)
    assert size_of(case) == 0
    numbers = np.full(5, -7, np.int32)
    assert lib.flash_attention_decode_schedule(*arguments(case), abi.tensor(numbers), None) == OK, last_error()
    assert (numbers == -7).all()
    for name in case.outputs:
        assert case.arrays[name].tobytes() == with_schedule.arrays[name].tobytes(), f"{name} was written"
    assert call(case) == OK
    with_schedule.option("schedule", numbers)
    assert call(with_schedule) == OK, last_error()
    for name in case.outputs:
        assert case.arrays[name].tobytes() == with_schedule.arrays[name].tobytes()


def test_an_older_struct_has_no_schedule() -> None:
    case = build("decode", "dense")
    case.options["struct_size"] = abi.DecodeOptions.schedule.offset
    case.option("schedule", np.zeros(3, np.float32))  # refused if it were read
    assert call(case) == OK, last_error()


def test_data_of_lengths_alone_is_needed() -> None:
    case = build("decode", "packed")
    numbers = abi.tensor(np.zeros(4, np.int32))
    for name in (*TENSORS, "k_new", "v_new"):
        case.get(name).data = None
    assert lib.flash_attention_decode_schedule(*arguments(case), numbers, None) == OK, last_error()
    for name in ("cache_seqlens", "cu_seqlens_q", "cu_seqlens_new"):
        again = build("decode", "packed")
        again.option(
            "cu_seqlens_new",
            again.arrays["cu_seqlens_new"] if "cu_seqlens_new" in again.arrays else np.array([0, 1, 3], np.int32),
        )
        again.get(name).data = None
        assert lib.flash_attention_decode_schedule(*arguments(again), numbers, None) == INVALID
        assert last_error().startswith(f"{name}: data may be NULL only if the tensor has no elements")
        assert size_of(again) == 0


def test_the_schedule_is_an_output() -> None:
    """It is required, has the checks of an output, and overlaps no array that the call is given."""
    case = build("decode", "dense")

    def refused(schedule: abi.Tensor | None) -> str:
        assert lib.flash_attention_decode_schedule(*arguments(case), schedule, None) == INVALID
        return last_error()

    assert refused(None) == "schedule: is required (NULL)"
    assert refused(abi.tensor(np.zeros(4, np.float32))) == "schedule: dtype must be int32 (it is float32)"
    for name in ("cache_seqlens", "q", "k_cache"):
        numbers = abi.tensor(np.zeros(1, np.int32))
        numbers.data = case.get(name).data
        assert "must not overlap another tensor" in refused(numbers), name
    empty = abi.tensor(np.zeros(4, np.int32))
    empty.data = None
    assert refused(empty).startswith("schedule: data may be NULL only")


def test_the_schedule_of_the_options_has_no_effect() -> None:
    case = build("decode", "dense")
    numbers = np.zeros(4, np.int32)
    case.option("schedule", numbers)
    assert size_of(case) == 0
    same = case.get("schedule")  # overlaps what is written
    assert lib.flash_attention_decode_schedule(*arguments(case), same, None) == OK, last_error()


def test_a_wrong_call_is_refused_as_by_decode() -> None:
    case = build("decode", "dense")
    case.put("v_cache", np.zeros((3, 11, 2, 6), np.float32))
    assert call(case) == INVALID
    text = last_error()
    numbers = abi.tensor(np.zeros(4, np.int32))
    assert lib.flash_attention_decode_schedule(*arguments(case), numbers, None) == INVALID
    assert last_error() == text
    size = c.c_size_t(12345)
    assert lib.flash_attention_decode_schedule_size(*arguments(case), c.byref(size)) == INVALID
    assert last_error() == text
    assert size.value == 12345
    assert lib.flash_attention_decode_schedule_size(*arguments(build("decode", "dense")), None) == INVALID
    assert last_error() == "bytes: is required (NULL)"
