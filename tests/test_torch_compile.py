"""libflash.torch as operators: torch.library's checks, torch.compile, torch.export."""

from __future__ import annotations

import warnings

import pytest

import libflash

torch = pytest.importorskip("torch")

import libflash.torch  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402
from torch_problem import qkv, tensors  # noqa: E402

OPERATORS = torch.ops.libflash

# A warning of torch.compile about autograd.Function, which it instantiates itself.
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
        "out": (OPERATORS.attention_out, (q, k, v, torch.empty_like(out), torch.empty_like(lse)), {}),
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


def test_an_operator_called_by_name_has_gradients() -> None:
    q, k, v = qkv()
    got = torch.autograd.grad(OPERATORS.attention(q, k, v, causal=True)[0].sum(), (q, k, v))
    wanted = torch.autograd.grad(libflash.torch.attention(q, k, v, causal=True).sum(), (q, k, v))
    assert all(map(torch.equal, got, wanted))
    with pytest.raises(libflash.UnsupportedError, match="alibi_slopes requires a gradient"):
        OPERATORS.attention(q, k, v, alibi_slopes=torch.ones(4, requires_grad=True))
    with pytest.raises(libflash.UnsupportedError, match="k_cache requires one"):
        OPERATORS.decode(q.detach(), k, v)


def compiled(function: object) -> object:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


CPU_KERNEL = next(
    x["name"] for x in libflash.info()["kernels"] if (x["operation"], x["backend"]) == ("forward", "cpu") and x["usable"]
)

COMPILED = {
    "plain": {},
    "causal": {"causal": True, "window_size": (3, None), "causal_align": "top_left"},
    "numbers": {"softmax_scale": 0.2, "softcap": 3.0, "num_splits": 2, "backend": "cpu"},
    "dropout": {"dropout_p": 0.25, "seed": 11, "offset": 2**63 + 5},
    "alibi": {"alibi_slopes": torch.linspace(0.1, 1, 4)},
    "mask": {"mask": torch.rand(2, 1, 7, 9) < 0.8},
    "blocks": {"block_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool)},
    "lists": {"block_mask": libflash.compress_block_mask(torch.ones(1, 1, 1, 1, dtype=torch.bool))},
    "kernel": {"kernel": CPU_KERNEL},
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


class HalfWindow(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return libflash.torch.attention(x, x, x, window_size=(x.shape[1] // 2, 0))


@pytest.mark.parametrize("strict", [True, False])
def test_exports_a_window_that_depends_on_the_length(strict: bool) -> None:
    """The check of shapes while PyTorch traces does not fix the window."""
    seqlen = torch.export.Dim("seqlen", min=2, max=64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch's own tools
        program = torch.export.export(HalfWindow(), (torch.randn(2, 6, 4, 8),), dynamic_shapes={"x": {1: seqlen}}, strict=strict)
    longer = torch.randn(2, 11, 4, 8)
    torch.testing.assert_close(program.module()(longer), HalfWindow()(longer))


def test_meta_tensors_have_shapes() -> None:
    q, k, v = (x.detach().to("meta") for x in qkv(torch.bfloat16))
    out, lse = libflash.torch.attention(q, k, v, return_lse=True)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((2, 7, 4, 5), torch.bfloat16, (2, 4, 7), torch.float32)


def test_meta_tensors_and_others_are_not_mixed() -> None:
    q, k, v = (x.detach() for x in qkv())
    lse, slots = torch.zeros(q.shape[0], q.shape[2], q.shape[1]), torch.zeros(k.shape[:2], dtype=torch.int64)
    for call, text in (
        (lambda: libflash.torch.attention(q.to("meta"), k, v.to("meta")), "k is on the device cpu, but q on meta"),
        (lambda: libflash.torch.decode(q.to("meta"), k.to("meta"), v), "v_cache is on the device cpu, but q on meta"),
        (
            lambda: libflash.torch.attention(*(x.to("meta") for x in (q, k, v)), learnable_sink=torch.zeros(4)),
            "learnable_sink is on the device cpu, but q on meta",
        ),
        (
            lambda: libflash.torch.merge([q.to("meta"), q], [lse.to("meta"), lse]),
            r"outs\[1\] is on the device cpu, but outs\[0\] on meta",
        ),
        (
            lambda: libflash.torch.cache_write(k.to("meta"), v.to("meta"), k, v, slots.to("meta")),
            "k_cache is on the device cpu, but k on meta",
        ),
        (
            lambda: torch.ops.libflash.attention_tangent(*(x.to("meta") for x in (q, k, v, q, lse)), tq=q),
            "tq is on the device cpu, but q on meta",
        ),
    ):
        with pytest.raises(libflash.InvalidError, match=text):
            call()


def test_meta_tensors_have_gradients() -> None:
    q, k, v = (x.detach().to("meta").requires_grad_() for x in qkv())
    bias, sink = (torch.zeros(shape, device="meta", requires_grad=True) for shape in ((7, 9), (4,)))
    out = libflash.torch.attention(q, k, v, bias=bias, learnable_sink=sink, causal=True)
    for x, dx in zip((q, k, v, bias, sink), torch.autograd.grad(out.sum(), (q, k, v, bias, sink)), strict=True):
        assert (dx.shape, dx.dtype, dx.device) == (x.shape, x.dtype, x.device)


def test_profiler_sees_the_operator() -> None:
    q, k, v = qkv(grad=False)
    with torch.autograd.profiler.profile() as profile:
        libflash.torch.attention(q, k, v)
    assert "libflash::attention" in {event.name for event in profile.function_events}


REFUSED = {
    "v: shape": lambda q, k, v: libflash.torch.attention(q, k, v[:, :5]),
    "softcap": lambda q, k, v: libflash.torch.attention(q, k, v, softcap=-1.0),
    "bias": lambda q, k, v: libflash.torch.attention(q, k, v, bias=v.new_ones(3, 9)),
    "mask has dtype|mask: ": lambda q, k, v: libflash.torch.attention(q, k, v, mask=v.new_ones(7, 9)),
    "contiguous": lambda q, k, v: libflash.torch.attention(q.transpose(1, 3).contiguous().transpose(1, 3), k, v),
    "head_dim": lambda q, k, v: libflash.torch.attention(q.new_ones(2, 7, 4, 520), k.new_ones(2, 9, 2, 520), v),
    "no_such_kernel": lambda q, k, v: libflash.torch.attention(q, k, v, kernel="no_such_kernel"),
    "complex64": lambda q, k, v: libflash.torch.attention(q.to(torch.complex64), k, v),
    "cu_seqlens": lambda q, k, v: libflash.torch.attention(q[0], k[0], v[0]),
    "out: ": lambda q, k, v: libflash.torch.attention(q, k, v, out=q.new_ones(2, 7, 4, 8)),
    "lses.0.": lambda q, k, v: libflash.torch.merge([q, q], [q, q]),
    "outs.1.": lambda q, k, v: libflash.torch.merge([q, k], [q.new_ones(2, 4, 7)] * 2),
    "k_cache|k: ": lambda q, k, v: libflash.torch.decode(q, k[..., :4].clone(), v),
    "cache_seqlens": lambda q, k, v: libflash.torch.decode(q, k, v, cache_seqlens=q.new_ones(3).int()),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_refused_is_refused_without_data_too(text: str) -> None:
    """Refused by the real call, with meta tensors, with fake tensors and when a graph is compiled."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    call, inputs = REFUSED[text], qkv(grad=False)
    with pytest.raises(libflash.Error, match=text) as real:
        call(*inputs)
    if text != "no_such_kernel":  # the kernels for a meta tensor's device are unknown
        with pytest.raises(real.type, match=text):
            call(*(x.to("meta") for x in inputs))
    with FakeTensorMode() as mode, pytest.raises(real.type, match=text):
        call(*(mode.from_tensor(x) for x in inputs))
    with pytest.raises(Exception, match=text):
        compiled(call)(*inputs)


def test_the_backward_operator_refuses_without_data_too() -> None:
    q, k, v = (x.to("meta") for x in qkv(grad=False))
    out, lse = OPERATORS.attention(q, k, v)
    with pytest.raises(libflash.InvalidError, match="dout"):
        OPERATORS.attention_backward(out[:, :3], q, k, v, out, lse)
    with pytest.raises(libflash.InvalidError, match="lse"):
        OPERATORS.attention_backward(out, q, k, v, out, lse[..., :3])


# -- programs: export, ahead of time, TorchScript


def test_an_exported_program_has_gradients() -> None:
    layer, x = Layer(), torch.randn(2, 6, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch's own tools
        program = torch.export.export(layer, (x,)).module()
    wanted = torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()))
    got = torch.autograd.grad(program(x).square().sum(), list(program.parameters()))
    assert wanted[0].abs().max() > 0.1
    torch.testing.assert_close(sorted(got, key=torch.numel), sorted(wanted, key=torch.numel))
    with torch.no_grad():
        torch.testing.assert_close(program(x), layer(x))


class Everything(torch.nn.Module):
    """Options of every type, and a transposed layout."""

    def forward(self, q, k, v, bias, lengths):
        first = libflash.torch.attention(q * 1, k, v, bias=bias, window_size=(3, 2), softcap=4.0, seqused_k=lengths, num_splits=2)
        transposed = [x.transpose(1, 2) for x in (q + 1, k, v)]
        second = libflash.torch.attention(
            *transposed, layout="bhsd", causal=True, causal_align="top_left", kernel=KERNEL, backend="cpu"
        )
        third, lse = libflash.torch.merge([first, second.transpose(1, 2).contiguous()], [q.sum(-1).mT.contiguous()] * 2)
        return third, lse, libflash.torch.decode(q, k, v, cache_seqlens=lengths)


KERNEL = COMPILED["kernel"]["kernel"]


@pytest.mark.filterwarnings("ignore")  # of PyTorch's own tools
def test_a_package_compiled_ahead_of_time_runs(tmp_path) -> None:
    q, k, v = qkv(grad=False)
    arguments = (q, k, v, torch.randn(7, 9), torch.tensor([4, 9], dtype=torch.int32))
    with torch.no_grad():
        program = torch.export.export(Everything(), arguments)
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        got = torch._inductor.aoti_load_package(path)(*arguments)
        torch.testing.assert_close(tuple(got), Everything()(*arguments))


@pytest.mark.filterwarnings("ignore")  # of TorchScript, which is deprecated
@pytest.mark.parametrize("module", [libflash.torch, libflash])
def test_a_trace_records_the_operators(module) -> None:
    q, k, v = qkv(grad=False)

    def function(q):
        out, lse = module.attention(q, k, v, causal=True, window_size=(4, 1), bias=q.new_ones(7, 9), return_lse=True)
        merged = module.merge([out, out], [lse, lse])[0]
        return merged + module.decode(q, k, v, cache_seqlens=torch.tensor([4, 9], dtype=torch.int32))

    traced = torch.jit.trace(function, (q,))
    assert all(f"libflash::{name}" in str(traced.graph) for name in ("attention", "merge", "decode"))
    torch.testing.assert_close(traced(q * 2), function(q * 2))
    appended = torch.jit.trace(lambda q: module.decode(q, k.clone(), v.clone(), k=k[:, :2], v=v[:, :2]), (q,))
    assert "libflash::decode_append" in str(appended.graph)
    torch.testing.assert_close(appended(q * 2), module.decode(q * 2, k.clone(), v.clone(), k=k[:, :2], v=v[:, :2]))


@pytest.mark.parametrize("pre_dispatch", [False, True])
@pytest.mark.parametrize("module", [libflash, libflash.torch])
def test_a_graph_of_make_fx_computes_with_new_inputs(module, pre_dispatch: bool) -> None:
    """Also before dispatch, where PyTorch keeps its modes in another place."""
    q, k, v = qkv(grad=False)

    def function(q: torch.Tensor) -> torch.Tensor:
        out, lse = module.attention(q, k, v, return_lse=True)
        return module.merge([out, out], [lse, lse])[0] + module.decode(q, k, v)

    graph = make_fx(function, pre_dispatch=pre_dispatch)(q)
    called = {str(node.target) for node in graph.graph.nodes}
    assert called >= {f"libflash.{name}.default" for name in ("attention", "decode", "merge")}
    torch.testing.assert_close(graph(2 * q), function(2 * q))


@pytest.mark.filterwarnings("ignore")  # of TorchScript, which is deprecated
@pytest.mark.parametrize("trace", [torch.jit.trace, lambda f, x: make_fx(f)(*x), lambda f, x: make_fx(f, pre_dispatch=True)(*x)])
def test_what_a_trace_would_keep_as_a_constant_is_refused(trace) -> None:
    q, k, v = qkv(grad=False)
    out, lse = libflash.attention(q, k, v, return_lse=True)
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    with pytest.raises(libflash.UnsupportedError, match="attention_backward cannot be traced"):
        trace(lambda q: q + libflash.attention_backward(out, q, k, v, out, lse)[0], (q,))
    with pytest.raises(libflash.UnsupportedError, match="compress_block_mask cannot be traced"):
        trace(lambda mask: libflash.attention(q, k, v, block_mask=libflash.compress_block_mask(mask)), (mask,))
    assert libflash.compress_block_mask(mask).row_counts.item() == 1


def loss_gradient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    leaf = q.detach().requires_grad_()
    return torch.autograd.grad(libflash.attention(leaf, k, v).sum(), leaf)[0]


def test_make_fx_records_the_backward_operator() -> None:
    q, k, v = qkv(grad=False)
    graph = make_fx(loss_gradient)(q, k, v)
    assert "libflash.attention_backward.default" in {str(node.target) for node in graph.graph.nodes}
    torch.testing.assert_close(graph(2 * q, k, v), loss_gradient(2 * q, k, v))


def test_merge_compiles() -> None:
    outs, lses = tensors((1, 2, 3, 4), (1, 2, 3, 4)), tensors((1, 3, 2), (1, 3, 2))

    def function(*parts):
        return libflash.torch.merge(parts[:2], parts[2:], return_lse=False)

    got, wanted = compiled(function)(*outs, *lses), function(*outs, *lses)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(torch.autograd.grad(got.sum(), lses), torch.autograd.grad(wanted.sum(), lses))


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "text"),
    [
        ("out", (4, 2, 3, 4), torch.float32, r"out has shape \(4, 2, 3, 4\); it must be \(1, 2, 3, 4\)"),
        ("out", (1, 2, 3, 4), torch.float64, r"out is torch.float64; .*must be torch.float32"),
        ("lse", (2, 3, 2), torch.float32, r"lse has shape \(2, 3, 2\); it must be \(1, 3, 2\)"),
        ("lse", (1, 3, 2), torch.bfloat16, r"lse is torch.bfloat16; .*must be torch.float32"),
    ],
)
def test_given_results_are_neither_broadcast_nor_converted(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, text: str
) -> None:
    """copy_ would do both; a call that PyTorch does not trace refuses such tensors too."""
    out, lse, part = torch.zeros(1, 2, 3, 4), torch.zeros(1, 3, 2), torch.ones(1, 2, 3, 4)
    given = {"out": out, "lse": lse} | {name: torch.zeros(shape, dtype=dtype)}
    make_fx(lambda: libflash.torch.merge([part], [lse], out=out, lse=lse))()
    with pytest.raises((libflash.InvalidError, libflash.UnsupportedError), match=text):
        make_fx(lambda: libflash.torch.merge([part], [lse], **given))()
    cache = torch.ones(1, 8, 3, 4)
    with pytest.raises((libflash.InvalidError, libflash.UnsupportedError), match=rf"^{name} "):
        make_fx(lambda: libflash.torch.decode(part, cache, cache, **given))()
