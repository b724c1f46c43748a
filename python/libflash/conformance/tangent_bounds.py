"""Bounds of the error of tangents, and the check of results against them: error_bounds and tolerance for `reference_tangent`.

Only the hard limit of each element (T1) is stated. The model is that of error_bounds: float32 sums, P, P (ts - pivot), dZ and tdZ
rounded to the storage type, delta taken from the rounded o. The pivot of a row is any value between the smallest and the largest
ts of its keys (sink included), so |ts - pivot| <= |ts - mu| + W with W the largest |ts - mu|. With the names of error_bounds (u,
a(n), pi, eta, hO, Del, E):

    e_tz = a(d) |scale| (|tQ||K|' + |Q||tK|')
    e_ts = M ((g + e_g) e_tz + e_g |tz| + 2^-22 (|g tz| + |tbias|)),  e_g = 2 e_t |th| + slope error
    e_mu = rowsum(P (pi T + e_ts + a(Nk) T)) + sink part,  T = |ts - mu| + W
    b_to = ((2 u + a(Nk) + pi) P T + P (e_ts + e_mu) + eta M / l) |V| + ((u + a(Nk) + pi) P + eta M / l)|tV| + W bO + u|to|

    e_tdp = a(dv) keep (|tdO||V|' + |dO||tV|'),  e_tD = rowsum(|tdO| hO' + |dO| b_to + a(dv)(|tdO||O| + |dO||to|)) + 2^-22 |tdlse|
    A_t  = P ((pi + 2 u)(T |dp - D| + |tdp - tD|) + (e_ts + e_mu) |dp - D| + T E' + e_tdp + e_tD) + eta M      error of tds
    e_tg = (2 / softcap) ((e_t g + |th| e_g)(|tz| + e_tz) + |th| g e_tz)
    A_tz = (u + a(N)) |tdZ| + e_tg (|dS| + A) + |tg| A + (g + e_g) A_t + e_g |tds| + eta M
    b_tdq = |scale| (A_tz |K| + A_z |tK|),  b_tdk = |scale| (A_tz'|Q| + A_z'|tQ|)
    b_tdv = ((2 u + a(Nq) + pi) P T + P (e_ts + e_mu) + eta M)'|dO| + ((u + a(Nq) + pi) P + eta M)'|tdO|

A and A_z: the errors of ds and dz in error_bounds. delta and tdelta, where they are results, have the limits Del + 2^-22 |dlse|
and e_tD.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .error_bounds import HeadBounds, Model, Tensor
from .reference import (
    NEG_INF,
    Head,
    HeadGradients,
    Options,
    add_broadcast,
    add_head,
    empty_outputs,
    head_backward,
    head_cotangents,
    head_output,
    heads,
    softmax,
    visible_product,
    zero_gradients,
)
from .reference_tangent import HeadTangent, Tangents, head_backward_tangent, head_tangent, tcotangents
from .rounding import ROUNDING
from .tolerance import Report, empty_tensors, non_finite_findings, t1_finding, tensor, zero_findings

NAMES = {"o": "to", "lse": "tlse", "dq": "tdq", "dk": "tdk", "dv": "tdv", "dbias": "tdbias", "dsink": "tdsink"}


@np.errstate(all="ignore")
def expect(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    tangents: Tangents,
    *,
    dout: np.ndarray,
    dlse: np.ndarray | None = None,
    **options,
) -> dict[str, Tensor]:
    """to, tlse, tdelta, tdq, tdk, tdv (and tdbias, tdsink) and delta with their exact values and limits."""
    opt, model = Options(**options), Model(v.dtype)
    o, lse = empty_outputs(q, v, opt)
    total, ttotal = zero_gradients(q, k, v, opt), zero_gradients(q, k, v, opt)
    to, tlse = np.zeros(o.shape), np.zeros(lse.shape)
    primal = empty_tensors(o, lse, total, v.dtype, opt)
    made = empty_tensors(to, tlse, ttotal, v.dtype, opt)
    rows = made["lse"]
    delta, tdelta = (tensor(np.zeros(lse.shape), rows.dtype, rows.owned) for _ in range(2))
    for head in heads(q, k, v, opt):
        weights = softmax(head)
        value = head_output(head, weights)
        bounds = HeadBounds(model, head, weights, value)
        bounds.add_output(primal["o"], primal["lse"])
        cotangents = head_cotangents(head, dout, dlse)
        grad = head_backward(head, weights, value, *cotangents)
        bounds.add_gradients(primal, grad, *cotangents)
        tangent = head_tangent(head, weights, tangents)
        with_tangents = tcotangents(head, tangents)
        tgrad = head_backward_tangent(head, weights, value, grad, tangent, *cotangents, *with_tangents)
        to[head.at_q], tlse[head.at_lse] = tangent.o, tangent.mu
        add_head(ttotal, head, tgrad, opt)
        of_head = TangentBounds(bounds, tangent, grad, tgrad, cotangents, with_tangents)
        of_head.add(made, primal)
        of_head.add_deltas(delta, tdelta)
    return {NAMES[name]: x for name, x in made.items()} | {"delta": delta, "tdelta": tdelta}


class TangentBounds:
    """The limits of one head, added to its part of the tensors."""

    def __init__(
        self,
        bounds: HeadBounds,
        tangent: HeadTangent,
        grad: HeadGradients,
        tgrad: HeadGradients,
        cotangents: tuple[np.ndarray, np.ndarray],
        tcotangents: tuple[np.ndarray, np.ndarray],
    ) -> None:
        self.b, self.t, self.grad, self.tgrad = bounds, tangent, grad, tgrad
        self.model, self.head, self.weights = bounds.model, bounds.head, bounds.weights
        (self.dout, self.dlse), (self.tdout, self.tdlse) = cotangents, tcotangents

    def add(self, made: dict[str, Tensor], primal: dict[str, Tensor]) -> None:
        self._scores()
        self._output(made["o"], made["lse"])
        self._gradients(made)

    def add_deltas(self, delta: Tensor, tdelta: Tensor) -> None:
        """0 for a row that sees neither a key nor a sink."""
        at, counts = self.head.at_lse, self.weights.lse != NEG_INF
        e_delta = self.b.delta_error + self.model.unit * np.abs(self.dlse)
        delta.exact[at] = np.where(counts, self.grad.delta - self.dlse, 0.0)
        delta.limit[at] = np.where(counts, e_delta, 0.0)
        tdelta.exact[at] = np.where(counts, self.tgrad.delta, 0.0)
        tdelta.limit[at] = np.where(counts, self.e_tdelta, 0.0)

    def shown(self, x: np.ndarray) -> np.ndarray:
        return np.where(self.head.visible, x, 0.0)

    def _scores(self) -> None:
        m, head, t, w = self.model, self.head, self.t, self.weights
        size = np.abs(t.q) @ np.abs(head.k).T + np.abs(head.q) @ np.abs(t.k).T
        self.e_tz = (m.sum_error(head.q.shape[1]) + m.unit) * abs(head.scale) * size
        self.e_g = self.shown(2 * m.tanh_error * np.abs(w.tanh) + self.b.slope_error)
        tbias = np.abs(t.ts - t.slope * t.tz)
        e_ts = (t.slope + self.e_g) * self.e_tz + self.e_g * np.abs(t.tz) + m.unit * (np.abs(t.slope * t.tz) + tbias)
        self.e_ts = self.shown(e_ts)
        below = self.shown(np.abs(t.ts - t.mu[:, None]))
        sink = np.where(w.p_sink > 0, np.abs(t.sink - t.mu), 0.0)
        widest = np.maximum(below.max(axis=1, initial=0.0), sink)
        self.spread = self.shown(below + widest[:, None])
        a = m.sum_error(head.k.shape[0])
        self.e_mu = (w.p * ((self.b.pi + a) * self.spread + self.e_ts)).sum(axis=1)
        pi_sink = np.expm1(np.minimum(self.b.sink_error + self.b.worst, 30.0))
        self.e_mu += np.where(w.p_sink > 0, w.p_sink * ((pi_sink + a) * (sink + widest) + m.unit * abs(t.sink)), 0.0)
        self.e_mu += 2 * m.unit * (np.abs(t.mu) + widest)
        self.widest = widest
        self.e_below = self.shown(self.e_ts + self.e_mu[:, None])

    def _output(self, to: Tensor, tlse: Tensor) -> None:
        m, head, b, t = self.model, self.head, self.b, self.t
        a, visible = m.sum_error(head.k.shape[0]), head.visible
        lost = m.eta * b.lost
        by_v = (2 * m.u + a + b.pi) * b.pd * self.spread + b.pd * self.e_below + lost * (1 + self.spread)
        by_tv = (m.u + a + b.pi) * b.pd + lost
        limit = visible_product(self.shown(by_v), visible, np.abs(head.v))
        limit += visible_product(self.shown(by_tv), visible, np.abs(t.v))
        limit += self.widest[:, None] * b.o_error
        to.limit[head.at_q], to.zero[head.at_q] = limit, ~visible.any(axis=1)
        tlse.limit[head.at_lse] = self.e_mu
        self.to_error = limit + m.u * np.abs(t.o) + m.tiny

    def _gradients(self, made: dict[str, Tensor]) -> None:
        m, head, b, t, w, grad, tgrad = self.model, self.head, self.b, self.t, self.weights, self.grad, self.tgrad
        visible, scale = head.visible, abs(head.scale)
        a_dv, a_n = m.sum_error(head.v.shape[1]), m.sum_error(max(visible.shape))
        e_tdp = a_dv * (np.abs(self.tdout) @ np.abs(head.v).T + np.abs(self.dout) @ np.abs(t.v).T) * head.keep
        e_tdelta = np.abs(self.tdout) * (b.o_error + a_dv * np.abs(b.o))
        e_tdelta += np.abs(self.dout) * (self.to_error + a_dv * np.abs(t.o))
        self.e_tdelta = e_tdelta.sum(axis=1) + m.unit * np.abs(self.tdlse)
        delta = grad.delta - self.dlse
        excess, texcess = np.abs(grad.dp - delta[:, None]), np.abs(tgrad.dp - tgrad.delta[:, None])
        e_excess = np.where(w.p > 0, b.ds_error / np.where(w.p > 0, w.p, 1.0), 0.0)
        e_tds = (b.pi + 2 * m.u + a_n) * (self.spread * excess + texcess)
        e_tds += self.e_below * (excess + e_excess) + self.spread * e_excess + e_tdp + self.e_tdelta[:, None]
        e_tds = self.shown(w.p * e_tds + m.eta * (1 + self.spread))
        e_ds = self.shown(b.pi * np.abs(grad.ds) + b.ds_error)
        e_tdz = (m.u + a_n) * np.abs(tgrad.dz) + (t.slope + self.e_g) * e_tds + self.e_g * np.abs(tgrad.ds) + m.eta
        if head.softcap > 0:
            th = np.abs(w.tanh)
            e_tslope = (m.tanh_error * t.slope + th * self.e_g) * (np.abs(t.tz) + self.e_tz) + th * t.slope * self.e_tz
            e_tslope = 2 / head.softcap * (e_tslope + m.unit * th * t.slope * np.abs(t.tz))
            e_tdz = e_tdz + e_tslope * (np.abs(grad.ds) + e_ds) + np.abs(t.tslope) * e_ds
        e_tdz = self.shown(e_tdz)
        e_dz = (m.u + a_n + b.pi) * np.abs(grad.dz) + m.eta + self.e_g * np.abs(grad.ds)
        e_dz = self.shown(e_dz + (t.slope + self.e_g) * b.ds_error)
        by_dout = (2 * m.u + a_n + b.pi) * b.pd * self.spread + b.pd * self.e_below + m.eta * head_keep(head) * (1 + self.spread)
        by_tdout = (m.u + a_n + b.pi) * b.pd + m.eta * head_keep(head)
        in_dq = visible_product(e_tdz, visible, np.abs(head.k)) + visible_product(e_dz, visible, np.abs(t.k))
        in_dk = visible_product(e_tdz.T, visible.T, np.abs(head.q)) + visible_product(e_dz.T, visible.T, np.abs(t.q))
        in_dv = visible_product(self.shown(by_dout).T, visible.T, np.abs(self.dout))
        in_dv += visible_product(self.shown(by_tdout).T, visible.T, np.abs(self.tdout))
        made["dq"].limit[head.at_q] = scale * in_dq
        made["dk"].limit[head.at_k] += scale * in_dk
        made["dv"].limit[head.at_k] += in_dv
        made["dq"].zero[head.at_q] = ~visible.any(axis=1)
        for name in ("dk", "dv"):
            made[name].zero[head.at_k] &= ~visible.any(axis=0)
        if "dbias" in made:
            error = e_tds + m.sum_error(made["dbias"].terms) * np.abs(tgrad.ds)
            add_broadcast(made["dbias"].limit, head, self.shown(error))
        if "dsink" in made:
            made["dsink"].limit[head.head] += self._sink_error(made["dsink"].terms, delta)

    def _sink_error(self, terms: int, delta: np.ndarray) -> float:
        m, b, t, w = self.model, self.b, self.t, self.weights
        pi = np.expm1(np.minimum(b.sink_error + b.worst, 30.0)) + m.sum_error(terms)
        size = np.abs(t.sink - t.mu) * np.abs(delta) + np.abs(self.tgrad.delta)
        moved = self.e_mu * np.abs(delta) + np.abs(t.sink - t.mu) * (b.delta_error + m.unit * np.abs(delta)) + self.e_tdelta
        return float(np.where(w.p_sink > 0, w.p_sink * (pi * size + (1 + pi) * moved), 0.0).sum())


def head_keep(head: Head) -> np.ndarray:
    return np.where(head.visible, np.asarray(head.keep), 0.0)


def check(result: Mapping[str, object], expected: Mapping[str, Tensor], label: str = "") -> dict[str, float]:
    """Raise AssertionError with every finding; the largest error of each tensor, as a part of its limit."""
    ratios, findings = judge(result, expected)
    if findings:
        raise AssertionError("\n".join([f"{label}: {len(findings)} findings", *findings]))
    return ratios


def reports(result: Mapping[str, object], expected: Mapping[str, Tensor], label: str = "") -> dict[str, Report]:
    """As check, with the root mean square of the errors."""
    ratios = check(result, expected, label)
    return {name: Report(t1=t1, rms=relative_error(np.asarray(result[name]), expected[name])) for name, t1 in ratios.items()}


@np.errstate(all="ignore")
def relative_error(value: np.ndarray, target: Tensor) -> float:
    """Root mean square error relative to that of the exact values, over the finite ones."""
    exact, error = target.exact[target.owned], (value - target.exact)[target.owned]
    finite = np.isfinite(error)
    return float(np.sqrt((error[finite] ** 2).sum() / max((exact[finite] ** 2).sum(), 1e-300)))


@np.errstate(all="ignore")
def judge(result: Mapping[str, object], expected: Mapping[str, Tensor]) -> tuple[dict[str, float], list[str]]:
    """The largest error of each tensor, as a part of its limit, and what is wrong."""
    findings: list[str] = []
    ratios = {name: check_tensor(name, np.asarray(result[name]), expected[name], findings) for name in expected if name in result}
    return ratios, findings


def check_tensor(name: str, value: np.ndarray, target: Tensor, findings: list[str]) -> float:
    exact, store = target.exact, ROUNDING[target.dtype]
    if value.shape != exact.shape:
        findings.append(f"{name}: shape {value.shape}, expected {exact.shape}")
        return 0.0
    x = exact.copy()
    x[target.owned] = value[target.owned]
    limit = target.limit + store.u * np.abs(exact) + store.tiny
    found = non_finite_findings(name, x, exact, limit, store) + zero_findings(name.removeprefix("t"), x, target)
    finite = np.isfinite(exact) & np.isfinite(x)
    ratio = np.where(finite, np.abs(x - exact) / limit, 0.0)
    if not ratio.max(initial=0.0) <= 1:
        found.append(t1_finding(name, x, exact, limit, ratio))
    findings += found
    return float(ratio.max(initial=0.0))
