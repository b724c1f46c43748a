"""Are results reproducible? Every CUDA kernel of attention, many times on one problem; and hashes of results of fixed cases.

    python tests/evidence/repeats.py OUT.json [--quick]

The problem has a batch of 60 and different lengths, some 0. Forward is also repeated without lengths (`dense`), with rare options
(`options`) and with a block mask (`blocks`), because tile schedules differ then. Half of the repeats run at the same time as
copies on another stream, which use memory bandwidth. `differing` and these fields count for each tensor the repeats whose bits
differ from the first result: 0 is expected. Backward runs with deterministic=True; without it (`default`) dq may differ, whose
sums have no fixed order, but dk and dv may not.
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

import cases
import numpy as np
import torch
from decode_cases import DecodeCase
from gpu_case import DTYPES, bits, run_backward, run_forward
from gpu_decode import run_decode
from gpu_kernels import TYPES, attention_kernels, device_of, supporting, widths

import libflash

GOLDEN = ("fill-randn-{}-causal", "fill-mean-{}")
GOLDEN_DECODE = {"lengths": (0, 1, 130, 700), "capacity": 720, "seqlen_q": 2, "page_size": 16, "append": 2, "rotary": 32}
REPEATS, QUICK_REPEATS = 1000, 50
HOG_BYTES = 1 << 28
BLOCK = 128
BATCH, SEQLEN_Q, SEQLEN_K, HEADS_Q, HEADS_K = 60, 190, 333, 4, 2
MAY_DIFFER = {"dq"}  # without deterministic=True

Tensors = dict[str, torch.Tensor]


def golden(kernel: dict) -> str:
    """Hash of the results on the fixed cases; their inputs are the same on every machine."""
    total = hashlib.sha256()
    for case in golden_cases(kernel):
        result = run(case, kernel)
        case.check(**result)
        for name, tensor in result.items():
            if name not in MAY_DIFFER or ordered(kernel):
                total.update(tensor.tobytes())
    return total.hexdigest()[:32]


def ordered(kernel: dict) -> bool:
    """Whether it can be deterministic."""
    return bool(supporting([kernel], deterministic=True))


def golden_cases(kernel: dict) -> list[cases.Case] | list[DecodeCase]:
    dtype = TYPES[kernel["dtype"]]
    if kernel["operation"] == "decode":
        return [DecodeCase(f"golden-{dtype}-{kernel['head_dim']}", dtype, **GOLDEN_DECODE, **widths(kernel))]
    found = {name.format(dtype): cases.by_name(name.format("fp32")) for name in GOLDEN}
    return [dataclasses.replace(case, name=f"golden-{name}", dtype=dtype, **widths(kernel)) for name, case in found.items()]


def run(case: cases.Case | DecodeCase, kernel: dict) -> dict[str, np.ndarray]:
    device = device_of(kernel)
    if isinstance(case, DecodeCase):
        return run_decode(case, kernel["name"], device)
    if kernel["operation"] == "forward":
        return run_forward(case, kernel["name"], device)
    return run_backward(case, kernel["name"], ordered(kernel), device)


def ways(kernel: dict, lengths: dict) -> dict[str, dict]:
    """The options with which forward is repeated, those that the kernel supports."""
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
    device, name = device_of(kernel), kernel["name"]
    dtype = DTYPES[kernel["dtype"]]
    generator = torch.Generator(device).manual_seed(5)

    def normal(seqlen: int, heads: int, dim: str) -> torch.Tensor:
        return torch.randn(BATCH, seqlen, heads, kernel[dim], generator=generator, device=device).to(dtype)

    q, k = normal(SEQLEN_Q, HEADS_Q, "head_dim"), normal(SEQLEN_K, HEADS_K, "head_dim")
    v, dout = normal(SEQLEN_K, HEADS_K, "head_dim_v"), normal(SEQLEN_Q, HEADS_Q, "head_dim_v")
    used = [(37 * b) % (SEQLEN_K + 1) * (b % 7 != 3) for b in range(BATCH)]
    options = {"causal": True}
    if supporting([kernel], used_k=(1,)):
        options["seqused_k"] = torch.tensor(used, dtype=torch.int32, device=device)

    def forward(kernel: str | None, given: dict) -> Tensors:
        return dict(zip(("o", "lse"), libflash.attention(q, k, v, return_lse=True, kernel=kernel, **given), strict=True))

    def decode() -> Tensors:
        found = libflash.decode(q[:, :2], k, v, cache_seqlens=options["seqused_k"], num_splits=3, return_lse=True, kernel=name)
        return dict(zip(("o", "lse"), found, strict=True))

    if kernel["operation"] == "decode":
        return {"differing": decode}
    if kernel["operation"] == "forward":
        return {way: functools.partial(forward, name, given) for way, given in ways(kernel, options).items()}
    made = forward(None, options)

    def backward(deterministic: bool) -> Tensors:
        given = (dout, q, k, v, made["o"], made["lse"])
        found = libflash.attention_backward(*given, deterministic=deterministic, kernel=name, **options)
        return dict(zip(("dq", "dk", "dv"), found, strict=True))

    default = {"default": lambda: backward(False)}
    return {"differing": lambda: backward(True), **default} if ordered(kernel) else default


def hog(device: str) -> Callable[[], None]:
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
    beside = hog(device_of(kernel))
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
