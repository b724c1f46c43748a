"""Named regions of scratch memory."""

from __future__ import annotations

import ctypes as c

import pytest
from host_library import compile_host

WRAPPER = """
#include "problem/workspace.h"
#include "problem/error.h"
using namespace libflash;
static Workspace work;
template <class Body> long status_or(const Body& body) {
    try { return static_cast<long>(body()); } catch (const Error& error) { return -static_cast<long>(error.status()); }
}
extern "C" long add(const char* name, size_t bytes) { return status_or([&] { return work.add(name, bytes); }); }
extern "C" long find(const char* name) { return status_or([&] { return work.offset(name); }); }
extern "C" long total() { return static_cast<long>(work.bytes()); }
extern "C" void clear() { work = Workspace(); }
"""
UNSUPPORTED, INTERNAL = 2, 8


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> c.CDLL:
    lib = compile_host(tmp_path_factory.mktemp("workspace"), WRAPPER, "problem/workspace.cpp", "problem/check.cpp")
    lib.add.restype = lib.find.restype = lib.total.restype = c.c_long
    lib.add.argtypes = [c.c_char_p, c.c_size_t]
    return lib


@pytest.fixture
def lib(built: c.CDLL) -> c.CDLL:
    built.clear()
    return built


def test_regions_follow_each_other_aligned(lib: c.CDLL) -> None:
    assert [lib.add(b"a", 1), lib.add(b"b", 256), lib.add(b"none", 0), lib.add(b"c", 257)] == [0, 256, 512, 512]
    assert lib.total() == 1024
    assert [lib.find(name) for name in (b"c", b"a", b"b", b"none")] == [512, 0, 256, 512]


def test_unknown_name(lib: c.CDLL) -> None:
    assert lib.find(b"a") == -INTERNAL


@pytest.mark.parametrize("size", [2**64 - 1, 2**64 - 256, 2**63])
def test_what_does_not_fit_is_refused(lib: c.CDLL, size: int) -> None:
    assert lib.add(b"a", size) == -UNSUPPORTED


def test_sum_that_does_not_fit_is_refused(lib: c.CDLL) -> None:
    assert lib.add(b"a", 2**62) == 0
    assert lib.add(b"b", 2**62) == -UNSUPPORTED


def test_number_of_regions(lib: c.CDLL) -> None:
    names = [f"r{n}".encode() for n in range(17)]
    assert [lib.add(name, 256) for name in names[:16]] == [256 * n for n in range(16)]
    assert lib.add(names[16], 1) == -INTERNAL
