"""Eager attention in low precision: plain formulas, every intermediate rounded, k multiplied by the scale.

It serves only to report the ratio that is the rule of other libraries (error at most twice that of eager attention).
"""

from __future__ import annotations

import dataclasses

import numpy as np

from .reference import NEG_INF, Head, Options, add_head, empty_outputs, head_cotangents, heads, zero_gradients
from .rounding import widened


@np.errstate(all="ignore")
def eager(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    dout: np.ndarray | None = None,
    dlse: np.ndarray | None = None,
    **options,
) -> dict[str, np.ndarray]:
    """o, and dq, dk, dv when dout is given, as a framework's matrix products in v's dtype would give them."""
    opt = Options(**options)
    o, _ = empty_outputs(q, v, opt)
    total = zero_gradients(q, k, v, opt)
    for head in heads(q, k, v, opt):
        rounded = RoundedHead(head, v.dtype)
        o[head.at_q] = rounded.o
        if dout is not None:
            add_head(total, head, rounded.backward(*head_cotangents(head, dout, dlse)), opt)
    out = {"o": o}
    if dout is not None:
        out |= {name: widened(getattr(total, name), v.dtype) for name in ("dq", "dk", "dv")}
    return out


@dataclasses.dataclass
class RoundedGradients:
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    ds: np.ndarray
    dsink: float


class RoundedHead:
    def __init__(self, head: Head, dtype: np.dtype) -> None:
        self.head, self.dtype = head, dtype
        self.k = self.round(head.k * head.scale)
        self.z = self.round(head.q @ self.k.T)
        s = np.where(head.visible, self.scores(), NEG_INF)
        row_max = np.maximum(s.max(axis=1, initial=NEG_INF), head.sink)
        row_max = np.where(row_max == NEG_INF, 0.0, row_max)
        e = np.exp(s - row_max[:, None])
        row_sum = e.sum(axis=1) + np.exp(head.sink - row_max)
        self.p = self.round(e / np.where(row_sum == 0, 1.0, row_sum)[:, None])
        self.p_kept = self.round(self.p * head.keep)
        self.o = self.round(self.p_kept @ head.v)

    def round(self, x: np.ndarray) -> np.ndarray:
        return widened(x, self.dtype)

    def scores(self) -> np.ndarray:
        head, s = self.head, self.z
        if head.softcap > 0:
            s = self.round(head.softcap * self.round(np.tanh(self.round(s / head.softcap))))
        return self.round(s + head.alibi + head.bias)

    def backward(self, dout: np.ndarray, dlse: np.ndarray) -> RoundedGradients:
        head = self.head
        dp = self.round(self.round(dout @ head.v.T) * head.keep)
        delta = (self.p * dp).sum(axis=1) - dlse
        ds = self.round(self.p * (dp - delta[:, None]))
        tanh = np.tanh(self.z / head.softcap) if head.softcap > 0 else 0.0
        dz = self.round(ds * (1 - tanh**2))
        return RoundedGradients(
            dq=self.round(dz @ self.k),
            dk=self.round(self.round(dz.T @ head.q) * head.scale),
            dv=self.round(self.p_kept.T @ dout),
            ds=ds,
            dsink=0.0,
        )
