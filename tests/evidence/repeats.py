"""Are the bits the same again? Every CUDA forward kernel, many times on one problem; and hashes of its outputs on fixed cases.

    python tests/evidence/repeats.py OUT.json [--quick]

The problem has a batch of 60, lengths that differ, empty ones among them. Half of the repeats run beside copies on another stream
that take the memory's bandwidth. A hash belongs to a GPU and a toolkit: built by another compiler a kernel may round otherwise.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import cases
import torch
from accuracy import TYPES, widths
from gpu_case import forward_kernels, run_forward

import libflash

GOLDEN = ("fill-randn-{}-causal", "fill-mean-{}")
REPEATS, QUICK_REPEATS = 1000, 50
HOG_BYTES = 1 << 28


def golden(kernel: dict) -> str:
    """Hash of o and lse on the fixed cases; their inputs are the same on every machine."""
    total = hashlib.sha256()
    for name in GOLDEN:
        case = cases.by_name(name.format(TYPES[kernel["dtype"]]))
        case = dataclasses.replace(case, name=f"golden-{case.name}", **widths(kernel))
        result = run_forward(case, kernel["name"])
        case.check(**result)
        for tensor in ("o", "lse"):
            total.update(result[tensor].tobytes())
    return total.hexdigest()[:32]


def differing(kernel: dict, repeats: int) -> int:
    """How many of the repeats gave other bits than the first run."""
    dtype = {"f16": torch.float16, "bf16": torch.bfloat16}[kernel["dtype"]]
    generator = torch.Generator("cuda").manual_seed(5)
    batch, seqlen_q, seqlen_k = 60, 190, 333
    dim, dim_v = kernel["head_dim"], kernel["head_dim_v"]
    shapes = (batch, seqlen_q, 4, dim), (batch, seqlen_k, 2, dim), (batch, seqlen_k, 2, dim_v)
    q, k, v = (torch.randn(*shape, generator=generator, device="cuda").to(dtype) for shape in shapes)
    used = torch.tensor([(37 * b) % (seqlen_k + 1) * (b % 7 != 3) for b in range(batch)], dtype=torch.int32, device="cuda")

    def once() -> tuple[torch.Tensor, torch.Tensor]:
        return libflash.attention(q, k, v, causal=True, seqused_k=used, return_lse=True, kernel=kernel["name"])

    def bits(x: torch.Tensor) -> torch.Tensor:
        return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)

    first = [bits(x).clone() for x in once()]
    other = torch.cuda.Stream()
    source = torch.zeros(HOG_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    count = torch.zeros((), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    for repeat in range(repeats):
        if repeat >= repeats // 2 and repeat % 2 == 0:
            with torch.cuda.stream(other):
                target.copy_(source, non_blocking=True)
        same = [(bits(x) == known).all() for x, known in zip(once(), first, strict=True)]
        count += ~(same[0] & same[1])
    torch.cuda.synchronize()
    return int(count.item())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_REPEATS} repeats instead of {REPEATS}")
    options = parser.parse_args()
    repeats = QUICK_REPEATS if options.quick else REPEATS
    kernels = forward_kernels()
    if not kernels:
        sys.exit("no CUDA forward kernel runs here")
    rows = [{"kernel": k["name"], "golden": golden(k), "again": golden(k), "differing": differing(k, repeats)} for k in kernels]
    wrong = [row["kernel"] for row in rows if row["differing"] or row["golden"] != row["again"]]
    for row in rows:
        row.pop("again")
    options.out.write_text(json.dumps({"repeats": repeats, "kernels": rows, "failures": [f"{k}: other bits" for k in wrong]}))
    print(f"{len(rows)} kernels, {repeats} repeats each; other bits: {', '.join(wrong) or 'none'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
