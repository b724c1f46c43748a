"""The program that compute-sanitizer runs: a few small problems on every CUDA kernel of attention, those of prefill, shared keys,
statistics and tangents too, merge and cache_write, with checked results.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/evidence/sanitized.py [--quick]
    ... python tests/evidence/sanitized.py --plant        a call whose output is described larger than it is

Each tensor is its own cudaMalloc, so that an access outside a tensor is outside every allocation. All tensors are made on the
host and copied, so that only libflash's kernels run. --plant shows that the tool detects such accesses.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import re
import sys
from types import SimpleNamespace

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(2, str(pathlib.Path(__file__).resolve().parents[1] / "short_names"))
sys.path.insert(3, str(pathlib.Path(__file__).resolve().parents[1] / "capi"))

import numpy as np
import reference_decode
import torch
from case import Case
from decode_cases import DecodeCase
from dlpack_producer import Array
from gpu_case import DTYPES, to_device
from gpu_codes import on_device, on_host, run_cache
from gpu_kernels import TYPES, attention_kernels, device_of, kernels, widths
from gpu_prefill import Step, check_step, copies_caches
from gpu_runs import RUNS
from gpu_shards import check_shards
from gpu_shared_keys import SharedKeys, check_shared_keys
from gpu_tangent import check_backward, check_forward
from libflash.conformance.cache_cases import CacheCase
from libflash.conformance.reference_cache import CODES
from statistics_case import StatisticsCase
from tangent_cases import TangentCase

import libflash

SEVERAL = {"heads_q": 2, "heads_k": 1}
EVERY_OPTION = {"softcap": 20.0, "alibi": "h", "bias": "hqk", "mask": "qk", "sink": True, "dropout_p": 0.25, "dlse": True}
BFLOAT = 4  # DLPack's type code
PARTS_OF_DECODE = ("prefill", "decode_prefix")
# Enough long chunks for a prefill kernel, and sequences that are too short for it.
PREFILL = {"rows": (100, 1, 0, 310), "cached": np.array([500, 20, 0, 90], np.int32)}


def problems(kernel: dict) -> list:
    """Odd sizes, so that the last tiles are partial; more key tiles than pipeline stages. Two problems for a kernel that takes
    special calls only."""
    kind = kernel["kind"]
    if kind == "prefill":
        loaded = [Step(kernel, page, narrower=narrower, **PREFILL) for page, narrower in ((16, 8), (0, 0))]
        codes = [Step(kernel, page, narrower=16, code="e4m3", **PREFILL) for page in (8, 16)]  # copied by threads, by TMA
        return loaded + codes * copies_caches(kernel)
    if kind == "decode_prefix":
        return [SharedKeys(kernel)]
    if kind == "values in keys":
        return in_keys_problems(kernel)
    if kind == "decode":
        return decode_problems(kernel)
    if kind == "statistics":
        return [StatisticsCase(case) for case in attention_problems(kernel)[:2]]
    if kind.endswith("_tangent"):  # with tdelta and gradients; without
        return [TangentCase(number, case) for number, case in enumerate(attention_problems(kernel)[:2])]
    return attention_problems(kernel)


def odd_widths(kernel: dict) -> dict[str, int]:
    return {"head_dim": kernel["head_dim"] - 9, "head_dim_v": kernel["head_dim_v"] - 1}


def attention_problems(kernel: dict) -> list[Case]:
    dtype, full, odd = TYPES[kernel["dtype"]], widths(kernel), odd_widths(kernel)
    cases = {
        "dense": Case("", dtype, 1, 131, 391, causal=True, **full, **SEVERAL),
        "packed": Case("", dtype, 1, (40, 0, 133, 3), (257, 9, 135, 0), slack_rows=3, window_size=(70, 9), **full, **SEVERAL),
        "options": Case("", dtype, 2, 67, 259, used_k=(259, 100), **odd, **EVERY_OPTION, **SEVERAL),
        "blocks": Case("", dtype, 1, 129, 300, block_mask="h", **full, **SEVERAL),
    }
    kind = f"{dtype}-{kernel['head_dim']}x{kernel['head_dim_v']}"  # kernels of one type and head_dim share the exact results
    return [dataclasses.replace(case, name=f"sanitized-{name}-{kind}") for name, case in cases.items()]


@dataclasses.dataclass(frozen=True)
class One:
    """A decode problem that runs once, with these options."""

    case: DecodeCase | CacheCase
    options: dict


@dataclasses.dataclass(frozen=True)
class InShards:
    """A decode problem on two shards of its keys, which are merged."""

    case: DecodeCase


def decode_problems(kernel: dict) -> list[DecodeCase | One | InShards]:
    """Few and many rows, with and without splits, and append to pages; then, each once: packed rows with a tree, codes that the
    attention kernel appends and codes that a kernel of their own appends, invariant rows, shards.
    """
    dtype, full, odd = TYPES[kernel["dtype"]], widths(kernel), odd_widths(kernel)
    lengths = {"lengths": (0, 1, 130, 590), "capacity": 600}
    packed = {"lengths": (70, 5, 130), "seqlen_q": (1, 19, 3), "capacity": 160, "page_size": 16, "slack_rows": 1}
    cases = {
        "pages": {"page_size": 16, "append": 3, "rotary": 32, **full, **lengths},
        "rows": {"seqlen_q": 19, "leftpad": (0, 0, 7, 90), "batch_idx": True, "sink": True, **odd, **lengths},
        "tree": {"append": packed["seqlen_q"], "tree": True, "positions": True, "window_size": (90, 0), **odd, **packed},
        "codes": {"append": 1, "lengths": (0, 70, 130), "capacity": 140, **full},
        "packed-codes": {"append": packed["seqlen_q"], **full, **packed},
        "invariant": {"window_size": (90, 0), "sink": True, **odd, **packed},
        "shards": {"append": packed["seqlen_q"], **odd, **packed},
    }
    made = {name: DecodeCase(f"sanitized-{name}-{dtype}-{kernel['head_dim']}", dtype, **given) for name, given in cases.items()}
    return [
        made["pages"],
        made["rows"],
        One(made["tree"], {"num_splits": 3}),
        One(CacheCase(made["codes"], "int8", "rows"), {"num_splits": 3}),
        One(CacheCase(made["packed-codes"], "e4m3", "groups", group=kernel["head_dim_v"] // 2), {}),
        One(made["invariant"], {"invariant": True}),
        InShards(made["shards"]),
    ]


def in_keys_problems(kernel: dict) -> list[CacheCase]:
    """One tile of query rows and several; dense rows that are appended to pages, and packed ones."""
    dtype, one = TYPES[kernel["dtype"]], {"heads_k": 1, "head_dim": kernel["head_dim"]}
    cases = {
        "dense": {"lengths": (0, 1, 130, 590), "capacity": 600, "seqlen_q": 3, "append": 3, "page_size": 16, "heads_q": 13},
        "packed": {"lengths": (1, 63, 0, 333), "capacity": 340, "seqlen_q": (1, 19, 0, 5), "slack_rows": 2, "heads_q": 37},
    }
    bases = [DecodeCase(f"sanitized-{name}-{dtype}-in-keys", dtype, **given, **one) for name, given in cases.items()]
    return [CacheCase(base, None, "none", head_dim_v=kernel["head_dim_v"]) for base in bases]


SPLITS = [{"num_splits": 1}, {"num_splits": 3}]
MODES = {"decode": SPLITS, "values in keys": SPLITS, "backward": [{"deterministic": False}, {"deterministic": True}]}


def served(case: object, kernel: dict) -> int:
    """Run the case and check its results, backward in both modes; returns the number of runs that were not refused."""
    modes, count = MODES.get(kernel["kind"], [{}]), 0
    if isinstance(case, One):
        case, modes = case.case, [case.options]
    for mode in modes[:1] if isinstance(case, InShards) else modes:
        try:
            run_and_check(case, kernel, mode)
        except libflash.UnsupportedError:
            continue
        count += 1
    return count


def run_and_check(case: object, kernel: dict, mode: dict) -> None:
    device, name = device_of(kernel), kernel["name"]
    if isinstance(case, Step):
        check_step(case, kernel, device, causal=True)
    elif isinstance(case, SharedKeys):
        check_shared_keys(case, kernel, device)
    elif isinstance(case, InShards):
        check_shards(case.case, 2, 16, device, kernel=name)
    elif isinstance(case, TangentCase):
        check = check_forward if kernel["kind"] == "forward_tangent" else check_backward
        check(case, name, device)
    else:
        run = run_cache if isinstance(case, CacheCase) else RUNS[kernel["kind"]]
        case.check(**run(case, name, device=device, **mode))


def run_cache_write(device: str = "cuda") -> None:
    """Rows of 16 bits and codes with computed scales, into slots inside and outside of the cache: the bits of the CPU."""
    rng = np.random.default_rng(2)
    k, v = (rng.standard_normal((7, 2, 72)).astype(np.float16) for _ in range(2))
    slots = np.array([11, -1, 0, 29, 30, 12, 3], np.int32)
    angles = {"rotary_cos": rng.standard_normal((9, 30)), "rotary_sin": rng.standard_normal((9, 30))}
    more = {name: x.astype(np.float32) for name, x in angles.items()} | {"positions": np.arange(2, 9, dtype=np.int32)}
    for code in (np.dtype(np.float16), CODES["int8"]):
        own = {name: np.zeros((6, 5, 2, 72), code) for name in ("k_cache", "v_cache")}
        if code.itemsize == 1:
            own |= {name: np.zeros((6, 5, 2, 9), np.float32) for name in ("k_scale", "v_scale")}
        arrays = own | more | {"k": k, "v": v, "slots": slots}
        given = {name: on_device(x.copy(), device) for name, x in arrays.items()}
        libflash.cache_write(**given)
        libflash.cache_write(k, v, **own, slots=slots, **more)
        for name, wanted in own.items():
            assert on_host(given[name], wanted).tobytes() == wanted.tobytes(), f"cache_write: {name}"
            assert wanted.any()


def run_merge() -> None:
    rng = np.random.default_rng(1)
    outs = [rng.standard_normal((2, 37, 3, 40)).astype(np.float16) for _ in range(3)]
    lses = [rng.standard_normal((2, 3, 37)).astype(np.float32) for _ in range(3)]
    out, lse = libflash.merge([to_device(x) for x in outs], [to_device(x) for x in lses])
    wanted, wanted_lse = reference_decode.merge(np.stack(outs), np.stack(lses))
    np.testing.assert_allclose(out.cpu().numpy(), wanted, atol=2e-3)
    np.testing.assert_allclose(lse.cpu().numpy(), wanted_lse, atol=1e-5)


def plant(kernel: dict) -> None:
    """A call whose output is described with one row more than is allocated."""
    shape = (1, 128, 2, min(kernel["head_dim"], kernel["head_dim_v"]))
    dtype = DTYPES[kernel["dtype"]]
    q, k, v = (torch.ones(shape, dtype=dtype).cuda() for _ in range(3))
    short = torch.zeros((1, shape[1] - 1, *shape[2:]), dtype=dtype).cuda()
    of_size = {torch.float64: np.float64, torch.float32: np.float32}
    stand_in = np.zeros(shape, of_size.get(dtype, np.float16))  # an element of the same size
    described = SimpleNamespace(
        shape=shape,
        strides=stand_in.strides,
        itemsize=stand_in.itemsize,
        ndim=4,
        dtype=stand_in.dtype,
        ctypes=SimpleNamespace(data=short.data_ptr()),
    )
    out = Array(described, device=(2, 0), code=BFLOAT if dtype == torch.bfloat16 else None)  # type: ignore[arg-type]
    libflash.attention(q, k, v, out=out, kernel=kernel["name"])
    torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one kernel of each kind")
    parser.add_argument("--kernels", metavar="REGEX", default="", help="only those in whose name it is found")
    parser.add_argument("--part", metavar="I/N", default="1/1", help="the I-th of N parts of the kernels, counted from 1")
    parser.add_argument("--plant", action="store_true", help="the planted fault alone")
    options = parser.parse_args()
    if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") != "1":
        sys.exit("set PYTORCH_NO_CUDA_MEMORY_CACHING=1: else all tensors share an allocation, and no access is out of bounds")
    of_decode = [kernel | {"kind": kind} for kind in PARTS_OF_DECODE for kernel in kernels(kind) if kernel["usable"]]
    every = attention_kernels() + of_decode
    if not every:
        sys.exit("no CUDA kernel of attention runs here")
    if options.plant:
        plant(next(kernel for kernel in every if kernel["kind"] == "forward"))
        print("planted: nothing stopped it")
        return 0
    some = list({kernel["kind"]: kernel for kernel in every}.values()) if options.quick else every
    part, parts = map(int, options.part.split("/"))
    some = [kernel for kernel in some if re.search(options.kernels, kernel["name"])][part - 1 :: parts]
    counts = {kernel["name"]: sum(served(case, kernel) for case in problems(kernel)) for kernel in some}
    first = part == 1
    if first:
        run_merge()
        run_cache_write()
    unused = [name for name, count in counts.items() if not count]
    if unused:
        sys.exit(f"served none of the problems: {', '.join(unused)}")
    print(f"ran: {sum(counts.values()) + 2 * first} problems, {len(some) + 2 * first} kernels")
    return 0


if __name__ == "__main__":
    sys.exit(main())
