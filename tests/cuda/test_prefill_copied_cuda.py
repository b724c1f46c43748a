"""Long chunks over caches that the prefill kernels convert or copy: 8-bit codes, scales, pages of any size. Against the CPU,
against a cache of the codes' values, in captured graphs, with pages that do not exist.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpu_kernels import device_of, in_place_of, kernels, parameters
from sequences import cu_seqlens

import libflash

torch = pytest.importorskip("torch")
from gpu_case import DTYPES, same_bits, to_numpy  # noqa: E402  (needs torch)
from gpu_codes import TORCH_CODES  # noqa: E402
from gpu_decode import NUMPY  # noqa: E402
from gpu_prefill import check, copies_caches  # noqa: E402

HEADS_Q, HEADS_K, CAPACITY = 32, 4, 720
# Query rows of each sequence (long chunks, single rows, lengths in between, no rows), and its keys before the call.
ROWS, CACHED = (260, 1, 0, 63, 96, 515, 1, 9), (460, 720, 20, 400, 0, 205, 1, 700)
KERNELS = [kernel for kernel in kernels("prefill") if copies_caches(kernel)]
every_kernel = pytest.mark.parametrize("kernel", parameters([*KERNELS, in_place_of("prefill")]))
CODES = ("e4m3", "e5m2", "int8")
CODE_OF_ONE = {"": 1, "e4m3": 80, "e5m2": 10_000, "int8": 30}  # values are about 1 with a scale of its inverse
Tensors = dict[str, torch.Tensor]


def scales_of(form: str, kernel: dict, code: str, cache: torch.Tensor, seed: int) -> torch.Tensor:
    shape = {"one": (1,), "heads": (HEADS_K,), "sequences": (len(ROWS), HEADS_K), "rows": cache.shape[:3]}[form]
    x = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.5
    return (x / CODE_OF_ONE[code]).to(device_of(kernel))


def finite(kernel: dict, code: str, *shape: int, seed: int, size: float = 1.0) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size
    return (x.round() if code == "int8" else x).to(TORCH_CODES[code] if code else DTYPES[kernel["dtype"]])


def step(
    kernel: dict, page: int, code: str, narrower: int = 0, rows: tuple[int, ...] = ROWS, scaled: bool = False
) -> tuple[Tensors, Tensors]:
    """q and the caches; lengths and new rows. Cache rows that hold no key are NaN where the type has one. `scaled`: codes for
    scales of scales_of().
    """
    device, sequences = device_of(kernel), len(rows)
    widths = [kernel["head_dim"] - narrower, kernel["head_dim_v"] - narrower]
    caches = []
    for seed, dim in enumerate(widths):
        cache = finite(kernel, code, sequences, CAPACITY, HEADS_K, dim, seed=seed, size=CODE_OF_ONE[code] if scaled else 1.0)
        if code != "int8":
            for b, cached in enumerate(CACHED):
                cache[b, cached:] = torch.nan
        caches.append(cache)
    options = {"cache_seqlens": torch.tensor([min(x, CAPACITY - r) for x, r in zip(CACHED, rows, strict=True)])}
    if page:
        order = torch.randperm(sequences * CAPACITY // page, generator=torch.Generator().manual_seed(3))
        for i, dim in enumerate(widths):
            pages = torch.empty_like(caches[i]).view(-1, page, HEADS_K, dim)
            pages.view(torch.uint8)[order] = caches[i].view(torch.uint8).view(pages.view(torch.uint8).shape)
            caches[i] = pages
        options["block_table"] = order.view(sequences, -1)
    options["cu_seqlens_q"] = torch.from_numpy(cu_seqlens(rows))
    arrays = {"q": finite(kernel, "", sum(rows), HEADS_Q, widths[0], seed=5), "k_cache": caches[0], "v_cache": caches[1]}
    new = {
        name: finite(kernel, "", sum(rows), HEADS_K, dim, seed=6 + i)
        for i, (name, dim) in enumerate(zip("kv", widths, strict=True))
    }
    on = {name: x.int().to(device) for name, x in options.items()} | {name: x.to(device) for name, x in new.items()}
    return {name: x.to(device) for name, x in arrays.items()}, on


def run(arrays: Tensors, **options: Any) -> list[torch.Tensor]:
    """out and lse, NaN where nothing was written."""
    q = arrays["q"]
    out = q.new_full((*q.shape[:-1], arrays["v_cache"].shape[-1]), torch.nan)
    lse = torch.full((q.shape[1], q.shape[0]), torch.nan, device=q.device)
    libflash.decode(**arrays, out=out, lse=lse, return_lse=True, **options)
    return [out, lse]


def on_cpu(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: x.cpu().clone() if isinstance(x, torch.Tensor) else x for name, x in tensors.items()}


def check_against_cpu(kernel: dict, got: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    numbers = [(to_numpy(out, NUMPY[kernel["dtype"]]), lse.cpu().numpy()) for out, lse in (got, wanted)]
    check(*numbers, kernel)


def is_copied(kernel: dict, arrays: Tensors, **options: Any) -> bool:
    """Whether the plan has this prefill kernel, which copies the cache, or loads codes by TMA where their pages allow it. The CPU
    has none.
    """
    text = libflash.explain(*arrays.values(), op="decode", **options)
    cache = arrays["k_cache"]
    by_tma = cache.element_size() == 1 and ("block_table" not in options or cache.shape[1] % 16 == 0)
    instance = "instance cache, codes" if by_tma else "instance cache, copied"
    return device_of(kernel) == "cpu" or (f"{kernel['name']}, tile" in text and instance in text)


FORMS = [
    ("", 1, "", {"causal": True}),
    ("", 24, "", {"causal": True, "window_size": (90, 0)}),
    ("", 16, "heads", {"causal": False}),
    ("e4m3", 16, "one", {"causal": True}),
    ("e4m3", 0, "", {"causal": True}),
    ("e4m3", 1, "sequences", {"causal": False, "window_size": (200, 30)}),
    ("e5m2", 48, "heads", {"causal": True}),
    ("int8", 16, "sequences", {"causal": True}),
    ("int8", 8, "heads", {"causal": True, "window_size": (64, 0)}),
    ("int8", 16, "rows", {"causal": True}),
    ("e4m3", 1, "rows", {"causal": True, "window_size": (300, 0)}),
    ("e5m2", 0, "rows", {"causal": False}),
]


@every_kernel
@pytest.mark.parametrize("narrower", [0, 16])
@pytest.mark.parametrize(("code", "page", "form", "more"), FORMS, ids=str)
def test_against_the_cpu(kernel: dict, code: str, page: int, form: str, more: dict, narrower: int) -> None:
    """With an append. A call without it over the codes, and one over their values, then have the same bits."""
    arrays, options = step(kernel, page, code, narrower, scaled=bool(form))
    for i, x in enumerate("kv" if form else ""):
        options[f"{x}_scale"] = scales_of(form, kernel, code, arrays[f"{x}_cache"], i)
    options |= more
    if page == 16:
        options["learnable_sink"] = torch.linspace(-1, 1, HEADS_Q).to(arrays["q"].device)
    assert is_copied(kernel, arrays, **options) or (form, kernel["dtype"]) == ("rows", "f16")
    own, given = on_cpu(arrays), on_cpu(options)
    got, wanted = run(arrays, **options), run(own, **given)
    check_against_cpu(kernel, got, wanted)
    for name in ("k_cache", "v_cache"):
        assert same_bits(arrays[name].cpu(), own[name])
    for name in ("k_scale", "v_scale") if form else ():
        assert same_bits(options[name].cpu(), given[name])
    del options["k"], options["v"]
    options["cache_seqlens"] += options["cu_seqlens_q"].diff()
    assert all(map(same_bits, run(arrays, **options), got))
    if not code:
        return
    values = arrays | {name: arrays[name].to(arrays["q"].dtype) for name in ("k_cache", "v_cache")}
    one = torch.ones(1, device=arrays["q"].device)
    given = {"k_scale": one, "v_scale": one} | options
    assert all(map(same_bits, run(arrays, **given), got))
    assert all(map(same_bits, run(values, **given), run(arrays, **given)))


@every_kernel
@pytest.mark.parametrize("code", ["", "e4m3"])
def test_entries_of_other_sequences(kernel: dict, code: str) -> None:
    """cache_batch_idx: the sequences have the entries of a larger cache in another order."""
    arrays, options = step(kernel, 0, code, scaled=True)
    del options["k"], options["v"]
    one = torch.full((1,), 1 / CODE_OF_ONE[code], device=arrays["q"].device)
    options |= {"causal": True, "k_scale": one, "v_scale": one}
    wanted = run(arrays, **options)
    assert wanted[0].isfinite().all()
    order = torch.tensor([9, 3, 0, 7, 1, 10, 4, 6], dtype=torch.int32, device=arrays["q"].device)
    others = dict(arrays)
    for name in ("k_cache", "v_cache"):
        cache = arrays[name]
        larger = torch.full((11, *cache.shape[1:]), 0x7F, dtype=torch.uint8, device=cache.device)
        larger = larger.repeat_interleave(cache.element_size(), -1).view(cache.dtype)
        larger.view(torch.uint8)[order.long()] = cache.view(torch.uint8)
        others[name] = larger
    options["cache_batch_idx"] = order
    assert is_copied(kernel, others, **options)
    assert all(map(same_bits, run(others, **options), wanted))


@every_kernel
def test_small_pages_have_the_bits_of_large_ones(kernel: dict) -> None:
    """Whether TMA or threads load the keys changes no bit: all sequences have long chunks, which the prefill kernel takes."""
    rows = (130, 64, 200, 96, 65, 90, 300, 70)
    arrays, options = step(kernel, 48, "", rows=rows)
    del options["k"], options["v"]
    wanted = run(arrays, causal=True, **options)
    assert wanted[0].isfinite().all()
    finer = {name: x if name == "q" else x.view(-1, 3, *x.shape[2:]) for name, x in arrays.items()}
    parts = torch.arange(16, device=arrays["q"].device, dtype=torch.int32)
    options["block_table"] = (options["block_table"][:, :, None] * 16 + parts).flatten(1)
    assert is_copied(kernel, finer, causal=True, **options)
    assert all(map(same_bits, run(finer, causal=True, **options), wanted))


@every_kernel
@pytest.mark.parametrize("code", CODES)
def test_scales_that_are_not_positive(kernel: dict, code: str) -> None:
    """With a negative scale of the keys the largest dot product is the smallest score; with 0 all scores are equal."""
    arrays, options = step(kernel, 16, code, scaled=True)
    del options["k"], options["v"]
    for name, x in (("k_scale", (-1.0, 0.0, 1.5, -2.0)), ("v_scale", (1.0, 2.0, -1.0, 0.5))):
        options[name] = torch.tensor(x, device=arrays["q"].device) / CODE_OF_ONE[code]
    assert is_copied(kernel, arrays, causal=True, **options)
    got, wanted = (run(x, causal=True, **y) for x, y in ((arrays, options), (on_cpu(arrays), on_cpu(options))))
    check_against_cpu(kernel, got, wanted)


@every_kernel
@pytest.mark.parametrize("code", ["", "e4m3"])
def test_pages_that_do_not_exist(kernel: dict, code: str) -> None:
    """Their keys are absent: the same as a value of 0 with a score of -infinity. Without a mask only their number counts."""
    arrays, options = step(kernel, 8, code)
    del options["k"], options["v"]
    table = options["block_table"].clone()
    keep = torch.ones(table.shape[1], dtype=torch.bool)
    keep[[0, 3, 17]] = False
    shorter = options | {"block_table": table[:, keep].contiguous(), "cache_seqlens": options["cache_seqlens"] - 24}
    long = options["cache_seqlens"] >= 24 + 8 * 15
    cut = torch.where(long, options["cache_seqlens"], 0)
    shorter["cache_seqlens"] = torch.where(long, cut - 24, 0).int()
    table[:, ~keep] = torch.tensor([-1, 2**31 - 1, len(arrays["k_cache"])], dtype=torch.int32, device=table.device)
    if device_of(kernel) == "cpu":  # which refuses such pages
        table = options["block_table"]
        options = shorter
    else:
        options |= {"block_table": table, "cache_seqlens": cut.int()}
    got, wanted = (run(arrays, causal=False, **x) for x in (options, shorter))
    check_against_cpu(kernel, got, wanted)
    assert got[0].isfinite().all()


STEPS = (ROWS, (0,) * 8, (700, 0, 0, 0, 0, 0, 0, 0), (1,) * 8, (64, 63, 64, 63, 65, 1, 0, 600), ROWS)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kernel", parameters(KERNELS))
@pytest.mark.parametrize(("code", "page"), [("e4m3", 16), ("", 8)])
def test_replays_with_other_lengths(kernel: dict, code: str, page: int) -> None:
    """A captured call is right for any lengths; rows of no sequence are not written."""
    arrays, options = step(kernel, page, code)
    del options["k"], options["v"]
    for name in ("k_cache", "v_cache"):
        arrays[name].copy_(arrays[name].float().nan_to_num(1).to(arrays[name].dtype))
    q = arrays["q"]
    out, lse = torch.empty_like(q), torch.empty(HEADS_Q, len(q), device="cuda")

    def call() -> None:
        libflash.decode(**arrays, out=out, lse=lse, return_lse=True, causal=True, **options)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        call()
    for rows in STEPS:
        used, keys = sum(rows), np.minimum(np.maximum(CACHED, rows), CAPACITY)
        options["cu_seqlens_q"].copy_(torch.from_numpy(cu_seqlens(rows)))
        options["cache_seqlens"].copy_(torch.from_numpy(keys.astype(np.int32)))
        for _ in range(2):
            out.fill_(7), lse.fill_(7)
            graph.replay()
        assert (out[used:] == 7).all()
        assert (lse[:, used:] == 7).all()
        own = on_cpu(arrays) | {"q": q[:used].cpu()}
        check_against_cpu(kernel, [out[:used], lse[:, :used]], run(own, causal=True, **on_cpu(options)))


@every_kernel
def test_scales_of_groups_run_on_the_decode_kernels(kernel: dict) -> None:
    arrays, options = step(kernel, 16, "e4m3")
    del options["k"], options["v"]
    for form in (arrays["k_cache"].shape[:3], (*arrays["k_cache"].shape[:3], kernel["head_dim"] // 16)):
        options |= {name: torch.full(form, 0.5, device=arrays["q"].device) for name in ("k_scale", "v_scale")}
        of_rows = len(form) == 3 and kernel["dtype"] == "bf16"
        assert is_copied(kernel, arrays, causal=True, **options) == of_rows or device_of(kernel) == "cpu"
        half = dict.fromkeys(("k_scale", "v_scale"), torch.full((1,), 0.5, device=arrays["q"].device))
        got, wanted = (run(arrays, causal=True, **x) for x in (options, options | half))
        check_against_cpu(kernel, got, wanted)
