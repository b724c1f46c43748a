"""Derivatives through flash_attn_varlen_func with pages: those of the same keys in packed tensors, or refused. Where a derivative
is asked for, the pages are gathered: the operator that reads them in place has none, and must not be chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import libflash
from libflash import flash_attn

torch = pytest.importorskip("torch")

from torch.autograd import forward_ad  # noqa: E402
from torch_problem import tensors  # noqa: E402

func = torch.func
Function = Callable[..., Any]

pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler's own

Q, K, V = tensors((7, 4, 16), (5, 4, 2, 16), (5, 4, 2, 16), dtype=torch.float64, grad=False)
QS, KS = torch.stack([Q, 2 * Q]), torch.stack([K, K / 2])
TQ, TK, TV, TQS = (x.cos() for x in (Q, K, V, QS))
TABLE = torch.tensor([[3, 1, 99], [0, -7, 2]], dtype=torch.int32)  # entries after the last page may hold anything
LENGTHS = [torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 7], [0, 6, 9])]


def paged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor = TABLE, **options: Any) -> Any:
    return flash_attn.flash_attn_varlen_func(q, k, v, *LENGTHS, 4, 6, causal=True, block_table=table, **options)


def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
    rows = (torch.cat([x[3], x[1][:2], x[0][:3]]) for x in (k, v))
    return flash_attn.flash_attn_varlen_func(q, *rows, *LENGTHS, 4, 6, causal=True, **options)


def dual_level(f: Function, *moved: int) -> Any:
    with forward_ad.dual_level():
        given = [forward_ad.make_dual(x, t) if i in moved else x for i, (x, t) in enumerate(((Q, TQ), (K, TK), (V, TV)))]
        return tuple(forward_ad.unpack_dual(f(*given)))


def outside_of_vmap(f: Function) -> Any:
    leaf = QS.clone().requires_grad_()
    return torch.autograd.grad(func.vmap(lambda q: f(q, K, V))(leaf).sin().sum(), leaf)[0]


@torch.no_grad()
def jvp_without_gradients(f: Function) -> Any:
    return func.jvp(f, (Q, K, V), (TQ, TK, TV))


DERIVATIVES: dict[str, Function] = {
    "jvp": lambda f: func.jvp(f, (Q, K, V), (TQ, TK, TV)),
    "jvp under no_grad": jvp_without_gradients,
    "dual q": lambda f: dual_level(f, 0),
    "dual k": lambda f: dual_level(f, 1),
    "dual q, k, v": lambda f: dual_level(f, 0, 1, 2),
    "jacfwd": lambda f: func.jacfwd(lambda v: f(Q, K, v))(V),
    "jvp of grad": lambda f: func.jvp(func.grad(lambda q: f(q, K, V).sin().sum()), (Q,), (TQ,)),
    "grad of jvp": lambda f: func.grad(lambda q: func.jvp(lambda k: f(q, k, V), (K,), (TK,))[1].sin().sum())(Q),
    "jvp of vmap": lambda f: func.jvp(func.vmap(lambda q: f(q, K, V)), (QS,), (TQS,)),
    "vmap of jvp": lambda f: func.vmap(lambda q, t: func.jvp(lambda q: f(q, K, V), (q,), (t,)))(QS, TQS),
    "grad of vmap": lambda f: func.grad(lambda q: func.vmap(lambda q: f(q, K, V))(q).sin().sum())(QS),
    "grad of vmap, pages": lambda f: func.grad(lambda k: func.vmap(lambda k: f(Q, k, V))(k).sin().sum())(KS),
    "vmap of grad": lambda f: func.vmap(func.grad(lambda q: f(q, K, V).sin().sum()))(QS),
    "autograd of vmap": outside_of_vmap,
    "sink": lambda f: func.jvp(lambda s: f(Q, K, V, learnable_sink=s), (TQ[0, :, 0],), (TQ[1, :, 0],)),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives(name: str) -> None:
    wanted = DERIVATIVES[name](packed)
    assert all(x.abs().max() > 0.01 for x in torch.utils._pytree.tree_leaves(wanted))
    torch.testing.assert_close(DERIVATIVES[name](paged), wanted, rtol=1e-9, atol=1e-9)


COMPILED: dict[str, tuple[Function, tuple[torch.Tensor, ...]]] = {
    "jvp": (lambda q, t: func.jvp(lambda q: paged(q, K, V), (q,), (t,)), (Q, TQ)),
    "grad of vmap": (func.grad(lambda q: func.vmap(lambda q: paged(q, K, V))(q).sin().sum()), (QS,)),
    "grad of vmap over another": (func.grad(lambda k: func.vmap(lambda q: paged(q, k, V))(QS).sin().sum()), (K,)),
    "vmap of grad": (func.vmap(func.grad(lambda q: paged(q, K, V).sin().sum())), (QS,)),
}


@pytest.mark.parametrize("name", COMPILED)
def test_derivatives_inside_a_compiled_function(name: str) -> None:
    function, given = COMPILED[name]
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(function, backend="aot_eager")(*given), function(*given))


def test_a_compiled_vmap_records_gradients() -> None:
    torch._dynamo.reset()
    leaf = QS.clone().requires_grad_()
    out = torch.compile(func.vmap(lambda q: paged(q, K, V)), backend="aot_eager")(leaf)
    torch.testing.assert_close(torch.autograd.grad(out.sin().sum(), leaf)[0], outside_of_vmap(packed))


def test_a_compiled_function_of_duals() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(paged, backend="aot_eager")
    torch.testing.assert_close(compiled(Q, K, V), packed(Q, K, V))  # this graph reads the pages in place
    torch.testing.assert_close(dual_level(compiled, 0), dual_level(packed, 0))


@pytest.mark.parametrize("name", ["softmax_scale", "softcap", "alibi_slopes"])
@pytest.mark.parametrize("function", [paged, packed])
def test_options_without_a_gradient_are_refused(function: Function, name: str) -> None:
    """No gradient is silently dropped, although nothing else requires one."""
    option = (torch.tensor(0.5) if name != "alibi_slopes" else torch.linspace(0.1, 1, 4)).requires_grad_()
    given = [x.float() for x in (Q, K, V)]
    with pytest.raises(libflash.UnsupportedError, match=f"{name} requires a gradient, and there is none for it"):
        function(*given, **{name: option})
    with torch.no_grad():
        function(*given, **{name: option})


def test_scales_of_pages_have_no_tangents() -> None:
    scale = torch.ones(2, 2)
    with pytest.raises(libflash.UnsupportedError, match=r"k_descale and v_descale need pages .* without gradients, tangents"):
        func.jvp(lambda q: paged(q, K.float(), V.float(), k_descale=scale, v_descale=scale), (Q.float(),), (TQ.float(),))


def test_no_pages() -> None:
    """Sequences without keys: zeros, with gradients too."""
    empty, nothing = K[:0].clone().requires_grad_(), torch.zeros(3, dtype=torch.int32)
    for leaf in (Q, Q.clone().requires_grad_()):
        out = flash_attn.flash_attn_varlen_func(leaf, empty, empty, LENGTHS[0], nothing, 4, 6, block_table=TABLE)
        assert torch.count_nonzero(out) == 0
    assert torch.autograd.grad(out.sum(), (leaf, empty))[1].shape == empty.shape


class Paged(torch.nn.Module):
    def forward(self, q: torch.Tensor, table: torch.Tensor, cu_q: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
        return flash_attn.flash_attn_varlen_func(q, K, V, cu_q, None, None, None, block_table=table, seqused_k=used, causal=True)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_exports_for_batches_of_any_size(strict: bool, grad: bool) -> None:
    dynamic = torch.export.Dim.AUTO
    dims = ({0: dynamic}, {0: dynamic, 1: dynamic}, {0: dynamic}, {0: dynamic})
    traced = (Q.clone().requires_grad_(grad), TABLE, LENGTHS[0], torch.tensor([6, 3], dtype=torch.int32))
    table, *lengths = (torch.tensor(x, dtype=torch.int32) for x in ([[2, 0], [1, 4], [4, 3]], [0, 2, 3, 6], [8, 5, 2]))
    other = (Q[:6].clone().requires_grad_(grad), table, *lengths)
    program = torch.export.export(Paged(), traced, dynamic_shapes=dims, strict=strict).module()
    for given in (traced, other):
        got, wanted = program(*given), Paged()(*given)
        torch.testing.assert_close(got, wanted)
        if grad:
            torch.testing.assert_close(*(torch.autograd.grad(out.sin().sum(), given[0])[0] for out in (got, wanted)))


# -- pages that do not exist, where they are gathered on the CPU

ABSENT = torch.tensor([[3, 77], [0, 2]], dtype=torch.int32)
PRESENT = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)


def profiled(f: Function) -> Any:
    with torch.profiler.profile():
        return f(Q.clone().requires_grad_())


KNOWN: dict[str, Function] = {
    "autograd": lambda f: f(Q.clone().requires_grad_()),
    "grad": lambda f: func.grad(lambda q: f(q).sum())(Q),
    "jvp": lambda f: func.jvp(f, (Q,), (TQ,)),
    "vmap of grad": lambda f: func.vmap(func.grad(lambda q: f(q).sum()))(QS),
    "profiler": profiled,
}


@pytest.mark.parametrize("name", KNOWN)
def test_absent_pages_are_refused(name: str) -> None:
    with pytest.raises(libflash.InvalidError, match=r"block_table: a page must .* \(entry \(0, 1\) is 77 of 5\)"):
        KNOWN[name](lambda q: paged(q, K, V, ABSENT))
    KNOWN[name](lambda q: paged(q, K, V, PRESENT))


def test_absent_pages_are_refused_when_a_program_runs() -> None:
    """Where the host cannot read the table before, an absent page makes the length of its sequence invalid. (An earlier version
    read another page in its place.)"""
    torch._dynamo.reset()
    leaf = Q.clone().requires_grad_()
    compiled = torch.compile(lambda table: paged(leaf, K, V, table), backend="aot_eager")
    torch.testing.assert_close(compiled(PRESENT), packed(Q, K, V))
    mapped = func.vmap(lambda table: paged(leaf, K, V, table))
    torch.testing.assert_close(mapped(torch.stack([PRESENT, PRESENT]))[1], packed(Q, K, V))
    for run in (lambda: compiled(ABSENT), lambda: mapped(torch.stack([PRESENT, ABSENT]))):
        with pytest.raises(libflash.InvalidError, match=r"seqused_k: must be at least 0 .* \(entry 0 is -1 of 8\)"):
            run()
