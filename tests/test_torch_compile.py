"""libflash.torch as operators: torch.library's checks, torch.compile, torch.export."""

from __future__ import annotations

import warnings

import pytest

import libflash

torch = pytest.importorskip("torch")

import libflash.torch  # noqa: E402
from torch_problem import qkv, tensors  # noqa: E402

from libflash import _torch_ops  # noqa: E402

OPERATORS = torch.ops.libflash

# A warning of torch.compile's own about autograd.Function, which it instantiates itself.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


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


def test_a_refused_operator_raises_inside_a_compiled_graph() -> None:
    q, k, v = qkv(grad=False)
    with pytest.raises(libflash.InvalidError, match="v: shape"):
        compiled(libflash.torch.attention)(q, k, v[:, :5])


def test_merge_compiles() -> None:
    outs, lses = tensors((1, 2, 3, 4), (1, 2, 3, 4)), tensors((1, 3, 2), (1, 3, 2))

    def function(*parts):
        return libflash.torch.merge(parts[:2], parts[2:], return_lse=False)

    got, wanted = compiled(function)(*outs, *lses), function(*outs, *lses)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(torch.autograd.grad(got.sum(), lses), torch.autograd.grad(wanted.sum(), lses))
