"""Plans of decode for described GPUs: the instance that runs, its tiles, splits and launches."""

from __future__ import annotations

import ctypes as c
from typing import Any

import abi
import pytest
from described import ADDRESS, DEVICES, tensor
from described_plans import Case, check_instance, instance_cases, kernel, launches, plan_lines


def decode(device: str, expected: dict[str, str], rows: int = 1, **options: Any) -> Case:
    """Four sequences, 32 query heads over 8 key heads, 8192 keys."""
    cache = tensor(4, 8192, 8, 128)
    return Case(device, "decode", (tensor(4, rows, 32, 128), cache, cache), options, expected)


CHUNKS = "sequences of at least 64 query rows: prefill_sm90_bf16_d128, tile 128 queries x 128 keys, instance {}"
OF_SM80 = {"kernel": b"decode_sm80_bf16_d128"}  # also for many rows


def codes(device: str, expected: dict[str, str], rows: int = 1, **options: Any) -> Case:
    """The same with caches of 8 bits."""
    k, v = (tensor(4, 8192, 8, 128, dtype=abi.INT8, address=n * ADDRESS) for n in (4, 8))
    scales = dict.fromkeys(("k_scale", "v_scale"), tensor(8, dtype=abi.FLOAT32))
    return Case(device, "decode", (tensor(4, rows, 32, 128), k, v), scales | options, expected)


def decode_cases_of_codes(large: str, small: str) -> list[Case]:
    """Tiles are those of a cache of 16 bits, splits those of one with scales."""
    few, two = (f"8-bit codes, few rows, {text}" for text in ("each warp its own keys", "two key heads"))
    own, shared = (f"8-bit codes, {text}" for text in ("each warp its own keys", "warps share keys"))
    news = {name: tensor(4, 1, 8, 128, address=n * ADDRESS) for n, name in ((2, "k_new"), (3, "v_new"))}
    two_rows = {name: tensor(4, 2, 8, 128, address=n * ADDRESS) for n, name in ((2, "k_new"), (3, "v_new"))}
    turned = dict.fromkeys(("rotary_cos", "rotary_sin"), tensor(8192, 64, dtype=abi.FLOAT32))
    paged = (tensor(32, 1, 32, 128), *(tensor(32 * 512, 16, 8, 128, dtype=abi.E4M3, address=n * ADDRESS) for n in (4, 8)))
    pages = {"block_table": tensor(32, 512, dtype=abi.INT32), "cache_seqlens": tensor(32, dtype=abi.INT32)}
    many, apart = (tensor(32, 1, 128, 128), *paged[1:]), "append codes: 128 "
    paged_news = {name: tensor(32, 1, 8, 128, address=n * ADDRESS) for n, name in ((2, "k_new"), (3, "v_new"))}
    return [
        codes("H200", kernel(large, few, "16x64", splits="16 ranges", pipeline="3 stages")),
        codes("H200", kernel(large, few, "16x64", splits="16 ranges"), rows=2),
        codes("H200", kernel(large, own, "16x64", splits="12 ranges", pipeline="3 stages"), rows=3),
        codes("H200", kernel(large, few + ", appends", "16x64", launch="attention: 512 "), **news),
        codes("H200", kernel(large, few + ", appends", "16x64", launch="attention: 512 "), **news, **turned),
        codes("H200", kernel(large, few, "16x64", launch="append codes: 32 "), **two_rows, **turned),
        codes("H200", kernel(large, shared, "64x64", pipeline="3 stages"), rows=5),
        codes("A100", kernel(small, few, "16x64", splits="10 ranges", pipeline="3 stages")),
        Case("H200", "decode", paged, pages, kernel(large, two, "16x32", splits="2 ranges")),
        # 16 rows of a key head: the instance for two key heads cannot append.
        Case("H200", "decode", many, pages, kernel(large, "8-bit codes, two key heads", "16x32")),
        Case("H200", "decode", many, pages | paged_news, kernel(large, "8-bit codes, two key heads", "16x32", launch=apart)),
    ]


def ragged_cases() -> list[Case]:
    """Rows of any lengths: thread blocks for all full tiles of 64 packed rows, and one more for each sequence. On Hopper another
    kernel takes many rows.
    """
    caches = (tensor(4, 8192, 8, 128),) * 2
    cu, ints = tensor(5, dtype=abi.INT32), tensor(4, 5, dtype=abi.INT32, address=2 * ADDRESS)
    rows, new = tensor(1000, 32, 128), tensor(1000, 8, 128, address=3 * ADDRESS)
    news = {"k_new": new, "v_new": tensor(1000, 8, 128, address=4 * ADDRESS)}
    ragged = kernel("decode_sm80_bf16_d128", "rows of any lengths", "64x64")
    one = {**ragged, "splits": "1 (keys", "launch": "attention: 528 "}
    long_chunks = {"long chunks": CHUNKS.format("cache")}
    # At most 63 rows of 4 heads: 4 tiles for each sequence and key head.
    many = kernel("decode_sm90_bf16_d128", "64 rows", "64x64", pipeline="3 stages")
    beside = {**many, **long_chunks, "splits": "8 ranges", "launch": "attention: 1024 "}
    # Hardly more rows than sequences: all are those of the decode kernels.
    cu_of_many, entries = tensor(901, dtype=abi.INT32), tensor(900, dtype=abi.INT32)
    few_each = {**ragged, "splits": "1 (keys", "launch": "attention: 7696 "}
    all_long = {**long_chunks, "kernel": "decode_sm90_bf16_d128, backend sm90", "launch": "tile order: 1 "}
    dense, tree = tensor(4, 5, 32, 128), tensor(20, 1, dtype=abi.INT32)
    return [
        Case("H200", "decode", (rows, *caches), {"cu_seqlens_q": cu, "num_splits": 1, **OF_SM80}, one),
        Case("H200", "decode", (rows, *caches), {"cu_seqlens_q": cu}, beside),
        Case("H200", "decode", (rows, *caches), {"cu_seqlens_q": cu_of_many, "cache_batch_idx": entries}, few_each),
        Case("H200", "decode", (tensor(4, 80, 32, 128), *caches), {}, all_long),
        Case("H200", "decode", (rows, *caches), {"cu_seqlens_q": cu, **news}, {**many, "launch": "append: 4000 "}),
        Case("H200", "decode", (tensor(4, 32, 128), *caches), {"cu_seqlens_q": cu}, {**ragged, "splits": "8 ranges"}),
        *[
            Case("H200", "decode", arrays, options | OF_SM80, {**ragged, "launch": launch})
            for arrays, options, launch in (
                ((dense, *caches), {"cu_seqlens_new": cu, **news}, "append: 4000 "),
                ((dense, *caches), {"q_positions": ints, "num_splits": 1}, "attention: 32 "),
                ((dense, *caches), {"tree_mask": tree, "num_splits": 1}, "attention: 32 "),
            )
        ],
    ]


def many_row_cases() -> list[Case]:
    """The kernel of sm90 for 17 rows of a key head or more: two thread blocks of 64 rows on a multiprocessor, or one of 128."""
    cache, dense = (tensor(4, 8192, 8, 128),) * 2, tensor(4, 5, 32, 128)
    cu, tree, positions = tensor(5, dtype=abi.INT32), tensor(20, 1, dtype=abi.INT32), tensor(4, 5, dtype=abi.INT32)
    slopes, scale = tensor(32, dtype=abi.FLOAT32), tensor(8, dtype=abi.FLOAT32)
    news = {name: tensor(4, 5, 8, 128, address=(n + 2) * ADDRESS) for n, name in enumerate(("k_new", "v_new"))}
    small, odd = (tensor(1024 * 8, page, 8, 128) for page in (32, 24))
    pages = {"block_table": tensor(4, 256, dtype=abi.INT32), "cache_seqlens": tensor(4, dtype=abi.INT32)}
    one = kernel("decode_sm90_bf16_d128", "64 rows", "64x64", pipeline="3 stages", splits="8 ranges")
    two = kernel("decode_sm90_bf16_d128", "128 rows", "128x64", pipeline="6 stages")
    sm80 = {"kernel": "decode_sm80_bf16_d128, backend sm80"}
    trees = {"cu_seqlens_q": cu, "tree_mask": tree, "q_positions": tensor(20, dtype=abi.INT32)}
    return [
        decode("H200", one, rows=5),
        decode("H200", {**one, "launch": "attention: 256 "}, rows=16, softcap=5.0, alibi_slopes=slopes),
        decode("H200", {**one, "launch": "append: 80 "}, rows=5, **news),
        decode("H200", {**two, "splits": "4 ranges", "launch": "attention: 128 "}, rows=17),
        decode("H200", {**two, "launch": "attention: 64 "}, rows=64, tree_mask=tensor(256, 2, dtype=abi.INT32), num_splits=1),
        # As many splits as for one tile of each sequence; thread blocks for one tile more, which may be needed.
        Case("H200", "decode", (tensor(64, 32, 128), *cache), {"cu_seqlens_q": cu, "causal": True, "num_splits": 1},
             {**one, "splits": "1 (keys", "launch": "attention: 64 "}),
        Case("H200", "decode", (tensor(20, 32, 128), *cache), trees, {**one, "launch": "attention: 320 "}),
        Case("H200", "decode", (dense, small, small), pages, one),
        Case("H200", "decode", (dense, odd, odd), pages, sm80),
        # Else a sequence would have other bits beside longer ones.
        Case("H200", "decode", (tensor(20, 32, 128), *cache), trees | {"split_size": 256}, sm80),
        decode("H200", one | {"splits": "32 ranges"}, rows=5, split_size=256),
        decode("H200", sm80, rows=4),
        decode("H200", one, backend=b"sm90"),  # few rows, but it is requested
        decode("H200", sm80, rows=5, q_positions=positions, window_left=9, flags=abi.WINDOW),
        decode("H200", sm80, rows=5, q_positions=positions, alibi_slopes=slopes),
        decode("H200", sm80, rows=5, k_scale=scale),
        decode("H200", sm80, rows=5, flags=abi.INVARIANT_ROWS),
        decode("A100", {"kernel": "decode_sm80_bf16_d128_small, backend sm80"}, rows=5),
    ]  # fmt: skip


def shared_key_cases() -> list[Case]:
    """64 sequences in one group: a tile has the rows of 16 of them, or of 32 where twice as many thread blocks would not run at
    once, and a thread block one of four classes of keys."""
    large = "decode_sm80_bf16_d128"
    shared = {"shared_groups": tensor(2, dtype=abi.INT32), "shared_lens": tensor(1, dtype=abi.INT32)}
    pages = {"block_table": tensor(64, 512, dtype=abi.INT32), "cache_seqlens": tensor(64, dtype=abi.INT32), **shared}
    arrays = (tensor(64, 1, 32, 128), *[tensor(64 * 512, 16, 8, 128)] * 2)
    small_pages = tensor(64 * 512, 8, 8, 128)
    after, blocks = kernel(large, "each warp its own keys, after shared ones", "16x64", pipeline="2 stages"), "thread blocks"
    without = {"alibi_slopes": tensor(64, 32, dtype=abi.FLOAT32)}
    new = {"k_new": tensor(64, 1, 8, 128, address=2 * ADDRESS), "v_new": tensor(64, 1, 8, 128, address=3 * ADDRESS)}
    return [
        Case("H200", "decode", arrays, pages, {**after, "splits": "1 (keys", "launch": f"shared keys: 128 {blocks} of 256 "}),
        Case("H200", "decode", arrays, {**pages, "num_splits": 3}, {**after, "launch": f"shared keys: 192 {blocks} of 384 "}),
        Case("H200", "decode", arrays, {**pages, **OF_SM80}, {**after, "launch": f"shared keys: 128 {blocks} of 14"}),
        Case("H200", "decode", (arrays[0], *[small_pages] * 2), pages, {**after, "launch": f"shared keys: 128 {blocks} of 14"}),
        Case("H200", "decode", arrays, {**pages, **new}, {**after, "launch": "append: 256 "}),
        Case("H200", "decode", arrays, {**pages, "flags": abi.INVARIANT_ROWS}, kernel(large, "invariant rows", "16x64")),
        Case("H200", "decode", arrays, {**pages, **without}, kernel(large, "each warp its own keys", "16x64")),
        Case("H200", "decode", arrays, {**pages, "split_size": 128}, kernel(large, "each warp its own keys", "16x64")),
    ]


def decode_cases() -> list[Case]:
    large, small, new = "decode_sm80_bf16_d128", "decode_sm80_bf16_d128_small", tensor(4, 1, 8, 128, address=2 * ADDRESS)
    news = {"k_new": new, "v_new": tensor(4, 1, 8, 128, address=3 * ADDRESS)}
    several = {name: tensor(4, 5, 8, 128, address=(n + 2) * ADDRESS) for n, name in enumerate(news)}
    pages = {"block_table": tensor(32, 512, dtype=abi.INT32), "cache_seqlens": tensor(32, dtype=abi.INT32)}
    paged = (tensor(32, 1, 32, 128), *[tensor(32 * 512, 16, 8, 128)] * 2)
    return [
        decode("H200", kernel(large, "each warp its own keys", "16x64", splits="8 ranges", pipeline="3 stages")),
        decode("H200", kernel(large, "each warp its own keys, appends", "16x64"), **news),
        decode("H200", kernel(large, "warps share keys", "64x64"), rows=5, **OF_SM80),
        decode("H200", kernel(large, "warps share keys", "64x64", launch="append: 80 "), rows=5, **several, **OF_SM80),
        decode("H200", kernel(large, "each warp its own keys", "16x64", splits="1 (keys"), num_splits=1),
        decode("A100", kernel(small, "two key heads", "16x32", splits="13 ranges")),
        *decode_cases_of_codes(large, small),
        Case("H200", "decode", paged, pages, kernel(large, "two key heads", "16x32", splits="2 ranges")),
        *ragged_cases(),
        *many_row_cases(),
        *general_cases(),
        *invariant_cases(),
    ]


def general_cases() -> list[Case]:
    """Scales of elements have the plans of codes; rare options of the cache."""
    large, scale = "decode_sm80_bf16_d128", tensor(8, dtype=abi.FLOAT32)
    groups, rope = tensor(4, 8192, 8, 4, dtype=abi.FLOAT32), tensor(4, 8192, 8, 32, address=12 * ADDRESS)
    cu, lengths = tensor(5, dtype=abi.INT32), tensor(4, dtype=abi.INT32)
    general = kernel(large, "general", "64x64", pipeline="2 stages")
    half = tensor(4, 8192, 8, 128)
    part = (tensor(4, 1, 32, 128), tensor(4, 8192, 8, 96), half)
    eight = [tensor(4, 8192, 8, 128, dtype=abi.E4M3, address=n * ADDRESS) for n in (4, 8)]
    packed = (tensor(1000, 32, 128), *eight)
    new = {"k_new": tensor(4, 1, 8, 128, address=2 * ADDRESS)}
    shared = {"shared_groups": cu, "shared_lens": lengths}
    own = kernel(large, "each warp its own keys", "16x64")
    copied, converted = ({"long chunks": CHUNKS.format(f"cache, {x}")} for x in ("copied", "codes"))
    odd_pages = (tensor(4 * 342, 24, 8, 128),) * 2
    table = {"cu_seqlens_q": cu, "block_table": tensor(4, 342, dtype=abi.INT32), "cache_seqlens": lengths}
    return [
        decode("H200", kernel(large, "scales, each warp its own keys", "16x64", splits="16 ranges"), k_scale=scale),
        decode("H200", kernel(large, "scales, warps share keys", "64x64"), rows=5, v_scale=scale),
        decode("A100", kernel(large + "_small", "scales, each warp its own keys", "16x64", splits="10 ranges"), k_scale=scale),
        decode("H200", kernel(large, "each warp its own keys", "16x64", launch="append: 16 "), **new),  # v_cache is a view
        decode("H200", general, shard_count=2, shard_keys=16, cache_seqlens=lengths),
        decode("H200", own, **shared),  # groups of one sequence
        *shared_key_cases(),
        Case("H200", "decode", part, {"k_rope_cache": rope}, general),
        Case(
            "H200",
            "decode",
            packed,
            {"cu_seqlens_q": cu},
            {**kernel(large, "8-bit codes, rows of any lengths", "64x64"), **converted},
        ),
        Case("H200", "decode", (packed[0], *odd_pages), table, {**kernel(large, "rows of any lengths", "64x64"), **copied}),
        Case(
            "H200",
            "decode",
            (packed[0], half, half),
            {"cu_seqlens_q": cu, "k_scale": scale},
            {**general, **copied},
        ),
        codes("H200", kernel(large, "8-bit codes, general", "64x64", pipeline="2 stages"), k_scale=groups, v_scale=groups),
    ]


def invariant_cases() -> list[Case]:
    """Of decode and prefill, which have the same tiles of keys; and what only the general instance supports."""
    large, scale, flags = "decode_sm80_bf16_d128", tensor(8, dtype=abi.FLOAT32), {"flags": abi.INVARIANT_ROWS}
    rows, caches = tensor(1000, 32, 128), (tensor(4, 8192, 8, 128),) * 2
    cu, long_cache = tensor(5, dtype=abi.INT32), tensor(1, 300_000, 8, 128)
    any_splits = kernel(large, "invariant rows", "16x64")
    own = {**any_splits, "splits": "16 ranges", "pipeline": "3 stages"}
    segments = {"rows": "invariant: segments of 512 keys, from 16384 on longer ones, version 2"}
    short = {"rows": "invariant: segments of 256 keys, version 2"}
    prefill = CHUNKS.replace("64", "32", 1).format("cache, invariant rows")
    softcap = {"flags": abi.INVARIANT_ROWS, "softcap": 5.0}
    return [
        decode("H200", {**own, **segments, "launch": "attention: 256 "}, **flags),
        decode("H200", {**any_splits, "splits": "32 ranges", **short}, split_size=256, **flags),
        decode("A100", kernel(f"{large}_small", "invariant rows", "16x64", splits="16 ranges"), **flags),
        # Many short sequences: a thread block has all segments of its rows.
        Case("H200", "decode", (tensor(64, 1, 32, 128), *[tensor(64, 1024, 8, 128)] * 2), flags,
             {**any_splits, **segments, "splits": "1 (keys", "launch": "attention: 512 "}),
        # 32 segments of 512 keys, 16 of 1024, 2048, 4096 and 8192, then 3 of 16384.
        Case("H200", "decode", (tensor(1, 1, 32, 128), long_cache, long_cache), flags,
             {**any_splits, "splits": "99 ranges"}),
        Case("H200", "decode", (rows, *caches), {"cu_seqlens_q": cu, **flags}, {**own, "long chunks": prefill}),
        # Eight thread blocks for each sequence and key head, which share its segments.
        Case("H200", "decode", (rows, *caches), {"cu_seqlens_q": cu, **flags}, {**own, "launch": "attention: 256 "}),
        # Fewer rows than pay without the flag.
        Case("H200", "decode", (tensor(1, 80, 32, 128), *[tensor(1, 8192, 8, 128)] * 2), flags,
             {**any_splits, "long chunks": prefill}),
        Case("H200", "decode", (rows, *caches), {"cu_seqlens_q": cu, **softcap},
             {**any_splits, "splits": "1 (keys", "launch": "attention: 2032 "}),
        decode("H200", kernel(large, "general", "16x64", splits="8 ranges"), k_scale=scale, **flags),
        decode("H200", kernel(large, "general", "16x64", splits="8 ranges"), shard_count=2, shard_keys=16,
               cache_seqlens=tensor(4, dtype=abi.INT32), **flags),
    ]  # fmt: skip


@instance_cases(decode_cases())
def test_the_instance_that_runs(lib: c.CDLL, case: Case) -> None:
    check_instance(lib, case)


def test_launches_of_decode(lib: c.CDLL) -> None:
    assert launches(lib, decode("H200", {}, num_splits=3)) == [
        "attention: 96 thread blocks of 1101",
        "combine splits: 128 thread blocks of 1201",
    ]
    # 640 rows. With few splits each of the four warps of a thread block computes one.
    for splits, options, blocks in ((8, {}, "160 thread blocks of 1201"), (9, {}, "640 thread blocks of 1201"),
                                    (8, OF_SM80, "640 thread blocks of 1200")):  # fmt: skip
        assert launches(lib, decode("H200", {}, rows=5, num_splits=splits, **options))[1] == f"combine splits: {blocks}"
    rotary = {name: tensor(8192, 64, address=(n + 4) * ADDRESS) for n, name in enumerate(("rotary_cos", "rotary_sin"))}
    new = {name: tensor(4, 5, 8, 128, address=(n + 2) * ADDRESS) for n, name in enumerate(("k_new", "v_new"))}
    # 160 new rows and 640 query rows of 64 threads each, two a thread block.
    for instance, options in enumerate((OF_SM80, {})):
        assert launches(lib, decode("H200", {}, rows=5, num_splits=1, **rotary, **new, **options)) == [
            f"append: 400 thread blocks of {1000 + instance}",
            f"attention: 32 thread blocks of {1100 + instance}",
        ]


# Ranges of at most 32768 keys per accumulator. With up to 16 rows each of four warps adds up a quarter of a range.
@pytest.mark.parametrize(
    ("rows", "dtype", "options", "splits"),
    [
        (1, abi.FLOAT16, {"num_splits": 1}, 8),
        (20, abi.FLOAT16, {"num_splits": 1}, 32),
        (20, abi.FLOAT16, {"num_splits": 40}, 40),
        (20, abi.FLOAT16, {"split_size": 1 << 20}, 32),
        (20, abi.FLOAT16, {"split_size": 128}, 8192),
        (1, abi.FLOAT16, {"split_size": 1 << 17}, 8),
        (20, abi.BFLOAT16, {"num_splits": 1}, 32),
        (1, abi.BFLOAT16, {"split_size": 1 << 20}, 8),
        (20, abi.FLOAT32, {"num_splits": 1}, 32),
    ],
)
def test_ranges_of_splits_are_bounded(lib: c.CDLL, rows: int, dtype: int, options: dict[str, Any], splits: int) -> None:
    cache = tensor(1, 1 << 20, 1, 128, dtype=dtype)
    plan = plan_lines(lib, "H200", "decode", (tensor(1, rows, 1, 128, dtype=dtype), cache, cache), **options)
    assert plan["splits"][0].startswith(f"{splits} ")


def refusal(lib: c.CDLL, arrays: tuple[abi.Tensor, ...], **fields: Any) -> str:
    lib.describe(*DEVICES["H200"])
    text, needed = c.create_string_buffer(1 << 16), c.c_size_t()
    arguments = (*map(c.pointer, arrays), abi.options(abi.DecodeOptions, **fields), text, len(text), c.byref(needed))
    assert lib.flash_attention_decode_explain(*arguments) == abi.OK
    return text.value.decode()


def test_what_codes_lack_is_refused_by_name(lib: c.CDLL) -> None:
    k, v = (tensor(4, 8192, 8, 128, dtype=abi.INT8, address=n * ADDRESS) for n in (4, 8))
    q, scale = tensor(4, 1, 32, 128), tensor(8, dtype=abi.FLOAT32)
    groups = tensor(4, 8192, 8, 16, dtype=abi.FLOAT32)
    for arrays, scales, wanted in (
        ((tensor(4, 1, 32, 128, dtype=abi.FLOAT32), k, v), (scale, scale), "k_cache of 8 bits with float32 q"),
        ((q, k, v), (groups, scale), "k_scale of groups of channels that are not multiples of 16"),
        ((q, k, v), (scale, groups), "v_scale of groups of channels that are not multiples of 16"),
    ):
        assert wanted in refusal(lib, arrays, k_scale=scales[0], v_scale=scales[1])
    for of_rope, channels, wanted in (
        (24, 128, "k_rope_cache beside a k_cache whose channels are not a multiple of 16"),
        (160, 320, "k_rope_cache with so many channels beside a k_cache of 8 bits"),
    ):
        k = tensor(4, 8192, 8, channels - of_rope, dtype=abi.INT8, address=4 * ADDRESS)
        rope = tensor(4, 8192, 8, of_rope, address=12 * ADDRESS)
        arrays = (tensor(4, 1, 32, channels), k, v)
        assert wanted in refusal(lib, arrays, k_scale=scale, v_scale=scale, k_rope_cache=rope)
