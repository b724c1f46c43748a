"""Forward-mode and second derivatives of attention in float64: the reference for every backend. The primal is `reference`.

A leading t marks a tangent. For row i and key j of one head; R is the dropout factor, g the slope of the softcap,
th = tanh(z / softcap):

    tz   = scale (tq_i.k_j + q_i.tk_j)     ts = g tz + tbias_ij                sums over visible keys
    mu_i = sum_j p ts + p_sink tsink       = tlse_i
    to_i = sum_j R p ((ts - mu_i) v_j + tv_j)

    dp  = R dout_i.v_j                     tdp = R (tdout_i.v_j + dout_i.tv_j)
    D_i = dout_i.o_i - dlse_i              tD_i = tdout_i.o_i + dout_i.to_i - tdlse_i
    ds  = p (dp - D_i)                     tds = p (ts - mu_i) (dp - D_i) + p (tdp - tD_i)
    dz  = g ds                             tdz = tg ds + g tds,  tg = -2 th g tz / softcap
    tdq = scale (tdz k + dz tk)            tdk = scale (tdz' q + dz' tq)       tdbias = tds
    tdv = (R p (ts - mu))' dout + (R p)' tdout
    tdsink = -sum_i p_sink ((tsink - mu_i) D_i + tD_i)

A row without a visible key has to = 0, tlse = 0 (with a sink: tsink) and adds nothing to the gradients; its dout is not read.
A hidden pair adds nothing: NaN in the tangent of a key or value reaches only the rows that see the key.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from .reference import (
    NEG_INF,
    Gradients,
    Head,
    HeadGradients,
    Options,
    Softmax,
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
from .visibility import head_part


@dataclasses.dataclass(frozen=True)
class Tangents:
    """Tangents of the inputs, shaped like them; None means zero. dout and dlse are inputs of backward only."""

    q: np.ndarray | None = None
    k: np.ndarray | None = None
    v: np.ndarray | None = None
    bias: np.ndarray | None = None
    learnable_sink: np.ndarray | None = None
    dout: np.ndarray | None = None
    dlse: np.ndarray | None = None


@dataclasses.dataclass
class HeadTangent:
    """One head: tangents of its inputs and what follows from them."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    sink: float
    tz: np.ndarray  # of the scaled products
    slope: np.ndarray  # of the softcap; 1 without
    tslope: np.ndarray
    ts: np.ndarray  # of the scores, 0 where hidden
    mu: np.ndarray  # of lse
    o: np.ndarray


def forward_tangent(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, tangents: Tangents, **options
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(o, lse, to, tlse) in float64. Options are those of `reference.forward`."""
    opt = Options(**options)
    o, lse = empty_outputs(q, v, opt)
    to, tlse = np.zeros(o.shape), np.zeros(lse.shape)
    for head in heads(q, k, v, opt):
        weights = softmax(head)
        tangent = head_tangent(head, weights, tangents)
        o[head.at_q], lse[head.at_lse] = head_output(head, weights), weights.lse
        to[head.at_q], tlse[head.at_lse] = tangent.o, tangent.mu
    return o, lse, to, tlse


@np.errstate(all="ignore")
def backward_tangent(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    tangents: Tangents,
    dlse: np.ndarray | None = None,
    **options,
) -> tuple[Gradients, Gradients]:
    """Gradients of sum(dout * o) + sum(dlse * lse), and their tangents, in float64."""
    opt = Options(**options)
    total, ttotal = zero_gradients(q, k, v, opt), zero_gradients(q, k, v, opt)
    for head in heads(q, k, v, opt):
        weights = softmax(head)
        o = head_output(head, weights)
        cotangents = head_cotangents(head, dout, dlse)
        grad = head_backward(head, weights, o, *cotangents)
        tangent = head_tangent(head, weights, tangents)
        add_head(total, head, grad, opt)
        moved = head_backward_tangent(head, weights, o, grad, tangent, *cotangents, *tcotangents(head, tangents))
        add_head(ttotal, head, moved, opt)
    return total, ttotal


@np.errstate(all="ignore")
def head_tangent(head: Head, weights: Softmax, tangents: Tangents) -> HeadTangent:
    visible, p = head.visible, weights.p
    tq, tk, tv = (
        np.zeros(x.shape) if t is None else t[at].astype(np.float64)
        for t, x, at in ((tangents.q, head.q, head.at_q), (tangents.k, head.k, head.at_k), (tangents.v, head.v, head.at_k))
    )
    tsink = 0.0 if tangents.learnable_sink is None else float(tangents.learnable_sink[head.head])
    tsink = tsink if head.sink > NEG_INF else 0.0
    tz = np.where(visible, head.scale * (tq @ head.k.T + head.q @ tk.T), 0.0)
    slope = np.where(visible, 1 - np.asarray(weights.tanh) ** 2, 0.0)
    tslope = np.where(visible, -2 * weights.tanh * slope * tz / head.softcap, 0.0) if head.softcap > 0 else np.zeros(tz.shape)
    ts = slope * tz
    if tangents.bias is not None:
        ts = ts + head_part(tangents.bias, head.batch, head.head, *visible.shape).astype(np.float64)
    ts = np.where(visible, ts, 0.0)
    mu = np.where(visible, p * ts, 0.0).sum(axis=1) + np.where(weights.p_sink > 0, weights.p_sink * tsink, 0.0)
    pd = p * head.keep
    to = visible_product(pd * np.where(visible, ts - mu[:, None], 0.0), visible, head.v) + visible_product(pd, visible, tv)
    seen = visible.any(axis=1)
    return HeadTangent(tq, tk, tv, tsink, tz, slope, tslope, ts, mu, np.where(seen[:, None], to, 0.0))


def tcotangents(head: Head, tangents: Tangents) -> tuple[np.ndarray, np.ndarray]:
    """This head's rows of the tangents of dout and dlse."""
    rows, dim_v = len(head.q), head.v.shape[1]
    tdout = np.zeros((rows, dim_v)) if tangents.dout is None else tangents.dout[head.at_q].astype(np.float64)
    return tdout, np.zeros(rows) if tangents.dlse is None else tangents.dlse[head.at_lse].astype(np.float64)


@np.errstate(all="ignore")
def head_backward_tangent(
    head: Head,
    weights: Softmax,
    o: np.ndarray,
    grad: HeadGradients,
    t: HeadTangent,
    dout: np.ndarray,
    dlse: np.ndarray,
    tdout: np.ndarray,
    tdlse: np.ndarray,
) -> HeadGradients:
    """The tangents of the gradients of one head, in the fields of the gradients; `delta` is tD."""
    visible, p, pd = head.visible, weights.p, weights.p * head.keep
    delta, tdelta = grad.delta - dlse, (tdout * o).sum(axis=1) + (dout * t.o).sum(axis=1) - tdlse
    tdp = (tdout @ head.v.T + dout @ t.v.T) * head.keep
    below = np.where(visible, t.ts - t.mu[:, None], 0.0)
    tds = np.where(visible, p * below * (grad.dp - delta[:, None]) + p * (tdp - tdelta[:, None]), 0.0)
    tdz = np.where(visible, t.tslope * grad.ds + t.slope * tds, 0.0)
    with_sink = weights.p_sink > 0
    tdsink = np.where(with_sink, weights.p_sink * ((t.sink - t.mu) * delta + tdelta), 0.0)
    return HeadGradients(
        dp=tdp,
        delta=tdelta,
        ds=tds,
        dz=tdz,
        dq=head.scale * (visible_product(tdz, visible, head.k) + visible_product(grad.dz, visible, t.k)),
        dk=head.scale * (visible_product(tdz.T, visible.T, head.q) + visible_product(grad.dz.T, visible.T, t.q)),
        dv=visible_product((pd * below).T, visible.T, dout) + visible_product(pd.T, visible.T, tdout),
        dsink=-float(tdsink.sum()) if head.sink > NEG_INF else 0.0,
    )
