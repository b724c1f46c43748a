"""Merge of many parts: any number."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from harness import random
from merge_bounds import expect_merge
from tolerance import check

import libflash


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64], ids=lambda t: np.dtype(t).name)
@pytest.mark.parametrize("count", [64, 65, 129, 1000])
def test_many_parts(count: int, dtype: type) -> None:
    outs = random(count, 2, 7, 3, 16, dtype=dtype)
    lses = (5 * random(count, 2, 3, 7, seed=1)).astype(np.float64 if dtype is np.float64 else np.float32)
    lses[count // 2, 0] = -np.inf
    outs[count // 2, 0] = np.nan
    out, lse = libflash.merge(list(outs), list(lses))
    check({"o": out, "lse": lse}, expect_merge(outs, lses))


def test_a_hundred_thousand_equal_parts() -> None:
    x, lse = random(1, 3, 2, 8), np.zeros((1, 2, 3), np.float32)
    out, merged = libflash.merge([x] * 100_000, [lse] * 100_000)
    np.testing.assert_allclose(out, x, rtol=2e-7)
    np.testing.assert_allclose(merged, np.log(100_000), rtol=2e-7)


def test_no_part_is_refused() -> None:
    with pytest.raises(libflash.InvalidError, match=r"outs has 0 arrays; it needs 1 or more"):
        libflash.merge([], [])


def test_an_output_that_is_one_of_many_parts_is_refused() -> None:
    """Also the last part of a large number."""
    parts, lses = [random(1, 3, 2, 8, seed=n) for n in range(100)], [np.zeros((1, 2, 3), np.float32)] * 100
    before = parts[99].copy()
    with pytest.raises(libflash.InvalidError, match=r"out: an output must not overlap another tensor \(it overlaps outs\[99\]\)"):
        libflash.merge(parts, lses, out=parts[99])
    assert (parts[99] == before).all()
