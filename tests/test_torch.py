"""libflash.torch: results, gradients, dropout, refusals."""

from __future__ import annotations

import cases
import numpy as np
import pytest
from case import Case
from convert import numpy_of, owned, torch_of, torch_run
from harness import assert_same_bits, run

import libflash

torch = pytest.importorskip("torch")

import libflash.torch  # noqa: E402
from torch_problem import eager, qkv, tensors  # noqa: E402

OPTIONS = [*cases.singles(), *cases.option_pairs(), cases.by_name("size-batch-0"), cases.by_name("size-packed-empty")]


# -- numbers


@pytest.mark.parametrize("case", OPTIONS, ids=str)
def test_every_option_against_the_reference(case: Case) -> None:
    got = torch_run(case, libflash.torch.attention)
    case.check(**got)
    assert_same_bits(owned(case, got), owned(case, run(case)), str(case))  # the adapter changes no result


def test_agrees_with_autograd_of_the_definition() -> None:
    q, k, v = qkv(torch.float64)
    (bias,) = tensors((1, 4, 7, 9), dtype=torch.float64)
    out, lse = libflash.torch.attention(q, k, v, bias=bias, causal=True, return_lse=True)
    exact, exact_lse = eager(q, k, v, bias=bias, causal=True)
    torch.testing.assert_close(out, exact, rtol=1e-12, atol=1e-12)
    weights, lse_weights = torch.randn_like(out), torch.randn_like(lse)
    got = torch.autograd.grad((out * weights).sum() + (lse * lse_weights).sum(), (q, k, v, bias))
    wanted = torch.autograd.grad((exact * weights).sum() + (exact_lse * lse_weights).sum(), (q, k, v, bias))
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd"])
def test_gradcheck(layout: str) -> None:
    axes = ["bshd".index(axis) for axis in layout]
    q, k, v = (x.detach().permute(axes).contiguous().requires_grad_() for x in qkv(torch.float64))
    bias, sink = tensors((4, 1, 9), (4,), dtype=torch.float64)

    def function(*x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return libflash.torch.attention(
            *x[:3],
            bias=x[3],
            learnable_sink=x[4],
            causal=True,
            softcap=2.0,
            dropout_p=0.25,
            seed=7,
            return_lse=True,
            layout=layout,
        )

    assert torch.autograd.gradcheck(function, (q, k, v, bias, sink))


def test_gradient_through_lse_alone() -> None:
    q, k, v = qkv(torch.float64)
    _, lse = libflash.torch.attention(q, k, v, return_lse=True)
    got = torch.autograd.grad(lse.sum(), (q, k, v))
    wanted = torch.autograd.grad(eager(q, k, v)[1].sum(), (q, k, v), allow_unused=True)
    torch.testing.assert_close(got[:2], wanted[:2], rtol=1e-10, atol=1e-10)
    assert not got[2].any()


def test_gradients_in_any_strides() -> None:
    """dout expanded from a scalar, and dout transposed."""
    q, k, v = qkv()
    out = libflash.torch.attention(q, k, v)
    (got,) = torch.autograd.grad(out.sum(), q, retain_graph=True)
    (wanted,) = torch.autograd.grad(out, q, torch.ones_like(out), retain_graph=True)
    assert torch.equal(got, wanted)
    weights = torch.randn(5, 4, 7, 2)
    (got,) = torch.autograd.grad((out.permute(3, 2, 1, 0) * weights).sum(), q, retain_graph=True)
    (wanted,) = torch.autograd.grad(out, q, weights.permute(3, 2, 1, 0).contiguous())
    assert torch.equal(got, wanted)


def test_only_requested_gradients_are_computed() -> None:
    q, k, v = qkv()
    bias, sink = tensors((1, 4, 7, 9), (4,), grad=False)
    libflash.torch.attention(q, k.detach(), v.detach(), bias=bias, learnable_sink=sink).sum().backward()
    assert q.grad is not None
    assert bias.grad is None
    assert sink.grad is None
    assert k.grad is None


def test_the_plain_function_is_differentiable_too() -> None:
    q, k, v = qkv()
    ours = libflash.attention(q, k, v, causal=True)
    adapter = libflash.torch.attention(q, k, v, causal=True)
    assert torch.equal(ours, adapter)
    assert torch.equal(torch.autograd.grad(ours.sum(), q)[0], torch.autograd.grad(adapter.sum(), q)[0])


def test_no_graph_without_need() -> None:
    q, k, v = qkv()
    with torch.no_grad():
        assert libflash.torch.attention(q, k, v).grad_fn is None
    assert libflash.torch.attention(*qkv(grad=False)).grad_fn is None


def test_changed_input_is_noticed() -> None:
    q, k, v = qkv()
    out = libflash.torch.attention(q, k, v)
    with torch.no_grad():
        k.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("seqlens", [(0, 5), (5, 0), (0, 0)])
def test_no_rows_or_no_keys(seqlens: tuple[int, int]) -> None:
    q, k, v = tensors((2, seqlens[0], 4, 8), (2, seqlens[1], 2, 8), (2, seqlens[1], 2, 8))
    out, lse = libflash.torch.attention(q, k, v, return_lse=True)
    assert not out.any()
    assert (lse == -torch.inf).all()
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert not gradient.any()


def test_rows_of_no_sequence_are_zero() -> None:
    """Whatever the memory contained before."""
    q, k, v = tensors((9, 4, 8), (9, 2, 8), (9, 2, 8))
    cu = torch.tensor([0, 3, 7], dtype=torch.int32)
    for _ in range(3):
        junk = [torch.full_like(x, torch.nan) for x in (q, q, k, v)]
        del junk
        out, lse = libflash.torch.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, return_lse=True)
        assert not out[7:].any()
        assert (lse[:, 7:] == -torch.inf).all()
        assert torch.equal(libflash.torch.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu), out)
        for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
            assert not gradient[7:].any()


# -- dropout


def test_dropout_follows_the_default_generator() -> None:
    q, k, v = qkv(grad=False)

    def drop() -> torch.Tensor:
        return libflash.torch.attention(q, k, v, dropout_p=0.5)

    torch.manual_seed(3)
    first, second = drop(), drop()
    torch.manual_seed(3)
    assert torch.equal(drop(), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("seed", [0, 5, 2**63, 2**64 - 1])
def test_a_seed_is_that_of_the_library(seed: int) -> None:
    q, k, v = qkv()
    wanted = libflash.attention(q.detach(), k.detach(), v.detach(), dropout_p=0.5, seed=seed, offset=2**63 + 1)
    assert torch.equal(libflash.torch.attention(q, k, v, dropout_p=0.5, seed=seed, offset=2**63 + 1), wanted)
    assert torch.equal(libflash.attention(q, k, v, dropout_p=0.5, seed=seed, offset=2**63 + 1), wanted)


@pytest.mark.parametrize("kind", [np.int64, np.uint64, np.int32])
def test_a_seed_of_numpy(kind: type) -> None:
    q, k, v = qkv()
    wanted = libflash.torch.attention(q, k, v, dropout_p=0.5, seed=5, offset=7)
    for call in (libflash.attention, libflash.torch.attention):
        assert torch.equal(call(q, k, v, dropout_p=0.5, seed=kind(5), offset=kind(7)), wanted)
        with pytest.raises(TypeError, match="seed must be an integer, not float"):
            call(q, k, v, dropout_p=0.5, seed=5.0)


def test_the_plain_function_keeps_its_default_seed() -> None:
    q, k, v = qkv()
    wanted = libflash.attention(q.detach(), k.detach(), v.detach(), dropout_p=0.5)
    assert torch.equal(libflash.attention(q, k, v, dropout_p=0.5), wanted)


# -- arguments


def test_flops_are_counted() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = qkv()
    pairs = 2 * 4 * 7 * 9
    with FlopCounterMode(display=False) as counter:
        libflash.torch.attention(q, k, v, causal=True).sum().backward()
    assert counter.get_total_flops() == 2 * pairs * (8 + 5) + 2 * pairs * (3 * 8 + 2 * 5)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        libflash.attention(q, k, v, causal=True)
        libflash.torch.decode(q, k, v)
    assert counter.get_total_flops() == 4 * pairs * (8 + 5)
    q, k, v = tensors((9, 4, 8), (9, 2, 8), (9, 2, 8), grad=False)
    cu = torch.tensor([0, 3, 7], dtype=torch.int32)
    with FlopCounterMode(display=False) as counter:
        libflash.torch.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu)
    assert counter.get_total_flops() == 2 * 4 * (3 * 3 + 4 * 4) * 16


def test_refusals_come_from_the_library() -> None:
    q, k, v = qkv()
    with pytest.raises(libflash.InvalidError, match=r"v: shape .*\(2, 9, 2, 5\)"):
        libflash.torch.attention(q, q[:, :, :3], v)
    with pytest.raises(libflash.InvalidError, match="softcap"):
        libflash.torch.attention(q, k, v, softcap=-1.0)
    with pytest.raises(libflash.InvalidError, match="layout"):
        libflash.torch.attention(q, k, v, layout="hbsd")
    with pytest.raises(libflash.UnsupportedError, match="no_such_kernel"):
        libflash.torch.attention(q, k, v, kernel="no_such_kernel")
    with pytest.raises(TypeError, match="window_size"):
        libflash.torch.attention(q, k, v, window_size=3)
    with pytest.raises(libflash.InvalidError, match="out and lse"):
        libflash.torch.attention(q, k, v, out=torch.empty(2, 7, 4, 5))
    with pytest.raises(libflash.InvalidError, match="seed is 18446744073709551616"):
        libflash.torch.attention(q, k, v, dropout_p=0.1, seed=2**64)
    with pytest.raises(libflash.InvalidError, match=r"seed is a tensor of torch.float32"):
        libflash.torch.attention(q, k, v, dropout_p=0.1, seed=torch.zeros(2))


def test_what_has_no_gradient_says_so() -> None:
    q, k, v = qkv()
    (slopes,) = tensors((4,))
    with pytest.raises(libflash.UnsupportedError, match="alibi_slopes"):
        libflash.torch.attention(q, k, v, alibi_slopes=slopes)
    with pytest.raises(libflash.UnsupportedError, match="decode has no gradient"):
        libflash.torch.decode(q, k, v)


def test_threads_may_call_at_once() -> None:
    """Backward passes run on threads of PyTorch's."""
    from concurrent.futures import ThreadPoolExecutor

    q, k, v = qkv()
    wanted = torch.autograd.grad(libflash.torch.attention(q, k, v).square().sum(), q)[0]

    def work(_: int) -> bool:
        return torch.equal(torch.autograd.grad(libflash.torch.attention(q, k, v).square().sum(), q)[0], wanted)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(64)))


def test_conversion_keeps_bits() -> None:
    x = np.arange(12, dtype=np.float32).astype(cases.by_name("size-batch-0").inputs().q.dtype)
    assert_same_bits(numpy_of(torch_of(x)), x)


FLAGS = {
    "causal": libflash.torch.attention,
    "return_lse": libflash.torch.attention,
    "deterministic": libflash.torch.attention,
    "causal of decode": libflash.torch.decode,
    "rotary_interleaved of decode": libflash.torch.decode,
    "return_lse of decode": libflash.torch.decode,
    "return_lse of merge": lambda q, k, v, **o: libflash.torch.merge([q], [torch.zeros(2, 4, 7)], **o),
}


@pytest.mark.parametrize("case", FLAGS)
def test_flags_are_bools(case: str) -> None:
    """Text such as "no" counts as true in Python, so it is refused, with and without gradients."""
    name = case.partition(" ")[0]
    q, k, v = (x.detach() for x in qkv())
    for good in (True, False, np.True_, np.False_):
        FLAGS[case](q, k, v, **{name: good})
    for bad, text in (
        ("no", "'no'"),
        (1, "1"),
        (0.0, r"0\.0"),
        (None, "None"),
        (np.array([True]), r"ndarray \(bool, shape \(1,\)\)"),
    ):
        for tensors_given in ((q, k, v), qkv()):
            with pytest.raises(TypeError, match=rf"{name} must be a bool, not {text}$"):
                FLAGS[case](*tensors_given, **{name: bad})
