"""Bounds of the difference between a correct result and the float64 reference, for one head.

The model is a FlashAttention kernel: products accumulated in float32, P and dS rounded to the storage type
before the second product, D = rowsum(dout * o) taken from the rounded o. From the float64 quantities of the
reference, this module computes for every element of an output X a hard limit of the error, bX, and the
predicted mean square of the error, vX. In the formulas |.|, * and powers are elementwise, PV is a matrix
product, X' a transpose, M visibility, u the unit roundoff of the storage type, eta, tiny and w (mean_square)
as in Rounding, a(n) the relative error of a sum of n products (sum_error), l the row sum, m the row maximum,
g the slope of the softcap, t = tanh(z / softcap), e_x and e_t the relative errors of exp and tanh. float64
storage has smaller constants throughout (see rounding).

The limits are those of the computation; rounding the result itself (u |X|, underflow) is added by
`tolerance.check`, which knows the dtype of the result.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from .reference import NEG_INF, Head, HeadGradients, Softmax, add_broadcast, visible_product
from .rounding import ROUNDING, widened


@dataclasses.dataclass
class Tensor:
    """One output: its exact value, the limit of the error, the predicted mean square of the error."""

    exact: np.ndarray
    limit: np.ndarray
    variance: np.ndarray
    dtype: np.dtype  # the coarsest type it may be stored in
    noise: np.ndarray | float = 0.0  # part of the error that adds up with one sign; counts as noise^2
    zero: np.ndarray | None = None  # rows that must be exactly zero: nothing visible
    owned: tuple = (slice(None),)  # index of the rows that belong to a sequence; others are not checked
    terms: int = 1  # dbias, dsink: the largest number of terms in one element


class Model:
    """The constants of the arithmetic.

    exp_error and tanh_error are the relative errors of the functions used, by default those of accurate ones;
    score_ulps counts roundings of q or k to the storage type besides those of the inputs (rotary embedding);
    p_roundings is 1 if dS is computed from P as it was rounded for dV.
    """

    def __init__(
        self,
        dtype: np.dtype,
        exp_error: float | None = None,
        tanh_error: float | None = None,
        score_ulps: float = 0.0,
        p_roundings: int = 0,
    ) -> None:
        rounding = ROUNDING[dtype]
        self.dtype = dtype
        self.u, self.eta, self.tiny, self.unit = rounding.u, rounding.eta, rounding.tiny, rounding.unit
        self.sum_error, self.w = rounding.sum_error, rounding.mean_square
        self.eta_square = rounding.eta**2 / 3
        self.noise = 4 * rounding.unit  # 2^-20: error of float32 arithmetic in a weight with an exact score
        self.exp_error = 2 * rounding.unit if exp_error is None else exp_error
        self.tanh_error = rounding.unit if tanh_error is None else tanh_error
        self.score_ulps, self.p_roundings = score_ulps, p_roundings

    def typical_sum_error(self, n: int) -> float:
        """Error of a sum of n products, relative to the root of the sum of their squares: 2^-25 sqrt(n)."""
        return self.unit / 8 * np.sqrt(n)


class HeadBounds:
    """Computes the limits and variances of one head and writes them to its part of the tensors."""

    def __init__(self, model: Model, head: Head, weights: Softmax, o: np.ndarray) -> None:
        self.model, self.head, self.weights, self.o = model, head, weights, o
        self.visible = head.visible
        self.shown = head.visible.astype(np.float64)
        self.pd = weights.p * head.keep
        self.keep_max = float(np.max(head.keep, initial=1.0))
        self.slope = 1 - weights.tanh**2
        self._score_error()

    def _score_error(self) -> None:
        """kap: limit of the error of a score, which is also that of the relative error of exp(s). pi: limit of the relative
        error of p, which includes that of the row sum. f: the typical relative error of a weight.

        kap = M (g e_z + 2^-22 (|S| + |m|) + e_x + e_t |softcap t|),  e_z = a(d) |scale| |Q||K|'
        pi  = kap + max_j kap
        f   = 2^-20 + 2^-23 (|S| + |m|) + 2^-25 g sqrt(d) |scale| sqrt(Q^2 K^2')

        |S| sums the magnitudes of its terms. Where softcap is so small that e_z is not small in comparison, the
        error of the slope g counts, too: g(z + e) <= g exp(2 e / softcap), and g is at most 1. The sink is one more score.
        """
        m, head, w = self.model, self.head, self.weights
        e_z = (m.sum_error(head.q.shape[1]) + m.score_ulps * m.u) * abs(head.scale)
        e_z = e_z * (np.abs(head.q) @ np.abs(head.k).T)
        size = np.abs(w.capped) + np.abs(head.alibi) + np.abs(head.bias)
        size = size + np.abs(w.row_max)[:, None]
        per_product = m.typical_sum_error(head.q.shape[1]) + m.score_ulps * np.sqrt(m.w)
        products = abs(head.scale) * np.sqrt(head.q**2 @ (head.k**2).T)
        noise = m.noise + m.unit / 2 * size + self.slope * per_product * products
        self.noise = np.where(self.visible, noise, 0.0)
        kap = m.unit * size + m.exp_error
        self.slope_error = np.zeros(self.visible.shape)
        if head.softcap > 0:
            e_z = e_z + m.unit * np.abs(w.z)
            steepest = np.minimum(self.slope * np.exp(np.minimum(2 * e_z / head.softcap, 700)), 1.0)
            self.slope_error = np.where(self.visible, steepest - self.slope, 0.0)
            kap = kap + m.tanh_error * np.abs(w.capped)
        kap = np.where(self.visible, kap + (self.slope + self.slope_error) * e_z, 0.0)
        self.sink_error = np.zeros(len(kap))
        if head.sink > NEG_INF:
            self.sink_error += m.unit * (abs(head.sink) + np.abs(w.row_max)) + m.exp_error
        self.sink_noise = m.noise + self.sink_error / 2
        self.worst = np.maximum(kap.max(axis=1, initial=0.0), self.sink_error)
        self.pi = np.where(self.visible, relative(kap + self.worst[:, None]), 0.0)

    def add_output(self, o: Tensor, lse: Tensor) -> None:
        """hO = (u + a(Nk)) P|V| + (P * pi)|V| + eta (M|V|)/l,  bO = u|O| + hO + tiny
        vO = w (O^2 + P^2 V^2) + ((f * P)|V|)^2 + e3 (M V^2)/l^2,  e3 = eta^2/3
        bLSE = max_j kap + 2^-21 (1 + |LSE|)
        """
        m, head, pd, size = self.model, self.head, self.pd, np.abs(self.head.v)
        row_sum = np.where(self.weights.row_sum == 0, 1.0, self.weights.row_sum)
        self.lost = self.shown * (self.keep_max / row_sum)[:, None]
        p_error = (m.u + m.sum_error(head.k.shape[0]) + self.pi) * pd + m.eta * self.lost
        p_square = m.w * pd**2 + m.eta_square * self.lost**2
        noise = (self.noise + self._factor_error()) * pd
        limit = visible_product(p_error, self.visible, size)
        variance = visible_product(p_square, self.visible, size**2)
        variance += visible_product(noise, self.visible, size) ** 2
        o.limit[head.at_q], o.variance[head.at_q] = limit, variance
        o.zero[head.at_q] = ~self.visible.any(axis=1)
        self.o_error = limit + m.u * np.abs(self.o) + m.tiny  # o as the backward pass reads it: stored
        exact = self.weights.lse
        lse.limit[head.at_lse] = np.where(exact == NEG_INF, 0.0, self.worst + 2 * m.unit * (1 + np.abs(exact)))

    def _factor_error(self) -> np.ndarray | float:
        """Dropout scales the largest weight of each row, exp(0) = 1, by the same factor, and where that is inexact every
        row's largest weight has the same rounding error: the one error that never averages out.
        """
        w, factor = self.weights, self.keep_max
        if factor == 1:
            return 0.0
        error = abs(float(widened(np.float64(factor), self.model.dtype)) - factor) / factor
        return error * (self.visible & (w.s == w.s.max(axis=1, initial=NEG_INF)[:, None]))

    def add_gradients(self, tensors: dict[str, Tensor], grad: HeadGradients, dout: np.ndarray, dlse: np.ndarray) -> None:
        """Del = rowsum(|dO| * bO) + a(dv) rowsum(|dO| * (|O| + bO)): error of D
        E   = P * (Del + a(dv)|dO||V|' + 2^-22 |dlse|): what errors of dP - D + dlse do to dS
        A   = ((1 + p_roundings) u + a(N) + pi)|dZ| + 2 e_t |t||dS| + g (1 + u) E + eta M: error of dZ
        bdQ = |scale| A|K|,  bdK = |scale| sum_group A'|Q|
        bdV = sum_group ((u + a(Nq) + pi) P + eta M)'|dO|
        """
        m, head, w, visible = self.model, self.head, self.weights, self.visible
        a_dv, rows = m.sum_error(head.v.shape[1]), len(dout)
        delta_error = np.abs(dout) * (self.o_error + a_dv * (np.abs(self.o) + self.o_error))
        self.delta_error = delta_error.sum(axis=1)
        dp_error = a_dv * (np.abs(dout) @ np.abs(head.v).T) * head.keep
        row_error = self.delta_error + m.unit * np.abs(dlse)
        self.ds_error = (1 + m.u) * w.p * (dp_error + row_error[:, None])
        dz_error = ((1 + m.p_roundings) * m.u + m.sum_error(max(visible.shape)) + self.pi) * np.abs(grad.dz) + m.eta
        dz_error += (2 * m.tanh_error * np.abs(w.tanh) + self.slope_error) * np.abs(grad.ds)
        dz_error += (self.slope + self.slope_error) * self.ds_error
        dz_error = np.where(visible, dz_error, 0.0)
        p_error = (m.u + m.sum_error(rows) + self.pi) * self.pd + m.eta * self.keep_max * self.shown

        scale, dq, dk, dv = abs(head.scale), tensors["dq"], tensors["dk"], tensors["dv"]
        dq.limit[head.at_q] = scale * visible_product(dz_error, visible, np.abs(head.k))
        dk.limit[head.at_k] += scale * visible_product(dz_error.T, visible.T, np.abs(head.q))
        dv.limit[head.at_k] += visible_product(p_error.T, visible.T, np.abs(dout))
        dq.zero[head.at_q] = ~visible.any(axis=1)
        for tensor in (dk, dv):
            tensor.zero[head.at_k] &= ~visible.any(axis=0)
        self._add_gradient_variances(dq, dk, dv, grad, dout, dlse)
        if "dbias" in tensors:
            self._add_bias(tensors["dbias"], grad)
        if "dsink" in tensors:
            self._add_sink(tensors["dsink"], grad, dlse)

    def _add_gradient_variances(
        self,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        grad: HeadGradients,
        dout: np.ndarray,
        dlse: np.ndarray,
    ) -> None:
        """vD  = rowsum(w dO^2 * O^2 + w P^2 * dP^2) + rowsum(f * P * |dP|)^2
        H   = sqrt((f * gP * (|dP| + |D| + |dlse|) + gP (by_factor + in_sums))^2 + (2 e_t t dS)^2 + (e_t S dZ)^2)
        vdQ = w dQ^2 + scale^2 ((w dZ^2 + e3 M) K^2 + vD (gP K)^2 + (H|K|)^2)
        vdK = w dK^2 + scale^2 sum_group ((w dZ^2 + vD (gP)^2 + e3 M)' Q^2 + (H'|Q|)^2)
        vdV = w dV^2 + sum_group ((w P^2 + e3 M)' dO^2 + ((f * P)'|dO|)^2)

        The rounding of one p moves a whole row of o along v_j and so D by that error times dP_ij, underflow (e3)
        included; only the rounding of o itself is independent from column to column. by_factor: what _factor_error
        does to D. in_sums = 2^-25 sqrt(dv) (sqrt(dO^2 V^2') + sqrt(rowsum(dO^2 * O^2))): the sums in dP and D,
        which matter in float32 where dP and D are small beside their terms.
        """
        m, head, w, visible = self.model, self.head, self.weights, self.visible
        by_p = (m.w * w.p**2 + m.eta_square * self.lost**2) * grad.dp**2
        by_o = dout**2 * (m.w * self.o**2 + m.tiny**2 / 3)
        by_noise = visible_sum(self.noise * w.p * np.abs(grad.dp), visible)
        by_factor = visible_sum(self._factor_error() * w.p * np.abs(grad.dp), visible)
        self.delta_variance = by_o.sum(axis=1) + visible_sum(by_p, visible) + by_noise**2
        size = np.abs(grad.dp) + (np.abs(grad.delta) + np.abs(dlse))[:, None]
        in_sums = np.sqrt(dout**2 @ (head.v**2).T) * head.keep + np.sqrt((dout**2 * self.o**2).sum(axis=1))[:, None]
        in_sums *= m.typical_sum_error(head.v.shape[1])
        self.ds_noise = np.where(visible, w.p * (self.noise * size + by_factor[:, None] + in_sums), 0.0)
        noise = self.slope * self.ds_noise
        if head.softcap > 0:
            by_slope, by_score = 2 * w.tanh * grad.ds, w.capped * grad.dz
            noise = np.sqrt(noise**2 + m.tanh_error**2 * (by_slope**2 + by_score**2))
            noise = np.where(visible, noise + self.slope_error * np.abs(grad.ds), 0.0)
        gp = np.where(visible, self.slope * w.p, 0.0)
        dz_square = (1 + m.p_roundings) * m.w * grad.dz**2 + m.eta_square * self.shown
        p_square = m.w * self.pd**2 + m.eta_square * self.shown
        from_delta = np.where(visible, gp**2 * self.delta_variance[:, None], 0.0)

        in_dq = visible_product(dz_square, visible, head.k**2)
        in_dq += self.delta_variance[:, None] * visible_product(gp, visible, head.k) ** 2
        in_dq += visible_product(noise, visible, np.abs(head.k)) ** 2
        in_dk = visible_product((dz_square + from_delta).T, visible.T, head.q**2)
        in_dk += visible_product(noise.T, visible.T, np.abs(head.q)) ** 2
        in_dv = visible_product(p_square.T, visible.T, dout**2)
        in_dv += visible_product((self.noise * self.pd).T, visible.T, np.abs(dout)) ** 2
        dq.variance[head.at_q] = head.scale**2 * in_dq
        dk.variance[head.at_k] += head.scale**2 * in_dk
        dv.variance[head.at_k] += in_dv

    def _add_bias(self, dbias: Tensor, grad: HeadGradients) -> None:
        """dbias sums dS over n elements, the broadcast ones, so its error is at most the sum of theirs:

        bdB = sum ((u + a(n) + pi)|dS| + (1 + u) E + eta M)      u: summing a dS already rounded is allowed
        vdB = w dB^2 + sum (w dS^2 + e3 M) + sum_i vD (sum_j P)^2 + (sum f * P * (|dP| + |D| + |dlse|))^2

        The sums run over what bias broadcasts along; D has one error per row, common to the row's columns.
        """
        m, head = self.model, self.head
        error = (m.u + m.sum_error(dbias.terms) + self.pi) * np.abs(grad.ds) + self.ds_error + m.eta
        add_broadcast(dbias.limit, head, np.where(self.visible, error, 0.0))
        add_broadcast(dbias.variance, head, m.w * grad.ds**2 + m.eta_square * self.shown)
        p = np.where(self.visible, self.weights.p, 0.0)
        if dbias.exact.shape[-1] == 1:
            p = p.sum(axis=1, keepdims=True)
        add_broadcast(dbias.variance, head, np.nan_to_num(p**2 * self.delta_variance[:, None]))
        add_broadcast(dbias.noise, head, self.ds_noise)

    def _add_sink(self, dsink: Tensor, grad: HeadGradients, dlse: np.ndarray) -> None:
        """dsink = sum_i ps_i (dlse_i - D_i) over the n rows of all sequences. ps is the sink's probability; its
        relative error is pi_s = kap_s + max_j kap, with kap_s the error of the sink's score:

        bds = sum_i ps ((pi_s + a(n))(|D| + |dlse|) + (1 + pi_s) Del)
        vds = w ds^2 + (sum_i ps sqrt(vD))^2 + (sum_i f_s ps (|D| + |dlse|))^2

        The errors of the rows are not taken as independent: rows with almost equal probabilities (large products with a
        softcap, a bias that depends on the key alone) have almost equal rounding errors, which add up.
        """
        m, h, p = self.model, self.head.head, self.weights.p_sink
        pi = relative(self.sink_error + self.worst)
        size = np.abs(grad.delta) + np.abs(dlse)
        dsink.limit[h] += (p * ((pi + m.sum_error(dsink.terms)) * size + (1 + pi) * self.delta_error)).sum()
        dsink.variance[h] += (p * np.sqrt(self.delta_variance)).sum() ** 2
        dsink.noise[h] += (self.sink_noise * p * size).sum()


def visible_sum(x: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """Sum over the visible part of each row."""
    return np.where(visible, x, 0.0).sum(axis=1)


def relative(kap: np.ndarray) -> np.ndarray:
    """Relative error of exp for an error kap of its argument; finite even if kap is infinite."""
    return np.expm1(np.minimum(kap, 30.0))
