"""The sums of tests/test_long_sums.py on a GPU, where the adders of tensor cores truncate."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from gpu_kernels import device_of, errors_of, parameters, with_cpu
from harness import random
from long_sums import LONG, SCORES, exact, expected, problem, ulps, values

import libflash

torch = pytest.importorskip("torch")
from gpu_case import to_device, to_numpy  # noqa: E402  (needs torch)

DTYPES = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16), "f32": np.dtype(np.float32)}
# These have no registers for long sums: the first two refuse more keys, the last one loses precision.
MOST_KEYS = {"forward_sm90_f16_d192": 1 << 15, "forward_sm90_bf16_d192": 1 << 17, "forward_sm80_f32_d256": 1 << 15}
HEAD_DIMS = (64, 128, 192, 256)  # 192: with two values of head_dim_v
WIDE_HEAD_DIMS = (512, 576)  # backward refuses so many terms
# float32: 2048 additions that are all rounded alike give 500, decode adds some more.
ULPS = {"f16": 1.01, "bf16": 1.01, "f32": 800}


def long_kernels(operation: str) -> list:
    """The kernels, and a CPU kernel, so that the tests run without a GPU."""
    dims = HEAD_DIMS if operation == "backward" else HEAD_DIMS + WIDE_HEAD_DIMS
    return parameters([k for k in with_cpu(operation) if k["dtype"] in DTYPES and k["head_dim"] in dims])


def most_keys(kernel: dict) -> int:
    return MOST_KEYS.get(kernel["name"], LONG) if device_of(kernel) == "cuda" else LONG >> 4


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


def check(kernel: dict, out: torch.Tensor, lse: torch.Tensor, wanted: tuple[np.ndarray, np.ndarray]) -> None:
    """out: rows and channels; the channels repeat those of the expected result."""
    got = to_numpy(out, DTYPES[kernel["dtype"]])
    assert not np.isnan(got.astype(np.float32)).any()
    distances = [ulps(got[:, first : first + 4], wanted[0]) for first in range(0, got.shape[1], 4)]
    assert max(distances) <= ULPS[kernel["dtype"]]
    assert np.abs(lse.cpu().numpy() - wanted[1]).max() <= 3e-5


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("kernel", long_kernels("forward"))
def test_forward(kernel: dict, scores: str) -> None:
    """Several query tiles of three different rows."""
    dtype, device = DTYPES[kernel["dtype"]], device_of(kernel)
    keys, times = most_keys(kernel), 100 if device == "cuda" else 2
    q, k = problem(scores, dtype, 3, keys)
    v = values(keys, dtype, 4)
    out, lse = call(libflash.attention, kernel, np.tile(q, (1, times, 1, 1)), k, v)
    of_rows, lse_of_rows = expected(scores, dtype, 3, keys, 4)
    check(kernel, out[0, :, 0], lse[0, 0], (np.tile(of_rows, (times, 1)), np.tile(lse_of_rows, times)))


@pytest.mark.parametrize("kernel", long_kernels("forward"))
def test_many_equal_probabilities_that_are_no_power_of_two(kernel: dict) -> None:
    """The last key has a larger score, so that all others have the probability exp(-1) relative to the maximum."""
    dtype = DTYPES[kernel["dtype"]]
    keys = most_keys(kernel)
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
    rows = min((1 << 16) + 1000, most_keys(kernel)) if device == "cuda" else 3000
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
    dtype = DTYPES[kernel["dtype"]]
    keys = most_keys(kernel)
    q, k = problem(scores, dtype, rows, keys)
    v = values(keys, dtype, 4)
    out, lse = call(libflash.decode, kernel, q, k, v, causal=False, **options)
    check(kernel, out[0, :, 0], lse[0, 0], expected(scores, dtype, rows, keys, 4))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", [name for name in MOST_KEYS if "f32" not in name])
def test_a_kernel_without_room_refuses(name: str) -> None:
    dtype = torch.bfloat16 if "bf16" in name else torch.float16
    q, k = (torch.zeros((1, rows, 1, 192), dtype=dtype, device="cuda") for rows in (1, MOST_KEYS[name] + 1))
    libflash.attention(q, k[:, 1:], k[:, 1:], kernel=name)
    with pytest.raises(libflash.UnsupportedError, match=rf"^k: the kernel adds up at most {MOST_KEYS[name]} keys"):
        libflash.attention(q, k, k, kernel=name)


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("kernel", long_kernels("backward"))
def test_gradients(kernel: dict, heads: int) -> None:
    """Two keys that a million query rows see with the same probabilities. All terms of a gradient have the same sign."""
    dtype, device, step = DTYPES[kernel["dtype"]], device_of(kernel), 2.0**-8
    rows = (LONG if device == "cuda" else LONG >> 4) // heads
    q, k, v = np.zeros((1, rows, heads, 8), dtype), np.zeros((1, 2, 1, 8), dtype), np.zeros((1, 2, 1, 8), dtype)
    q[..., 0], k[0, 0, 0, 0], v[0, 0, 0, 0] = 1, 1, 1
    dout = np.zeros((1, rows, heads, 8), dtype)
    dout[..., 0] = ((random(1, rows, heads, 1, seed=3)[..., 0] % 1 + 0.5) * step).astype(dtype)
    tensors = [wide(x, kernel["head_dim"], device, repeat=False) for x in (dout, q, k, v)]
    out, lse = libflash.attention(*tensors[1:], softmax_scale=1.0, return_lse=True)
    gradients = libflash.attention_backward(*tensors, out, lse, softmax_scale=1.0, kernel=kernel["name"])
    dq, dk, dv = (to_numpy(x[..., 0].contiguous(), dtype)[0] for x in gradients)
    p = np.exp(np.array([1.0, 0.0]) - np.log(np.e + 1))
    # Of each row, without its dout.
    slope = p * (np.array([1.0, 0.0]) - np.float64(to_numpy(out, dtype)[0, 0, 0, 0]))
    terms = dout[0, :, :, 0].astype(np.float64)
    most = ULPS[kernel["dtype"]]
    assert ulps(dv[:, 0], terms.sum() * p) <= most
    # Kernels that compute dS from rounded P: all rows have the same probabilities, so the same rounding error is in all terms.
    most += errors_of(kernel["name"]).get("p_roundings", 0)
    assert ulps(dk[:, 0], terms.sum() * slope) <= most
    assert ulps(dq, terms * slope[0]) <= most
