"""Conversions between storage types, against NumPy and ml_dtypes: every 16-bit pattern widened, floats narrowed to nearest even.

`merge` of a single part is a conversion: its weight is exactly 1. tests/cpu/test_convert.cpp narrows all 2^32 floats.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import libflash

ROOT = Path(__file__).resolve().parents[1]
HALF_TYPES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
WIDE_TYPES = [np.dtype(np.float32), np.dtype(np.float64)]


def converted(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """x, a vector, through a merge of one part into an output of another type."""
    part = x.reshape(1, -1, 1, 64)
    out = np.empty(part.shape, dtype)
    lse = np.zeros((1, 1, part.shape[1]), np.float64 if x.dtype == np.float64 else np.float32)
    libflash.merge([part], [lse], out=out, return_lse=False)
    return out.ravel()


def assert_same_numbers(got: np.ndarray, wanted: np.ndarray) -> None:
    """The same bits, with signed zeros; any NaN for NaN."""
    bits = f"u{wanted.itemsize}"
    nan, zero = np.isnan(wanted), wanted == 0
    assert np.array_equal(np.isnan(got), nan)
    same = (got.view(bits) == wanted.view(bits)) | nan | (zero & (got == 0))
    assert same.all(), f"{(~same).sum()} wrong, the first: {got[~same][0]!r} for {wanted[~same][0]!r}"


@np.errstate(all="ignore")
@pytest.mark.parametrize("wide", WIDE_TYPES, ids=str)
@pytest.mark.parametrize("half", HALF_TYPES, ids=str)
def test_every_pattern_widens(half: np.dtype, wide: np.dtype) -> None:
    x = np.arange(1 << 16, dtype=np.uint16).view(half)
    assert_same_numbers(converted(x, wide), x.astype(wide))


@np.errstate(all="ignore")
@pytest.mark.parametrize("half", HALF_TYPES, ids=str)
def test_every_pattern_survives_a_round_trip(half: np.dtype) -> None:
    x = np.arange(1 << 16, dtype=np.uint16).view(half)
    assert_same_numbers(converted(converted(x, WIDE_TYPES[0]), half), x)


@np.errstate(all="ignore")
@pytest.mark.parametrize("half", HALF_TYPES, ids=str)
def test_floats_narrow_to_nearest_even(half: np.dtype) -> None:
    """A stride through all floats, and every midpoint between two values of the narrow type with its neighbours."""
    spread = np.arange(0, 1 << 32, 4099, dtype=np.uint64).astype(np.uint32).view(np.float32)
    values = np.arange(1 << 15, dtype=np.uint16).view(half).astype(np.float32)
    values = values[np.isfinite(values)]
    middle = (values[:-1].astype(np.float64) + values[1:]) / 2
    exact = middle[middle == middle.astype(np.float32)].astype(np.float32)
    near = np.concatenate([exact, np.nextafter(exact, np.float32(0)), np.nextafter(exact, np.float32(np.inf))])
    x = np.concatenate([spread, near, -near])
    x = np.concatenate([x, np.zeros(-len(x) % 64, np.float32)])
    assert_same_numbers(converted(x, half), x.astype(half))


@pytest.mark.long
def test_all_floats(tmp_path: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    assert compiler, "no C++ compiler"
    program = tmp_path / "test_convert"
    source = ROOT / "tests" / "cpu" / "test_convert.cpp"
    folders = [f"-I{ROOT / 'include'}", f"-I{ROOT / 'libflash'}"]
    subprocess.run([compiler, "-std=c++17", "-O2", *folders, str(source), "-o", str(program), "-pthread"], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(" 0 wrong") == 6
