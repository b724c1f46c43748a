"""Arguments that flash-attn 3 added: what each does in libflash.flash_attn, against the oracle or the call without it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from harness import assert_same_bits, qkv, random
from reference import forward
from reference_decode import decode as oracle
from reference_decode import rotate

import libflash
from libflash import _flash_attn_three, flash_attn

torch = pytest.importorskip("torch")

HINTS = {"pack_gqa": True, "sm_margin": 4}
LIBRARIES = {"torch": torch.from_numpy, "numpy": lambda x: x}


def paged_problem() -> dict[str, np.ndarray]:
    return {
        "q": random(7, 4, 16), "k": random(5, 4, 2, 16, seed=1), "v": random(5, 4, 2, 16, seed=2),
        "table": np.array([[3, 1, 99], [0, -7, 2]], np.int32), "cu_q": np.array([0, 3, 7], np.int32),
        "used": np.array([6, 3], np.int32), "sink": random(4, seed=7),
    }  # fmt: skip


def near(got: Any, wanted: Any, bound: float = 1e-5) -> None:
    np.testing.assert_allclose(np.asarray(got), np.asarray(wanted), rtol=bound, atol=bound)


# -- names


def test_names_of_the_sink() -> None:
    q, k, v = map(torch.from_numpy, qkv())
    sink = torch.linspace(-1, 2, 4)
    wanted = flash_attn.flash_attn_func(q, k, v, causal=True, learnable_sink=sink)
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, causal=True, s_aux=sink, **HINTS), wanted)
    assert not torch.equal(flash_attn.flash_attn_func(q, k, v, causal=True), wanted)
    ends = [torch.tensor([0, x.shape[1]], dtype=torch.int32) for x in (q, k)]
    got = flash_attn.flash_attn_varlen_func(q[0], k[0], v[0], *ends, None, None, causal=True, s_aux=sink, **HINTS)
    near(got, wanted[0])
    with pytest.raises(libflash.InvalidError, match="learnable_sink and s_aux are two names"):
        flash_attn.flash_attn_func(q, k, v, learnable_sink=sink, s_aux=sink)
    near(wanted, forward(*qkv(), causal=True, learnable_sink=sink.numpy())[0])


@pytest.mark.parametrize("library", LIBRARIES)
def test_page_table_and_used_keys(library: str) -> None:
    """The call of engines: packed rows, pages, the number of keys of each sequence, a sink and hints."""
    given = {name: LIBRARIES[library](x) for name, x in paged_problem().items()}
    lengths = {"cu_seqlens_q": given["cu_q"], "cu_seqlens_k": None, "max_seqlen_q": 4, "max_seqlen_k": 12}
    got = flash_attn.flash_attn_varlen_func(
        given["q"], given["k"], given["v"], **lengths, seqused_k=given["used"], page_table=given["table"], causal=True,
        window_size=(4, 0), s_aux=given["sink"], scheduler_metadata=given["table"], num_splits=2, **HINTS,
    )  # fmt: skip
    x = paged_problem()
    wanted = oracle(
        x["q"], x["k"], x["v"], block_table=x["table"], cache_seqlens=x["used"], cu_seqlens_q=x["cu_q"], window_size=(4, 0),
        learnable_sink=x["sink"],
    )  # fmt: skip
    near(got, wanted.out)
    same = flash_attn.flash_attn_with_kvcache(
        given["q"], given["k"], given["v"], cache_seqlens=given["used"], page_table=given["table"], causal=True,
        cu_seqlens_q=given["cu_q"], window_size=(4, 0), s_aux=given["sink"], num_splits=2, scheduler_metadata=given["table"],
        **HINTS,
    )  # fmt: skip
    assert_same_bits(np.asarray(got), np.asarray(same))


def test_used_keys_of_gathered_pages() -> None:
    """With gradients pages are gathered; seqused_k and cu_seqlens_k say the same."""
    x = {name: torch.from_numpy(value) for name, value in paged_problem().items()}
    k, v = x["k"].requires_grad_(), x["v"]
    cu_k = torch.tensor([0, 6, 9], dtype=torch.int32)
    call = flash_attn.flash_attn_varlen_func
    wanted = call(x["q"], k, v, x["cu_q"], cu_k, 4, 6, causal=True, block_table=x["table"])
    options = {"causal": True, "block_table": x["table"], "seqused_k": x["used"]}
    got = call(x["q"], k, v, x["cu_q"], None, 4, None, **options)
    assert got.requires_grad
    near(got.detach(), wanted.detach())
    used_q = torch.tensor([3, 2], dtype=torch.int32)
    got = call(x["q"], k.detach(), v, x["cu_q"], None, 4, None, seqused_q=used_q, **options)
    rows = torch.cat([x["q"][:3], x["q"][3:5]])
    ends = torch.tensor([0, 3, 5], dtype=torch.int32)
    near(got[:5], call(rows, k.detach(), v, ends, None, 3, None, **options))


def test_splits_with_gradients() -> None:
    q, k, v = (torch.from_numpy(x).requires_grad_() for x in qkv())
    split, whole = (flash_attn.flash_attn_func(q, k, v, causal=True, num_splits=n) for n in (3, 0))
    near(split.detach(), whole.detach())
    for got, wanted in zip(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (split, whole)), strict=True):
        near(got, wanted, 1e-4)


def test_used_rows_and_keys() -> None:
    q, k, v = (x[0] for x in qkv(sq=9, sk=9))
    ends, used_q, used_k = (np.array(x, np.int32) for x in ([0, 5, 9], [3, 4], [5, 2]))
    got = flash_attn.flash_attn_varlen_func(q, k, v, ends, ends, 5, 5, causal=True, seqused_q=used_q, seqused_k=used_k)
    wanted = forward(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, seqused_q=used_q, seqused_k=used_k, causal=True)[0]
    for rows in (slice(0, 3), slice(5, 9)):
        near(got[rows], wanted[rows])


def test_scales_of_pages() -> None:
    x = paged_problem()
    codes = [np.rint(x[name] * 40).astype(np.int8) for name in "kv"]
    scales = [np.array([[0.02, 0.03], [0.04, 0.01]], np.float32) * n for n in (1, 2)]
    got = flash_attn.flash_attn_varlen_func(
        x["q"], *codes, x["cu_q"], None, 4, None, causal=True, seqused_k=x["used"], block_table=x["table"], k_descale=scales[0],
        v_descale=scales[1],
    )  # fmt: skip
    real = [code.astype(np.float32) for code in codes]
    for sequence, owned in ((0, [3, 1]), (1, [0])):
        for pages, scale in zip(real, scales, strict=True):
            pages[owned] *= scale[sequence][:, None]
    wanted = oracle(x["q"], *real, block_table=x["table"], cache_seqlens=x["used"], cu_seqlens_q=x["cu_q"])
    near(got, wanted.out)


# -- qv: multi-head latent attention


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rotary", [None, True, False], ids=["plain", "interleaved", "halves"])
def test_qv(library: str, packed: bool, rotary: bool | None) -> None:
    """Scores q k + qv v with the scale of both, new keys appended to both caches; a rotary embedding rotates q and k."""
    shapes = [(2, 3, 4, 8), (2, 3, 4, 16), (2, 9, 1, 8), (2, 9, 1, 16), (2, 3, 1, 8), (2, 3, 1, 16)]
    arrays = [random(*shape, seed=i) for i, shape in enumerate(shapes)]
    q, qv, rope, latent, new_rope, new_latent = arrays
    lengths = np.array([4, 6], np.int32)
    tables = {"rotary_cos": random(9, 3, seed=6), "rotary_sin": random(9, 3, seed=7), "rotary_interleaved": rotary}
    turned_q, turned = q, new_rope
    if rotary is not None:
        turned_q, turned = (rotate(x, lengths[:, None] + np.arange(3), *tables.values()) for x in (q, new_rope))
    joined, place = np.concatenate([latent, rope], -1), np.concatenate([new_latent, turned], -1)
    for b, length in enumerate(lengths):
        joined[b, length : length + 3] = place[b]
    both = np.concatenate([qv, turned_q], -1)
    wanted = oracle(both, joined, np.ascontiguousarray(joined[..., :16]), cache_seqlens=lengths + 3).out
    convert = LIBRARIES[library]
    options: dict[str, Any] = {"cache_seqlens": convert(lengths), "causal": True}
    if rotary is not None:
        options |= {name: convert(x) if isinstance(x, np.ndarray) else x for name, x in tables.items()}
    rows = [q, new_rope, new_latent, qv]
    if packed:
        rows = [x.reshape(-1, *x.shape[2:]) for x in rows]
        options["cu_seqlens_q"] = convert(np.array([0, 3, 6], np.int32))
    q, new_rope, new_latent, qv = map(convert, rows)
    caches = [convert(x.copy()) for x in (rope, latent)]
    got = flash_attn.flash_attn_with_kvcache(q, *caches, new_rope, new_latent, qv=qv, **options)
    near(np.asarray(got).reshape(wanted.shape), wanted)
    near(np.concatenate([np.asarray(x) for x in caches[::-1]], -1), joined, 0 if rotary is None else 1e-6)


def test_qv_with_pages() -> None:
    x = paged_problem()
    q, qv, pages = random(7, 4, 8, seed=4), random(7, 4, 16, seed=5), random(5, 4, 2, 8, seed=6)
    got = flash_attn.flash_attn_varlen_func(
        q, pages, x["v"], x["cu_q"], None, 4, None, causal=True, seqused_k=x["used"], block_table=x["table"], qv=qv
    )
    keys = np.concatenate([x["v"], pages], -1)
    wanted = oracle(
        np.concatenate([qv, q], -1), keys, x["v"], block_table=x["table"], cache_seqlens=x["used"], cu_seqlens_q=x["cu_q"]
    )
    near(got, wanted.out)


# -- hints and refusals


def test_hints_change_nothing() -> None:
    q, k, v = qkv()
    wanted = flash_attn.flash_attn_func(q, k, v)
    for pack in (None, True, False):
        assert_same_bits(flash_attn.flash_attn_func(q, k, v, pack_gqa=pack, sm_margin=8), wanted)
    near(flash_attn.flash_attn_func(q, k, v, num_splits=3), wanted)
    with pytest.raises(TypeError, match="pack_gqa must be a bool, not 'no'"):
        flash_attn.flash_attn_func(q, k, v, pack_gqa="no")
    ends, unknown = np.array([0, 1], np.int32), {"max_seqlen_q": None, "max_seqlen_k": None}
    for name in ("sm_margin", "attention_chunk", "num_splits", "max_seqlen_k"):
        with pytest.raises(TypeError, match=rf"^{name} must be an integer, not bool \(False\)$"):
            flash_attn.flash_attn_varlen_func(q[0], k[0], v[0], ends, ends, **{**unknown, name: False})
    with pytest.raises(TypeError, match="sm_margin must be an integer, not float"):
        flash_attn.flash_attn_func(q, k, v, sm_margin=0.5)
    with pytest.raises(libflash.InvalidError, match="sm_margin is -1; it must not be negative"):
        flash_attn.flash_attn_func(q, k, v, sm_margin=-1)
    with pytest.raises(libflash.InvalidError, match="num_splits"):
        flash_attn.flash_attn_func(q, k, v, num_splits=-1)


ONE = np.ones(1, np.float32)
EVERYWHERE = {"attention_chunk": (4, "attention_chunk is 4"), "q_descale": (ONE, "q_descale: q of 8 bits")}
WITHOUT_PAGES = {name: (ONE, f"{name} is for keys in a cache") for name in ("qv", "k_descale", "v_descale")}


@pytest.mark.parametrize("name", [*EVERYWHERE, *WITHOUT_PAGES])
def test_refused_without_pages(name: str) -> None:
    given, said = (EVERYWHERE | WITHOUT_PAGES)[name]
    q, k, v = qkv()
    with pytest.raises(libflash.UnsupportedError, match=said):
        flash_attn.flash_attn_func(q, k, v, **{name: given})
    ends = [np.array([0, x.shape[1]], np.int32) for x in (q, k)]
    with pytest.raises(libflash.UnsupportedError, match=said):
        flash_attn.flash_attn_varlen_func(q[0], k[0], v[0], *ends, 40, 40, **{name: given})


def test_rotary_seqlens() -> None:
    q, k, v = map(torch.from_numpy, qkv(d=8))
    lengths = torch.full((q.shape[0],), 3, dtype=torch.int32)
    angles = torch.rand(64, 2)
    new = k[:, :1].clone()

    def call(rotary_seqlens: torch.Tensor | None, **options: Any) -> torch.Tensor:
        return flash_attn.flash_attn_with_kvcache(
            q[:, :1], k.clone(), v.clone(), new, new, cache_seqlens=lengths, rotary_seqlens=rotary_seqlens, **options
        )

    rotary = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    assert torch.equal(call(lengths, **rotary), call(None, **rotary))
    assert torch.equal(call(lengths // 2), call(None))  # nothing is rotated
    with pytest.raises(libflash.UnsupportedError, match="rotary_seqlens is not the tensor given as cache_seqlens"):
        call(lengths.clone(), **rotary)


@pytest.mark.parametrize("convert", [torch.from_numpy, np.asarray], ids=["torch", "numpy"])
def test_entries_of_a_block_table(convert: Any) -> None:
    """The line of the table of each sequence by cache_batch_idx; numbers that have none are sequences without keys."""
    pages, q = random(12, 4, 2, 8), convert(random(3, 1, 2, 8, seed=2))
    table = np.arange(12, dtype=np.int32).reshape(4, 3)
    lengths = convert(np.array([12, 5, 9], np.int32))

    def call(**options: Any) -> Any:
        given = {name: convert(np.array(x, np.int32)) for name, x in options.items()}
        return flash_attn.flash_attn_with_kvcache(q, convert(pages), convert(pages), cache_seqlens=lengths, **given)

    assert_same_bits(*(np.asarray(call(**x)) for x in ({"block_table": table, "cache_batch_idx": [3, 0, 2]},
                                                          {"block_table": table[[3, 0, 2]]})))  # fmt: skip
    for name in ("block_table", "page_table"):
        for wrong in (4, -1):
            said = rf"^cache_batch_idx: must be at least 0 and below the rows of {name} \(entry 1 is {wrong} of 4\)$"
            with pytest.raises(libflash.InvalidError, match=said):
                call(**{name: table}, cache_batch_idx=[3, wrong, 2])
    table[0] = -1
    with pytest.raises(libflash.InvalidError, match=r"^block_table: a page must .* \(entry \(1, 0\) is -1 of 12\)$"):
        call(block_table=table, cache_batch_idx=[3, 0, 2])
    lengths[1] = 0
    call(block_table=table, cache_batch_idx=[3, 4, 2])
    with pytest.raises(libflash.InvalidError, match="they need 2 dimensions and 1"):
        call(block_table=table, cache_batch_idx=[[3, 0, 2]])
    with pytest.raises(libflash.UnsupportedError, match="cache_batch_idx with block_table is not for SimpleNamespace"):
        _flash_attn_three.rows_of_table(SimpleNamespace(shape=(4, 3)), SimpleNamespace(shape=(3,)))


def test_entries_of_a_block_table_of_jax() -> None:
    """An index outside of the table is refused by name, although XLA reads it only when the program runs. Inside jit, where its
    value is not known, the error text is that of a wrong page."""
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    pages, q = jnp.asarray(random(12, 4, 2, 8)), jnp.asarray(random(3, 1, 2, 8, seed=2))
    table = jnp.arange(12, dtype=jnp.int32).reshape(4, 3)

    def call(rows: Any, lengths: Any = (12, 5, 9), name: str = "block_table") -> Any:
        given = {name: table, "cache_seqlens": jnp.array(lengths, jnp.int32), "cache_batch_idx": rows}
        return flash_attn.flash_attn_with_kvcache(q, pages, pages, **given)

    for name in ("block_table", "page_table"):
        for wrong in (4, -1):
            said = rf"^cache_batch_idx: must be at least 0 and below the rows of {name} \(entry 1 is {wrong} of 4\)$"
            for convert in (jnp.array, np.array):
                with pytest.raises(libflash.InvalidError, match=said):
                    call(convert([3, wrong, 2], np.int32), name=name)
    with pytest.raises(libflash.InvalidError, match=r"^cache_seqlens: .*999"):  # another refusal of the same call
        call(jnp.array([3, 4, 2]), (12, 5, 999))
    some, every = call(jnp.array([3, 4, 2]), (12, 0, 9)), call(jnp.array([3, 0, 2]))
    assert_same_bits(np.asarray(some)[[0, 2]], np.asarray(every)[[0, 2]])
    assert not np.asarray(some)[1].any()
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=r"block_table: a page must .* is -1 of 12"):
        jax.block_until_ready(jax.jit(call)(jnp.array([3, 4, 2])))


@pytest.mark.parametrize("name", EVERYWHERE)
def test_refused_with_a_cache(name: str) -> None:
    given, said = EVERYWHERE[name]
    q, k, v = qkv()
    with pytest.raises(libflash.UnsupportedError, match=said):
        flash_attn.flash_attn_with_kvcache(q, k, v, **{name: given})


def test_bad_combinations() -> None:
    q, k, v = map(torch.from_numpy, qkv(d=8))
    table = torch.zeros(1, 1, dtype=torch.int32)
    call = flash_attn.flash_attn_with_kvcache
    with pytest.raises(libflash.InvalidError, match="block_table and page_table are two names"):
        call(q, k, v, block_table=table, page_table=table)
    with pytest.raises(libflash.InvalidError, match=r"qv has shape .* and the 8 channels of v_cache"):
        call(q, k, v, qv=q[..., :4])
    angles = torch.ones(64, 5)
    with pytest.raises(libflash.InvalidError, match=r"^rotary_cos: .* at most those of k_cache \(10 of 8\)"):
        call(q, k, v, qv=q, rotary_cos=angles, rotary_sin=angles)
    with pytest.raises(libflash.UnsupportedError, match="k_descale is not supported together with qv"):
        call(q, k, v, qv=q, k_descale=torch.ones(1))
    x = {name: torch.from_numpy(value) for name, value in paged_problem().items()}
    varlen = flash_attn.flash_attn_varlen_func
    with pytest.raises(libflash.InvalidError, match="cu_seqlens_k and seqused_k are None"):
        varlen(x["q"], x["k"], x["v"], x["cu_q"], None, 4, 6, block_table=x["table"])
    with pytest.raises(libflash.InvalidError, match="cu_seqlens_k is None"):
        varlen(x["q"], x["k"][0], x["v"][0], x["cu_q"], None, 4, 6, seqused_k=x["used"])
    options = {"block_table": x["table"], "seqused_k": x["used"]}
    with pytest.raises(libflash.UnsupportedError, match="need pages that are read in place"):  # no gradient is lost
        varlen(x["q"], x["k"], x["v"], x["cu_q"], None, 4, 6, qv=x["q"].clone().requires_grad_(), **options)
    with pytest.raises(libflash.UnsupportedError, match="need pages that are read in place"):
        varlen(
            x["q"].requires_grad_(), x["k"], x["v"], x["cu_q"], None, 4, 6, block_table=x["table"], seqused_k=x["used"],
            v_descale=torch.ones(1),
        )  # fmt: skip


def test_jax_has_no_qv() -> None:
    jax = pytest.importorskip("jax")
    q, k, v = (jax.numpy.asarray(x) for x in qkv(d=8))
    with pytest.raises(libflash.UnsupportedError, match="qv is for PyTorch tensors and NumPy arrays"):
        flash_attn.flash_attn_with_kvcache(q, k, v, qv=q)


@pytest.mark.parametrize("library", LIBRARIES)
def test_errors_name_the_arguments_of_these_functions(library: str) -> None:
    """The names of arguments in error texts are those of flash-attn, not those of libflash.decode."""
    x = {name: LIBRARIES[library](value) for name, value in paged_problem().items()}
    ones, more = (LIBRARIES[library](value) for value in (np.ones(3, np.float32), np.array([6, 99], np.int32)))

    def refused(said: str, call: Any, *args: Any, **options: Any) -> None:
        with pytest.raises(libflash.InvalidError, match=said):
            call(*args, **options)

    arrays = x["q"], x["k"], x["v"]
    with_cache, cache = flash_attn.flash_attn_with_kvcache, {"cache_seqlens": x["used"], "cu_seqlens_q": x["cu_q"]}
    refused("^k_descale: shape must", with_cache, *arrays, **cache, page_table=x["table"], k_descale=ones)
    refused("^v_descale: shape must", with_cache, *arrays, **cache, page_table=x["table"], v_descale=ones)
    refused("^s_aux: shape must", with_cache, *arrays, **cache, page_table=x["table"], s_aux=ones)
    refused("^learnable_sink: shape must", with_cache, *arrays, **cache, page_table=x["table"], learnable_sink=ones)
    refused("^page_table: shape must", with_cache, *arrays, **cache, page_table=x["table"][:1])
    refused("^block_table: shape must", with_cache, *arrays, **cache, block_table=x["table"][:1])
    refused("^cu_seqlens_k_new: needs k and v", with_cache, *arrays, **cache, page_table=x["table"], cu_seqlens_k_new=x["cu_q"])
    rope = x["k"][..., :8]
    refused("^v_descale: shape", with_cache, x["q"][..., :8], rope, x["v"], qv=x["q"], **cache, page_table=x["table"],
            v_descale=ones)  # fmt: skip
    refused("^k_cache: shape must", with_cache, x["q"][..., :8], rope[1:], x["v"], qv=x["q"], **cache, page_table=x["table"])
    varlen, pages = flash_attn.flash_attn_varlen_func, {"block_table": x["table"], "seqused_k": x["used"]}
    packed = *arrays, x["cu_q"], None, 4, 12
    refused("^k_descale: shape must", varlen, *packed, **pages, k_descale=ones)
    refused("^seqused_k: must be at least 0", varlen, *packed, block_table=x["table"], seqused_k=more)
    refused("^v: shape must be that of k, ", varlen, x["q"], x["k"][1:], *packed[2:], **pages)


@pytest.mark.parametrize("library", LIBRARIES)
def test_one_scale_for_all(library: str) -> None:
    """A number, or an array without dimensions, as engines keep it."""
    x = {name: LIBRARIES[library](value) for name, value in paged_problem().items()}
    options = {"cache_seqlens": x["used"], "page_table": x["table"], "causal": True, "cu_seqlens_q": x["cu_q"]}
    half = np.array(0.5, np.float32)
    results = [
        np.asarray(flash_attn.flash_attn_with_kvcache(x["q"], x["k"], x["v"], **options, k_descale=scale, v_descale=scale))
        for scale in (0.5, LIBRARIES[library](half), LIBRARIES[library](half[None]))
    ]
    assert_same_bits(results[0], results[1])
    assert_same_bits(results[0], results[2])


def test_jax_has_scales_and_no_append() -> None:
    jax = pytest.importorskip("jax")
    q, k, v = qkv(d=8)
    scale = np.array([0.5, 2], np.float32)
    arrays = [jax.numpy.asarray(x) for x in (q, k, v)]
    got = flash_attn.flash_attn_with_kvcache(*arrays, k_descale=jax.numpy.asarray(scale), v_descale=0.5)
    assert_same_bits(np.asarray(got), flash_attn.flash_attn_with_kvcache(q, k, v, k_descale=scale, v_descale=0.5))
    with pytest.raises(libflash.UnsupportedError, match="k: JAX arrays are immutable"):
        flash_attn.flash_attn_with_kvcache(*arrays, k=arrays[1], v=arrays[2])


# -- pages that are gathered, because gradients are recorded


def gathered(table: list[list[int]], longest: int | None, used: list[int], ends: list[int] | None = None) -> torch.Tensor:
    x = {name: torch.from_numpy(value) for name, value in paged_problem().items()}
    lengths = {"cu_seqlens_k": torch.tensor(ends, dtype=torch.int32)} if ends else {"cu_seqlens_k": None}
    given = {} if ends else {"seqused_k": torch.tensor(used, dtype=torch.int32)}
    return flash_attn.flash_attn_varlen_func(
        x["q"].requires_grad_(), x["k"], x["v"], x["cu_q"], **lengths, max_seqlen_q=4, max_seqlen_k=longest, causal=True,
        block_table=torch.tensor(table, dtype=torch.int32 if "." not in str(table) else None), **given,
    )  # fmt: skip


def test_gathered_pages_need_no_maximum() -> None:
    """0 is unknown, as None is."""
    wanted = gathered([[3, 1], [0, 2]], 6, [6, 3])
    for longest in (0, None, 100):
        assert_same_bits(gathered([[3, 1], [0, 2]], longest, [6, 3]).detach().numpy(), wanted.detach().numpy())


def test_keys_that_would_not_be_gathered_are_refused() -> None:
    with pytest.raises(libflash.InvalidError, match=r"^max_seqlen_k is 5; it must be at least every length, or None \(6 keys\)"):
        gathered([[3, 1], [0, 2]], 5, [6, 3])
    with pytest.raises(libflash.InvalidError, match=r"^seqused_k: a sequence has 6 keys; .* block_table have room for 4"):
        gathered([[3], [0]], None, [6, 3])
    with pytest.raises(libflash.InvalidError, match=r"^cu_seqlens_k: a sequence has 6 keys; .* block_table have room for 4"):
        gathered([[3], [0]], None, [], ends=[0, 6, 9])


BAD_TABLES: dict[str, tuple[Any, str]] = {
    "sequences": ([[3, 1]], r"^block_table has shape \(1, 2\); it needs \(batch, columns\), and batch is 2"),
    "dimensions": ([3, 1], r"^block_table has shape \(2,\); it needs \(batch, columns\)"),
    "type": ([[3.0, 1.0], [0.0, 2.0]], "^block_table: dtype must be int32"),
}


@pytest.mark.parametrize("name", BAD_TABLES)
def test_tables_of_gathered_pages(name: str) -> None:
    table, said = BAD_TABLES[name]
    with pytest.raises(libflash.InvalidError, match=said):
        gathered(table, None, [6, 3])


def test_lengths_of_gathered_pages() -> None:
    table = [[3, 1], [0, 2]]
    with pytest.raises(libflash.InvalidError, match=r"^seqused_k has 1 sequences; cu_seqlens_q has 2"):
        gathered(table, None, [6])
    with pytest.raises(libflash.InvalidError, match=r"^cu_seqlens_k has 1 sequences; cu_seqlens_q has 2"):
        gathered(table, None, [], ends=[0, 6])


@pytest.mark.parametrize("library", LIBRARIES)
def test_decreasing_ends_of_keys_in_pages(library: str) -> None:
    """Read in place, and gathered for gradients: the prefix sums are wrong, and not a length."""
    x = {name: LIBRARIES[library](value) for name, value in paged_problem().items()}
    ends = LIBRARIES[library](np.array([0, 6, 3], np.int32))
    said = r"^cu_seqlens_k: must not decrease \(entries 1 and 2 are 6 and 3\)$"
    with pytest.raises(libflash.InvalidError, match=said):
        flash_attn.flash_attn_varlen_func(x["q"], x["k"], x["v"], x["cu_q"], ends, 4, None, block_table=x["table"])
    with pytest.raises(libflash.InvalidError, match=said):
        gathered([[3, 1], [0, 2]], None, [], ends=[0, 6, 3])


def test_decreasing_ends_of_keys_in_pages_of_jax() -> None:
    """Known outside of jit; inside, the library finds them when the program runs."""
    jax = pytest.importorskip("jax")
    x = {name: jax.numpy.asarray(value) for name, value in paged_problem().items()}
    call = lambda ends: flash_attn.flash_attn_varlen_func(  # noqa: E731
        x["q"], x["k"], x["v"], x["cu_q"], ends, 4, None, block_table=x["table"]
    )
    ends = jax.numpy.array([0, 6, 3], np.int32)
    with pytest.raises(libflash.InvalidError, match=r"^cu_seqlens_k: must not decrease"):
        call(ends)
    with pytest.raises(Exception, match="must be at least 0"):
        jax.block_until_ready(jax.jit(call)(ends))


@pytest.mark.parametrize("page", [-1, 5])
def test_an_absent_page_is_refused_and_not_replaced(page: int) -> None:
    assert gathered([[3, 1], [0, page]], None, [6, 3]).isfinite().all()  # of no key
    with pytest.raises(libflash.InvalidError, match=rf"^block_table: a page must be .*entry \(0, 1\) is {page} of 5"):
        gathered([[3, page], [0, 2]], None, [6, 3])


@pytest.mark.parametrize("library", LIBRARIES)
def test_one_length_for_all_may_be_an_integer_of_numpy(library: str) -> None:
    q, k, v = (LIBRARIES[library](x) for x in qkv(d=8))
    wanted = flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=7)
    assert_same_bits(np.asarray(flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=np.int64(7))), np.asarray(wanted))


def test_jax_reads_pages() -> None:
    """In place, also inside jit; it has no gradient for them."""
    jax = pytest.importorskip("jax")
    x = paged_problem()
    given = {name: jax.numpy.asarray(value) for name, value in x.items()}

    def call(q: Any, x: dict[str, Any], **more: Any) -> Any:
        return flash_attn.flash_attn_varlen_func(
            q, x["k"], x["v"], x["cu_q"], None, 4, None, causal=True, seqused_k=x["used"], block_table=x["table"],
            learnable_sink=x["sink"], **more,
        )  # fmt: skip

    wanted = call(x["q"], x)
    assert_same_bits(np.asarray(call(given["q"], given)), wanted)
    assert_same_bits(np.asarray(jax.jit(call)(given["q"], given)), wanted)
    with pytest.raises(libflash.UnsupportedError, match="decode"):
        jax.grad(lambda q: call(q, given).sum())(given["q"])
    with pytest.raises(libflash.UnsupportedError, match="block_table together with dropout_p or seqused_q is for PyTorch"):
        call(given["q"], given, seqused_q=given["used"])


@pytest.mark.parametrize("length", [True, -1, 2**40])
def test_a_length_as_a_number_is_checked(length: int) -> None:
    q, k, v = qkv()
    with pytest.raises(libflash.InvalidError, match=rf"cache_seqlens is {length}; as a number it must be 0 to"):
        flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=length)
