"""Emulated programs of decode and of prefill that several files of tests run."""

from __future__ import annotations

from emulated_kernels import KEYS_PER_SUM
from emulated_programs import Program


def decode_instances(dtype: str, dims: str, tile: str) -> Program:
    headers = ("sm80/decode.cuh", "sm80/decode_prefix.cuh", "sm80/decode_invariant.cuh")
    return Program("decode_instances.cpp", headers, (("DTYPE", dtype), ("KERNEL_DIMS", dims), ("DECODE_TILE", tile)))


def decode(dtype: str, head_dim: int, tile: str) -> Program:
    # Wide heads: one kernel for keys of 576 channels and values of 512.
    instances = decode_instances(dtype, "576, 512" if head_dim > 256 else f"{head_dim}, {head_dim}", tile)
    defines = (*instances.defines, ("HEAD_DIM", head_dim))
    return instances._replace(source="decode.cpp", defines=defines, instances=(instances,))


def decode_sm90(dtype: str, head_dim: int, head_dim_v: int, tile: str, stages: int) -> Program:
    defines = {"DTYPE": dtype, "KERNEL_DIMS": f"{head_dim}, {head_dim_v}", "DECODE_TILE": f"{tile}, {stages}"}
    return Program("decode_sm90.cpp", ("sm90/decode.cuh", "sm90/decode_rows.cuh"), tuple(defines.items()))


def prefill_instances(dtype: str, head_dim: int, head_dim_v: int, tile: str, keys_per_sum: int = KEYS_PER_SUM) -> Program:
    defines = {"DTYPE": dtype, "HEAD_DIM": head_dim, "HEAD_DIM_V": head_dim_v, "PREFILL_TILE": tile}
    defines["LIBFLASH_KEYS_PER_SUM"] = keys_per_sum
    return Program("prefill_instances.cpp", ("sm90/forward.cuh", "sm90/prefill.cuh"), tuple(defines.items()))
