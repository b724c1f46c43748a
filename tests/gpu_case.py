"""One test case run by one CUDA kernel. Arrays are made on the host and copied, so that no foreign kernel runs in between."""

from __future__ import annotations

import numpy as np
import torch
from case import Case

import libflash


def forward_kernels() -> list[dict]:
    """The CUDA forward kernels of this build that run here."""
    kernels = libflash.info()["kernels"]
    return [k for k in kernels if k["operation"] == "forward" and k["backend"] != "cpu" and k["usable"]]


def to_gpu(x: np.ndarray) -> torch.Tensor:
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16).cuda()
    return torch.from_numpy(x).cuda()


def to_numpy(x: torch.Tensor, like: np.dtype) -> np.ndarray:
    x = x.cpu()
    return x.view(torch.uint16).numpy().view(like) if x.dtype == torch.bfloat16 else x.numpy()


def run_forward(case: Case, kernel: str) -> dict[str, np.ndarray]:
    """o and lse, from outputs that held NaN."""
    x = case.inputs()
    q, k, v = (to_gpu(y) for y in (x.q, x.k, x.v))
    rows = q.shape[:-1]
    lse_shape = tuple(rows[::-1]) if case.packed else (rows[0], rows[2], rows[1])
    out = torch.full((*rows, v.shape[-1]), torch.nan, dtype=q.dtype).cuda()
    lse = torch.full(lse_shape, torch.nan).cuda()
    options = {name: to_gpu(value) if isinstance(value, np.ndarray) else value for name, value in x.options.items()}
    libflash.attention(q, k, v, out=out, lse=lse, return_lse=True, kernel=kernel, **options)
    return {"o": to_numpy(out, x.q.dtype), "lse": lse.cpu().numpy()}
