"""libflash.torch in forward mode and differentiated twice, against PyTorch's own operators, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import libflash

torch = pytest.importorskip("torch")

import libflash.torch  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_calls import Calls  # noqa: E402
from torch_problem import eager, tensors  # noqa: E402

A = libflash.torch.attention
func = torch.func
Attention = Callable[..., Any]

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of PyTorch at its first dual level
    pytest.mark.filterwarnings("ignore:.*performance drop.*"),  # of PyTorch about vmap
]


def small() -> list[torch.Tensor]:
    return tensors((2, 3, 4, 4), (2, 5, 2, 4), (2, 5, 2, 3), dtype=torch.float64, grad=False)


Q, K, V = small()
TQ, TK, TV = (torch.randn_like(x) for x in (Q, K, V))
EVERY = (0, 1, 2)
SCALAR = torch.tensor(0.5, dtype=torch.float64)  # a bias without dimensions


def both(attention: Attention, *x: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse), by libflash or by PyTorch's own operators."""
    return A(*x, return_lse=True, **options) if attention is A else attention(*x, **options)


def loss_of(attention: Attention) -> Callable[..., torch.Tensor]:
    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, lse = both(attention, q, k, v, causal=True)
        return out.square().sum() + lse.sin().sum()

    return loss


def grad_of_grad(a: Attention) -> Any:
    first = func.grad(loss_of(a), EVERY)
    return func.grad(lambda *x: sum(g.square().sum() for g in first(*x)), EVERY)(Q, K, V)


def dual_level(a: Attention) -> Any:
    with forward_ad.dual_level():
        out, lse = both(a, forward_ad.make_dual(Q, TQ), K, forward_ad.make_dual(V, TV), causal=True)
        return forward_ad.unpack_dual(out).tangent, forward_ad.unpack_dual(lse).tangent


def forward_over_reverse(a: Attention) -> Any:
    """Without transforms: the tangent of a gradient must not get lost."""
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(Q.clone().requires_grad_(), TQ)
        (gradient,) = torch.autograd.grad(loss_of(a)(dual, K, V), dual)
        return forward_ad.unpack_dual(gradient).tangent


def leaves() -> list[torch.Tensor]:
    return [x.clone().requires_grad_() for x in (Q, K, V)]


def gradient_penalty(a: Attention) -> Any:
    own = leaves()
    first = torch.autograd.grad(loss_of(a)(*own), own, create_graph=True)
    return torch.autograd.grad(sum(x.square().sum() for x in first), own)


def penalty_under_checkpoint(a: Attention) -> Any:
    own = leaves()
    first = torch.autograd.grad(checkpoint(loss_of(a), *own, use_reentrant=False), own, create_graph=True)
    return torch.autograd.grad(sum(x.square().sum() for x in first), own)


def weighted_sum(a: Attention) -> Callable[..., torch.Tensor]:
    """A loss linear in the results: the tangent of a constant factor is a tensor that PyTorch knows to be zero."""
    weights = torch.linspace(-1, 2, 2 * 3 * 4 * 3, dtype=torch.float64).reshape(2, 3, 4, 3)

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, lse = both(a, q, k, v, causal=True)
        return (weights * out).sum() + (weights[..., 0].transpose(1, 2) * lse).sum()

    return loss


def mean_flow(a: Attention, stop: bool) -> Any:
    """A loss of an output and its tangent, and the gradients of parameters outside of the transform."""
    weight = torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(4, 4).requires_grad_()

    def network(z: torch.Tensor) -> torch.Tensor:
        return both(a, z @ weight, (z @ weight.T)[:, :, :2], z[:, :, 2:])[0]

    u, du = func.jvp(network, (Q,), (TQ,))
    return torch.autograd.grad((u - (du.detach() if stop else du)).square().sum(), weight)


DERIVATIVES: dict[str, Callable[[Attention], Any]] = {
    "jvp": lambda a: func.jvp(loss_of(a), (Q, K, V), (TQ, TK, TV)),
    "jvp-k": lambda a: func.jvp(lambda k: both(a, Q, k, V), (K,), (TK,)),
    "jvp-v": lambda a: func.jvp(lambda v: both(a, Q, K, v), (V,), (TV,)),
    "jvp-scalar-bias": lambda a: func.jvp(lambda bias: both(a, Q, K, V, bias=bias), (SCALAR,), (SCALAR,)),
    "hessian-scalar-bias": lambda a: func.hessian(lambda bias: both(a, Q, K, V, bias=bias)[1].sin().sum())(SCALAR),
    "jacfwd": lambda a: func.jacfwd(loss_of(a), EVERY)(Q, K, V),
    "linearize": lambda a: func.linearize(loss_of(a), Q, K, V)[1](TQ, TK, TV),
    "grad-grad": grad_of_grad,
    "jvp-grad": lambda a: func.jvp(func.grad(loss_of(a), EVERY), (Q, K, V), (TQ, TK, TV)),
    "grad-jvp": lambda a: func.grad(lambda *x: func.jvp(loss_of(a), x, (TQ, TK, TV))[1].square(), EVERY)(Q, K, V),
    "grad-jvp-weighted": lambda a: func.grad(lambda *x: func.jvp(weighted_sum(a), x, (TQ, TK, TV))[1], EVERY)(Q, K, V),
    "grad-tangent": lambda a: func.grad(lambda *t: func.jvp(loss_of(a), (Q, K, V), t)[1].square(), EVERY)(TQ, TK, TV),
    "hessian": lambda a: func.hessian(loss_of(a), EVERY)(Q, K, V),
    "jacrev-jacrev": lambda a: func.jacrev(func.jacrev(loss_of(a)))(Q, K, V),
    "jacrev-jacfwd": lambda a: func.jacrev(func.jacfwd(loss_of(a)))(Q, K, V),
    "vmap-jvp": lambda a: func.vmap(lambda t: func.jvp(lambda q: both(a, q, K, V), (Q,), (t,))[1])(torch.stack([TQ, -TQ])),
    "vmap-hessian": lambda a: func.vmap(func.hessian(lambda q: loss_of(a)(q, K[:1], V[:1])))(Q[:, None]),
    "dual-level": dual_level,
    "forward-over-reverse": forward_over_reverse,
    "penalty": gradient_penalty,
    "checkpoint": penalty_under_checkpoint,
    "mean-flow": lambda a: mean_flow(a, True),
    "mean-flow-second": lambda a: mean_flow(a, False),
}


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # of linearize
@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivative(name: str) -> None:
    got, wanted = DERIVATIVES[name](A), DERIVATIVES[name](eager)
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


def test_gradient_of_a_tangent_without_transforms() -> None:
    """Outside of its dual level, too, where the gradient of out is a tensor that PyTorch knows to be zero."""
    wanted = func.grad(lambda q: func.jvp(lambda y: weighted_sum(eager)(y, K, V), (q,), (TQ,))[1])(Q)
    q = Q.clone().requires_grad_()
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(weighted_sum(A)(forward_ad.make_dual(q, TQ), K, V)).tangent
        inside = torch.autograd.grad(tangent, q, retain_graph=True)
    for (got,) in (inside, torch.autograd.grad(tangent, q)):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


ALONE = ["attention_with_tangent"]
CALLS: dict[str, list[str]] = {
    "jvp": ALONE,
    "jvp-v": ALONE,
    "dual-level": ALONE,
    "vmap-jvp": ["attention", *["attention_tangent"] * 2],  # many tangents: out once
    "jvp-grad": ["attention_with_tangent", "attention_backward", "attention_backward_tangent"],
    "grad-jvp": ["attention_with_tangent", "attention_backward_tangent"],
    "mean-flow": ["attention_with_tangent", "attention_backward"],
    "mean-flow-second": ["attention_with_tangent", "attention_backward", "attention_backward_tangent"],
    "forward-over-reverse": ["attention", "attention_tangent", "attention_backward", "attention_backward_tangent"],
}


@pytest.mark.parametrize("name", CALLS)
def test_which_operators_run(name: str) -> None:
    """Forward mode is one operator, whether an outer level records a gradient or not; if its own level does, nothing is fused."""
    with Calls() as seen:
        DERIVATIVES[name](A)
    assert sorted(seen.names) == sorted(CALLS[name])


def test_forward_mode_is_that_of_the_parts() -> None:
    """Packed rows of no sequence, a kernel by name, inputs that are constants, and a refused one."""
    q, k, v, tq = tensors((9, 4, 8), (12, 2, 8), (12, 2, 5), (9, 4, 8), dtype=torch.float64, grad=False)
    options: dict[str, Any] = {"cu_seqlens_q": torch.tensor([0, 3, 8], dtype=torch.int32)}
    options["cu_seqlens_k"] = torch.tensor([0, 4, 12], dtype=torch.int32)
    (out, lse), (tout, tlse) = func.jvp(lambda q: A(q, k, v, return_lse=True, **options), (q,), (tq,))
    assert (out[8] == 0).all() and (lse[:, 8] == -torch.inf).all()  # noqa: PT018
    assert (tout[8] == 0).all() and (tlse[:, 8] == 0).all()  # noqa: PT018
    wanted = A(q, k, v, return_lse=True, **options)
    torch.testing.assert_close((out, lse), wanted)
    parts = torch.ops.libflash.attention_tangent(q, k, v, *wanted, tq=tq, **options)
    torch.testing.assert_close((tout, tlse), parts)
    with Calls() as seen:
        named = func.jvp(lambda q: A(q, k, v, kernel="forward_cpu_scalar", **options), (q,), (tq,))
    assert seen.names == ["attention", "attention_tangent"]
    torch.testing.assert_close(named, (out, tout))
    slopes = torch.ones(4)
    with pytest.raises(libflash.UnsupportedError, match="alibi_slopes carries a tangent"):
        func.jvp(lambda s: A(Q, K, V, alibi_slopes=s), (slopes,), (slopes,))
    with torch.no_grad():
        torch.testing.assert_close(func.jvp(lambda q: A(q, k, v, **options), (q.requires_grad_(),), (tq,)), (out, tout))


CU_Q, CU_K = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 3, 8], [0, 4, 6, 12]))
CHECKED: dict[str, tuple[list[tuple[int, ...]], Callable[..., Any]]] = {
    "plain": ([], {}),
    "causal": ([], {"causal": True, "window_size": (3, 1), "softcap": 2.0, "softmax_scale": -0.3}),
    "dropout": ([], {"dropout_p": 0.3, "seed": 5}),
    "lengths": ([], {"seqused_q": torch.tensor([3, 2], dtype=torch.int32), "seqused_k": torch.tensor([2, 5], dtype=torch.int32)}),
    "mask": ([], {"mask": torch.tensor([[True, False, True, True, False]] * 2 + [[False] * 5])}),
    "bias": (["bias", "learnable_sink"], {"softcap": 1.5, "causal": True}),
}


@pytest.mark.filterwarnings("ignore")  # of PyTorch about vmap and complex inputs
@pytest.mark.parametrize("name", CHECKED)
def test_gradcheck(name: str) -> None:
    names, options = CHECKED[name]
    shapes = {"bias": (4, 1, 5), "learnable_sink": (4,)}
    given = [*leaves(), *tensors(*(shapes[x] for x in names), dtype=torch.float64)]

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: torch.Tensor) -> Any:
        out, lse = A(q, k, v, return_lse=True, **options, **dict(zip(names, more, strict=True)))
        return out, torch.where(lse > -torch.inf, lse, 0)

    assert torch.autograd.gradcheck(run, given, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True)
    assert torch.autograd.gradgradcheck(run, given, check_fwd_over_rev=True, check_rev_over_rev=True)


@pytest.mark.filterwarnings("ignore")
def test_gradcheck_packed() -> None:
    """Rows that belong to no sequence have derivatives 0."""
    given = tensors((9, 4, 4), (13, 2, 4), (13, 2, 3), dtype=torch.float64)

    def run(*x: torch.Tensor) -> torch.Tensor:
        return A(*x, cu_seqlens_q=CU_Q, cu_seqlens_k=CU_K, causal=True)

    assert torch.autograd.gradcheck(run, given, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, given, check_fwd_over_rev=True)


@pytest.mark.parametrize("call", [A, libflash.attention, lambda *x: torch.ops.libflash.attention(*x)[0]])
def test_every_entry_is_differentiable_twice(call: Attention) -> None:
    own = leaves()
    first = torch.autograd.grad(call(*own).square().sum(), own, create_graph=True)
    got = torch.autograd.grad(first[0].square().sum(), own)
    other = leaves()
    first = torch.autograd.grad(eager(*other)[0].square().sum(), other, create_graph=True)
    torch.testing.assert_close(got, torch.autograd.grad(first[0].square().sum(), other), rtol=1e-9, atol=1e-9)
    with forward_ad.dual_level():
        out = call(Q, forward_ad.make_dual(K, TK), V)
        wanted = eager(Q, forward_ad.make_dual(K, TK), V)[0]
        tangents = [forward_ad.unpack_dual(x).tangent for x in (out, wanted)]
    torch.testing.assert_close(*tangents, rtol=1e-9, atol=1e-9)


REFUSED = {
    "jvp(jvp)": (
        lambda f: func.jvp(lambda q: func.jvp(f, (q,), (TQ,))[1], (Q,), (TQ,)),
        "forward-mode derivative of",
    ),
    "jacfwd(jacfwd)": (lambda f: func.jacfwd(func.jacfwd(f))(Q), "forward-mode derivative of"),
    "jvp(grad(grad))": (
        lambda f: func.jvp(func.grad(lambda q: func.grad(f)(q).square().sum()), (Q,), (TQ,)),
        "no third derivative",
    ),
    "third": (
        lambda f: func.grad(lambda q: func.grad(lambda q: func.grad(f)(q).square().sum())(q).square().sum())(Q),
        "no third derivative",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_derivative_is_refused(name: str) -> None:
    transform, text = REFUSED[name]
    with pytest.raises(libflash.UnsupportedError, match=text):
        transform(lambda q: loss_of(A)(q, K, V))


EXPLICIT = {
    "plain": {},
    "causal": {"causal": True, "softmax_scale": 0.4, "softcap": 2.0},
    "dropout": {"dropout_p": 0.3, "seed": 5, "offset": 2, "window_size": (2, 1)},
}


@pytest.mark.parametrize("name", EXPLICIT)
def test_attention_tangent_is_differentiable(name: str) -> None:
    """With the same gradients as torch.func.jvp of attention, with out and lse given or not."""
    options = EXPLICIT[name]

    def loss(tout: Any, tlse: Any) -> Any:
        return tout.sin().sum() + tlse.square().sum()

    def of_jvp(*x: Any) -> Any:
        return loss(*func.jvp(lambda *y: A(*y, return_lse=True, **options), x[:3], x[3:])[1])

    x = [y.clone().requires_grad_() for y in (Q, K, V, TQ, TK, TV)]
    wanted = torch.autograd.grad(of_jvp(*x), x)
    given = A(*x[:3], return_lse=True, **options)
    for made in (
        libflash.attention_tangent(*x, **options),
        libflash.attention_tangent(*x, out=given[0], lse=given[1], **options),
    ):
        torch.testing.assert_close(made[:2], given)
        torch.testing.assert_close(torch.autograd.grad(loss(*made[2:]), x, retain_graph=True), wanted, rtol=1e-9, atol=1e-9)
    one = libflash.attention_tangent(Q, K, V, TQ, **options)[2]
    made = func.vmap(lambda t: libflash.attention_tangent(Q, K, V, t, **options)[2])(torch.stack([TQ, 2 * TQ]))
    torch.testing.assert_close(made, torch.stack([one, 2 * one]), rtol=1e-9, atol=1e-9)
    x[0] = Q  # under no_grad and without gradients: the same numbers, and no graph
    with torch.no_grad():
        assert libflash.attention_tangent(*x, **options)[2].grad_fn is None


@pytest.mark.parametrize("name", EXPLICIT)
def test_attention_backward_is_differentiable(name: str) -> None:
    options = EXPLICIT[name]
    x = leaves()
    out, lse = A(*x, return_lse=True, **options)
    dout, dlse = (torch.cos(y.detach()).requires_grad_() for y in (out, lse))
    wanted = torch.autograd.grad((out, lse), x, (dout, dlse), create_graph=True)
    got = libflash.attention_backward(dout, *x, out, lse, dlse=dlse, **options)
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
    second = [torch.autograd.grad(sum(y.sin().sum() for y in g), (dout, dlse, *x), retain_graph=True) for g in (got, wanted)]
    torch.testing.assert_close(*second, rtol=1e-9, atol=1e-9)
    inputs = (Q, K, V, out.detach(), lse.detach())
    batch = torch.stack([out.detach(), 2 * out.detach()])
    made = func.vmap(lambda g: libflash.attention_backward(g, *inputs, **options)[0])(batch)
    torch.testing.assert_close(made[1], 2 * made[0], rtol=1e-9, atol=1e-9)
    with forward_ad.dual_level():  # linear in dout
        dual = forward_ad.make_dual(batch[0], batch[1])
        primal, tangent = forward_ad.unpack_dual(libflash.attention_backward(dual, *inputs, **options)[0])
    torch.testing.assert_close((primal, tangent), (made[0], made[1]), rtol=1e-9, atol=1e-9)
    assert libflash.attention_backward(out.detach(), *x, *inputs[3:], **options)[0].grad_fn is None  # the gradients of leaves


def test_attention_backward_tangent_is_differentiable() -> None:
    """With respect to the direction, in which it is linear. With respect to other inputs it would be a third derivative."""
    out, lse = A(Q, K, V, return_lse=True)
    direction = [y.clone().requires_grad_() for y in (TQ, TK, TV)]
    along = [y.detach() for y in direction]
    sides = [torch.cos(y) for y in (Q, K, V)]

    def run(*t: Any) -> Any:
        _, _, tout, tlse = libflash.attention_tangent(Q, K, V, *t, out=out, lse=lse)
        return libflash.attention_backward_tangent(out, Q, K, V, out, lse, tout, tlse, *t)

    got = torch.autograd.grad(run(*direction), direction, sides)
    for n, side in enumerate(run(*sides)):  # the Hessian is symmetric
        torch.testing.assert_close(got[n], side, rtol=1e-9, atol=1e-9)
    made = run(*along)
    assert made[0].grad_fn is None
    x = leaves()
    _, _, tout, tlse = libflash.attention_tangent(*x, *along)
    third = libflash.attention_backward_tangent(out, *x, out, lse, tout, tlse, *along)[0]
    with pytest.raises(libflash.UnsupportedError, match="no third derivative"):
        torch.autograd.grad(third.sum(), x)


def test_what_the_explicit_functions_refuse() -> None:
    out, lse = A(Q, K, V, return_lse=True)
    moving = out.clone().requires_grad_()

    def refused(text: str, call: Callable[[], Any]) -> None:
        with pytest.raises(libflash.UnsupportedError, match=text):
            call()

    gradients = {name: torch.empty_like(x) for name, x in (("dq", Q), ("dk", K), ("dv", V))}
    refused("cannot be given dq where", lambda: libflash.attention_backward(moving, Q, K, V, out, lse, **gradients))
    refused("cannot be given delta where", lambda: libflash.attention_backward(moving, Q, K, V, out, lse, delta=lse.clone()))
    refused("row_begin cannot be given", lambda: libflash.attention_backward(moving, Q, K, V, out, lse, row_begin=1))
    slopes = torch.ones(4, dtype=torch.float64, requires_grad=True)
    refused("alibi_slopes requires a gradient", lambda: libflash.attention_tangent(Q, K, V, TQ, alibi_slopes=slopes))
    with forward_ad.dual_level():
        refused("forward-mode derivative of", lambda: libflash.attention_tangent(forward_ad.make_dual(Q, TQ), K, V, TQ))


def test_hessian_vector_products_of_pytorch() -> None:
    """torch.autograd.functional.hvp differentiates a second derivative with respect to its direction."""
    (bias,) = tensors((2, 4, 3, 5), dtype=torch.float64, grad=False)
    x = (Q, K, V, bias)
    direction = tuple(map(torch.cos, x))

    def loss(attention: Attention) -> Callable[..., torch.Tensor]:
        def run(q: Any, k: Any, v: Any, bias: Any) -> torch.Tensor:
            out, lse = both(attention, q, k, v, bias=bias, causal=True)
            return out.sin().sum() + lse.sin().sum()

        return run

    for product in (torch.autograd.functional.hvp, torch.autograd.functional.vhp):
        got, wanted = (product(loss(attention), x, direction) for attention in (A, eager))
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["softmax_scale", "softcap"])
@pytest.mark.parametrize("call", [A, libflash.attention])
def test_numbers_have_no_derivative(call: Attention, name: str) -> None:
    """A parameter given as a number is refused: its gradient would be lost without a word."""
    number = torch.nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
    for q in (Q, Q.clone().requires_grad_()):
        with pytest.raises(libflash.UnsupportedError, match=f"{name} requires a gradient"):
            call(q, K, V, **{name: number})
        wanted = call(q, K, V, **{name: 0.3}).detach()
        assert torch.equal(call(q, K, V, **{name: number.detach()}).detach(), wanted)
        with torch.no_grad():
            assert torch.equal(call(q, K, V, **{name: number}), wanted)
    for transform in (func.grad, func.jacfwd):
        with pytest.raises(libflash.UnsupportedError, match=f"{name} requires a gradient"):
            transform(lambda x: call(Q, K, V, **{name: x}).sum())(number.detach())
        transform(lambda q: call(q, K, V, **{name: number.detach()}).sum())(Q)
