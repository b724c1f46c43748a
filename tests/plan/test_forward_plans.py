"""Plans of forward for described GPUs: the instance that runs, its tiles, launches and workspace."""

from __future__ import annotations

import ctypes as c
from typing import Any

import abi
import pytest
from described import ADDRESS, DEVICES, explain, lines_of, tensor
from described_plans import BLOCKS, SLOPES, USED, Case, attention, check_instance, instance_cases, kernel, launches, plan_lines
from static_schedule_problems import PROBLEMS

RARE = ({"softcap": 30.0}, {"alibi_slopes": SLOPES}, {"dropout_p": 0.5}, {"flags": abi.SCALE, "softmax_scale": -1.0})
SM90 = {  # head dims: tiles of the plain instance, with a block mask, with the rare options
    (64, 64): ("128x128", "128x128", "128x128"),  # so few rows have the narrow instance
    (96, 96): ("192x96", "128x128", "128x128"),
    (128, 128): ("128x128", "128x128", "128x128"),
    (192, 128): ("128x128", "128x128", "128x64"),
    (192, 192): ("128x112", "128x64", "128x64"),
    (256, 256): ("128x64", "128x64", "128x64"),
}


def forward_sm90() -> list[Case]:
    cases = []
    for (dim, dim_v), (plain, blocks, general) in SM90.items():
        name = f"forward_sm90_bf16_d{dim}" + (f"x{dim_v}" if dim != dim_v else "")
        variable = "192x128" if dim == 64 else blocks
        instance = "variable lengths" if dim == 64 else "block mask"
        narrow = "plain, narrow" if dim == 64 else "plain"
        cases += [
            attention("H200", dim, kernel(name, narrow, plain, schedule="static"), head_dim_v=dim_v),
            attention("H200", dim, kernel(name, "block mask", blocks, schedule="dynamic"), head_dim_v=dim_v, block_mask=BLOCKS),
            attention("H200", dim, kernel(name, instance, variable, schedule="dynamic"), head_dim_v=dim_v, seqused_k=USED),
            *(attention("H200", dim, kernel(name, "general", general), head_dim_v=dim_v, **rare) for rare in RARE),
        ]
    return cases


def forward_sm80() -> list[Case]:
    cases = []
    # device, type, head_dim: tiles without and with the rare options. Code for sm_80 and for later architectures differs.
    rows = [
        ("A100", abi.BFLOAT16, 64, "128x128", "128x32"),
        ("A100", abi.FLOAT16, 64, "128x32", "128x32"),
        ("A100", abi.BFLOAT16, 128, "128x64", "128x32"),
        ("A100", abi.BFLOAT16, 256, "64x64", "64x32"),
        ("L40S", abi.FLOAT16, 64, "128x32", "128x32"),
        ("H200", abi.BFLOAT16, 64, "128x128", "128x64"),
        ("H200", abi.FLOAT16, 64, "128x128", "128x64"),
        ("H200", abi.BFLOAT16, 128, "128x64", "128x32"),
        ("H200", abi.BFLOAT16, 256, "64x64", "64x64"),
        ("H200", abi.FLOAT32, 256, "64x16", "64x16"),
        ("B200", abi.BFLOAT16, 64, "128x128", "128x64"),
        ("B200", abi.BFLOAT16, 128, "128x32", "128x32"),
        ("RTX 5090", abi.BFLOAT16, 128, "128x32", "128x32"),
        ("RTX 5090", abi.BFLOAT16, 256, "64x64", "64x64"),
        ("Thor", abi.FLOAT16, 64, "128x32", "128x32"),
    ]
    names = {abi.BFLOAT16: "bf16", abi.FLOAT16: "f16", abi.FLOAT32: "f32"}
    for device, dtype, dim, plain, general in rows:
        name, options = f"forward_sm80_{names[dtype]}_d{dim}", {"dtype": dtype, "backend": b"sm80"}
        cases.append(attention(device, dim, kernel(name, "plain", plain, schedule="static"), **options))
        cases.append(attention(device, dim, kernel(name, "general", general), **options, softcap=30.0))
    return cases


@instance_cases([*forward_sm90(), *forward_sm80()])
def test_the_instance_that_runs(lib: c.CDLL, case: Case) -> None:
    check_instance(lib, case)


@pytest.mark.parametrize(
    ("sequences", "rows", "heads", "options", "narrow"),
    [
        (1, 2048, 8, {}, True),  # 88 tiles of 192 rows, 128 of 128
        (4, 1024, 12, {}, True),  # three rounds of tiles in both
        (8, 128, 40, {"flags": abi.CAUSAL}, True),  # a third of a tile of 192 rows is empty
        (16, 1024, 32, {}, False),  # 24 rounds of 192 rows, 32 of 128
        (4, 512, 32, {"flags": abi.CAUSAL}, False),
        (1, 2048, 8, {"flags": abi.WINDOW, "window_left": 256, "window_right": 0}, True),
        (1, 2048, 8, {"softcap": 30.0}, None),
    ],
)
def test_narrow_tiles(lib: c.CDLL, sequences: int, rows: int, heads: int, options: dict[str, Any], narrow: bool | None) -> None:
    plan = plan_lines(lib, "H200", "forward", (tensor(sequences, rows, heads, 64),) * 3, **options)
    assert plan["instance"] == ["general" if narrow is None else "plain, narrow" if narrow else "plain"]
    assert plan["tile"] == ["192 queries x 128 keys" if narrow is False else "128 queries x 128 keys"]


@pytest.mark.parametrize(
    ("rows", "heads", "schedule"),
    [
        (1024, 16, "16 heads at a time, longest tiles first"),
        (16384, 16, "1 heads at a time, long tiles paired with short ones, but not in the last 2 of 16 heads"),
        (4096, 33, "1 heads at a time, long tiles paired with short ones"),  # four pairs for each thread block
    ],
)
def test_causal_schedules(lib: c.CDLL, rows: int, heads: int, schedule: str) -> None:
    plan = plan_lines(lib, "H200", "forward", (tensor(1, rows, heads, 128),) * 3, flags=abi.CAUSAL)
    assert plan["schedule"] == [f"static, {schedule}"]


@pytest.mark.parametrize(("name", "head_dim"), [(name, d) for name, problem in PROBLEMS.items() for d in problem.head_dims])
def test_schedules_that_run_on_a_gpu(lib: c.CDLL, name: str, head_dim: int) -> None:
    """The problems of tests/cuda/test_static_schedule_cuda.py have the schedules that it is about."""
    problem = PROBLEMS[name]
    q, k = (tensor(problem.sequences, rows, problem.heads, head_dim) for rows in (problem.rows, problem.keys))
    lib.describe(*DEVICES["H200"])
    text = explain(lib, "forward", (q, k, k), **({"flags": abi.CAUSAL} if problem.causal else {}))
    assert problem.line in text


def test_launches_of_forward(lib: c.CDLL) -> None:
    """In the described library, step s of instance n has 1000 + 100 s + n threads."""
    few = Case("H200", "forward", (tensor(1, 300, 2, 128),) * 3, {}, {})
    assert launches(lib, few) == ["attention: 6 thread blocks of 1000"]
    assert launches(lib, few._replace(options={"backend": b"sm80"})) == ["attention: 6 thread blocks of 1000"]
    assert launches(lib, attention("H200", 128, {})) == ["attention: 132 thread blocks of 1000"]
    dynamic = launches(lib, attention("H200", 128, {}, block_mask=BLOCKS))
    assert dynamic == ["tile order: 1 thread blocks of 1102", "attention: 132 thread blocks of 1002"]
    causal = attention("H200", 128, {}, flags=abi.CAUSAL)  # 4 pairs of tiles for each of 32 heads
    assert launches(lib, causal) == ["attention: 128 thread blocks of 1000"]


def size_of(lib: c.CDLL, operation: str, arrays: list[abi.Tensor | None], options: Any) -> int:
    bytes_ = c.c_size_t()
    views = [c.pointer(array) if array is not None else None for array in arrays]
    status = getattr(lib, f"flash_attention_{operation}_workspace_size")(*views, options, c.byref(bytes_))
    assert status == abi.OK, lib.flash_last_error().decode()
    return bytes_.value


@pytest.mark.parametrize("options", [{}, {"block_mask": BLOCKS}, {"softcap": 1.0}], ids=["plain", "block mask", "general"])
def test_the_workspace_is_the_one_of_the_plan(lib: c.CDLL, options: dict[str, Any]) -> None:
    lib.describe(*DEVICES["H200"])
    q, out = tensor(2, 1000, 16, 64), tensor(2, 1000, 16, 64, address=2 * ADDRESS)
    size = size_of(lib, "forward", [q, q, q, out, None], abi.options(abi.AttentionOptions, **options))
    assert lines_of(explain(lib, "forward", (q, q, q), **options))["workspace"] == [f"{size} bytes"]
    # Dynamic schedule: 16 bytes, and 20 for each tile, in units of 256 bytes.
    tiles = 2 * 16 * 8 if "block_mask" in options else 0
    assert size == (-(-(16 + 20 * tiles) // 256) * 256 if tiles else 0)


def long_rows(keys: int, head_dim: int, dtype: int = abi.FLOAT16, queries: int = 1000) -> tuple[abi.Tensor, ...]:
    k = tensor(1, keys, 16, head_dim, dtype=dtype)
    return tensor(1, queries, 16, head_dim, dtype=dtype), k, k


# Bytes of a thread block: 4 for each row and each of the head_dim + 32 columns (long_sums_bytes()).
@pytest.mark.parametrize("dtype", [abi.FLOAT16, abi.BFLOAT16], ids=["f16", "bf16"])
@pytest.mark.parametrize(
    ("device", "head_dim", "instance", "bytes_"),
    [
        ("A100", 64, "plain, long sums", 16 * 8 * 128 * (64 + 32) * 4),
        ("A100", 256, "general, long sums", 16 * 16 * 64 * (256 + 32) * 4),
        ("RTX 5090", 128, "plain, long sums", 16 * 8 * 128 * (128 + 32) * 4),
    ],
)
def test_long_sums_are_kept_in_the_workspace(
    lib: c.CDLL, device: str, head_dim: int, instance: str, bytes_: int, dtype: int
) -> None:
    plan = plan_lines(lib, device, "forward", long_rows(32769, head_dim, dtype))
    assert plan["workspace"] == [f"{bytes_} bytes"]
    assert plan["instance"] == [instance]


# On sm90 another instance adds them, with a dynamic schedule, where accumulators do not suffice: bf16 sums may be longer.
@pytest.mark.parametrize(("keys", "dtype"), [(32769, abi.FLOAT16), (131073, abi.BFLOAT16)], ids=["f16", "bf16"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_long_sums_on_sm90(lib: c.CDLL, head_dim: int, keys: int, dtype: int) -> None:
    plan = plan_lines(lib, "H200", "forward", long_rows(keys, head_dim, dtype))
    assert plan["instance"] == ["block mask"]
    order = 2816  # 16 bytes and 20 for each of 128 tiles, in whole 256 bytes
    assert plan["workspace"] == [f"{16 * 8 * 128 * (head_dim + 32) * 4 + order} bytes"]  # fewer work tiles than multiprocessors
    plan = plan_lines(lib, "H200", "forward", long_rows(keys - 1, head_dim, dtype))
    assert plan["instance"] == ["plain, narrow" if head_dim == 64 else "plain"]
    assert plan["workspace"] == ["0 bytes"]


@pytest.mark.parametrize("device", ["H200", "A100"])
@pytest.mark.parametrize(
    ("keys", "dtype", "options"),
    [
        (32768, abi.FLOAT16, {}),
        (32768, abi.BFLOAT16, {}),
        (1 << 20, abi.FLOAT16, {"flags": abi.WINDOW, "window_left": 30000, "window_right": 0}),
    ],
    ids=["f16", "bf16", "window"],
)
def test_other_sums_need_no_workspace(lib: c.CDLL, device: str, keys: int, dtype: int, options: dict[str, Any]) -> None:
    plan = plan_lines(lib, device, "forward", long_rows(keys, 128, dtype), **options)
    assert plan["workspace"] == ["0 bytes"]
    assert plan["instance"] == ["plain"]


@pytest.mark.parametrize(
    ("head_dim", "instance", "block"),
    [(64, "plain, long sums", 128 * (64 + 32)), (128, "general, long sums", 128 * (128 + 32)), (256, "plain", 0)],
)
def test_long_sums_of_float32(lib: c.CDLL, head_dim: int, instance: str, block: int) -> None:
    plan = plan_lines(lib, "H200", "forward", long_rows(32769, head_dim, abi.FLOAT32))
    assert plan["instance"] == [instance]
    assert plan["workspace"] == [f"{16 * 8 * block * 4} bytes"]
    assert plan_lines(lib, "H200", "forward", long_rows(32768, head_dim, abi.FLOAT32))["instance"] == ["plain"]


def test_workspace_of_long_sums_is_bounded(lib: c.CDLL) -> None:
    """By the thread blocks that run at once, however many queries there are."""
    rows = long_rows(1 << 20, 128, queries=1 << 20)
    block = 128 * (128 + 32) * 4
    order = -(-(16 + 20 * 16 * (1 << 13)) // 256) * 256  # of the tiles of all heads
    assert plan_lines(lib, "H200", "forward", rows)["workspace"] == [f"{132 * block + order} bytes"]
    assert plan_lines(lib, "A100", "forward", rows)["workspace"] == [f"{16 * 108 * block} bytes"]


@pytest.mark.parametrize(("name", "dtype", "most"), [("f16", abi.FLOAT16, 32768), ("bf16", abi.BFLOAT16, 131072)])
def test_the_sm90_kernel_for_192_channels_refuses_long_sums(lib: c.CDLL, name: str, dtype: int, most: int) -> None:
    plan = plan_lines(lib, "H200", "forward", long_rows(most, 192, dtype))
    assert plan["kernel"][0].startswith(f"forward_sm90_{name}_d192,")
    assert plan["workspace"] == ["0 bytes"]
    plan = plan_lines(lib, "H200", "forward", long_rows(most + 1, 192, dtype))
    assert plan["kernel"][0].startswith(f"forward_sm90_{name}_d256,")
