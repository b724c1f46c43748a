"""NaN and infinity change only the results that depend on them: other rows and heads keep every bit."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..target import Results
from .check import Check, Run, assert_same_bits, checks_of, qkv

HUGE = {np.dtype(np.float16): 6e4}  # for other types 3e38
HIDE: dict[str, dict[str, Any]] = {
    "causal": {"causal": True, "causal_align": "top_left"},
    "window": {"window_size": (-1, 0), "causal_align": "top_left"},
    "block_mask": {"block_mask": np.arange(5)[None, None, None, :].repeat(3, axis=2) < 2},
    "mask": {"mask": (np.arange(600) < 300)[None, None, None, :]},
    "seqused_k": {"seqused_k": np.array([300], np.int32)},
}


def stays_where_it_belongs(run: Run, dtype: np.dtype, value: float, which: str) -> None:
    """Row 20 of one head is NaN or inf. Rows that cannot see it (causal), and other heads, keep every bit."""
    q, k, v = qkv(sq=70, sk=70, hq=4, hk=2, dtype=dtype)
    clean = run(q, k, v, causal=True)
    {"q": q, "k": k, "v": v}[which][0, 20, 1] = value
    got = run(q, k, v, causal=True)
    affected = np.zeros(got["o"].shape[:3], bool)
    if which == "q":
        affected[0, 20, 1] = True
    else:
        affected[0, 20:, 2:] = True  # heads 2 and 3 read key head 1
    assert_same_bits(got["o"][~affected], clean["o"][~affected], "o elsewhere")
    if "lse" in got:
        lse, before = (np.moveaxis(x["lse"], 1, 2) for x in (got, clean))
        assert_same_bits(lse[~affected], before[~affected], "lse elsewhere")
    if np.isnan(value):
        assert np.isnan(got["o"][affected].astype(np.float32)).all(), "o must be NaN in every row that sees the NaN"
        if which != "v" and "lse" in got:
            assert np.isnan(lse[affected]).all(), "lse must be NaN in every row that sees the NaN"


def outside_of_sequences(run: Run, dtype: np.dtype) -> None:
    """NaN or inf in rows that no sequence uses changes no bit, forward or backward, and these rows of the results are 0."""
    q, k, v = qkv(batch=3, sq=40, sk=60, dtype=dtype)
    dout = np.ones_like(q)
    used = {"seqused_q": np.array([40, 0, 13], np.int32), "seqused_k": np.array([7, 60, 33], np.int32)}
    sides = ((q, "seqused_q"), (dout, "seqused_q"), (k, "seqused_k"), (v, "seqused_k"))
    results: list[Results] = []
    for filler in (0, np.nan, np.inf, -np.inf):
        for x, name in sides:
            for b, n in enumerate(used[name]):
                x[b, n:] = filler
        results.append(run(q, k, v, dout, causal=True, **used))
    for other in results[1:]:
        for name, x in other.items():
            assert_same_bits(x, results[0][name], name)
    for name, side in {"o": "seqused_q", "dq": "seqused_q", "dk": "seqused_k", "dv": "seqused_k"}.items():
        for b, n in enumerate(used[side]):
            assert name not in results[0] or not results[0][name][b, n:].any(), f"{name} must be 0 past the used length"


def hidden_keys_do_not_leak(run: Run, dtype: np.dtype, hide: dict[str, Any], value: float) -> None:
    """NaN or inf in keys that no row sees changes no bit."""
    q, k, v = qkv(sq=300, sk=600, hq=2, hk=2, dtype=dtype)
    clean = run(q, k, v, **hide)
    v[:, 500:] = value
    k[:, 500:] = value
    got = run(q, k, v, **hide)
    for name, x in got.items():
        assert_same_bits(x, clean[name], name)


def logits_that_overflow(run: Run, dtype: np.dtype) -> None:
    """Infinite logits may give NaN in their row, but change no bit of another row."""
    q, k, v = qkv(sq=33, sk=44, hq=1, hk=1, dtype=dtype)
    scale = 1e5 if dtype == np.float16 else 1.0
    clean = run(q, k, v, softmax_scale=scale)["o"]
    q[0, 7] = HUGE.get(dtype, 3e38)
    others = np.arange(33) != 7
    assert_same_bits(run(q, k, v, softmax_scale=scale)["o"][0, others], clean[0, others], "o of other rows")


def needs_apart(check: Check) -> bool:
    """Whether the NaN, infinity or overflow of this check is in the same tile as results that must not change, so that only a
    multiplication by 0 or the separate scaling of each row could keep it away from them. See Target.mixes_tiles.
    """
    in_v = check.function is stays_where_it_belongs and check.arguments[-1] == "v"
    masked = check.function is hidden_keys_do_not_leak and check.arguments[1] is HIDE["mask"]
    return in_v or masked or check.function is logits_that_overflow


def checks() -> list[Check]:
    types, values = ("fp32", "bf16"), {"nan": np.nan, "inf": np.inf}
    return [
        *checks_of(stays_where_it_belongs, types, values, {name: name for name in "qkv"}),
        *checks_of(outside_of_sequences, types),
        *checks_of(hidden_keys_do_not_leak, types, HIDE, values),
        *checks_of(logits_that_overflow, ("fp32", "fp16", "bf16")),
    ]
