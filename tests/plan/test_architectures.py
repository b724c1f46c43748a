"""For which GPUs a build has code."""

from __future__ import annotations

import ctypes as c

import pytest
from host_library import compile_host

WRAPPER = """
#include "plan/architectures.h"
extern "C" int has(const char* built, int arch, int specific) { return libflash::has_code_for(built, arch, specific != 0); }
"""


@pytest.fixture(scope="module")
def lib(tmp_path_factory: pytest.TempPathFactory) -> c.CDLL:
    return compile_host(tmp_path_factory.mktemp("architectures"), WRAPPER, "plan/architectures.cpp")


@pytest.mark.parametrize(
    ("built", "arch", "specific", "expected"),
    [
        ("80-real", 80, 0, True),
        ("80-real", 86, 0, True),  # machine code runs on later minors
        ("86-real", 80, 0, False),
        ("80-real", 90, 0, False),  # and on no other major
        ("80-virtual", 75, 0, False),
        ("80-virtual", 80, 0, True),
        ("80-virtual", 90, 0, True),  # PTX runs on everything later
        ("80-virtual", 120, 0, True),
        ("80", 120, 0, True),  # a plain number is both
        ("90", 89, 0, False),
        ("90a-real", 90, 0, True),  # an "a" architecture runs on itself alone
        ("90a-real", 100, 0, False),
        ("90a-virtual", 100, 0, False),
        ("90a", 90, 1, True),
        ("80 90", 90, 1, False),  # a kernel that needs 90a
        ("80-real 90a-real 80-virtual", 90, 1, True),
        ("80-real 90a-real 80-virtual", 120, 0, True),
        ("80-real 90a-real 80-virtual", 120, 1, False),
        ("80-real  120-real", 121, 0, True),
        ("", 90, 0, False),
        (" ", 90, 0, False),
    ],
)
def test_has_code(lib: c.CDLL, built: str, arch: int, specific: int, expected: bool) -> None:
    assert bool(lib.has(built.encode(), arch, specific)) == expected
