"""float64 on the GPU from PyTorch and JAX: finite differences of first and second order, the result of the CPU, and refusals.

The files beside this one test the kernels for float64 as they test those of the other types.
"""

from __future__ import annotations

from typing import Any

import pytest
from harness import run_python

import libflash

torch = pytest.importorskip("torch")

import libflash.torch  # noqa: E402

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = [pytest.param("cuda", marks=CUDA), "cpu"]  # on the CPU: a test of this file
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window_size": (3, 1), "softcap": 2.0, "softmax_scale": -0.7},
    "dropout": {"causal": True, "causal_align": "top_left", "dropout_p": 0.25, "seed": 7},
}

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of PyTorch at its first dual level
    pytest.mark.filterwarnings("ignore:.*performance drop.*"),  # of PyTorch about vmap
]


def leaves(device: str, *shapes: tuple[int, ...], seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(device).requires_grad_() for s in shapes]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("device", DEVICES)
def test_gradcheck(device: str, options: dict[str, Any]) -> None:
    """Backward, and with it forward mode."""
    x = leaves(device, (1, 5, 4, 5), (1, 7, 2, 5), (1, 7, 2, 3), (4,))

    def function(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return libflash.torch.attention(*given[:3], learnable_sink=given[3], return_lse=True, **options)

    assert torch.autograd.gradcheck(function, x, check_forward_ad=True)


@pytest.mark.parametrize("device", DEVICES)
def test_gradcheck_of_the_bias(device: str) -> None:
    x = leaves(device, (2, 5, 4, 5), (2, 7, 2, 5), (2, 7, 2, 3), (1, 4, 1, 7))
    assert torch.autograd.gradcheck(lambda q, k, v, bias: libflash.torch.attention(q, k, v, bias=bias, causal=True), x)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("device", DEVICES)
def test_gradgradcheck(device: str, options: dict[str, Any]) -> None:
    x = leaves(device, (1, 4, 2, 3), (1, 5, 1, 3), (1, 5, 1, 2), (2,))

    def function(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return libflash.torch.attention(*given[:3], learnable_sink=given[3], return_lse=True, **options)

    assert torch.autograd.gradgradcheck(function, x)


@pytest.mark.parametrize("shape", [(1, 2, 4, 5), (2, 1, 5), (4, 1)], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_gradgradcheck_of_the_bias(device: str, shape: tuple[int, ...]) -> None:
    x = leaves(device, (1, 4, 2, 3), (1, 5, 1, 3), (1, 5, 1, 2), shape)

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return libflash.torch.attention(q, k, v, bias=bias, causal=True, softcap=2.0)

    assert torch.autograd.gradgradcheck(function, x)


@CUDA
@pytest.mark.parametrize("dim", [20, 64, 128, 192, 256, 257, 512])
def test_result_is_that_of_the_cpu(dim: int) -> None:
    """Within rounding errors: both add up in float64."""
    x = leaves("cpu", (2, 300, 4, dim), (2, 333, 2, dim), (2, 333, 2, dim))

    def results(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, lse = libflash.torch.attention(*given, causal=True, window_size=(200, 0), return_lse=True)
        return out, lse, *torch.autograd.grad(out.square().sum() + lse.sin().sum(), given)

    on_gpu = results(*(y.detach().cuda().requires_grad_() for y in x))
    for got, wanted in zip(on_gpu, results(*x), strict=True):
        assert (got.cpu() - wanted).abs().max() <= 1e-13 * wanted.abs().max()


@CUDA
@pytest.mark.parametrize("dims", [(20, 20), (130, 256), (257, 300), (512, 40)], ids=str)
def test_double_backward_is_that_of_the_cpu(dims: tuple[int, int]) -> None:
    """By the tangents of forward and backward."""
    x = leaves("cpu", (2, 70, 4, dims[0]), (2, 83, 2, dims[0]), (2, 83, 2, dims[1]))

    def results(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = libflash.torch.attention(*given, causal=True, softcap=5.0)
        gradients = torch.autograd.grad(out.square().sum(), given, create_graph=True)
        return torch.autograd.grad(sum(y.square().sum() for y in gradients), given)

    on_gpu = results(*(y.detach().cuda().requires_grad_() for y in x))
    for got, wanted in zip(on_gpu, results(*x), strict=True):
        assert (got.cpu() - wanted).abs().max() <= 1e-12 * wanted.abs().max()


@CUDA
def test_what_is_refused() -> None:
    wide, (q, k, v) = torch.zeros(1, 4, 1, 513, device="cuda", dtype=torch.float64), leaves("cuda", *[(1, 4, 1, 8)] * 3)
    with pytest.raises(libflash.UnsupportedError, match=r"head_dim: must be at most 512 for this kernel \(513\)"):
        libflash.attention(wide, wide, wide)
    with pytest.raises(libflash.UnsupportedError, match="dtype: decode of float64 runs on the CPU only"):
        libflash.decode(q.detach(), k.detach(), v.detach())


def test_jax() -> None:
    """On the GPU, if JAX has one, else on the CPU."""
    assert run_python("""
        import jax
        jax.config.update("jax_enable_x64", True)
        import cases, libflash.jax
        from convert import jax_run
        for case in [case for case in cases.singles() + cases.option_pairs() if case.dtype == "fp64"][:12]:
            case.check(**jax_run(case, libflash.jax.attention))
        print("good")
    """) == "good\n"  # fmt: skip
