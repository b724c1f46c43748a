"""Forward on the GPU: the cases of the CPU kernels against the same float64 reference."""

from __future__ import annotations

import cases
import pytest
from case import Case
from gpu_kernels import TYPES, chosen, kernels, parameters, supporting, widths

import libflash

torch = pytest.importorskip("torch")
from gpu_case import DTYPES, run_forward  # noqa: E402  (needs torch)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
KERNELS = kernels("forward")

# A NaN in V at a hidden key may reach other rows of its tile, because the matrix instruction multiplies it by 0.
# test_nan_stays_in_its_tile checks which rows.
CASES = [case for case in cases.quick() if case.poison not in ("v_nan", "v_inf")]
RUNS = [(case, kernel["name"]) for index, case in enumerate(CASES) for kernel in chosen(KERNELS, case, index)]


@needs_gpu
@pytest.mark.parametrize(("case", "kernel"), RUNS, ids=[f"{case}-{kernel}" for case, kernel in RUNS])
def test_case(case: Case, kernel: str) -> None:
    case.check(**run_forward(case, kernel))


# The last query tile of a sequence has rows for some warpgroups only, and there are more key tiles than pipeline stages.
FEW_ROWS = {
    "dense": {"seqlen_q": 260, "seqlen_k": 900, "batch": 2},
    "causal": {"seqlen_q": 640, "seqlen_k": 640, "causal": True},
    "window": {"seqlen_q": 650, "seqlen_k": 1300, "window_size": (700, 0)},
    "packed": {"seqlen_q": (200, 450, 1), "seqlen_k": (700, 650, 900), "causal": True},
    "used": {"seqlen_q": 450, "seqlen_k": 800, "batch": 3, "used_q": (450, 260, 70), "used_k": (800, 710, 780)},
}


@needs_gpu
@pytest.mark.parametrize("lengths", FEW_ROWS)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel["name"])
def test_tiles_of_few_rows(kernel: dict, lengths: str) -> None:
    shape = {**widths(kernel), **FEW_ROWS[lengths]}
    case = Case(f"few-rows-{lengths}", TYPES[kernel["dtype"]], heads_q=4, heads_k=2, sink=True, **shape)
    case.check(**run_forward(case, kernel["name"]))


@needs_gpu
@pytest.mark.parametrize("kernel", [k["name"] for k in KERNELS])
def test_nan_stays_in_its_tile(kernel: str) -> None:
    """Causal: query tiles before the key tile of a NaN, whatever the tile size, have the same bits."""
    dtype = next(dtype for name, dtype in DTYPES.items() if f"_{name}_" in kernel)
    generator = torch.Generator("cuda").manual_seed(3)
    q, k, v = (torch.randn(1, 700, 2, 32, generator=generator, device="cuda").to(dtype) for _ in range(3))
    clean = libflash.attention(q, k, v, causal=True, kernel=kernel)
    v[:, 560] = float("nan")
    k[:, 690] = float("inf")
    dirty = libflash.attention(q, k, v, causal=True, kernel=kernel)
    assert torch.equal(clean[:, :384], dirty[:, :384])
    assert dirty[:, 560].isnan().all()
    assert not dirty[:, :384].isnan().any()


@needs_gpu
@pytest.mark.parametrize("jump", [80.0, 87.0, 88.0, 88.5, 95.0])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel["name"])
def test_one_score_far_above_the_others(kernel: dict, jump: float) -> None:
    """The exponential of the difference is near the largest float or above it, and the kernel processes the other keys first."""
    dtype, dim = DTYPES[kernel["dtype"]], min(kernel["head_dim"], 64)
    generator = torch.Generator("cuda").manual_seed(4)
    q, k = (torch.zeros(1, rows, 2, dim, device="cuda", dtype=dtype) for rows in (150, 333))
    v = torch.randn(1, 333, 2, dim, generator=generator, device="cuda").to(dtype)
    q[..., 0] = 8
    k[:, 5, :, 0] = jump
    out, lse = libflash.attention(q, k, v, softmax_scale=0.125, return_lse=True, kernel=kernel["name"])
    torch.testing.assert_close(out, v[:, 5:6].expand_as(out), rtol=0.01, atol=0)
    torch.testing.assert_close(lse, torch.full_like(lse, k[0, 5, 0, 0].item()), rtol=1e-5, atol=0)


@needs_gpu
@pytest.mark.parametrize("jump", [200.0, 1e10, 1e30])
@pytest.mark.parametrize("kernel", supporting(KERNELS, bias="bhqk"), ids=lambda kernel: kernel["name"])
def test_one_bias_far_above_the_others(kernel: dict, jump: float) -> None:
    """The largest score is also above the rounding errors of the others."""
    dtype, dim = DTYPES[kernel["dtype"]], min(kernel["head_dim"], 64)
    generator = torch.Generator("cuda").manual_seed(4)
    q, k, v = (torch.randn(1, rows, 2, dim, generator=generator, device="cuda").to(dtype) for rows in (150, 333, 333))
    bias = torch.zeros(1, 2, 150, 333, device="cuda", dtype=torch.float64 if kernel["dtype"] == "f64" else torch.float32)
    bias[..., 5] = jump
    out, lse = libflash.attention(q, k, v, bias=bias, return_lse=True, kernel=kernel["name"])
    torch.testing.assert_close(out, v[:, 5:6].expand_as(out), rtol=0.01, atol=0)
    torch.testing.assert_close(lse, torch.full_like(lse, jump), rtol=0.1, atol=0)


@needs_gpu
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel["name"])
def test_values_near_the_end_of_float(kernel: dict) -> None:
    """With a kept maximum below the row maximum, probabilities may be far above 1, and their products with such values
    overflow.
    """
    if kernel["dtype"] == "f16":
        pytest.skip("its values end at 65504")
    dtype, dim = DTYPES[kernel["dtype"]], min(kernel["head_dim"], 64)
    q, k = (torch.zeros(1, rows, 2, dim, device="cuda", dtype=dtype) for rows in (150, 333))
    v = torch.full((1, 333, 2, dim), 1e36, device="cuda").to(dtype)
    q[..., 0] = 8
    k[:, 5, :, 0] = 8.5
    out = libflash.attention(q, k, v, softmax_scale=0.125, kernel=kernel["name"])
    torch.testing.assert_close(out, v[:, 5:6].expand_as(out), rtol=0.01, atol=0)


@pytest.mark.parametrize("kernel", parameters([k for k in KERNELS if not supporting([k], head_dim=33)]))
def test_unsupported_options(kernel: dict) -> None:
    """The kernel is refused with a reason, and another kernel is chosen."""
    case = Case("unknown-alignment", TYPES[kernel["dtype"]], head_dim=33)
    with pytest.raises(libflash.UnsupportedError, match=rf"^q: .*\[{kernel['name']}\]"):
        run_forward(case, kernel["name"])
    case.check(**run_forward(case, None))
