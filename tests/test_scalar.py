"""Two oracles must agree: the scalar reference in C++ (double) and the float64 reference in NumPy, to 1e-12, over every option.

The fuzzer and the C tests compare the fast kernels with the scalar reference, which is checked here.
"""

from __future__ import annotations

import random

import decode_cases
import numpy as np
import pytest
from case import Case, used_rows
from decode_cases import DecodeCase
from harness import run
from reference_decode import decode as reference_decode
from reference_decode import merge

import libflash

RELATIVE = 1e-12
RANDOM_CASES = 150

# Each option with the values that a random case draws from; the first is the default.
CHOICES: dict[str, list] = {
    "head_dim": [16, 1, 3, 8, 33, 64],
    "head_dim_v": [None, None, 5, 24],
    "causal": [False, True],
    "causal_align": ["bottom_right", "bottom_right", "top_left"],
    "window_size": [(-1, -1), (-1, -1), (4, 0), (0, 0), (-1, 3), (9, -1), (2, 11)],
    "softmax_scale": [None, None, 0.7, -0.3, 0.0, 3.0],
    "softcap": [0.0, 0.0, 1.5, 30.0],
    "alibi": [None, None, "h", "bh"],
    "bias": [None, None, "bhqk", "hqk", "bk", "q", "", "bqk"],
    "mask": [None, None, "bhqk", "qk", "bk", "hq"],
    "block_mask": [None, None, "", "bh", "b", "h"],
    "sink": [False, True],
    "dropout_p": [0.0, 0.0, 0.25, 0.5],
    "dlse": [False, True],
    "positions": [None, None, None, "begin", "begins", "rows"],
    "part_of_dropout": [False, False, True],
    "fill": ["randn", "mean", "outlier"],
}


def draw(seed: int) -> Case:
    """A random case: every field is chosen independently."""
    rng = random.Random(seed)
    fields = {name: rng.choice(values) for name, values in CHOICES.items()}
    heads_k = rng.randint(1, 3)
    fields |= {
        "heads_k": heads_k,
        "heads_q": heads_k * rng.randint(1, 3),
        "seed": rng.getrandbits(64),
        "offset": rng.getrandbits(64),
    }
    if fields["positions"]:
        fields["causal_align"] = "bottom_right"
    batch = rng.randint(1, 3)

    def lengths() -> list[int]:
        return [rng.choice([0, 1, 2, 7, 19, 40]) if rng.random() < 0.8 else rng.randint(120, 140) for _ in range(batch)]

    rows_q, rows_k = lengths(), lengths()
    if rng.random() < 0.4:
        fields |= {"seqlen_q": tuple(rows_q), "seqlen_k": tuple(rows_k), "slack_rows": rng.randint(0, 3)}
    else:
        fields |= {"batch": batch, "seqlen_q": rows_q[0], "seqlen_k": rows_k[0]}
        rows_q, rows_k = rows_q[:1] * batch, rows_k[:1] * batch
    for name, rows in {"used_q": rows_q, "used_k": rows_k}.items():
        if rng.random() < 0.25:
            fields[name] = tuple(rng.randint(0, n) for n in rows)
    return Case(name=f"scalar-{seed}", dtype="fp64", **fields)


CASES = [draw(seed) for seed in range(RANDOM_CASES)]


def assert_agree(got: np.ndarray, exact: np.ndarray, what: str, scale: float = 1.0) -> None:
    """Relative to the largest value of the tensor, or to `scale` if that is larger; the same infinities, no NaN."""
    infinite = np.isinf(exact)
    assert np.array_equal(np.where(infinite, got, 0), np.where(infinite, exact, 0)), f"{what}: -inf at other positions"
    finite = np.where(infinite, 0, exact)
    error = np.abs(np.where(infinite, 0, got) - finite).max(initial=0)
    limit = RELATIVE * max(scale, np.abs(finite).max(initial=0))
    assert error <= limit, f"{what}: off by {error:.3g}, limit {limit:.3g}"


def sequence_rows(case: Case, array: np.ndarray, lengths: int | tuple[int, ...]) -> np.ndarray:
    """Rows that belong to a sequence; others are not written."""
    return used_rows(case, array, lengths, None)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_scalar_and_reference_agree(case: Case) -> None:
    x, got = case.inputs(), run(case, "scalar")
    o, lse = case.reference_forward()
    exact = case.reference()
    rows_q = sequence_rows(case, x.q, case.seqlen_q)
    rows_k = sequence_rows(case, x.k, case.seqlen_k)
    assert_agree(got["o"][rows_q], o[rows_q], "o")
    at_lse = (slice(None), rows_q) if case.packed else slice(None)
    assert_agree(got["lse"][at_lse], lse[at_lse], "lse")
    # Gradients are sums of products of this size, which may cancel.
    scale = max(np.abs(a).max(initial=1) for a in (x.q, x.k, x.v, x.dout)) ** 3
    for name, rows in {"dq": rows_q, "dk": rows_k, "dv": rows_k}.items():
        assert_agree(got[name][rows], getattr(exact, name)[rows], name, scale)
    for name in ("dbias", "dsink"):
        assert (name in got) == (getattr(exact, name) is not None)
        if name in got:
            assert_agree(got[name], getattr(exact, name), name, scale)


def test_every_choice_is_drawn() -> None:
    """The random cases cover every listed value, and most of them have visible keys."""
    for name, values in CHOICES.items():
        assert {getattr(case, name) for case in CASES} == set(values), name
    assert sum(case.packed for case in CASES) > 20
    assert sum(case.used_k is not None for case in CASES) > 20
    seen = [np.isfinite(case.reference_forward()[1]).any() for case in CASES]
    assert np.mean(seen) > 0.75


def test_disagreement_is_found() -> None:
    """The comparison fails for a relative error of 1e-11 and for a misplaced infinity."""
    x = np.array([1.0, -np.inf, 3.0])
    assert_agree(x, x, "same")
    for wrong in (
        x * (1 + 1e-11),
        np.array([1.0, 5.0, 3.0]),
        np.array([-np.inf, -np.inf, 3.0]),
        np.array([1.0, -np.inf, np.nan]),
    ):
        with pytest.raises(AssertionError):
            assert_agree(wrong, x, "wrong")


@pytest.mark.parametrize("case", [c for c in decode_cases.quick() if c.name.endswith("fp32") and not c.absent_page], ids=str)
def test_scalar_decode_and_reference_agree(case: DecodeCase) -> None:
    x = DecodeCase(**{**case.__dict__, "dtype": "fp64"}).inputs()
    exact = reference_decode(x.q, x.k_cache, x.v_cache, **x.options)
    o, lse = np.zeros_like(exact.out), np.full_like(exact.lse, -np.inf)  # rows that belong to no sequence are not written
    libflash.decode(x.q, x.k_cache, x.v_cache, out=o, lse=lse, kernel="decode_cpu_scalar", **x.options)
    assert_agree(o, exact.out, "o")
    assert_agree(lse, exact.lse, "lse")
    for got, wanted in ((x.k_cache, exact.k_cache), (x.v_cache, exact.v_cache)):
        assert np.array_equal(np.isnan(got), np.isnan(wanted))
        assert_agree(np.nan_to_num(got), np.nan_to_num(wanted), "cache")


@pytest.mark.parametrize("parts", [1, 2, 5, 64])
def test_merge_and_reference_agree(parts: int) -> None:
    rng = np.random.default_rng(parts)
    outs, lses = rng.standard_normal((parts, 2, 9, 3, 17)), 10 * rng.standard_normal((parts, 2, 3, 9))
    hidden = rng.random(lses.shape) < 0.3
    hidden[:, 0, 0, 0] = True
    lses[hidden] = -np.inf
    outs[np.swapaxes(hidden, -1, -2)] = np.nan
    exact, exact_lse = merge(outs, lses)
    o, lse = libflash.merge(list(outs), list(lses))
    assert_agree(o, exact, "o")
    assert_agree(lse, exact_lse, "lse")
