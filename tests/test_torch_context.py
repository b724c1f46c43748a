"""context_parallel_attention on gloo processes: equal to one device for every scheme, order and option."""

from __future__ import annotations

import itertools
import pathlib
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)

import context_ranks  # noqa: E402
import libflash.torch as adapter  # noqa: E402
from context_ranks import Problem, gradients, run_ranks  # noqa: E402
from libflash._context_layout import Layout, join_shards, take_shard, tokens_of  # noqa: E402
from test_scalar import assert_agree  # noqa: E402

import libflash  # noqa: E402

CAUSAL = ("causal", True)
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal-lse": {"options": (CAUSAL,), "dlse": True},
    "window-alibi": {"options": (("window_size", (7, 3)),), "alibi": True},
    "causal-window-sink": {"options": (CAUSAL, ("window_size", (12, -1))), "sink": True, "dlse": True},
    "softcap-scale-sink": {"options": (CAUSAL, ("softcap", 3.0), ("softmax_scale", 0.7)), "sink": True},
    "dropout": {"options": (CAUSAL, ("dropout_p", 0.25), ("seed", 2**40 + 3), ("offset", 5)), "dlse": True},
    "mask-of-dropout": {
        "options": (("dropout_p", 0.5), ("seed", 11)), "one_hot_values": True, "shape": (2, 16, 4, 2, 8, 16),
    },
    "documents": {"options": (CAUSAL,), "documents": (1, 21, 0, 19, 7), "dlse": True, "sink": True},
    "documents-dropout": {"options": (("dropout_p", 0.5), ("seed", 4), ("window_size", (5, 5))), "documents": (30, 2, 16)},
    "multi-query": {"options": (CAUSAL,), "shape": (1, 32, 4, 1, 8, 8)},
}  # fmt: skip
PLACES = {
    2: [("ring", "zigzag"), ("ring", "contiguous"), ("all_gather", "zigzag"), ("heads", "contiguous"), ("auto", "zigzag")],
    4: [("ring", "zigzag"), ("ring", "contiguous"), ("heads", "zigzag"), ("heads_ring", "zigzag"), ("all_gather", "contiguous")],
}


def problems(ranks: int) -> list[Problem]:
    made = []
    for (scheme, order), (name, more) in itertools.product(PLACES[ranks], OPTIONS.items()):
        mesh = (2, 2) if scheme == "heads_ring" else None
        made.append(Problem(f"{ranks}-{scheme}-{order}-{name}", scheme, order, mesh, **more))
    if ranks == 4:  # windows that end at a shard's edge, and one token beyond; rows whose keys are two shards away
        for left in (12, 13, 25):
            window = (("window_size", (left, 0)),)
            made.append(Problem(f"halo-{left}", "halo", "contiguous", options=window, alibi=True, sink=True))
    return made


ALL = {ranks: problems(ranks) for ranks in PLACES}
CASES = [pytest.param(ranks, n, id=str(problem)) for ranks, made in ALL.items() for n, problem in enumerate(made)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """The results of all problems, from one group of processes for each number of ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    return {ranks: run_ranks(ranks, folder / str(ranks), context_ranks.problems_job, made) for ranks, made in ALL.items()}


def one_device(problem: Problem) -> dict[str, Any]:
    cu = problem.cu_seqlens()
    packed = {} if cu is None else {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    return gradients(problem, problem.tensors(), lambda *x, **options: adapter.attention(*x, **options, **packed))


@pytest.mark.parametrize(("ranks", "number"), CASES)
def test_equal_to_one_device(results: dict[int, Any], ranks: int, number: int) -> None:
    problem = ALL[ranks][number]
    wanted = one_device(problem)
    scale = max(float(x.abs().max()) for name, x in problem.tensors().items() if name in "qkvdout" and x is not None) ** 3
    for rank in range(ranks):
        got = results[ranks][rank][number]
        assert got.keys() == wanted.keys()
        for name, x in wanted.items():
            assert_agree(got[name].numpy(), x.numpy(), f"{name} on rank {rank}", 1.0 if name in ("out", "lse") else scale)
    if problem.one_hot_values:  # the mask itself
        assert torch.equal(results[ranks][0][number]["out"] != 0, wanted["out"] != 0)
        assert 0.4 < (wanted["out"] == 0).double().mean() < 0.6


# -- other properties, each on its own processes


def float_jobs(rank: int, problems: list[Problem]) -> Any:
    del rank
    return [[context_ranks.run_problem(problem) for problem in problems] for _ in range(2)]


def serial_ring(problem: Problem, ranks: int) -> dict[str, Any]:
    """The schedule of the ring, one rank after the other in one process."""
    x = problem.tensors()
    layout = Layout(problem.order, x["q"].shape[1], ranks)
    part = lambda t, r: take_shard(t, 1, problem.order, r, ranks)  # noqa: E731

    def place(side: str, r: int) -> dict[str, Any]:
        return {f"{side}_positions": torch.from_numpy(layout.local_tokens((r,)).positions).expand(len(x["q"]), -1).contiguous()}

    q, k, v, dout = ([part(x[name], r).contiguous() for r in range(ranks)] for name in ("q", "k", "v", "dout"))
    made: dict[str, list[Any]] = {name: [] for name in ("out", "lse", "dq", "dk", "dv")}
    sums = {name: [torch.zeros(t.shape) for t in source] for name, source in (("dq", q), ("dk", k), ("dv", v))}
    homes: list[Any] = []
    for r in range(ranks):
        out, lse = torch.empty(dout[r].shape), torch.empty(len(q[r]), q[r].shape[2], q[r].shape[1])
        sees = [step for step in range(ranks) if step == 0 or layout.sees((r,), ((r - step) % ranks,), (-1, 0))]
        for step in sees:
            s = (r - step) % ranks
            options = problem.keywords() | place("row", r) | place("column", s)
            libflash.attention(q[r], k[s], v[s], out=out, lse=lse, resume=step > 0, **options)
        out = out.to(q[r].dtype)
        made["out"].append(out)
        made["lse"].append(lse)
        delta = torch.empty_like(lse)
        for step in sees:
            s = (r - step) % ranks
            options = problem.keywords() | place("row", r) | place("column", s)
            dk, dv = (torch.zeros(t.shape) for t in (k[s], v[s]))
            libflash.attention_backward(
                dout[r], q[r], k[s], v[s], out, lse, dq=sums["dq"][r], dk=dk, dv=dv, delta=delta, add=step > 0, **options
            )
            homes.append((step, s, dk, dv))
    for _, s, dk, dv in sorted(homes, key=lambda home: home[0]):
        sums["dk"][s] += dk
        sums["dv"][s] += dv
    for name, total in sums.items():
        made[name] = [t.to(x["q"].dtype) for t in total]
    return {name: join_shards(shards, 2 if name == "lse" else 1, problem.order) for name, shards in made.items()}


def test_same_bits_in_every_run_and_as_a_serial_run(tmp_path: pathlib.Path) -> None:
    made = [
        Problem(f"bits-{order}-{dtype}", "ring", order, dtype=dtype, options=(CAUSAL,))
        for order in ("zigzag", "contiguous")
        for dtype in ("bfloat16", "float32")
    ]
    for first, second in run_ranks(3, tmp_path, float_jobs, made):
        for problem, one, two in zip(made, first, second, strict=True):
            serial = serial_ring(problem, 3)
            for name in one:
                assert torch.equal(one[name], two[name]), f"{problem} {name}"
                assert torch.equal(one[name], serial[name]), f"{problem} {name}"


def alone_job(rank: int) -> Any:
    del rank
    made = []
    for scheme in ("auto", "ring", "heads", "all_gather"):
        problem = Problem(
            "alone", scheme, "zigzag", dtype="float32", options=(CAUSAL, ("dropout_p", 0.5), ("seed", 3)), sink=True
        )
        made.append((context_ranks.run_problem(problem), one_device(problem)))
    return made


def test_one_rank_has_the_bits_of_attention(tmp_path: pathlib.Path) -> None:
    for got, wanted in run_ranks(1, tmp_path, alone_job)[0]:
        for name, x in wanted.items():
            assert torch.equal(got[name], x), name


def numpy_seed_job(rank: int) -> list[torch.Tensor]:
    """Seed and offset of Python, then on one rank of NumPy, then another offset."""
    x = torch.ones(1, 8, 2, 8)
    numbers = [(7, 3), (np.uint64(7), np.int32(3)) if rank == 1 else (7, 3), (7, np.int64(4))]
    return [adapter.context_parallel_attention(x, x, x, dropout_p=0.5, seed=seed, offset=offset) for seed, offset in numbers]


def test_seed_and_offset_may_be_of_numpy(tmp_path: pathlib.Path) -> None:
    for of_python, of_numpy, with_other_offset in run_ranks(2, tmp_path, numpy_seed_job):
        assert torch.equal(of_python, of_numpy)
        assert not torch.equal(of_python, with_other_offset)


def subgroups_job(rank: int) -> dict[str, Any]:
    """Two groups of two ranks beside each other, with problems of their own; a mesh and a group without some ranks."""
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    made: dict[str, Any] = {"errors": {}, "refused": []}
    for name, scheme in itertools.product(("data", "context"), ("ring", "all_gather", "heads")):
        axis = mesh[name]
        other = mesh.get_local_rank("context" if name == "data" else "data")
        torch.manual_seed(other)
        x = [torch.randn(2, 32, heads, 8, dtype=torch.float64) for heads in (4, 2, 2, 4)]
        options = {"causal": True, "window_size": (9, -1), "dropout_p": 0.3, "seed": 3}
        for order, where in (("zigzag", {"mesh": axis}), ("contiguous", {"group": axis.get_group()})):
            shards = [adapter.shard(y, **where, order=order).requires_grad_() for y in x[:3]]
            out = adapter.context_parallel_attention(*shards, **where, order=order, scheme=scheme, **options)
            got = (out, *torch.autograd.grad(out, shards, adapter.shard(x[3], **where, order=order)))
            leaves = [y.clone().requires_grad_() for y in x[:3]]
            whole = adapter.attention(*leaves, **options)
            wanted = (whole, *torch.autograd.grad(whole, leaves, x[3]))
            found = [(adapter.unshard(a, **where, order=order) - b).abs().max().item() for a, b in zip(got, wanted, strict=True)]
            made["errors"][f"{name} {scheme} {order}"] = max(found)
    x = [torch.randn(1, 8, 4, 8)] * 3
    for where in ({"group": torch.distributed.new_group([0, 1])}, {"mesh": torch.distributed.DeviceMesh("cpu", [0, 1])}):
        try:
            adapter.context_parallel_attention(*x, **where)
        except libflash.InvalidError as error:
            made["refused"].append(str(error))
    return made


def test_groups_beside_each_other(tmp_path: pathlib.Path) -> None:
    for rank, made in enumerate(run_ranks(4, tmp_path, subgroups_job)):
        assert len(made["errors"]) == 12
        assert max(made["errors"].values()) <= 1e-12, made["errors"]
        if rank < 2:
            assert made["refused"] == []
        else:
            assert "group does not have this rank" in made["refused"][0]
            assert f"mesh has the ranks [0, 1], and not this one, {rank}" in made["refused"][1]


def explain_job(rank: int) -> list[str]:
    """explain_context_parallel for shapes on a GPU, where the options determine the scheme."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    del rank
    said = []
    with FakeTensorMode():
        x, packed = (torch.empty(*lead, 1 << 16, 8, 128, device="cuda", dtype=torch.bfloat16) for lead in ((1,), ()))
        slopes = torch.empty(8, device="cuda")
        for given in ({}, {"dropout_p": 0.1}, {"alibi_slopes": slopes}, {"window_size": (9, 9)}):
            said.append(adapter.explain_context_parallel(x, x, x, causal=True, transport="messages", **given))
        given = {"causal": True, "transport": "messages", "cu_seqlens": [0, 5, 1 << 17]}
        said.append(adapter.explain_context_parallel(packed, packed, packed, **given))
        with pytest.raises(libflash.UnsupportedError) as no_alibi:
            adapter.explain_context_parallel(x, x, x, scheme="ring", alibi_slopes=slopes)
    said.append(str(no_alibi.value))
    x = torch.zeros(1, 8, 7, 8)
    for given, y in (({"cu_seqlens": [0, 5]}, x[0]), ({}, x[0]), ({}, x[:, 1:]), ({"scheme": "heads"}, x)):
        with pytest.raises(libflash.InvalidError) as refused:
            adapter.explain_context_parallel(y, y, y, **given)
        said.append(str(refused.value))
    return said


def test_explain_names_the_scheme_of_the_options(tmp_path: pathlib.Path) -> None:
    words = ["ring:"] + ["heads: a ring needs kernels that know positions"] * 4
    words += [
        "the tokens of a rank are not neighbours",
        "cu_seqlens ends at 5;",
        "q has 3 dimensions",
        "14 tokens",
        "q has 7 heads",
    ]
    for said in run_ranks(2, tmp_path, explain_job):
        assert all(expected in text for text, expected in zip(said, words, strict=True)), said


def other_calls_job(rank: int) -> dict[str, Any]:
    """What PyTorch does around a call: second derivatives, transforms, autocast, torch.compile."""
    call = adapter.context_parallel_attention
    x = [torch.randn(1, 8, 4, 8).requires_grad_() for _ in "qkv"]
    made: dict[str, Any] = {}

    def refused(name: str, run: Any) -> None:
        with pytest.raises(libflash.UnsupportedError, match="has gradients by") as error:
            run()
        made[name] = str(error.value)

    for scheme in ("ring", "heads"):  # this loss has a dout that requires no gradient
        loss = call(*x, scheme=scheme).sum()
        refused(scheme, lambda loss=loss: torch.autograd.grad(loss, x, create_graph=True))
    refused("grad", lambda: torch.func.grad(lambda q: call(q, *x[1:]).sum())(x[0].detach()))
    with torch.autograd.forward_ad.dual_level():
        refused("dual", lambda: call(torch.autograd.forward_ad.make_dual(x[0].detach(), x[0].detach()), *x[1:]))
    with torch.autocast("cpu", torch.bfloat16):
        made["types"] = [str(call(*(y.to(kind) for y in x)).dtype) for kind in (torch.float32, torch.float64)]
    wanted = [y.double() for y in torch.autograd.grad(call(*x, causal=True, deterministic=True).sin().sum(), x)]
    program = torch.compile(lambda *y: call(*y, causal=True).sin().sum(), backend="aot_eager")
    got = torch.autograd.grad(program(*x), x)
    made["compiled"] = all(torch.equal(a.double(), b) for a, b in zip(got, wanted, strict=True))
    return made


def test_pytorch_around_a_call(tmp_path: pathlib.Path) -> None:
    for made in run_ranks(2, tmp_path, other_calls_job):
        assert made["types"] == ["torch.bfloat16", "torch.float64"]
        assert made["compiled"]


def failing_job(rank: int) -> None:
    x = torch.randn(1, 8, 4, 8)
    if rank == 1:
        raise ValueError("the optimiser of rank 1 failed")
    adapter.context_parallel_attention(x, x, x)


def test_an_exception_on_one_rank_ends_the_others(tmp_path: pathlib.Path) -> None:
    with pytest.raises(Exception, match=r"the optimiser of rank 1 failed|Connection|closed|peer"):
        run_ranks(2, tmp_path, failing_job)


# -- without processes


def test_without_init() -> None:
    x = torch.randn(1, 8, 4, 8)
    with pytest.raises(libflash.InvalidError, match="init_process_group"):
        adapter.context_parallel_attention(x, x, x)


def test_shards_hold_each_token_once_and_zigzag_balances_a_causal_rule() -> None:
    tokens, ranks = 48, 4
    x = torch.arange(tokens * 2).reshape(1, tokens, 2)
    for order in ("contiguous", "zigzag"):
        shards = [take_shard(x, 1, order, r, ranks) for r in range(ranks)]
        assert torch.equal(join_shards(shards, 1, order), x)
        for r, part in enumerate(shards):
            np.testing.assert_array_equal(part[0, :, 0].numpy() // 2, tokens_of(order, tokens, r, ranks))
    work = [sum(tokens_of("zigzag", tokens, r, ranks) + 1) for r in range(ranks)]
    assert len(set(work)) == 1


def test_only_ranks_that_see_each_other_talk() -> None:
    layout = Layout("contiguous", 64, 4)
    pairs = {(r, c) for r in range(4) for c in range(4) if layout.sees((r,), (c,), (16, 0))}
    assert pairs == {(r, c) for r in range(4) for c in (r - 1, r) if c >= 0}
    assert layout.sees((2,), (0,), (17, 0))
    assert not layout.sees((0,), (1,), (-1, 0))
    documents = Layout("contiguous", 64, 4, (0, 16, 64))
    assert not documents.sees((1,), (0,), (-1, -1))
