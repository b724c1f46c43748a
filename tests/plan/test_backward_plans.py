"""Plans of backward for described GPUs: the instance that runs, its tiles, launches and workspace."""

from __future__ import annotations

import ctypes as c
from typing import Any

import abi
import pytest
from described import ADDRESS, DEVICES, build, compiled_sources, explain, lines_of, load, tensor
from described_plans import (
    BLOCKS,
    DSCORES,
    LISTS,
    MASK,
    SCORES,
    SLOPES,
    USED,
    Case,
    attention,
    check_instance,
    instance_cases,
    kernel,
    launches,
    plan_lines,
)
from made_once import made_once

PACKED, CU = (tensor(1000, 16, 64),) * 3, dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), tensor(3, dtype=abi.INT32))


def backward_cases() -> list[Case]:
    dynamic, deterministic = {"schedule": "dynamic, "}, {"flags": abi.DETERMINISTIC}
    bias = {"bias": SCORES}
    options = (
        {"softcap": 30.0},
        {"alibi_slopes": SLOPES},
        {"dropout_p": 0.5, "seqused_q": USED},
        {"mask": MASK, "seqused_q": USED},
    )
    blocks = ({"block_mask": BLOCKS}, {"block_mask": BLOCKS, "seqused_k": USED})
    return [
        attention("H200", 64, kernel("backward_sm90_bf16_d64", "plain", "64x128", **dynamic), "backward"),
        *(
            attention("H200", 64, kernel("backward_sm90_bf16_d64", "block mask", "64x128"), "backward", **option)
            for option in blocks
        ),
        *(
            attention("H200", head_dim, kernel(f"backward_sm90_bf16_d{head_dim}", "general", "64x128"), "backward", **option)
            for head_dim in (64, 128)
            for option in (*options, bias, bias | deterministic)
        ),
        attention("H200", 64, kernel("backward_sm90_bf16_d64", "plain", "64x128", **dynamic), "backward", **deterministic),
        attention(
            "H200",
            64,
            kernel("backward_sm90_bf16_d64", "block mask", "64x128", **dynamic),
            "backward",
            block_mask=BLOCKS,
            **deterministic,
        ),
        attention(
            "H200",
            64,
            kernel("backward_sm80_bf16_d64", "plain", "128x128"),
            "backward",
            block_lists=LISTS,
            **deterministic,
        ),
        attention(
            "H200",
            128,
            kernel("backward_sm80_f16_d128", "plain", "64x128"),
            "backward",
            dtype=abi.FLOAT16,
            block_mask=BLOCKS,
            **deterministic,
        ),
        attention("H200", 64, kernel("backward_sm90_bf16_d64", "variable lengths", "64x128"), "backward", seqused_q=USED),
        attention("H200", 64, kernel("backward_sm90_bf16_d64", "variable lengths", "64x128"), "backward", seqused_k=USED),
        Case("H200", "backward", PACKED, CU, kernel("backward_sm90_bf16_d64", "variable lengths", "64x128")),
        *(
            attention(
                "H200",
                128,
                kernel("backward_sm90_bf16_d128", "general", "64x128", **dynamic),
                "backward",
                **option,
                **deterministic,
            )
            for option in ({"softcap": 30.0}, {"mask": MASK, "seqused_q": USED})
        ),
        Case(
            "H200",
            "backward",
            PACKED,
            CU | deterministic,
            kernel("backward_sm90_bf16_d64", "variable lengths", "64x128", **dynamic),
        ),
        attention("A100", 64, kernel("backward_sm80_bf16_d64", "plain", "128x128"), "backward", **deterministic),
        attention("H200", 192, kernel("backward_sm90_bf16_d192", "plain", "64x64", **dynamic), "backward", head_dim_v=128),
        attention("H200", 256, kernel("backward_sm90_bf16_d256", "plain", "64x64", **dynamic), "backward"),
        attention("H200", 256, kernel("backward_sm90_bf16_d256", "variable lengths", "64x64"), "backward", seqused_k=USED),
        *(
            attention("H200", 256, kernel("backward_sm90_bf16_d256", "block mask", "64x64"), "backward", **option)
            for option in blocks
        ),
        *(
            attention("H200", head_dim, kernel(f"backward_sm90_bf16_d{head_dim}", "general", "64x64"), "backward", **option)
            for head_dim in (192, 256)
            for option in (*options, bias, options[0] | deterministic)
        ),
        attention("A100", 128, kernel("backward_sm80_bf16_d128_small", "plain", "32x64"), "backward"),
    ]


@instance_cases(backward_cases())
def test_the_instance_that_runs(lib: c.CDLL, case: Case) -> None:
    check_instance(lib, case)


def test_launches_of_backward(lib: c.CDLL) -> None:
    bias = {"bias": SCORES, "dbias": DSCORES}
    sink = {"learnable_sink": SLOPES, "dsink": tensor(16, dtype=abi.FLOAT32, address=2 * ADDRESS)}
    assert launches(lib, attention("H200", 128, {}, "backward", **bias, **sink)) == [
        "softmax statistics: 256 thread blocks of 1003",
        "dk and dv: 132 thread blocks of 1103",
        "dq from its accumulator: 256 thread blocks of 1203",
        "dsink: 16 thread blocks of 1403",
        f"dbias: {16 * 16 * 16} thread blocks of 1501",
    ]
    assert launches(lib, attention("H200", 128, {}, "backward", block_mask=BLOCKS)) == [
        "softmax statistics: 256 thread blocks of 1002",
        "dk and dv: 132 thread blocks of 1102",
        "dq from its accumulator: 256 thread blocks of 1202",
    ]
    assert launches(lib, attention("H200", 128, {}, "backward", backend=b"sm80", **bias, **sink)) == [
        "softmax statistics: 256 thread blocks of 1001",
        "dk and dv: 256 thread blocks of 1101",
        "dq from its accumulator: 256 thread blocks of 1201",
        "dsink: 16 thread blocks of 1401",
        f"dbias: {16 * 16 * 16} thread blocks of 1501",
    ]
    assert launches(lib, attention("H200", 128, {}, "backward", flags=abi.DETERMINISTIC)) == [
        "softmax statistics: 256 thread blocks of 1000",
        "order of additions to dq: 256 thread blocks of 1600",
        "dk and dv: 132 thread blocks of 1100",
        "dq from its accumulator: 256 thread blocks of 1200",
    ]
    case = attention("H200", 128, {}, "backward", flags=abi.DETERMINISTIC, backend=b"sm80")
    assert launches(lib, case)[2:] == ["dq: 256 thread blocks of 1300"]
    lines = lines_of(explain(lib, "backward", case.arrays, **case.options))
    assert lines["tile"] == ["64 queries x 128 keys", "dq: 128 queries x 64 keys"]


def bias_problem(head_dim: int, backend: bytes | None = None) -> Case:
    given = {} if backend is None else {"backend": backend}
    return attention("H200", head_dim, {}, "backward", bias=SCORES, dbias=DSCORES, **given)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("backend", [None, b"sm90"])
def test_a_kernel_of_sm80_computes_the_gradient_of_the_bias(lib: c.CDLL, head_dim: int, backend: bytes | None) -> None:
    case = bias_problem(head_dim, backend)
    plan = plan_lines(lib, case.device, case.operation, case.arrays, **case.options)
    assert plan["kernel"][0].startswith(f"backward_sm90_bf16_d{head_dim},")
    blocks = 16 * 16 * (16 if head_dim <= 128 else 32)  # tiles of 64 rows and 64 or 32 keys
    assert plan["launch"][-1].startswith(f"dbias: {blocks} thread blocks of 1501 threads")
    assert plan["launch"][-1].endswith(f", of backward_sm80_bf16_d{head_dim}")


def test_a_build_without_sm80_refuses_the_gradient_of_the_bias(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> None:
    objects = compiled_sources(request, tmp_path_factory)
    lib = load(made_once(request, tmp_path_factory, "described_sm90", lambda folder: build(folder, objects, "backward_sm90")))
    without = attention("H200", 128, {}, "backward", bias=SCORES)
    assert plan_lines(lib, *without[:3], **without.options)["kernel"][0].startswith("backward_sm90_bf16_d128,")
    case = bias_problem(128)
    text = "\n".join(plan_lines(lib, *case[:3], **case.options)["because"])
    assert (
        "dbias: a backward kernel of sm80 computes it, and this build has none for the problem (bfloat16, head_dim 128)" in text
    )


@pytest.mark.parametrize(("heads", "blocks"), [(8, (256, 128)), (16, (512, 256)), (17, (136, 136))])
def test_thread_blocks_that_share_units(lib: c.CDLL, heads: int, blocks: tuple[int, int]) -> None:
    """Up to 132 units of 128 rows: four thread blocks for each in the first step, two in the last one; 136 units: one."""
    rows = (tensor(1, 1024, heads, 128),) * 3
    first, _, last = launches(lib, Case("H200", "backward", rows, {}, {}))
    assert first.startswith(f"softmax statistics: {blocks[0]} thread blocks")
    assert last.startswith(f"dq from its accumulator: {blocks[1]} thread blocks")


def gradient_rows(queries: int, dtype: int, group: int = 1) -> tuple[abi.Tensor, ...]:
    q, k = tensor(1, queries, 16 * group, 128, dtype=dtype), tensor(1, 1000, 16, 128, dtype=dtype)
    return q, k, k


# A sum over more than 32768 rows (bf16: 131072) of all heads that share keys is divided: over heads first, then over rows.
@pytest.mark.parametrize("device", ["H200", "A100"])
@pytest.mark.parametrize(
    ("queries", "group", "dtype", "options", "launches"),
    [
        (32768, 1, abi.FLOAT16, {}, 1),
        (32769, 1, abi.FLOAT16, {}, 2),
        (16384, 3, abi.FLOAT16, {}, 2),
        (16385, 3, abi.FLOAT16, {}, 3),
        (1 << 18, 2, abi.FLOAT16, {}, 16),
        (131072, 1, abi.BFLOAT16, {}, 1),
        (16384, 8, abi.BFLOAT16, {}, 1),
        (1 << 20, 1, abi.BFLOAT16, {}, 8),
        (1 << 20, 1, abi.FLOAT32, {}, 1),
        (1 << 20, 1, abi.FLOAT16, {"flags": abi.WINDOW, "window_left": 30000, "window_right": 0}, 1),
    ],
)
def test_long_sums_of_gradients(
    lib: c.CDLL, device: str, queries: int, group: int, dtype: int, options: dict[str, Any], launches: int
) -> None:
    plan = plan_lines(lib, device, "backward", gradient_rows(queries, dtype, group), **options)
    line = next(line for line in plan["launch"] if line.startswith("dk and dv"))
    assert line.endswith(f", each {launches} times" if launches > 1 else "shared memory each")
    tile_k = int(plan["tile"][0].split()[3])
    blocks = 16 * -(-1000 // tile_k)
    rows, head_dim = -(-queries // 128) * 128 * 16 * group, 128
    sums = blocks * 2 * tile_k * head_dim * 4 if launches > 1 else 0
    counter = 256 if "sm90" in plan["kernel"][0] else 0  # of work tiles
    assert plan["workspace"] == [f"{rows * 8 + rows * head_dim * 4 + sums + counter} bytes"]


def test_workspace_of_gradient_sums_is_bounded(lib: c.CDLL) -> None:
    """By the thread blocks of a launch, however many keys there are."""
    rows = tensor(1, 1 << 20, 16, 128, dtype=abi.FLOAT16)
    plan = plan_lines(lib, "H200", "backward", (rows, rows, rows))
    assert any(f", at most {16 * 132} in a launch, each 32 times" in line for line in plan["launch"])
    others = (1 << 20) * 16 * (8 + 128 * 4)
    counter = 256  # of work tiles
    assert plan["workspace"] == [f"{others + 16 * 132 * 2 * 128 * 128 * 4 + counter} bytes"]


def rows_of(sequences: int, length: int, heads_q: int, heads_k: int, head_dim: int = 128) -> tuple[abi.Tensor, ...]:
    q, k = (tensor(sequences, length, heads, head_dim) for heads in (heads_q, heads_k))
    return q, k, k


CAUSAL = {"flags": abi.CAUSAL}
ONE_PACKED = {name: tensor(2, dtype=abi.INT32) for name in ("cu_seqlens_q", "cu_seqlens_k")}


@pytest.mark.parametrize(
    ("rows", "options", "splits"),
    [
        (rows_of(1, 2048, 32, 8), CAUSAL, (128, 128, 2)),  # the longest key tile takes twice its part of the whole
        (rows_of(1, 2048, 32, 8), {"flags": abi.CAUSAL | abi.DETERMINISTIC}, (128, 128, 2)),
        (rows_of(1, 512, 16, 8), CAUSAL, (32, 32, 4)),
        (rows_of(1, 512, 16, 8), {"flags": abi.CAUSAL | abi.DETERMINISTIC}, (32, 32, 2)),  # whole query heads
        (rows_of(4, 4096, 16, 16), {"flags": abi.DETERMINISTIC}, (2048, 68, 3)),
        (rows_of(1, 4096, 32, 1), CAUSAL, (32, 32, 8)),
        (rows_of(1, 1024, 32, 8), {}, (64, 64, 2)),  # half of the thread blocks would have no key tile
        (rows_of(4, 4096, 16, 16), {}, (2048, 68, 3)),  # 15 for each thread block, and 68
        (rows_of(1, 1024, 32, 8), {"alibi_slopes": tensor(32, dtype=abi.FLOAT32), **CAUSAL}, (64, 64, 4)),
        (rows_of(4, 2048, 16, 2, 256), CAUSAL, (256, 256, 2)),  # balanced, but 32 query heads at a time do not fit the L2 cache
        (rows_of(8, 2048, 16, 2), CAUSAL, (256, 256, 2)),
        (rows_of(4, 2048, 8, 2, 256), CAUSAL, None),  # 16 query heads do
        (rows_of(1, 1024, 8, 8), {"alibi_slopes": tensor(8, dtype=abi.FLOAT32)}, None),  # only whole query heads
        (rows_of(1, 1024, 8, 8), {}, (64, 64, 2)),
        (rows_of(1, 2048, 32, 8), {}, None),  # one key tile for each thread block
        (rows_of(4, 4096, 16, 16), CAUSAL, None),  # the short key tiles are last
        (rows_of(1, 1024, 32, 8), {"block_mask": BLOCKS}, None),  # the host does not know which query tiles it keeps
        (rows_of(1, 1 << 18, 8, 1), {}, None),  # several launches for each key tile
        ((tensor(2048, 32, 128), *(tensor(2048, 8, 128),) * 2), ONE_PACKED | CAUSAL, (128, 128, 2)),
        ((tensor(16384, 16, 128),) * 3, ONE_PACKED, None),  # the host does not know which key tiles are in the last wave
    ],
)
def test_splits_of_key_tiles(
    lib: c.CDLL, rows: tuple[abi.Tensor, ...], options: dict[str, Any], splits: tuple[int, int, int] | None
) -> None:
    plan = plan_lines(lib, "H200", "backward", rows, **options)
    assert plan["kernel"][0].startswith("backward_sm90")
    if splits is None:
        assert "key tiles" not in plan
        return
    tiles, split, count = splits
    assert plan["key tiles"] == [f"{tiles}, of which the last {split} in {count} splits of their queries"]
    blocks = min(132, tiles + split * (count - 1))
    assert any(line.startswith(f"dk and dv: {blocks} thread blocks") for line in plan["launch"])


@pytest.mark.parametrize(("options", "heads"), [({}, 1), (CAUSAL, 8)])
def test_groups_of_sm80_under_a_causal_mask(lib: c.CDLL, options: dict[str, Any], heads: int) -> None:
    """32 key tiles of 8 heads fill the 264 thread blocks that fit: two on each multiprocessor."""
    plan = plan_lines(lib, "H200", "backward", rows_of(1, 4096, 32, 8), backend=b"sm80", **options)
    assert plan["schedule"] == [f"static, {heads} key heads at a time"]


@pytest.mark.parametrize("backend", [b"sm90", b"sm80"])
def test_groups_of_tangents_under_a_causal_mask(lib: c.CDLL, backend: bytes) -> None:
    """sm90: tiles of 128 keys, one thread block on each of 132 multiprocessors; sm80: tiles of 64 keys, two on each."""
    q, k, v = rows_of(1, 4096, 32, 8)
    lib.describe(*DEVICES["H200"])
    text = explain(lib, "backward_tangent", (q, k, v), tangents={"q": q, "k": k, "v": v}, backend=backend, **CAUSAL)
    assert lines_of(text)["schedule"] == ["static, 4 key heads at a time"]
