"""Host time of a call: libflash.attention on tiny arrays, in microseconds, compared with PyTorch's own call.

    python tests/benchmark/host_cost.py
    python tests/benchmark/host_cost.py --at-most 10     exit code 1 if a libflash.attention takes longer
    python tests/benchmark/host_cost.py --device cuda    tensors on a GPU: the time until the call returns, without waiting for
    the GPU

Each figure is the median over batches of calls; `best` is the fastest batch, which other work on the machine disturbs least;
--at-most is a limit for it. PyTorch's lines need PyTorch.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

import libflash

SHAPE = (1, 4, 2, 16)  # batch, seqlen, heads, head_dim
BATCHES, CALLS = 40, 500  # on a GPU the calls of a batch are all queued; the host waits if there are more than 1024


def microseconds(call: Callable[[], object], settle: Callable[[], object]) -> tuple[float, float]:
    """(median, best) of a call; `settle` before each batch, untimed."""
    for _ in range(CALLS):
        call()
    times = []
    for _ in range(BATCHES):
        settle()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append(1e6 * (time.perf_counter() - start) / CALLS)
    return statistics.median(times), min(times)


def numpy_calls() -> dict[str, Callable[[], object]]:
    q, k, v, out = (np.ones(SHAPE, np.float32) for _ in range(4))
    return {
        "libflash.attention, NumPy": lambda: libflash.attention(q, k, v),
        "libflash.attention, NumPy, causal, with out=": lambda: libflash.attention(q, k, v, causal=True, out=out),
    }


def torch_calls(device: str) -> dict[str, Callable[[], object]]:
    import torch  # NumPy's calls do not need it

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v, out = (torch.ones(SHAPE, dtype=dtype, device=device) for _ in range(4))
    swapped = [x.transpose(1, 2) for x in (q, k, v)]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    torch.set_grad_enabled(False)
    return {
        "libflash.attention, PyTorch": lambda: libflash.attention(q, k, v),
        "libflash.attention, PyTorch, causal, with out=": lambda: libflash.attention(q, k, v, causal=True, out=out),
        "scaled_dot_product_attention, PyTorch": lambda: sdpa(*swapped),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at-most", type=float, metavar="US", help="microseconds that a libflash.attention may take")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the tensors are (default: %(default)s)")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the figures")
    options = parser.parse_args()
    if options.device == "cuda":
        import torch

        calls, settle, kind = torch_calls("cuda"), torch.cuda.synchronize, "bfloat16 on a GPU"
    else:
        calls = numpy_calls() | (torch_calls("cpu") if importlib.util.find_spec("torch") else {})
        settle, kind = lambda: None, f"float32, {libflash.get_num_threads()} threads"
    print(f"arrays of {SHAPE}, {kind}\n{'microseconds a call':<50}{'median':>8}{'best':>8}")
    slow, figures = [], {}
    for name, call in calls.items():
        median, best = microseconds(call, settle)
        figures[name] = {"median": round(median, 2), "best": round(best, 2)}
        print(f"{name:<50}{median:8.2f}{best:8.2f}", flush=True)
        if options.at_most is not None and name.startswith("libflash") and best > options.at_most:
            slow.append(name)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    for name in slow:
        print(f"{name}: above {options.at_most:g} microseconds", file=sys.stderr)
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
