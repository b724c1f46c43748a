"""Decode on a GPU for arrays on the host: everything is copied there, and the caches back into the arrays they came from."""

from __future__ import annotations

import numpy as np
import torch
from gpu_case import to_device, to_numpy

import libflash


def decode(q: np.ndarray, k_cache: np.ndarray, v_cache: np.ndarray, **options: object) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse); NaN in what was not written."""
    on_gpu = {name: to_device(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    caches = [to_device(x) for x in (k_cache, v_cache)]
    query = to_device(q)
    out = torch.full((*q.shape[:-1], v_cache.shape[-1]), torch.nan, dtype=query.dtype, device="cuda")
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), torch.nan, device="cuda")
    libflash.decode(query, *caches, out=out, lse=lse, return_lse=True, **on_gpu)
    for cache, array in zip(caches, (k_cache, v_cache), strict=True):
        array[...] = to_numpy(cache, array.dtype)
    return to_numpy(out, q.dtype), lse.cpu().numpy()
