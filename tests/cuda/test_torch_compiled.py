"""libflash.torch on the GPU under torch.compile, in CUDA graphs, as operators, and on several streams."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

import libflash

torch = pytest.importorskip("torch")
import libflash.torch  # noqa: E402  (needs torch)

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # warnings of the compilers, and of captures about streams that autograd remembers
]

DEVICE = "cuda"
OPERATORS = torch.ops.libflash


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(map(sum, shapes)))
    return [torch.randn(shape, generator=generator).to(dtype).to(DEVICE).requires_grad_(grad) for shape in shapes]


def qkv(*, grad: bool = True) -> list[torch.Tensor]:
    return tensors((2, 130, 4, 64), (2, 200, 2, 64), (2, 200, 2, 40), grad=grad)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> torch.Tensor:
    return libflash.torch.attention(q, k, v, causal=True, deterministic=True, **options)


def with_gradients(function: Callable, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    out = function(*leaves)
    return [out, *torch.autograd.grad(out.float().square().sum(), leaves)]


def assert_close(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    """Up to a rounding error of the largest value: compilers may fuse operations and so round differently."""
    for x, y in zip(got, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=2**-7 * float(y.detach().float().abs().max()))


# -- operators and torch.compile


def sample_calls() -> dict[str, tuple]:
    q, k, v = qkv(grad=False)
    bias, sink = tensors((1, 4, 130, 200), (4,), grad=False)
    cu = torch.tensor([0, 30, 70], dtype=torch.int32, device=DEVICE)
    mixed = {"bias": bias, "learnable_sink": sink, "causal": True, "window_size": [100, -1], "softcap": 15.0}
    out, lse = OPERATORS.attention(q, k, v, **mixed)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    backward = mixed | {"dlse": dlse, "need_dbias": True, "need_dsink": True, "deterministic": True}
    turned = tuple(x.transpose(1, 2) for x in (q, k, v))
    return {
        "plain": (OPERATORS.attention, (q, k, v), {}),
        "mixed": (OPERATORS.attention, (q, k, v), mixed),
        "packed": (OPERATORS.attention, (q[0], k[0, :70], v[0, :70]), {"cu_seqlens_q": cu, "cu_seqlens_k": cu}),
        "bhsd": (OPERATORS.attention, turned, {"layout": "bhsd"}),
        "out": (OPERATORS.attention_out, (q, k, v), {"out": torch.empty_like(out), "lse": torch.empty_like(lse)}),
        "backward": (OPERATORS.attention_backward, (dout, q, k, v, out, lse), backward),
        "merge": (OPERATORS.merge, ([out, out], [lse, lse]), {}),
    }


@pytest.mark.parametrize("name", ["plain", "mixed", "packed", "bhsd", "out", "backward", "merge"])
def test_operator(name: str) -> None:
    """Schema, fake tensors, autograd registration, AOT dispatch: PyTorch's own checks."""
    operator, arguments, options = sample_calls()[name]
    torch.library.opcheck(operator, arguments, options)


def compiled(function: Callable, **options: object) -> Callable:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, **{"backend": "aot_eager"} | options)


def compiled_options() -> dict[str, dict]:
    lengths = {"seqused_q": [130, 30], "seqused_k": [20, 200]}
    blocks = torch.tensor([[[[True, False], [True, True]]]], device=DEVICE)
    return {
        "plain": {},
        "causal": {"causal": True, "window_size": (100, None), "causal_align": "top_left"},
        "numbers": {"softmax_scale": 0.2, "softcap": 3.0, "num_splits": 1},
        "dropout": {"dropout_p": 0.25, "seed": 11, "offset": 2**63 + 5},
        "alibi": {"alibi_slopes": torch.linspace(0.1, 1, 4, device=DEVICE)},
        "mask": {"mask": (torch.rand(2, 1, 130, 200) < 0.8).to(DEVICE)},
        "blocks": {"block_mask": blocks},
        "lists": {"block_mask": libflash.compress_block_mask(blocks)},
        "lengths": {name: torch.tensor(value, dtype=torch.int32, device=DEVICE) for name, value in lengths.items()},
    }


@pytest.mark.parametrize("name", ["plain", "causal", "numbers", "dropout", "alibi", "mask", "blocks", "lists", "lengths"])
def test_compiles_whole(name: str) -> None:
    """Forward and backward, with bias, sink and lse, without a graph break."""
    leaves, options = [*qkv(), *tensors((1, 4, 1, 200), (4,))], compiled_options()[name]

    def function(q, k, v, bias, sink):
        return libflash.torch.attention(q, k, v, bias=bias, learnable_sink=sink, return_lse=True, deterministic=True, **options)

    def everything(call):
        out, lse = call(*leaves)
        finite = torch.where(lse > -torch.inf, lse, 0)
        return out, lse, *torch.autograd.grad(out.float().square().sum() + finite.sum(), leaves)

    got, wanted = everything(compiled(function)), everything(function)
    assert torch.equal(got[0], wanted[0])
    assert torch.equal(got[1], wanted[1])
    assert_close(got[2:], wanted[2:])


def test_compiles_with_inductor_and_changing_sizes() -> None:
    pytest.importorskip("triton")
    function = compiled(lambda q, k, v: attention(q * 2, k, v).relu(), backend="inductor", dynamic=True)
    for seqlen in (50, 80, 130):
        leaves = tensors((2, seqlen, 4, 64), (2, seqlen, 2, 64), (2, seqlen, 2, 64))
        assert_close(with_gradients(function, leaves), with_gradients(lambda q, k, v: attention(q * 2, k, v).relu(), leaves))


class Layer(torch.nn.Module):
    """A residual block with attention in it."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(128, 3 * 128)
        self.back = torch.nn.Linear(128, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 2, 64)).unbind(-3)
        return x + self.back(attention(q, k, v).flatten(-2))


def layer() -> Layer:
    torch.manual_seed(0)
    return Layer().to(DEVICE).to(torch.bfloat16)


def test_compiles_into_cuda_graphs() -> None:
    """mode="reduce-overhead": the compiler captures forward and backward and replays them from the third call on."""
    pytest.importorskip("triton")
    torch._dynamo.reset()
    model = layer()
    fast = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    for seed in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        x = tensors((2, 100, 128))[0].detach() + seed
        parameters = list(model.parameters())
        got = [y.clone() for y in with_gradients(lambda *_: fast(x), parameters)]  # noqa: B023
        assert_close(got, with_gradients(lambda *_: model(x), parameters))  # noqa: B023


# -- captured CUDA graphs


def test_graph_of_a_training_step() -> None:
    """Forward and backward through autograd in one graph, replayed with other contents."""
    leaves, others = qkv(), [x + 1 for x in qkv(grad=False)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        with_gradients(attention, leaves)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        made = with_gradients(attention, leaves)
    for contents in (others, [x.detach().clone() for x in leaves], others):
        for leaf, value in zip(leaves, contents, strict=True):
            leaf.data.copy_(value)
        graph.replay()
        for got, wanted in zip(made, with_gradients(attention, leaves), strict=True):
            assert torch.equal(got, wanted)


def test_graphed_callables() -> None:
    model, sample = layer(), tensors((2, 100, 128))[0]
    plain = layer()
    fast = torch.cuda.make_graphed_callables(model, (sample,))
    for seed in range(3):
        x = (tensors((2, 100, 128))[0].detach() * (seed + 1)).requires_grad_()
        other = x.detach().clone().requires_grad_()
        got = with_gradients(lambda *_: fast(x), [x, *model.parameters()])  # noqa: B023
        wanted = with_gradients(lambda *_: plain(other), [other, *plain.parameters()])  # noqa: B023
        assert_close(got, wanted)


def test_dropout_in_a_graph() -> None:
    """With a number as seed each replay has the same mask; without a seed each replay draws another mask."""
    q, k, v = qkv(grad=False)
    wanted = libflash.torch.attention(q, k, v, dropout_p=0.5, seed=3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = libflash.torch.attention(q, k, v, dropout_p=0.5)
        fixed = libflash.torch.attention(q, k, v, dropout_p=0.5, seed=3)
    seen = []
    for _ in range(3):
        graph.replay()
        assert torch.equal(fixed, wanted)
        assert drawn.isfinite().all()
        seen.append(drawn.clone())
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


# -- streams


def test_several_streams() -> None:
    """The backward pass runs on the stream of the forward pass."""
    problems = [tensors((2, 100 + 50 * i, 4, 64), (2, 300, 2, 64), (2, 300, 2, 64)) for i in range(4)]
    wanted = [with_gradients(attention, leaves) for leaves in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    for _ in range(10):
        made = []
        for stream, leaves in zip(streams, problems, strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(1_000_000)
                made.append(with_gradients(attention, leaves))
        torch.cuda.synchronize()
        for got, right in zip(made, wanted, strict=True):
            assert all(map(torch.equal, got, right))


def test_gradients_of_late_inputs() -> None:
    """A slow kernel writes the saved tensors and dout just before the backward pass."""
    leaves = qkv(grad=False)
    right = with_gradients(attention, [x.clone().requires_grad_() for x in leaves])
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        late = [torch.full_like(x, torch.nan) for x in leaves]
        torch.cuda._sleep(20_000_000)
        for x, value in zip(late, leaves, strict=True):
            x.copy_(value)
        got = with_gradients(attention, [x.requires_grad_() for x in late])
    stream.synchronize()
    assert all(map(torch.equal, got, right))


AHEAD_OF_TIME = """
import sys, tempfile, torch
if sys.argv[1] == "libflash":
    import libflash.torch
    from libflash.torch import attention, decode, merge

class Module(torch.nn.Module):
    def forward(self, q, k, v, bias, lengths):
        if sys.argv[1] != "libflash":
            return q * 2 + 1
        first = attention(q * 1, k, v, bias=bias, window_size=(30, 20), softcap=4.0, seqused_k=lengths)
        rows = [x.transpose(1, 2) for x in (q + 1, k, v)]
        second, lse = attention(*rows, layout="bhsd", causal=True, causal_align="top_left", return_lse=True)
        merged = merge([first, second.transpose(1, 2).contiguous()], [lse, lse], return_lse=False)
        return merged, lse, decode(q[:, :2].contiguous(), k, v, cache_seqlens=lengths)

x = [torch.randn(s, device="cuda").bfloat16() for s in ((2, 130, 4, 64), (2, 200, 2, 64), (2, 200, 2, 40), (130, 200))]
x.append(torch.tensor([150, 200], dtype=torch.int32, device="cuda"))
with torch.no_grad():
    program = torch.export.export(Module(), tuple(x))
    if sys.argv[2] == "package":
        loaded = torch._inductor.aoti_load_package(torch._inductor.aoti_compile_and_package(program, package_path=sys.argv[3]))
    else:
        loaded = torch._export.aot_load(torch._inductor.aot_compile(program.module(), tuple(x)), "cuda")
    torch.testing.assert_close(loaded(*x), Module()(*x))
"""


def compiled_ahead(what: str, how: str, folder) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", AHEAD_OF_TIME, what, how, str(folder / f"{what}.pt2")]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.parametrize("how", ["package", "library"])
def test_compiled_ahead_of_time(how: str, tmp_path) -> None:
    """By AOTInductor, in a process of its own: some PyTorch 2.11 ends the process when it loads any package."""
    if compiled_ahead("torch", how, tmp_path).returncode != 0:
        pytest.skip(f"PyTorch's own {how} does not run here")
    done = compiled_ahead("libflash", how, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
