"""The dropout mask: known answers of the generator, the dependences of the mask, and tests of randomness."""

from __future__ import annotations

import numpy as np
import pytest
import reference
from dropout_mask import keep_mask, philox4x32, random_words

ALL_ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # the generator's published answers
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ALL_ONES,) * 4, (ALL_ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ],
)
def test_philox_known_answers(counter: tuple, key: tuple, words: tuple) -> None:
    assert tuple(int(word) for word in philox4x32(counter, key)) == words


def test_words_stand_where_the_definition_says() -> None:
    seed, offset, row, column = 0x0123456789ABCDEF, 0xFEDCBA9876543210, 37, 22
    c3 = 0x76543210 ^ (0xFEDCBA98 * 0x9E3779B9 % 2**32)
    words = philox4x32((column // 4, row, 2 * 5 + 3, c3), (0x89ABCDEF, 0x01234567))
    assert random_words(seed, offset, 2 * 5 + 3, 40, 30)[row, column] == words[column % 4]


def test_mask_is_that_of_any_larger_problem() -> None:
    whole = keep_mask(0.25, 9, 1, 1, 4, 2, 70, 50)
    for rows, columns in ((1, 1), (3, 7), (70, 49), (0, 5), (5, 0)):
        np.testing.assert_array_equal(keep_mask(0.25, 9, 1, 1, 4, 2, rows, columns), whole[:rows, :columns])


def test_threshold_is_exact() -> None:
    word = int(random_words(3, 0, 0, 1, 1)[0, 0])
    assert keep_mask(word / 2**32, 3, 0, 0, 1, 0, 1, 1)[0, 0]
    assert not keep_mask((word + 1) / 2**32, 3, 0, 0, 1, 0, 1, 1)[0, 0]


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
        "column 4 on": (base[:, 4:], base[:, :-4]),
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
