"""flash_attn_combine and get_scheduler_metadata of flash-attn 3: PyTorch tensors, NumPy and JAX arrays."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from harness import assert_same_bits, random
from reference_decode import merge

import libflash
from libflash import flash_attn

torch = pytest.importorskip("torch")

SPLITS, BATCH, ROWS, HEADS, DIM = 5, 2, 7, 3, 8
LIBRARIES = ("torch", "numpy", "jax")


def converted(x: np.ndarray, library: str) -> Any:
    if library == "jax":
        return pytest.importorskip("jax").numpy.asarray(x)
    return torch.from_numpy(x) if library == "torch" else x


def type_of(name: str, library: str) -> Any:
    if library == "torch":
        return getattr(torch, name)
    return np.dtype(getattr(ml_dtypes, name, name))


def partial() -> tuple[np.ndarray, np.ndarray]:
    """As views with heads before rows, and more splits and heads than are used. Some splits have no key for some rows."""
    out = random(2 * SPLITS, BATCH, HEADS, ROWS, DIM).swapaxes(2, 3)[:SPLITS]
    lse = random(SPLITS, BATCH, 2 * HEADS, ROWS, seed=1).swapaxes(2, 3)[..., :HEADS]
    lse[SPLITS // 2 :, 0] = -np.inf
    lse[:, 1, 2] = -np.inf
    out[:, 1, 2] = np.nan  # of no key: does not count
    return out, lse


def wanted() -> tuple[np.ndarray, np.ndarray]:
    out, lse = partial()
    merged, sums = merge(out, lse.swapaxes(-1, -2))
    return merged, sums.swapaxes(-1, -2)


def wide(x: Any) -> np.ndarray:
    return np.asarray(x.float() if isinstance(x, torch.Tensor) else x).astype(np.float64)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", None])
def test_combine(library: str, name: str | None) -> None:
    given = [converted(x, library) for x in partial()]
    out, lse = flash_attn.flash_attn_combine(*given, out_dtype=name and type_of(name, library))
    assert out.dtype == type_of(name or "float32", library)
    assert lse.dtype == type_of("float32", library)
    exact, sums = wanted()
    bound = {"float16": 2.0**-11, "bfloat16": 2.0**-8}.get(name or "", 2e-6)
    np.testing.assert_allclose(wide(out), exact, rtol=bound, atol=1e-6)
    np.testing.assert_allclose(wide(lse), sums, rtol=2e-6, atol=1e-6)
    assert not wide(out)[1, 2].any()
    assert (wide(lse)[1, 2] == -np.inf).all()


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_contiguous_lse_has_the_same_bits(library: str) -> None:
    out, lse = partial()
    results = [flash_attn.flash_attn_combine(*(converted(x, library) for x in (out, given))) for given in (lse, lse.copy())]
    for got, same in zip(*results, strict=True):
        assert_same_bits(np.asarray(got), np.asarray(same))


@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize("name", ["float32", "float16"])
def test_out_is_written(library: str, name: str) -> None:
    given = [converted(x, library) for x in partial()]
    out = converted(np.full((BATCH, ROWS, HEADS, DIM), 7, name), library)
    got, _ = flash_attn.flash_attn_combine(*given, out)
    assert got is out
    same, _ = flash_attn.flash_attn_combine(*given, out_dtype=type_of(name, library))
    assert_same_bits(np.asarray(out), np.asarray(same))
    flash_attn.flash_attn_combine(*given, out, out.dtype)
    with pytest.raises(libflash.InvalidError, match=f"^out has dtype {name}; out_dtype is bfloat16$"):
        flash_attn.flash_attn_combine(*given, out, type_of("bfloat16", library))


def test_combine_has_gradients_and_compiles() -> None:
    out, lse = (torch.from_numpy(np.ascontiguousarray(x)).requires_grad_() for x in (random(*partial()[0].shape), partial()[1]))
    combined, sums = flash_attn.flash_attn_combine(out, lse, out_dtype=torch.bfloat16)
    seen = torch.isfinite(sums.detach())
    combined.float().sum().backward()
    weights = torch.where(seen, (lse.detach() - sums.detach()).exp(), 0)
    torch.testing.assert_close(out.grad, weights[..., None].expand_as(out), rtol=1e-5, atol=1e-6)
    given = out.detach(), lse.detach()
    compiled = torch.compile(flash_attn.flash_attn_combine, backend="eager", fullgraph=True)(*given)
    for got, same in zip(compiled, flash_attn.flash_attn_combine(*given), strict=True):
        assert torch.equal(got, same)


def test_combine_inside_jit() -> None:
    jax = pytest.importorskip("jax")
    given = [converted(np.ascontiguousarray(x), "jax") for x in partial()]
    for got, same in zip(jax.jit(flash_attn.flash_attn_combine)(*given), wanted(), strict=True):
        np.testing.assert_allclose(np.asarray(got), same, rtol=2e-6, atol=1e-6)


BAD_PARTS = {
    "dimensions": (lambda o, x: (o[0], x), r"^out_partial has shape \(2, 7, 3, 8\); it needs \(num_splits, batch,"),
    "heads": (lambda o, x: (o, x[..., :2]), r"^lse_partial has shape \(5, 2, 7, 2\); .*\(5, 2, 7, 3\)$"),
    "splits": (lambda o, x: (o[:0], x[:0]), r"^out_partial has 0 splits"),
    "type": (lambda o, x: (o.astype("float16"), x), r"^out_partial has dtype float16; it must be float32"),
    "type of lse": (lambda o, x: (o, x.astype("float64")), r"^lse_partial has dtype float64; it must be float32"),
    "strides": (lambda o, x: (o[..., ::2], x), r"^out_partial\[0\]: the last dimension must be contiguous"),
}


@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize("name", BAD_PARTS)
def test_refused_parts(library: str, name: str) -> None:
    change, said = BAD_PARTS[name]
    given = [converted(x, library) for x in change(*partial())]
    with pytest.raises(libflash.InvalidError, match=said):
        flash_attn.flash_attn_combine(*given)


def test_refused_types() -> None:
    with pytest.raises(libflash.InvalidError, match=r"^out_dtype is float64; it must be float32, float16 or bfloat16$"):
        flash_attn.flash_attn_combine(*partial(), out_dtype="float64")
    with pytest.raises(TypeError, match=r"^out_partial must be an array, not list \(\[1\.0\]\)$"):
        flash_attn.flash_attn_combine([1.0], partial()[1])


# -- get_scheduler_metadata

PROBLEM: dict[str, Any] = {
    "batch_size": 3, "max_seqlen_q": 1, "max_seqlen_k": 64, "num_heads_q": 4, "num_heads_kv": 2, "headdim": 16,
}  # fmt: skip
LENGTHS = np.array([5, 0, 64], np.int32)


@pytest.mark.parametrize("library", LIBRARIES)
def test_metadata_change_no_bit(library: str) -> None:
    """The array is on the device of the lengths, and a call takes it, also for another step."""
    q, k, v = (converted(random(3, n, h, 16, seed=n + h), library) for n, h in ((1, 4), (64, 2), (64, 2)))
    lengths = converted(LENGTHS, library)
    more = {"headdim_v": 16, "causal": True, "window_size": (30, 0), "num_splits": 2, "pack_gqa": True, "page_size": None}
    made = flash_attn.get_scheduler_metadata(**PROBLEM, cache_seqlens=lengths, qkv_dtype=q.dtype, **more)
    assert type(made) is type(lengths)
    assert made.dtype == lengths.dtype
    assert tuple(made.shape) == (1,)
    assert made.device == lengths.device if library == "torch" else not np.asarray(made).any()
    for given in (lengths, lengths - lengths + 3):
        options = {"cache_seqlens": given, "causal": True, "window_size": (30, 0), "num_splits": 2, "return_softmax_lse": True}
        got = flash_attn.flash_attn_with_kvcache(q, k, v, scheduler_metadata=made, **options)
        for x, same in zip(got, flash_attn.flash_attn_with_kvcache(q, k, v, **options), strict=True):
            assert_same_bits(np.asarray(x), np.asarray(same))


BAD_PROBLEMS: dict[str, tuple[dict[str, Any], type, str]] = {
    "chunk": ({"attention_chunk": 4}, libflash.UnsupportedError, "^attention_chunk is 4"),
    "type": ({"qkv_dtype": torch.float8_e4m3fn}, libflash.UnsupportedError, "^qkv_dtype is float8_e4m3fn; q of 8 bits"),
    "no type": ({"qkv_dtype": torch.int8}, libflash.InvalidError, "^qkv_dtype is int8; it must be"),
    "heads": ({"num_heads_q": 5}, libflash.InvalidError, "^num_heads_q is 5; it must be a multiple of num_heads_kv, 2$"),
    "no heads": ({"num_heads_kv": 0}, libflash.InvalidError, "^num_heads_kv is 0; it must be 1 or more$"),
    "sizes": ({"max_seqlen_k": -1}, libflash.InvalidError, "^max_seqlen_k is -1; it must not be negative$"),
    "values": ({"headdim_v": -1}, libflash.InvalidError, "^headdim_v is -1; it must not be negative$"),
    "splits": ({"num_splits": -1}, libflash.InvalidError, "^num_splits is -1; it must not be negative$"),
    "page": ({"page_size": 0}, libflash.InvalidError, "^page_size is 0; it must be 1 or more$"),
    "sequences": ({"batch_size": 2}, libflash.InvalidError, r"^cache_seqlens has shape \(3,\); it needs \(2,\), batch_size$"),
    "packed": ({"cu_seqlens_q": LENGTHS}, libflash.InvalidError, r"^cu_seqlens_q has shape \(3,\); .*\(4,\), batch_size \+"),
    "new": ({"cu_seqlens_k_new": LENGTHS}, libflash.InvalidError, r"^cu_seqlens_k_new has shape \(3,\); it needs \(4,\)"),
    "pads": ({"cache_leftpad": LENGTHS[:2]}, libflash.InvalidError, r"^cache_leftpad has shape \(2,\); it needs \(3,\)"),
    "lengths": ({"cache_seqlens": 5}, TypeError, r"^cache_seqlens must be an array, not int \(5\)$"),
    "flag": ({"causal": 1.0}, TypeError, "causal"),
    "window": ({"window_size": (1, 2, 3)}, TypeError, "window_size must be two integers"),
    "margin": ({"sm_margin": -1}, libflash.InvalidError, "^sm_margin is -1"),
    "number": ({"max_seqlen_q": 1.5}, TypeError, "max_seqlen_q must be an integer"),
}


@pytest.mark.parametrize("name", BAD_PROBLEMS)
def test_refused_problems(name: str) -> None:
    changed, error, said = BAD_PROBLEMS[name]
    with pytest.raises(error, match=said):
        flash_attn.get_scheduler_metadata(**{**PROBLEM, "cache_seqlens": LENGTHS, **changed})
