"""The rule for correct results.

    T1  every element: |X - X64| <= bX, no exceptions
    T2  statistics: root mean square error over its prediction, per row and over the whole tensor
    T3  bias, generic random fills only: the error of o and dv must not correlate with their value
    LSE -inf exactly where no key is visible, else within bLSE

Also, rows without a visible key are exactly zero, and NaN is exactly where the reference has NaN. The limits
come from error_bounds. `check` raises AssertionError with every finding; it returns the ratios of errors to
limits, and whether the case was vacuous. The rule of other libraries, "twice the error of eager attention in
low precision", is computed on request and never decides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cached_property

import numpy as np

from .dropout_mask import keep_factor
from .eager import eager
from .error_bounds import HeadBounds, Model, Tensor
from .reference import (
    NEG_INF,
    Gradients,
    Head,
    Options,
    Softmax,
    add_head,
    empty_outputs,
    head_backward,
    head_cotangents,
    head_output,
    heads,
    softmax,
    zero_gradients,
)
from .rounding import DTYPES, ROUNDING, Rounding, widened

ROW_LIMIT = {"o": 2.5}  # T2 per row; every other tensor:
ROW_LIMIT_GRADIENT = 6.0
SHORT_ROW, SHORT_ROW_FACTOR = 16, 1.6
WHOLE_LIMIT = {"o": 1.5, "dv": 1.5}  # T2 over the tensor; every other tensor:
WHOLE_LIMIT_GRADIENT = 2.0  # and every tensor of a fill that is not generic: few entries determine the result
WHOLE_LIMIT_SMALL = 4.0  # fewer than 17 rows or keys, few elements, equal weights: too few for statistics
FEW_ELEMENTS = 256
BIAS_SIGMAS = 6.0


@dataclasses.dataclass
class Report:
    """Ratios of one tensor; above 1 is a failure (two_times alone never decides)."""

    t1: float = 0.0
    t2_row: float = 0.0
    t2: float = 0.0
    t3: float = 0.0
    rms: float = 0.0  # root mean square error relative to that of the exact values
    two_times: float | None = None
    vacuous: bool = False


@dataclasses.dataclass
class Expected:
    """Exact results of one problem, each with its limits."""

    tensors: dict[str, Tensor]
    problem: dict  # the arguments of `expect`, for the eager comparison
    generic: bool  # random fill without structure: errors have no preferred sign
    small: bool  # at least half of the heads have fewer than 17 rows or keys
    alike: bool  # weights with equal rounding errors, which add up: T2 means little, T3 nothing
    visible_pairs: int

    @cached_property
    def vacuous(self) -> bool:
        """No visible key, or an output of almost all zeros: passing such a case proves little."""
        o = self.tensors["o"].exact
        return self.visible_pairs == 0 or bool(np.count_nonzero(o) < 0.1 * o.size)

    @cached_property
    def eager_error(self) -> dict[str, float]:
        """Largest error of plain attention with every intermediate in the storage type."""
        return {name: worst(x, self.tensors[name].exact) for name, x in eager(**self.problem).items()}


@np.errstate(all="ignore")
def expect(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    dout: np.ndarray | None = None,
    dlse: np.ndarray | None = None,
    generic: bool = False,
    exp_error: float | None = None,
    tanh_error: float | None = None,
    score_ulps: float = 0.0,
    p_roundings: int = 0,
    dtype: np.dtype | None = None,
    **options,
) -> Expected:
    """Exact o and lse with their limits, gradients too if `dout` is given; the errors: error_bounds.Model.
    `dtype` is the type of the results, if k and v are wider."""
    opt = Options(**options)
    dtype = v.dtype if dtype is None else dtype
    model = Model(dtype, exp_error, tanh_error, score_ulps, p_roundings)
    o, lse = empty_outputs(q, v, opt)
    total = zero_gradients(q, k, v, opt)
    tensors = empty_tensors(o, lse, None if dout is None else total, dtype, opt)
    visible_pairs, few, alike = 0, [], []
    for head in heads(q, k, v, opt):
        weights = softmax(head)
        o[head.at_q], lse[head.at_lse] = value, _ = head_output(head, weights), weights.lse
        bounds = HeadBounds(model, head, weights, value)
        bounds.add_output(tensors["o"], tensors["lse"])
        visible_pairs += int(head.visible.sum())
        few.append(min(head.visible.shape) < 17)
        alike.append(rounds_alike(head, weights, dtype))
        if dout is not None:
            cotangents = head_cotangents(head, dout, dlse)
            grad = head_backward(head, weights, value, *cotangents)
            add_head(total, head, grad, opt)
            bounds.add_gradients(tensors, grad, *cotangents)
    problem = dict(q=q, k=k, v=v, dout=dout, dlse=dlse, **options)
    same = np.concatenate(alike).mean() > 0.25 if sum(map(len, alike)) else False
    factor = keep_factor(opt.dropout_p)
    generic = generic and bool(widened(np.float64(factor), dtype) == factor)  # see HeadBounds._factor_error
    return Expected(tensors, problem, generic, sum(few) * 2 >= len(few), bool(same), visible_pairs)


def rounds_alike(head: Head, weights: Softmax, dtype: np.dtype) -> np.ndarray:
    """Bool, per row that sees a key: its weights are so close to each other that all have one rounding error. With
    scale 0 the scores do not depend on the data, and all rows are equal.
    """
    seen = head.visible.any(axis=1)
    lowest = np.where(head.visible, weights.s, np.inf).min(axis=1, initial=np.inf)
    same = weights.s.max(axis=1, initial=NEG_INF) - lowest < 8 * ROUNDING[dtype].u
    return same[seen] | (head.scale == 0)


def empty_tensors(o: np.ndarray, lse: np.ndarray, total: Gradients | None, dtype: np.dtype, opt: Options) -> dict[str, Tensor]:
    """The requested outputs with limits of zero; their exact arrays are the given ones, filled head by head."""
    rows_q, rows_k = packed_rows(opt.cu_seqlens_q), packed_rows(opt.cu_seqlens_k)
    lse_type = DTYPES["fp64" if dtype == np.float64 else "fp32"]
    tensors = {"o": tensor(o, dtype, (rows_q,)), "lse": tensor(lse, lse_type, (slice(None), rows_q))}
    if opt.cu_seqlens_q is None:
        tensors["lse"].owned = (slice(None),)
    if total is not None:
        tensors["dq"] = tensor(total.dq, dtype, (rows_q,))
        tensors |= {name: tensor(getattr(total, name), dtype, (rows_k,)) for name in ("dk", "dv")}
        seqlen_k = len(total.dk) if total.dk.ndim == 3 else total.dk.shape[1]
        pairs = {"dbias": lse.size * seqlen_k, "dsink": lse.size}
        for name, given in {"dbias": opt.bias, "dsink": opt.learnable_sink}.items():
            if given is not None:
                tensors[name] = tensor(getattr(total, name), given.dtype)
                tensors[name].terms = max(pairs[name] // max(given.size, 1), 1)
    return tensors


def packed_rows(cu_seqlens: np.ndarray | None) -> slice:
    return slice(None) if cu_seqlens is None else slice(int(cu_seqlens[0]), int(cu_seqlens[-1]))


def tensor(exact: np.ndarray, dtype: np.dtype, owned: tuple = (slice(None),)) -> Tensor:
    limit, variance, noise = (np.zeros(exact.shape) for _ in range(3))
    return Tensor(exact, limit, variance, np.dtype(dtype), noise, np.ones(exact.shape[:-1], dtype=bool), owned)


def check(result: Mapping[str, object], expected: Expected, *, label: str = "", two_times: bool = False) -> dict[str, Report]:
    """As judge, but an AssertionError has every finding."""
    reports, findings = judge(result, expected, two_times=two_times)
    if findings:
        raise AssertionError("\n".join([f"{label}: {len(findings)} findings" if label else "", *findings]).lstrip())
    return reports


def judge(result: Mapping[str, object], expected: Expected, *, two_times: bool = False) -> tuple[dict[str, Report], list[str]]:
    """Reports by name and what is wrong, for the tensors of `result` (o, lse, dq, dk, dv, dbias, dsink) that are not None."""
    reports: dict[str, Report] = {}
    findings: list[str] = []
    for name, value in result.items():
        if value is None:
            continue
        if name not in expected.tensors:
            raise KeyError(f"{name} is not among the expected {sorted(expected.tensors)}")
        reports[name] = check_tensor(name, np.asarray(value), expected, findings)
        if two_times and name in expected.eager_error:
            error = worst(np.asarray(value), expected.tensors[name].exact)
            reports[name].two_times = error / (2 * expected.eager_error[name] + 1e-5)
    return reports, findings


@np.errstate(all="ignore")
def check_tensor(name: str, value: np.ndarray, expected: Expected, findings: list[str]) -> Report:
    target = expected.tensors[name]
    exact, report = target.exact, Report(vacuous=expected.vacuous)
    if value.shape != exact.shape:
        findings.append(f"{name}: shape {value.shape}, expected {exact.shape}")
        return report
    x = exact.copy()  # rows outside every sequence are not checked
    x[target.owned] = value[target.owned]
    store = coarser(ROUNDING[target.dtype], ROUNDING.get(value.dtype))
    limit = target.limit + store.u * np.abs(exact) + store.tiny
    findings += non_finite_findings(name, x, exact, limit, store)
    findings += zero_findings(name, x, target)
    finite = np.isfinite(exact) & np.isfinite(x)
    error = np.where(finite, x - exact, 0.0)
    ratio = np.where(finite, np.abs(error) / limit, 0.0)
    report.t1 = float(ratio.max(initial=0.0))
    if not report.t1 <= 1:
        findings.append(t1_finding(name, x, exact, limit, ratio))
    report.rms = float(np.sqrt((error**2).sum() / max((np.where(finite, exact, 0) ** 2).sum(), 1e-300)))
    sums = name in ("dbias", "dsink")
    if name == "lse" or not finite.all() or not error.size or (expected.alike and sums):
        return report
    variance = target.variance + target.noise**2 + store.mean_square * exact**2 + store.tiny**2 / 3
    findings += statistics_findings(name, error, exact, np.maximum(variance, 1e-300), expected, report)
    return report


def coarser(declared: Rounding, found: Rounding | None) -> Rounding:
    """A result may have a wider type than declared; it is checked as the declared type."""
    return declared if found is None or declared.u >= found.u else found


def non_finite_findings(name: str, x: np.ndarray, exact: np.ndarray, limit: np.ndarray, store: Rounding) -> list[str]:
    """NaN for NaN. An infinite reference value may become NaN, because its computation contains inf - inf."""
    overflow = np.isinf(x) & (np.abs(exact) + limit >= store.largest) & (np.sign(x) == np.sign(exact))
    wrong = {
        "NaN expected": np.isnan(exact) & ~np.isnan(x),
        "infinity expected": np.isinf(exact) & (exact != x) & ~np.isnan(x),
        "finite value expected": np.isfinite(exact) & ~np.isfinite(x) & ~overflow,
    }
    if name == "lse":  # -inf means no visible key: in both results or in none
        wrong["infinity expected"] = (exact == NEG_INF) & (x != NEG_INF)
    return [f"{name}: {what} {sample(bad, x, exact)}" for what, bad in wrong.items() if bad.any()]


def zero_findings(name: str, x: np.ndarray, target: Tensor) -> list[str]:
    """A row without a visible key is zero, not a small number."""
    if name not in ("o", "dq", "dk", "dv"):
        return []
    bad = target.zero[..., None] & (x != 0)
    return [f"{name}: nothing is visible {sample(bad, x, target.exact)}"] if bad.any() else []


def t1_finding(name: str, x: np.ndarray, exact: np.ndarray, limit: np.ndarray, ratio: np.ndarray) -> str:
    at = np.unravel_index(np.nanargmax(np.where(np.isnan(ratio), np.inf, ratio)), ratio.shape)
    outside = int((~(ratio <= 1)).sum())
    return (
        f"{name}: T1 worst at {tuple(map(int, at))}: got {x[at]:.9g}, exact {exact[at]:.9g}, error "
        f"{x[at] - exact[at]:.3g}, limit {limit[at]:.3g}, ratio {ratio[at]:.4g}; {outside} of {x.size} outside"
    )


def statistics_findings(
    name: str, error: np.ndarray, exact: np.ndarray, variance: np.ndarray, expected: Expected, report: Report
) -> list[str]:
    findings = []
    row_limit = ROW_LIMIT.get(name, ROW_LIMIT_GRADIENT) * (SHORT_ROW_FACTOR if error.shape[-1] < SHORT_ROW else 1)
    rows = np.sqrt((error**2).mean(axis=-1) / variance.mean(axis=-1)) / row_limit
    report.t2_row = float(rows.max())
    if report.t2_row > 1:
        at = tuple(int(i) for i in np.unravel_index(rows.argmax(), rows.shape))
        findings.append(f"{name}: T2 row {at}: {rows[at] * row_limit:.3g} times the predicted error, limit {row_limit}")
    whole_limit = WHOLE_LIMIT.get(name, WHOLE_LIMIT_GRADIENT) if expected.generic else WHOLE_LIMIT_GRADIENT
    if expected.small or expected.alike or error.size < FEW_ELEMENTS:
        whole_limit = WHOLE_LIMIT_SMALL
    whole = np.sqrt((error**2).mean() / variance.mean())
    report.t2 = float(whole / whole_limit)
    if report.t2 > 1:
        findings.append(f"{name}: T2 {whole:.3g} times the predicted error over the tensor, limit {whole_limit}")
    if expected.generic and not expected.alike and name in ("o", "dv"):
        spread = np.sqrt(((np.abs(exact) * np.sqrt(variance)).sum(axis=-1) ** 2).sum())
        report.t3 = float(abs((error * exact).sum()) / (BIAS_SIGMAS * spread)) if spread > 0 else 0.0
        if report.t3 > 1:
            sigmas = report.t3 * BIAS_SIGMAS
            findings.append(f"{name}: T3 error follows the value, {sigmas:.3g} sigmas, limit {BIAS_SIGMAS}")
    return findings


def sample(bad: np.ndarray, x: np.ndarray, exact: np.ndarray) -> str:
    at = tuple(int(i) for i in np.argwhere(bad)[0])
    return f"at {at}: got {x[at]:.9g}, exact {exact[at]:.9g}; {int(bad.sum())} of {bad.size}"


@np.errstate(invalid="ignore")
def worst(x: np.ndarray, exact: np.ndarray) -> float:
    """Largest error among the finite ones."""
    error = x.astype(np.float64) - exact
    return float(np.abs(error).max(initial=0.0, where=np.isfinite(error)))
