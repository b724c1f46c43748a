"""Context parallel attention on the ranks of a torch.distributed group: the schemes of libflash, a plain ring with the same
kernels and PyTorch's own context_parallel, against the ranks working on whole problems by themselves.

    torchrun --nproc-per-node 2 tests/benchmark/context_parallel.py                            GPUs: 32k to 512k tokens, bf16
    torchrun --nproc-per-node 2 tests/benchmark/context_parallel.py --device cpu --tokens 512 --heads 4/2 --head-dim 32
    torchrun ... --schemes ring all_gather --transports messages symmetric_memory              a contender for each transport

Batch 1, zigzag order. Scheme heads_ring runs where the ranks form a mesh of 2 by at least 2; the plain ring is for causal
attention only. A sample is a window of as many calls back to back as take 250 ms (on CPUs: one call); each round has one of every
contender, in an order that is shuffled alike on all ranks. Medians over the rounds; the slowest rank counts, and the host's time
where it is longer than the GPU's.

Before a cell of at most 16384 tokens is timed, results are compared with those of one rank. `rate` is the time of the whole
problem on one rank, divided by the ranks and by the contender's time: 1 is a scheme without cost. The prediction is that of
_context_model.py for the ring; its error is printed for the ranks at hand, and its values for 4 to 64 ranks are no measurements.
On GPUs the peak of memory of one call is compared with that of _context_memory.py, the largest of all ranks with each other.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterator

import libflash.torch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _context_model import RingModel
from _plain_ring import PlainRing
from _rank_memory import Measured, measured_peak, memory_of_ranks, said_of_memory
from _rank_timing import Call, Clock
from libflash._torch_symmetric_memory import TRANSPORTS
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

COMPARED = 16384  # tokens, at most
PREDICTED = (4, 8, 16, 64)
WINDOW = 250  # milliseconds of a sample on GPUs; on CPUs it is a call
WHOLE = "one rank"
SCHEMES = ("ring", "all_gather", "heads", "heads_ring", "auto")


def number_type(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def gradients(attention: Callable[..., torch.Tensor], tensors: list[torch.Tensor], backward: bool) -> list[torch.Tensor]:
    if not backward:
        with torch.no_grad():
            return [attention(*tensors)]
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = attention(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, out.detach())]


@functools.cache
def mesh_of(kind: str, *sizes: int) -> DeviceMesh:
    """Made once: each mesh of two dimensions has process groups of its own, and the calls that use one are timed."""
    return init_device_mesh(kind, sizes, mesh_dim_names=("heads", "ring") if len(sizes) == 2 else None)


def own_scheme(scheme: str, transport: str, causal: bool, device: torch.device) -> Callable[..., torch.Tensor]:
    ranks = dist.get_world_size()
    where = {}
    if scheme == "heads_ring":
        where = {"mesh": mesh_of(device.type, 2, ranks // 2)}

    def attention(*tensors: torch.Tensor) -> torch.Tensor:
        return libflash.torch.context_parallel_attention(
            *tensors, scheme=scheme, causal=causal, check=False, transport=transport, **where
        )

    return attention


def of_pytorch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """To be called inside PyTorch's context_parallel, which replaces scaled_dot_product_attention."""
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*heads_first, is_causal=causal, enable_gqa=q.shape[2] != k.shape[2])
    return out.transpose(1, 2)


@contextlib.contextmanager
def context_of_pytorch(device: torch.device) -> Iterator[None]:
    """PyTorch's context_parallel around shards that exist already. It uses the zigzag order, too."""
    from torch.distributed.tensor.experimental import context_parallel

    mesh = mesh_of(device.type, dist.get_world_size())
    anything = torch.zeros(2 * dist.get_world_size(), device=device)
    with context_parallel(mesh, buffers=[anything], buffer_seq_dims=[0]):
        yield


def ways(ranks: int, options: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    """Name, scheme and transport. Heads are sent by messages, and "auto" decides all."""
    for scheme in options.schemes:
        if scheme == "heads_ring" and (ranks < 4 or ranks % 2):
            continue
        if scheme in ("heads", "auto"):
            yield scheme, scheme, "auto"
            continue
        for transport in options.transports:
            yield scheme if transport == "auto" else f"{scheme}, {transport}", scheme, transport


def contenders(
    shards: list[torch.Tensor], backward: bool, causal: bool, options: argparse.Namespace
) -> tuple[dict[str, Call], dict[str, Measured | None]]:
    """Those that run here, and the memory that one call of each took; others are named with the reason."""
    ranks, device = dist.get_world_size(), shards[0].device
    calls: dict[str, Call] = {}
    peaks: dict[str, Measured | None] = {}
    peers = not options.no_peers

    def try_out(name: str, call: Call) -> None:
        try:
            peaks[name] = measured_peak(call, device)
        except (NotImplementedError, RuntimeError, libflash.Error) as refused:
            say(f"    {name}: left out: {str(refused).splitlines()[0][:120]}")
        else:
            calls[name] = call

    for name, scheme, transport in ways(ranks, options):
        attention = own_scheme(scheme, transport, causal, device)
        try_out(name, lambda attention=attention: gradients(attention, shards, backward))
    if peers and causal:
        try_out("plain ring", lambda: gradients(PlainRing.apply, shards, backward))

    def pytorch() -> list[torch.Tensor]:
        with context_of_pytorch(device):
            return gradients(lambda *x: of_pytorch(*x, causal), shards, backward)

    if peers and ranks > 1:
        try_out("PyTorch", pytorch)
    return calls, peaks


def compare(calls: dict[str, Call], wanted: list[torch.Tensor]) -> None:
    tolerance = 1e-4 if wanted[0].dtype == torch.float32 else 0.03
    for name, call in calls.items():
        for what, got, x in zip(("out", "dq", "dk", "dv"), call(), wanted, strict=False):
            worst = ((got - x).float().norm() / x.float().norm()).item()
            if not worst <= tolerance:
                raise SystemExit(f"{name}: {what} differs by {worst:.3g} of its norm; nothing is timed")


def cell(tokens: int, heads: tuple[int, int], backward: bool, causal: bool, clock: Clock, options: argparse.Namespace) -> dict:
    device = clock.device
    torch.manual_seed(1)
    dtype = number_type(device)
    whole = [torch.randn(1, tokens, n, options.head_dim, device=device).to(dtype) for n in (heads[0], heads[1], heads[1])]
    shards = [libflash.torch.shard(x, dim=1, order="zigzag").contiguous() for x in whole]

    def one_rank() -> list[torch.Tensor]:
        return gradients(lambda *x: libflash.torch.attention(*x, causal=causal), whole, backward)

    ranks = dist.get_world_size()
    mask, passes = "causal" if causal else "full", "forward and backward" if backward else "forward"
    say(f"{tokens} tokens, heads {heads[0]}/{heads[1]}, {mask}, {passes}, {ranks} ranks")
    calls, peaks = contenders(shards, backward, causal, options)
    memory = {}
    if device.type == "cuda":
        memory = memory_of_ranks(peaks | {WHOLE: measured_peak(one_rank, device)}, whole, shards, causal, backward)
        for call in calls.values() if any(peak and peak.symmetric for peak in peaks.values()) else ():
            call()  # each measurement released symmetric memory: no sample shall allocate it
    else:
        one_rank()
    if tokens <= COMPARED:
        compare(calls, [libflash.torch.shard(x, dim=1, order="zigzag") for x in one_rank()])
    ms = clock.medians({WHOLE: one_rank, **calls}, options.rounds)
    for name, value in ms.items():
        rate = "" if name == WHOLE else f", rate {ms[WHOLE] / ranks / value:.3f}"
        say(f"    {name}: {value:.3f} ms{rate}{said_of_memory(memory.get(name))}")
    about = {"tokens": tokens, "heads": heads, "causal": causal, "backward": backward, "ranks": ranks, "ms": ms}
    return about | ({"memory": memory} if memory else {})


def prediction(result: dict, model: RingModel) -> dict[int, float]:
    """Milliseconds for each number of ranks, of forward or of both passes."""
    made = {}
    for ranks in (result["ranks"], *PREDICTED):
        if (tokens := result["tokens"] // ranks // 2 * 2) > 0:
            passes = (False, True) if result["backward"] else (False,)
            made[ranks] = sum(model.ms(ranks, tokens, tuple(result["heads"]), result["causal"], one) for one in passes)
    measured = result["ms"].get("ring")
    error = "" if measured is None else f", error {made[result['ranks']] / measured - 1:+.1%}"
    say(f"    model of the ring: {made[result['ranks']]:.3f} ms{error}; link {model.link.bytes_per_ms / 1e6:.1f} GB/s")
    whole = result["ms"][WHOLE]
    say("    predicted rate: " + ", ".join(f"{n} ranks {whole / n / ms:.3f}" for n, ms in made.items() if n > 1))
    return made


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 65536, 131072, 262144, 524288])
    parser.add_argument("--heads", nargs="+", default=["32/8", "32/32"], metavar="Q/K")
    parser.add_argument("--masks", nargs="+", default=["causal"], choices=("causal", "full"))
    parser.add_argument("--passes", nargs="+", default=["forward", "both"], choices=("forward", "both"))
    parser.add_argument("--schemes", nargs="+", default=SCHEMES, choices=SCHEMES)
    parser.add_argument("--transports", nargs="+", default=["auto"], choices=TRANSPORTS, help="of keys (default: auto)")
    parser.add_argument("--no-peers", action="store_true", help="only the schemes of libflash")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5, help="windows of each contender (default: %(default)s)")
    parser.add_argument("--window", type=float, metavar="MS", help=f"of a sample (default: {WINDOW} on GPUs, 0 on CPUs)")
    parser.add_argument("--json", type=pathlib.Path, help="write the results there")
    options = parser.parse_args()
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    device = torch.device(options.device, int(os.environ["LOCAL_RANK"]) if options.device == "cuda" else None)
    if options.device == "cuda":
        torch.cuda.set_device(device)
    clock = Clock(device, options.window if options.window is not None else WINDOW if options.device == "cuda" else 0)
    model = RingModel(device, number_type(device), options.head_dim, clock.sample)
    results = []
    for tokens, mask, heads, passes in itertools.product(options.tokens, options.masks, options.heads, options.passes):
        numbers = tuple(map(int, heads.split("/")))
        result = cell(tokens, numbers, passes == "both", mask == "causal", clock, options)
        result["predicted_ms"] = prediction(result, model)
        results.append(result)
    if options.json and dist.get_rank() == 0:
        setting = {"torch": torch.__version__, "rounds": options.rounds, "head_dim": options.head_dim}
        setting["window_ms"] = clock.window
        options.json.write_text(json.dumps({"setting": setting, "cells": results}, indent=1) + "\n")
    leave()


def leave() -> None:
    """End the process without the end of the interpreter, which a thread of gloo can abort: it may still drop the tensors of the
    last collective, for which it needs Python.
    """
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
