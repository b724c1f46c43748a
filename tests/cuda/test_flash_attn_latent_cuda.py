"""flash_attn_with_kvcache with qv (multi-head latent attention) on a GPU, against float64."""

from __future__ import annotations

from typing import Any

import pytest

import libflash

torch = pytest.importorskip("torch")
from libflash import flash_attn  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize(("rope", "latent"), [(64, 512), (144, 432), (32, 64)])
@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_with_kvcache_and_qv(dtype: torch.dtype, codes: bool, rope: int, latent: int) -> None:
    """The latent cache has the type of the queries or 8 bits."""
    q, qv = (torch.randn(2, 1, 16, n, device="cuda", dtype=dtype) for n in (rope, latent))
    k, v = (torch.randn(2, 300, 1, n, device="cuda", dtype=dtype) for n in (rope, latent))
    lengths = torch.tensor([300, 77], device="cuda", dtype=torch.int32)
    options: dict[str, Any] = {"cache_seqlens": lengths, "causal": True}
    if codes:
        v = v.to(torch.float8_e4m3fn)
        options["v_descale"] = torch.rand(2, 1, device="cuda") + 0.5
    if codes and dtype == torch.float32:
        with pytest.raises(libflash.UnsupportedError, match="v_cache of 8 bits with float32 q"):
            flash_attn.flash_attn_with_kvcache(q, k, v, qv=qv, **options)
        return
    got = flash_attn.flash_attn_with_kvcache(q, k, v, qv=qv, **options)
    values = v.double() * options["v_descale"].double()[:, None, :, None] if codes else v.double()
    scores = torch.einsum("bqhd,bkgd->bhqk", q.double(), k.double()) + torch.einsum("bqhd,bkgd->bhqk", qv.double(), values)
    scores.masked_fill_(torch.arange(300, device="cuda") >= lengths[:, None, None, None], -torch.inf)
    wanted = torch.einsum("bhqk,bkgd->bqhd", (scores * (rope + latent) ** -0.5).softmax(-1), values)
    limit = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 5e-6}[dtype]
    torch.testing.assert_close(got.double(), wanted, rtol=limit, atol=limit)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rotary_embedding_beside_qv(dtype: torch.dtype, interleaved: bool) -> None:
    """One call rotates q and k and appends to both caches, as the CPU does."""
    rows = {name: torch.randn(2, 3, heads, n, dtype=dtype) for name, heads, n in (("q", 16, 64), ("k", 1, 64), ("v", 1, 512))}
    rows["qv"] = torch.randn(2, 3, 16, 512, dtype=dtype)
    rows |= {name: torch.randn(2, 300, 1, n, dtype=dtype) for name, n in (("k_cache", 64), ("v_cache", 512))}
    angles = torch.arange(300)[:, None] * 0.1 ** torch.linspace(0, 3, 32)
    rows |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    rows["cache_seqlens"] = torch.tensor([297, 77], dtype=torch.int32)
    made = []
    for device in ("cpu", "cuda"):
        given = {name: x.clone().to(device) for name, x in rows.items()}
        out = flash_attn.flash_attn_with_kvcache(**given, causal=True, rotary_interleaved=interleaved)
        made.append([x.cpu() for x in (given["k_cache"], given["v_cache"], out)])
    for got, wanted in zip(made[1][:2], made[0][:2], strict=True):
        assert torch.equal(got, wanted)
    assert not torch.equal(made[1][0], rows["k_cache"])
    limit = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 5e-6}[dtype]
    torch.testing.assert_close(made[1][2], made[0][2], rtol=limit, atol=limit)
