"""max_logit and entropy of forward, by every CPU kernel, against the float64 oracle."""

from __future__ import annotations

import abi
import cases
import numpy as np
import pytest
from case import Case, Inputs
from convert import owned
from harness import assert_same_bits, cpu_kernels, random
from reference_statistics import statistics
from tangent_problem import c_options, lse_like, out_like

import libflash

CASES = [case for case in cases.quick() if not case.name.startswith("poison")][::3]


def run(x: Inputs, isa: str, *, heads: bool = False, entropy: bool = True, **tiles: int) -> dict[str, np.ndarray]:
    """o, lse, max_logit and entropy through the C interface."""
    made = {"o": out_like(x), "lse": lse_like(x)}
    made["max_logit"] = np.full(x.q.shape[-2], np.nan, made["lse"].dtype) if heads else lse_like(x)
    if entropy:
        made["entropy"] = lse_like(x)
    given = {name: made[name] for name in ("max_logit", "entropy") if name in made}
    kernel = f"forward_cpu_{isa}".encode()
    abi.forward(x.q, x.k, x.v, made["o"], made["lse"], kernel=kernel, **given, **tiles, **c_options(x))
    return made


def rows_of(case: Case, x: np.ndarray) -> np.ndarray:
    """Without the rows that belong to no sequence."""
    return owned(case, {"lse": x})["lse"]


def check(case: Case, found: dict[str, np.ndarray], x: Inputs, *, heads: bool = False) -> None:
    rows, largest, entropy = statistics(x.q, x.k, x.v, **x.options)
    scale = 1 + np.abs(rows[np.isfinite(rows)]).max(initial=0)
    limit = scale * (1e-12 if x.q.dtype == np.float64 else 1e-5)
    if heads:
        np.testing.assert_allclose(found["max_logit"], largest, rtol=0, atol=limit)
    for name, wanted in (("max_logit", rows), ("entropy", entropy)):
        if name == "max_logit" and heads:
            continue
        np.testing.assert_allclose(*(rows_of(case, a) for a in (found[name], wanted)), rtol=0, atol=limit, err_msg=name)


@pytest.mark.parametrize("isa", cpu_kernels())
@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case: Case, isa: str) -> None:
    x = case.inputs()
    check(case, run(x, isa), x)
    check(case, run(x, isa, heads=True), x, heads=True)


@pytest.mark.parametrize("isa", [isa for isa in cpu_kernels() if isa != "scalar"])
def test_results_do_not_depend_on_statistics(isa: str) -> None:
    for case in CASES[::6]:
        x = case.inputs()
        plain = {"o": out_like(x), "lse": lse_like(x)}
        abi.forward(x.q, x.k, x.v, plain["o"], plain["lse"], kernel=f"forward_cpu_{isa}".encode(), **c_options(x))
        for asked in ({"heads": True, "entropy": False}, {}):
            made = run(x, isa, **asked)
            for name, wanted in plain.items():
                assert_same_bits(made[name], wanted, name)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_long_sequences(dtype: str) -> None:
    """Sums over more than one block of keys, whose maxima differ: the second block has the largest score, or the first."""
    q, k, v = (random(1, rows, 2, 8, seed=i, dtype=dtype) for i, rows in enumerate((3, 9000, 9000)))
    for factors in ((1, 4, 1), (4, 1, 1), (1, 1, 6)):
        keys = k.copy()
        for i, factor in enumerate(factors):
            keys[:, 4096 * i : 4096 * (i + 1)] *= factor
        made = [np.full((1, 2, 3), np.nan, dtype) for _ in range(2)]
        libflash.attention(q, keys, v, max_logit=made[0], entropy=made[1])
        rows, _, entropy = statistics(q, keys, v)
        np.testing.assert_allclose(made, (rows, entropy), rtol=1e-5 if dtype == "float32" else 1e-12)


def test_known_values() -> None:
    """Equal scores: log(n). One key: 0. A sink of the same score is one more outcome. No key: -inf and 0."""
    q, v = np.zeros((1, 4, 1, 4)), np.ones((1, 7, 1, 4))
    k = np.zeros((1, 7, 1, 4))
    top, entropy = np.full((1, 1, 4), np.nan), np.full((1, 1, 4), np.nan)
    options = {"max_logit": top, "entropy": entropy}
    libflash.attention(q, k, v, **options)
    assert (top == 0).all()
    np.testing.assert_allclose(entropy, np.log(7), rtol=1e-15)
    libflash.attention(q, k, v, learnable_sink=np.zeros(1), **options)
    np.testing.assert_allclose(entropy, np.log(8), rtol=1e-15)
    for sink in (800.0, -800.0):
        libflash.attention(q, k, v, learnable_sink=np.full(1, sink), **options)
        assert (top == 0).all()
        np.testing.assert_allclose(entropy, 0 if sink > 0 else np.log(7), rtol=1e-15)
    mask = np.ones((1, 1, 4, 7), bool)
    mask[0, 0, 1] = False
    mask[0, 0, 2, 1:] = False
    bias = np.full((1, 1, 4, 7), -3.0)
    for sink in ({}, {"learnable_sink": np.full(1, -np.inf)}):
        libflash.attention(q, k, v, mask=mask, bias=bias, **sink, **options)
        np.testing.assert_array_equal(top[0, 0], [-3, -np.inf, -3, -3])
        np.testing.assert_allclose(entropy[0, 0], [np.log(7), 0, 0, np.log(7)], rtol=1e-15)


@pytest.mark.parametrize("isa", cpu_kernels())
def test_nan(isa: str) -> None:
    """Where lse is NaN, so are the statistics, and only there; the maximum of a head keeps it."""
    q, k, v = random(1, 70, 2, 8), random(1, 90, 2, 8, seed=1), random(1, 90, 2, 8, seed=2)
    q[0, 3, 1, 2] = np.nan
    top, entropy, lse = (np.zeros((1, 2, 70), np.float32) for _ in range(3))
    largest = np.zeros(2, np.float32)
    kernel = f"forward_cpu_{isa}"
    libflash.attention(q, k, v, max_logit=top, entropy=entropy, lse=lse, kernel=kernel)
    libflash.attention(q, k, v, max_logit=largest, kernel=kernel)
    for x in (top, entropy):
        np.testing.assert_array_equal(np.isnan(x), np.isnan(lse))
    assert np.isnan(largest[1])
    assert largest[0] == top[0, 0].max()


def test_threads_and_strides() -> None:
    """The maximum of a head is the same with any number of threads; outputs may have any strides."""
    q, k, v = random(3, 400, 4, 16), random(3, 500, 2, 16, seed=1), random(3, 500, 2, 16, seed=2)
    top, wide = np.zeros((3, 4, 400), np.float32), np.full((4, 3), np.nan, np.float32)
    entropy = np.zeros((400, 4, 3), np.float32)
    libflash.attention(q, k, v, max_logit=top, entropy=entropy.T)
    for threads in (1, 2, 5):
        libflash.set_num_threads(threads)
        libflash.attention(q, k, v, max_logit=wide[:, 1])
        np.testing.assert_array_equal(wide[:, 1], top.max((0, 2)))
    assert np.isnan(wide[:, [0, 2]]).all()
    np.testing.assert_allclose(entropy.T, statistics(q, k, v)[2], atol=1e-4)


def test_empty_problems() -> None:
    largest = np.zeros(2, np.float32)
    for batch, rows, keys in ((0, 3, 4), (2, 0, 4), (2, 3, 0)):
        q, k = np.zeros((batch, rows, 2, 8), np.float32), np.zeros((batch, keys, 2, 8), np.float32)
        largest[:] = 5
        entropy = np.full((batch, 2, rows), 5, np.float32)
        libflash.attention(q, k, k, max_logit=largest, entropy=entropy)
        assert (largest == -np.inf).all()
        assert (entropy == 0).all()


def test_explain_names_them() -> None:
    q = np.zeros((1, 3, 2, 8), np.float32)
    text = libflash.explain(q, q, q)
    assert "max_logit" not in text
    assert "entropy" not in text
    largest, entropy = np.full(2, 5, np.float32), np.full((1, 2, 3), 5, np.float32)
    text = libflash.explain(q, q, q, max_logit=largest, entropy=entropy)
    assert "max_logit of heads" in text
    assert "entropy" in text
    assert (largest == 5).all()
    assert (entropy == 5).all()
    with pytest.raises(libflash.InvalidError, match="max_logit"):
        libflash.explain(q, q, q, max_logit=largest[:1])
    with pytest.raises(TypeError, match="max_logit"):
        libflash.explain(q, q, q, op="backward", max_logit=largest)
    bias, sink = np.ones((3, 3), np.float32), np.ones(2, np.float32)
    text = libflash.explain(q, q, q, op="backward", bias=bias, dbias=bias, learnable_sink=sink, dsink=sink)
    assert "dbias" in text
    assert "dsink" in text
    assert (bias == 1).all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch at its first dual level
def test_torch() -> None:
    torch = pytest.importorskip("torch")
    import libflash.torch

    q, k, v = (torch.from_numpy(random(2, 9, 4, 8, seed=i)) for i in range(3))
    wanted = statistics(q.numpy(), k.numpy(), v.numpy(), causal=True)
    for grad in (False, True):
        x = [y.clone().requires_grad_(grad) for y in (q, k, v)]
        for attention in (libflash.attention, libflash.torch.attention):
            top, entropy = torch.zeros(4), torch.zeros(2, 4, 9)
            out = attention(*x, causal=True, max_logit=top, entropy=entropy)
            np.testing.assert_allclose(top, wanted[1], rtol=1e-5)
            np.testing.assert_allclose(entropy, wanted[2], rtol=1e-5, atol=1e-6)
            if grad:
                assert all(y is not None for y in torch.autograd.grad(out.sum(), x))
    top = torch.zeros(4)
    attention = lambda q: libflash.torch.attention(q, k, v, max_logit=top)  # noqa: E731
    for wrong in (
        lambda: torch.func.grad(lambda q: attention(q).sum())(q),
        lambda: torch.func.jvp(attention, (q,), (q,)),
        lambda: torch.func.vmap(attention)(q[None]),
        lambda: libflash.torch.attention(q, k, v, max_logit=top.requires_grad_()),
    ):
        with pytest.raises(libflash.UnsupportedError, match="max_logit"):
            wrong()
    with pytest.raises(Exception, match="max_logit"):
        torch.compile(attention, backend="eager", fullgraph=True)(q)


def test_jax_is_refused() -> None:
    jax = pytest.importorskip("jax")
    q = jax.numpy.zeros((1, 3, 2, 8))
    with pytest.raises(libflash.UnsupportedError, match=r"max_logit cannot be given .* return_stats=\('max_logit',\)"):
        jax.jit(lambda q: libflash.attention(q, q, q, max_logit=np.zeros(2, np.float32)))(q)
