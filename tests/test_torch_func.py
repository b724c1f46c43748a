"""libflash.torch under torch.func, batched gradients, forward-mode AD and derivatives of derivatives."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

import libflash

torch = pytest.importorskip("torch")

import libflash.torch  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch_problem import eager, qkv, tensors  # noqa: E402

A = libflash.torch.attention
func = torch.func

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # a warning of PyTorch at its first dual level

Function = Callable[..., torch.Tensor]


def problem() -> list[torch.Tensor]:
    return qkv(torch.float64, grad=False)


def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    out, lse = A(q, k, v, return_lse=True, **options)
    return out.square().sum() + torch.where(lse > -torch.inf, lse, 0).sin().sum()


def exact_loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    out, lse = eager(q, k, v, **options)
    return out.square().sum() + lse.sin().sum()


def by_autograd(function: Function, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
    own = [x.detach().clone().requires_grad_() for x in leaves]
    return torch.autograd.grad(function(*own), own)


def assert_close(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


# -- supported


def test_grad_and_vjp_agree_with_the_definition() -> None:
    q, k, v = problem()
    wanted = func.grad(exact_loss, argnums=(0, 1, 2))(q, k, v)
    assert_close(func.grad(loss, argnums=(0, 1, 2))(q, k, v), wanted)
    assert_close(func.grad(lambda *x: loss(*x).clone(), argnums=(0, 1, 2))(q, k, v), wanted)
    _, pull = func.vjp(loss, q, k, v)
    assert_close(pull(torch.ones((), dtype=torch.float64)), wanted)
    plain = func.grad(lambda q: libflash.attention(q, k, v).square().sum())(q)
    assert_close(plain, func.grad(lambda q: eager(q, k, v)[0].square().sum())(q))


def test_jacrev() -> None:
    q, k, v = problem()
    for argument in range(3):
        got = func.jacrev(lambda *x: A(*x, causal=True), argnums=argument)(q, k, v)
        assert_close(got, func.jacrev(lambda *x: eager(*x, causal=True)[0], argnums=argument)(q, k, v))


OPTIONS = {
    "plain": {},
    "causal": {"causal": True, "window_size": (3, 1), "softcap": 2.0, "softmax_scale": 0.3},
    "lengths": {"seqused_q": torch.tensor([7, 3], dtype=torch.int32), "seqused_k": torch.tensor([2, 9], dtype=torch.int32)},
    "dropout": {"dropout_p": 0.3, "seed": 5},
    "blocks": {"block_mask": torch.ones(2, 4, 1, 1, dtype=torch.bool)},
    "lists": {"block_mask": libflash.compress_block_mask(torch.ones(1, 1, 1, 1, dtype=torch.bool))},
    "numbers": {"num_splits": 2, "backend": "cpu", "deterministic": True},
}


@pytest.mark.parametrize("dim", [0, 2, -1])
@pytest.mark.parametrize("name", OPTIONS)
def test_vmap_is_one_call_after_the_other(name: str, dim: int) -> None:
    """The call and its gradients, with the new axis anywhere."""
    leaves = [torch.stack([x, x.flip(1), x * 2], dim) for x in problem()]
    slices = [[x.select(dim, i).contiguous() for x in leaves] for i in range(3)]
    options = OPTIONS[name]
    gradient = func.grad(lambda *x: loss(*x, **options), argnums=(0, 1, 2))
    assert_close(
        func.vmap(lambda *x: A(*x, **options), in_dims=dim)(*leaves),
        torch.stack([A(*part, **options) for part in slices]),
    )
    wanted = [gradient(*part) for part in slices]
    assert_close(func.vmap(gradient, in_dims=dim)(*leaves), tuple(map(torch.stack, zip(*wanted, strict=True))))


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd"])
@pytest.mark.parametrize("mapped", [(0, 0, 0), (0, None, None), (None, 0, 0), (None, None, 1)])
def test_vmap_of_some_arguments(layout: str, mapped: tuple[int | None, ...]) -> None:
    axes = ["bshd".index(axis) for axis in layout]
    leaves = [x.permute(axes).contiguous() for x in problem()]
    leaves = [x if dim is None else torch.stack([x, -x, x * 2], dim) for x, dim in zip(leaves, mapped, strict=True)]
    gradient = func.grad(lambda *x: loss(*x, layout=layout), argnums=(0, 1, 2))
    got = func.vmap(gradient, in_dims=mapped)(*leaves)
    wanted = [
        gradient(*(x if dim is None else x.select(dim, i) for x, dim in zip(leaves, mapped, strict=True))) for i in range(3)
    ]
    assert_close(got, tuple(map(torch.stack, zip(*wanted, strict=True))))


SCORES = {
    "bias": [(2, 4, 7, 9), (1, 4, 1, 9), (4, 7, 9), (7, 9)],
    "alibi_slopes": [(4,), (2, 4)],
    "learnable_sink": [(4,)],
    "mask": [(2, 1, 7, 9), (7, 9)],
}


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize(("name", "shape"), [(name, shape) for name, shapes in SCORES.items() for shape in shapes])
def test_vmap_of_score_options(name: str, shape: tuple[int, ...], mapped: bool) -> None:
    q, k, v = (torch.stack([x, -x, x * 2]) for x in problem())
    x = torch.rand((3, *shape) if mapped else shape, generator=torch.Generator().manual_seed(1))
    x = x < 0.7 if name == "mask" else x
    differentiable = name in ("bias", "learnable_sink")

    def gradient(q: Any, k: Any, v: Any, x: Any) -> Any:
        which = (0, 1, 2, 3) if differentiable else (0, 1, 2)
        return func.grad(lambda q, k, v, x: loss(q, k, v, **{name: x}), argnums=which)(q, k, v, x)

    got = func.vmap(gradient, in_dims=(0, 0, 0, 0 if mapped else None))(q, k, v, x)
    wanted = [gradient(q[i], k[i], v[i], x[i] if mapped else x) for i in range(3)]
    torch.testing.assert_close(got, tuple(map(torch.stack, zip(*wanted, strict=True))), rtol=1e-6, atol=1e-6)


def test_vmap_of_packed_sequences() -> None:
    q, k, v = tensors((3, 9, 4, 8), (3, 9, 2, 8), (3, 9, 2, 8), grad=False)
    cu = torch.tensor([[0, 3, 7], [0, 4, 9], [0, 0, 5]], dtype=torch.int32)

    def one(q: Any, k: Any, v: Any, cu: Any) -> torch.Tensor:
        return loss(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu)

    gradient = func.grad(one, argnums=(0, 1, 2))
    for dims, pick in (((0, 0, 0, 0), lambda i: cu[i]), ((0, 0, 0, None), lambda i: cu[0])):
        got = func.vmap(gradient, in_dims=dims)(q, k, v, cu if dims[3] == 0 else cu[0])
        wanted = [gradient(q[i], k[i], v[i], pick(i)) for i in range(3)]
        assert_close(got, tuple(map(torch.stack, zip(*wanted, strict=True))))


def test_nested_vmap_and_grad_of_vmap() -> None:
    leaves = [torch.stack([torch.stack([x, -x]), torch.stack([x * 2, x.flip(1)]), torch.stack([x, x])]) for x in problem()]
    got = func.vmap(func.vmap(A))(*leaves)
    assert_close(got, torch.stack([torch.stack([A(*(x[i, j] for x in leaves)) for j in range(2)]) for i in range(3)]))
    got = func.grad(lambda q: func.vmap(func.vmap(loss))(q, *leaves[1:]).sum())(leaves[0])

    def one_by_one(q: torch.Tensor) -> torch.Tensor:
        return sum(loss(q[i, j], *(x[i, j] for x in leaves[1:])) for i in range(3) for j in range(2))

    assert_close(got, by_autograd(one_by_one, leaves[0])[0])


@pytest.mark.parametrize("mapped", [(0, 0, 0), (0, None, None)])
def test_vmap_over_nothing(mapped: tuple[int | None, ...]) -> None:
    """An axis of size 0, as jacfwd has for an input without elements: results of the right shapes."""
    q, k, v = problem()
    x = [y if dim is None else y[None][:0] for y, dim in zip((q, k, v), mapped, strict=True)]

    def shapes(function: Function) -> list[tuple[int, ...]]:
        every = (0, 1, 2)
        calls = (
            function,
            func.grad(lambda *y: function(*y).sum(), every),
            lambda *y: func.jvp(function, y, (q, k, v)),
            func.hessian(lambda *y: function(*y).sum(), every),
        )
        made = [func.vmap(call, in_dims=mapped)(*x) for call in calls]
        made.append(func.jacfwd(lambda q: function(q, k[:0], v[:0]))(q[:0]))
        return [tuple(y.shape) for y in torch.utils._pytree.tree_leaves(made)]

    assert shapes(A) == shapes(lambda *y: eager(*y)[0])


def test_vmap_asks_what_random_numbers_are_meant() -> None:
    q, k, v = (torch.stack([x, x]) for x in problem())
    with pytest.raises(RuntimeError, match="randomness"):
        func.vmap(lambda *x: A(*x, dropout_p=0.5))(q, k, v)
    same = func.vmap(lambda *x: A(*x, dropout_p=0.5), randomness="same")(q, k, v)
    assert torch.equal(same[0], same[1])
    different = func.vmap(lambda *x: A(*x, dropout_p=0.5), randomness="different")(q, k, v)
    assert not torch.equal(different[0], different[1])


def test_batched_gradients() -> None:
    q, k, v = qkv(torch.float64)
    out, lse = A(q, k, v, return_lse=True)
    douts, dlses = torch.randn(3, *out.shape, dtype=torch.float64), torch.randn(3, *lse.shape, dtype=torch.float64)
    got = torch.autograd.grad((out, lse), (q, k, v), (douts, dlses), is_grads_batched=True, retain_graph=True)
    wanted = [torch.autograd.grad((out, lse), (q, k, v), (douts[i], dlses[i]), retain_graph=True) for i in range(3)]
    assert_close(got, tuple(map(torch.stack, zip(*wanted, strict=True))))


def test_gradcheck_with_batched_gradients() -> None:
    assert torch.autograd.gradcheck(lambda *x: A(*x, return_lse=True), qkv(torch.float64), check_batched_grad=True)


def test_functional_call_gives_gradients_per_sample() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = torch.nn.Linear(8, 24, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.project(x).unflatten(-1, (3, 2, 4)).unbind(-3)
            return A(q[None], k[None], v[None], causal=True).square().sum()

    layer, samples = Layer(), torch.randn(4, 5, 8, dtype=torch.float64)
    weights = {name: x.detach() for name, x in layer.named_parameters()}
    gradient = func.grad(lambda weights, x: func.functional_call(layer, weights, (x,)))
    got = func.vmap(gradient, in_dims=(None, 0))(weights, samples)
    for i in range(4):
        layer.zero_grad()
        layer(samples[i]).backward()
        assert_close({name: x[i] for name, x in got.items()}, {name: x.grad for name, x in layer.named_parameters()})


def test_parameters_outside_a_transform_keep_their_gradient() -> None:
    q, k, v = qkv(torch.float64)
    got = torch.autograd.grad(func.vmap(lambda q: A(q[None], k[:1], v[:1]))(q).sum(), (q, k))
    wanted = torch.autograd.grad(torch.stack([A(x[None], k[:1], v[:1]) for x in q]).sum(), (q, k))
    assert_close(got, wanted)


# -- merge and decode


def merge_loss(*parts: torch.Tensor) -> torch.Tensor:
    out, lse = libflash.torch.merge(parts[:2], parts[2:])
    return out.square().sum() + lse.sin().sum()


def parts() -> list[torch.Tensor]:
    return tensors((2, 3, 4, 5), (2, 3, 4, 5), (2, 4, 3), (2, 4, 3), dtype=torch.float64, grad=False)


def test_merge_under_transforms() -> None:
    every = (0, 1, 2, 3)
    gradient = func.grad(merge_loss, argnums=every)
    assert_close(gradient(*parts()), by_autograd(merge_loss, *parts()))
    stacks = [torch.stack([x, -x]) for x in parts()]
    wanted = [gradient(*(x[i] for x in stacks)) for i in range(2)]
    assert_close(func.vmap(gradient)(*stacks), tuple(map(torch.stack, zip(*wanted, strict=True))))


def test_merge_is_differentiable_twice() -> None:
    own = [x.requires_grad_() for x in parts()]
    assert torch.autograd.gradgradcheck(merge_loss, own)
    nothing = [own[0], own[1], own[2], torch.full_like(own[3], -torch.inf).requires_grad_()]
    gradients = torch.autograd.grad(merge_loss(*nothing), nothing, create_graph=True)
    second = torch.autograd.grad(sum(x.square().sum() for x in gradients), nothing)
    assert all(torch.isfinite(x).all() for x in second)
    torch.testing.assert_close(second[0], 8 * own[0])  # with no other part, out is outs[0]


def test_vmap_of_decode() -> None:
    q, k_cache, v_cache, k, v = tensors(
        (3, 2, 1, 4, 8), (3, 2, 9, 2, 8), (3, 2, 9, 2, 8), (3, 2, 1, 2, 8), (3, 2, 1, 2, 8), grad=False
    )
    lengths = torch.tensor([[4, 7], [0, 1], [8, 3]], dtype=torch.int32)
    mine, other = (k_cache.clone(), v_cache.clone()), (k_cache.clone(), v_cache.clone())

    def step(q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, lengths: Any) -> Any:
        return libflash.torch.decode(q, k_cache, v_cache, k=k, v=v, cache_seqlens=lengths)

    got = func.vmap(step)(q, *mine, k, v, lengths)
    assert_close(got, torch.stack([step(q[i], other[0][i], other[1][i], k[i], v[i], lengths[i]) for i in range(3)]))
    assert torch.equal(mine[0], other[0])
    assert torch.equal(mine[1], other[1])
    with pytest.raises(libflash.UnsupportedError, match="k_cache is written to"):
        func.vmap(step, in_dims=(0, None, None, 0, 0, 0))(q, mine[0][0], mine[1][0], k, v, lengths)


def test_vmap_of_attention_into_out() -> None:
    _, k, v = problem()
    (q,) = tensors((3, 2, 7, 4, 8), grad=False)
    wanted = [A(x.to(k.dtype), k, v, return_lse=True) for x in q]
    out, lse = (torch.zeros(3, *x.shape, dtype=k.dtype) for x in wanted[0])
    got = func.vmap(lambda q, out, lse: A(q, k, v, out=out, lse=lse, return_lse=True))(q.to(k.dtype), out, lse)
    assert_close(got, tuple(map(torch.stack, zip(*wanted, strict=True))))
    assert torch.equal(out, got[0])
    assert torch.equal(lse, got[1])
    out.zero_()
    assert torch.equal(func.vmap(lambda out: A(q[0].to(k.dtype), k, v, out=out))(out)[2], wanted[0][0])
    with pytest.raises(libflash.UnsupportedError, match="out is written to"):
        func.vmap(lambda q: A(q, k, v, out=out[0]))(q.to(k.dtype))


@pytest.mark.parametrize("requires", [(1, 1, 1), (0, 1, 0)])
def test_a_tangent_of_a_dual_may_require_a_gradient(requires: tuple[int, ...]) -> None:
    """The primals require no gradient. The tangents are those of a dual level without gradients."""
    moved = tensors((2, 7, 4, 8), (2, 9, 2, 8), (2, 9, 2, 5), dtype=torch.float64, grad=False)

    def of_tangent(function: Function) -> tuple[torch.Tensor, ...]:
        tangents = [x.clone().requires_grad_(bool(needed)) for x, needed in zip(moved, requires, strict=True)]
        with forward_ad.dual_level():
            out, lse = function(*map(forward_ad.make_dual, problem(), tangents))
            tout, tlse = (forward_ad.unpack_dual(x).tangent for x in (out, lse))
            return torch.autograd.grad(tout.sin().sum() + tlse.sin().sum(), [x for x in tangents if x.requires_grad])

    assert_close(of_tangent(lambda *x: A(*x, return_lse=True)), of_tangent(eager))


# -- refused


def tangent_calls() -> dict[str, Callable[[Callable[[torch.Tensor], torch.Tensor]], Any]]:
    q, k, v = problem()
    (slopes,) = tensors((4,), dtype=torch.float64, grad=False)
    return {
        "alibi_slopes": lambda dual: A(q, k, v, alibi_slopes=dual(slopes)),
        "decode": lambda dual: libflash.torch.decode(q, dual(k), v),
        "plain-decode": lambda dual: libflash.decode(q, k, dual(v)),
        "out": lambda dual: A(q, k, dual(v), out=torch.empty(2, 7, 4, 5, dtype=torch.float64)),
    }


@pytest.mark.parametrize("name", tangent_calls())
def test_a_tangent_is_refused(name: str) -> None:
    """The advice in the error text works. For decode it must not be reverse mode, which decode does not have either."""
    call = tangent_calls()[name]
    with forward_ad.dual_level(), pytest.raises(libflash.UnsupportedError, match="carries a tangent") as refused:
        call(lambda x: forward_ad.make_dual(x, torch.ones_like(x)))
    assert "reverse mode" not in str(refused.value)
    assert re.search(r"pass \w+\.detach\(\)", str(refused.value))
    with forward_ad.dual_level():
        call(lambda x: forward_ad.make_dual(x, torch.ones_like(x)).detach())
    with forward_ad.dual_level():
        call(lambda x: x)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_create_graph_alone_is_fine() -> None:
    q, k, v = qkv()
    A(q, k, v).square().sum().backward(create_graph=True)
    assert q.grad is not None
    torch.optim.SGD([q], 0.1).step()


@pytest.mark.parametrize("name", ["softmax_scale", "softcap"])
def test_numbers_that_vmap_maps_are_refused(name: str) -> None:
    """With an error that names the argument: PyTorch's own error names none."""
    q, k, v = problem()
    numbers = torch.tensor([0.5, 2.0])

    def mapped(numbers: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda x: A(q, k, v, **{name: x}))(numbers)

    with pytest.raises(libflash.UnsupportedError, match=f"{name} is mapped by vmap, and it is one number of a call"):
        mapped(numbers)
    for transform in (torch.func.grad, lambda f: lambda x: torch.func.jvp(f, (x,), (x,))):
        with pytest.raises(libflash.UnsupportedError, match=f"{name} requires a gradient, and there is none for it"):
            transform(lambda x: mapped(x).sum())(numbers)
