"""Accuracy of the CUDA kernels of gpu_kernels.KINDS, by the rule of conformance/tolerance.py: a line for each kernel and kind of
values.

    python tests/evidence/accuracy.py OUT.json [--quick]

t1, t2, t3 are the worst ratios to their limits (above 1 is a failure, t2 the larger of row and tensor), two_times that to twice
the error of plain attention in the storage type, rms the largest relative root mean square error. Statistics of rows and
tangents have the figures t1 and rms alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable, Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(2, str(pathlib.Path(__file__).resolve().parents[1] / "short_names"))
sys.path.insert(3, str(pathlib.Path(__file__).resolve().parents[1] / "capi"))

import cases
from case import Case
from decode_cases import DecodeCase
from gpu_kernels import TYPES, attention_kernels, widths
from libflash.conformance.cache_cases import CacheCase
from statistics_case import StatisticsCase
from tangent_cases import TangentCase
from tolerance import Report

FILLS = ("randn", "u01", "mean", "outlier", "big", "int")
QUICK_FILLS = ("randn", "mean")
LONG_FILLS = ("randn", "mean")  # more key tiles than pipeline stages
DECODE = {"lengths": (1, 130, 700), "capacity": 720, "seqlen_q": 2, "heads_q": 4, "heads_k": 1}
IN_KEYS = DECODE | {"heads_q": 40, "page_size": 64}
LONG = {"seqlen_q": 700, "seqlen_k": 700, "heads_q": 1, "heads_k": 1, "causal": True}
TANGENT_LONG = LONG | {"seqlen_q": 300, "seqlen_k": 300}  # smaller tiles; exact tangents take long
TANGENT_NUMBER = 8  # TangentCase.number: every input has a tangent; with tdelta, without gradients

AnyCase = Case | DecodeCase | CacheCase | StatisticsCase | TangentCase


def chosen(kernel: dict, fill: str) -> Sequence[AnyCase]:
    """The cases of that fill for the kind of the kernel, with its head_dim."""
    kind = kernel["kind"]
    if kernel["operation"] == "decode":
        return [decode_case(kernel, fill)]
    if kind == "statistics":
        return [StatisticsCase(case) for case in attention_cases(kernel, fill, LONG)]
    if kind.endswith("_tangent"):
        some = attention_cases(kernel, fill, TANGENT_LONG)
        return [TangentCase(TANGENT_NUMBER, case) for case in some if case.causal]
    return attention_cases(kernel, fill, LONG)


def decode_case(kernel: dict, fill: str) -> DecodeCase | CacheCase:
    """Several lengths; values that are channels of the keys have a case of their own."""
    name, dtype = f"accuracy-{fill}-{TYPES[kernel['dtype']]}-{kernel['head_dim']}", TYPES[kernel["dtype"]]
    if kernel["kind"] != "values in keys":
        return DecodeCase(name, dtype, fill=fill, **DECODE, **widths(kernel))
    base = DecodeCase(f"{name}-in-keys", dtype, fill=fill, **IN_KEYS, head_dim=kernel["head_dim"])
    return CacheCase(base, None, "none", head_dim_v=kernel["head_dim_v"])


def attention_cases(kernel: dict, fill: str, long: dict) -> list[Case]:
    """The quick cases of that fill, and a long one."""
    dtype, width = TYPES[kernel["dtype"]], widths(kernel)
    of_fill = [cases.by_name(f"fill-{fill}-fp32{causal}") for causal in ("", "-causal")]
    found = [dataclasses.replace(case, name=case.name.replace("fp32", dtype), dtype=dtype) for case in of_fill]
    if fill in LONG_FILLS:
        found.append(Case(f"long-{fill}-{dtype}", dtype, fill=fill, **long))
    return [dataclasses.replace(case, name=f"{case.name}-{width['head_dim']}", **width) for case in found]


def judged(case: AnyCase, result: dict) -> dict[str, Report]:
    return case.check(**result, two_times=True) if isinstance(case, Case | StatisticsCase) else case.check(**result)


def worst(reports: list[Report]) -> dict[str, float]:
    """The figures of one tensor."""
    two_times = [report.two_times for report in reports if report.two_times is not None]
    figures = {"t1": max(r.t1 for r in reports), "rms": max(r.rms for r in reports)}
    figures |= {"t2": max(max(r.t2, r.t2_row) for r in reports), "t3": max(r.t3 for r in reports)}
    if two_times:
        figures["two_times"] = max(two_times)
    return {name: float(f"{value:.3g}") for name, value in figures.items() if value}


def table(
    kernels: list[dict], fills: tuple[str, ...], runs: dict[str, Callable[[AnyCase, str], dict]]
) -> tuple[list[dict], list[str]]:
    """The lines of the table, and the errors of wrong results; `runs` has a function for each kind of kernels."""
    entries, failures = [], []
    for kernel in kernels:
        for fill in fills:
            reports: dict[str, list[Report]] = {}
            some = chosen(kernel, fill)
            for case in some:
                try:
                    found = judged(case, runs[kernel["kind"]](case, kernel["name"]))
                except AssertionError as wrong:
                    failures.append(f"{kernel['name']}: {str(wrong)[:400]}")
                    continue
                for tensor, report in found.items():
                    reports.setdefault(tensor, []).append(report)
            about = {"kernel": kernel["name"], "dtype": kernel["dtype"], "head_dim": kernel["head_dim"], "fill": fill}
            entries.append(about | {"cases": len(some)} | {tensor: worst(found) for tensor, found in reports.items()})
    return entries, failures


def main() -> int:
    from gpu_runs import RUNS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--quick", action="store_true", help="two kinds of values")
    options = parser.parse_args()
    kernels = attention_kernels()
    if not kernels:
        sys.exit("no CUDA kernel of attention runs here")
    entries, failures = table(kernels, QUICK_FILLS if options.quick else FILLS, RUNS)
    options.out.write_text(json.dumps({"entries": entries, "failures": failures[:20]}))
    print("\n".join([f"{len(entries)} entries, {len(failures)} failures", *failures]))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
