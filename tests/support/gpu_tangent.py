"""Calls of the tangent functions with tensors on a GPU, through the C interface, and checks of their results for cases. The
arguments are NumPy arrays: they are copied to the GPU, and results are copied back. `device` is for tests of these helpers,
without a GPU.
"""

from __future__ import annotations

import ctypes as c
import functools
from typing import Any

import abi
import numpy as np
import torch
from gpu_case import to_device, to_numpy
from tangent_cases import TangentCase
from tangent_problem import backward_by, forward_by

Results = dict[str, np.ndarray]


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
    """Call flash_attention_<name>. The workspace is filled with NaN."""
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
    copies.copy_back(out, lse, fields.get("delta"), *(tangents.get(name) for name in ("out", "lse", "delta")))


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


def run_forward_tangent(tangent: TangentCase, kernel: str | None, device: str = "cuda") -> Results:
    """out and LSE computed by the call, and their tangents; in every second case with tdelta and delta."""
    call = functools.partial(forward_tangent, device=device)
    return forward_by(call, *tangent.problem(), kernel, delta=tangent.number % 2 == 0)


def run_backward_tangent(tangent: TangentCase, kernel: str | None, device: str = "cuda") -> Results:
    """From tdelta or tout, in every third case with the gradients, otherwise from delta if there is tdelta."""
    forward, call = run_forward_tangent(tangent, None, device), functools.partial(backward_tangent, device=device)
    return backward_by(call, *tangent.problem(), kernel, forward, gradients=tangent.number % 3 == 0)


def check_forward(tangent: TangentCase, kernel: str | None, device: str = "cuda") -> None:
    """With out and LSE computed by the call, then from these: the same bits, unless the kernel computes them too (sm90)."""
    fused = run_forward_tangent(tangent, kernel, device)
    tangent.check(**fused)
    call, primal = functools.partial(forward_tangent, device=device), {name: fused[name] for name in ("o", "lse")}
    from_lse = forward_by(call, *tangent.problem(), kernel, primal=primal, delta="tdelta" in fused)
    for name in [name for name in fused if name not in primal]:
        if device != "cpu" and "sm90" not in (kernel or "sm90"):
            assert np.array_equal(from_lse[name].view(np.uint8), fused[name].view(np.uint8)), name
        else:
            tangent.check(**{name: from_lse[name]})


def check_backward(tangent: TangentCase, kernel: str | None, device: str = "cuda") -> None:
    tangent.check(**run_backward_tangent(tangent, kernel, device))
