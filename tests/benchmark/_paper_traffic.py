"""Operations, memory traffic and time of one step of attention: the table of the FlashAttention paper, in its GPT-2 shape.

Traffic is computed (bytes that the thread blocks of each kernel read and write, cached or not) and, if ncu is installed, measured
(bytes to and from DRAM).
"""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys

import torch
from _cells import PASSES, Cell
from _gpu_contenders import OURS, problem
from _gpu_timing import medians
from _paper_contenders import SLACK, contenders
from gpu_attention import compare

BATCH, SEQLEN, HEADS, HEAD_DIM = 64, 1024, 16, 64
QUICK_BATCH = 8
METHODS = ("standard", "flash1", OURS)
METRICS = {"read": "dram__bytes_read.sum", "written": "dram__bytes_write.sum"}
UNITS = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}
NCU_SECONDS = 60


def cell(direction: str, quick: bool) -> Cell:
    return Cell(direction, "bfloat16", HEAD_DIM, SEQLEN, False, QUICK_BATCH if quick else BATCH, HEADS)


def gflop(method: str, one: Cell) -> float:
    """Matrix products of the method. Standard attention keeps P; the others compute it again in the backward pass."""
    products = {"forward": 2, "backward": 4 if method == "standard" else 5}[one.direction]
    return products * 2 * one.batch * one.heads * one.seqlen**2 * one.head_dim / 1e9


def tiles(seqlen: int, tile: int) -> int:
    return -(-seqlen // tile)


def standard_bytes(one: Cell) -> float:
    """S, P (dP, dS) once per kernel that reads or writes them, tensors once per kernel; 16 bits per number."""
    matrix, tensor = one.seqlen**2, one.seqlen * one.head_dim
    numbers = 4 * matrix + 4 * tensor if one.direction == "forward" else 7 * matrix + 8 * tensor
    return 2 * numbers * one.batch * one.heads


def flash1_bytes(one: Cell) -> float:
    """baselines/flash1_*.cu: per key tile all of Q (and dO), and the running sums, 32 bits a number, read and written."""
    tensor = one.seqlen * one.head_dim
    passes = tiles(one.seqlen, 256 if one.direction == "forward" else 128)
    statistics = 4 * one.seqlen
    if one.direction == "forward":
        each = 2 * (2 + 1) * tensor + passes * (2 * tensor + 4 * statistics) + (passes - 1) * 8 * tensor
    else:
        each = 2 * (2 + 4 + 1) * tensor + passes * (2 * 2 * tensor + 3 * statistics) + (passes - 1) * 8 * tensor
    return each * one.batch * one.heads


def libflash_bytes(one: Cell) -> float:
    """Per tile of 128 queries all of K and V; backward per tile of 128 keys all of Q and dO, and the sums of dQ in 32 bits."""
    tensor, passes, statistics = one.seqlen * one.head_dim, tiles(one.seqlen, 128), 4 * one.seqlen
    if one.direction == "forward":
        each = 2 * 2 * tensor + statistics + passes * 2 * 2 * tensor
    else:
        each = (
            2 * (2 + 4 + 1) * tensor + 2 * 4 * tensor + 3 * statistics + passes * (2 * 2 * tensor + 4 * tensor + 2 * statistics)
        )
    return each * one.batch * one.heads


COUNTED = {"standard": standard_bytes, "flash1": flash1_bytes, OURS: libflash_bytes}


def measure(quick: bool) -> list[dict]:
    """One result per method: forward and backward together."""
    entries = {name: {"method": name, "gflop": 0.0, "gb_counted": 0.0, "ms": 0.0} for name in METHODS}
    for direction in PASSES:
        one = cell(direction, quick)
        p = problem(one)
        calls = {name: contender(p) for name, contender in contenders(one).items() if name in METHODS}
        compare(one, calls, SLACK)
        ms, _ = medians(calls, rounds=3, replay_ms=15.0)
        for name, entry in entries.items():
            entry["gflop"] += gflop(name, one)
            entry["gb_counted"] += COUNTED[name](one) / 1e9
            entry["ms"] += ms[name]
        torch.cuda.empty_cache()
    measured = dram_bytes(quick)
    return [
        {key: value if isinstance(value, str) else float(f"{value:.4g}") for key, value in entry.items()}
        | {"gb_measured": None if measured is None else float(f"{measured[name] / 1e9:.4g}")}
        for name, entry in entries.items()
    ]


def dram_bytes(quick: bool) -> dict[str, float] | None:
    """Bytes by method, measured in a separate process under ncu; None and the reason if that fails."""
    ncu = shutil.which("ncu")
    if not ncu:
        print("memory traffic is not measured: no ncu", file=sys.stderr)
        return None
    options = ["--profile-from-start", "off", "--clock-control", "none", "--cache-control", "none", "--csv", "--page", "raw"]
    child = [sys.executable, __file__, *(["--quick"] if quick else [])]
    try:
        done = subprocess.run(
            [ncu, *options, "--metrics", ",".join(METRICS.values()), *child],
            capture_output=True,
            text=True,
            check=False,
            timeout=NCU_SECONDS,
        )
    except subprocess.TimeoutExpired:
        print(f"memory traffic is not measured: ncu took more than {NCU_SECONDS} s", file=sys.stderr)
        return None
    if done.returncode != 0:
        print(f"memory traffic is not measured: ncu: {(done.stderr + done.stdout).strip()[-300:]}", file=sys.stderr)
        return None
    return by_method(done.stdout)


def by_method(text: str) -> dict[str, float]:
    """Parse ncu's table: a line of names, one of units, and one per kernel. The kernel's name gives the method."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith('"ID"'))
    names, units, *kernels = csv.reader(lines[start:])
    columns = [names.index(metric) for metric in METRICS.values()]
    total = dict.fromkeys(METHODS, 0.0)
    for kernel in kernels:
        name = kernel[names.index("Kernel Name")]
        owner = next((method for method in ("standard", "flash1") if f"{method}_" in name), OURS)
        total[owner] += sum(float(kernel[i].replace(",", "")) * UNITS[units[i]] for i in columns)
    return total


@torch.no_grad()
def under_ncu(quick: bool) -> None:
    """One step of each method, between the calls that start and stop ncu's profiler."""
    made = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for direction in PASSES:
            one = cell(direction, quick)
            p = problem(one)
            made += [contender(p) for name, contender in contenders(one).items() if name in METHODS]
        for call in made:
            call()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        for call in made:
            call()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()


if __name__ == "__main__":
    under_ncu("--quick" in sys.argv)
