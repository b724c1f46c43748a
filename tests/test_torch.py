"""libflash.torch: autograd, operators, compile, export, autocast."""

from __future__ import annotations

import warnings

import cases
import numpy as np
import pytest
from case import Case
from convert import numpy_of, owned, torch_of, torch_run
from harness import assert_same_bits, run

import libflash

torch = pytest.importorskip("torch")

import libflash.torch  # noqa: E402

from libflash import _torch_ops  # noqa: E402

OPTIONS = [*cases.singles(), *cases.option_pairs(), cases.by_name("size-batch-0"), cases.by_name("size-packed-empty")]
OPERATORS = torch.ops.libflash

# A warning of torch.compile's own about autograd.Function, which it instantiates itself.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, grad: bool = True) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(map(sum, shapes)))
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_(grad) for shape in shapes]


def qkv(dtype: torch.dtype = torch.float32, *, grad: bool = True) -> list[torch.Tensor]:
    return tensors((2, 7, 4, 8), (2, 9, 2, 8), (2, 9, 2, 5), dtype=dtype, grad=grad)


def eager(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, bias: torch.Tensor | None = None, causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, in PyTorch's own operators."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    s = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    if bias is not None:
        s = s + bias
    if causal:
        visible = torch.ones(s.shape[-2:], dtype=torch.bool).tril(s.shape[-1] - s.shape[-2])
        s = s.masked_fill(~visible, -torch.inf)
    lse = s.logsumexp(-1)
    return torch.einsum("bhij,bjhd->bihd", (s - lse[..., None]).exp(), v), lse


# -- numbers


@pytest.mark.parametrize("case", OPTIONS, ids=str)
def test_every_option_against_the_reference(case: Case) -> None:
    got = torch_run(case, libflash.torch.attention)
    case.check(**got)
    assert_same_bits(owned(case, got), owned(case, run(case)), str(case))  # and the adapter adds nothing of its own


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


def test_only_what_is_asked_for() -> None:
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


def test_second_derivative_is_refused() -> None:
    q, k, v = qkv()
    (first,) = torch.autograd.grad(libflash.torch.attention(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


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
    """However the memory looked before."""
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


def test_the_plain_function_keeps_its_default_seed() -> None:
    q, k, v = qkv()
    wanted = libflash.attention(q.detach(), k.detach(), v.detach(), dropout_p=0.5)
    assert torch.equal(libflash.attention(q, k, v, dropout_p=0.5), wanted)


# -- operators, compile, export


def sample_calls() -> dict[str, tuple]:
    q, k, v = qkv(grad=False)
    bias, sink = tensors((1, 4, 7, 9), (4,), grad=False)
    cu = torch.tensor([0, 3, 7], dtype=torch.int32)
    mixed = {"bias": bias, "learnable_sink": sink, "causal": True, "window_size": [3, -1], "softcap": 1.5, "softmax_scale": 0.3}
    out, lse = OPERATORS.attention(q, k, v, **mixed)
    lengths = torch.tensor([4, 6], dtype=torch.int32)
    new_k, new_v = tensors((2, 3, 2, 8), (2, 3, 2, 5), grad=False)
    return {
        "plain": (OPERATORS.attention, (q, k, v), {}),
        "mixed": (OPERATORS.attention, (q, k, v), mixed),
        "packed": (OPERATORS.attention, (q[0], k[0, :7], v[0, :7]), {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 4}),
        "bhsd": (OPERATORS.attention, tuple(x.transpose(1, 2) for x in (q, k, v)), {"layout": "bhsd", "backend": "cpu"}),
        "float64": (OPERATORS.attention, (q.double(), k.double(), v.double()), {}),
        "out": (OPERATORS.attention_out, (q, k, v), {"out": torch.empty_like(out), "lse": torch.empty_like(lse)}),
        "backward": (
            OPERATORS.attention_backward, (torch.randn_like(out), q, k, v, out, lse),
            {"dlse": torch.randn_like(lse), "need_dbias": True, "need_dsink": True, **mixed},
        ),
        "backward-plain": (OPERATORS.attention_backward, (torch.randn_like(out), q, k, v, out, lse), mixed),
        "decode": (OPERATORS.decode, (q, k, v), {"cache_seqlens": lengths, "causal": False}),
        "decode-append": (OPERATORS.decode_append, (q, k.clone(), v.clone(), new_k, new_v), {"cache_seqlens": lengths}),
        "merge": (OPERATORS.merge, ([out, out], [lse, lse]), {}),
    }  # fmt: skip


@pytest.mark.parametrize("name", sample_calls())
def test_operator(name: str) -> None:
    """Schema, fake tensors, autograd registration, AOT dispatch: PyTorch's own checks."""
    operator, arguments, options = sample_calls()[name]
    torch.library.opcheck(operator, arguments, options)


def test_an_operator_called_by_name_gives_no_gradient() -> None:
    assert _torch_ops.OPERATORS["attention"](*qkv())[0].shape == (2, 7, 4, 5)


def compiled(function: object) -> object:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


COMPILED = {
    "plain": {},
    "causal": {"causal": True, "window_size": (3, None), "causal_align": "top_left"},
    "numbers": {"softmax_scale": 0.2, "softcap": 3.0, "num_splits": 2, "backend": "cpu"},
    "dropout": {"dropout_p": 0.25, "seed": 11, "offset": 2**63 + 5},
    "alibi": {"alibi_slopes": torch.linspace(0.1, 1, 4)},
    "mask": {"mask": torch.rand(2, 1, 7, 9) < 0.8},
    "blocks": {"block_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool)},
    "lists": {"block_mask": libflash.compress_block_mask(torch.ones(1, 1, 1, 1, dtype=torch.bool))},
    "lengths": {"seqused_q": torch.tensor([7, 3], dtype=torch.int32), "seqused_k": torch.tensor([2, 9], dtype=torch.int32)},
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiles_whole(name: str) -> None:
    """Forward and backward, with bias, sink and lse, without a graph break, to the same bits."""
    leaves = [*qkv(), *tensors((1, 4, 1, 9), (4,))]

    def function(q, k, v, bias, sink):
        return libflash.torch.attention(q, k, v, bias=bias, learnable_sink=sink, return_lse=True, **COMPILED[name])

    def everything(call):
        out, lse = call(*leaves)
        finite = torch.where(lse > -torch.inf, lse, 0)
        return out, lse, *torch.autograd.grad(out.square().sum() + finite.sum(), leaves)

    for got, wanted in zip(everything(compiled(function)), everything(function), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own
def test_compiles_with_inductor_and_changing_sizes() -> None:
    torch._dynamo.reset()
    function = torch.compile(
        lambda q, k, v: libflash.torch.attention(q * 2, k, v, causal=True).relu(), fullgraph=True, dynamic=True
    )
    for seqlen in (5, 8, 13):
        q, k, v = tensors((2, seqlen, 4, 8), (2, seqlen, 2, 8), (2, seqlen, 2, 8))
        got = function(q, k, v)
        wanted = libflash.torch.attention(q * 2, k, v, causal=True).relu()
        torch.testing.assert_close(got, wanted)
        torch.testing.assert_close(torch.autograd.grad(got.sum(), q), torch.autograd.grad(wanted.sum(), q))


def test_compiled_dropout_is_new_in_each_run() -> None:
    q, k, v = qkv()
    function = compiled(lambda q, k, v: libflash.torch.attention(q, k, v, dropout_p=0.5))
    first, second = function(q, k, v), function(q, k, v)
    assert not torch.equal(first, second)
    ones = torch.ones_like(v[..., :1])
    weights = compiled(lambda q, k, v: libflash.torch.attention(q, k, v, dropout_p=0.5))(q, k, ones)
    (dv,) = torch.autograd.grad(weights.sum(), q, allow_unused=True)
    assert torch.isfinite(dv).all()


def test_compiled_decode_writes_the_cache() -> None:
    q, k_cache, v_cache, k, v = tensors((2, 1, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8), (2, 1, 2, 8), (2, 1, 2, 8), grad=False)
    lengths = torch.tensor([4, 8], dtype=torch.int32)

    def step(q, k_cache, v_cache, k, v, lengths):
        return libflash.torch.decode(q, k_cache, v_cache, k=k, v=v, cache_seqlens=lengths) + k_cache.sum()

    mine, other = (k_cache.clone(), v_cache.clone()), (k_cache.clone(), v_cache.clone())
    torch.testing.assert_close(compiled(step)(q, *mine, k, v, lengths), step(q, *other, k, v, lengths))
    assert torch.equal(mine[0], other[0])
    assert torch.equal(mine[1][1, 8], v[1, 0])


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(32, 96)
        self.sink = torch.nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 4, 8)).unbind(-3)
        return libflash.torch.attention(q, k, v, causal=True, learnable_sink=self.sink).flatten(-2)


@pytest.mark.parametrize("strict", [True, False])
def test_exports(strict: bool) -> None:
    layer, x = Layer(), torch.randn(2, 6, 32)
    seqlen = torch.export.Dim("seqlen", min=2, max=64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch's own tools
        program = torch.export.export(layer, (x,), dynamic_shapes={"x": {1: seqlen}}, strict=strict)
    targets = {node.target for module in program.graph_module.modules() for node in getattr(module, "graph", program.graph).nodes}
    assert torch.ops.libflash.attention.default in targets
    longer = torch.randn(2, 11, 32)
    torch.testing.assert_close(program.module()(longer), layer(longer))


def test_meta_tensors_have_shapes() -> None:
    q, k, v = (x.detach().to("meta") for x in qkv(torch.bfloat16))
    out, lse = libflash.torch.attention(q, k, v, return_lse=True)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((2, 7, 4, 5), torch.bfloat16, (2, 4, 7), torch.float32)


def test_profiler_sees_the_operator() -> None:
    q, k, v = qkv(grad=False)
    with torch.autograd.profiler.profile() as profile:
        libflash.torch.attention(q, k, v)
    assert "libflash::attention" in {event.name for event in profile.function_events}


# -- autocast


def test_autocast_runs_in_low_precision() -> None:
    q, k, v = qkv()
    (bias,) = tensors((1, 4, 7, 9))
    with torch.autocast("cpu", torch.bfloat16):
        out = libflash.torch.attention(q, k, v, bias=bias)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, libflash.torch.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), bias=bias))
    dq, dbias = torch.autograd.grad(out.float().sum(), (q, bias))
    assert dq.dtype == dbias.dtype == torch.float32


def test_autocast_leaves_float64_alone() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert libflash.torch.attention(*qkv(torch.float64)).dtype == torch.float64


# -- arguments


def test_out_and_lse_are_written() -> None:
    q, k, v = qkv(grad=False)
    wanted, wanted_lse = libflash.torch.attention(q, k, v, return_lse=True)
    out, lse = torch.full_like(wanted, torch.nan), torch.full_like(wanted_lse, torch.nan)
    assert libflash.torch.attention(q, k, v, out=out) is out
    assert torch.equal(out, wanted)
    result = libflash.torch.attention(q, k, v, out=out.zero_(), lse=lse, return_lse=True)
    assert result[0] is out
    assert result[1] is lse
    assert torch.equal(lse, wanted_lse)
    assert torch.equal(libflash.torch.attention(q, k, v, out=out, return_lse=True)[1], wanted_lse)


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


def test_a_refused_operator_raises_inside_a_compiled_graph() -> None:
    q, k, v = qkv(grad=False)
    with pytest.raises(libflash.InvalidError, match="v: shape"):
        compiled(libflash.torch.attention)(q, k, v[:, :5])


# -- decode and merge


def test_decode_is_that_of_the_library() -> None:
    q, k_cache, v_cache, k, v = tensors((2, 3, 4, 8), (2, 9, 2, 8), (2, 9, 2, 5), (2, 3, 2, 8), (2, 3, 2, 5), grad=False)
    cos, sin = tensors((9, 2), (9, 2), grad=False)
    options = {
        "cache_seqlens": torch.tensor([4, 6], dtype=torch.int32),
        "rotary_cos": cos,
        "rotary_sin": sin,
        "rotary_interleaved": False,
        "window_size": (4, 0),
        "softmax_scale": 0.3,
        "softcap": 2.0,
        "num_splits": 2,
        "learnable_sink": torch.zeros(4),
    }
    mine, other = (k_cache.clone(), v_cache.clone()), (k_cache.clone(), v_cache.clone())
    got = libflash.torch.decode(q, *mine, k=k, v=v, return_lse=True, **options)
    wanted = libflash.decode(q, *other, k=k, v=v, return_lse=True, **options)
    assert all(map(torch.equal, (*got, *mine), (*wanted, *other)))
    with pytest.raises(libflash.InvalidError, match="k and v"):
        libflash.torch.decode(q, *mine, k=k)


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd", "packed"])
def test_merge_gradcheck(layout: str) -> None:
    shape = {"bshd": (2, 3, 4, 5), "bhsd": (2, 4, 3, 5), "sbhd": (3, 2, 4, 5), "packed": (3, 4, 5)}[layout]
    outs = tensors(shape, shape, shape, dtype=torch.float64)
    rows = (4, 3) if layout == "packed" else (2, 4, 3)
    lses = tensors(rows, rows, rows, dtype=torch.float64)

    def function(*parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return libflash.torch.merge(parts[:3], parts[3:], layout="bshd" if layout == "packed" else layout)

    assert torch.autograd.gradcheck(function, (*outs, *lses))


def test_merge_of_parts_is_the_whole() -> None:
    q, k, v = qkv(torch.float64)
    parts = [libflash.torch.attention(q, k[:, i : i + 3], v[:, i : i + 3], return_lse=True) for i in (0, 3, 6)]
    out, lse = libflash.torch.merge(*zip(*parts, strict=True))
    whole, whole_lse = libflash.torch.attention(q, k, v, return_lse=True)
    torch.testing.assert_close((out, lse), (whole, whole_lse), rtol=1e-12, atol=1e-12)
    got = torch.autograd.grad(out.square().sum() + lse.sum(), (q, k, v))
    wanted = torch.autograd.grad(whole.square().sum() + whole_lse.sum(), (q, k, v))
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


def test_merge_ignores_empty_parts_whatever_they_hold() -> None:
    out, lse = torch.randn(1, 2, 3, 4), torch.randn(1, 3, 2)
    garbage = torch.full_like(out, torch.nan).requires_grad_()
    nothing = torch.full_like(lse, -torch.inf).requires_grad_()
    part = out.clone().requires_grad_()
    merged, total = libflash.torch.merge([part, garbage], [lse, nothing])
    assert torch.equal(merged, out)
    assert torch.equal(total, lse)
    gradients = torch.autograd.grad(merged.sum() + total.sum(), (part, garbage, nothing))
    assert torch.equal(gradients[0], torch.ones_like(out))
    assert not gradients[1].any()
    assert not gradients[2].any()
    empty = libflash.torch.merge([garbage, garbage], [nothing, nothing])
    assert not any(gradient.any() for gradient in torch.autograd.grad(empty[0].sum(), (garbage, nothing)))


def test_merge_compiles() -> None:
    outs, lses = tensors((1, 2, 3, 4), (1, 2, 3, 4)), tensors((1, 3, 2), (1, 3, 2))

    def function(*parts):
        return libflash.torch.merge(parts[:2], parts[2:], return_lse=False)

    got, wanted = compiled(function)(*outs, *lses), function(*outs, *lses)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(torch.autograd.grad(got.sum(), lses), torch.autograd.grad(wanted.sum(), lses))


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
