"""Plans for more than 256 channels on described GPUs, whose tiles follow from the shared memory."""

from __future__ import annotations

import ctypes as c
from typing import Any

import abi
import pytest
from described import ADDRESS, DEVICES, explain, tensor
from described_plans import (
    BLOCKS,
    DSCORES,
    MASK,
    SCORES,
    SLOPES,
    Case,
    attention,
    check_instance,
    instance_cases,
    kernel,
    launches,
    plan_lines,
)

GPUS = ("A100", "L40S", "H200", "B200", "RTX 5090")
SMALL = ("L40S", "RTX 5090")  # 99 KB of shared memory per thread block; A100 163 KB, the others 227 KB
NAMES = {"bf16": abi.BFLOAT16, "f16": abi.FLOAT16}
# Types with one kernel for every GPU: tiles of forward and of backward.
EXACT = {"f32": (abi.FLOAT32, "32x16", "16x16"), "f64": (abi.FLOAT64, "16x8", "8x8")}


def decode(
    device: str,
    expected: dict[str, str],
    dims: tuple[int, int] = (512, 512),
    rows: int = 1,
    dtype: int = abi.BFLOAT16,
    **options: Any,
) -> Case:
    """Four sequences, 16 query heads over 2 key heads, 8192 keys."""
    k, v = (tensor(4, 8192, 2, dims[n], dtype=dtype, address=4 * (n + 1) * ADDRESS) for n in range(2))
    return Case(device, "decode", (tensor(4, rows, 16, dims[0], dtype=dtype), k, v), options, expected)


def forward_cases() -> list[Case]:
    cases = []
    for device in GPUS:
        for name, dtype in NAMES.items():
            small = device in SMALL
            expected = kernel(f"forward_sm80_{name}_d512" + "_small" * small, "general", "32x32" if small else "64x32")
            if device == "H200":
                expected = kernel(f"forward_sm90_{name}_d512", "wide heads", "64x64", launch="attention: 512 ")
            cases.append(attention(device, 512, expected, dtype=dtype))
        for name, (dtype, tile, _) in EXACT.items():
            expected = kernel(f"forward_sm80_{name}_d512_small", "general", tile)
            cases.append(attention(device, 512, expected, dtype=dtype))
            cases.append(attention(device, 64, expected, dtype=dtype, head_dim_v=257, softcap=3.0))
    expected = kernel("forward_sm80_bf16_d512", "general", "64x32", schedule="static")
    options: list[dict[str, Any]] = [{"block_mask": BLOCKS}, {"mask": MASK}]
    cases += [attention("H200", 264, expected, **some) for some in options]
    cases += [attention("A100", 257, expected), attention("H200", 257, expected)]
    expected = kernel("forward_sm90_bf16_d512", "wide heads", "64x64", schedule="static")
    options = [{"softcap": 3.0}, {"softmax_scale": -1.0, "flags": abi.SCALE}, {"flags": abi.CAUSAL}, {"head_dim_v": 64}]
    cases += [attention("H200", 264, expected, **some) for some in options]
    cases += [attention("H200", 64, expected, head_dim_v=320)]
    return cases


def backward_cases() -> list[Case]:
    cases = []
    for device in GPUS:
        for name, dtype in NAMES.items():
            expected = kernel(f"backward_sm80_{name}_d512_small", "general", "32x32")
            if device == "H200":  # there is code of the large kernel of sm80 for sm_90 alone
                expected = kernel(f"backward_sm90_{name}_d512", "wide heads", "64x64", schedule="static")
            cases.append(attention(device, 512, expected, "backward", dtype=dtype))
        for name, (dtype, _, tile) in EXACT.items():
            expected = kernel(f"backward_sm80_{name}_d512_small", "general", tile)
            cases.append(attention(device, 512, expected, "backward", dtype=dtype))
            bias, dbias = (tensor(1, 16, 1000, 1000, dtype=abi.FLOAT32, address=(n + 2) * ADDRESS) for n in range(2))
            options = {"dtype": dtype, "bias": bias, "dbias": dbias, "flags": abi.DETERMINISTIC}
            cases.append(attention(device, 257, expected, "backward", **options))
    expected = kernel("backward_sm90_bf16_d512", "wide heads", "64x64", schedule="static")
    some_options: list[dict[str, Any]] = [{"softcap": 3.0}, {"flags": abi.CAUSAL | abi.DETERMINISTIC}, {"head_dim_v": 64}]
    cases += [attention("H200", 264, expected, "backward", **some) for some in some_options]
    cases += [attention("H200", 64, expected, "backward", head_dim_v=320)]
    expected = kernel("backward_sm80_bf16_d512", "general", "64x64")
    cases += [
        attention("H200", 264, expected, "backward", **some)
        for some in ({"alibi_slopes": SLOPES}, {"dbias": DSCORES, "bias": SCORES})
    ]
    return cases


def decode_cases() -> list[Case]:
    wide = kernel("decode_sm80_bf16_d576x512", "general", "16x16", pipeline="2 stages")
    news = {name: tensor(4, 1, 2, 512, address=(n + 2) * ADDRESS) for n, name in enumerate(("k_new", "v_new"))}
    scaled = kernel("decode_sm80_bf16_d576x512", "scales, general", "16x16", pipeline="2 stages")
    codes = kernel("decode_sm80_bf16_d576x512", "8-bit codes, general", "16x16", pipeline="2 stages")
    scale = tensor(2, dtype=abi.FLOAT32)
    cases = [decode(device, wide) for device in GPUS]
    exact = kernel("decode_sm80_f32_d576x512_small", "general", "16x16", pipeline="1 stage")
    cases += [decode(device, exact, dims, dtype=abi.FLOAT32) for device in GPUS for dims in ((512, 512), (576, 512), (300, 64))]
    exact = kernel("decode_sm80_f32_d576x512_small", "scales, general", "16x16")
    cases.append(decode("L40S", exact, dtype=abi.FLOAT32, k_scale=tensor(2, dtype=abi.FLOAT32)))
    cases += [decode(device, scaled, k_scale=scale) for device in GPUS]
    cases += [
        Case(
            "H200", "decode", (q, *(tensor(4, 8192, 2, n, dtype=dtype, address=n * ADDRESS) for n in (320, 264))), options, codes
        )
        for q in (tensor(4, 1, 16, 320),)
        for dtype in (abi.E4M3, abi.E5M2, abi.INT8)
        for options in (
            {"k_scale": scale, "v_scale": scale},
            {"k_scale": tensor(4, 8192, 2, dtype=abi.FLOAT32), "v_scale": scale},
        )
    ]
    cases += [
        decode("H200", {**scaled, "launch": "append codes: 4 "}, v_scale=scale, **news),  # a warp for each of 16 rows
        decode("H200", wide, (576, 512)),
        decode("H200", wide, (64, 300)),
        decode("H200", {**wide, "launch": "append: 4 "}, **news),  # two rows of 256 threads each
        decode("H200", {**wide, "launch": "attention: 24 "}, rows=5, num_splits=1),  # three tiles of 40 rows
        decode("H200", {**wide, "splits": "32 ranges"}, flags=abi.INVARIANT_ROWS, split_size=256),
    ]
    return cases


@instance_cases([*forward_cases(), *backward_cases(), *decode_cases()])
def test_the_instance_that_runs(lib: c.CDLL, case: Case) -> None:
    check_instance(lib, case)


def mla(page: int = 64, rows: int = 1, heads: int = 128) -> tuple[Any, ...]:
    """q, k_cache and v_cache, a view of it: the query heads share one key head."""
    cache, view = tensor(32768 // page, page, 1, 576), tensor(32768 // page, page, 1, 576)
    view.shape[3] = 512
    return tensor(4, rows, heads, 576), cache, view


def mla_options(page: int = 64) -> dict[str, Any]:
    return {"block_table": tensor(4, 8192 // page, dtype=abi.INT32), "cache_seqlens": tensor(4, dtype=abi.INT32)}


@pytest.mark.parametrize(
    ("device", "page", "rows", "heads", "splits", "name", "tile", "blocks"),
    [
        ("H200", 64, 1, 128, 1, "decode_sm90_bf16_d576x512", "64 queries x 64 keys", 8),  # two tiles for each sequence
        ("H200", 16, 1, 16, 3, "decode_sm90_bf16_d576x512", "64 queries x 64 keys", 12),
        ("H200", 48, 4, 48, 1, "decode_sm90_bf16_d576x512", "64 queries x 64 keys", 12),
        ("H200", 128, 1, 16, 0, "decode_sm90_bf16_d576x512", "64 queries x 64 keys", 128),  # fills the GPU
        ("H200", 8, 1, 128, 1, "decode_sm80_bf16_d576x512", "16 queries x 16 keys", 32),  # no boxes of 16 keys
        ("A100", 64, 1, 128, 1, "decode_sm80_bf16_d576x512", "16 queries x 16 keys", 32),
    ],
)
def test_values_that_are_a_view_of_the_keys(
    lib: c.CDLL, device: str, page: int, rows: int, heads: int, splits: int, name: str, tile: str, blocks: int
) -> None:
    options = mla_options(page) | {"num_splits": splits}
    plan = plan_lines(lib, device, "decode", mla(page, rows, heads), **options)
    assert plan["kernel"][0].startswith(f"{name},")
    assert plan["tile"] == [tile]
    assert plan["launch"][0].startswith(f"attention: {blocks} ")


@pytest.mark.parametrize(
    ("rows", "heads", "pairs"), [(1, 128, True), (1, 65, True), (2, 64, True), (1, 64, False), (3, 64, False), (4, 128, True)]
)
def test_pairs_of_thread_blocks_with_values_in_the_keys(lib: c.CDLL, rows: int, heads: int, pairs: bool) -> None:
    """Where the rows of a sequence fill an even number of tiles; not with packed rows, whose number only the device knows."""
    shared = "in pairs that share loads of keys"
    (launch, *_) = plan_lines(lib, "H200", "decode", mla(64, rows, heads), num_splits=1, **mla_options())["launch"]
    assert (shared in launch) == pairs
    _, cache, view = mla(64, rows, heads)
    packed = tensor(4 * rows, heads, 576), cache, view
    starts = tensor(5, dtype=abi.INT32)
    assert (
        shared not in plan_lines(lib, "H200", "decode", packed, cu_seqlens_q=starts, num_splits=1, **mla_options())["launch"][0]
    )


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"softcap": 3.0}, "softcap"),
        ({"alibi_slopes": tensor(128, dtype=abi.FLOAT32)}, "alibi_slopes"),
        ({"flags": abi.INVARIANT_ROWS}, "FLASH_FLAG_INVARIANT_ROWS"),
        ({"softmax_scale": -1.0, "flags": abi.SCALE}, "softmax_scale that is not positive"),
        ({"tree_mask": tensor(4, 1, dtype=abi.INT32)}, "tree_mask"),
        ({"shard_count": 2, "shard_keys": 16}, "shard_count"),
    ],
)
def test_what_the_kernel_for_views_of_the_keys_lacks(lib: c.CDLL, options: dict[str, Any], reason: str) -> None:
    """The wide kernel takes the call, and explain says why."""
    arguments = mla()
    lib.describe(*DEVICES["H200"])
    text = explain(lib, "decode", arguments, **mla_options(), **options)
    assert "decode_sm80_bf16_d576x512, backend sm80" in text
    assert f"{reason}: the kernel does not support it" in text


@pytest.mark.parametrize("device", ["H200", "A100", "L40S"])
@pytest.mark.parametrize("heads", [1, 16, 128])
@pytest.mark.parametrize("dtype", [abi.E4M3, abi.E5M2, abi.INT8])
@pytest.mark.parametrize("page", [1, 24, 64])
def test_codes_beside_rope_parts(lib: c.CDLL, page: int, dtype: int, heads: int, device: str) -> None:
    """512 channels of codes, which are the values, and 64 of the type of q."""
    places = 32768 // page
    latent, view = (tensor(places, page, 1, 512, dtype=dtype, address=ADDRESS) for _ in range(2))
    parts = {"k_rope_cache": tensor(places, page, 1, 64, address=4 * ADDRESS)}
    for scale in (tensor(1, dtype=abi.FLOAT32), tensor(places, page, 1, 4, dtype=abi.FLOAT32)):
        options = mla_options(page) | parts | {"k_scale": scale, "num_splits": 1}
        plan = plan_lines(lib, device, "decode", (tensor(4, 1, heads, 576), latent, view), **options)
        assert plan["kernel"][0].startswith("decode_sm80_bf16_d576x512,")
        assert (plan["instance"], plan["tile"]) == (["8-bit codes, general"], ["16 queries x 16 keys"])
        assert plan["launch"][0].startswith(f"attention: {4 * -(-heads // 16)} ")


@pytest.mark.parametrize("device", ["H200", "A100", "L40S"])
@pytest.mark.parametrize("dtype", [abi.E4M3, abi.BFLOAT16])
def test_rotated_rope_parts(lib: c.CDLL, dtype: int, device: str) -> None:
    """One kernel appends the latent part and the rotated rope part, the next one rotates queries, and attention does neither."""
    latent, view = (tensor(512, 64, 1, 512, dtype=dtype, address=ADDRESS) for _ in range(2))
    parts = {"k_rope_cache": tensor(512, 64, 1, 64, address=4 * ADDRESS)}
    parts |= {"k_new": tensor(4, 1, 1, 512, address=5 * ADDRESS), "k_rope_new": tensor(4, 1, 1, 64, address=6 * ADDRESS)}
    turned = dict.fromkeys(("rotary_cos", "rotary_sin"), tensor(8192, 32, dtype=abi.FLOAT32))
    arrays, options = (tensor(4, 1, 16, 576), latent, view), mla_options() | parts | turned
    plan = plan_lines(lib, device, "decode", arrays, **options)
    assert plan["kernel"][0].startswith("decode_sm80_bf16_d576x512,")
    steps = [line.partition(":")[0] for line in plan["launch"]]
    assert sorted(steps[:2]) == ["append", "append codes"]
    assert steps[2] == "attention"
    lib.describe(*DEVICES[device])
    assert "rotary embedding of 64 channels" in explain(lib, "decode", arrays, **options)


def test_codes_have_the_splits_of_their_values(lib: c.CDLL) -> None:
    scale = tensor(2, dtype=abi.FLOAT32)
    for flags in (0, abi.INVARIANT_ROWS):
        splits = set()
        for dtype in (abi.BFLOAT16, abi.E4M3):
            k, v = (tensor(4, 8192, 2, 512, dtype=dtype, address=n * ADDRESS) for n in (4, 64))
            options = {"k_scale": scale, "v_scale": scale, "flags": flags}
            splits.add(plan_lines(lib, "H200", "decode", (tensor(4, 1, 16, 512), k, v), **options)["splits"][0])
        assert len(splits) == 1


def test_values_apart_from_the_keys(lib: c.CDLL) -> None:
    q, cache, _ = mla()
    lib.describe(*DEVICES["H200"])
    text = explain(lib, "decode", (q, cache, tensor(512, 64, 1, 512, address=8 * ADDRESS)), **mla_options())
    assert "decode_sm80_bf16_d576x512, backend sm80" in text
    assert "v_cache: must be a view of the first channels of k_cache for it" in text


def test_launches_of_backward(lib: c.CDLL) -> None:
    """In the described library, step s of instance n has 1000 + 100 s + n threads."""
    assert launches(lib, attention("H200", 512, {}, "backward")) == [
        "softmax statistics: 256 thread blocks of 1000",
        "dk and dv: 512 thread blocks of 1100",
        "dq: 512 thread blocks of 1300",
    ]


@pytest.mark.parametrize("head_dim", [320, 512])
def test_long_sums_are_kept_in_the_workspace(lib: c.CDLL, head_dim: int) -> None:
    q, k = tensor(1, 1000, 16, head_dim), tensor(1, 32769, 16, head_dim)
    plan = plan_lines(lib, "A100", "forward", (q, k, k))
    assert (plan["instance"], plan["workspace"]) == (["general, long sums"], [f"{16 * 16 * 64 * (512 + 32) * 4} bytes"])
    q, k = tensor(1, 1000, 16, head_dim, dtype=abi.FLOAT32), tensor(1, 32769, 16, head_dim, dtype=abi.FLOAT32)
    plan = plan_lines(lib, "A100", "forward", (q, k, k))
    assert (plan["instance"], plan["workspace"]) == (["general, long sums"], [f"{16 * 32 * 32 * (512 + 32) * 4} bytes"])


@pytest.mark.parametrize("name", EXACT)
def test_sums_of_any_length(lib: c.CDLL, name: str) -> None:
    """Backward of these types adds up with rounding."""
    x = tensor(1, 1 << 20, 1, 512, dtype=EXACT[name][0])
    for operation in ("forward", "backward"):
        assert plan_lines(lib, "H200", operation, (x, x, x))["kernel"] == [f"{operation}_sm80_{name}_d512_small, backend sm80"]


@pytest.mark.parametrize(("dtype", "most"), [("f16", 32768), ("bf16", 131072)])
def test_long_sums_on_sm90(lib: c.CDLL, dtype: str, most: int) -> None:
    """Only with more keys than accumulators can add up. As many thread blocks at once as have memory."""
    memory = 16 * 132 * 64 * (512 + 32) * 4
    for keys, workspace in ((most, "0 bytes"), (most + 1, f"{memory} bytes")):
        q, k = tensor(1, 10000, 16, 512, dtype=NAMES[dtype]), tensor(1, keys, 16, 512, dtype=NAMES[dtype])
        plan = plan_lines(lib, "H200", "forward", (q, k, k))
        assert (plan["kernel"][0].partition(",")[0], plan["workspace"]) == (f"forward_sm90_{dtype}_d512", [workspace])


@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mask": MASK}, "mask: the kernel does not support it"),
        ({"bias": SCORES}, "bias: the kernel does not support it"),
        ({"alibi_slopes": SLOPES}, "alibi_slopes: the kernel does not support it"),
        ({"block_mask": BLOCKS}, "block_mask: the kernel does not support it"),
        ({"dropout_p": 0.5}, "dropout_p: the kernel does not support it"),
        ({"head_dim": 333}, "q: its address and its strides must be multiples of 16 bytes for it, and not negative"),
        ({"head_dim_v": 301}, "v: its address and its strides must be multiples of 16 bytes for it, and not negative"),
    ],
)
def test_what_sm90_lacks(lib: c.CDLL, options: dict[str, Any], reason: str, operation: str) -> None:
    """The sm80 kernel takes the call, and explain says why."""
    lib.describe(*DEVICES["H200"])
    given = {"head_dim": 320, **options}
    case = attention("H200", given.pop("head_dim"), {}, operation, **given)
    text = explain(lib, operation, case.arrays, **case.options)
    assert f"{operation}_sm80_bf16_d512, backend sm80" in text
    named = text.partition(f"{reason}\n")[2].partition("\nnot ")[0]  # the kernels with this reason
    assert f"{operation}_sm90_bf16_d512" in named


@pytest.mark.parametrize(("name", "most"), [("f16", 32768), ("bf16", 131072)])
def test_long_sums_of_backward_on_sm90(lib: c.CDLL, name: str, most: int) -> None:
    """Of query rows: several launches. Of keys: the sm80 kernel."""
    lib.describe(*DEVICES["H200"])
    q, k = (tensor(1, rows, heads, 512, dtype=NAMES[name]) for rows, heads in ((most, 4), (most, 2)))
    text = explain(lib, "backward", (q, k, k))
    assert f"backward_sm90_{name}_d512, backend sm90" in text
    assert " in a launch, each 2 times" in text
    q, k = tensor(1, 100, 4, 512, dtype=NAMES[name]), tensor(1, most + 1, 4, 512, dtype=NAMES[name])
    text = explain(lib, "backward", (q, k, k))
    assert f"backward_sm80_{name}_d512, backend sm80" in text
    assert f"k: the kernel adds up at most {most} keys without loss of precision ({most + 1})" in text


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (attention("H200", 513, {}), "head_dim: must be at most 512 for this kernel (513)"),
        *[
            (attention("H200", 513, {}, operation, dtype=dtype), "head_dim: must be at most 512 for this kernel (513)")
            for operation in ("forward", "backward")
            for dtype in (abi.FLOAT32, abi.FLOAT64)
        ],
        (decode("H200", {}, (577, 512)), "head_dim: must be at most 576 for this kernel (577)"),
        (decode("H200", {}, (576, 513)), "head_dim_v: must be at most 512 for this kernel (513)"),
        (
            decode("H200", {}, k_scale=tensor(4, 8192, 2, 64, dtype=abi.FLOAT32)),
            "k_scale of groups of channels that are not multiples of 16: the kernel does not support it",
        ),
    ],
)
def test_refusals(lib: c.CDLL, case: Case, reason: str) -> None:
    lib.describe(*DEVICES[case.device])
    assert reason in explain(lib, case.operation, case.arrays, **case.options)


@pytest.mark.parametrize(("name", "terms"), [("f16", 32768), ("bf16", 131072)])
@pytest.mark.parametrize(("device", "factor"), [("H200", 4), ("L40S", 2)])
def test_backward_refuses_long_sums(lib: c.CDLL, device: str, factor: int, name: str, terms: int) -> None:
    """Of keys, and of query rows of the heads that share a key head."""
    lib.describe(*DEVICES[device])
    dtype, most = NAMES[name], terms * factor
    q, k = tensor(1, 100, 4, 512, dtype=dtype), tensor(1, most + 1, 4, 512, dtype=dtype)
    assert f"k: the kernel adds up at most {most} keys" in explain(lib, "backward", (q, k, k))
    q, k = tensor(1, most // 4 + 1, 4, 512, dtype=dtype), tensor(1, 100, 1, 512, dtype=dtype)
    text = f"q: the kernel adds up at most {most} rows of the heads that share a key head"
    assert text in explain(lib, "backward", (q, k, k))
