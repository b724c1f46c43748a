"""The probability of dropping is dropout_p rounded to a multiple of 2^-16, and the factor of kept entries follows it: every CPU
kernel against the oracle near 0, where nothing or almost nothing is dropped, and near 1, where almost nothing is kept.
"""

from __future__ import annotations

import numpy as np
import pytest
from case import Inputs
from dropout_mask import random_numbers
from harness import assert_close, assert_same_bits, cpu_kernels, gradients, problem, random
from reference import backward, forward
from reference_tangent import Tangents, backward_tangent, forward_tangent
from tangent_problem import run_backward, run_forward

SIZES = {"batch": 1, "sq": 24, "sk": 40, "hq": 4, "hk": 2, "d": 16}
SEED = 17519  # so that the smallest probability drops an entry and the largest keeps some
NOTHING = 1e-6  # rounded to 0
PROBABILITIES = (NOTHING, 2.0**-17, 0.1, 0.99999, 1 - 1e-12)
ISAS = pytest.mark.parametrize("isa", cpu_kernels())


def options(p: float) -> dict[str, float]:
    return {"dropout_p": p, "seed": SEED}


def test_the_seed_reaches_both_ends() -> None:
    numbers = np.stack([random_numbers(SEED, 0, head, SIZES["sq"], SIZES["sk"]) for head in range(SIZES["hq"])])
    assert np.count_nonzero(numbers == 0) == 1
    assert np.count_nonzero(numbers == 2**16 - 1) == 2


@ISAS
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("p", PROBABILITIES)
def test_forward_and_backward(isa: str, dtype: str, p: float) -> None:
    inputs = problem(dtype, **SIZES)
    got = gradients(*inputs, isa, **options(p))
    if p == NOTHING:
        assert_same_bits(got, gradients(*inputs, isa), "dropout of nothing")
    q, k, v, dout = (x.astype(np.float64) for x in inputs)
    o, lse = forward(q, k, v, **options(p))
    exact = backward(dout, q, k, v, **options(p))
    for name, wanted in {"o": o, "lse": lse, "dq": exact.dq, "dk": exact.dk, "dv": exact.dv}.items():
        assert wanted.any(), name
        assert_close(got[name], wanted, name)


@ISAS
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("p", PROBABILITIES)
def test_tangents(isa: str, dtype: str, p: float) -> None:
    q, k, v, dout = problem(dtype, **SIZES)
    x = Inputs(q, k, v, dout, None, options(p))
    t = Tangents(**{name: random(*getattr(x, name).shape, seed=40, dtype=dtype) for name in ("q", "k", "v", "dout")})
    got = run_forward(x, t, isa)
    got |= run_backward(x, t, isa, got, gradients=True)
    wide = {name: getattr(t, name).astype(np.float64) for name in ("q", "k", "v", "dout")}
    q, k, v, dout = (a.astype(np.float64) for a in (q, k, v, dout))
    o, lse, to, tlse = forward_tangent(q, k, v, Tangents(**wide), **options(p))
    exact, texact = backward_tangent(dout, q, k, v, Tangents(**wide), **options(p))
    wanted = {"o": o, "lse": lse, "to": to, "tlse": tlse}
    for name in ("dq", "dk", "dv"):
        wanted |= {name: getattr(exact, name), "t" + name: getattr(texact, name)}
    for name, value in wanted.items():
        assert value.any(), name
        assert_close(got[name], value, name, factor=4)
