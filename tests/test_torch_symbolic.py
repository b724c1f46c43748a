"""Numbers that depend on symbolic sizes: torch.export and torch.compile keep them, and do not fix the size."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest

import libflash

torch = pytest.importorskip("torch")

import libflash.torch  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

from libflash import flash_attn  # noqa: E402

Function = Callable[[torch.Tensor], torch.Tensor]

pytestmark = pytest.mark.filterwarnings("ignore")  # of PyTorch's own tools

LENGTHS = (6, 11, 9)
ROWS, PAGES = torch.tensor([0, 5], dtype=torch.int32), torch.tensor([[1]], dtype=torch.int32)

FUNCTIONS: dict[str, Function] = {
    "quotient": lambda x: libflash.torch.attention(x, x, x, softmax_scale=1 / x.shape[1]),
    "power": lambda x: libflash.torch.attention(x, x, x, softmax_scale=x.shape[1] ** -0.5),
    "integer": lambda x: libflash.torch.attention(x, x, x, softmax_scale=x.shape[1]),
    "softcap": lambda x: libflash.torch.attention(x, x, x, softcap=x.shape[1] / 4, causal=True),
    "dropout_p": lambda x: libflash.torch.attention(x, x, x, dropout_p=1 / x.shape[1], seed=3),
    "decode": lambda x: libflash.torch.decode(x, x, x, softmax_scale=1 / x.shape[1], softcap=x.shape[1] / 4),
    "flash_attn": lambda x: flash_attn.flash_attn_func(x, x, x, softmax_scale=1 / x.shape[1], softcap=10 / x.shape[1]),
    "window": lambda x: flash_attn.flash_attn_func(x, x, x, window_size=(x.shape[1] // 2, 0)),
    "cache": lambda x: flash_attn.flash_attn_with_kvcache(x, x, x, cache_seqlens=x.shape[1] - 1),
    "pages": lambda x: flash_attn.flash_attn_varlen_func(
        x[0], x, x, ROWS, ROWS, None, x.shape[1] - 1, block_table=PAGES, seqused_q=ROWS[1:], softmax_scale=1 / x.shape[1]
    ),
    "value": lambda x: libflash.torch.attention(x, x, x, softmax_scale=x[0, 0, 0, 0].cos().item()),
}


def problem(seqlen: int) -> torch.Tensor:
    return torch.randn(2, seqlen, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seqlen))


class Program(torch.nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_exports(name: str, strict: bool) -> None:
    seqlen = torch.export.Dim("seqlen", min=2, max=64)
    program = torch.export.export(Program(FUNCTIONS[name]), (problem(6),), dynamic_shapes={"x": {1: seqlen}}, strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for n in LENGTHS:
        torch.testing.assert_close(loaded(problem(n)), FUNCTIONS[name](problem(n)))


def gradient(function: Function, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(function(x).sin().sum(), x)[0]


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in ("decode", "cache")])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_gradients(name: str, backend: str) -> None:
    """By autograd and by torch.func.grad within the graph."""
    function = FUNCTIONS[name]
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(function, dynamic=True, fullgraph=True, backend=backend)
        within = torch.compile(
            torch.func.grad(lambda x: function(x).sin().sum()), dynamic=True, fullgraph=name != "value", backend=backend
        )
        for n in LENGTHS:
            wanted = gradient(function, problem(n))
            assert wanted.abs().max() > 0.01
            torch.testing.assert_close(gradient(compiled, problem(n)), wanted)
            if name != "value":  # PyTorch does not read values of tensors under a transform
                torch.testing.assert_close(within(problem(n)), wanted)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "value"])
def test_one_graph_serves_all_lengths(name: str) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(FUNCTIONS[name], dynamic=True, fullgraph=True, backend=backend)
    for n in LENGTHS:
        torch.testing.assert_close(compiled(problem(n)), FUNCTIONS[name](problem(n)))
    assert len(graphs) == 1


def test_make_fx_keeps_the_number() -> None:
    function = FUNCTIONS["quotient"]
    graph = make_fx(function, tracing_mode="symbolic")(problem(6))
    torch.testing.assert_close(graph(problem(11)), function(problem(11)))


@pytest.mark.parametrize("bad", [1j, True, "0.5"])
def test_an_operator_takes_real_numbers_only(bad: object) -> None:
    with pytest.raises((TypeError, RuntimeError), match="softmax_scale"):
        torch.ops.libflash.attention(*[problem(6)] * 3, softmax_scale=bad)
