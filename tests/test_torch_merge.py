"""libflash.torch.merge in forward mode and differentiated twice, against its definition in PyTorch's operators, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import libflash

torch = pytest.importorskip("torch")

import libflash.torch  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch_problem import tensors  # noqa: E402

func = torch.func
EVERY = tuple(range(6))
COLUMNS = {"bshd": (0, 2, 1), "bhsd": (0, 1, 2), "sbhd": (2, 0, 1)}  # axes of lse in the order of out
OUTS = {"bshd": (2, 3, 4, 5), "bhsd": (2, 4, 3, 5), "sbhd": (3, 2, 4, 5), "packed": (3, 4, 5)}
Merge = Callable[..., Any]

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of PyTorch at its first dual level
    pytest.mark.filterwarnings("ignore:.*performance drop.*"),  # of PyTorch about vmap
]


def parts(layout: str = "bshd") -> tuple[torch.Tensor, ...]:
    rows = (4, 3) if layout == "packed" else (2, 4, 3)
    return tuple(tensors(*[OUTS[layout]] * 3, *[rows] * 3, dtype=torch.float64, grad=False))


def own(*x: torch.Tensor, layout: str = "bshd") -> Any:
    return libflash.torch.merge(x[:3], x[3:], layout="bshd" if layout == "packed" else layout)


def definition(*x: torch.Tensor, layout: str = "bshd") -> Any:
    lses = torch.stack(x[3:])
    lse = lses.exp().sum(0).log()  # a tangent of logsumexp has no gradient in PyTorch 2.13
    weights = (lses - lse).exp()
    columns = weights.mT if layout == "packed" else weights.permute(0, *(1 + axis for axis in COLUMNS[layout]))
    return (columns[..., None] * torch.stack(x[:3])).sum(0), lse


PARTS = parts()
MOVED = tuple(x.cos() for x in PARTS)


def loss_of(merge: Merge) -> Callable[..., torch.Tensor]:
    def loss(*x: torch.Tensor) -> torch.Tensor:
        out, lse = merge(*x)
        return (out**3).sum() + lse.sin().sum()

    return loss


def penalty(merge: Merge) -> Callable[..., torch.Tensor]:
    return lambda *x: sum(g.square().sum() for g in func.grad(loss_of(merge), EVERY)(*x))


def loss_of_tangent(merge: Merge) -> Callable[..., torch.Tensor]:
    def loss(*x: torch.Tensor) -> torch.Tensor:
        (out, lse), (tout, tlse) = func.jvp(merge, x, MOVED)
        return (out * tout).sum() + (lse * tlse.square()).sum()

    return loss


def forward_over_reverse(merge: Merge) -> Any:
    """Without transforms."""
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x.clone().requires_grad_(), t) for x, t in zip(PARTS, MOVED, strict=True)]
        gradients = torch.autograd.grad(loss_of(merge)(*duals), duals)
        return tuple(forward_ad.unpack_dual(x).tangent for x in gradients)


def reverse_over_forward(merge: Merge) -> Any:
    leaves = [x.clone().requires_grad_() for x in PARTS]
    with forward_ad.dual_level():
        out, lse = merge(*(forward_ad.make_dual(x, t) for x, t in zip(leaves, MOVED, strict=True)))
        tangents = [forward_ad.unpack_dual(x).tangent for x in (out, lse)]
        return torch.autograd.grad(tangents[0].square().sum() + tangents[1].square().sum(), leaves)


def double_backward(merge: Merge) -> Any:
    leaves = [x.clone().requires_grad_() for x in PARTS]
    first = torch.autograd.grad(loss_of(merge)(*leaves), leaves, create_graph=True)
    return torch.autograd.grad(sum(x.square().sum() for x in first), leaves)


DERIVATIVES: dict[str, Callable[[Merge], Any]] = {
    "jvp": lambda m: func.jvp(m, PARTS, MOVED),
    "jacfwd": lambda m: func.jacfwd(m, (0, 4))(*PARTS),
    "jacrev": lambda m: func.jacrev(m, (1, 3))(*PARTS),
    "hessian": lambda m: func.hessian(loss_of(m), (0, 4))(*PARTS),
    "jacfwd of jacfwd": lambda m: func.jacfwd(func.jacfwd(loss_of(m), (1, 5)), (1, 5))(*PARTS),
    "grad of grad": lambda m: func.grad(penalty(m), EVERY)(*PARTS),
    "grad of jvp": lambda m: func.grad(loss_of_tangent(m), EVERY)(*PARTS),
    "vmap of jvp": lambda m: func.vmap(lambda t: func.jvp(lambda x: m(x, *PARTS[1:]), PARTS[:1], (t,)))(
        torch.stack([PARTS[0], -PARTS[1]])
    ),
    "forward over reverse": forward_over_reverse,
    "reverse over forward": reverse_over_forward,
    "double backward": double_backward,
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives(name: str) -> None:
    torch.testing.assert_close(DERIVATIVES[name](own), DERIVATIVES[name](definition), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("layout", OUTS)
def test_layouts(layout: str) -> None:
    x = parts(layout)
    t = tuple(y.sin() for y in x)
    got, wanted = (func.jvp(lambda *y, m=m: m(*y, layout=layout), x, t) for m in (own, definition))
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


def test_empty_parts_have_no_tangent_whatever_they_hold() -> None:
    out, _, _, lse, *_ = parts()
    garbage, nothing = torch.full_like(out, torch.nan), torch.full_like(lse, -torch.inf)
    tangents = (out.cos(), garbage, lse.cos(), garbage[..., 0].mT.contiguous())
    merge = lambda *x: libflash.torch.merge(x[:2], x[2:])  # noqa: E731
    _, (tout, tlse) = func.jvp(merge, (out, garbage, lse, nothing), tangents)
    torch.testing.assert_close((tout, tlse), (tangents[0], tangents[2]))
    _, (tout, tlse) = func.jvp(merge, (garbage, garbage, nothing, nothing), (garbage, garbage, nothing * 0, nothing * 0))
    assert not tout.any()
    assert not tlse.any()


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_broken_lse_reaches_the_results_and_the_derivatives(broken: float) -> None:
    out, other, _, lse, *_ = parts()
    merge = lambda *x: libflash.torch.merge(x[:2], x[2:])  # noqa: E731
    for second in (lse, torch.full_like(lse, -torch.inf)):
        x = (out, other, torch.full_like(lse, broken), second)
        results, tangents = func.jvp(merge, x, (*x[:2], lse, lse))
        gradients = func.grad(lambda *y: sum(z.sum() for z in merge(*y)), (0, 2))(*x)
        assert all(y.isnan().all() for y in (*merge(*x), *results, *tangents, *gradients))


@pytest.mark.parametrize("given", [torch.ones(2, 3, 4, 8), None, iter(())], ids=("tensor", "None", "iterator"))
def test_containers_are_lists_or_tuples(given: Any) -> None:
    """A tensor in their place would be merged along its first dimension, the batch."""
    with pytest.raises(TypeError, match="outs must be a list or tuple of arrays, not "):
        libflash.torch.merge(given, [torch.ones(2, 4, 3)])
    with pytest.raises(TypeError, match="lses must be a list or tuple of arrays, not "):
        libflash.torch.merge([torch.ones(2, 3, 4, 8)], given)
