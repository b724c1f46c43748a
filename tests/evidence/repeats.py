"""Are results reproducible? Every CUDA kernel of attention, many times on one problem; and hashes of results of fixed cases.

    python tests/evidence/repeats.py OUT.json [--quick]

The problem has a batch of 60 (tangents of float32 and float64, which are slow: 15) and different lengths, some 0. Forward is also
repeated without lengths (`dense`), with rare options (`options`) and with a block mask (`blocks`), because tile schedules differ
then. Half of the repeats run at the same time as copies on another stream, which use memory bandwidth. `differing` and these
fields count for each tensor the repeats whose bits differ from the first result: 0 is expected. Backward runs with
deterministic=True; without it (`default`) dq may differ, whose sums have no fixed order, but dk and dv may not.
A hash is valid for one GPU and toolkit: a kernel built by another compiler may round differently.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import pathlib
import sys
from collections.abc import Callable

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(2, str(pathlib.Path(__file__).resolve().parents[1] / "short_names"))
sys.path.insert(3, str(pathlib.Path(__file__).resolve().parents[1] / "capi"))

import cases
import numpy as np
import torch
from decode_cases import DecodeCase
from gpu_case import DTYPES, bits, wide_type
from gpu_kernels import TYPES, attention_kernels, device_of, supporting, widths
from gpu_runs import RUNS
from libflash.conformance.cache_cases import CacheCase
from statistics_case import StatisticsCase
from tangent_cases import TangentCase

import libflash

GOLDEN = ("fill-randn-{}-causal", "fill-mean-{}")
GOLDEN_DECODE = {"lengths": (0, 1, 130, 700), "capacity": 720, "seqlen_q": 2, "page_size": 16, "append": 2, "rotary": 32}
REPEATS, QUICK_REPEATS = 1000, 50
HOG_BYTES = 1 << 28
BLOCK = 128
BATCH, SEQLEN_Q, SEQLEN_K, HEADS_Q, HEADS_K = 60, 190, 333, 4, 2
MAY_DIFFER = {"dq"}  # without deterministic=True; also where backward_tangent computes dq

Tensors = dict[str, torch.Tensor]


def golden(kernel: dict) -> str:
    """Hash of the results on the fixed cases; their inputs are the same on every machine."""
    total = hashlib.sha256()
    for case in golden_cases(kernel):
        result = run(case, kernel)
        case.check(**result)
        for name, tensor in result.items():
            if isinstance(tensor, np.ndarray) and (name not in MAY_DIFFER or (kernel["kind"] == "backward" and ordered(kernel))):
                total.update(tensor.tobytes())
    return total.hexdigest()[:32]


def ordered(kernel: dict) -> bool:
    """Whether the kernel supports deterministic=True."""
    return bool(supporting([kernel], deterministic=True))


def golden_cases(kernel: dict) -> list:
    kind, dtype = kernel["kind"], TYPES[kernel["dtype"]]
    if kind == "values in keys":
        base = DecodeCase(f"golden-{dtype}-in-keys", dtype, heads_k=1, head_dim=kernel["head_dim"], **GOLDEN_DECODE)
        return [CacheCase(base, None, "none", head_dim_v=kernel["head_dim_v"])]
    if kind == "decode":
        return [DecodeCase(f"golden-{dtype}-{kernel['head_dim']}", dtype, **GOLDEN_DECODE, **widths(kernel))]
    named = {name.format(dtype): cases.by_name(name.format("fp32")) for name in GOLDEN}
    found = [dataclasses.replace(case, name=f"golden-{name}", dtype=dtype, **widths(kernel)) for name, case in named.items()]
    if kind == "statistics":
        return [StatisticsCase(case) for case in found]
    return [TangentCase(0, case) for case in found] if kind.endswith("_tangent") else found


def run(case: object, kernel: dict) -> dict[str, np.ndarray]:
    options = {"deterministic": ordered(kernel)} if kernel["kind"] == "backward" else {}
    return RUNS[kernel["kind"]](case, kernel["name"], device=device_of(kernel), **options)


def ways(kernel: dict, lengths: dict) -> dict[str, dict]:
    """The options with which forward is repeated, without those that the kernel does not support."""
    rows, columns = -(-SEQLEN_Q // BLOCK), -(-SEQLEN_K // BLOCK)
    blocks = torch.ones(1, 1, rows, columns, dtype=torch.bool, device=device_of(kernel)).tril()
    found = {"differing": lengths, "dense": {"causal": True}}
    if supporting([kernel], softcap=20.0):
        found["options"] = {"causal": True, "softcap": 20.0}
    if supporting([kernel], block_mask="h"):
        found["blocks"] = {"block_mask": blocks}
    return found


def calls(kernel: dict) -> dict[str, Callable[[], Tensors]]:
    """The repeated calls, by the names of their figures."""
    kind, name, p = kernel["kind"], kernel["name"], Problem(kernel)
    lengths = {"causal": True}
    if supporting([kernel], used_k=(1,)):
        lengths["seqused_k"] = p.used
    if kind == "forward":
        return {way: functools.partial(p.forward, name, given) for way, given in ways(kernel, lengths).items()}
    if kind == "backward":
        return backward_calls(kernel, p, lengths)
    alone = {
        "decode": lambda: p.decode(name, values=p.v),
        "values in keys": lambda: p.decode(name, values=None),
        "statistics": lambda: p.statistics(name, lengths),
        "forward_tangent": lambda: p.forward_tangent(name, lengths),
        "backward_tangent": lambda: p.backward_tangent(name, lengths, made),
    }
    made = p.forward_tangent(None, lengths) if kind == "backward_tangent" else {}
    return {"differing": alone[kind]}


def backward_calls(kernel: dict, p: Problem, lengths: dict) -> dict[str, Callable[[], Tensors]]:
    made = p.forward(None, lengths)
    default = {"default": lambda: p.backward(kernel["name"], lengths, made, False)}
    return {"differing": lambda: p.backward(kernel["name"], lengths, made, True), **default} if ordered(kernel) else default


class Problem:
    """The tensors of the repeated calls of a kernel. Values that are channels of the keys have one key head."""

    def __init__(self, kernel: dict) -> None:
        self.dtype, self.device, self.kernel = DTYPES[kernel["dtype"]], device_of(kernel), kernel
        self.generator = torch.Generator(self.device).manual_seed(5)
        kind, self.batch = kernel["kind"], batch_of(kernel)
        heads_q, heads_k = (HEADS_Q, HEADS_K) if kind != "values in keys" else (4 * HEADS_Q, 1)
        self.q = self.normal(SEQLEN_Q, heads_q, "head_dim")
        self.k, self.v = self.normal(SEQLEN_K, heads_k, "head_dim"), self.normal(SEQLEN_K, heads_k, "head_dim_v")
        self.dout = self.normal(SEQLEN_Q, heads_q, "head_dim_v")
        used = [(37 * b) % (SEQLEN_K + 1) * (b % 7 != 3) for b in range(self.batch)]
        self.used = torch.tensor(used, dtype=torch.int32, device=self.device)
        like = {"tq": self.q, "tk": self.k, "tv": self.v} if kind.endswith("_tangent") else {}
        self.moves = {name: self.random_like(x) for name, x in like.items()}

    def normal(self, seqlen: int, heads: int, dim: str) -> torch.Tensor:
        shape = (self.batch, seqlen, heads, self.kernel[dim])
        return torch.randn(shape, generator=self.generator, device=self.device).to(self.dtype)

    def random_like(self, x: torch.Tensor) -> torch.Tensor:
        return torch.randn(x.shape, generator=self.generator, device=self.device).to(self.dtype)

    def forward(self, kernel: str | None, given: dict, **more: torch.Tensor) -> Tensors:
        found = libflash.attention(self.q, self.k, self.v, return_lse=True, kernel=kernel, **given, **more)
        return dict(zip(("o", "lse"), found, strict=True))

    def statistics(self, kernel: str, given: dict) -> Tensors:
        rows = {"dtype": wide_type(self.q), "device": self.device}
        made = {name: torch.empty(self.batch, HEADS_Q, SEQLEN_Q, **rows) for name in ("max_logit", "entropy")}
        return self.forward(kernel, given, **made) | made

    def decode(self, kernel: str, values: torch.Tensor | None) -> Tensors:
        options = {"cache_seqlens": self.used, "num_splits": 3, "return_lse": True, "kernel": kernel}
        if values is None:
            options["head_dim_v"] = self.kernel["head_dim_v"]
        return dict(zip(("o", "lse"), libflash.decode(self.q[:, :2], self.k, values, **options), strict=True))

    def backward(self, kernel: str, given: dict, made: Tensors, deterministic: bool) -> Tensors:
        arrays = (self.dout, self.q, self.k, self.v, made["o"], made["lse"])
        found = libflash.attention_backward(*arrays, deterministic=deterministic, kernel=kernel, **given)
        return dict(zip(("dq", "dk", "dv"), found, strict=True))

    def forward_tangent(self, kernel: str | None, given: dict) -> Tensors:
        found = libflash.attention_tangent(self.q, self.k, self.v, **self.moves, kernel=kernel, **given)
        return dict(zip(("o", "lse", "to", "tlse"), found, strict=True))

    def backward_tangent(self, kernel: str, given: dict, made: Tensors) -> Tensors:
        arrays = (self.dout, self.q, self.k, self.v, *(made[name] for name in ("o", "lse", "to", "tlse")))
        found = libflash.attention_backward_tangent(*arrays, **self.moves, kernel=kernel, **given)
        return dict(zip(("tdq", "tdk", "tdv"), found, strict=True))


def batch_of(kernel: dict) -> int:
    """Tangents of float32 and float64, which are slow, have a smaller batch."""
    slow = kernel["kind"].endswith("_tangent") and kernel["dtype"] in ("f32", "f64")
    return -(-BATCH // 4) if slow else BATCH


def copies_beside(device: str) -> Callable[[], None]:
    """Copies on another stream, which use memory bandwidth."""
    if device == "cpu":
        return lambda: None
    other = torch.cuda.Stream()
    source = torch.zeros(HOG_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        with torch.cuda.stream(other):
            target.copy_(source, non_blocking=True)

    torch.cuda.synchronize()
    return copy


def differing(call: Callable[[], Tensors], repeats: int, beside: Callable[[], None]) -> dict[str, int]:
    """For each tensor the number of repeats whose bits differ from the first call's."""
    first = {name: bits(x).clone() for name, x in call().items()}
    counts = {name: torch.zeros((), dtype=torch.int64, device=x.device) for name, x in first.items()}
    for repeat in range(repeats):
        if repeat >= repeats // 2 and repeat % 2 == 0:
            beside()
        for name, x in call().items():
            counts[name] += (bits(x) != first[name]).any()
    return {name: int(count.item()) for name, count in counts.items()}


def allowed(way: str, tensor: str) -> bool:
    """Whether its bits may differ."""
    return way == "default" and tensor in MAY_DIFFER


def entry(kernel: dict, repeats: int) -> tuple[dict, bool]:
    """A kernel's figures, and whether they are as expected."""
    beside = copies_beside(device_of(kernel))
    found = {name: differing(call, repeats, beside) for name, call in calls(kernel).items()}
    once, again = golden(kernel), golden(kernel)
    wrong = any(count for way, counts in found.items() for tensor, count in counts.items() if not allowed(way, tensor))
    return {"kernel": kernel["name"], "golden": once, **found}, not wrong and once == again


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_REPEATS} repeats instead of {REPEATS}")
    options = parser.parse_args()
    repeats = QUICK_REPEATS if options.quick else REPEATS
    kernels = attention_kernels()
    if not kernels:
        sys.exit("no CUDA kernel of attention runs here")
    entries = [entry(kernel, repeats) for kernel in kernels]
    wrong = [found["kernel"] for found, right in entries if not right]
    data = {"repeats": repeats, "kernels": [found for found, _ in entries], "failures": [f"{name}: other bits" for name in wrong]}
    options.out.write_text(json.dumps(data))
    print(f"{len(entries)} kernels, {repeats} repeats each; other bits: {', '.join(wrong) or 'none'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
