"""The error text: one per thread, empty after success, never NULL, truncated when it is very long."""

from __future__ import annotations

import ctypes as c
import threading

import abi
import pytest
from bad_cases import build, call

NAMES = ["OK", "INVALID", "UNSUPPORTED", "VERSION", "WORKSPACE", "NO_DEVICE", "CUDA", "OUT_OF_MEMORY", "INTERNAL", "CANCELLED"]


@pytest.mark.parametrize(("status", "name"), list(enumerate(NAMES)))
def test_status_names(status: int, name: str) -> None:
    assert abi.status_name(status) == name


@pytest.mark.parametrize("status", [-1, 10, 1000, -(2**31), 2**31 - 1])
def test_unknown_status(status: int) -> None:
    assert abi.status_name(status) == "UNKNOWN"


def test_new_thread_has_no_text() -> None:
    assert abi.lib.flash_kernel_info(-1, None) == abi.INVALID
    seen: list[str] = []
    thread = threading.Thread(target=lambda: seen.append(abi.last_error()))
    thread.start()
    thread.join()
    assert seen == [""]
    assert abi.last_error().startswith("info: ")


def test_threads_do_not_mix() -> None:
    """Eight threads get different refusals at once; each reads its own text."""
    wrong: list[str] = []
    start = threading.Barrier(8)

    def refuse(number: int) -> None:
        start.wait()
        for value in range(number * 1000, number * 1000 + 300):
            opts = abi.options(abi.MergeOptions, reserved=value + 1)
            if abi.lib.flash_attention_merge(None, None, 1, None, None, opts, None) != abi.INVALID:
                wrong.append("not refused")
            if abi.last_error() != f"reserved: must be 0 ({value + 1})":
                wrong.append(abi.last_error())

    threads = [threading.Thread(target=refuse, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_success_clears_only_this_thread() -> None:
    assert abi.lib.flash_kernel_info(-1, None) == abi.INVALID
    thread = threading.Thread(target=lambda: call(build("compress", "dense")))
    thread.start()
    thread.join()
    assert abi.last_error().startswith("info: ")
    assert call(build("compress", "dense")) == abi.OK
    assert abi.last_error() == ""


def test_information_does_not_touch_the_text() -> None:
    assert abi.lib.flash_kernel_info(-1, None) == abi.INVALID
    abi.lib.flash_version()
    abi.lib.flash_kernel_count()
    abi.lib.flash_status_name(0)
    assert abi.last_error().startswith("info: ")


@pytest.mark.parametrize("name", [b"x" * 100_000, bytes(range(1, 256)) * 40, b"%s%n%d"])
def test_hostile_names(name: bytes) -> None:
    """A kernel's name is quoted and truncated, and is never used as a format."""
    opts = abi.options(abi.MergeOptions, kernel=name)
    case = build("merge", "dense")
    outs = (abi.Tensor * 2)(case.tensors["outs[0]"], case.tensors["outs[1]"])
    lses = (abi.Tensor * 2)(case.tensors["lses[0]"], case.tensors["lses[1]"])
    out = abi.pointer(case.tensors["out"])
    assert abi.lib.flash_attention_merge(outs, lses, 2, out, None, opts, None) == abi.UNSUPPORTED
    text = abi.lib.flash_last_error()
    assert name[:60] in text
    assert len(text) < 2048


def test_text_is_a_string_at_one_address() -> None:
    address = c.cast(abi.lib.flash_last_error, c.c_void_p)
    assert address.value
    raw = c.CFUNCTYPE(c.c_void_p)(address.value)
    assert raw()
    assert raw() == raw()
