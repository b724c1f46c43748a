"""Each row of README's table "Coming from elsewhere": the call on the right against what the one on the left computes.

PyTorch and transformers compute it themselves. For the others, what their documentation says is computed in float64:
  cuDNN        query i sees key j if i - left_bound < j <= i + right_bound, by default counted from the top left.
  FlashInfer   window_left=l: query i, whose own key is i + Lk - Lq, sees the l keys before that and, with causal=True, none after
               it; lse in base 2.
  JAX          local_window_size=n: |i - j| <= n, counted from the top left, also with is_causal.
  Transformer Engine   attention_mask: true is masked out.
"""

from __future__ import annotations

import math
import pathlib
import re

import numpy as np
import pytest
from harness import qkv

import libflash

README = (pathlib.Path(__file__).resolve().parents[1] / "README.md").read_text()
LQ, LK = 9, 13


def right_side(start: str) -> str:
    """The right column of the row that begins so."""
    table = README.split("## Coming from elsewhere")[1].split("\n\n")[1]
    (row,) = [line for line in table.splitlines() if line.startswith(f"| {start}")]
    return row.rsplit("|", 2)[1].strip()


def options_of(text: str, **names: object) -> dict[str, object]:
    """The keywords in the first code of a cell, evaluated."""
    code = re.findall(r"`([^`]*)`", text)[0]
    return eval(f"dict({code})", {"__builtins__": {"dict": dict}}, names)


def wanted(q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Attention and the natural lse in float64; `seen`: (rows, keys), broadcast over batch and heads."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = np.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[3])
    scores = np.where(seen, scores, -np.inf)
    with np.errstate(divide="ignore", invalid="ignore"):
        lse = np.log(np.exp(scores).sum(-1))
        p = np.where(seen, np.exp(scores - lse[..., None]), 0)
    return np.einsum("bhij,bjhd->bihd", p, v), lse


def check(q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray, options: dict[str, object]) -> np.ndarray:
    """libflash with these options gives what `seen` says, and another rule would not."""
    out, lse = libflash.attention(q, k, v, return_lse=True, **options)
    expected, expected_lse = wanted(q, k, v, seen)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-5)
    other, _ = wanted(q, k, v, np.roll(seen, 1, axis=-1))
    assert np.abs(other - expected).max() > 1e-2
    return lse


def arrays(lq: int = LQ, lk: int = LK) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.standard_normal(shape).astype(np.float32) for shape in ((2, lq, 4, 16), (2, lk, 4, 16), (2, lk, 4, 16))]


ROWS, KEYS = np.arange(LQ)[:, None], np.arange(LK)[None, :]


def test_pytorch_sdpa() -> None:
    torch = pytest.importorskip("torch")
    options = options_of(right_side("PyTorch `scaled_dot_product_attention"))
    q, k, v = (torch.from_numpy(x).transpose(1, 2) for x in arrays())
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(libflash.attention(q, k, v, **options), expected, atol=1e-5, rtol=0)
    bottom_right = libflash.attention(q, k, v, **options | {"causal_align": "bottom_right"})
    assert (bottom_right - expected).abs().max() > 1e-2
    check(*arrays(), KEYS <= ROWS, options | {"layout": "bshd"})


def test_pytorch_varlen() -> None:
    """varlen_attn has no CPU kernel: PyTorch's own kernel for one sequence at a time, whose mask its documentation says is
    aligned bottom-right."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("torch.nn.attention.varlen")
    from torch.nn.attention.bias import causal_lower_right

    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 4, 9], [0, 6, 13]))
    text = (
        right_side("PyTorch `varlen_attn")
        .replace("cu_seqlens_q=...", "cu_seqlens_q=q")
        .replace("cu_seqlens_k=...", "cu_seqlens_k=k")
    )
    options = options_of(text, q=cu_q, k=cu_k)
    q, k, v = (torch.from_numpy(x[0]) for x in arrays())
    out = libflash.attention(q, k, v, **options)
    for b in range(2):
        rows, keys = slice(*cu_q[b : b + 2].tolist()), slice(*cu_k[b : b + 2].tolist())
        one = [x.transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys])]
        bias = causal_lower_right(one[0].shape[2], one[1].shape[2])
        expected = torch.nn.functional.scaled_dot_product_attention(*one, attn_mask=bias)
        torch.testing.assert_close(out[rows], expected[0].transpose(0, 1), atol=1e-5, rtol=0)


def test_huggingface_sliding_window() -> None:
    torch = pytest.importorskip("torch")
    masks = pytest.importorskip("transformers.masking_utils")
    rule = masks.sliding_window_causal_mask_function(4)
    offset = LK - LQ  # transformers counts queries from the first cached key
    number = torch.tensor
    seen = np.array([[bool(rule(0, 0, number(i + offset), number(j))) for j in range(LK)] for i in range(LQ)])
    check(*arrays(), seen, options_of(right_side("Hugging Face `sliding_window=w`"), w=4) | {"causal": True})


def test_cudnn_left_bound() -> None:
    text = right_side("cuDNN `left_bound=b`")
    options = options_of(text, b=4)
    check(*arrays(), (ROWS - 4 < KEYS) & (KEYS <= ROWS), options)
    assert text.endswith("BOTTOM_RIGHT: without `causal_align`")
    last = ROWS + LK - LQ
    check(*arrays(), (last - 4 < KEYS) & (last >= KEYS), {"window_size": options["window_size"]})


def test_flashinfer() -> None:
    text = right_side("FlashInfer `causal=True, window_left=l`")
    last = ROWS + LK - LQ
    seen = (last - 3 <= KEYS) & (last >= KEYS)
    lse = check(*arrays(), seen, options_of(text, l=3))
    q, k, _ = (x.astype(np.float64) for x in arrays())
    scores = np.einsum("bihd,bjhd->bhij", q, k) / 4
    base_2 = np.log2(np.where(seen, np.exp(scores), 0).sum(-1))
    assert "`lse = lse_2 * ln 2`" in text
    np.testing.assert_allclose(lse, base_2 * math.log(2), atol=1e-5)


@pytest.mark.parametrize("is_causal", [False, True])
def test_jax_local_window(is_causal: bool) -> None:
    jax = pytest.importorskip("jax")
    options = options_of(right_side("JAX `local_window_size=n`"), n=3) | {"causal": is_causal}
    q, k, v = arrays()
    seen = (abs(ROWS - KEYS) <= 3) & ((KEYS <= ROWS) | (not is_causal))
    check(q, k, v, seen, options)
    expected = jax.nn.dot_product_attention(q, k, v, local_window_size=3, is_causal=is_causal, implementation="xla")
    np.testing.assert_allclose(libflash.attention(q, k, v, **options), expected, atol=1e-5)


def test_transformer_engine_mask() -> None:
    attention_mask = np.random.default_rng(5).random((2, 1, LQ, LK)) < 0.4
    check(*arrays(), ~attention_mask, options_of(right_side("Transformer Engine"), attention_mask=attention_mask))


def test_rows_without_keys() -> None:
    """flash-attn 2 gives them +inf."""
    assert right_side("flash-attn 2, lse") == "-inf"
    q, k, v = qkv(sq=5, sk=3)
    _, lse = libflash.attention(q, k, v, causal=True, return_lse=True)
    assert np.isneginf(lse[..., :2]).all()
    assert np.isfinite(lse[..., 2:]).all()
