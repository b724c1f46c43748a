"""Attention in float64, forward and backward: the reference for every backend.

No tiling, no online softmax, nothing shared with the library. For query i and key j of one head, in this
order:

    z = softmax_scale * q_i . k_j                        softmax_scale defaults to 1/sqrt(head_dim)
    s = softcap * tanh(z / softcap)                      softcap = 0: s = z
    s = s - alibi_slope * |i + Lk - Lq - j| + bias_ij
    hidden keys (causal, window, mask, block_mask, a bias of -inf) are not in the sum
    p = exp(s - lse),  lse = log(sum_visible exp(s) + exp(sink))
    o_i = sum_j p_ij * keep_ij * v_j                     keep: 0 or the factor of dropout, see dropout_mask

Tensors are (batch, seqlen, heads, head_dim), or (total, heads, head_dim) with cu_seqlens; `lse` is the
natural logarithm, (batch, heads, seqlen_q) or (heads, total_q). Lq and Lk are the valid lengths: seqused,
else the whole sequence. bias and mask broadcast from (B|1, H|1, Sq|1, Sk|1), block_mask is
(B|1, H|1, ceil(Sq/128), ceil(Sk/128)); for packed tensors their rows and columns count inside the sequence
and B is the sequence number.

With positions (row_begin, row_step, row_positions and the same of columns), row i and key j have these positions in a longer
sequence: alibi is -alibi_slope * |position of the row - position of the key|, and causal, window and dropout use the positions,
too. sequence_numbers, head_begin and heads_total replace batch, head and the number of heads in the dropout mask. `earlier`, the
(o, lse) of other keys, counts as one more key of score lse and value o. `backward_part` computes the gradients of some of the
keys of the rows; the o and lse that it gets are those over all keys.

A row without a visible key has o = 0, lse = -inf (or the sink) and no gradient, and so has a row past the
used length (its lse is -inf even with a sink). Hidden keys do not affect a row, even if they are NaN.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np

from .dropout_mask import keep_factor, keep_mask
from .visibility import head_part, visible_keys

NEG_INF = -np.inf


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreNumbers:
    """The numbers among the options that change the scores of attention and of decode."""

    softmax_scale: float | None = None
    softcap: float = 0.0

    def given(self, *more: str) -> dict:
        """These numbers and the fields `more`, without those at their defaults."""
        names = {*(field.name for field in dataclasses.fields(ScoreNumbers)), *more}
        fields = [field for field in dataclasses.fields(self) if field.name in names]
        return {field.name: getattr(self, field.name) for field in fields if getattr(self, field.name) != field.default}


@dataclasses.dataclass(frozen=True)
class Options(ScoreNumbers):
    """All arguments except the tensors, with the names of `libflash.attention`."""

    causal: bool = False
    causal_align: str = "bottom_right"
    window_size: tuple[int, int] = (-1, -1)
    alibi_slopes: np.ndarray | None = None
    bias: np.ndarray | None = None
    mask: np.ndarray | None = None
    learnable_sink: np.ndarray | None = None
    block_mask: np.ndarray | None = None
    dropout_p: float = 0.0
    seed: int = 0
    offset: int = 0
    cu_seqlens_q: np.ndarray | None = None
    cu_seqlens_k: np.ndarray | None = None
    seqused_q: np.ndarray | None = None
    seqused_k: np.ndarray | None = None
    row_begin: int | np.ndarray | None = None
    row_step: int = 1
    column_begin: int | np.ndarray | None = None
    column_step: int = 1
    row_positions: np.ndarray | None = None
    column_positions: np.ndarray | None = None
    sequence_numbers: np.ndarray | None = None
    head_begin: int = 0
    heads_total: int = 0

    @property
    def has_positions(self) -> bool:
        return any(x is not None for x in (self.row_begin, self.column_begin, self.row_positions, self.column_positions))


@dataclasses.dataclass
class Head:
    """One query head of one sequence, as the formulas see it."""

    batch: int
    head: int
    at_q: tuple  # index of this head's rows in q, o, dq
    at_k: tuple  # index of its key head's rows in k, v, dk, dv
    at_lse: tuple
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    scale: float
    softcap: float
    alibi: np.ndarray | float  # added to the scores, zero if absent
    bias: np.ndarray | float
    visible: np.ndarray
    sink: float  # -inf if absent
    keep: np.ndarray | float  # dropout: 0 or keep_factor(); 1 if absent


@dataclasses.dataclass
class Softmax:
    """The quantities of one head that forward, backward and the error bounds share."""

    z: np.ndarray  # scaled products
    capped: np.ndarray  # after the softcap, before alibi and bias
    tanh: np.ndarray | float  # tanh(z / softcap), zero without softcap
    s: np.ndarray  # final scores, -inf where hidden
    row_max: np.ndarray  # over visible keys and the sink; 0 where there is neither
    row_sum: np.ndarray  # of exp(s - row_max), sink included
    p: np.ndarray  # before dropout
    p_sink: np.ndarray
    lse: np.ndarray


@dataclasses.dataclass
class HeadGradients:
    dp: np.ndarray  # gradient of the probabilities before dropout
    delta: np.ndarray  # rowsum(dout * o)
    ds: np.ndarray
    dz: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dsink: float


@dataclasses.dataclass
class Gradients:
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dbias: np.ndarray | None
    dsink: np.ndarray | None


def forward(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, earlier: tuple[np.ndarray, np.ndarray] | None = None, **options
) -> tuple[np.ndarray, np.ndarray]:
    """(o, lse) in float64. Options are the fields of `Options`."""
    opt = Options(**options)
    o, lse = empty_outputs(q, v, opt)
    for head in heads(q, k, v, opt):
        if earlier is not None:
            head.sink = earlier[1][head.at_lse].astype(np.float64)
        weights = softmax(head)
        o[head.at_q] = head_output(head, weights)
        if earlier is not None:
            known = head.sink > NEG_INF
            o[head.at_q][known] += weights.p_sink[known, None] * earlier[0][head.at_q][known]
        lse[head.at_lse] = weights.lse
    return o, lse


@np.errstate(all="ignore")
def backward_part(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    o: np.ndarray,
    lse: np.ndarray,
    dlse: np.ndarray | None = None,
    **options,
) -> Gradients:
    """The gradients of these keys and their share of dq; o, lse and dlse are those over all keys of the rows."""
    opt = Options(**options)
    total = zero_gradients(q, k, v, opt)
    for head in heads(q, k, v, opt):
        weights = softmax(head)
        whole = lse[head.at_lse][:, None]
        weights.p = np.where(head.visible & (whole > NEG_INF), np.exp(weights.s - whole), 0.0)
        weights.p_sink = np.exp(head.sink - lse[head.at_lse])
        add_head(total, head, head_backward(head, weights, o[head.at_q], *head_cotangents(head, dout, dlse)), opt)
    return total


@np.errstate(all="ignore")
def backward(
    dout: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, dlse: np.ndarray | None = None, **options
) -> Gradients:
    """Gradients in float64 of sum(dout * o) + sum(dlse * lse); o and lse are computed here, not passed."""
    opt = Options(**options)
    total = zero_gradients(q, k, v, opt)
    for head in heads(q, k, v, opt):
        weights = softmax(head)
        o = head_output(head, weights)
        add_head(total, head, head_backward(head, weights, o, *head_cotangents(head, dout, dlse)), opt)
    return total


def heads(q: np.ndarray, k: np.ndarray, v: np.ndarray, opt: Options) -> Iterator[Head]:
    """Every (sequence, query head), widened to float64 and cut to its valid rows."""
    group_size = q.shape[-2] // max(k.shape[-2], 1)
    scale = 1 / np.sqrt(q.shape[-1]) if opt.softmax_scale is None else float(opt.softmax_scale)
    rows_q = sequence_rows(q, opt.cu_seqlens_q, opt.seqused_q)
    rows_k = sequence_rows(k, opt.cu_seqlens_k, opt.seqused_k)
    for b, (at_row_q, at_row_k) in enumerate(zip(rows_q, rows_k, strict=True)):
        positions = sequence_positions(opt, b, at_row_q, at_row_k)
        for h in range(q.shape[-2]):
            at_q, at_k = (*at_row_q, h), (*at_row_k, h // group_size)
            yield Head(
                batch=b,
                head=h,
                at_q=at_q,
                at_k=at_k,
                at_lse=(*at_row_q[:-1], h, at_row_q[-1]),
                q=q[at_q].astype(np.float64),
                k=k[at_k].astype(np.float64),
                v=v[at_k].astype(np.float64),
                scale=scale,
                softcap=float(opt.softcap),
                **score_terms(opt, b, h, positions),
                keep=dropout_factor(opt, b, q.shape[-2], h, positions),
            )


def sequence_rows(x: np.ndarray, cu_seqlens: np.ndarray | None, seqused: np.ndarray | None) -> list[tuple]:
    """Index of each sequence's valid rows: (batch, slice) in a dense tensor, (slice,) in a packed one."""
    if cu_seqlens is None:
        starts = [((b,), 0, x.shape[1]) for b in range(x.shape[0])]
    else:
        bounds = [int(c) for c in cu_seqlens]
        starts = [((), start, max(stop - start, 0)) for start, stop in itertools.pairwise(bounds)]
    used = [rows for _, _, rows in starts]
    if seqused is not None:
        used = [min(max(int(n), 0), rows) for n, rows in zip(seqused, used, strict=True)]
    return [(*lead, slice(start, start + n)) for (lead, start, _), n in zip(starts, used, strict=True)]


@dataclasses.dataclass
class Positions:
    """The positions of the rows and keys of one sequence."""

    rows: np.ndarray
    columns: np.ndarray
    has_positions: bool  # otherwise rows and columns are numbered from 0

    @property
    def distance(self) -> np.ndarray:
        """Position of each row minus that of each key, as ALiBi counts: without positions the last row is aligned with the
        last key.
        """
        shift = 0 if self.has_positions else len(self.columns) - len(self.rows)
        return self.rows[:, None] + shift - self.columns[None, :]


def sequence_positions(opt: Options, b: int, at_row_q: tuple, at_row_k: tuple) -> Positions:
    def side(begin: int | np.ndarray | None, step: int, positions: np.ndarray | None, at: tuple) -> np.ndarray:
        if positions is not None:
            return np.asarray(positions)[at].astype(np.int64)
        first = 0 if begin is None else int(begin if np.ndim(begin) == 0 else begin[b])
        return first + step * np.arange(at[-1].stop - at[-1].start, dtype=np.int64)

    return Positions(
        side(opt.row_begin, opt.row_step, opt.row_positions, at_row_q),
        side(opt.column_begin, opt.column_step, opt.column_positions, at_row_k),
        opt.has_positions,
    )


def score_terms(opt: Options, b: int, h: int, positions: Positions) -> dict:
    """The terms added to the scores of one head, its sink, and its visible keys."""
    alibi, bias, sink = 0.0, 0.0, NEG_INF
    lq, lk = len(positions.rows), len(positions.columns)
    if opt.alibi_slopes is not None:
        slopes = np.asarray(opt.alibi_slopes, dtype=np.float64)
        slope = slopes[h] if slopes.ndim == 1 else slopes[b, h]
        alibi = -slope * np.abs(positions.distance)
    visible = visible_keys(
        lq,
        lk,
        causal=opt.causal,
        causal_align=opt.causal_align,
        window_size=opt.window_size,
        mask=opt.mask,
        block_mask=opt.block_mask,
        batch=b,
        head=h,
        positions=(positions.rows, positions.columns) if positions.has_positions else None,
    )
    if opt.bias is not None:
        bias = head_part(opt.bias, b, h, lq, lk).astype(np.float64)
        visible &= bias != NEG_INF
    if opt.learnable_sink is not None:
        sink = float(opt.learnable_sink[h])
    return {"alibi": alibi, "bias": bias, "sink": sink, "visible": visible}


def dropout_factor(opt: Options, b: int, heads_q: int, h: int, positions: Positions) -> np.ndarray | float:
    if opt.dropout_p == 0:
        return 1.0
    sequence = b if opt.sequence_numbers is None else int(opt.sequence_numbers[b])
    total = opt.heads_total or heads_q
    kept = keep_mask(opt.dropout_p, opt.seed, opt.offset, sequence, total, opt.head_begin + h, positions.rows, positions.columns)
    return kept * keep_factor(opt.dropout_p)


@np.errstate(all="ignore")  # NaN and inf in the inputs are allowed
def softmax(head: Head) -> Softmax:
    z = head.scale * (head.q @ head.k.T)
    tanh = np.tanh(z / head.softcap) if head.softcap > 0 else 0.0
    capped = head.softcap * tanh if head.softcap > 0 else z
    s = np.where(head.visible, capped + head.alibi + head.bias, NEG_INF)
    row_max = np.maximum(s.max(axis=1, initial=NEG_INF), head.sink)
    row_max = np.where(row_max == NEG_INF, 0.0, row_max)
    e = np.where(head.visible, np.exp(s - row_max[:, None]), 0.0)
    e_sink = np.exp(head.sink - row_max)
    row_sum = e.sum(axis=1) + e_sink
    empty = row_sum == 0
    divisor = np.where(empty, 1.0, row_sum)
    lse = np.where(empty, NEG_INF, row_max + np.log(divisor))
    p = np.where(head.visible, e / divisor[:, None], 0.0)  # also if the row is NaN: hidden keys get no gradient
    return Softmax(z, capped, tanh, s, row_max, row_sum, p, e_sink / divisor, lse)


def head_output(head: Head, weights: Softmax) -> np.ndarray:
    return visible_product(weights.p * head.keep, head.visible, head.v)


@np.errstate(all="ignore")
def head_backward(head: Head, weights: Softmax, o: np.ndarray, dout: np.ndarray, dlse: np.ndarray) -> HeadGradients:
    p, visible = weights.p, head.visible
    dp = (dout @ head.v.T) * head.keep
    delta = (dout * o).sum(axis=1)
    ds = np.where(visible, p * (dp - delta[:, None] + dlse[:, None]), 0.0)
    dz = np.where(visible, (1 - weights.tanh**2) * ds, 0.0)
    return HeadGradients(
        dp=dp,
        delta=delta,
        ds=ds,
        dz=dz,
        dq=head.scale * visible_product(dz, visible, head.k),
        dk=head.scale * visible_product(dz.T, visible.T, head.q),
        dv=visible_product((p * head.keep).T, visible.T, dout),
        dsink=float((weights.p_sink * (dlse - delta)).sum()) if head.sink > NEG_INF else 0.0,
    )


@np.errstate(all="ignore")
def visible_product(weights: np.ndarray, visible: np.ndarray, values: np.ndarray) -> np.ndarray:
    """weights @ values, where a hidden pair is absent: its weight is 0 and even 0 * NaN adds nothing."""
    broken = ~np.isfinite(values)
    if not broken.any():
        return weights @ values
    out = weights @ np.where(broken, 0.0, values)
    for j in np.flatnonzero(broken.any(axis=1)):
        rows = visible[:, j]
        out[rows] += weights[rows, j, None] * np.where(broken[j], values[j], 0.0)
    return out


def head_cotangents(head: Head, dout: np.ndarray, dlse: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """This head's rows of dout and dlse, float64."""
    rows = dout[head.at_q].astype(np.float64)
    return rows, np.zeros(len(rows)) if dlse is None else dlse[head.at_lse].astype(np.float64)


def empty_outputs(q: np.ndarray, v: np.ndarray, opt: Options) -> tuple[np.ndarray, np.ndarray]:
    """o = 0 and lse = -inf: the results of rows that belong to no sequence."""
    lse_shape = (q.shape[0], q.shape[2], q.shape[1]) if opt.cu_seqlens_q is None else (q.shape[1], q.shape[0])
    return np.zeros((*q.shape[:-1], v.shape[-1])), np.full(lse_shape, NEG_INF)


def zero_gradients(q: np.ndarray, k: np.ndarray, v: np.ndarray, opt: Options) -> Gradients:
    bias, sink = opt.bias, opt.learnable_sink
    return Gradients(
        *(np.zeros(x.shape) for x in (q, k, v)),
        dbias=None if bias is None else np.zeros(bias.shape),
        dsink=None if sink is None else np.zeros(sink.shape),
    )


def add_head(total: Gradients, head: Head, grad: HeadGradients, opt: Options) -> None:
    """Add the gradients of one query head. dk and dv sum over the query heads of a group, dbias and dsink over what bias and sink
    broadcast along.
    """
    total.dq[head.at_q] = grad.dq
    total.dk[head.at_k] += grad.dk
    total.dv[head.at_k] += grad.dv
    if total.dbias is not None:
        add_broadcast(total.dbias, head, grad.ds)
    if total.dsink is not None:
        total.dsink[head.head] += grad.dsink


def add_broadcast(total: np.ndarray, head: Head, plane: np.ndarray) -> None:
    """Add a head's (Lq, Lk) plane to its part of a (B|1, H|1, Sq|1, Sk|1) array."""
    target = total.reshape((1,) * (4 - total.ndim) + total.shape)
    for axis in (0, 1):
        if target.shape[2 + axis] == 1:
            plane = plane.sum(axis=axis, keepdims=True)
    b = head.batch if target.shape[0] > 1 else 0
    h = head.head if target.shape[1] > 1 else 0
    target[b, h, : plane.shape[0], : plane.shape[1]] += plane
