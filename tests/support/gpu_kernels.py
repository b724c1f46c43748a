"""The CUDA kernels of this build, and the cases that each of them can run."""

from __future__ import annotations

import re

from case import Case
from decode_cases import DecodeCase

import libflash

TYPES = {"f16": "fp16", "bf16": "bf16", "f32": "fp32", "f64": "fp64"}  # names of the registry and of the cases
KINDS = ("forward", "statistics", "backward", "decode", "values in keys", "forward_tangent", "backward_tangent")
# The operations of kinds of another name.
OPERATIONS = {"statistics": "forward", "values in keys": "decode", "prefill": "decode", "decode_prefix": "decode"}


def of_values_in_keys(kernel: dict) -> bool:
    """Whether it requires that values are the first channels of the keys, which is not so in the cases of decode_cases."""
    return (kernel["operation"], kernel["backend"]) == ("decode", "sm90") and kernel["head_dim"] > kernel["head_dim_v"]


def of_many_rows(kernel: dict) -> bool:
    """Whether it is a decode kernel for many rows per key head: it takes any number of rows but lacks some options."""
    return (kernel["operation"], kernel["backend"]) == ("decode", "sm90") and not of_values_in_keys(kernel)


def kernels(operation: str) -> list[dict]:
    """The CUDA kernels of an operation, also those that this machine cannot run; without those of kernels_with_statistics(),
    kernels_of_values_in_keys() and kernels_of_many_rows().
    """
    every = [k for k in libflash.info()["kernels"] if k["operation"] == operation and k["backend"] != "cpu"]
    return [k for k in every if not (of_values_in_keys(k) or of_many_rows(k) or k["name"].endswith("_statistics"))]


def kernels_of_many_rows() -> list[dict]:
    return [k for k in libflash.info()["kernels"] if of_many_rows(k)]


def kernels_with_statistics() -> list[dict]:
    """The forward kernels that take only calls with statistics of rows."""
    return [k for k in libflash.info()["kernels"] if k["name"].endswith("_statistics")]


def kernels_of_values_in_keys() -> list[dict]:
    """The decode kernels whose values are channels of the keys."""
    return [k for k in libflash.info()["kernels"] if of_values_in_keys(k)]


def kind_of(kernel: dict) -> str:
    """The kind of calls that a kernel takes: its operation; or "statistics" or "values in keys", if it takes only such calls of
    forward or decode.
    """
    if kernel["name"].endswith("_statistics"):
        return "statistics"
    return "values in keys" if of_values_in_keys(kernel) else kernel["operation"]


def attention_kernels() -> list[dict]:
    """The kernels of KINDS that run here, with their kind. Those of one type and head_dim follow each other, because they share
    cases, whose exact results are cached."""
    usable = [k | {"kind": kind_of(k)} for k in libflash.info()["kernels"] if k["backend"] != "cpu" and k["usable"]]
    some = [k for k in usable if k["kind"] in KINDS]
    return sorted(some, key=lambda kernel: (kernel["dtype"], kernel["head_dim"], kernel["head_dim_v"]))


def with_cpu(operation: str) -> list[dict]:
    """The same kernels and a CPU kernel described as one for bf16 and head_dim 64, so that tests of every kernel run without a
    GPU.
    """
    return [*kernels(operation), in_place_of(operation)]


def in_place_of(kind: str) -> dict:
    """The CPU kernel of with_cpu(), described as a kernel of that kind."""
    operation = OPERATIONS.get(kind, kind)
    of_cpu = [k for k in libflash.info()["kernels"] if k["operation"] == operation and k["backend"] == "cpu" and k["usable"]]
    return of_cpu[0] | {"dtype": "bf16", "head_dim": 64, "head_dim_v": 64, "kind": kind}


def device_of(kernel: dict) -> str:
    return "cpu" if kernel["backend"] == "cpu" else "cuda"


def parameters(candidates: list[dict]) -> list:
    """Parameters for pytest: one kernel each, skipped if it does not run here."""
    import pytest
    import torch

    def skipped(kernel: dict) -> str:
        if device_of(kernel) == "cuda" and not torch.cuda.is_available():
            return "no CUDA device"
        return kernel["why_not"]

    return [pytest.param(k, id=k["name"], marks=pytest.mark.skipif(bool(skipped(k)), reason=skipped(k))) for k in candidates]


def has_rare_options(case: Case) -> bool:
    given = any(x is not None for x in (case.bias, case.mask, case.alibi))
    return given or bool(case.softcap or case.dropout_p)


def lacks_for_wide_heads(case: Case) -> bool:
    """Whether forward and backward for sm90 with more than 256 channels lack an option of the case."""
    given = any(x is not None for x in (case.bias, case.mask, case.alibi, case.block_mask))
    return given or bool(case.dropout_p)


def lacks_ordered_blocks(kernel: dict, case: Case, dims: set[int]) -> bool:
    """Whether backward for sm90 has no fixed order with a block mask: the kernel, or the narrowest one for the case."""
    rare = case.bias is not None or case.mask is not None or case.softcap or case.dropout_p or case.alibi is not None
    return kernel["dtype"] == "f16" and (kernel["head_dim"] == 128 or 96 < max(dims) <= 128) and not rare


def errors_of(kernel: str) -> dict[str, float]:
    """Arguments of error_bounds.Model for a kernel: backward for sm90 with 192 or 256 channels computes dS from rounded P."""
    return {"p_roundings": 1} if re.fullmatch(r"backward_sm90_\w+_d(192|256)", kernel) else {}


def takes_as_many_rows(case: DecodeCase) -> bool:
    """Whether the decode kernels for many rows have the options of a case, and can read its rows."""
    dims = {case.head_dim, case.head_dim if case.head_dim_v is None else case.head_dim_v}
    placed = case.positions or case.tree
    options = case.softmax_scale is None or case.softmax_scale > 0
    options &= not (placed and (case.alibi is not None or max(case.window_size) >= 0))
    return options and not any(dim % 8 for dim in dims) and (case.page_size or 16) % 16 == 0 and case.capacity > 0


def supports(kernel: dict, case: Case | DecodeCase, deterministic: bool = False) -> bool:
    """Whether a kernel has the options of a case, and can read rows of its alignment; and, backward, is deterministic."""
    if isinstance(case, DecodeCase):
        return not of_many_rows(kernel) or takes_as_many_rows(case)
    if kernel["backend"] != "sm90":
        return True
    dims = {case.head_dim, case.head_dim if case.head_dim_v is None else case.head_dim_v}
    if any(dim % 8 for dim in dims):
        return False
    if kernel["operation"].endswith("_tangent"):
        scaled_down = case.softmax_scale is not None and case.softmax_scale <= 0 and kernel["operation"] == "forward_tangent"
        return not (has_rare_options(case) or case.block_mask is not None or scaled_down)
    if kernel["name"].endswith("_statistics"):
        return not has_rare_options(case) and (case.softmax_scale is None or case.softmax_scale > 0)
    if kernel["head_dim"] > 256:
        return not lacks_for_wide_heads(case)
    if kernel["operation"] != "backward":
        return True
    return not (deterministic and case.block_mask is not None and lacks_ordered_blocks(kernel, case, dims))


def supporting(candidates: list[dict], deterministic: bool = False, **fields: object) -> list[dict]:
    """The kernels that support these fields of a case."""
    return [kernel for kernel in candidates if supports(kernel, Case("", **(widths(kernel) | fields)), deterministic)]  # type: ignore[arg-type]


def serves(kernel: dict, case: Case | DecodeCase, deterministic: bool = False) -> bool:
    dim_v = case.head_dim if case.head_dim_v is None else case.head_dim_v
    fits = case.head_dim <= kernel["head_dim"] and dim_v <= kernel["head_dim_v"]
    return fits and TYPES.get(kernel["dtype"]) == case.dtype and supports(kernel, case, deterministic)


def chosen(candidates: list[dict], case: Case | DecodeCase, index: int) -> list[dict]:
    """Of the kernels that serve a case: those with its head_dim, and one with a larger head_dim, a different one for each
    case.
    """
    found = []
    for backend in dict.fromkeys(kernel["backend"] for kernel in candidates):
        able = [kernel for kernel in candidates if kernel["backend"] == backend and serves(kernel, case)]
        narrowest = min((kernel["head_dim"] for kernel in able), default=0)
        wider = [kernel for kernel in able if kernel["head_dim"] > narrowest]
        found += [kernel for kernel in able if kernel["head_dim"] == narrowest] + wider[index % max(1, len(wider)) :][:1]
    return found


def widths(kernel: dict) -> dict[str, int | None]:
    """The largest head_dim and head_dim_v of a kernel, as fields of a case."""
    same = kernel["head_dim"] == kernel["head_dim_v"]
    return {"head_dim": kernel["head_dim"], "head_dim_v": None if same else kernel["head_dim_v"]}
