"""Host time of forward and backward of a tiny call through PyTorch's autograd, in microseconds, and where it goes.

    python tests/benchmark/autograd_cost.py
    python tests/benchmark/autograd_cost.py --device cuda    until the call returns, without waiting for the GPU

Contenders: libflash.torch.attention; PyTorch's scaled_dot_product_attention; `direct`, a Function that calls the library and
checks nothing; `empty`, a Function that does nothing. They take turns, in shuffled order. A figure is the median over batches of
calls; `best` is the fastest batch, which other work on the machine disturbs least.

For a GPU's tensors PyTorch runs backward on a thread of its own; the lines `one thread` are without it. The second table has the
steps of a call of libflash, direct and empty: forward until backward is called; from there until the backward of the Function
begins; that backward; from there until the call returns.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import pathlib
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import libflash.torch
import torch
from libflash._torch_autograd import Attention

import libflash

SHAPE = (1, 4, 2, 16)  # batch, seqlen, heads, head_dim
CALLS = 300  # of a batch; on a GPU the host waits if more than 1024 launches are queued
STEPS = ("forward", "to backward", "backward", "to the end")


class Empty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
        ctx.save_for_backward(q, k, v)
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx: Any, dout: Any) -> Any:
        return dout, dout, dout


class Direct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
        out, lse = libflash.attention(q, k, v, return_lse=True)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Any) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        return libflash.attention_backward(dout, q, k, v, out, lse)[:3]


class Contender(NamedTuple):
    forward: Callable[[], torch.Tensor]
    inputs: list[torch.Tensor]
    dout: torch.Tensor
    function: Any = None  # of autograd, written in Python

    def call(self) -> None:
        torch.autograd.grad(self.forward(), self.inputs, self.dout)


def contenders(device: str) -> dict[str, Contender]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x = [torch.ones(SHAPE, dtype=dtype, device=device, requires_grad=True) for _ in range(3)]
    swapped = [y.detach().transpose(1, 2).requires_grad_() for y in x]
    dout = torch.ones(SHAPE, dtype=dtype, device=device)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return {
        "libflash": Contender(lambda: libflash.torch.attention(*x), x, dout, Attention),
        "SDPA": Contender(lambda: sdpa(*swapped), swapped, dout.transpose(1, 2)),
        "direct": Contender(lambda: Direct.apply(*x), x, dout, Direct),
        "empty": Contender(lambda: Empty.apply(*x), x, dout, Empty),
    }


def batch(one: Contender, settle: Callable[[], object]) -> float:
    """Microseconds of a call."""
    settle()
    start = time.perf_counter()
    for _ in range(CALLS):
        one.call()
    return 1e6 * (time.perf_counter() - start) / CALLS


def timed(of: dict[str, Contender], rounds: int, settle: Callable[[], object]) -> dict[str, dict[str, float]]:
    """Median and best of the batches of each contender."""
    times: dict[str, list[float]] = {name: [] for name in of}
    for one in of.values():
        batch(one, settle)
    for _ in range(rounds):
        for name in random.sample(list(of), len(of)):
            times[name].append(batch(of[name], settle))
    return {name: {"median": round(statistics.median(x), 2), "best": round(min(x), 2)} for name, x in times.items()}


@contextlib.contextmanager
def watched(function: Any, seen: list[float]) -> Iterator[None]:
    """Inside, `seen` gets the times at which the Function's backward begins and ends."""
    plain = function.backward

    def backward(*args: Any) -> Any:
        seen.append(time.perf_counter())
        made = plain(*args)
        seen.append(time.perf_counter())
        return made

    function.backward = staticmethod(backward)
    try:
        yield
    finally:
        function.backward = staticmethod(plain)


def steps(one: Contender, settle: Callable[[], object]) -> dict[str, float]:
    """Microseconds of STEPS, medians of the calls of a batch."""
    seen: list[float] = []
    rows = []
    with watched(one.function, seen):
        settle()
        for _ in range(CALLS):
            seen.clear()
            start = time.perf_counter()
            out = one.forward()
            requested = time.perf_counter()
            torch.autograd.grad(out, one.inputs, one.dout)
            stamps = [start, requested, *seen, time.perf_counter()]
            rows.append([1e6 * (end - begin) for begin, end in itertools.pairwise(stamps)])
    medians = (statistics.median(column) for column in zip(*rows, strict=True))
    return dict(zip(STEPS, (round(x, 2) for x in medians), strict=True))


def report(title: str, columns: tuple[str, ...], figures: dict[str, dict[str, float]]) -> None:
    print(f"{title:<24}" + "".join(f"{name:>14}" for name in columns))
    for name, row in figures.items():
        print(f"{name:<24}" + "".join(f"{row[column]:14.1f}" for column in columns), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the tensors are (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=20, help="batches of each contender (default: %(default)s)")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the figures")
    options = parser.parse_args()
    settle = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    of = contenders(options.device)
    print(f"libflash {libflash.__version__}, PyTorch {torch.__version__}: tensors of {SHAPE}, {of['libflash'].dout.dtype}")
    figures = timed(of, options.rounds, settle)
    if options.device == "cuda":
        with torch.autograd.set_multithreading_enabled(False):
            figures |= {f"{name}, one thread": row for name, row in timed(of, options.rounds, settle).items()}
    report("microseconds a call", ("median", "best"), figures)
    found = {name: steps(one, settle) for name, one in of.items() if one.function}
    report("steps", STEPS, found)
    if options.json:
        options.json.write_text(json.dumps({"calls": figures, "steps": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
