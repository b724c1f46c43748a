"""Decode on a GPU for arrays on the host: all arrays are copied to the GPU, and the caches back into the arrays."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from decode_cases import DecodeCase
from gpu_case import DTYPES, to_device, to_numpy
from gpu_codes import on_device, on_host
from gpu_kernels import device_of, kernels, kernels_of_many_rows, parameters
from harness import BFLOAT16

import libflash

KERNELS = kernels("decode")
SPLITS = [{}, {"num_splits": 1}, {"num_splits": 5}, {"split_size": 128}]
NUMPY = {"f16": np.dtype("float16"), "bf16": BFLOAT16, "f32": np.dtype("float32")}
# Limits for a result with values around 1, and for LSE.
LIMITS = {"f16": (3e-3, 1e-5), "bf16": (2e-2, 1e-5), "f32": (5e-6, 5e-6)}
every_kernel = pytest.mark.parametrize("kernel", parameters(KERNELS))
# Also those for many rows of a key head, which lack some options, and take pages of multiples of 16.
KERNELS_AND_MANY_ROWS = KERNELS + kernels_of_many_rows()
every_kernel_and_many_rows = pytest.mark.parametrize("kernel", parameters(KERNELS_AND_MANY_ROWS))


def normal(kernel: dict, *shape: int, seed: int) -> torch.Tensor:
    """Random-normal values in the kernel's type, on its device."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x.to(DTYPES[kernel["dtype"]]).to(device_of(kernel))


def ints(kernel: dict, *x: int) -> torch.Tensor:
    """int32 on the kernel's device."""
    return torch.tensor(x, dtype=torch.int32, device=device_of(kernel))


def decode(
    q: np.ndarray, k_cache: np.ndarray, v_cache: np.ndarray, device: str = "cuda", **options: object
) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse), with NaN in elements that were not written. The caches may have codes."""
    on_gpu = {name: to_device(x, device) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    caches = [on_device(x, device) for x in (k_cache, v_cache)]
    query = to_device(q, device)
    out = torch.full((*q.shape[:-1], v_cache.shape[-1]), torch.nan, dtype=query.dtype, device=device)
    lse = torch.full((*q.shape[:-3], q.shape[-2], q.shape[-3]), torch.nan, device=device)
    libflash.decode(query, *caches, out=out, lse=lse, return_lse=True, **on_gpu)
    for cache, array in zip(caches, (k_cache, v_cache), strict=True):
        array[...] = on_host(cache, array)
    return to_numpy(out, q.dtype), lse.cpu().numpy()


def run_decode(case: DecodeCase, kernel: str | None, device: str = "cuda", **options: object) -> dict[str, np.ndarray]:
    """The results that `case.check` needs."""
    x = case.inputs()
    o, lse = decode(x.q, x.k_cache, x.v_cache, device, kernel=kernel, **options, **x.options)
    return {"o": o, "lse": lse, "k_cache": x.k_cache, "v_cache": x.v_cache}
