"""Peak memory against sequence length: one attention call in its own process, and the growth of that process's peak.

    python tests/benchmark/memory.py                       forward and backward, causal, 2 heads of 64, float32
    python tests/benchmark/memory.py --longest 65536

The result itself (out; or dq, dk, dv) is counted apart from the memory that the call needs in addition. That of libflash may
grow with the length, not with its square: exit code 1 if a doubling of the length multiplies it by more than 3 and it is more
than noise. `standard` is torch with every score in memory, `sdpa` is torch's own fused kernel; both only where torch is
installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import math
import subprocess
import sys
from collections.abc import Callable

import numpy as np
from libflash.demo.memory import peak_growth

import libflash

HEADS, HEAD_DIM = 2, 64
STANDARD_LIMIT = 2e9  # bytes of scores
NOISE = 16 << 20  # smaller peaks are not reliable: an allocator may have had a part of the memory before


def measure(method: str, direction: str, seqlen: int, threads: int) -> int:
    """Bytes by which the peak of this process grows during one call."""
    prepare = libflash_call if method == "libflash" else torch_call
    prepare(method, direction, 256, threads)()  # so that threads and lazily loaded code are not measured
    return peak_growth(prepare(method, direction, seqlen, threads))[1]


def random_tensors(seqlen: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((1, seqlen, HEADS, HEAD_DIM), dtype=np.float32) for _ in range(4)]


def libflash_call(_: str, direction: str, seqlen: int, threads: int) -> Callable[[], object]:
    libflash.set_num_threads(threads)
    q, k, v, dout = random_tensors(seqlen)
    if direction == "forward":
        return lambda: libflash.attention(q, k, v, causal=True)
    out, lse = libflash.attention(q, k, v, causal=True, return_lse=True)
    return lambda: libflash.attention_backward(dout, q, k, v, out, lse, causal=True)


def torch_call(method: str, direction: str, seqlen: int, threads: int) -> Callable[[], object]:
    import torch  # imported here, because its memory must not be in libflash's process
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.set_num_threads(threads)
    q, k, v, dout = (torch.from_numpy(x).transpose(1, 2) for x in random_tensors(seqlen))
    backend = SDPBackend.MATH if method == "standard" else SDPBackend.FLASH_ATTENTION

    def forward() -> torch.Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    if direction == "forward":
        return forward
    for x in (q, k, v):
        x.requires_grad_()
    out = forward()
    return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)


def measure_apart(*arguments: object) -> int | None:
    """Measured in a new process; None if that died, most likely without enough memory."""
    command = [sys.executable, __file__, "--child", json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0 and done.stderr:
        sys.exit(done.stderr)
    return int(done.stdout) if done.returncode == 0 else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--longest", type=int, default=32768, help="sequence length (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(measure(*options.child))
        return 0
    methods = ["libflash"] + (["sdpa", "standard"] if importlib.util.find_spec("torch") else [])
    seqlens = [n for n in (1024 << i for i in range(32)) if n <= options.longest]
    bad = 0
    for direction in ("forward", "backward"):
        print(f"{direction}, MB beyond the result:\n{'seqlen':>8}{'result':>10}" + "".join(f"{m:>12}" for m in methods))
        bad += not table(direction, seqlens, methods, options.threads)
    return 1 if bad else 0


def table(direction: str, seqlens: list[int], methods: list[str], threads: int) -> bool:
    """Print a line for each length. True if libflash's memory grows linearly."""
    beyond: list[float] = []
    for seqlen in seqlens:
        result = seqlen * HEADS * HEAD_DIM * 4 * (1 if direction == "forward" else 3)
        texts = []
        for method in methods:
            size = measured(method, direction, seqlen, threads)
            texts.append("-" if size is None else f"{max(size - result, 0) / 1e6:.1f}")
            if method == "libflash":
                beyond.append(math.inf if size is None else max(size - result, 0))
        print(f"{seqlen:8}{result / 1e6:10.1f}" + "".join(f"{text:>12}" for text in texts), flush=True)
    return all(b <= max(3 * a, NOISE) and math.isfinite(b) for a, b in itertools.pairwise(beyond))


def measured(method: str, direction: str, seqlen: int, threads: int) -> int | None:
    if method == "standard" and HEADS * seqlen**2 * 4 > STANDARD_LIMIT:
        return None
    return measure_apart(method, direction, seqlen, threads)


if __name__ == "__main__":
    sys.exit(main())
