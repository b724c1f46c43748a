"""Calls of an inference engine's step on a GPU: prefill chunks, mixed steps, decodes of unequal lengths, trees, 8-bit caches.

    python tests/benchmark/gpu_serving.py --json serving.json       every cell, some minutes
    python tests/benchmark/gpu_serving.py --only chunk,page=16      some of them

32 query heads, 8 key heads, head_dim 128, bfloat16; packed rows (cu_seqlens_q), lengths and block table on the device, pages in
random order. Inputs that the L2 cache could keep are rotated: each call reads other copies. Calls are replayed from
CUDA graphs; contenders take turns; medians. Each line has the time of the call and of what it is compared with, and its target:

    chunk     rows of one sequence after keys in pages, against the dense forward call for the same operations
    mixed     4 chunks of 2048 rows beside 60 decodes, all with 8k keys, against the chunks alone and the decodes alone
    lengths   256 decodes with log-uniform lengths from 100 to 100k, against the bytes of K and V at 4.4 TB/s
    tree      trees of 8, 16 and 64 nodes, against one row for each sequence
    codes     caches of 8 bits (e4m3 with a scale for each head, int8 with one for each row), against bfloat16
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import pathlib
import sys
from collections.abc import Callable

import torch
from _gpu_timing import medians
from gpu_attention import setting

import libflash

HEADS_Q, HEADS_K, HEAD_DIM = 32, 8, 128
DEVICE = "cuda"  # the tests of this program put "cpu" here
READ_TB_PER_S = 4.4
ROTATED_BYTES = 256 << 20  # of all copies together: several times the L2 cache
KINDS = ("chunk", "mixed", "lengths", "tree", "codes")

Call = Callable[[], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Sequence:
    rows: int
    keys: int  # with those of the rows


@dataclasses.dataclass(frozen=True)
class Cell:
    kind: str
    name: str
    sequences: tuple[Sequence, ...]
    page: int = 16
    code: str = ""  # of the 8-bit cache

    @property
    def bytes(self) -> int:
        """Of K and V in bfloat16."""
        return 2 * 2 * HEADS_K * HEAD_DIM * sum(s.keys for s in self.sequences)

    @property
    def operations(self) -> int:
        """Of the products with visible keys."""
        seen = sum(s.rows * s.keys - s.rows * (s.rows - 1) // 2 for s in self.sequences)
        return 4 * HEADS_Q * HEAD_DIM * seen


def log_uniform(count: int, low: int, high: int) -> tuple[Sequence, ...]:
    """The quantiles of the distribution, in an order without meaning."""
    lengths = [round(low * math.exp((i + 0.5) / count * math.log(high / low))) for i in range(count)]
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1)).tolist()
    return tuple(Sequence(1, lengths[i]) for i in order)


def cells() -> list[Cell]:
    chunks = [
        Cell("chunk", f"rows={rows} keys={keys} page={page}", (Sequence(rows, keys),), page)
        for rows, keys, page in itertools.product((512, 2048, 8192), (8192, 65536), (16, 64))
    ]
    mixed = (Sequence(2048, 8192),) * 4 + (Sequence(1, 8192),) * 60
    trees = [
        Cell("tree", f"nodes={nodes} B={batch} keys={keys}", (Sequence(nodes, keys),) * batch)
        for nodes, (batch, keys) in itertools.product((8, 16, 64), ((8, 8192), (64, 2048)))
    ]
    sizes = ((1, 8192), (1, 65536), (8, 8192), (64, 1024), (64, 8192), (128, 4096))
    codes = [
        Cell("codes", f"{code} B={batch} keys={keys}", (Sequence(1, keys),) * batch, code=code)
        for code, (batch, keys) in itertools.product(("e4m3", "int8"), sizes)
    ]
    decodes = Cell("lengths", "B=256 keys=100..100k", log_uniform(256, 100, 100_000))
    return [*chunks, Cell("mixed", "chunks=4x2048 decodes=60 keys=8192", mixed), decodes, *trees, *codes]


def in_turn(copies: list[Call]) -> Call:
    """Calls one after another, each with inputs of its own."""
    following = itertools.cycle(copies)

    def call() -> torch.Tensor:
        return next(following)()

    return call


def copies_of(cell: Cell) -> int:
    return max(1, min(8, math.ceil(ROTATED_BYTES / cell.bytes)))


@dataclasses.dataclass
class Step:
    """The arrays of a call, with their own pages."""

    cell: Cell
    sequences: tuple[Sequence, ...]
    seed: int

    def __post_init__(self) -> None:
        generator = torch.Generator(DEVICE).manual_seed(self.seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=DEVICE, dtype=torch.bfloat16)

        page = self.cell.page
        counts = [math.ceil(s.keys / page) for s in self.sequences]
        order = torch.randperm(sum(counts), generator=generator, device=DEVICE).int()
        self.table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=DEVICE)
        for row, pages in zip(self.table, order.split(counts), strict=True):
            row[: len(pages)] = pages
        self.k, self.v = (normal(len(order), page, HEADS_K, HEAD_DIM) for _ in range(2))
        self.keys = torch.tensor([s.keys for s in self.sequences], dtype=torch.int32, device=DEVICE)
        rows = torch.tensor([0] + [s.rows for s in self.sequences])
        self.cu = rows.cumsum(0).int().to(DEVICE)
        self.q = normal(int(self.cu[-1]), HEADS_Q, HEAD_DIM)
        self.out = torch.empty_like(self.q)

    def call(self, **options: object) -> Call:
        arrays = (self.q, options.pop("k", self.k), options.pop("v", self.v))
        options = {"cache_seqlens": self.keys, "block_table": self.table, "cu_seqlens_q": self.cu, "causal": True} | options
        return lambda: libflash.decode(*arrays, out=self.out, **options)

    def tree(self) -> Call:
        """A random tree for each sequence: a node sees its ancestors."""
        nodes = self.sequences[0].rows
        generator = torch.Generator().manual_seed(self.seed)
        sees = torch.eye(nodes, dtype=torch.bool)
        for i in range(1, nodes):
            sees[i] |= sees[int(torch.randint(i, (), generator=generator))]
        powers = 2 ** torch.arange(32)
        padded = torch.nn.functional.pad(sees, (0, -nodes % 32)).view(nodes, -1, 32)
        words = (padded * powers).sum(-1)
        signed = torch.where(words >= 2**31, words - 2**32, words).int()
        return self.call(tree_mask=signed.repeat(len(self.sequences), 1).to(DEVICE))

    def coded(self, code: str) -> Call:
        if code == "e4m3":
            scale = torch.full((HEADS_K,), 0.01, device=DEVICE)
            k, v = ((x.float() * 100).clamp(-448, 448).to(torch.float8_e4m3fn) for x in (self.k, self.v))
        else:
            scale = torch.full((*self.k.shape[:2], HEADS_K), 0.03, device=DEVICE)
            k, v = ((x.float() / 0.03).round().clamp(-127, 127).to(torch.int8) for x in (self.k, self.v))
        return self.dense_call(k, v, k_scale=scale, v_scale=scale)

    def dense_call(self, k: torch.Tensor, v: torch.Tensor, **options: object) -> Call:
        """One row for each sequence, without cu_seqlens_q."""
        q, out = self.q[:, None], self.out[:, None]
        options = {"cache_seqlens": self.keys, "block_table": self.table, "causal": True} | options
        return lambda: libflash.decode(q, k, v, out=out, **options)

    def forward(self) -> Call:
        """The same operations with dense keys: of the only sequence."""
        keys = self.sequences[0].keys
        pages = self.table[0].long()
        k, v = (x[pages].reshape(1, -1, HEADS_K, HEAD_DIM)[:, :keys].contiguous() for x in (self.k, self.v))
        out = torch.empty_like(self.q)[None]
        return lambda: libflash.attention(self.q[None], k, v, causal=True, out=out)[0]


def contenders(cell: Cell) -> dict[str, list[Call]]:
    """For each contender a call for each copy of the inputs. The first one is the call that the cell is about."""
    steps = [Step(cell, cell.sequences, seed) for seed in range(copies_of(cell))]
    if cell.kind == "chunk":
        return {"call": [s.call() for s in steps], "forward": [s.forward() for s in steps]}
    if cell.kind == "mixed":
        parts = {"chunks": [s for s in cell.sequences if s.rows > 1], "decodes": [s for s in cell.sequences if s.rows == 1]}
        alone = {name: [Step(cell, tuple(part), 9).call()] for name, part in parts.items()}
        return {"call": [s.call() for s in steps], **alone}
    if cell.kind == "tree":
        one = tuple(Sequence(1, s.keys) for s in cell.sequences)
        return {"call": [s.tree() for s in steps], "one row": [Step(cell, one, s.seed).call() for s in steps]}
    if cell.kind == "codes":
        return {"call": [s.coded(cell.code) for s in steps], "bf16": [s.dense_call(s.k, s.v) for s in steps]}
    return {"call": [s.call() for s in steps]}


def compare(cell: Cell, calls: dict[str, list[Call]]) -> None:
    """Raise an exception for a wrong result: chunks against the dense forward."""
    if "forward" not in calls:
        return
    got, wanted = (calls[name][0]().float() for name in ("call", "forward"))
    difference = ((got - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max().item()
    if not difference <= 0.02:
        sys.exit(f"{cell.name}: a row differs from forward's by {difference:.3g}; nothing is timed")


def verdict(cell: Cell, ms: dict[str, float]) -> tuple[str, float]:
    """What the target is about, and the quotient that it bounds."""
    if cell.kind == "chunk":
        return "rate / forward's, >= 0.95", ms["forward"] / ms["call"]
    if cell.kind == "mixed":
        return "time / longer part, <= 1.1", ms["call"] / max(ms["chunks"], ms["decodes"])
    if cell.kind == "lengths":
        return "time / bytes at 4.4 TB/s, <= 1.1", ms["call"] / (cell.bytes / READ_TB_PER_S / 1e9)
    if cell.kind == "tree":
        return "time / one row's, <= 1.05", ms["call"] / ms["one row"]
    return "bf16's time / time, >= 1.8 from 64k keys", ms["bf16"] / ms["call"]


def run(cell: Cell, rounds: int) -> dict[str, object]:
    calls = contenders(cell)
    compare(cell, calls)
    ms, spread = medians({name: in_turn(copies) for name, copies in calls.items()}, rounds)
    target, quotient = verdict(cell, ms)
    figures = {"tb_per_s": round(cell.bytes / ms["call"] / 1e9, 2), "tflop_per_s": round(cell.operations / ms["call"] / 1e9, 1)}
    us = {name: round(value * 1e3, 1) for name, value in ms.items()}
    about = {"kind": cell.kind, "name": cell.name, "us": us, **figures}
    return about | {"target": target, "quotient": round(quotient, 3), "spread": round(spread, 3)}


def line(result: dict) -> str:
    us = ", ".join(f"{name} {value}" for name, value in result["us"].items())
    rates = f"{result['tflop_per_s']:7.1f} TFLOP/s {result['tb_per_s']:5.2f} TB/s"
    return f"{result['kind']:8}{result['name']:36}{result['quotient']:7.3f} ({result['target']}) {rates}  us: {us}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="replays of each contender, in turn (default: %(default)s)")
    parser.add_argument("--only", metavar="WORDS", default="", help="comma-separated: chunk,rows=512,page=16")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the results")
    return parser.parse_args()


@torch.no_grad()
def main() -> int:
    options = parse()
    if not torch.cuda.is_available():
        sys.exit("no GPU")
    words = options.only.split(",") if options.only else []
    wanted = [cell for cell in cells() if all(word in (cell.kind, *cell.name.split()) for word in words)]
    if not wanted:
        sys.exit(f"no cell has all of: {options.only}; a cell is, for one: {cells()[0].kind} {cells()[0].name}")
    about = setting(options.rounds, None)
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    results = []
    with torch.cuda.stream(torch.cuda.Stream()):  # the default stream cannot be captured
        for cell in wanted:
            results.append(run(cell, options.rounds))
            print(line(results[-1]), flush=True)
            torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps({"setting": about, "cells": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
