"""The dropout mask: known answers of the generator, the dependences of the mask, and tests of randomness."""

from __future__ import annotations

import numpy as np
import pytest
import reference
from dropout_mask import keep_factor, keep_mask, philox4x32, random_numbers, threshold

ALL_ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # the generator's published answers
        ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        ((ALL_ONES,) * 4, (ALL_ONES,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    ],
)
def test_philox_known_answers(counter: tuple, key: tuple, words: tuple) -> None:
    assert tuple(int(word) for word in philox4x32(counter, key)) == words


def test_numbers_stand_where_the_definition_says() -> None:
    seed, offset, row, column = 0x0123456789ABCDEF, 0xFEDCBA9876543210, 37, 22
    c3 = 0x76543210 ^ (0xFEDCBA98 * 0x9E3779B9 % 2**32)
    words = philox4x32((column // 8, row, 2 * 5 + 3, c3), (0x89ABCDEF, 0x01234567))
    found = random_numbers(seed, offset, 2 * 5 + 3, 40, 30)[row, column : column + 2]
    assert found.tolist() == [int(words[3]) % 2**16, int(words[3]) // 2**16]  # columns 22 and 23


def test_mask_is_that_of_any_larger_problem() -> None:
    whole = keep_mask(0.25, 9, 1, 1, 4, 2, 70, 50)
    for rows, columns in ((1, 1), (3, 7), (70, 49), (0, 5), (5, 0)):
        np.testing.assert_array_equal(keep_mask(0.25, 9, 1, 1, 4, 2, rows, columns), whole[:rows, :columns])


def test_threshold_is_exact() -> None:
    number = int(random_numbers(3, 0, 0, 1, 1)[0, 0])
    assert keep_mask((number + 0.499) / 2**16, 3, 0, 0, 1, 0, 1, 1)[0, 0]
    assert not keep_mask((number + 0.5) / 2**16, 3, 0, 0, 1, 0, 1, 1)[0, 0]


def test_smallest_and_largest_probability() -> None:
    numbers = random_numbers(3, 0, 0, 512, 512)
    assert keep_mask(2**-17 - 1e-12, 3, 0, 0, 1, 0, 512, 512).all()
    np.testing.assert_array_equal(keep_mask(2**-17, 3, 0, 0, 1, 0, 512, 512), numbers > 0)
    np.testing.assert_array_equal(keep_mask(1 - 1e-12, 3, 0, 0, 1, 0, 512, 512), numbers == 2**16 - 1)


@pytest.mark.parametrize(
    ("p", "factor"), [(0.0, 1), (1e-6, 1), (2**-17, 65536 / 65535), (0.25, 4 / 3), (0.1, 65536 / 58982), (1 - 1e-12, 65536)]
)
def test_factor_keeps_the_mean(p: float, factor: float) -> None:
    """The factor is 1 / (1 - r), where r is the probability that the threshold gives, not p itself."""
    assert keep_factor(p) == pytest.approx(factor, rel=1e-15)
    assert (1 - threshold(p) / 2**16) * keep_factor(p) == pytest.approx(1, rel=1e-15)


@pytest.mark.parametrize("p", [0.0625, 0.25, 0.5, 0.875])
def test_kept_fraction(p: float) -> None:
    kept = np.concatenate([keep_mask(p, 11, 0, b, 3, h, 200, 200).ravel() for b in range(2) for h in range(3)])
    assert abs(kept.mean() - (1 - p)) < 5 * np.sqrt(p * (1 - p) / kept.size)


def test_rows_columns_heads_and_seeds_are_uncorrelated() -> None:
    n = 400

    def centred(seed: int = 5, offset: int = 0, batch: int = 0, head: int = 0) -> np.ndarray:
        return keep_mask(0.5, seed, offset, batch, 8, head, n, n) - 0.5

    base = centred()
    others = {
        "next row": (base[1:], base[:-1]),
        "next column": (base[:, 1:], base[:, :-1]),
        "column 2 on": (base[:, 2:], base[:, :-2]),
        "column 8 on": (base[:, 8:], base[:, :-8]),
        "transpose": (np.triu(base, 1), np.triu(base.T, 1)),
        "next head": (base, centred(head=1)),
        "next sequence": (base, centred(batch=1)),
        "next seed": (base, centred(seed=6)),
        "high seed bits": (base, centred(seed=5 + 2**32)),
        "next offset": (base, centred(offset=1)),
        "high offset bits": (base, centred(offset=2**32)),
    }
    for name, (a, b) in others.items():
        sigmas = (a * b).sum() / (0.25 * np.sqrt(a.size))
        assert abs(sigmas) < 5, f"{name}: {sigmas} sigmas"


def test_mean_over_seeds_is_the_output_without_dropout() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 4, 1, 8)) for _ in range(3))
    plain, lse = reference.forward(q, k, v)
    runs = [reference.forward(q, k, v, dropout_p=0.25, seed=seed) for seed in range(1000)]
    outs = np.array([o for o, _ in runs])
    assert (abs(outs.mean(axis=0) - plain) < 5 * outs.std(axis=0) / np.sqrt(len(outs))).all()
    np.testing.assert_array_equal(runs[0][1], lse)  # lse does not depend on dropout
