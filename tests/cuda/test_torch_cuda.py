"""libflash.torch on the GPU: autograd, dropout, autocast, and scaled_dot_product_attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import cases
import pytest
from case import Case
from convert import owned, torch_run
from harness import assert_same_bits

import libflash

torch = pytest.importorskip("torch")
import libflash.torch  # noqa: E402  (needs torch)
from gpu_case import run_backward, run_forward  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from libflash import _torch_sdpa  # noqa: E402
from libflash import _torch_sdpa_operators as operators  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

DEVICE = "cuda"
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
sdpa = torch.nn.functional.scaled_dot_product_attention


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float16, grad: bool = True) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(map(sum, shapes)))
    return [torch.randn(shape, generator=generator).to(dtype).to(DEVICE).requires_grad_(grad) for shape in shapes]


def qkv(dtype: torch.dtype = torch.float16, *, grad: bool = True) -> list[torch.Tensor]:
    return tensors((2, 150, 4, 64), (2, 200, 2, 64), (2, 200, 2, 40), dtype=dtype, grad=grad)


def largest(x: torch.Tensor) -> float:
    return float(x.detach().abs().max())


# -- numbers

OPTIONS = [case for case in [*cases.singles(), *cases.option_pairs()[::3]] if case.dtype in (*HALF, "fp32")]
OPTIONS.append(cases.by_name("size-packed-empty"))


@pytest.mark.parametrize("case", OPTIONS, ids=str)
def test_every_option_against_the_reference(case: Case) -> None:
    got = torch_run(case, libflash.torch.attention, DEVICE, deterministic=True)
    case.check(**got)
    plain = run_forward(case, None, DEVICE) | run_backward(case, None, True, DEVICE)
    assert_same_bits(owned(case, got), owned(case, plain), str(case))  # the adapter changes no result


def errors(got: list[torch.Tensor], exact: list[torch.Tensor]) -> list[tuple[float, float]]:
    """The largest and the root mean square error of each tensor."""
    return [
        (largest(error), float(error.square().mean().sqrt()))
        for error in (x.detach().double() - y.detach() for x, y in zip(got, exact, strict=True))
    ]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [*HALF, "fp32"])
def test_no_worse_than_pytorch(dtype: str, causal: bool) -> None:
    """Against PyTorch's definition in float64: the rounding errors are those of its own fused kernel, which rounds in the same
    steps. Twice the largest and 1.5 times the mean error allow for other orders of sums, and for no more."""
    theirs_is = SDPBackend.FLASH_ATTENTION if dtype in HALF else SDPBackend.EFFICIENT_ATTENTION
    leaves = tensors(*[(2, 4, 333, 64)] * 3, dtype=HALF.get(dtype, torch.float32))
    dout = tensors((2, 4, 333, 64), dtype=leaves[0].dtype, grad=False)[0]

    def both(attention: Callable, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        out = attention(*leaves)
        return [out, *torch.autograd.grad(out, leaves, dout.to(out.dtype))]

    with sdpa_kernel(SDPBackend.MATH):
        exact = both(lambda *x: sdpa(*x, is_causal=causal), [x.detach().double().requires_grad_() for x in leaves])
    with sdpa_kernel(theirs_is):
        theirs = errors(both(lambda *x: sdpa(*x, is_causal=causal), leaves), exact)
    ours = errors(both(lambda *x: libflash.torch.attention(*x, causal=causal, layout="bhsd"), leaves), exact)
    for (most, mean), (their_most, their_mean), name in zip(ours, theirs, ("out", "dq", "dk", "dv"), strict=True):
        assert most <= 2 * their_most, name
        assert mean <= 1.5 * their_mean, name


def test_gradients_in_any_strides() -> None:
    """dout expanded from a scalar, and dout transposed."""
    q, k, v = qkv()
    out = libflash.torch.attention(q, k, v, deterministic=True)
    (got,) = torch.autograd.grad(out.sum(), q, retain_graph=True)
    (wanted,) = torch.autograd.grad(out, q, torch.ones_like(out), retain_graph=True)
    assert torch.equal(got, wanted)
    (weights,) = tensors((40, 4, 150, 2), grad=False)
    (got,) = torch.autograd.grad((out.permute(3, 2, 1, 0) * weights).sum(), q, retain_graph=True)
    (wanted,) = torch.autograd.grad(out, q, weights.permute(3, 2, 1, 0).contiguous())
    assert torch.equal(got, wanted)


def test_layouts_are_one_problem() -> None:
    q, k, v = qkv()
    wanted = libflash.torch.attention(q, k, v, causal=True, deterministic=True)
    gradients = torch.autograd.grad(wanted.sum(), (q, k, v))
    for layout in ("bhsd", "sbhd"):
        axes = ["bshd".index(axis) for axis in layout]
        turned = [x.detach().permute(axes).contiguous().requires_grad_() for x in (q, k, v)]
        out = libflash.torch.attention(*turned, causal=True, deterministic=True, layout=layout)
        assert torch.equal(out, wanted.permute(axes))
        for got, one in zip(torch.autograd.grad(out.sum(), turned), gradients, strict=True):
            assert torch.equal(got, one.permute(axes))


def test_rows_of_no_sequence_are_zero() -> None:
    """Whatever the memory contained before."""
    q, k, v = tensors((300, 4, 64), (300, 2, 64), (300, 2, 64))
    cu = torch.tensor([0, 100, 170], dtype=torch.int32, device=DEVICE)
    for _ in range(3):
        junk = [torch.full_like(x, torch.nan) for x in (q, q, k, v)]
        del junk
        out, lse = libflash.torch.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, return_lse=True)
        assert not out[170:].any()
        assert (lse[:, 170:] == -torch.inf).all()
        for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
            assert not gradient[170:].any()


def test_the_plain_function_is_differentiable_too() -> None:
    q, k, v = qkv()
    for function in (libflash.attention, libflash.torch.attention):
        out = function(q, k, v, causal=True)
        assert out.grad_fn is not None
        assert all(x is not None for x in torch.autograd.grad(out.sum(), (q, k, v)))


# -- dropout


def test_dropout_is_that_of_the_cpu() -> None:
    """The mask depends on seed, offset and position alone; forward and backward drop the same entries."""
    q, k, v = qkv()
    options = {"dropout_p": 0.5, "seed": 2**63 + 11, "offset": 5}
    out = libflash.torch.attention(q, k, v, **options)
    on_cpu = libflash.attention(*(x.detach().cpu() for x in (q, k, v)), **options)
    torch.testing.assert_close(out.detach().cpu(), on_cpu, rtol=2e-3, atol=2e-3)
    (dout,) = tensors(tuple(out.shape), grad=False)
    (dv,) = torch.autograd.grad(out, v, dout)
    linear_in_v = (dv.double() * v.double()).sum() / (out.double() * dout.double()).sum()
    assert abs(linear_in_v - 1) < 5e-3


def test_dropout_follows_the_default_generator() -> None:
    q, k, v = qkv(grad=False)

    def drop() -> torch.Tensor:
        return libflash.torch.attention(q, k, v, dropout_p=0.5)

    torch.manual_seed(3)
    first, second = drop(), drop()
    torch.manual_seed(3)
    assert torch.equal(drop(), first)
    assert not torch.equal(first, second)


# -- autocast and types


@pytest.mark.parametrize("dtype", HALF)
def test_autocast_runs_in_low_precision(dtype: str) -> None:
    """The same bits as with tensors cast by the caller; a float32 bias stays float32, and gradients are float32."""
    q, k, v = qkv(torch.float32)
    (bias,) = tensors((1, 4, 150, 200), dtype=torch.float32)
    with torch.autocast(DEVICE, HALF[dtype]):
        out = libflash.torch.attention(q, k, v, bias=bias, deterministic=True)
    by_hand = libflash.torch.attention(*(x.to(HALF[dtype]) for x in (q, k, v)), bias=bias, deterministic=True)
    assert out.dtype == HALF[dtype]
    assert torch.equal(out, by_hand)
    for got, wanted in zip(
        *(torch.autograd.grad(x.float().square().sum(), (q, k, v, bias)) for x in (out, by_hand)), strict=True
    ):
        assert got.dtype == torch.float32
        assert torch.equal(got, wanted)


def test_types_without_a_kernel_are_refused() -> None:
    with pytest.raises(libflash.UnsupportedError, match="dtype: decode of float64"):
        libflash.torch.decode(*qkv(torch.float64, grad=False))


# -- scaled_dot_product_attention on libflash


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The calls that reach the library."""
    seen: list[str] = []

    def spy(name: str, original: Callable) -> Callable:
        def call(*args: object, **options: object) -> object:
            seen.append(name)
            return original(*args, **options)

        return call

    for name in ("attention", "attention_backward"):
        monkeypatch.setattr(operators._core, name, spy(name, getattr(operators._core, name)))
    yield seen
    libflash.torch.disable()
    _torch_sdpa._warned.clear()


def with_gradients(attention: Callable, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    out = attention(*leaves)
    return [out, *torch.autograd.grad(out.float().square().sum(), leaves)]


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}], ids=["plain", "causal", "scale"])
@pytest.mark.parametrize("dtype", HALF)
def test_sdpa(dtype: str, options: dict, calls: list[str]) -> None:
    leaves = tensors(*[(2, 4, 200, 64)] * 3, dtype=HALF[dtype])
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        wanted = with_gradients(lambda *x: sdpa(*x, **options), leaves)
        assert calls == []
        with libflash.torch.enable():
            got = with_gradients(lambda *x: sdpa(*x, **options), leaves)
        assert calls == ["attention", "attention_backward"]
        again = with_gradients(lambda *x: sdpa(*x, **options), leaves)
        assert len(calls) == 2
    for x, y, z in zip(got, wanted, again, strict=True):
        limit = 2**-6 * largest(y)  # both results have errors
        torch.testing.assert_close(x, y, rtol=0, atol=limit)
        torch.testing.assert_close(z, y, rtol=0, atol=limit)


def test_sdpa_with_dropout(calls: list[str]) -> None:
    """The backward operator uses the state that the forward operator returns; the result is linear in v."""
    q, k, v = tensors(*[(2, 4, 200, 64)] * 3)
    with libflash.torch.enable(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        torch.manual_seed(1)
        out = sdpa(q, k, v, dropout_p=0.5)
        (dv,) = torch.autograd.grad(out.float().square().sum(), v)
        torch.manual_seed(1)
        assert torch.equal(sdpa(q, k, v, dropout_p=0.5), out)
        assert not torch.equal(sdpa(q, k, v, dropout_p=0.5), out)
    assert "attention_backward" in calls
    ratio = (dv.double() * v.double()).sum() / (2 * out.double().square().sum())
    assert abs(ratio - 1) < 5e-3


def test_sdpa_deterministic(calls: list[str]) -> None:
    leaves = tensors(*[(2, 4, 1000, 64)] * 3)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with libflash.torch.enable(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            first = with_gradients(sdpa, leaves)
            for _ in range(10):
                assert all(map(torch.equal, with_gradients(sdpa, leaves), first))
    finally:
        torch.use_deterministic_algorithms(before)
    assert len(calls) == 22


def test_varlen_attn(calls: list[str]) -> None:
    """PyTorch's function for packed sequences."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    q, k, v = tensors(*[(300, 4, 64)] * 3)
    cu = torch.tensor([0, 100, 100, 300], dtype=torch.int32, device=DEVICE)
    for window in ((-1, -1), (-1, 0)):
        attention = partial(varlen.varlen_attn, cu_seq_q=cu, cu_seq_k=cu, max_q=200, max_k=200, window_size=window)
        wanted = with_gradients(attention, [q, k, v])
        assert calls == []
        with libflash.torch.enable():
            got = with_gradients(attention, [q, k, v])
        assert calls == ["attention", "attention_backward"]
        calls.clear()
        for x, y in zip(got, wanted, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=2**-7 * largest(y))


def test_whole_layers(calls: list[str]) -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(128, 2, 64, dropout=0.0, batch_first=True).to(DEVICE).half()
    x = torch.randn(2, 90, 128).half().to(DEVICE)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        wanted = layer(x)
        with libflash.torch.enable():
            got = layer(x)
    assert "attention" in calls
    torch.testing.assert_close(got, wanted, rtol=0, atol=0.01)
