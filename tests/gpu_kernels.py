"""The CUDA kernels of this build, and which cases each of them serves."""

from __future__ import annotations

from case import Case

import libflash

TYPES = {"f16": "fp16", "bf16": "bf16"}  # names of the registry and of the cases


def kernels(operation: str) -> list[dict]:
    """All rows of "forward" or "backward", also those that this machine cannot run."""
    return [k for k in libflash.info()["kernels"] if k["operation"] == operation and k["backend"] != "cpu"]


def usable_kernels(operation: str) -> list[dict]:
    return [k for k in kernels(operation) if k["usable"]]


def with_cpu(operation: str) -> list[dict]:
    """The same rows and one of the CPU's, as if it were for bf16 and 64 channels: what a test asks of all it can ask everywhere."""
    names = [k["name"] for k in libflash.info()["kernels"] if k["operation"] == operation and k["backend"] == "cpu" and k["usable"]]
    stand_in = {"name": names[0], "operation": operation, "backend": "cpu", "dtype": "bf16", "head_dim": 64, "head_dim_v": 64}
    return [*kernels(operation), stand_in | {"usable": True, "why_not": ""}]


def device_of(kernel: dict) -> str:
    return "cpu" if kernel["backend"] == "cpu" else "cuda"


def serves(kernel: dict, case: Case) -> bool:
    dim_v = case.head_dim if case.head_dim_v is None else case.head_dim_v
    fits = case.head_dim <= kernel["head_dim"] and dim_v <= kernel["head_dim_v"]
    return fits and TYPES.get(kernel["dtype"]) == case.dtype


def widths(kernel: dict) -> dict[str, int | None]:
    """The largest head_dim and head_dim_v of a kernel, as fields of a case."""
    same = kernel["head_dim"] == kernel["head_dim_v"]
    return {"head_dim": kernel["head_dim"], "head_dim_v": None if same else kernel["head_dim_v"]}
