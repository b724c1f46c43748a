"""Decode on a GPU over caches of 8-bit codes: the cases of the CPU, the bits of a 16-bit cache of their values, an append."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import BFLOAT16, random
from libflash.conformance import cache_cases
from libflash.conformance.cache_cases import CacheCase
from libflash.conformance.decode_cases import DecodeInputs
from libflash.conformance.reference_cache import CODES

import libflash

torch = pytest.importorskip("torch")
from gpu_case import DTYPES, same_bits  # noqa: E402  (needs torch)
from gpu_codes import on_device, refused, run, some_codes  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

SPLITS = [{}, {"num_splits": 3}, {"split_size": 128}]


CASES = [case for case in cache_cases.quick() if not refused(case)]
REFUSED = [case for case in cache_cases.quick() if refused(case)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case: CacheCase) -> None:
    for split in SPLITS:
        x = case.inputs()
        out, lse = run(x, **split)
        case.check(x, o=out, lse=lse)


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_refused_case(case: CacheCase) -> None:
    with pytest.raises(libflash.UnsupportedError, match=refused(case)):
        run(case.inputs())


def test_there_are_cases() -> None:
    for codes in (True, False):
        assert {case.scale for case in CASES if bool(case.codes) == codes} >= set(cache_cases.SCALES) - {"none"}
    assert {case.codes for case in CASES} == {*CODES, None}
    assert {bool(case.rope_dim) for case in CASES if case.head_dim_v} == {False, True}
    assert sum(bool(case.base.append) for case in CASES) >= 30


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("head_dim", [64, 72, 128, 192, 256])
def test_codes_have_the_bits_of_their_values(head_dim: int, dtype: str, code: str) -> None:
    """For one and several query rows of a key head, one and two key heads of a thread block, pages, splits."""
    for rows, heads, batch, options in (
        (1, 2, 2, {}), (1, 8, 64, {}), (3, 8, 64, {}), (3, 3, 2, {"num_splits": 5}), (9, 2, 2, {"split_size": 128}),
        (40, 1, 1, {"causal": False}),
    ):  # fmt: skip
        shape = (batch * 33, 16, heads, head_dim)
        caches = [some_codes(code, *shape, seed=seed) for seed in (1, 2)]
        table = torch.randperm(batch * 33, device="cuda").to(torch.int32).view(batch, 33)
        q = torch.randn(batch, rows, heads * 4, head_dim, device="cuda", dtype=DTYPES[dtype]) / (8 if code == "int8" else 1)
        lengths = torch.randint(0, 33 * 16 + 1, (batch,), device="cuda", dtype=torch.int32)
        more = {"block_table": table, "cache_seqlens": lengths, "return_lse": True, "causal": True, **options}
        one = torch.ones(1, device="cuda")
        values = [x.to(DTYPES[dtype]) for x in caches]
        # Without scales a kernel of sm90 may take many rows over the values.
        scales: list[dict[str, Any]] = [{"backend": "sm80"}] * (code != "int8") + [{"k_scale": one, "v_scale": one}]
        for scale in scales:
            wanted, got = (libflash.decode(q, *x, **more, **scale) for x in (values, caches))
            assert all(same_bits(a, b) for a, b in zip(got, wanted, strict=True)), (rows, heads, scale)
        for shape_of_scale in ((heads,), (batch, heads), shape[:3], (*shape[:3], head_dim // 16)):
            if head_dim % 16 and len(shape_of_scale) == 4:
                continue
            scale = {name: torch.rand(shape_of_scale, device="cuda") / 8 for name in ("k_scale", "v_scale")}
            wanted, got = (libflash.decode(q, *x, **more, **scale) for x in (values, caches))
            assert all(same_bits(a, b) for a, b in zip(got, wanted, strict=True)), (rows, heads, shape_of_scale)


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_every_code_has_its_value(dtype: str, code: str) -> None:
    """One key a sequence: out is its value."""
    codes = on_device(np.arange(256, dtype=np.uint8).view(CODES[code]).reshape(256, 1, 1, 1))
    one = torch.ones(1, device="cuda")
    for dim in (1, 16, 320):
        q, cache = torch.zeros((256, 1, 1, dim), device="cuda", dtype=DTYPES[dtype]), codes.expand(256, 1, 1, dim).contiguous()
        out = libflash.decode(q, cache, cache, k_scale=one, v_scale=one, causal=False)
        wanted = cache.float()
        known = wanted.isfinite()  # NaN or infinity in a key makes the score NaN
        assert torch.equal(out.float()[known], wanted[known])
        assert out[~known].isnan().all()


@pytest.mark.parametrize("code", CODES)
def test_scales_of_all_forms(code: str) -> None:
    """The same scales in every form and with odd strides have the same bits."""
    q = torch.randn(3, 2, 8, 128, device="cuda", dtype=torch.bfloat16)
    caches = [some_codes(code, 3, 200, 4, 128, seed=seed) for seed in (3, 4)]
    for_heads = torch.rand(2, 4, device="cuda") * 0.1 + 0.01

    def forms(scale: torch.Tensor) -> list[torch.Tensor]:
        inline = torch.zeros(3, 200, 4, 7, device="cuda")
        inline[..., 5] = scale
        dense = scale.expand(3, 200, 4)
        return [scale, scale.expand(3, 4), dense, dense.contiguous(), inline[..., 5], dense.contiguous()[..., None]]

    results = [libflash.decode(q, *caches, k_scale=k, v_scale=v) for k, v in zip(*map(forms, for_heads), strict=True)]
    assert all(same_bits(result, results[0]) for result in results)
    assert not same_bits(results[0], libflash.decode(q, *caches, k_scale=for_heads[0], v_scale=2 * for_heads[1]))


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT16], ids=str)
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("scale", ["heads", "rows"])
@pytest.mark.parametrize(("news", "heads", "dim"), [(4, 2, 72), (1, 2, 72), (1, 8, 64), (1, 2, 128)])
def test_appended_codes_are_those_of_the_cpu(news: int, heads: int, dim: int, scale: str, code: str, dtype: np.dtype) -> None:
    """With a rotary embedding; special values, a full cache and a page that does not exist. One row is appended by the attention
    kernel.
    """
    pages, size = 9, 5
    # Of four rows two of the last sequence fit, two of the second have no page; of one row, those of both are absent.
    lengths = np.array([7, 3, 13] if news > 1 else [7, 6, 15], np.int32)
    table = np.array([[3, 1, 5], [0, 99, 2], [7, 6, 8]], np.int32)
    x: dict[str, Any] = {"k": random(3, news, heads, dim, seed=1), "v": random(3, news, heads, dim, seed=2)}
    x["v"][0, 0, 0, :3], x["v"][0, -1, 1, :] = (np.inf, -0.0, np.nan), 0
    x["k"][0, 0, 1, 61] = -np.inf  # after the rotated channels
    if news > 1:
        x["v"][1, 2, 1, 3] = -np.inf
    x = {name: value.astype(dtype) for name, value in x.items()}
    for name, seed in (("k_cache", 3), ("v_cache", 4)):
        x[name] = random(pages, size, heads, dim, seed=seed).astype(CODES[code])
    for name, seed in (("k_scale", 5), ("v_scale", 6)):
        shape = (heads,) if scale == "heads" else (pages, size, heads)
        x[name] = np.abs(random(*shape, seed=seed)) * np.float32(0.01) + np.float32(0.01)
    x |= {"rotary_cos": random(20, 30, seed=7), "rotary_sin": random(20, 30, seed=8), "block_table": table}
    before = {name: value.copy() for name, value in x.items()}
    q = random(3, 1, heads, dim, seed=9).astype(dtype)
    got = DecodeInputs(q, x.pop("k_cache"), x.pop("v_cache"), x | {"cache_seqlens": lengths})
    run(got)
    keys = lengths[:, None] + np.arange(news)
    places = np.take_along_axis(table, np.minimum(keys // size, 2), 1)
    slots = np.where((keys < 3 * size) & (places < pages), places * size + keys % size, -1).reshape(-1)
    wanted = before | {name: before[name].reshape(-1, heads, dim) for name in ("k", "v")}
    wanted.pop("block_table")
    libflash.cache_write(**wanted, slots=slots, positions=keys.reshape(-1).astype(np.int32))
    after = {"k_cache": got.k_cache, "v_cache": got.v_cache, "k_scale": x["k_scale"], "v_scale": x["v_scale"]}
    for name, value in after.items():
        unsigned = np.dtype(f"u{value.itemsize}")
        nan = np.isnan(value.astype(np.float32)) & np.isnan(wanted[name].astype(np.float32))
        different = (value.view(unsigned) != wanted[name].view(unsigned)) & ~(nan & (value.itemsize > 1))
        assert not different.any(), name
    assert (slots >= 0).sum() == (4 + 2 + 2 if news > 1 else 1)


def test_graph_and_stream() -> None:
    """Captured once, replayed with other lengths."""
    q = torch.randn(2, 1, 8, 128, device="cuda", dtype=torch.float16)
    new = torch.randn(2, 1, 2, 128, device="cuda", dtype=torch.float16)
    caches = [some_codes("int8", 2, 100, 2, 128, seed=seed) for seed in (5, 6)]
    scales = {name: torch.full((2, 100, 2), 0.03, device="cuda") for name in ("k_scale", "v_scale")}
    lengths = torch.tensor([3, 60], device="cuda", dtype=torch.int32)
    libflash.decode(q, *[x.clone() for x in caches], k=new, v=new, cache_seqlens=lengths, **scales)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = libflash.decode(q, *caches, k=new, v=new, cache_seqlens=lengths, **scales)
    for values in ([9, 0], [98, 40]):
        lengths.copy_(torch.tensor(values, dtype=torch.int32))
        copies = [x.clone() for x in caches]
        wanted = libflash.decode(q, *copies, k=new, v=new, cache_seqlens=lengths, **scales)
        graph.replay()
        assert same_bits(out, wanted)
        assert all(torch.equal(x, y) for x, y in zip(caches, copies, strict=True))
