"""libflash.flash_attn on the GPU, as programs written for flash-attn 2 call it: every form, option and returned value.

Results are judged against the definition in float64, by the rule of flash-attn's own tests: an error of at most twice that of
the same formulas in the type of the tensors (three times for gradients, whose sums have one more rounding on the way).
"""

from __future__ import annotations

from typing import Any

import dropout_mask
import pytest
from pairwise import pairwise

import libflash

torch = pytest.importorskip("torch")
from convert import owned, torch_run  # noqa: E402
from gpu_case import run_backward, run_forward  # noqa: E402  (needs torch)
from harness import assert_same_bits  # noqa: E402
from test_flash_attn import CASES, drop_in  # noqa: E402

from libflash import flash_attn  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

DEVICE = "cuda"
HALF = [case for case in CASES if case.dtype in ("fp16", "bf16")]
FORWARD, GRADIENT = 2.0, 3.0


@pytest.mark.parametrize("case", HALF, ids=str)
def test_against_the_reference(case) -> None:
    got = torch_run(case, drop_in, DEVICE, deterministic=True)
    case.check(**got)
    plain = run_forward(case, None, DEVICE) | run_backward(case, None, True, DEVICE)
    assert_same_bits(owned(case, got), owned(case, plain))


# -- the definition


def visible(sq: int, sk: int, causal: bool, window: tuple[int, int]) -> torch.Tensor:
    """Bottom-right aligned; (sq, sk)."""
    left, right = window[0], 0 if causal else window[1]
    distance = torch.arange(sk, device=DEVICE) - torch.arange(sq, device=DEVICE)[:, None] - (sk - sq)
    keep = torch.ones(sq, sk, dtype=torch.bool, device=DEVICE)
    if left >= 0:
        keep &= distance >= -left
    if right >= 0:
        keep &= distance <= right
    return keep


def definition(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse in the type of q. `kept` is the factor that dropout puts on each probability."""
    group, sq, sk = q.shape[2] // k.shape[2], q.shape[1], k.shape[1]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    s = torch.einsum("bihd,bjhd->bhij", q, k * q.shape[-1] ** -0.5)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if alibi_slopes is not None:
        distance = torch.arange(sk, device=DEVICE) - torch.arange(sq, device=DEVICE)[:, None] - (sk - sq)
        s = s - alibi_slopes.reshape(-1, q.shape[2], 1, 1).to(s.dtype) * distance.abs()
    keep = visible(sq, sk, causal, window_size)
    s = s.masked_fill(~keep, -torch.inf)
    p = torch.softmax(s, -1).masked_fill(~keep.any(-1, keepdim=True), 0.0)
    p = p if kept is None else p * kept.to(p.dtype)
    return torch.einsum("bhij,bjhd->bihd", p, v), torch.logsumexp(s.detach(), -1)


def with_gradients(attention: Any, leaves: list[torch.Tensor], dout: torch.Tensor) -> list[torch.Tensor]:
    """[out, dq, dk, dv], and what else attention returns."""
    out, *rest = attention(*leaves)
    return [out, *torch.autograd.grad(out, leaves, dout.to(out.dtype)), *rest]


def check(got: list[torch.Tensor], leaves: list[torch.Tensor], dout: torch.Tensor, what: str = "", **options: Any) -> None:
    """By the rule above; lse within the rounding errors of float32 and of its exponentials."""
    exact = with_gradients(lambda *x: definition(*x, **options), [x.detach().double().requires_grad_() for x in leaves], dout)
    eager = with_gradients(lambda *x: definition(*x, **options), leaves, dout)
    for index, name in enumerate(("out", "dq", "dk", "dv")):
        ours, theirs = ((x[index].detach().double() - exact[index]).abs().max() for x in (got, eager))
        factor = FORWARD if name == "out" else GRADIENT
        assert ours <= factor * theirs + 1e-5 * factor, f"{what} {name}: {ours:.3g}, eager attention {theirs:.3g}"
    if len(got) > 4:
        lse, wanted = got[4].double(), exact[4]
        finite = torch.isfinite(wanted)
        assert torch.equal(torch.isneginf(lse), ~finite), what
        assert ((lse - wanted)[finite].abs() <= 1e-4).all(), what


def randoms(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(map(sum, shapes)))
    return [torch.randn(shape, generator=generator).to(dtype).to(DEVICE) for shape in shapes]


def leaves_of(dtype: torch.dtype, sq: int, sk: int, heads: tuple[int, int], dim: int, batch: int = 2) -> list[torch.Tensor]:
    """q, k, v to differentiate, and dout."""
    q, k = (batch, sq, heads[0], dim), (batch, sk, heads[1], dim)
    *leaves, dout = randoms(dtype, q, k, k, q)
    return [*(x.requires_grad_() for x in leaves), dout]


# -- flash_attn_func over its options

FACTORS = {
    "dtype": [torch.float16, torch.bfloat16],
    "heads": [(6, 6), (6, 1), (6, 2)],
    "dim": [32, 59, 64, 96, 128, 192, 256],
    "lengths": [(113, 203), (128, 217), (108, 256), (256, 512), (512, 256), (1023, 1024), (1, 239), (3, 799)],
    "seen": ["all", "causal", "window", "causal window"],
    "alibi": [None, "heads", "batch"],
    "softcap": [0.0, 15.0],
    "dropout_p": [0.0, 0.17],
    "deterministic": [False, True],
}
COMBINED = list(pairwise(FACTORS))
SEEN = {
    "all": {},
    "causal": {"causal": True},
    "window": {"window_size": (80, 30)},
    "causal window": {"causal": True, "window_size": (100, -1)},
}


def keep_factor(s_dmask: torch.Tensor, sq: int, sk: int, p: float) -> torch.Tensor:
    """S_dmask is negative where a probability was dropped."""
    return (s_dmask[..., :sq, :sk] > 0).double() * dropout_mask.keep_factor(p)


@pytest.mark.parametrize("values", COMBINED, ids=[str(index) for index in range(len(COMBINED))])
def test_flash_attn_func(values: dict[str, Any]) -> None:
    sq, sk = values["lengths"]
    q, k, v, dout = leaves_of(values["dtype"], sq, sk, values["heads"], values["dim"])
    heads, p = values["heads"][0], values["dropout_p"]
    options: dict[str, Any] = {"softcap": values["softcap"], **SEEN[values["seen"]]}
    if values["alibi"]:
        shape = (heads,) if values["alibi"] == "heads" else (2, heads)
        options["alibi_slopes"] = torch.rand(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE) * 0.3
    kept: dict[str, Any] = {}

    def attention(*x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, s_dmask = flash_attn.flash_attn_func(
            *x, dropout_p=p, deterministic=values["deterministic"], return_attn_probs=True, **options
        )
        assert lse.shape == (2, heads, sq)
        assert lse.dtype == torch.float32
        if p:
            assert s_dmask.shape == (2, heads, -(-sq // 128) * 128, -(-sk // 128) * 128)
            kept["kept"] = keep_factor(s_dmask, sq, sk, p)
        else:
            assert s_dmask.numel() == 0
        return out, lse

    got = with_gradients(attention, [q, k, v], dout)
    check(got, [q, k, v], dout, str(values), **options, **kept)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dropped_share(dtype: torch.dtype) -> None:
    q, k, v, _ = leaves_of(dtype, 512, 512, (8, 8), 64)
    for p in (0.05, 0.5):
        _, _, s = flash_attn.flash_attn_func(q, k, v, p, return_attn_probs=True)
        share = (s < 0).double().mean()
        sigma = (p * (1 - p) / s.numel()) ** 0.5
        assert abs(share - p) < 5 * sigma


# -- the other forms


def stacked(dtype: torch.dtype, causal: bool) -> tuple[list[torch.Tensor], torch.Tensor, dict[str, Any]]:
    q, k, v, dout = leaves_of(dtype, 300, 300, (4, 4), 64)
    slopes = torch.linspace(0.1, 0.5, 4, device=DEVICE)
    return [q, k, v], dout, {"causal": causal, "softcap": 20.0, "alibi_slopes": slopes, "deterministic": True}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_packed_forms_are_the_plain_one(dtype: torch.dtype, causal: bool) -> None:
    leaves, dout, options = stacked(dtype, causal)
    wanted = flash_attn.flash_attn_func(*leaves, **options)
    gradients = torch.stack(torch.autograd.grad(wanted, leaves, dout), 2)
    qkv = torch.stack([x.detach() for x in leaves], 2).requires_grad_()
    got = flash_attn.flash_attn_qkvpacked_func(qkv, **options)
    assert torch.equal(got, wanted)
    assert torch.equal(torch.autograd.grad(got, qkv, dout)[0], gradients)
    kv = qkv[:, :, 1:].detach().requires_grad_()
    got = flash_attn.flash_attn_kvpacked_func(leaves[0], kv, **options)
    assert torch.equal(got, wanted)
    assert torch.equal(torch.autograd.grad(got, kv, dout)[0], gradients[:, :, 1:])


LENGTHS = ((113, 0, 300, 1, 57), (200, 30, 0, 256, 57))


def prefix_sums(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (50, 20), "softcap": 15.0}], ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_varlen_is_each_sequence_alone(dtype: torch.dtype, heads: tuple[int, int], options: dict[str, Any]) -> None:
    """Sequences without queries and without keys among them."""
    total_q, total_k = map(sum, LENGTHS)
    q, k, v, dout = (x.detach()[0] for x in leaves_of(dtype, total_q, total_k, heads, 64, batch=1))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    cu_q, cu_k = map(prefix_sums, LENGTHS)
    out, lse, _ = flash_attn.flash_attn_varlen_func(
        *leaves, cu_q, cu_k, max(LENGTHS[0]), max(LENGTHS[1]), return_attn_probs=True, **options
    )
    assert lse.shape == (heads[0], total_q)
    gradients = torch.autograd.grad(out, leaves, dout)
    starts_q, starts_k = (cu.tolist() for cu in (cu_q, cu_k))
    for b, (lq, lk) in enumerate(zip(*LENGTHS, strict=True)):
        rows, keys = slice(starts_q[b], starts_q[b] + lq), slice(starts_k[b], starts_k[b] + lk)
        if lq == 0 or lk == 0:
            assert not out[rows].any()
            assert torch.isneginf(lse[:, rows]).all()
            assert not any(x.any() for x in (gradients[0][rows], gradients[1][keys], gradients[2][keys]))
            continue
        parts = [x.detach()[where][None].requires_grad_() for x, where in zip(leaves, (rows, keys, keys), strict=True)]
        made = [x[where][None] for x, where in zip((out, *gradients), (rows, rows, keys, keys), strict=True)]
        check([*made, lse[None, :, rows]], parts, dout[rows][None], f"sequence {b}", **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_packed_varlen_forms_are_the_plain_one(dtype: torch.dtype) -> None:
    lengths = LENGTHS[1]
    q, k, v, dout = (x.detach()[0] for x in leaves_of(dtype, sum(lengths), sum(lengths), (4, 4), 64, batch=1))
    leaves, cu, longest = [x.requires_grad_() for x in (q, k, v)], prefix_sums(lengths), max(lengths)
    options = {"causal": True, "deterministic": True}
    wanted = flash_attn.flash_attn_varlen_func(*leaves, cu, cu, longest, longest, **options)
    gradients = torch.stack(torch.autograd.grad(wanted, leaves, dout), 1)
    qkv = torch.stack([x.detach() for x in leaves], 1).requires_grad_()
    got = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, cu, longest, **options)
    assert torch.equal(got, wanted)
    assert torch.equal(torch.autograd.grad(got, qkv, dout)[0], gradients)
    kv = qkv[:, 1:].detach().requires_grad_()
    got = flash_attn.flash_attn_varlen_kvpacked_func(leaves[0], kv, cu, cu, longest, longest, **options)
    assert torch.equal(got, wanted)
    assert torch.equal(torch.autograd.grad(got, kv, dout)[0], gradients[:, 1:])


def test_varlen_dropout() -> None:
    """S_dmask per sequence, in a batch of the longest."""
    total_q, total_k = map(sum, LENGTHS)
    q, k, v, _ = (x.detach()[0] for x in leaves_of(torch.float16, total_q, total_k, (4, 2), 64, batch=1))
    cu_q, cu_k = map(prefix_sums, LENGTHS)
    out, _, s = flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 300, 256, 0.3, causal=True, return_attn_probs=True)
    assert s.shape == (5, 4, 384, 256)
    starts_q, starts_k = (cu.tolist() for cu in (cu_q, cu_k))
    for b, (lq, lk) in enumerate(zip(*LENGTHS, strict=True)):
        if lq and lk:
            parts = [
                x[None, start : start + n].double()
                for x, start, n in ((q, starts_q[b], lq), (k, starts_k[b], lk), (v, starts_k[b], lk))
            ]
            exact, _ = definition(*parts, causal=True, kept=keep_factor(s[b : b + 1], lq, lk, 0.3))
            torch.testing.assert_close(out[None, starts_q[b] : starts_q[b] + lq].double(), exact, rtol=4e-3, atol=4e-3)


def test_varlen_with_pages() -> None:
    pages_k, pages_v, q = randoms(torch.bfloat16, (9, 16, 2, 64), (9, 16, 2, 64), (70, 4, 64))
    leaves = [x.requires_grad_() for x in (pages_k, pages_v)]
    table = torch.tensor([[3, 1, 99], [0, -7, 2]], dtype=torch.int32, device=DEVICE)
    cu_q, cu_k = prefix_sums((30, 40)), prefix_sums((25, 10))
    flat = [torch.cat([x[3], x[1][:9], x[0][:10]]) for x in leaves]
    wanted = flash_attn.flash_attn_varlen_func(q, *flat, cu_q, cu_k, 40, 25, causal=True)
    got = flash_attn.flash_attn_varlen_func(q, *leaves, cu_q, cu_k, 40, 25, causal=True, block_table=table)
    torch.testing.assert_close(got, wanted, rtol=2e-2, atol=1e-2)
    for x, y in zip(*(torch.autograd.grad(out.float().square().sum(), leaves) for out in (got, wanted)), strict=True):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_varlen_reads_pages_in_place(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients, beside entries of the table that name no page and rows of pages that hold NaN."""
    monkeypatch.delattr(flash_attn, "gather_pages")
    pages_k, pages_v, q = randoms(dtype, (9, 16, 2, 64), (9, 16, 2, 64), (70, 4, 64))
    table = torch.tensor([[3, 1, 99], [0, -7, 2]], dtype=torch.int32, device=DEVICE)
    cu_q, cu_k = prefix_sums((30, 40)), prefix_sums((25, 10))
    flat = [torch.cat([x[3], x[1][:9], x[0][:10]]) for x in (pages_k, pages_v)]
    for pages in (pages_k, pages_v):
        pages[2], pages[1, 9:], pages[0, 10:] = torch.nan, torch.nan, torch.nan
    used = torch.tensor([25, 10], dtype=torch.int32, device=DEVICE)
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    for options in ({"causal": True}, {"window_size": (20, 3), "softcap": 15.0}):
        wanted = flash_attn.flash_attn_varlen_func(q, *flat, cu_q, cu_k, 40, 25, return_attn_probs=True, **options)
        for keys in ({"cu_seqlens_k": cu_k}, {"cu_seqlens_k": None, "seqused_k": used}):
            got = flash_attn.flash_attn_varlen_func(
                q, pages_k, pages_v, cu_q, max_seqlen_q=40, max_seqlen_k=25, return_attn_probs=True, block_table=table, **keys,
                **options,
            )  # fmt: skip
            for mine, other in zip(got[:2], wanted[:2], strict=True):
                torch.testing.assert_close(mine, other, rtol=limit, atol=limit)


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_with_kvcache_packed(dtype: torch.dtype, page_size: int | None) -> None:
    """cu_seqlens_q and cu_seqlens_k_new: rows of any lengths, against the definition of each sequence."""
    (k_cache, v_cache), place = cached(dtype, page_size)
    rows, news = (20, 1, 3), (20, 1, 5)
    cu_q, cu_new, lengths = prefix_sums(rows), prefix_sums(news), place["cache_seqlens"].long()
    q, new_k, new_v, sink = randoms(dtype, (sum(rows), 6, 64), (sum(news), 2, 64), (sum(news), 2, 64), (6,))
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, new_k, new_v, causal=True, cu_seqlens_q=cu_q, cu_seqlens_k_new=cu_new, return_softmax_lse=True,
        s_aux=sink, **place,
    )  # fmt: skip
    dense = [x[place["block_table"].long()].flatten(1, 2) if page_size else x for x in (k_cache, v_cache)]
    for b, n in enumerate(lengths.tolist()):
        own, new = slice(sum(rows[:b]), sum(rows[: b + 1])), slice(sum(news[:b]), sum(news[: b + 1]))
        keys, values = (x[b, : n + news[b]] for x in dense)
        assert torch.equal(keys[n:], new_k[new])
        assert torch.equal(values[n:], new_v[new])
        assert dense[0][b, n + news[b] :].isnan().all()
        exact, exact_lse = defined(q[own], keys, values, causal=True)
        share = torch.sigmoid(exact_lse - sink.double()[:, None])
        exact *= share.T[:, :, None]
        assert (out[own].double() - exact).abs().max() <= 8 * torch.finfo(dtype).eps
        exact_lse = torch.logaddexp(exact_lse, sink.double()[:, None].expand_as(exact_lse))
        torch.testing.assert_close(lse[:, own].double(), exact_lse, rtol=0, atol=3e-2 if dtype == torch.bfloat16 else 4e-3)


# -- what else programs rely on


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_deterministic(dtype: torch.dtype) -> None:
    q, k, v, dout = leaves_of(dtype, 700, 900, (6, 2), 128)
    first = None
    for _ in range(50):
        out = flash_attn.flash_attn_func(q, k, v, causal=True, deterministic=True)
        made = [out, *torch.autograd.grad(out, (q, k, v), dout)]
        first = first or made
        assert all(map(torch.equal, made, first))


def test_dropout_follows_the_default_generator() -> None:
    q, k, v, _ = leaves_of(torch.float16, 100, 100, (4, 4), 64)
    torch.manual_seed(1)
    first, second = (flash_attn.flash_attn_func(q, k, v, 0.5) for _ in range(2))
    torch.manual_seed(1)
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, 0.5), first)
    assert not torch.equal(first, second)


def test_any_strides() -> None:
    """Channels that are not contiguous are copied, as there; rows and heads may have any strides."""
    q, k, v, dout = leaves_of(torch.float16, 100, 100, (4, 4), 64)
    wanted = flash_attn.flash_attn_func(q, k, v, causal=True, deterministic=True)
    gradients = torch.autograd.grad(wanted, (q, k, v), dout)
    for axes in ((-1, -2), (1, 2), (0, 1)):
        turned = [x.detach().transpose(*axes).contiguous().transpose(*axes).requires_grad_() for x in (q, k, v)]
        got = flash_attn.flash_attn_func(*turned, causal=True, deterministic=True)
        assert torch.equal(got, wanted)
        assert all(map(torch.equal, torch.autograd.grad(got, turned, dout), gradients))


def test_inference() -> None:
    q, k, v, _ = leaves_of(torch.float16, 100, 100, (4, 4), 64)
    wanted = flash_attn.flash_attn_func(q, k, v)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            got = flash_attn.flash_attn_func(q, k, v)
        assert not got.requires_grad
        assert torch.equal(got, wanted)
    with pytest.raises(libflash.UnsupportedError, match="dtype: decode of float64"):
        flash_attn.flash_attn_with_kvcache(q.double(), k.double(), v.double())


# -- the cache


def cached(dtype: torch.dtype, page_size: int | None, seed: int = 0) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Three sequences of up to 300 keys in a cache of 320, or in pages of it; what follows a sequence is NaN."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([300, 17, 128], dtype=torch.int32)
    caches = [torch.randn(3, 320, 2, 64, generator=generator) for _ in range(2)]
    for cache in caches:
        for b, n in enumerate(lengths.tolist()):
            cache[b, n:] = torch.nan
    place: dict[str, Any] = {"cache_seqlens": lengths.to(DEVICE)}
    if page_size:
        columns = 320 // page_size
        order = torch.randperm(3 * columns, generator=generator)
        caches = [cache.reshape(3 * columns, page_size, 2, 64)[order] for cache in caches]
        place["block_table"] = order.argsort().reshape(3, columns).int().to(DEVICE)
    return [cache.to(dtype).to(DEVICE) for cache in caches], place


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """In float64, rounded to the type of x; positions (batch, rows)."""
    r = cos.shape[1]
    c, s = (table.double()[positions][:, :, None, :] for table in (cos, sin))
    wide = x.double()
    first, second = (wide[..., : 2 * r : 2], wide[..., 1 : 2 * r : 2]) if interleaved else (wide[..., :r], wide[..., r : 2 * r])
    turned = [first * c - second * s, first * s + second * c]
    front = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat([front, wide[..., 2 * r :]], -1).to(x.dtype)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("page_size", [None, 16, 64])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_with_kvcache(dtype: torch.dtype, rows: int, page_size: int | None, interleaved: bool) -> None:
    """Append, rotary embedding and attention in one call, against the definition; the cache holds the new rows."""
    generator = torch.Generator().manual_seed(1)
    q, new_k, new_v = (torch.randn(3, rows, h, 64, generator=generator).to(dtype).to(DEVICE) for h in (6, 2, 2))
    angles = torch.arange(320)[:, None] * 0.5 ** torch.arange(16)
    cos, sin = angles.cos().to(dtype).to(DEVICE), angles.sin().to(dtype).to(DEVICE)
    for options in ({"causal": True}, {"causal": True, "window_size": (40, 0), "softcap": 15.0}):
        (k_cache, v_cache), place = cached(dtype, page_size)
        lengths = place["cache_seqlens"].long()
        positions = lengths[:, None] + torch.arange(rows, device=DEVICE)
        out, lse = flash_attn.flash_attn_with_kvcache(
            q,
            k_cache,
            v_cache,
            new_k,
            new_v,
            cos,
            sin,
            rotary_interleaved=interleaved,
            return_softmax_lse=True,
            **place,
            **options,
        )
        dense = [x[place["block_table"].long()].flatten(1, 2) if page_size else x for x in (k_cache, v_cache)]
        rotated_k = rotated(new_k, cos, sin, positions, interleaved)
        rotated_q = rotated(q, cos, sin, positions, interleaved)
        for b, n in enumerate(lengths.tolist()):
            keys, values = (x[b, : n + rows] for x in dense)
            torch.testing.assert_close(keys[n:].float(), rotated_k[b].float(), rtol=2e-2, atol=1e-3)
            assert torch.equal(values[n:], new_v[b])
            assert dense[0][b, n + rows :].isnan().all()
            exact, exact_lse = defined(rotated_q[b], keys, values, **options)
            assert (out[b].double() - exact).abs().max() <= 8 * torch.finfo(dtype).eps
            torch.testing.assert_close(lse[b].double(), exact_lse, rtol=0, atol=3e-2 if dtype == torch.bfloat16 else 4e-3)


def defined(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence in float64: (rows, heads, channels) and (heads, rows)."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    s = torch.einsum("ihd,jhd->hij", q.double(), k) * q.shape[-1] ** -0.5
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    distance = torch.arange(len(q), device=q.device)[:, None] + len(k) - len(q) - torch.arange(len(k), device=q.device)
    hidden = (distance < 0) & torch.tensor(causal, device=q.device)
    if window_size[0] >= 0:
        hidden |= distance > window_size[0]
    s = s.masked_fill(hidden, -torch.inf)
    return torch.einsum("hij,jhd->ihd", s.softmax(-1), v), s.logsumexp(-1)


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_with_kvcache_leftpad_and_pages(dtype: torch.dtype, rows: int, page_size: int) -> None:
    """Keys before the leftpad are NaN, and their pages need not exist; new rows are rotated by their place in the cache."""
    generator = torch.Generator().manual_seed(2)
    q, new_k, new_v = (torch.randn(3, rows, h, 64, generator=generator).to(dtype).to(DEVICE) for h in (6, 2, 2))
    angles = torch.arange(320)[:, None] * 0.5 ** torch.arange(16)
    cos, sin = angles.cos().to(dtype).to(DEVICE), angles.sin().to(dtype).to(DEVICE)
    (k_cache, v_cache), place = cached(dtype, page_size)
    pads, table = [130, 17, 64], place["block_table"].clone()
    for b, n in enumerate(pads):
        for x in (k_cache, v_cache):
            x[table[b, : n // page_size].long()] = torch.nan
            x[table[b, n // page_size].long(), : n % page_size] = torch.nan
        place["block_table"][b, : n // page_size] = (2**31 - 1, -1, k_cache.shape[0])[b]
    lengths = place["cache_seqlens"].long()
    positions = lengths[:, None] + torch.arange(rows, device=DEVICE)
    place["cache_leftpad"] = torch.tensor(pads, dtype=torch.int32, device=DEVICE)
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, k_cache, v_cache, new_k, new_v, cos, sin, causal=True, return_softmax_lse=True, rotary_interleaved=True, **place
    )
    rotated_q, rotated_k = (rotated(x, cos, sin, positions, True) for x in (q, new_k))
    for b, n in enumerate(lengths.tolist()):
        keys, values = (x[table[b].long()].flatten(0, 1)[pads[b] : n + rows] for x in (k_cache, v_cache))
        torch.testing.assert_close(keys[n - pads[b] :].float(), rotated_k[b].float(), rtol=2e-2, atol=1e-3)
        assert torch.equal(values[n - pads[b] :], new_v[b])
        exact, exact_lse = defined(rotated_q[b], keys, values, causal=True)
        assert (out[b].double() - exact).abs().max() <= 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(lse[b].double(), exact_lse, rtol=0, atol=3e-2 if dtype == torch.bfloat16 else 4e-3)


def test_with_kvcache_length_as_a_number_and_batch_index() -> None:
    (k_cache, v_cache), _ = cached(torch.float16, None)
    q = torch.randn(2, 1, 6, 64, device=DEVICE, dtype=torch.float16)
    rows = torch.tensor([2, 0], dtype=torch.int32, device=DEVICE)
    got = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=100, cache_batch_idx=rows)
    for b, row in enumerate(rows.tolist()):
        exact, _ = defined(q[b], k_cache[row, :100], v_cache[row, :100], causal=False)
        assert (got[b].double() - exact).abs().max() < 4e-3
