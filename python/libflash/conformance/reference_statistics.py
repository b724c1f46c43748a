"""The statistics of attention's rows in float64: the reference for every backend. Scores are those of `reference`.

max_logit_i = max_j s_ij over visible keys; -inf without one            the sink does not count
entropy_i = -sum_j p_ij log p_ij [- p_sink log p_sink]                  dropout does not change it; 0 without a key
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .reference import NEG_INF, Options, empty_outputs, heads, softmax


@np.errstate(all="ignore")
def statistics(q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(max_logit of rows, shaped like lse; max_logit of heads; entropy). Options are those of `reference.forward`."""
    opt = Options(**options)
    _, lse = empty_outputs(q, v, opt)
    rows, entropy = np.full(lse.shape, NEG_INF), np.zeros(lse.shape)
    largest = np.full(q.shape[-2], NEG_INF)
    for head in heads(q, k, v, opt):
        weights = softmax(head)
        top = np.where(head.visible, weights.s, NEG_INF).max(axis=1, initial=NEG_INF)
        rows[head.at_lse] = top
        largest[head.head] = max(largest[head.head], top.max(initial=NEG_INF))
        p = np.concatenate([weights.p, np.broadcast_to(weights.p_sink, (len(top),))[:, None]], axis=1)
        entropy[head.at_lse] = -np.where(p > 0, p * np.log(np.where(p > 0, p, 1.0)), 0.0).sum(axis=1)
    return rows, largest, entropy
