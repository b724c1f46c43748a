"""Calls of the tangent functions with tensors on a GPU, through the C interface. The arguments are NumPy arrays: they are copied
there, and results back. `device` is for tests of these helpers.
"""

from __future__ import annotations

import ctypes as c
from typing import Any

import abi
import numpy as np
import torch
from gpu_case import to_device, to_numpy


class Copies:
    """Copies of arrays on a device, and views of them for the C interface."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.made: list[tuple[np.ndarray, torch.Tensor]] = []

    def view(self, x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            return x
        array = np.ascontiguousarray(x)
        bits = array.view(np.uint8) if array.dtype == bool else array
        copy = to_device(bits, self.device)
        self.made.append((x, copy))
        view = abi.tensor(array)
        assert view is not None
        view.data = copy.data_ptr()
        if self.device != "cpu":
            view.device_type, view.device_id = abi.CUDA_DEVICE, torch.cuda.current_device()
        return view

    def copy_back(self, *arrays: np.ndarray | None) -> None:
        for array, copy in self.made:
            if any(array is wanted for wanted in arrays):
                array[...] = to_numpy(copy, array.dtype)


def run(name: str, arrays: tuple[Any, ...], tangents: dict[str, Any], fields: dict[str, Any], device: str) -> Copies:
    """The workspace holds NaN."""
    copies = Copies(device)
    views = [abi.pointer(copies.view(x)) for x in arrays]
    structs = (
        abi.options(abi.Tangents, **{key: copies.view(x) for key, x in tangents.items()}),
        abi.options(abi.AttentionOptions, **{key: copies.view(x) for key, x in fields.items()}),
    )
    size = c.c_size_t()
    abi.check(getattr(abi.lib, f"flash_attention_{name}_workspace_size")(*views, *structs, c.byref(size)))
    work = torch.full((size.value + 256,), 0xFF, dtype=torch.uint8).to(device)
    address = -(-work.data_ptr() // 256) * 256
    abi.check(getattr(abi.lib, f"flash_attention_{name}")(*views, *structs, address, size.value, None))
    if device != "cpu":
        torch.cuda.synchronize()
    return copies


def forward_tangent(
    q: Any, k: Any, v: Any, out: Any, lse: Any, tangents: dict[str, Any], *, device: str = "cuda", **fields: Any
) -> None:
    """As abi.forward_tangent."""
    copies = run("forward_tangent", (q, k, v, out, lse), tangents, fields, device)
    copies.copy_back(out, lse, *(tangents.get(name) for name in ("out", "lse", "delta")))


def backward_tangent(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    gradients: tuple[Any, ...],
    tangents: dict[str, Any],
    *,
    device: str = "cuda",
    **fields: Any,
) -> None:
    """As abi.backward_tangent."""
    copies = run("backward_tangent", (dout, q, k, v, out, lse, *gradients), tangents, fields, device)
    of_options = [x.get(name) for x in (tangents, fields) for name in ("dbias", "dsink")]
    copies.copy_back(*gradients, *of_options, *(tangents[name] for name in ("dq", "dk", "dv")))
