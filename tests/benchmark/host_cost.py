"""What a call costs beside the arithmetic: one libflash.attention on tiny arrays, in microseconds, beside PyTorch's own call.

    python tests/benchmark/host_cost.py
    python tests/benchmark/host_cost.py --at-most 10     exit code 1 if a libflash.attention takes longer

Each figure is the median over batches of calls; `best` is the fastest batch, which other work on the machine disturbs least,
and which --at-most looks at. PyTorch's rows are left out where it is not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

import libflash

SHAPE = (1, 4, 2, 16)  # batch, seqlen, heads, head_dim
BATCHES, CALLS = 40, 500


def microseconds(call: Callable[[], object]) -> tuple[float, float]:
    """(median, best) of a call."""
    for _ in range(CALLS):
        call()
    times = []
    for _ in range(BATCHES):
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


def torch_calls() -> dict[str, Callable[[], object]]:
    import torch  # NumPy's rows do without

    q, k, v, out = (torch.ones(SHAPE) for _ in range(4))
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
    options = parser.parse_args()
    calls = numpy_calls() | (torch_calls() if importlib.util.find_spec("torch") else {})
    print(
        f"arrays of {SHAPE}, float32, {libflash.get_num_threads()} threads\n{'microseconds a call':<50}{'median':>8}{'best':>8}"
    )
    slow = []
    for name, call in calls.items():
        median, best = microseconds(call)
        print(f"{name:<50}{median:8.2f}{best:8.2f}", flush=True)
        if options.at_most is not None and name.startswith("libflash") and best > options.at_most:
            slow.append(name)
    for name in slow:
        print(f"{name}: above {options.at_most:g} microseconds", file=sys.stderr)
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
