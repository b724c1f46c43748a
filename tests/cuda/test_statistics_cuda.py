"""max_logit and entropy of forward on a GPU, by every kernel for them, against float64."""

from __future__ import annotations

from typing import Any

import cases
import numpy as np
import pytest
from case import Case
from gpu_kernels import TYPES, chosen, kernels_with_statistics, parameters
from harness import random
from statistics_case import StatisticsCase, check

import libflash

torch = pytest.importorskip("torch")
from gpu_case import problem, same_bits, wide_type  # noqa: E402  (needs torch)
from gpu_statistics import run, run_statistics  # noqa: E402

KERNELS = parameters(kernels_with_statistics())
ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
# More than 256 channels; also rows that are not read in vectors.
WIDE = {
    "plain": {"head_dim": 264, "head_dim_v": 512},
    "options": {"head_dim": 512, "softcap": 20.0, "alibi": "h", "bias": "hqk", "mask": "bqk", "sink": True, "dropout_p": 0.25},
    "causal": {"head_dim": 264, "causal": True, "sink": True, "window_size": (90, -1), "block_mask": "bh"},
    "odd": {"head_dim": 333, "head_dim_v": 64, "alibi": "bh", "causal": True},
    "packed": {"head_dim": 512, "seqlen_q": (90, 0, 65, 3), "seqlen_k": (70, 9, 180, 0), "slack_rows": 3, "causal": True},
    "mean": {"head_dim": 512, "fill": "mean", "used_q": (100,), "used_k": (190,)},
    "positions": {"head_dim": 264, "positions": "rows", "causal": True, "dropout_p": 0.25, "part_of_dropout": True},
}
LENGTHS: dict[str, Any] = {"seqlen_q": 150, "seqlen_k": 200, "heads_q": 4, "heads_k": 2}
QUICK_CASES = [case for case in cases.quick() if not case.name.startswith("poison")]
WIDE_CASES = [Case(f"wide-{name}-{dtype}", dtype, **(LENGTHS | some)) for name, some in WIDE.items() for dtype in TYPES.values()]
CASES = QUICK_CASES + WIDE_CASES


def runs() -> list:
    """Every case with some kernels that serve it."""
    marks = {parameter.values[0]["name"]: parameter.marks for parameter in KERNELS}
    return [
        pytest.param(case, kernel["name"], id=f"{case.name}-{kernel['name']}", marks=marks[kernel["name"]])
        for number, case in enumerate(CASES)
        for kernel in chosen(kernels_with_statistics(), case, number)
    ]


def of_heads(made: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: x.cpu().numpy() for name, x in made.items() if name in ("max_logit", "entropy")}


@pytest.mark.parametrize(("case", "kernel"), runs())
def test_case(case: Case, kernel: str) -> None:
    whole = StatisticsCase(case)
    whole.check(**run_statistics(whole, kernel))
    check(case, of_heads(run(problem(case), kernel, heads=True, entropy=False)), heads=True)


@pytest.mark.parametrize("case", [*QUICK_CASES[::6], *WIDE_CASES], ids=str)
def test_case_on_the_host(case: Case) -> None:
    """A test of this file, by a CPU kernel."""
    whole = StatisticsCase(case)
    whole.check(**run_statistics(whole, None, "cpu"))
    check(case, of_heads(run(problem(case, "cpu"), heads=True)), heads=True)


def test_wrong_statistics_are_found() -> None:
    case = StatisticsCase(cases.by_name("fill-randn-fp32-causal"))
    made = run_statistics(case, None, "cpu")
    for name in ("max_logit", "entropy"):
        with pytest.raises(AssertionError, match=name):
            case.check(**made | {name: made[name] * 1.001})


@ON_GPU
@pytest.mark.parametrize("dim", [64, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_same_bits_in_every_run(dtype: torch.dtype, dim: int) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 700, 4, dim, generator=generator).to("cuda", dtype) for _ in range(3))
    first: list[torch.Tensor] = []
    for _ in range(3):
        rows = torch.full((2, 4, 700), torch.nan, dtype=torch.float64 if dtype == torch.float64 else torch.float32, device="cuda")
        made = [rows, rows.clone(), rows.new_full((4,), torch.nan)]
        libflash.attention(q, k, v, causal=True, max_logit=made[0], entropy=made[1])
        libflash.attention(q, k, v, causal=True, max_logit=made[2])
        assert torch.equal(made[2], made[0].amax((0, 2)))
        first = first or made
        assert all(same_bits(a, b) for a, b in zip(made, first, strict=True))


@ON_GPU
@pytest.mark.parametrize("kernel", KERNELS)
def test_nan(kernel: dict[str, Any]) -> None:
    """Where lse is NaN, so are the statistics, and only there; the maximum of a head keeps it."""
    names = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}
    dtype, dim = names[kernel["dtype"]], kernel["head_dim"]
    q, k, v = (torch.from_numpy(random(1, rows, 2, dim, seed=i)).to("cuda", dtype) for i, rows in enumerate((70, 90, 90)))
    q[0, 3, 1, 2] = torch.nan
    lse, top, entropy = (torch.zeros(1, 2, 70, dtype=wide_type(q), device="cuda") for _ in range(3))
    largest = torch.zeros(2, dtype=wide_type(q), device="cuda")
    libflash.attention(q, k, v, lse=lse, max_logit=top, entropy=entropy, kernel=kernel["name"])
    libflash.attention(q, k, v, max_logit=largest, kernel=kernel["name"])
    assert lse.isnan().any()
    for x in (top, entropy):
        assert torch.equal(x.isnan(), lse.isnan())
    assert largest.isnan().tolist() == [False, True]


@ON_GPU
def test_no_rows_and_no_keys() -> None:
    q = torch.zeros(2, 5, 4, 64, dtype=torch.bfloat16, device="cuda")
    for rows, keys in ((0, 5), (5, 0)):
        top = torch.full((4,), torch.nan, device="cuda")
        entropy = torch.full((2, 4, rows), torch.nan, device="cuda")
        libflash.attention(q[:, :rows], q[:, :keys], q[:, :keys], max_logit=top, entropy=entropy)
        assert top.tolist() == [-np.inf] * 4
        assert (entropy == 0).all()


@ON_GPU
def test_in_a_graph() -> None:
    """Every replay initialises the largest scores of heads again."""
    q = torch.randn(1, 300, 4, 64, device="cuda").bfloat16()
    top, rows = torch.zeros(4, device="cuda"), torch.zeros(1, 4, 300, device="cuda")
    libflash.attention(q, q, q, max_logit=top)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        libflash.attention(q, q, q, max_logit=top, stream=torch.cuda.current_stream().cuda_stream)
    for factor in (1.0, 0.5):
        q *= factor
        graph.replay()
        libflash.attention(q, q, q, max_logit=rows)
        assert torch.equal(top, rows.amax((0, 2)))


@ON_GPU
def test_more_keys_than_accumulators_can_add() -> None:
    for dim in (64, 256, 512):
        q, k, v = (torch.randn(1, rows, 1, dim, device="cuda").half() for rows in (100, 70000, 70000))
        top, entropy = (torch.zeros(1, 1, 100, device="cuda") for _ in range(2))
        libflash.attention(q, k, v, max_logit=top, entropy=entropy)
        scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * dim**-0.5
        torch.testing.assert_close(top, scores.amax(-1).float(), rtol=1e-5, atol=0)
        exact = -(scores.softmax(-1) * scores.log_softmax(-1)).sum(-1)
        torch.testing.assert_close(entropy, exact.float(), rtol=3e-5, atol=0)
