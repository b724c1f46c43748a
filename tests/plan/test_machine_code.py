"""The GPUs for which a build has code, and the code that runs there."""

from __future__ import annotations

import ctypes as c

import pytest
from host_library import compile_host

WRAPPER = """
#include "cuda/machine_code.h"
using namespace libflash::cuda;
extern "C" int has(const char* built, int arch, int exact) { return has_code_for(built, arch, exact != 0); }
extern "C" int version(const char* built, const char* versions, int arch) { return code_version(built, versions, arch); }
"""


@pytest.fixture(scope="module")
def lib(tmp_path_factory: pytest.TempPathFactory) -> c.CDLL:
    return compile_host(tmp_path_factory.mktemp("machine_code"), WRAPPER, "cuda/machine_code.cpp")


@pytest.mark.parametrize(
    ("built", "arch", "exact", "expected"),
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
        ("90a-real", 90, 0, True),  # code for an "a" architecture runs there only
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
def test_has_code(lib: c.CDLL, built: str, arch: int, exact: int, expected: bool) -> None:
    assert bool(lib.has(built.encode(), arch, exact)) == expected


LIST = "80-real 90-real 100-real 120-real 80-virtual"


@pytest.mark.parametrize(
    ("built", "versions", "arch", "expected"),
    [
        (LIST, "80 90", 80, 80),
        (LIST, "80 90", 89, 80),  # machine code of its major
        (LIST, "80 90", 90, 90),
        (LIST, "80 90", 100, 90),  # machine code, compiled with the last version that is not above it
        (LIST, "80 90 100", 100, 100),
        (LIST, "80 90 120", 100, 90),
        (LIST, "80 90 120", 121, 120),
        (LIST, "80 90", 110, 80),  # only the PTX runs there
        ("80-real 80-virtual", "80 90", 90, 80),
        ("80 100", "80 90", 120, 100),  # PTX has the version of its own architecture
        ("80 100", "80 90", 103, 90),  # machine code is preferred
        ("80-real 86-real", "80 90", 89, 80),
        ("90a-real", "80 90", 90, 90),
        ("90a-real", "80 90", 100, 0),
        ("", "80 90", 90, 0),
    ],
)
def test_which_version_runs(lib: c.CDLL, built: str, versions: str, arch: int, expected: int) -> None:
    assert lib.version(built.encode(), versions.encode(), arch) == expected
