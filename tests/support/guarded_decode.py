"""Decode through the C interface, with every array and the workspace between guard bands."""

from __future__ import annotations

import abi
import numpy as np
from decode_cases import DecodeInputs
from memory_harness import Guarded, Workspace, call

WRITTEN = ("k_cache", "v_cache", "k_scale", "v_scale", "k_rope_cache")  # by an append; what it writes is for the case to check
C_NAMES = {"k": "k_new", "v": "v_new", "k_rope": "k_rope_new"}


def c_options(given: dict) -> dict:
    """The fields of the C options for Python's keywords."""
    given, flags = dict(given), 0
    for name, flag, default in (("causal", abi.CAUSAL, True), ("rotary_interleaved", abi.ROTARY_INTERLEAVED, False)):
        flags |= flag if given.pop(name, default) else 0
    if "window_size" in given:
        flags |= abi.WINDOW
        given["window_left"], given["window_right"] = given.pop("window_size")
    if "softmax_scale" in given:
        flags |= abi.SCALE
    return {"flags": flags, **{C_NAMES.get(name, name): value for name, value in given.items()}}


def owned_rows(options: dict, rows: int) -> np.ndarray | None:
    """Bool over the rows of a packed q: those that belong to a sequence. None if q is not packed."""
    return np.arange(rows) < options["cu_seqlens_q"][-1] if "cu_seqlens_q" in options else None


def guarded_decode(
    x: DecodeInputs,
    kernel: str,
    content: str,
    gap: int,
    shift: int = 0,
    place: type[Guarded] = Guarded,
    workspace: type[Workspace] = Workspace,
) -> tuple[DecodeInputs, np.ndarray, np.ndarray]:
    """The inputs after the call, out and lse. Fails if a byte outside of outputs and caches was written."""
    placed: dict[str, Guarded] = {}

    def guard(name: str, array: np.ndarray, gap: int = gap, output: bool = False) -> abi.Tensor:
        placed[name] = place(array, gap, output, shift)
        placed[name].name = f"{kernel} {name}"
        return placed[name].view

    given, dim_v = dict(x.options), x.options.get("head_dim_v")
    given.pop("head_dim_v", None)
    q, k = guard("q", x.q), guard("k_cache", x.k_cache)
    if x.v_cache is None:  # the first channels of the keys
        v = abi.Tensor.from_buffer_copy(k)
        v.shape[3] = dim_v
    else:
        v, dim_v = guard("v_cache", x.v_cache), x.v_cache.shape[3]
    fields = {name: guard(name, value, 0) if isinstance(value, np.ndarray) else value for name, value in given.items()}
    wide = np.float64 if x.q.dtype == np.float64 else np.float32
    out = guard("out", np.zeros((*x.q.shape[:-1], dim_v), x.q.dtype), output=True)
    lse = guard("lse", np.zeros((*x.q.shape[:-3], x.q.shape[-2], x.q.shape[-3]), wide), output=True)
    made = abi.options(abi.DecodeOptions, kernel=kernel.encode(), **c_options(fields))
    call("decode", [q, k, v, out, lse], made, content, workspace)
    owned = owned_rows(x.options, x.q.shape[0])
    for name, one in placed.items():
        if name in WRITTEN:
            one.check_around()
        elif not one.output or owned is None:
            one.check()
        else:
            one.check(np.broadcast_to(owned[:, None, None] if name == "out" else owned, one.array.shape))
    after = {name: placed[name].array if name in placed else value for name, value in x.options.items()}
    v_cache = None if x.v_cache is None else placed["v_cache"].array
    return DecodeInputs(x.q, placed["k_cache"].array, v_cache, after), placed["out"].array, placed["lse"].array
