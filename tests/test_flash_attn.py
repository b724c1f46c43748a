"""libflash.flash_attn: signatures, returned values and gradients of flash-attn 2, and arrays of other libraries."""

from __future__ import annotations

import inspect
from typing import Any

import cases
import numpy as np
import pytest
from case import Case
from convert import owned, torch_run
from harness import assert_same_bits, qkv, random, run

import libflash
from libflash import flash_attn

torch = pytest.importorskip("torch")

COMMON = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, "
    "return_attn_probs=False"
)
LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
DESCALES = "q_descale=None, k_descale=None, v_descale=None, attention_chunk=0, num_splits=0, pack_gqa=None, sm_margin=0"
SIGNATURES = {  # flash-attn 2.8, flash_attn/flash_attn_interface.py; learnable_sink: flash-attn 4; by name: flash-attn 3
    "flash_attn_func": f"q, k, v, {COMMON}, learnable_sink=None, *, s_aux=None, qv=None, {DESCALES}",
    "flash_attn_qkvpacked_func": f"qkv, {COMMON}",
    "flash_attn_kvpacked_func": f"q, kv, {COMMON}",
    "flash_attn_varlen_func": f"q, k, v, {LENGTHS}, {COMMON}, block_table=None, learnable_sink=None, *, s_aux=None, "
    f"seqused_q=None, seqused_k=None, qv=None, {DESCALES}, page_table=None, scheduler_metadata=None",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {COMMON}",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {LENGTHS}, {COMMON}",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
    "cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), "
    "softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False, "
    "q_descale=None, k_descale=None, v_descale=None, cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, "
    "learnable_sink=None, s_aux=None, *, qv=None, page_table=None, rotary_seqlens=None, attention_chunk=0, "
    "scheduler_metadata=None, pack_gqa=None, sm_margin=0",
    "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None",
    "get_scheduler_metadata": "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, "
    "qkv_dtype=None, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None, page_size=None, "
    "max_seqlen_k_new=0, causal=False, window_size=(-1, -1), attention_chunk=0, has_softcap=False, num_splits=0, "
    "pack_gqa=None, sm_margin=0",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    signature = inspect.signature(getattr(flash_attn, name))
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    assert str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)) == f"({SIGNATURES[name]})"
    assert name in flash_attn.__all__


def drop_in(q: Any, k: Any, v: Any, *, return_lse: bool, seed: int = 0, **options: Any) -> Any:
    """The arguments of libflash.attention that correspond to those of flash-attn's functions."""
    if "cu_seqlens_q" in options:
        lengths = [options.pop("cu_seqlens_q"), options.pop("cu_seqlens_k")]
        longest = [int((cu[1:] - cu[:-1]).max()) if len(cu) > 1 else 0 for cu in lengths]
        return flash_attn.flash_attn_varlen_func(q, k, v, *lengths, *longest, return_attn_probs=return_lse, **options)[:2]
    return flash_attn.flash_attn_func(q, k, v, return_attn_probs=return_lse, **options)[:2]


KNOWN = {"causal", "window_size", "softmax_scale", "softcap", "alibi_slopes", "cu_seqlens_q", "cu_seqlens_k"}
CASES = [case for case in [*cases.singles(), *cases.option_pairs()] if set(case.inputs().options) <= KNOWN]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_the_reference(case: Case) -> None:
    got = torch_run(case, drop_in)
    case.check(**got)
    assert_same_bits(owned(case, got), owned(case, run(case)))


def torch_qkv(**shape: Any) -> list[torch.Tensor]:
    return [torch.from_numpy(x).requires_grad_() for x in qkv(**shape)]


def gradients(out: torch.Tensor, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(out.square().sum(), leaves)


def test_packed_forms_are_the_plain_one() -> None:
    q, k, v = torch_qkv(batch=2, sq=7, sk=7, hq=4, hk=4)
    options = (0.0, 0.3, True, (3, -1), 2.0, torch.linspace(0.1, 1, 4))
    wanted = flash_attn.flash_attn_func(q, k, v, *options)
    wanted_gradients = torch.stack(gradients(wanted, q, k, v), 2)
    qkv_packed = torch.stack([q, k, v], 2).detach().requires_grad_()
    got = flash_attn.flash_attn_qkvpacked_func(qkv_packed, *options)
    assert torch.equal(got, wanted)
    assert torch.equal(gradients(got, qkv_packed)[0], wanted_gradients)
    kv = torch.stack([k, v], 2).detach().requires_grad_()
    got = flash_attn.flash_attn_kvpacked_func(q, kv, *options)
    assert torch.equal(got, wanted)
    assert torch.equal(gradients(got, kv)[0], wanted_gradients[:, :, 1:])

    cu = torch.tensor([0, 3, 3, 10], dtype=torch.int32)
    rows = [x.flatten(0, 1)[:10] for x in (q, k, v)]
    wanted = flash_attn.flash_attn_varlen_func(*rows, cu, cu, 7, 7, *options)
    got = flash_attn.flash_attn_varlen_qkvpacked_func(torch.stack(rows, 1), cu, 7, *options)
    assert torch.equal(got, wanted)
    got = flash_attn.flash_attn_varlen_kvpacked_func(rows[0], torch.stack(rows[1:], 1), cu, cu, 7, 7, *options)
    assert torch.equal(got, wanted)
    with pytest.raises(libflash.InvalidError, match="qkv has shape"):
        flash_attn.flash_attn_qkvpacked_func(kv)


def test_returned_values() -> None:
    q, k, v = torch_qkv()
    out = flash_attn.flash_attn_func(q, k, v)
    assert isinstance(out, torch.Tensor)
    same, lse, probabilities = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True)
    assert torch.equal(same, out)
    assert lse.shape == (1, 4, 40)
    assert probabilities.shape == (0,)


def test_deterministic_is_accepted() -> None:
    q, k, v = torch_qkv()
    one = gradients(flash_attn.flash_attn_func(q, k, v, deterministic=True), q, k, v)
    assert all(map(torch.equal, one, gradients(flash_attn.flash_attn_func(q, k, v, deterministic=True), q, k, v)))


def test_last_dimension_may_have_any_stride() -> None:
    q, k, v = torch_qkv()
    transposed = [x.detach().transpose(-1, -2).contiguous().transpose(-1, -2).requires_grad_() for x in (q, k, v)]
    assert transposed[0].stride(-1) != 1
    got, wanted = flash_attn.flash_attn_func(*transposed), flash_attn.flash_attn_func(q, k, v)
    assert torch.equal(got, wanted)
    assert all(map(torch.equal, gradients(got, *transposed), gradients(wanted, q, k, v)))


PAIRS = {
    "torch": lambda: torch.tensor([3, 0]),
    "torch, int32": lambda: torch.tensor([3, 0], dtype=torch.int32),
    "numpy": lambda: np.array([3, 0]),
    "list": lambda: [3, 0],
    "tuple of tensors": lambda: tuple(torch.tensor([3, 0])),
    "jax": lambda: pytest.importorskip("jax").numpy.array([3, 0]),
}


@pytest.mark.parametrize("name", PAIRS)
def test_window_size_as_an_array(name: str) -> None:
    q, k, v = torch_qkv()
    wanted = flash_attn.flash_attn_func(q, k, v, window_size=(3, 0))
    assert not torch.equal(wanted, flash_attn.flash_attn_func(q, k, v))
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, window_size=PAIRS[name]()), wanted)
    qkv_packed = torch.stack([q, q, q], 2).detach()
    got = flash_attn.flash_attn_qkvpacked_func(qkv_packed, window_size=PAIRS[name]())
    assert torch.equal(got, flash_attn.flash_attn_qkvpacked_func(qkv_packed, window_size=(3, 0)))
    step = flash_attn.flash_attn_with_kvcache(q, k, v, window_size=PAIRS[name]())
    assert torch.equal(step, flash_attn.flash_attn_with_kvcache(q, k, v, window_size=(3, 0)))


def test_window_size_in_a_compiled_program() -> None:
    q, k, v = (x.detach() for x in torch_qkv())
    function = lambda q: flash_attn.flash_attn_func(q, k, v, window_size=(3, 0))  # noqa: E731
    assert torch.equal(torch.compile(function, fullgraph=True, backend="aot_eager")(q), function(q))


def test_window_size_without_a_bound() -> None:
    q, k, v = torch_qkv()
    wanted = flash_attn.flash_attn_func(q, k, v)
    for window in (None, (None, None), (-1, None), torch.tensor([-1, -1])):
        assert torch.equal(flash_attn.flash_attn_func(q, k, v, window_size=window), wanted)


@pytest.mark.parametrize(
    "window",
    [
        3, (3,), (3, 0, 0), (0.5, 0), (True, 0), torch.tensor([0.5, 0]), torch.tensor(3), torch.ones(2, 2).int(),
        np.ones((2, 2), int),
    ],
)  # fmt: skip
def test_what_is_no_window_size(window: Any) -> None:
    q, k, v = torch_qkv()
    with pytest.raises(TypeError, match="window_size must be two integers"):
        flash_attn.flash_attn_func(q, k, v, window_size=window)


@pytest.mark.parametrize("packed", [False, True])
def test_learnable_sink(packed: bool) -> None:
    """One more key in each row, without a value; with its gradient."""
    q, k, v = torch_qkv()
    sink = torch.linspace(-1, 2, 4).requires_grad_()
    if packed:
        cu_q, cu_k = (torch.tensor([0, x.shape[1]], dtype=torch.int32) for x in (q, k))
        got = flash_attn.flash_attn_varlen_func(
            q[0], k[0], v[0], cu_q, cu_k, q.shape[1], k.shape[1], causal=True, learnable_sink=sink
        )[None]  # fmt: skip
    else:
        got = flash_attn.flash_attn_func(q, k, v, causal=True, learnable_sink=sink)
    group = q.shape[2] // k.shape[2]
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(group, 2)) * q.shape[-1] ** -0.5
    rows, keys = scores.shape[-2:]
    scores = scores.masked_fill(~torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows), -torch.inf)
    scores = torch.cat([scores, sink[None, :, None, None].expand(*scores.shape[:3], 1)], -1)
    wanted = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1)[..., :-1], v.repeat_interleave(group, 2))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients(got, q, k, v, sink), gradients(wanted, q, k, v, sink), rtol=1e-4, atol=1e-5)
    if not packed:
        arrays = [x.detach().numpy() for x in (q, k, v)]
        assert_same_bits(
            flash_attn.flash_attn_func(*arrays, causal=True, learnable_sink=sink.detach().numpy()), got.detach().numpy()
        )


# -- dropout


def kept(probabilities: torch.Tensor, p: float) -> torch.Tensor:
    return torch.where(probabilities > 0, probabilities, 0) / (1 - p)


def test_s_dmask_is_what_made_out() -> None:
    """(batch, heads, seqlen_q, seqlen_k) rounded up to 128, with more than one chunk of keys; negative where dropped."""
    q, k, v = torch_qkv(batch=2, sq=30, sk=300)
    options = {"causal": True, "window_size": (200, -1), "softcap": 3.0, "alibi_slopes": torch.linspace(0.01, 0.1, 4)}
    out, lse, s = flash_attn.flash_attn_func(q, k, v, 0.25, return_attn_probs=True, **options)
    assert s.shape == (2, 4, 128, 384)
    inside = s[:, :, :30, :300]
    assert torch.count_nonzero(s) == torch.count_nonzero(inside)
    exact = torch.einsum("bhij,bjhd->bihd", kept(inside, 0.25), v.repeat_interleave(2, 2))
    torch.testing.assert_close(out, exact, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(inside.abs().sum(-1), torch.ones(2, 4, 30))
    visible = inside != 0
    assert abs((inside[visible] < 0).float().mean() - 0.25) < 0.02
    torch.testing.assert_close(lse, flash_attn.flash_attn_func(q, k, v, return_attn_probs=True, **options)[1])


def test_s_dmask_of_packed_sequences() -> None:
    q, k, v = (x.detach()[0] for x in torch_qkv(sq=11, sk=17))
    cu_q, cu_k = torch.tensor([0, 4, 4, 10], dtype=torch.int32), torch.tensor([0, 9, 12, 16], dtype=torch.int32)
    out, _, s = flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 6, 9, 0.5, causal=True, return_attn_probs=True)
    assert s.shape == (3, 4, 128, 128)
    for b in range(3):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        part = kept(s[b, :, : rows.stop - rows.start, : keys.stop - keys.start], 0.5)
        exact = torch.einsum("hij,jhd->ihd", part, v[keys].repeat_interleave(2, 1))
        torch.testing.assert_close(out[rows], exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
def test_s_dmask_of_packed_sequences_needs_the_maxima(name: str) -> None:
    q, k, v = (x.detach()[0] for x in torch_qkv(sq=11, sk=17))
    given = {"cu_seqlens_q": torch.tensor([0, 11]), "cu_seqlens_k": torch.tensor([0, 17]), "max_seqlen_q": 11, "max_seqlen_k": 17}
    given |= {x: cu.int() for x, cu in given.items() if isinstance(cu, torch.Tensor)} | {name: None}
    flash_attn.flash_attn_varlen_func(q, k, v, **given, dropout_p=0.5)
    with pytest.raises(libflash.InvalidError, match=f"{name} is None; with return_attn_probs and dropout_p it must be"):
        flash_attn.flash_attn_varlen_func(q, k, v, **given, dropout_p=0.5, return_attn_probs=True)


def test_dropout_follows_the_default_generator() -> None:
    q, k, v = torch_qkv()
    torch.manual_seed(1)
    first, second = (flash_attn.flash_attn_func(q, k, v, 0.5) for _ in range(2))
    torch.manual_seed(1)
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, 0.5), first)
    assert not torch.equal(first, second)
    arrays = qkv()
    np.random.seed(1)
    first = flash_attn.flash_attn_func(*arrays, 0.5)
    np.random.seed(1)
    assert_same_bits(flash_attn.flash_attn_func(*arrays, 0.5), first)


# -- caches


def test_varlen_with_pages() -> None:
    pages_k, pages_v = (torch.from_numpy(random(5, 4, 2, 16, seed=i)).requires_grad_() for i in range(2))
    q = torch.from_numpy(random(7, 4, 16))
    table = torch.tensor([[3, 1, 99], [0, -7, 2]], dtype=torch.int32)
    cu_q, cu_k = torch.tensor([0, 3, 7], dtype=torch.int32), torch.tensor([0, 6, 9], dtype=torch.int32)
    flat = lambda pages: torch.cat([pages[3], pages[1][:2], pages[0][:3]])  # noqa: E731
    wanted = flash_attn.flash_attn_varlen_func(q, flat(pages_k), flat(pages_v), cu_q, cu_k, 4, 6, causal=True)
    for longest in (6, 9, None):
        got = flash_attn.flash_attn_varlen_func(q, pages_k, pages_v, cu_q, cu_k, 4, longest, causal=True, block_table=table)
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
    assert all(map(torch.allclose, gradients(got, pages_k, pages_v), gradients(wanted, pages_k, pages_v)))
    with torch.device("meta"):  # the default device of a program is not that of its tensors
        got = flash_attn.flash_attn_varlen_func(q, pages_k, pages_v, cu_q, cu_k, 4, 6, causal=True, block_table=table)
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_varlen_reads_pages_in_place(library: str) -> None:
    """Without gradients on the CPU: what the call of the gathered keys gives, entries past the last page may hold anything."""
    convert = torch.from_numpy if library == "torch" else (lambda x: x)
    pages_k, pages_v = (random(5, 4, 2, 16, seed=i) for i in range(2))
    q, sink, slopes = random(7, 4, 16), random(4, seed=7), np.array([0.5, 0.2, 0.1, 0.05], np.float32)
    table = np.array([[3, 1, 99], [0, -7, 2]], np.int32)
    cu_q, cu_k = np.array([0, 3, 7], np.int32), np.array([0, 6, 9], np.int32)
    flat = [np.concatenate([pages[3], pages[1][:2], pages[0][:3]]) for pages in (pages_k, pages_v)]
    given = [convert(x) for x in (cu_q, cu_k)]
    more = {"softcap": 3.0, "learnable_sink": convert(sink), "alibi_slopes": convert(slopes), "window_size": (4, 1)}
    for causal in (False, True):
        options = {"causal": causal, "return_attn_probs": True, **more}
        wanted = flash_attn.flash_attn_varlen_func(convert(q), *map(convert, flat), *given, 4, 6, **options)
        got = flash_attn.flash_attn_varlen_func(
            convert(q), convert(pages_k), convert(pages_v), *given, 4, None, block_table=convert(table), **options
        )
        for mine, other in zip(got[:2], wanted[:2], strict=True):
            np.testing.assert_allclose(np.asarray(mine), np.asarray(other), rtol=1e-5, atol=1e-6)
        assert (got[2] is None) == (library == "numpy")


def test_with_kvcache_packed() -> None:
    """cu_seqlens_q and cu_seqlens_k_new, and the sink by both of its names."""
    q, k, v = torch.randn(5, 4, 8), torch.randn(4, 2, 8), torch.randn(4, 2, 8)
    caches, sink = [torch.randn(2, 12, 2, 8) for _ in range(2)], torch.randn(4)
    lengths = torch.tensor([6, 3], dtype=torch.int32)
    cu_q, cu_new = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 5], [0, 1, 4]))
    results = []
    for name in ("learnable_sink", "s_aux"):
        mine = [x.clone() for x in caches]
        out, lse = flash_attn.flash_attn_with_kvcache(
            q, *mine, k, v, cache_seqlens=lengths, causal=True, cu_seqlens_q=cu_q, cu_seqlens_k_new=cu_new, max_seqlen_q=4,
            return_softmax_lse=True, **{name: sink},
        )  # fmt: skip
        results.append((out, lse, *mine))
    other = [x.clone() for x in caches]
    wanted = libflash.decode(q, *other, k=k, v=v, cache_seqlens=lengths, cu_seqlens_q=cu_q, cu_seqlens_new=cu_new,
                             learnable_sink=sink, return_lse=True)  # fmt: skip
    for result in results:
        assert all(map(torch.equal, result, (*wanted, *other)))
    seven = flash_attn.flash_attn_with_kvcache(q, *caches, cache_seqlens=7, cu_seqlens_q=cu_q)
    same = flash_attn.flash_attn_with_kvcache(q, *caches, cache_seqlens=torch.full_like(lengths, 7), cu_seqlens_q=cu_q)
    assert torch.equal(seven, same)
    codes, scale = [x.to(torch.float8_e4m3fn) for x in caches], torch.tensor([[0.5, 2.0], [1.0, 0.25]])
    got = flash_attn.flash_attn_with_kvcache(
        q, *codes, cache_seqlens=lengths, causal=True, k_descale=scale, v_descale=scale, cu_seqlens_q=cu_q
    )
    wanted = libflash.decode(q, *codes, cache_seqlens=lengths, k_scale=scale, v_scale=scale, cu_seqlens_q=cu_q)
    assert torch.equal(got, wanted)
    with pytest.raises(libflash.InvalidError, match="learnable_sink and s_aux"):
        flash_attn.flash_attn_with_kvcache(q, *caches, cu_seqlens_q=cu_q, learnable_sink=sink, s_aux=sink)


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_with_kvcache(library: str) -> None:
    convert = torch.from_numpy if library == "torch" else (lambda x: x)
    shapes = [(2, 3, 4, 8), (2, 9, 2, 8), (2, 9, 2, 5), (2, 3, 2, 8), (2, 3, 2, 5), (12, 2), (12, 2)]
    q, k_cache, v_cache, k, v, cos, sin = (random(*shape, seed=i) for i, shape in enumerate(shapes))
    mine, other = ([x.copy() for x in (k_cache, v_cache)] for _ in range(2))
    lengths = np.array([4, 6], np.int32)
    out, lse = flash_attn.flash_attn_with_kvcache(
        convert(q), *map(convert, mine), convert(k), convert(v), convert(cos), convert(sin), cache_seqlens=convert(lengths),
        window_size=(5, 5), softcap=2.0, rotary_interleaved=False, return_softmax_lse=True,
    )  # fmt: skip
    wanted = libflash.decode(
        q, *other, k=k, v=v, rotary_cos=cos, rotary_sin=sin, cache_seqlens=lengths, window_size=(5, 5), softcap=2.0, causal=False,
        rotary_interleaved=False, return_lse=True,
    )  # fmt: skip
    assert_same_bits(dict(enumerate(map(np.asarray, (out, lse, *mine)))), dict(enumerate((*wanted, *other))))
    whole = flash_attn.flash_attn_with_kvcache(convert(q), *map(convert, mine), cache_seqlens=7, causal=True)
    same = flash_attn.flash_attn_with_kvcache(
        convert(q), *map(convert, mine), cache_seqlens=convert(np.full(2, 7, np.int32)), causal=True
    )
    assert_same_bits(np.asarray(whole), np.asarray(same))


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_descales_of_8_bit_caches(library: str) -> None:
    convert = torch.from_numpy if library == "torch" else (lambda x: x)
    q, caches = random(2, 3, 4, 8, seed=1), [np.rint(random(2, 9, 2, 8, seed=n) * 40).astype(np.int8) for n in (2, 3)]
    scales = [np.array([[0.02, 0.03], [0.04, 0.01]], np.float32) * n for n in (1, 2)]
    got = flash_attn.flash_attn_with_kvcache(
        convert(q), *map(convert, caches), causal=True, k_descale=convert(scales[0]), v_descale=convert(scales[1])
    )
    wanted = libflash.decode(q, *caches, k_scale=scales[0], v_scale=scales[1])
    assert_same_bits(np.asarray(got), wanted)
    with pytest.raises(libflash.UnsupportedError, match="q_descale"):
        flash_attn.flash_attn_with_kvcache(convert(q), *map(convert, caches), q_descale=convert(scales[0]))


def test_with_kvcache_gives_no_gradient() -> None:
    q, k, v = torch_qkv()
    assert not flash_attn.flash_attn_with_kvcache(q, k, v).requires_grad


@pytest.mark.parametrize("append", [False, True])
@pytest.mark.parametrize("rotary", [False, True])
def test_leftpad_with_pages(append: bool, rotary: bool) -> None:
    """The same results as with a contiguous cache; pages with only padding need not exist."""
    q, new = torch.randn(3, 2, 4, 16), torch.randn(3, 2, 2, 16)
    options = dict(cache_seqlens=torch.tensor([17, 9, 4], dtype=torch.int32), causal=True)
    options["cache_leftpad"] = torch.tensor([9, 1, 4], dtype=torch.int32)
    if append:
        options |= {"k": new, "v": 2 * new}
    if rotary:
        angles = torch.arange(24)[:, None] * 0.5 ** torch.arange(4)
        options |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    pages = [torch.randn(18, 4, 2, 16) for _ in range(2)]
    table = torch.randperm(18).int().reshape(3, 6)
    dense = [x[table.long()].flatten(1, 2) for x in pages]
    wanted = flash_attn.flash_attn_with_kvcache(q, *dense, return_softmax_lse=True, **options)
    given = table.clone()
    given[0, :2], given[2, :1] = -1, 2**31 - 1
    got = flash_attn.flash_attn_with_kvcache(q, *pages, block_table=given, return_softmax_lse=True, **options)
    assert all(map(torch.equal, got, wanted))
    assert all(torch.equal(x[table.long()].flatten(1, 2), y) for x, y in zip(pages, dense, strict=True))


def test_cache_lengths_as_a_number_count_sequences_not_pages() -> None:
    q, pages = torch.randn(3, 1, 4, 16), torch.randn(8, 4, 2, 16)
    table = torch.arange(6, dtype=torch.int32).reshape(3, 2)
    got = flash_attn.flash_attn_with_kvcache(q, pages, pages, cache_seqlens=5, block_table=table)
    dense = pages[table.long()].flatten(1, 2)
    torch.testing.assert_close(got, flash_attn.flash_attn_with_kvcache(q, dense, dense, cache_seqlens=5))


# -- other libraries


def test_numpy() -> None:
    q, k, v = qkv()
    out, lse, probabilities = flash_attn.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    wanted = libflash.attention(q, k, v, causal=True, return_lse=True)
    assert_same_bits(out, wanted[0])
    assert_same_bits(lse, wanted[1])
    assert probabilities is None
    assert_same_bits(flash_attn.flash_attn_kvpacked_func(q, np.stack([k, v], 2), causal=True), out)


def test_jax() -> None:
    jax = pytest.importorskip("jax")
    q, k, v = (jax.numpy.asarray(x) for x in qkv())
    wanted = libflash.attention(*qkv(), causal=True)
    function = lambda q, k, v: flash_attn.flash_attn_func(q, k, v, causal=True)  # noqa: E731
    assert_same_bits(function(q, k, v), wanted)
    assert_same_bits(jax.jit(function)(q, k, v), wanted)
    decode = lambda q: flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=5)  # noqa: E731
    wanted = flash_attn.flash_attn_with_kvcache(*qkv(), cache_seqlens=5)
    assert_same_bits(decode(q), wanted)
    assert_same_bits(jax.jit(decode)(q), wanted)
    with pytest.raises(libflash.InvalidError, match="PRNG key"):
        flash_attn.flash_attn_func(q, k, v, 0.5)
    with pytest.raises(libflash.UnsupportedError, match="returns the new caches"):
        flash_attn.flash_attn_with_kvcache(q, k, v, k, v, cache_seqlens=0)


def test_refusals_come_from_the_library() -> None:
    q, k, v = torch_qkv()
    with pytest.raises(libflash.InvalidError, match="v: shape"):
        flash_attn.flash_attn_func(q, k, v[:, :5])
    with pytest.raises(libflash.InvalidError, match="dropout_p"):
        flash_attn.flash_attn_func(q, k, v, 1.5)


@pytest.mark.parametrize("bad", [True, False, np.True_, np.False_], ids=repr)
@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_bools_are_no_real_numbers(library: str, bad: object) -> None:
    """dropout_p=False, too, which is not passed on."""
    convert = {"numpy": np.asarray, "torch": torch.as_tensor}.get(library) or pytest.importorskip("jax.numpy").asarray
    q, k, v = map(convert, qkv(d=8))
    lengths = *(convert(np.array([0, x.shape[1]], np.int32)) for x in (q, k)), q.shape[1], k.shape[1]
    for name in ("softmax_scale", "softcap", "dropout_p"):
        calls = [
            lambda o: flash_attn.flash_attn_func(q, k, v, **o),
            lambda o: flash_attn.flash_attn_varlen_func(q[0], k[0], v[0], *lengths, **o),
            *([lambda o: flash_attn.flash_attn_with_kvcache(q, k, v, **o)] if name != "dropout_p" else []),
        ]
        for call in calls:
            with pytest.raises(TypeError, match=f"{name} must be a number, not bool_? \\((True|False)\\)$"):
                call({name: bad})


@pytest.mark.parametrize(
    ("function", "name"),
    [
        *((flash_attn.flash_attn_func, name) for name in ("causal", "deterministic", "return_attn_probs")),
        *((flash_attn.flash_attn_with_kvcache, name) for name in ("causal", "rotary_interleaved", "return_softmax_lse")),
    ],
)
def test_flags_are_bools(function: Any, name: str) -> None:
    """Text such as "no" counts as true in Python, so it is refused, for arrays of every library."""
    arrays = qkv(d=8)
    for given in (arrays, [torch.from_numpy(x) for x in arrays]):
        for good in (True, False, np.True_):
            function(*given, **{name: good})
        for bad, text in (("no", "'no'"), (1, "1"), (None, "None")):
            with pytest.raises(TypeError, match=rf"{name} must be a bool, not {text}$"):
                function(*given, **{name: bad})
