"""More than 256 channels on a GPU: every option, tangents, decode with appended rows and pages, values that are channels of the
keys.
"""

from __future__ import annotations

from typing import Any

import pytest
from case import Case
from decode_cases import DecodeCase
from gpu_kernels import TYPES, kernels, kernels_of_values_in_keys, parameters, supports
from libflash.conformance.cache_cases import CacheCase
from libflash.conformance.tangent_cases import TangentCase

import libflash

torch = pytest.importorskip("torch")
from gpu_case import DTYPES, run_backward, run_forward, same_bits  # noqa: E402  (needs torch)
from gpu_codes import run_cache, some_codes  # noqa: E402
from gpu_decode import run_decode  # noqa: E402
from gpu_tangent import check_backward, check_forward  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def wide(operation: str) -> list[Any]:
    """The kernels; those for less shared memory run on this GPU, too."""
    return [pytest.param(k, id=k["name"]) for k in kernels(operation) if k["head_dim"] > 256]


def test_there_are_kernels() -> None:
    tangents = [(f"{operation}_tangent", TYPES) for operation in ("forward", "backward")]
    for operation, types in (("forward", TYPES), ("backward", TYPES), ("decode", ("f16", "bf16", "f32")), *tangents):
        assert {k["dtype"] for k in kernels(operation) if k["head_dim"] > 256} == set(types)


DENSE: dict[str, Any] = {"seqlen_q": 150, "seqlen_k": 200, "heads_q": 4, "heads_k": 2}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (40, 10), "softcap": 20.0},
    "top-left": {"seqlen_q": 200, "seqlen_k": 150, "causal": True, "causal_align": "top_left", "sink": True},
    "alibi": {"alibi": "bh", "causal": True, "sink": True, "dlse": True},
    "bias": {"bias": "bhqk"},
    "broadcast bias": {"bias": "hq"},
    "mask": {"mask": "bhqk"},
    "blocks": {"block_mask": "bh"},
    "dropout": {"dropout_p": 0.25, "seed": 2**40 + 7, "offset": 3},
    "negative scale": {"softmax_scale": -0.05},
    "odd": {"head_dim": 333, "head_dim_v": 301},
    "narrow values": {"head_dim": 512, "head_dim_v": 64},
    "narrow keys": {"head_dim": 40, "head_dim_v": 264},
    "used": {"batch": 3, "used_q": (150, 0, 17), "used_k": (190, 30, 200), "causal": True},
    "packed": {"seqlen_q": (90, 0, 65, 3), "seqlen_k": (70, 9, 180, 0), "slack_rows": 3, "causal": True},
    "mean": {"fill": "mean", "causal": True},
    "many tiles": {"seqlen_q": 1000, "seqlen_k": 1100, "heads_q": 8, "heads_k": 2, "causal": True, "sink": True},
    "long": {"seqlen_q": 70, "seqlen_k": 1500, "heads_q": 2, "heads_k": 1},
}


def case_of(kernel: dict, name: str, head_dim: int) -> Case:
    return Case(f"wide-{name}-{head_dim}", TYPES[kernel["dtype"]], **({"head_dim": head_dim} | DENSE | OPTIONS[name]))


@pytest.mark.parametrize("head_dim", [264, 320, 512])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kernel", wide("forward"))
def test_forward(kernel: dict, option: str, head_dim: int) -> None:
    case = case_of(kernel, option, head_dim)
    if supports(kernel, case):
        case.check(**run_forward(case, kernel["name"]))
        return
    with pytest.raises(libflash.UnsupportedError, match=rf"\[{kernel['name']}\]"):
        run_forward(case, kernel["name"])


@pytest.mark.parametrize("head_dim", [264, 512])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kernel", wide("backward"))
def test_backward(kernel: dict, option: str, head_dim: int) -> None:
    case = case_of(kernel, option, head_dim)
    if supports(kernel, case):
        case.check(**run_backward(case, kernel["name"]))
        return
    with pytest.raises(libflash.UnsupportedError, match=rf"\[{kernel['name']}\]"):
        run_backward(case, kernel["name"])


@pytest.mark.parametrize("head_dim", [264, 512])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kernel", wide("forward_tangent"))
def test_forward_tangent(kernel: dict, option: str, head_dim: int) -> None:
    check_forward(TangentCase(list(OPTIONS).index(option), case_of(kernel, option, head_dim)), kernel["name"])


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kernel", wide("backward_tangent"))
def test_backward_tangent(kernel: dict, option: str) -> None:
    number = list(OPTIONS).index(option)
    check_backward(TangentCase(number, case_of(kernel, option, (264, 512)[number % 2])), kernel["name"])


SEVERAL: dict[str, Any] = {"lengths": (0, 1, 63, 64, 65, 130), "capacity": 140}
PACKED = SEVERAL | {"seqlen_q": (1, 40, 0, 3, 64, 9), "capacity": 200, "slack_rows": 2}
DECODE: dict[str, dict[str, Any]] = {
    "plain": SEVERAL,
    "mqa": {"heads_q": 24, "heads_k": 1, **SEVERAL},
    "long": {"lengths": (3500, 3, 900), "capacity": 3600},
    "window": {"seqlen_q": 3, "window_size": (20, 0), "softcap": 20.0, "alibi": "bh", "sink": True, **SEVERAL},
    "append": {"append": 1, "rotary": 64, **SEVERAL},
    "append-4": {"append": 4, "seqlen_q": 4, "batch_idx": True, **SEVERAL},
    "paged-16": {"page_size": 16, "append": 3, "seqlen_q": 3, "rotary": 512, **SEVERAL},
    "paged-7": {"page_size": 7, "leftpad": (0, 0, 63, 20, 14, 129), "seqlen_q": 5, **SEVERAL},
    "packed": {**PACKED, "append": PACKED["seqlen_q"]},
    "tree": {**SEVERAL, "seqlen_q": 6, "tree": True, "positions": True, "window_size": (12, 4)},
}


@pytest.mark.parametrize("dims", [(512, None), (576, 512), (320, 264), (300, 77)], ids=str)
@pytest.mark.parametrize("option", DECODE)
@pytest.mark.parametrize("kernel", wide("decode"))
def test_decode(kernel: dict, option: str, dims: tuple[int, int | None]) -> None:
    fields = {"head_dim": dims[0], "head_dim_v": dims[1]} | DECODE[option]
    fields["rotary"] = min(fields.get("rotary", 0), dims[0] // 2 * 2)
    case = DecodeCase(f"wide-{option}-{dims[0]}", TYPES[kernel["dtype"]], **fields)
    for split in ({}, {"num_splits": 3}, {"split_size": 128}, {"invariant": True}):
        case.check(**run_decode(case, kernel["name"], **split))


@pytest.mark.parametrize("rope_dim", [0, 64])
@pytest.mark.parametrize("append", [None, 2])
@pytest.mark.parametrize("heads", [1, 3, 16, 63, 128])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_values_that_are_channels_of_the_keys(dtype: str, heads: int, append: int | None, rope_dim: int) -> None:
    """MLA: one key head, 576 channels, of which the first 512 are the value."""
    shape: dict[str, Any] = {"heads_q": heads, "heads_k": 1, "head_dim": 576, "seqlen_q": 2, "page_size": 64, **SEVERAL}
    if append:
        shape["append"] = append
    case = CacheCase(DecodeCase(f"mla-{heads}", dtype, **shape), None, "none", rope_dim=rope_dim, head_dim_v=512)
    sm80 = next(k["name"] for k in kernels("decode") if k["head_dim"] == 576 and TYPES[k["dtype"]] == dtype)
    for name, more in ((None, {}), (None, {"num_splits": 3}), (sm80, {})):
        case.check(**run_cache(case, name, **more))


# Type of the codes, what scales belong to, channels of a group.
CODES = [("e4m3", "tensor", 0), ("e4m3", "groups", 64), ("e4m3", "none", 0), ("e5m2", "heads", 0), ("int8", "rows", 0),
         (None, "sequences", 0)]  # fmt: skip


@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize(("page", "rope_dim"), [(1, 64), (64, 0), (64, 64)])
@pytest.mark.parametrize("heads", [1, 16, 128])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_codes_of_values_in_the_keys(
    dtype: str, heads: int, page: int, rope_dim: int, codes: tuple[str | None, str, int]
) -> None:
    """MLA, with rope parts in 16 bits; also rows that are quantised and appended."""
    code, scale, group = codes
    for rows, append in ((1, 1), (8, 0)):
        shape: dict[str, Any] = {"heads_q": heads, "heads_k": 1, "head_dim": 576, "seqlen_q": rows, "page_size": page, **SEVERAL}
        if append:
            shape["append"] = append
        base = DecodeCase(f"codes-{heads}-{rows}", dtype, **shape)
        case = CacheCase(base, code, scale, group=group or 32, rope_dim=rope_dim, head_dim_v=512)
        for more in ({}, {"num_splits": 3}, {"invariant": True}):
            case.check(**run_cache(case, None, **more))


@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize("option", DECODE)
@pytest.mark.parametrize("kernel", wide("decode"))
def test_codes(kernel: dict, option: str, codes: tuple[str | None, str, int]) -> None:
    code, scale, group = codes
    fields = {"head_dim": 576, "head_dim_v": 512} | DECODE[option]
    base = DecodeCase(f"wide-codes-{option}", TYPES[kernel["dtype"]], **fields)
    case = CacheCase(base, code, scale, group=group or 32)
    if code and kernel["dtype"] == "f32":
        with pytest.raises(libflash.UnsupportedError, match="k_cache of 8 bits with float32 q"):
            run_cache(case, kernel["name"])
        return
    for more in ({}, {"num_splits": 3}, {"invariant": True}):
        case.check(**run_cache(case, kernel["name"], **more))


@pytest.mark.parametrize("code", ["e4m3", "e5m2", "int8"])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_codes_have_the_bits_of_their_values(dtype: str, code: str) -> None:
    """With the same scales and rope parts, for values in the keys and apart."""
    latent, values = (some_codes(code, 40, 64, 1, 512, seed=seed) for seed in (1, 2))
    rope = torch.randn(40, 64, 1, 64, device="cuda", dtype=DTYPES[dtype])
    q = torch.randn(3, 2, 16, 576, device="cuda", dtype=DTYPES[dtype]) / (8 if code == "int8" else 1)
    table = torch.randperm(39, device="cuda").to(torch.int32).view(3, 13)
    lengths = torch.tensor([800, 1, 333], device="cuda", dtype=torch.int32)
    options = {"block_table": table, "cache_seqlens": lengths, "return_lse": True, "causal": True}
    kinds: list[dict[str, Any]] = [
        {"k_scale": torch.rand(shape, device="cuda") / 8}
        for shape in ((1,), (3, 1), (40, 64, 1), (40, 64, 1, 4), (40, 64, 1, 32))
    ]
    for scales in kinds + [{}] * (code != "int8"):
        for more in ({}, {"num_splits": 5}, {"invariant": True}):
            for v in (None, values):
                of_values = {"head_dim_v": 512} if v is None else {"v_scale": scales["k_scale"]} if scales else {}
                made = []
                for convert in (lambda x: x, lambda x: x.to(DTYPES[dtype])):
                    caches = (convert(latent), None if v is None else convert(v))
                    given = options | scales | of_values | more | {"kernel": f"decode_sm80_{dtype}_d576x512"}
                    made.append(libflash.decode(q, *caches, k_rope_cache=rope, **given))
                assert all(same_bits(a, b) for a, b in zip(*made, strict=True)), (scales, more, v is None)


IN_KEYS: dict[str, dict[str, Any]] = {
    "plain": SEVERAL,
    "rows": {"seqlen_q": 3, **SEVERAL},
    "more rows": {"seqlen_q": 8, "page_size": 128, **SEVERAL},
    "long": {"lengths": (3500, 3, 900, 0), "capacity": 3600, "page_size": 64},
    "paged-16": {"page_size": 16, "seqlen_q": 2, "sink": True, **SEVERAL},
    "paged-48": {"page_size": 48, **SEVERAL},
    "window": {"seqlen_q": 3, "window_size": (20, 0), "page_size": 16, "lengths": (0, 1, 63, 130, 500), "capacity": 520},
    "not causal": {"seqlen_q": 5, "causal": False, "page_size": 32, **SEVERAL},
    "append": {"append": 1, "rotary": 64, "page_size": 64, **SEVERAL},
    "append-4": {"append": 4, "seqlen_q": 4, "batch_idx": True, **SEVERAL},
    "leftpad": {"leftpad": (0, 0, 63, 20, 14, 129), "seqlen_q": 5, "page_size": 16, **SEVERAL},
    "packed": {**PACKED, "append": PACKED["seqlen_q"], "page_size": 64},
    "two key heads": {"heads_k": 2, "page_size": 64, **SEVERAL},
}


@pytest.mark.parametrize("heads", [2, 16, 40, 64, 128])
@pytest.mark.parametrize("option", IN_KEYS)
@pytest.mark.parametrize("kernel", parameters(kernels_of_values_in_keys()))
def test_the_kernel_for_values_in_the_keys(kernel: dict, option: str, heads: int) -> None:
    shape: dict[str, Any] = {"heads_q": heads, "heads_k": 1, "head_dim": 576} | IN_KEYS[option]
    base = DecodeCase(f"in-keys-{option}-{heads}", TYPES[kernel["dtype"]], **shape)
    case = CacheCase(base, None, "none", head_dim_v=512)
    for split in ({}, {"num_splits": 1}, {"num_splits": 5}, {"split_size": 128}):
        case.check(**run_cache(case, kernel["name"], **split))


@pytest.mark.parametrize("kernel", parameters(kernels_of_values_in_keys()))
def test_large_batches_have_the_bits_of_single_sequences(kernel: dict) -> None:
    """Several waves of thread blocks, and the same bits in every run."""
    dtype, batch, keys = DTYPES[kernel["dtype"]], 150, 777
    q = torch.randn(batch, 1, 128, 576, device="cuda", dtype=dtype)
    k = torch.randn(batch * 13, 64, 1, 576, device="cuda", dtype=dtype)
    table = torch.randperm(batch * 13, device="cuda").to(torch.int32).view(batch, 13)
    lengths = torch.randint(0, keys, (batch,), device="cuda", dtype=torch.int32)
    options = {"kernel": kernel["name"], "num_splits": 1, "return_lse": True, "head_dim_v": 512}
    runs = [libflash.decode(q, k, None, block_table=table, cache_seqlens=lengths, **options) for _ in range(5)]
    for b in (0, 17, 149):
        one = slice(b, b + 1)
        single = libflash.decode(q[one], k, None, block_table=table[one], cache_seqlens=lengths[one], **options)
        assert all(same_bits(a, b) for a, b in zip(single, (x[one] for x in runs[0]), strict=True))
    assert all(same_bits(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_a_view_of_the_keys_has_the_bits_of_a_copy(dtype: str) -> None:
    q = torch.randn(3, 2, 16, 576, device="cuda", dtype=DTYPES[dtype])
    k = torch.randn(40, 64, 1, 576, device="cuda", dtype=DTYPES[dtype])
    table = torch.randperm(39, device="cuda").to(torch.int32).view(3, 13)
    lengths = torch.tensor([800, 1, 333], device="cuda", dtype=torch.int32)
    options = {"block_table": table, "cache_seqlens": lengths, "return_lse": True, "causal": True}
    options["kernel"] = f"decode_sm80_{dtype}_d576x512"
    view, copy = (libflash.decode(q, k, v, **options) for v in (k[..., :512], k[..., :512].contiguous()))
    assert all(same_bits(a, b) for a, b in zip(view, copy, strict=True))


@pytest.mark.parametrize("kernel", parameters(kernels_of_values_in_keys()))
def test_a_single_split_with_keys_has_the_bits_of_no_splits(kernel: dict) -> None:
    """Of several splits only the first has keys. The sink reduces the results of both calls in the same order."""
    dtype = DTYPES[kernel["dtype"]]
    q = torch.randn(3, 1, 64, 576, device="cuda", dtype=dtype)
    k = torch.randn(3, 3000, 1, 576, device="cuda", dtype=dtype)
    options: dict[str, Any] = {"cache_seqlens": torch.tensor([800, 1, 333], device="cuda", dtype=torch.int32)}
    options |= {
        "learnable_sink": torch.linspace(-3, 9, 64, device="cuda").to(dtype),
        "return_lse": True,
        "kernel": kernel["name"],
    }
    whole, parts = (libflash.decode(q, k, k[..., :512], **options, **some) for some in ({"num_splits": 1}, {"split_size": 1024}))
    assert all(same_bits(a, b) for a, b in zip(whole, parts, strict=True))


def test_what_decode_does_not_support() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        q = torch.zeros(1, 16, 2, 577, device="cuda", dtype=dtype)
        with pytest.raises(libflash.UnsupportedError, match="head_dim: must be at most 576 for this kernel"):
            libflash.decode(q, q, q[..., :512])
        with pytest.raises(libflash.UnsupportedError, match="head_dim_v: must be at most 512 for this kernel"):
            libflash.decode(q[..., :576], q[..., :576], q[..., :513])
