"""libflash.attention with plain tensors that require a gradient takes a fast path; everything else takes the general path."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

import libflash

torch = pytest.importorskip("torch")

import libflash.torch as adapter  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch_calls import Calls  # noqa: E402
from torch_problem import qkv  # noqa: E402

FLAGS: list[dict[str, bool]] = [{}, {"causal": True}, {"return_lse": True}, {"causal": True, "return_lse": True}]


class GeneralError(Exception):
    """The call took the general path."""


class Subclass(torch.Tensor):
    pass


def general(*_: Any, **__: Any) -> Any:
    raise GeneralError


def fast(*_: Any, **__: Any) -> Any:
    raise AssertionError("the call took the fast path")


def results(options: dict[str, bool], *, create_graph: bool = False) -> list[torch.Tensor]:
    """What the call returns, and its gradients and, with create_graph, those of second order."""
    x = qkv()
    made = libflash.attention(*x, **options)
    made = list(made) if isinstance(made, tuple) else [made]
    loss = sum((y.square().sum() for y in made), torch.zeros(()))
    gradients = torch.autograd.grad(loss, x, create_graph=create_graph)
    if create_graph:
        gradients += torch.autograd.grad(sum(y.square().sum() for y in gradients), x)
    return [*made, *gradients]


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("options", FLAGS)
def test_both_ways_give_the_same_bits(options: dict[str, bool], create_graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(adapter, "attention_with_pytorch", general)
        got = results(options, create_graph=create_graph)
    monkeypatch.setattr(adapter, "record_plain", adapter.attention_with_pytorch)
    wanted = results(options, create_graph=create_graph)
    assert len(got) == len(wanted)
    assert all(map(torch.equal, got, wanted))
    assert [x.requires_grad for x in got] == [x.requires_grad for x in wanted]


@pytest.mark.parametrize("required", [0, 1, 2])
def test_one_tensor_that_requires_a_gradient(required: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = qkv(grad=False)
    x[required].requires_grad_()
    monkeypatch.setattr(adapter, "attention_with_pytorch", general)
    (got,) = torch.autograd.grad(libflash.attention(*x).square().sum(), x[required])
    everything = qkv()
    assert torch.equal(got, torch.autograd.grad(libflash.attention(*everything).square().sum(), everything)[required])


def dual_level() -> AbstractContextManager[Any]:
    return forward_ad.dual_level()


def profiler() -> AbstractContextManager[Any]:
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


@pytest.mark.parametrize(
    ("state", "options"),
    [
        (lambda: torch.autocast("cpu", dtype=torch.bfloat16), {}),
        (Calls, {}),
        (dual_level, {}),
        (profiler, {}),
        (nullcontext, {"softmax_scale": 0.5}),
        (nullcontext, {"causal_align": "top_left"}),
        (nullcontext, {"window_size": (1, 1)}),
        (nullcontext, {"window_size": None}),
        (nullcontext, {"softcap": 2.0}),
        (nullcontext, {"layout": "bhsd"}),
        (nullcontext, {"backend": "cpu"}),
        (nullcontext, {"dropout_p": 0.5}),
        (nullcontext, {"seed": 1}),
        (nullcontext, {"bias": torch.zeros(1)}),
        (nullcontext, {"mask": torch.ones(1, dtype=torch.bool)}),
        (nullcontext, {"learnable_sink": torch.zeros(4)}),
        (nullcontext, {"max_logit": torch.zeros(4)}),
        (nullcontext, {"out": torch.zeros(2, 7, 4, 5)}),
    ],
)
def test_what_leaves_the_fast_path(
    state: Callable[[], AbstractContextManager[Any]], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = qkv()
    monkeypatch.setattr(adapter, "record_plain", fast)
    monkeypatch.setattr(adapter, "attention_with_pytorch", general)
    for flags in ({}, {"causal": True}):
        with state(), pytest.raises(GeneralError):
            libflash.attention(*x, **options, **flags)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_subclasses_and_other_arrays_leave_the_fast_path(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "record_plain", fast)
    monkeypatch.setattr(adapter, "attention_with_pytorch", general)
    given: list[Any] = qkv()
    given[place] = given[place].detach().as_subclass(Subclass)
    with pytest.raises(GeneralError):
        libflash.attention(*given)
    if place > 0:  # q names the library
        given[place] = qkv(grad=False)[place].numpy()
        with pytest.raises(GeneralError):
            libflash.attention(*given)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning")
def test_transforms_and_traces_leave_the_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    x = qkv()
    monkeypatch.setattr(adapter, "record_plain", fast)
    monkeypatch.setattr(adapter, "attention_with_pytorch", general)
    for call in (
        lambda: torch.func.grad(lambda q: libflash.attention(q, *x[1:]).sum())(x[0].detach()),
        lambda: torch.func.vmap(lambda q: libflash.attention(q, *x[1:]))(x[0].detach()[None]),
        lambda: torch.jit.trace(lambda q: libflash.attention(q, *x[1:]), x[0]),
        lambda: libflash.attention(*(y.to("meta") for y in x)),
    ):
        with pytest.raises(GeneralError):
            call()


@pytest.mark.filterwarnings("ignore::UserWarning")  # of the compiler's own, at the graph break
def test_torch_compile_sees_the_operator() -> None:
    """torch.compile does not trace libflash.attention itself, but what it calls."""
    seen: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(node.target for node in graph.graph.nodes)
        return graph.forward

    x = qkv()
    torch._dynamo.reset()
    made = torch.compile(lambda *x: libflash.attention(*x, causal=True) + 1, backend=backend)(*x)
    assert torch.ops.libflash.attention.default in seen
    assert torch.equal(made, libflash.attention(*x, causal=True) + 1)


def test_errors_are_those_of_the_general_path(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv()
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((q, k, v[:, :3]), {}),
        ((q[0], k, v), {}),
        ((q, k.double(), v), {}),
        ((q, k, v), {"causal": 3}),
        ((q, k, v), {"return_lse": "yes"}),
        ((q, k, None), {}),
    ]

    def errors() -> list[tuple[type, str]]:
        found = []
        for args, options in calls:
            with pytest.raises((ValueError, TypeError, NotImplementedError)) as caught:
                libflash.attention(*args, **options)
            found.append((caught.type, str(caught.value)))
        return found

    got = errors()
    monkeypatch.setattr(adapter, "record_plain", adapter.attention_with_pytorch)
    assert got == errors()
