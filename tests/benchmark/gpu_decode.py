"""Decode on a GPU, one query row a sequence, against PyTorch's FlashAttention-2 and cuDNN, in one process, by device time.

    python tests/benchmark/gpu_decode.py --json decode.json       every cell, about half a minute
    python tests/benchmark/gpu_decode.py --quick                  five cells
    python tests/benchmark/gpu_decode.py --only B=1,H=32/8        some of them

A cell is heads of q and of k, sequences and keys of each, head_dim 128. Besides the plain call libflash is timed with the lengths
of the sequences on the device; also with the cache in pages of 16 in random order; and also with a new key that the same call
rotates (rotary embedding) and appends. Calls are replayed from CUDA graphs; contenders take turns; medians.
TB/s are the bytes of K and V over the time; the same run measures the GPU's read bandwidth. Every contender reads caches that fit
the L2 cache (some 50 MB) from there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys
from collections.abc import Callable

import torch
from _gpu_timing import medians
from gpu_attention import setting
from torch.nn.attention import SDPBackend, sdpa_kernel

import libflash

HEAD_DIM, PAGE = 128, 16
HEADS = ((32, 8), (64, 8), (32, 32))
SIZES = ((1, 8192), (1, 65536), (1, 524288), (8, 8192), (64, 1024), (64, 8192), (128, 4096))  # sequences, keys
QUICK = ((32, 8, 1, 8192), (32, 8, 1, 65536), (32, 8, 64, 1024), (32, 8, 8, 8192), (32, 32, 8, 8192))
OURS, PEERS = "libflash", ("fa2", "cudnn")
VARIANTS = (OURS, "lengths", "paged", "append")
READ_BYTES = 1 << 31
DEVICE = "cuda"  # the tests of this program put "cpu" here
ROW_TOLERANCE = 0.02

Call = Callable[[], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class DecodeCell:
    heads_q: int
    heads_k: int
    batch: int
    seqlen: int

    @property
    def bytes(self) -> int:
        """Bytes of K and V."""
        return 2 * self.batch * self.seqlen * self.heads_k * HEAD_DIM * 2

    @property
    def name(self) -> str:
        return f"H={self.heads_q}/{self.heads_k} B={self.batch} S={self.seqlen}"


def cells(quick: bool) -> list[DecodeCell]:
    return [DecodeCell(*x) for x in QUICK] if quick else [DecodeCell(*heads, *size) for heads in HEADS for size in SIZES]


def libflash_calls(cell: DecodeCell, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel: str | None) -> dict[str, Call]:
    """Each call has the same result: the appended key equals the one that was there."""
    shape = (cell.batch * cell.seqlen // PAGE, PAGE, cell.heads_k, HEAD_DIM)
    order = torch.randperm(shape[0], device=DEVICE)
    table = torch.empty_like(order).index_copy_(0, order, torch.arange(shape[0], device=DEVICE))
    pages = [x.view(shape)[order] for x in (k, v)]
    table = table.reshape(cell.batch, -1).int()
    lengths = torch.full((cell.batch,), cell.seqlen, dtype=torch.int32, device=DEVICE)
    before, last = lengths - 1, slice(cell.seqlen - 1, None)
    new = [x[:, last].clone() for x in (k, v)]
    tables = {"rotary_cos": torch.ones(cell.seqlen, HEAD_DIM // 2, device=DEVICE)}
    tables["rotary_sin"] = torch.zeros_like(tables["rotary_cos"])
    outs = {name: torch.empty_like(q) for name in VARIANTS}
    return {
        OURS: lambda: libflash.decode(q, k, v, out=outs[OURS], kernel=kernel),
        "lengths": lambda: libflash.decode(q, k, v, cache_seqlens=lengths, out=outs["lengths"], kernel=kernel),
        "paged": lambda: libflash.decode(q, *pages, cache_seqlens=lengths, block_table=table, out=outs["paged"], kernel=kernel),
        "append": lambda: libflash.decode(
            q, k, v, k=new[0], v=new[1], cache_seqlens=before, out=outs["append"], kernel=kernel, **tables
        ),
    }


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, backend: SDPBackend) -> Call:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]

    def call() -> torch.Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=grouped).transpose(1, 2)

    return call


def calls_of(cell: DecodeCell, kernel: str | None) -> dict[str, Call]:
    """Peers that do not support the problem are removed; libflash must support it."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    heads, seqlens = (cell.heads_q, cell.heads_k, cell.heads_k), (1, cell.seqlen, cell.seqlen)
    q, k, v = (
        torch.randn(cell.batch, s, h, HEAD_DIM, generator=generator, device=DEVICE, dtype=torch.bfloat16)
        for s, h in zip(seqlens, heads, strict=True)
    )
    made = libflash_calls(cell, q, k, v, kernel)
    for name, backend in zip(PEERS, (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION), strict=True):
        call = sdpa(q, k, v, backend)
        try:
            call()
        except RuntimeError as refused:
            print(f"{cell.name}: {name} left out: {str(refused).splitlines()[0]}", file=sys.stderr)
            continue
        made[name] = call
    return made


def compare(cell: DecodeCell, calls: dict[str, Call]) -> None:
    """Raise an exception for a wrong result."""
    wanted = calls[OURS]().float()
    for name in calls.keys() - {OURS}:
        difference = ((calls[name]().float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max().item()
        if not difference <= ROW_TOLERANCE:
            sys.exit(f"{cell.name}: a row of {name} differs from libflash's by {difference:.3g}; nothing is timed")


def figures(cell: DecodeCell, ms: dict[str, float]) -> dict[str, object]:
    return {
        "us": {name: round(value * 1e3, 1) for name, value in ms.items()},
        "tb_per_s": {name: round(cell.bytes / value / 1e9, 2) for name, value in ms.items()},
        "ratio": {name: round(ms[name] / ms[OURS], 3) for name in PEERS if name in ms},
    }


def run(cell: DecodeCell, rounds: int, kernel: str | None) -> dict[str, object]:
    calls = calls_of(cell, kernel)
    compare(cell, calls)
    ms, spread = medians(calls, rounds)
    return dataclasses.asdict(cell) | {"name": cell.name} | figures(cell, ms) | {"spread": round(spread, 3)}


def read_rate(rounds: int) -> float:
    """TB/s of a sum over an array larger than the L2 cache."""
    x = torch.zeros(READ_BYTES // 4, device=DEVICE)
    return round(READ_BYTES / medians({"sum": x.sum}, rounds)[0]["sum"] / 1e9, 2)


def summaries(results: list[dict]) -> dict[str, dict]:
    made = {}
    for peer in PEERS:
        if ratios := [cell["ratio"][peer] for cell in results if peer in cell["ratio"]]:
            made[peer] = {"geometric_mean": round(statistics.geometric_mean(ratios), 3), "worst": min(ratios)}
    return made


def line(result: dict) -> str:
    us = "".join(f"{result['us'].get(name, float('nan')):9.1f}" for name in (*PEERS, *VARIANTS))
    ratios = "".join(f"{result['ratio'].get(name, float('nan')):8.3f}" for name in PEERS)
    return f"{result['name']:24}{us}{ratios}{result['tb_per_s'][OURS]:7.2f}{result['spread']:8.3f}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="replays of each contender, in turn (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a few cells: a look, not a figure to quote")
    parser.add_argument("--only", metavar="WORDS", default="", help="comma-separated: H=32/8,B=1,S=8192")
    parser.add_argument("--kernel", metavar="NAME", help="this kernel of libflash, not the one it would choose")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the results")
    return parser.parse_args()


@torch.no_grad()
def main() -> int:
    options = parse()
    if not torch.cuda.is_available():
        sys.exit("no GPU")
    words = options.only.split(",") if options.only else []
    wanted = [cell for cell in cells(options.quick) if all(word in cell.name.split() for word in words)]
    if not wanted:
        sys.exit(f"no cell has all of: {options.only}; a cell is, for one: {cells(options.quick)[0].name}")
    about = setting(options.rounds, options.kernel)
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    results = []
    with torch.cuda.stream(torch.cuda.Stream()):  # the default stream cannot be captured
        about["read_tb_per_s"] = read_rate(options.rounds)
        print(f"reading: {about['read_tb_per_s']} TB/s")
        print(f"{'microseconds':24}" + "".join(f"{x:>9}" for x in (*PEERS, *VARIANTS)) + "   / fa2 / cudnn   TB/s  spread")
        for cell in wanted:
            results.append(run(cell, options.rounds, options.kernel))
            print(line(results[-1]), flush=True)
            torch.cuda.empty_cache()
    total = summaries(results)
    for peer, sums in total.items():
        print(f"against {peer}: geometric mean {sums['geometric_mean']:.3f}, worst {sums['worst']:.3f}")
    if options.json:
        options.json.write_text(json.dumps({"setting": about, "summary": total, "cells": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
