"""Standard attention and FlashAttention-1, the methods that the papers compare with, as kernels in baselines/.

nvcc compiles them when they are first used; build/baselines/ keeps the libraries, one for each hash of the sources. Tensors are
PyTorch tensors (batch, seqlen, heads, head_dim), contiguous, fp16 or bf16, head_dim 64 or 128, with as many queries as keys.
PyTorch's allocator provides the memory. Calls are asynchronous on PyTorch's current stream.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import fcntl
import functools
import hashlib
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "support"))

from nvcc import architecture, find_nvcc  # noqa: E402

FOLDER = pathlib.Path(__file__).parent / "baselines"
CACHE = ROOT / "build" / "baselines"
SOURCES = ("standard.cu", "flash1_forward.cu", "flash1_backward.cu")
TYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}
HEAD_DIMS = (64, 128)
LONGEST_STANDARD = 16384  # rows.cuh
STATISTICS_ROWS = 64  # softmax statistics are padded to whole tiles


class NoCompiler(Exception):
    """nvcc was not found, and there is no library of an earlier build."""


def compile_command(nvcc: str, arch: str, source: str, dtype: str) -> list[str]:
    """The compiler's command, without the options for the kind of output and its path."""
    number = arch.removeprefix("sm_")
    options = ["-std=c++17", "-O3", f"-gencode=arch=compute_{number},code={arch}", "-Xcompiler=-fPIC", f"-DBASELINE_TYPE={dtype}"]
    return [nvcc, *options, f"-I{ROOT / 'libflash'}", f"-I{FOLDER}", str(FOLDER / source)]


def fingerprint(arch: str) -> str:
    """Hash of everything that a library depends on."""
    device_code = [ROOT / "libflash" / "cuda" / folder for folder in ("ptx", "tile")]
    files = sorted(path for folder in (FOLDER, *device_code) for path in folder.iterdir() if path.is_file())
    made_of = hashlib.sha256(" ".join([arch, *compile_command("nvcc", arch, "", "")[1:4]]).encode())
    for path in files:
        made_of.update(path.name.encode() + b"\0" + path.read_bytes())
    return made_of.hexdigest()[:16]


def build(arch: str) -> pathlib.Path:
    """The shared library for one architecture, compiled if there is none yet. One of several processes compiles it."""
    library = CACHE / f"{fingerprint(arch)}-{arch}.so"
    if library.exists():
        return library
    nvcc = find_nvcc()
    if not nvcc:
        raise NoCompiler("the baselines are compiled by nvcc, and there is none in PATH, CUDA_HOME or CUDA_PATH")
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock, tempfile.TemporaryDirectory(dir=CACHE) as folder:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            compiled(nvcc, arch, pathlib.Path(folder)).rename(library)
    return library


def compiled(nvcc: str, arch: str, folder: pathlib.Path) -> pathlib.Path:
    parts = {folder / f"{dtype}-{source}.o": (source, dtype) for source in SOURCES for dtype in TYPES.values()}
    with concurrent.futures.ThreadPoolExecutor(min(len(parts), os.cpu_count() or 1)) as pool:
        commands = [[*compile_command(nvcc, arch, *what), "-c", "-o", str(part)] for part, what in parts.items()]
        list(pool.map(run, commands))
    library = folder / "baselines.so"
    run([nvcc, "-shared", "-cudart=static", "-o", str(library), *map(str, parts)])
    return library


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)}\n{done.stdout}{done.stderr}")


@functools.cache
def library() -> ctypes.CDLL:
    arch = architecture()
    if not arch:
        raise RuntimeError("the baselines run on a GPU, and there is none")
    return ctypes.CDLL(str(build(arch)))


POINTERS = (
    *("q", "k", "v", "dout", "out", "dq", "dk", "dv", "scores", "weights", "dweights", "dscores"),
    *("out_sums", "dq_sums", "row_max", "row_sum", "delta"),
)
NUMBERS = ("batch", "seqlen", "heads", "head_dim", "pitch", "statistics_pitch", "causal", "splits")


class Problem(ctypes.Structure):
    """baselines/problem.h"""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int32) for name in NUMBERS),
        ("softmax_scale", ctypes.c_float),
    )


def rounded_up(x: int, step: int) -> int:
    return -(-x // step) * step


def call(function: str, q: torch.Tensor, causal: bool, splits: int = 1, **tensors: torch.Tensor) -> None:
    """Enqueues one of the library's functions; `tensors` by their names in problem.h."""
    batch, seqlen, heads, head_dim = q.shape
    if q.dtype not in TYPES or head_dim not in HEAD_DIMS:
        raise ValueError(f"{function}: q is {q.dtype} with head_dim {head_dim}; known are fp16, bf16 and {HEAD_DIMS}")
    for name, x in {"q": q, **tensors}.items():
        if not x.is_contiguous():
            raise ValueError(f"{function}: {name} must be contiguous")
    problem = Problem(
        **{name: x.data_ptr() for name, x in {"q": q, **tensors}.items()},
        **{"batch": batch, "seqlen": seqlen, "heads": heads, "head_dim": head_dim},
        **{"pitch": rounded_up(seqlen, 8), "statistics_pitch": rounded_up(seqlen, STATISTICS_ROWS)},
        **{"causal": int(causal), "splits": splits, "softmax_scale": head_dim**-0.5},
    )
    launch = getattr(library(), f"{function}_{TYPES[q.dtype]}")
    error = launch(ctypes.byref(problem), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
    if error:
        raise RuntimeError(f"{function}: CUDA error {error}")


def score_matrix(q: torch.Tensor) -> torch.Tensor:
    batch, seqlen, heads, _ = q.shape
    return torch.empty((batch, heads, seqlen, rounded_up(seqlen, 8)), dtype=q.dtype, device=q.device)


def row_statistics(q: torch.Tensor) -> torch.Tensor:
    batch, seqlen, heads, _ = q.shape
    return torch.empty((batch, heads, rounded_up(seqlen, STATISTICS_ROWS)), dtype=torch.float32, device=q.device)


def float_sums(q: torch.Tensor) -> torch.Tensor:
    batch, seqlen, heads, head_dim = q.shape
    return torch.empty((batch, heads, seqlen, head_dim), dtype=torch.float32, device=q.device)


def standard_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, weights); weights, the matrix P, are (batch, heads, seqlen, seqlen rounded up to 8)."""
    if q.shape[1] > LONGEST_STANDARD:
        raise ValueError(f"seqlen is {q.shape[1]}; standard attention keeps a row in registers, {LONGEST_STANDARD} at most")
    out, weights = torch.empty_like(q), score_matrix(q)
    call("standard_forward", q, causal, k=k, v=v, out=out, scores=score_matrix(q), weights=weights)
    return out, weights


def standard_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, weights: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, ...]:
    """(dq, dk, dv)"""
    made = {name: torch.empty_like(q) for name in ("dq", "dk", "dv")}
    matrices = {"weights": weights, "dweights": score_matrix(q), "dscores": score_matrix(q)}
    call("standard_backward", q, causal, k=k, v=v, dout=dout, **matrices, **made)
    return tuple(made.values())


def flash1_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, splits: int = 1
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(out, softmax statistics); `splits` thread blocks share a head, 1 in the paper."""
    out, statistics = torch.empty_like(q), {"row_max": row_statistics(q), "row_sum": row_statistics(q)}
    call("flash1_forward", q, causal, splits, k=k, v=v, out=out, out_sums=float_sums(q), **statistics)
    return out, statistics


def flash1_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    statistics: dict[str, torch.Tensor],
    causal: bool,
    splits: int = 1,
) -> tuple[torch.Tensor, ...]:
    """(dq, dk, dv)"""
    made = {name: torch.empty_like(q) for name in ("dq", "dk", "dv")}
    scratch = {"dq_sums": float_sums(q), "delta": row_statistics(q)}
    call("flash1_backward", q, causal, splits, k=k, v=v, dout=dout, out=out, **statistics, **scratch, **made)
    return tuple(made.values())


def splits_that_fill(q: torch.Tensor) -> int:
    """Thread blocks per head: the largest power of two with which all thread blocks run at once."""
    batch, _, heads, head_dim = q.shape
    fit_at_once = torch.cuda.get_device_properties(q.device).multi_processor_count * (2 if head_dim == 64 else 1)
    splits = 1
    while 2 * splits * batch * heads <= fit_at_once:
        splits *= 2
    return splits
