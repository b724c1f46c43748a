"""Forward and backward of a case through the C interface, with every array and the workspace between guard bands."""

from __future__ import annotations

import abi
import numpy as np
from case import Case
from memory_harness import Guarded, Workspace, call
from test_attention import c_options


def owned_rows(x: np.ndarray, lengths: tuple[int, ...] | int, axis: int = 0) -> np.ndarray | None:
    """Which elements must be written: in packed tensors, the rows of sequences."""
    if not isinstance(lengths, tuple):
        return None
    owned = np.zeros(x.shape, bool)
    owned[(slice(None),) * axis + (slice(sum(lengths)),)] = True
    return owned


def guarded_run(
    case: Case,
    kernels: tuple[str, str],
    content: str,
    gap: int,
    shift: int = 0,
    flags: int = 0,
    place: type[Guarded] = Guarded,
    workspace: type[Workspace] = Workspace,
) -> dict[str, np.ndarray]:
    """The results of a forward and a backward kernel; `flags`: of backward. Fails if any other byte was written."""
    x = case.inputs()
    placed: dict[str, Guarded] = {}

    def guard(name: str, array: np.ndarray, gap: int = gap, output: bool = False) -> abi.Tensor:
        placed[name] = place(array, gap, output, shift)
        placed[name].name = f"{case} {kernels[0]} {kernels[1]} {name}"
        return placed[name].view

    q, k, v, dout = (guard(name, getattr(x, name)) for name in ("q", "k", "v", "dout"))
    options = {name: guard(name, value, 0) if isinstance(value, np.ndarray) else value for name, value in c_options(x).items()}
    *batch, rows, heads, _ = x.q.shape
    wide = np.float64 if x.q.dtype == np.float64 else np.float32
    out = guard("o", np.empty((*x.q.shape[:-1], x.v.shape[-1]), x.q.dtype), output=True)
    lse = guard("lse", np.empty((*batch, heads, rows), wide), output=True)
    made = abi.options(abi.AttentionOptions, kernel=kernels[0].encode(), **options)
    call("forward", [q, k, v, out, lse], made, content, workspace)
    for name, one in placed.items():
        lengths = case.seqlen_q if name in ("o", "lse") else 0
        one.check(owned_rows(one.array, lengths, axis=int(name == "lse")))
    for name in ("o", "lse"):  # inputs from now on
        placed[name].output, placed[name].before = False, placed[name].block.copy()

    outputs = {name: guard(name, getattr(x, name[1:]), output=True) for name in ("dq", "dk", "dv")}
    for name, given in {"dbias": "bias", "dsink": "learnable_sink"}.items():
        if given in options:
            options[name] = guard(name, x.options[given], 0, True)
    if x.dlse is not None:
        options["dlse"] = guard("dlse", x.dlse)
    options["flags"] |= flags
    made = abi.options(abi.AttentionOptions, kernel=kernels[1].encode(), **options)
    call("backward", [dout, q, k, v, out, lse, *outputs.values()], made, content, workspace)
    for name, one in placed.items():
        lengths = {"dq": case.seqlen_q, "dk": case.seqlen_k, "dv": case.seqlen_k}.get(name, 0)
        one.check(owned_rows(one.array, lengths))
    return {name: placed[name].array for name in ("o", "lse", "dq", "dk", "dv", "dbias", "dsink") if name in placed}
