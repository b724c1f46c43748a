"""The reference against an independent implementation of the definition: single sums, differences, and identities."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dropout_mask import keep_factor, keep_mask
from reference import Options, backward, forward, heads, softmax

B, SQ, SK, HQ, HK, D, DV = 2, 5, 7, 4, 2, 3, 4
PACKED = {"cu_seqlens_q": np.array([0, 3, 3, 8]), "cu_seqlens_k": np.array([0, 4, 6, 12])}


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def bools(*shape: int, keep: float = 0.7) -> np.ndarray:
    return np.random.default_rng(list(shape)).random(shape) < keep


DENSE_OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "causal-top-left": {"causal": True, "causal_align": "top_left"},
    "window": {"window_size": (1, 2)},
    "window-left": {"window_size": (2, -1)},
    "window-top-left": {"window_size": (1, 1), "causal_align": "top_left"},
    "causal-window": {"causal": True, "window_size": (2, 5)},
    "scale": {"softmax_scale": -0.7},
    "scale-zero": {"softmax_scale": 0.0},
    "softcap": {"softcap": 0.8},
    "alibi": {"alibi_slopes": np.array([0.5, 0.25, 0.1, 1.0])},
    "alibi-batch": {"alibi_slopes": abs(normal(B, HQ)), "causal": True},
    "bias": {"bias": normal(B, HQ, SQ, SK)},
    "bias-keys": {"bias": normal(1, HQ, 1, SK)},
    "bias-rows": {"bias": normal(B, 1, SQ, 1), "softcap": 1.5},
    "mask": {"mask": bools(B, HQ, SQ, SK)},
    "mask-keys": {"mask": bools(B, 1, 1, SK)},
    "block-mask": {"block_mask": np.array([[[[True]], [[True]], [[False]], [[True]]]])},
    "sink": {"learnable_sink": normal(HQ)},
    "sink-empty-rows": {"learnable_sink": normal(HQ), "mask": bools(1, 1, SQ, 1, keep=0.5), "causal": True},
    "dropout": {"dropout_p": 0.25, "seed": 5, "offset": 2},
    "used": {"seqused_q": np.array([3, 5]), "seqused_k": np.array([7, 2]), "causal": True, "alibi_slopes": abs(normal(HQ))},
    "used-none": {"seqused_q": np.array([0, 4]), "seqused_k": np.array([5, 0]), "learnable_sink": normal(HQ)},
    "all": {
        "causal": True,
        "window_size": (3, -1),
        "softmax_scale": 0.4,
        "softcap": 2.0,
        "alibi_slopes": abs(normal(B, HQ)),
        "bias": normal(1, HQ, SQ, SK),
        "mask": bools(B, 1, SQ, SK),
        "learnable_sink": normal(HQ),
        "dropout_p": 0.5,
    },
}
PACKED_OPTIONS = {
    "packed": {},
    "packed-causal": {"causal": True},
    "packed-all": {
        "window_size": (2, 1),
        "softcap": 2.0,
        "alibi_slopes": abs(normal(3, HQ)),
        "bias": normal(3, 1, 5, 6),
        "mask": bools(3, HQ, 1, 6),
        "learnable_sink": normal(HQ),
        "dropout_p": 0.25,
        "seqused_k": np.array([4, 1, 5]),
        "seqused_q": np.array([2, 0, 5]),
    },
}


def problem(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict]:
    """q, k, v and options of a named tiny problem."""
    if name in DENSE_OPTIONS:
        return normal(B, SQ, HQ, D), normal(B, SK, HK, D), normal(B, SK, HK, DV), DENSE_OPTIONS[name]
    return normal(9, HQ, D), normal(12, HK, D), normal(12, HK, DV), PACKED | PACKED_OPTIONS[name]


EVERY = [*DENSE_OPTIONS, *PACKED_OPTIONS]


# The definition again: one query at a time, plain sums.


def row_by_sums(q_row: np.ndarray, k: np.ndarray, v: np.ndarray, at: dict, opt: dict) -> tuple[np.ndarray, float]:
    """o and lse of query at["i"], head at["h"], sequence at["b"] with lengths at["lq"], at["lk"]."""
    b, h, i, lq, lk = (at[name] for name in ("b", "h", "i", "lq", "lk"))
    scale = opt.get("softmax_scale")
    scale = 1 / math.sqrt(len(q_row)) if scale is None else scale
    diagonal = i if opt.get("causal_align") == "top_left" else i + lk - lq
    left, right = opt.get("window_size", (-1, -1))
    scores = {}
    for j in range(lk):
        if opt.get("causal") and j > diagonal:
            continue
        if (left >= 0 and j < diagonal - left) or (right >= 0 and j > diagonal + right):
            continue
        if "mask" in opt and not entry(opt["mask"], b, h, i, j):
            continue
        if "block_mask" in opt and not entry(opt["block_mask"], b, h, i // 128, j // 128):
            continue
        s = scale * math.fsum(q_row * k[j])
        if opt.get("softcap"):
            s = opt["softcap"] * math.tanh(s / opt["softcap"])
        if "alibi_slopes" in opt:
            slopes = np.atleast_2d(opt["alibi_slopes"])
            s -= slopes[b % len(slopes), h] * abs(i + lk - lq - j)
        if "bias" in opt:
            s += entry(opt["bias"], b, h, i, j)
        scores[j] = s
    logits = [*scores.values(), *([opt["learnable_sink"][h]] if "learnable_sink" in opt else [])]
    if not logits:
        return np.zeros(v.shape[1]), -np.inf
    lse = math.log(math.fsum(math.exp(s) for s in logits))
    p_drop = opt.get("dropout_p", 0)
    kept = keep_mask(p_drop, opt.get("seed", 0), opt.get("offset", 0), b, HQ, h, lq, lk) * keep_factor(p_drop)
    return sum((math.exp(s - lse) * kept[i, j] * v[j] for j, s in scores.items()), np.zeros(v.shape[1])), lse


def entry(array: np.ndarray, *index: int):
    return array[tuple(i if size > 1 else 0 for i, size in zip(index, array.shape, strict=True))]


@pytest.mark.parametrize("name", EVERY)
def test_forward_is_the_definition(name: str) -> None:
    q, k, v, opt = problem(name)
    o, lse = forward(q, k, v, **opt)
    packed = "cu_seqlens_q" in opt
    starts_q = opt["cu_seqlens_q"] if packed else [0] * B
    starts_k = opt["cu_seqlens_k"] if packed else [0] * B
    for b in range(3 if packed else B):
        q_b, k_b, v_b = (x if packed else x[b] for x in (q, k, v))
        capacity_q, capacity_k = (int(s[b + 1] - s[b]) for s in (starts_q, starts_k)) if packed else (SQ, SK)
        lq = int(opt.get("seqused_q", [capacity_q] * 3)[b])
        lk = int(opt.get("seqused_k", [capacity_k] * 3)[b])
        for h in range(HQ):
            keys = (slice(starts_k[b], starts_k[b] + lk), h // (HQ // HK))
            for i in range(capacity_q):
                row = starts_q[b] + i
                want, want_lse = np.zeros(DV), -np.inf
                if i < lq:
                    at = {"b": b, "h": h, "i": i, "lq": lq, "lk": lk}
                    want, want_lse = row_by_sums(q_b[row, h], k_b[keys], v_b[keys], at, opt)
                got, got_lse = (o[row, h], lse[h, row]) if packed else (o[b, row, h], lse[b, h, row])
                np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-13)
                np.testing.assert_allclose(got_lse, want_lse, rtol=1e-12, atol=1e-13)


# Gradients: differences, and forward against reverse mode.


def varied(name: str) -> tuple[dict[str, np.ndarray], dict]:
    """The arrays of a problem that have gradients, and its other options."""
    q, k, v, opt = problem(name)
    arrays = {"q": q, "k": k, "v": v} | {key: opt[key] for key in ("bias", "learnable_sink") if key in opt}
    return arrays, {key: value for key, value in opt.items() if key not in arrays}


def loss(arrays: dict, opt: dict, dout: np.ndarray, dlse: np.ndarray) -> float:
    o, lse = forward(**arrays, **opt)
    return float((dout * o).sum() + (dlse * np.where(np.isfinite(lse), lse, 0)).sum())


def gradients(arrays: dict, opt: dict, dout: np.ndarray, dlse: np.ndarray) -> dict[str, np.ndarray]:
    grad = backward(dout, **arrays, dlse=dlse, **opt)
    names = {"q": grad.dq, "k": grad.dk, "v": grad.dv, "bias": grad.dbias, "learnable_sink": grad.dsink}
    return {name: names[name] for name in arrays}


def cotangents(arrays: dict, opt: dict) -> tuple[np.ndarray, np.ndarray]:
    o, lse = forward(**arrays, **opt)
    return normal(*o.shape, seed=1), normal(*lse.shape, seed=2)


@pytest.mark.parametrize("name", EVERY)
def test_gradients_are_central_differences(name: str) -> None:
    arrays, opt = varied(name)
    dout, dlse = cotangents(arrays, opt)
    h = 1e-5
    for key, grad in gradients(arrays, opt, dout, dlse).items():
        differences = np.zeros(grad.shape)
        for at in np.ndindex(grad.shape):
            step = np.zeros(grad.shape)
            step[at] = h
            ends = [loss(arrays | {key: arrays[key] + sign * step}, opt, dout, dlse) for sign in (1, -1)]
            differences[at] = (ends[0] - ends[1]) / (2 * h)
        np.testing.assert_allclose(grad, differences, rtol=1e-7, atol=1e-7 * max(abs(grad).max(), 1e-3), err_msg=key)


def tangent_product(arrays: dict, opt: dict, steps: dict, dout: np.ndarray, dlse: np.ndarray) -> float:
    """<dout, do> + <dlse, dl> for the derivative (do, dl) of forward along `steps`, by the forward formulas:

    dz = scale (dq k' + q dk'),  ds = (1 - t^2) dz + dbias,  dl = sum_j p ds + p_sink dsink
    do = (p (ds - dl) keep) v + (p keep) dv
    """
    total = 0.0
    bias_step = steps.get("bias")
    moved = heads(steps["q"], steps["k"], steps["v"], Options(**opt | ({} if bias_step is None else {"bias": bias_step})))
    for head, step in zip(heads(*(arrays[n] for n in "qkv"), Options(**opt | extras(arrays))), moved, strict=True):
        w = softmax(head)
        ds = (1 - w.tanh**2) * head.scale * (step.q @ head.k.T + head.q @ step.k.T) + step.bias
        dl = (w.p * ds).sum(axis=1)
        if "learnable_sink" in arrays:
            dl += w.p_sink * steps["learnable_sink"][head.head]
        do = (w.p * (ds - dl[:, None]) * head.keep) @ head.v + (w.p * head.keep) @ step.v
        total += (dout[head.at_q] * do).sum() + (dlse[head.at_lse] * np.where(np.isfinite(w.lse), dl, 0)).sum()
    return float(total)


def extras(arrays: dict) -> dict:
    return {name: array for name, array in arrays.items() if name not in ("q", "k", "v")}


@pytest.mark.parametrize("name", EVERY)
def test_reverse_mode_agrees_with_forward_mode(name: str) -> None:
    arrays, opt = varied(name)
    dout, dlse = cotangents(arrays, opt)
    steps = {key: normal(*array.shape, seed=3) for key, array in arrays.items()}
    reverse = {key: (grad * steps[key]).sum() for key, grad in gradients(arrays, opt, dout, dlse).items()}
    forward_mode = tangent_product(arrays, opt, steps, dout, dlse)
    assert abs(sum(reverse.values()) - forward_mode) <= 1e-10 * sum(abs(x) for x in reverse.values())
