"""The limits of a merge: float32 arithmetic stays inside, wrong shares do not."""

from __future__ import annotations

import numpy as np
import pytest
from merge_bounds import expect_merge
from rounding import DTYPES, stored
from tolerance import check


def parts(seed: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    outs, lses = rng.standard_normal((5, 2, 70, 3, 16)), 10 * rng.standard_normal((5, 2, 3, 70))
    lses[:, 0, :, 4] = -np.inf
    lses[2] = -np.inf
    outs[2] = np.nan
    return stored(outs, dtype), lses.astype(np.float32)


def in_float32(outs: np.ndarray, lses: np.ndarray, skew: float = 1.0) -> dict[str, np.ndarray]:
    top = lses.max(axis=0)
    top = np.where(np.isneginf(top), np.float32(0), top)
    e = np.exp(lses - top)
    e[1] *= np.float32(skew)
    total = e.sum(axis=0)
    seen = total > 0
    lse = np.where(seen, top + np.log(np.where(seen, total, 1)), -np.inf)
    shares = np.swapaxes(e / np.where(seen, total, np.float32(1)), -1, -2)[..., None]
    o = sum(np.where(w > 0, w * part, 0) for w, part in zip(shares, outs.astype(np.float32), strict=True))
    return {"o": stored(o, outs.dtype), "lse": lse}


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("seed", range(5))
def test_float32_merge_is_inside(seed: int, dtype: str) -> None:
    outs, lses = parts(seed, dtype)
    report = check(in_float32(outs, lses), expect_merge(outs, lses))
    assert report["o"].t1 > 0
    wrong = in_float32(outs, lses, skew=1.001)
    with pytest.raises(AssertionError, match="lse: T1"):
        check({"lse": wrong["lse"]}, expect_merge(outs, lses))
    if dtype == "fp32":
        with pytest.raises(AssertionError, match="o: T1"):
            check({"o": wrong["o"]}, expect_merge(outs, lses))


def test_result_may_be_declared_coarser_than_the_parts() -> None:
    outs, lses = parts(0, "fp32")
    rounded = {"o": stored(in_float32(outs, lses)["o"], "bf16")}
    check(rounded, expect_merge(outs, lses, DTYPES["bf16"]))
    with pytest.raises(AssertionError, match="o: T1"):
        check({"o": stored(rounded["o"], "fp32")}, expect_merge(outs, lses))


def test_nothing_in_any_part_is_zero() -> None:
    outs, lses = parts(1, "fp32")
    result = in_float32(outs, lses)
    result["o"][0, 4, 0, 0] = 1e-20
    with pytest.raises(AssertionError, match="o: nothing is visible"):
        check(result, expect_merge(outs, lses))
