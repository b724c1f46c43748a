"""The sums of tests/test_long_sums.py on a GPU, where the adders of tensor cores truncate."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from gpu_kernels import device_of, parameters, with_cpu
from harness import random
from long_sums import LONG, SCORES, exact, problem, ulps, values

import libflash

torch = pytest.importorskip("torch")
from gpu_case import to_device, to_numpy  # noqa: E402  (needs torch)

DTYPES = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}  # bf16: of the CPU kernel
NO_ROOM = "forward_sm90_f16_d192"  # has no registers for more than 32768 keys
HEAD_DIMS = (64, 128, 192, 256)  # 192: with two values of head_dim_v
ULPS = 1.01


def long_kernels(operation: str) -> list:
    """The kernels for fp16, and a CPU kernel, so that the tests run without a GPU."""
    candidates = [k for k in with_cpu(operation) if k["dtype"] == "f16" or k["backend"] == "cpu"]
    return parameters([k for k in candidates if k["head_dim"] in HEAD_DIMS and k["name"] != NO_ROOM])


def wide(x: np.ndarray, channels: int, device: str, repeat: bool) -> torch.Tensor:
    """On the device, with more channels: zeros, or the same ones again."""
    part = to_device(x, device)
    if repeat:
        return part.repeat(1, 1, 1, channels // x.shape[-1])
    made = torch.zeros((*x.shape[:-1], channels), dtype=part.dtype, device=part.device)
    made[..., : x.shape[-1]] = part
    return made


def call(function: Callable, kernel: dict, q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: object) -> tuple:
    """out and lse of `kernel`, with as many channels as it has: q and k get zeros, v is repeated."""
    device = device_of(kernel)
    return function(
        wide(q, kernel["head_dim"], device, repeat=False),
        wide(k, kernel["head_dim"], device, repeat=False),
        wide(v, kernel["head_dim_v"], device, repeat=True),
        softmax_scale=1.0,
        return_lse=True,
        kernel=kernel["name"],
        **options,
    )


def check(kernel: dict, out: torch.Tensor, lse: torch.Tensor, expected: tuple[np.ndarray, np.ndarray]) -> None:
    """out: rows and channels; the channels repeat those of the expected result."""
    got = to_numpy(out, DTYPES[kernel["dtype"]])
    assert not np.isnan(got.astype(np.float32)).any()
    distances = [ulps(got[:, first : first + 4], expected[0]) for first in range(0, got.shape[1], 4)]
    assert max(distances) <= ULPS
    assert np.abs(lse.cpu().numpy() - expected[1]).max() <= 3e-5


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("kernel", long_kernels("forward"))
def test_forward(kernel: dict, scores: str) -> None:
    """Several query tiles of three different rows."""
    dtype, device = DTYPES[kernel["dtype"]], device_of(kernel)
    keys, times = (LONG, 100) if device == "cuda" else (LONG >> 4, 2)
    q, k = problem(scores, dtype, 3, keys)
    v = values(keys, dtype, 4)
    out, lse = call(libflash.attention, kernel, np.tile(q, (1, times, 1, 1)), k, v)
    expected, expected_lse = exact(q, k, v)
    check(kernel, out[0, :, 0], lse[0, 0], (np.tile(expected, (times, 1)), np.tile(expected_lse, times)))


@pytest.mark.parametrize("kernel", long_kernels("forward"))
def test_many_equal_probabilities_that_are_no_power_of_two(kernel: dict) -> None:
    """The last key has a larger score, so that all others have the probability exp(-1) relative to the maximum."""
    dtype, device = DTYPES[kernel["dtype"]], device_of(kernel)
    keys = LONG if device == "cuda" else LONG >> 4
    q, k = problem("equal", dtype, 1, keys)
    k[:, -1, :, 0] = 1
    v = values(keys, dtype, 4)
    out, lse = call(libflash.attention, kernel, q, k, v)
    check(kernel, out[0, :, 0], lse[0, 0], exact(q, k, v))


@pytest.mark.parametrize("options", [{}, {"softcap": 1000.0}], ids=["plain", "general"])
@pytest.mark.parametrize("kernel", long_kernels("forward"))
def test_causal(kernel: dict, options: dict) -> None:
    """As many rows as keys: query tiles with one key tile and with more keys than one sum has, in one thread block."""
    dtype, device = DTYPES[kernel["dtype"]], device_of(kernel)
    rows = (1 << 16) + 1000 if device == "cuda" else 3000
    seen = np.array([1, rows // 2, rows // 2 + 1, rows - 100, rows])
    q, k = random(1, rows, 1, 8, dtype=dtype) / dtype.type(4), random(1, rows, 1, 8, seed=1, dtype=dtype)
    v = values(rows, dtype, 4)
    out, lse = call(libflash.attention, kernel, q, k, v, causal=True, **options)
    chosen = torch.from_numpy(seen - 1).to(out.device)
    check(kernel, out[0, chosen, 0], lse[0, 0, chosen], exact(q[:, seen - 1], k, v, seen))


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize(
    "options", [{}, {"num_splits": 1}, {"split_size": LONG}, {"split_size": 128 * 300}], ids=["", "one", "long", "size"]
)
@pytest.mark.parametrize("rows", [2, 20], ids=["few rows", "many rows"])
@pytest.mark.parametrize("kernel", long_kernels("decode"))
def test_decode(kernel: dict, rows: int, options: dict, scores: str) -> None:
    dtype, device = DTYPES[kernel["dtype"]], device_of(kernel)
    keys = LONG if device == "cuda" else LONG >> 4
    q, k = problem(scores, dtype, rows, keys)
    v = values(keys, dtype, 4)
    out, lse = call(libflash.decode, kernel, q, k, v, causal=False, **options)
    check(kernel, out[0, :, 0], lse[0, 0], exact(q, k, v))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_kernel_without_room_refuses() -> None:
    q, k = (torch.zeros((1, rows, 1, 192), dtype=torch.float16, device="cuda") for rows in (1, 32769))
    libflash.attention(q, k[:, 1:], k[:, 1:], kernel=NO_ROOM)
    with pytest.raises(libflash.UnsupportedError, match=r"^k: the kernel adds up at most 32768 keys"):
        libflash.attention(q, k, k, kernel=NO_ROOM)
