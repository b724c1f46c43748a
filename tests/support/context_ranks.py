"""Processes of a gloo group, or of a group of GPUs, that run context-parallel problems and return what each rank got."""

from __future__ import annotations

import dataclasses
import datetime
import pathlib
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from forked_programs import server


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call with its gradients; `shape` is (batch, tokens, heads_q, heads_k, head_dim, head_dim_v)."""

    name: str
    scheme: str = "ring"
    order: str = "zigzag"
    mesh: tuple[int, int] | None = None  # (heads, ring)
    shape: tuple[int, int, int, int, int, int] = (2, 48, 4, 2, 8, 6)
    dtype: str = "float64"
    sink: bool = False
    alibi: bool = False
    dlse: bool = False
    documents: tuple[int, ...] | None = None  # lengths
    one_hot_values: bool = False  # v = identity: out is the matrix of probabilities
    device: str = "cpu"
    transport: str = "auto"
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return self.name

    def tensors(self) -> dict[str, torch.Tensor | None]:
        """The tensors of the whole problem."""
        batch, tokens, heads_q, heads_k, dim, dim_v = self.shape
        random = np.random.default_rng(len(self.name) + 7 * sum(map(ord, self.name)))
        lead = (tokens,) if self.documents else (batch, tokens)
        normal = lambda *shape: torch.from_numpy(random.standard_normal(shape)).to(getattr(torch, self.dtype))  # noqa: E731
        made = {"q": normal(*lead, heads_q, dim), "k": normal(*lead, heads_k, dim), "v": normal(*lead, heads_k, dim_v)}
        if self.one_hot_values:
            made["v"] = torch.eye(tokens, dim_v).to(made["q"].dtype).reshape(1, tokens, 1, dim_v).expand(batch, -1, heads_k, -1)
        made["dout"] = normal(*lead, heads_q, made["v"].shape[-1])
        wide = torch.float64 if self.dtype == "float64" else torch.float32
        rows = (heads_q, tokens) if self.documents else (batch, heads_q, tokens)
        made["dlse"] = normal(*rows).to(wide) if self.dlse else None
        made["alibi_slopes"] = torch.linspace(0.1, 0.5, heads_q, dtype=wide) if self.alibi else None
        made["learnable_sink"] = torch.linspace(-1, 1, heads_q, dtype=wide) if self.sink else None
        return made

    @property
    def token_dim(self) -> int:
        return 0 if self.documents else 1

    def keywords(self) -> dict[str, Any]:
        return dict(self.options)

    def cu_seqlens(self) -> torch.Tensor | None:
        return torch.tensor([0, *np.cumsum(self.documents)], dtype=torch.int32) if self.documents else None


def gradients(problem: Problem, x: dict[str, Any], call: Any) -> dict[str, torch.Tensor]:
    """out, lse and the gradients of `call` with the tensors of `x`."""
    inputs = {name: x[name].clone().requires_grad_() for name in ("q", "k", "v")}
    sink = None if x["learnable_sink"] is None else x["learnable_sink"].clone().requires_grad_()
    out, lse = call(*inputs.values(), learnable_sink=sink, alibi_slopes=x["alibi_slopes"], return_lse=True, **problem.keywords())
    loss = (out * x["dout"]).sum()
    if x["dlse"] is not None:
        loss = loss + (torch.where(lse.isfinite(), lse, 0) * x["dlse"]).sum()
    loss.backward()
    made = {"out": out.detach(), "lse": lse.detach()} | {f"d{name}": value.grad for name, value in inputs.items()}
    return made if sink is None else made | {"dsink": sink.grad}


def run_problem(problem: Problem) -> dict[str, torch.Tensor]:
    import libflash.torch as adapter

    where: dict[str, Any] = {}
    if problem.mesh is not None:
        where["mesh"] = dist.init_device_mesh(problem.device, problem.mesh, mesh_dim_names=("heads", "ring"))
    elif dist.get_world_size() > 1:
        where["group"] = dist.group.WORLD
    place = {"dim": problem.token_dim, "order": problem.order, **where}
    whole = {name: None if x is None else x.to(problem.device) for name, x in problem.tensors().items()}
    mine = dict(whole)
    for name in ("q", "k", "v", "dout"):
        mine[name] = adapter.shard(whole[name], **place)
    if whole["dlse"] is not None:
        mine["dlse"] = adapter.shard(whole["dlse"], **{**place, "dim": whole["dlse"].ndim - 1})

    def call(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return adapter.context_parallel_attention(
            q, k, v, scheme=problem.scheme, order=problem.order, cu_seqlens=problem.cu_seqlens(), transport=problem.transport,
            **where, **options,
        )  # fmt: skip

    made = gradients(problem, mine, call)
    joined = {}
    for name, x in made.items():
        if name == "dsink":
            dist.all_reduce(x)
            joined[name] = x
        else:
            dim = x.ndim - 1 if name == "lse" else problem.token_dim
            joined[name] = adapter.unshard(x, **{**place, "dim": dim})
    return joined


def _rank(rank: int, ranks: int, folder: str, job: Any, arguments: tuple[Any, ...], path: list[str], backend: str) -> None:
    sys.path[:] = path
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=datetime.timedelta(seconds=100)
    )
    try:
        result = job(rank, *arguments)
        torch.save(result, f"{folder}/result{rank}")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def run_ranks(ranks: int, folder: pathlib.Path, job: Any, *arguments: Any, backend: str = "gloo") -> list[Any]:
    """Run job(rank, *arguments) in each of `ranks` processes; returns their results. An exception in one process ends all.
    With the backend nccl, the process of a rank has the GPU of that number.

    The processes come from a server that has imported PyTorch once for all of them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    server()
    arguments = (ranks, str(folder), job, arguments, sys.path, backend)
    mp.start_processes(_rank, arguments, nprocs=ranks, start_method="forkserver")
    return [torch.load(folder / f"result{rank}", weights_only=False) for rank in range(ranks)]


def problems_job(rank: int, problems: list[Problem]) -> list[Any]:
    del rank
    return [{name: x.cpu() for name, x in run_problem(problem).items()} for problem in problems]
