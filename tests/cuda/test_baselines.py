"""The baselines of the benchmarks against the oracle, since a comparison with a wrong baseline means nothing."""

from __future__ import annotations

import pathlib
import sys

import numpy as np
import pytest
import reference
from rounding import stored

torch = pytest.importorskip("torch")

FOLDER = str(pathlib.Path(__file__).resolve().parents[1] / "benchmark")
sys.path.insert(0, FOLDER)
import _baselines  # noqa: E402
from gpu_case import to_device  # noqa: E402

sys.path.remove(FOLDER)

# |error| / |row|, as when they are timed (gpu_attention.py); standard attention rounds its scores and P.
TOLERANCE = {"bf16": 0.02, "fp16": 0.003}
SHAPES = [  # batch, seqlen, heads: one tile, a partial tile, several with a partial one, several heads and batch entries
    (1, 32, 1),
    (1, 1, 2),
    (2, 77, 3),
    (1, 128, 2),
    (1, 257, 2),
    (2, 600, 2),
    (1, 1024, 1),
]
PROBLEMS = [("bf16", shape) for shape in SHAPES] + [("fp16", shape) for shape in SHAPES[2:5:2]]
METHODS = ["standard", "flash1", "flash1, 3 blocks a head"]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    try:
        _baselines.library()
    except _baselines.NoCompiler as missing:
        pytest.skip(str(missing))


def results(method: str, q, k, v, dout, causal: bool) -> dict[str, np.ndarray]:
    """Run twice, because a method may depend on uninitialized memory: first with NaN in it, then with the results of the first
    run.
    """
    made = []
    for _ in range(2):
        poison = [torch.full((1 << 22,), torch.nan, device="cuda") for _ in range(8)]
        del poison
        if method == "standard":
            out, weights = _baselines.standard_forward(q, k, v, causal)
            gradients = _baselines.standard_backward(dout, q, k, v, weights, causal)
        else:
            splits = 3 if "3" in method else 1
            out, statistics = _baselines.flash1_forward(q, k, v, causal, splits)
            gradients = _baselines.flash1_backward(dout, q, k, v, out, statistics, causal, splits)
        made.append([x.float().cpu().numpy() for x in (out, *gradients)])
    for a, b in zip(*made, strict=True):
        np.testing.assert_allclose(a, b, rtol=0.05, atol=1e-3)
    return dict(zip(("o", "dq", "dk", "dv"), made[0], strict=True))


def worst_row(name: str, got: np.ndarray, exact: np.ndarray) -> float:
    """Rows of gradients with a very small norm are compared with a typical row, and never with less than 0.001."""
    error, size = np.linalg.norm(got - exact, axis=-1), np.linalg.norm(exact, axis=-1)
    if name != "o":
        size = np.maximum(size, np.sqrt(np.mean(size**2)))
    return float(np.max(error / np.maximum(size, 1e-3)))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", _baselines.HEAD_DIMS)
@pytest.mark.parametrize(("dtype", "shape"), PROBLEMS, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_against_the_oracle(method: str, shape: tuple[int, int, int], dtype: str, head_dim: int, causal: bool) -> None:
    rng = np.random.default_rng(0)
    batch, seqlen, heads = shape
    arrays = [stored(rng.standard_normal((batch, seqlen, heads, head_dim)), dtype) for _ in range(4)]
    got = results(method, *map(to_device, arrays), causal)
    wide = [x.astype(np.float64) for x in arrays]
    exact = {"o": reference.forward(*wide[:3], causal=causal)[0], **gradients(wide, causal)}
    for name, x in exact.items():
        limit = TOLERANCE[dtype] * (1 if name == "o" else 2)
        assert worst_row(name, got[name], x) <= limit, name


def gradients(wide: list[np.ndarray], causal: bool) -> dict[str, np.ndarray]:
    q, k, v, dout = wide
    made = reference.backward(dout, q, k, v, causal=causal)
    return {"dq": made.dq, "dk": made.dk, "dv": made.dv}


def test_a_shape_that_is_not_known_is_refused() -> None:
    q = torch.zeros((1, 8, 1, 32), dtype=torch.bfloat16, device="cuda")
    with pytest.raises(ValueError, match="head_dim 32"):
        _baselines.flash1_forward(q, q, q, causal=False)
    long = torch.zeros((1, 16392, 1, 64), dtype=torch.bfloat16, device="cuda")
    with pytest.raises(ValueError, match="16392"):
        _baselines.standard_forward(long, long, long, causal=False)
