"""One test case run by one kernel on a GPU. Arrays are made on the host and copied, so that no other kernel runs in between.

`device` is for tests of these helpers: with "cpu" a CPU kernel replaces a CUDA kernel.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from case import Case, Inputs

import libflash

# PyTorch's types by the names in the registry of kernels.
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "f64": torch.float64}


def to_device(x: np.ndarray, device: str = "cuda") -> torch.Tensor:
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(x).to(device)


def to_numpy(x: torch.Tensor, like: np.dtype) -> np.ndarray:
    x = x.cpu()
    return x.view(torch.uint16).numpy().view(like) if x.dtype == torch.bfloat16 else x.numpy()


def full_of_nan(shape: tuple[int, ...], like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An output of NaN, which shows unwritten elements."""
    return torch.full(shape, torch.nan, dtype=dtype or like.dtype).to(like.device)


def wide_type(x: torch.Tensor) -> torch.dtype:
    """The type of lse, dlse and partial results for tensors of the type of x."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def bits(x: torch.Tensor) -> torch.Tensor:
    """The elements as integers, to compare bits: a NaN equals a NaN with the same bits, and 0 is not -0."""
    return x.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


def same_sums(a: torch.Tensor, b: torch.Tensor, ordered: bool) -> bool:
    """Whether a and b have the same bits or, without a fixed order of the sums, differ by rounding errors only."""
    if ordered:
        return same_bits(a, b)
    a, b = a.double(), b.double()
    return bool((a - b).square().mean().sqrt() <= 2**-8 * b.square().mean().sqrt())


@dataclasses.dataclass
class Problem:
    """A case's tensors on a device; a call makes its own outputs."""

    inputs: Inputs
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None
    options: dict

    def forward(self, kernel: str | None = None, **more: str) -> tuple[torch.Tensor, torch.Tensor]:
        """(o, lse), NaN in rows that belong to no sequence."""
        *batch, rows, heads, _ = self.q.shape
        out = full_of_nan((*self.q.shape[:-1], self.v.shape[-1]), self.q)
        lse = full_of_nan((*batch, heads, rows), self.q, wide_type(self.q))
        libflash.attention(self.q, self.k, self.v, out=out, lse=lse, return_lse=True, kernel=kernel, **self.options, **more)
        return out, lse

    def backward(
        self, o: torch.Tensor, lse: torch.Tensor, kernel: str | None = None, deterministic: bool = False, **more: str
    ) -> dict[str, torch.Tensor]:
        """All gradients of the case."""
        made = {f"d{name}": full_of_nan(x.shape, x) for name, x in (("q", self.q), ("k", self.k), ("v", self.v))}
        for name, given in {"dbias": "bias", "dsink": "learnable_sink"}.items():
            if given in self.options:
                made[name] = full_of_nan(self.options[given].shape, self.options[given])
        options = self.options | {"dlse": self.dlse, "deterministic": deterministic, "kernel": kernel} | more
        libflash.attention_backward(self.dout, self.q, self.k, self.v, o, lse, **made, **options)
        return made


def problem(case: Case, device: str = "cuda") -> Problem:
    x = case.inputs()
    tensors = (to_device(y, device) for y in (x.q, x.k, x.v, x.dout))
    dlse = None if x.dlse is None else to_device(x.dlse, device)
    options = {name: to_device(value, device) if isinstance(value, np.ndarray) else value for name, value in x.options.items()}
    return Problem(x, *tensors, dlse, options)


def run_forward(case: Case, kernel: str | None, device: str = "cuda") -> dict[str, np.ndarray]:
    """o and lse as `case.check` takes them."""
    p = problem(case, device)
    o, lse = p.forward(kernel)
    return {"o": to_numpy(o, p.inputs.q.dtype), "lse": lse.cpu().numpy()}


def run_backward(case: Case, kernel: str | None, deterministic: bool = False, device: str = "cuda") -> dict[str, np.ndarray]:
    """dq, dk, dv, and dbias, dsink if there is a bias or a sink, from the o and lse of the kernel that the library chooses."""
    p = problem(case, device)
    made = p.backward(*p.forward(), kernel, deterministic)
    return {name: to_numpy(x, p.inputs.q.dtype) for name, x in made.items()}
