"""Plans for described GPUs, which need not exist: explain shows the instance that runs, its tile, schedule and launches."""

from __future__ import annotations

import ctypes as c
from typing import Any, NamedTuple

import abi
import pytest
from described import ADDRESS, CUDA, DEVICES, build, explain, lines_of, tensor

KERNELS = [line for line in (CUDA / "kernels.table").read_text().splitlines() if line and not line.startswith("#")]


@pytest.fixture(scope="module")
def lib(tmp_path_factory: pytest.TempPathFactory) -> c.CDLL:
    return build(tmp_path_factory.mktemp("described"))


class Case(NamedTuple):
    device: str
    operation: str
    arrays: tuple[abi.Tensor, ...]
    options: dict[str, Any]
    expected: dict[str, str]  # label: start of its first line


def attention(device: str, head_dim: int, expected: dict[str, str], operation: str = "forward", **options: Any) -> Case:
    """Two sequences of 1000 rows, 16 heads."""
    dtype, dim_v = options.pop("dtype", abi.BFLOAT16), options.pop("head_dim_v", head_dim)
    q, v = tensor(2, 1000, 16, head_dim, dtype=dtype), tensor(2, 1000, 16, dim_v, dtype=dtype)
    return Case(device, operation, (q, q, v), options, expected)


def kernel(name: str, instance: str, tile: str, **expected: str) -> dict[str, str]:
    backend = name.split("_")[1]
    tile_q, tile_k = tile.split("x")
    return {"kernel": f"{name}, backend {backend}", "instance": instance, "tile": f"{tile_q} queries x {tile_k} keys", **expected}


SLOPES = tensor(16, dtype=abi.FLOAT32)
BLOCKS = tensor(1, 1, 8, 8, dtype=abi.BOOL)
SCORES, DSCORES = tensor(1, 16, 1000, 1000), tensor(1, 16, 1000, 1000, address=2 * ADDRESS)
MASK = tensor(1, 1, 1000, 1000, dtype=abi.BOOL)
USED = tensor(2, dtype=abi.INT32)
PACKED, CU = (tensor(1000, 16, 64),) * 3, dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), tensor(3, dtype=abi.INT32))
RARE = ({"softcap": 30.0}, {"alibi_slopes": SLOPES}, {"dropout_p": 0.5}, {"flags": abi.SCALE, "softmax_scale": -1.0})

SM90 = {  # head dims: tiles of the plain instance, with a block mask, with the rare options
    (64, 64): ("192x128", "128x128", "128x128"),
    (96, 96): ("192x96", "128x128", "128x64"),
    (128, 128): ("128x128", "128x128", "128x64"),
    (192, 128): ("128x128", "128x128", "128x64"),
    (192, 192): ("128x112", "128x64", "128x64"),
    (256, 256): ("128x64", "128x64", "128x32"),
}


def forward_sm90() -> list[Case]:
    cases = []
    for (dim, dim_v), (plain, blocks, general) in SM90.items():
        name = f"forward_sm90_bf16_d{dim}" + (f"x{dim_v}" if dim != dim_v else "")
        variable = plain if dim == 64 else blocks
        instance = "variable lengths" if dim == 64 else "block mask"
        cases += [
            attention("H200", dim, kernel(name, "plain", plain, schedule="static"), head_dim_v=dim_v),
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


def decode(device: str, expected: dict[str, str], rows: int = 1, **options: Any) -> Case:
    """Four sequences, 32 query heads over 8 key heads, 8192 keys."""
    cache = tensor(4, 8192, 8, 128)
    return Case(device, "decode", (tensor(4, rows, 32, 128), cache, cache), options, expected)


def codes(device: str, expected: dict[str, str], rows: int = 1, **options: Any) -> Case:
    """The same with caches of 8 bits."""
    k, v = (tensor(4, 8192, 8, 128, dtype=abi.INT8, address=n * ADDRESS) for n in (4, 8))
    scales = dict.fromkeys(("k_scale", "v_scale"), tensor(8, dtype=abi.FLOAT32))
    return Case(device, "decode", (tensor(4, rows, 32, 128), k, v), scales | options, expected)


def decode_cases_of_codes(large: str, small: str) -> list[Case]:
    """Tiles and splits are those of a cache of 16 bits."""
    own, shared, two = (f"8-bit codes, {text}" for text in ("each warp its own keys", "warps share keys", "two key heads"))
    news = {name: tensor(4, 1, 8, 128, address=n * ADDRESS) for n, name in ((2, "k_new"), (3, "v_new"))}
    turned = dict.fromkeys(("rotary_cos", "rotary_sin"), tensor(8192, 64, dtype=abi.FLOAT32))
    paged = (tensor(32, 1, 32, 128), *(tensor(32 * 512, 16, 8, 128, dtype=abi.E4M3, address=n * ADDRESS) for n in (4, 8)))
    pages = {"block_table": tensor(32, 512, dtype=abi.INT32), "cache_seqlens": tensor(32, dtype=abi.INT32)}
    return [
        codes("H200", kernel(large, own, "16x64", splits="8 ranges", pipeline="4 stages")),
        codes("H200", kernel(large, own, "16x64", launch="append codes: 16 "), **news),
        codes("H200", kernel(large, own, "16x64", launch="append codes: 16 "), **news, **turned),
        codes("H200", kernel(large, shared, "64x64", pipeline="3 stages"), rows=5),
        codes("A100", kernel(small, two, "16x32", splits="13 ranges", pipeline="3 stages")),
        Case("H200", "decode", paged, pages, kernel(large, two, "16x32", splits="2 ranges")),
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
        decode("H200", kernel(large, "warps share keys", "64x64"), rows=5),
        decode("H200", kernel(large, "warps share keys", "64x64", launch="append: 80 "), rows=5, **several),
        decode("H200", kernel(large, "each warp its own keys", "16x64", splits="1 (keys"), num_splits=1),
        decode("A100", kernel(small, "two key heads", "16x32", splits="13 ranges")),
        *decode_cases_of_codes(large, small),
        Case("H200", "decode", paged, pages, kernel(large, "two key heads", "16x32", splits="2 ranges")),
        *ragged_cases(),
    ]


def ragged_cases() -> list[Case]:
    """Rows of any lengths: thread blocks for all full tiles of 64 packed rows, and one more for each sequence."""
    caches = (tensor(4, 8192, 8, 128),) * 2
    cu, ints = tensor(5, dtype=abi.INT32), tensor(4, 5, dtype=abi.INT32, address=2 * ADDRESS)
    rows, new = tensor(1000, 32, 128), tensor(1000, 8, 128, address=3 * ADDRESS)
    news = {"k_new": new, "v_new": tensor(1000, 8, 128, address=4 * ADDRESS)}
    ragged = kernel("decode_sm80_bf16_d128", "rows of any lengths", "64x64")
    one = {**ragged, "splits": "1 (keys", "launch": "attention: 528 "}
    dense, tree = tensor(4, 5, 32, 128), tensor(20, 1, dtype=abi.INT32)
    return [
        Case("H200", "decode", (rows, *caches), {"cu_seqlens_q": cu}, one),
        Case("H200", "decode", (rows, *caches), {"cu_seqlens_q": cu, **news}, {**ragged, "launch": "append: 4000 "}),
        Case("H200", "decode", (tensor(4, 32, 128), *caches), {"cu_seqlens_q": cu}, {**ragged, "splits": "8 ranges"}),
        Case("H200", "decode", (dense, *caches), {"cu_seqlens_new": cu, **news}, {**ragged, "launch": "append: 4000 "}),
        Case("H200", "decode", (dense, *caches), {"q_positions": ints, "num_splits": 1}, {**ragged, "launch": "attention: 32 "}),
        Case("H200", "decode", (dense, *caches), {"tree_mask": tree, "num_splits": 1}, {**ragged, "launch": "attention: 32 "}),
    ]


def backward_cases() -> list[Case]:
    static = {"schedule": "static"}
    in_order, deterministic = {"schedule": "in order of start"}, {"flags": abi.DETERMINISTIC}
    options = ({"softcap": 30.0}, {"alibi_slopes": SLOPES}, {"dropout_p": 0.5, "seqused_q": USED})
    scattered = ({"bias": SCORES}, {"mask": MASK, "seqused_q": USED})
    general, blocks = ("general", *options), ("block mask", {"block_mask": BLOCKS}, {"block_mask": BLOCKS, "seqused_k": USED})
    return [
        attention("H200", 64, kernel("backward_sm90_bf16_d64", "plain", "64x128", **static), "backward"),
        *(
            attention("H200", 64, kernel("backward_sm90_bf16_d64", instance, "64x128"), "backward", **option)
            for instance, *several in (general, blocks)
            for option in several
        ),
        *(
            attention("H200", 64, kernel("backward_sm80_bf16_d64", "general", "128x128"), "backward", **option)
            for option in scattered
        ),
        *(
            attention("H200", 128, kernel("backward_sm90_bf16_d128", "general", "64x128"), "backward", **option)
            for option in (*options, *scattered)
        ),
        attention("H200", 64, kernel("backward_sm90_bf16_d64", "plain", "64x128", **in_order), "backward", **deterministic),
        attention(
            "H200", 64, kernel("backward_sm80_bf16_d64", "plain", "128x128"), "backward", block_mask=BLOCKS, **deterministic
        ),
        attention("H200", 64, kernel("backward_sm90_bf16_d64", "variable lengths", "64x128"), "backward", seqused_q=USED),
        attention("H200", 64, kernel("backward_sm90_bf16_d64", "variable lengths", "64x128"), "backward", seqused_k=USED),
        Case("H200", "backward", PACKED, CU, kernel("backward_sm90_bf16_d64", "variable lengths", "64x128")),
        *(
            attention(
                "H200",
                128,
                kernel("backward_sm90_bf16_d128", "general", "64x128", **in_order),
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
            kernel("backward_sm90_bf16_d64", "variable lengths", "64x128", **in_order),
        ),
        attention("A100", 64, kernel("backward_sm80_bf16_d64", "plain", "128x128"), "backward", **deterministic),
        attention("H200", 192, kernel("backward_sm90_bf16_d192", "plain", "64x64", **static), "backward", head_dim_v=128),
        attention("H200", 256, kernel("backward_sm90_bf16_d256", "plain", "64x64", **static), "backward"),
        attention("H200", 256, kernel("backward_sm90_bf16_d256", "variable lengths", "64x64"), "backward", seqused_k=USED),
        *(
            attention("H200", 256, kernel("backward_sm90_bf16_d256", "block mask", "64x64"), "backward", **option)
            for option in blocks[1:]
        ),
        *(
            attention("H200", 256, kernel("backward_sm80_bf16_d256", "general", "64x64"), "backward", **option)
            for option in options
        ),
        attention("A100", 128, kernel("backward_sm80_bf16_d128_small", "plain", "32x64"), "backward"),
    ]


PLACES = tensor(2, 1000, dtype=abi.INT32)
# Parts of a problem: the name in a refusal, the operations, the options.
BOTH = ("forward", "backward")
PARTS: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
    ("positions (FLASH_FLAG_POSITIONS)", BOTH, {"flags": abi.POSITIONS | abi.CAUSAL, "row_begin": 1000}),
    ("resume (FLASH_FLAG_CONTINUE)", ("forward",), {"flags": abi.CONTINUE}),
    ("add (FLASH_FLAG_ADD)", ("backward",), {"flags": abi.ADD}),
    ("delta", ("backward",), {"delta": tensor(2, 16, 1000, dtype=abi.FLOAT32, address=2 * ADDRESS)}),
    ("heads_total", BOTH, {"dropout_p": 0.5, "heads_total": 32, "head_begin": 8}),
    ("sequence_numbers", BOTH, {"dropout_p": 0.5, "sequence_numbers": USED}),
]


@pytest.mark.parametrize("device", ["H200", "A100"])
def test_parts_run_on_sm80(lib: c.CDLL, device: str) -> None:
    """In the general instance; explain says why not on sm90."""
    lib.describe(*DEVICES[device])
    q = tensor(2, 1000, 16, 64)
    for name, operations, options in PARTS:
        for operation in operations:
            text = explain(lib, operation, (q, q, q), **options)
            lines = lines_of(text)
            assert lines["kernel"][0] == f"{operation}_sm80_bf16_d64, backend sm80", name
            assert lines["instance"] == ["general"], name
            if device == "H200":
                assert f"{name}: the kernel does not know it" in text


@pytest.mark.parametrize("operation", BOTH)
def test_refused_parts(lib: c.CDLL, operation: str) -> None:
    lib.describe(*DEVICES["H200"])
    q = tensor(2, 1000, 16, 64)
    placed = {"flags": abi.POSITIONS, "row_begin": 1000}
    beyond = "row_begin: positions must be below 2^29 for the CUDA kernels (the last one is 536870912)"
    assert beyond in explain(lib, operation, (q, q, q), flags=abi.POSITIONS, row_begin=(1 << 29) - 999)
    assert "kernel" in lines_of(explain(lib, operation, (q, q, q), flags=abi.POSITIONS, row_begin=(1 << 29) - 1000))
    shifted = lines_of(explain(lib, operation, (q, q, q), **placed, alibi_slopes=SLOPES))
    assert shifted["kernel"][0] == f"{operation}_sm80_bf16_d64, backend sm80"
    for given in ({"flags": abi.POSITIONS, "row_positions": PLACES}, {**placed, "row_step": 2}):
        assert "alibi_slopes: the CUDA kernels know them only with rows" in explain(
            lib, operation, (q, q, q), **given, alibi_slopes=SLOPES
        )


def name_of(case: object) -> str:
    assert isinstance(case, Case)
    options = "-".join(name for name in case.options if name != "backend")
    return f"{case.device}-{case.expected['kernel'].partition(',')[0]}-{options or 'plain'}"


@pytest.mark.parametrize("case", [*forward_sm90(), *forward_sm80(), *backward_cases(), *decode_cases()], ids=name_of)
def test_the_instance_that_runs(lib: c.CDLL, case: Case) -> None:
    lib.describe(*DEVICES[case.device])
    lines = lines_of(explain(lib, case.operation, case.arrays, **case.options))
    for label, start in case.expected.items():
        assert lines[label][0].startswith(start), f"{label}: {lines[label][0]}"
    if "tile" in case.expected:
        assert lines["tile"][0] == case.expected["tile"]


def launches(lib: c.CDLL, case: Case) -> list[str]:
    lib.describe(*DEVICES[case.device])
    return [
        line.partition(" threads")[0] for line in lines_of(explain(lib, case.operation, case.arrays, **case.options))["launch"]
    ]


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


def test_launches_of_backward(lib: c.CDLL) -> None:
    bias = {"bias": SCORES, "dbias": DSCORES}
    sink = {"learnable_sink": SLOPES, "dsink": tensor(16, dtype=abi.FLOAT32, address=2 * ADDRESS)}
    assert launches(lib, attention("H200", 128, {}, "backward", **bias, **sink)) == [
        "softmax statistics: 256 thread blocks of 1003",
        "dk and dv: 256 thread blocks of 1103",
        "dq from its accumulator: 256 thread blocks of 1203",
        "dsink: 16 thread blocks of 1403",
        f"dbias: {16 * 16 * 16} thread blocks of 1503",
    ]
    assert launches(lib, attention("H200", 128, {}, "backward", block_mask=BLOCKS)) == [
        "softmax statistics: 256 thread blocks of 1002",
        "dk and dv: 256 thread blocks of 1102",
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
        "dk and dv: 256 thread blocks of 1100",
        "dq from its accumulator: 256 thread blocks of 1200",
    ]
    case = attention("H200", 128, {}, "backward", flags=abi.DETERMINISTIC, backend=b"sm80")
    assert launches(lib, case)[2:] == ["dq: 256 thread blocks of 1300"]
    lines = lines_of(explain(lib, "backward", case.arrays, **case.options))
    assert lines["tile"] == ["64 queries x 128 keys", "dq: 128 queries x 64 keys"]


def test_launches_of_decode(lib: c.CDLL) -> None:
    assert launches(lib, decode("H200", {}, num_splits=3)) == [
        "attention: 96 thread blocks of 1101",
        "combine splits: 128 thread blocks of 1201",
    ]
    rotary = {name: tensor(8192, 64, address=(n + 4) * ADDRESS) for n, name in enumerate(("rotary_cos", "rotary_sin"))}
    new = {name: tensor(4, 5, 8, 128, address=(n + 2) * ADDRESS) for n, name in enumerate(("k_new", "v_new"))}
    # 160 new rows and 640 query rows of 64 threads each, two a thread block.
    assert launches(lib, decode("H200", {}, rows=5, num_splits=1, **rotary, **new)) == [
        "append: 400 thread blocks of 1000",
        "attention: 32 thread blocks of 1100",
    ]


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
    # Dynamic schedule: three words, two per sequence and one per tile, in units of 256 bytes.
    tiles = 2 * 16 * 8 if "block_mask" in options else 0
    assert size == (-(-4 * (3 + 2 * 2 + tiles) // 256) * 256 if tiles else 0)


def long_plan(lib: c.CDLL, device: str, operation: str, arrays: tuple[abi.Tensor, ...], **options: Any) -> dict[str, list[str]]:
    lib.describe(*DEVICES[device])
    return lines_of(explain(lib, operation, arrays, **options))


def long_rows(keys: int, head_dim: int, dtype: int = abi.FLOAT16, queries: int = 1000) -> tuple[abi.Tensor, ...]:
    k = tensor(1, keys, 16, head_dim, dtype=dtype)
    return tensor(1, queries, 16, head_dim, dtype=dtype), k, k


# Bytes of a thread block: 4 for each row and each of the head_dim + 32 columns (long_sums_bytes()).
@pytest.mark.parametrize("dtype", [abi.FLOAT16, abi.BFLOAT16], ids=["f16", "bf16"])
@pytest.mark.parametrize(
    ("device", "head_dim", "instance", "bytes_"),
    [
        ("H200", 64, "plain", 16 * 6 * 192 * (64 + 32) * 4),  # fewer work tiles than multiprocessors
        ("H200", 128, "plain", 16 * 8 * 128 * (128 + 32) * 4),
        ("A100", 64, "plain, long sums", 16 * 8 * 128 * (64 + 32) * 4),
        ("A100", 256, "general, long sums", 16 * 16 * 64 * (256 + 32) * 4),
        ("RTX 5090", 128, "plain, long sums", 16 * 8 * 128 * (128 + 32) * 4),
    ],
)
def test_long_sums_are_kept_in_the_workspace(
    lib: c.CDLL, device: str, head_dim: int, instance: str, bytes_: int, dtype: int
) -> None:
    plan = long_plan(lib, device, "forward", long_rows(32769, head_dim, dtype))
    assert plan["workspace"] == [f"{bytes_} bytes"]
    assert plan["instance"] == [instance]


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
    plan = long_plan(lib, device, "forward", long_rows(keys, 128, dtype), **options)
    assert plan["workspace"] == ["0 bytes"]
    assert plan["instance"] == ["plain"]


@pytest.mark.parametrize(
    ("head_dim", "instance", "block"),
    [(64, "plain, long sums", 128 * (64 + 32)), (128, "general, long sums", 128 * (128 + 32)), (256, "plain", 0)],
)
def test_long_sums_of_float32(lib: c.CDLL, head_dim: int, instance: str, block: int) -> None:
    plan = long_plan(lib, "H200", "forward", long_rows(32769, head_dim, abi.FLOAT32))
    assert plan["instance"] == [instance]
    assert plan["workspace"] == [f"{16 * 8 * block * 4} bytes"]
    assert long_plan(lib, "H200", "forward", long_rows(32768, head_dim, abi.FLOAT32))["instance"] == ["plain"]


def test_workspace_of_long_sums_is_bounded(lib: c.CDLL) -> None:
    """By the thread blocks that run at once, however many queries there are."""
    rows = long_rows(1 << 20, 128, queries=1 << 20)
    block = 128 * (128 + 32) * 4
    assert long_plan(lib, "H200", "forward", rows)["workspace"] == [f"{132 * block} bytes"]
    assert long_plan(lib, "A100", "forward", rows)["workspace"] == [f"{16 * 108 * block} bytes"]


@pytest.mark.parametrize(("name", "dtype", "most"), [("f16", abi.FLOAT16, 32768), ("bf16", abi.BFLOAT16, 131072)])
def test_the_sm90_kernel_for_192_channels_refuses_long_sums(lib: c.CDLL, name: str, dtype: int, most: int) -> None:
    plan = long_plan(lib, "H200", "forward", long_rows(most, 192, dtype))
    assert plan["kernel"][0].startswith(f"forward_sm90_{name}_d192,")
    assert plan["workspace"] == ["0 bytes"]
    plan = long_plan(lib, "H200", "forward", long_rows(most + 1, 192, dtype))
    assert plan["kernel"][0].startswith(f"forward_sm90_{name}_d256,")


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
    plan = long_plan(lib, device, "backward", gradient_rows(queries, dtype, group), **options)
    line = next(line for line in plan["launch"] if line.startswith("dk and dv"))
    assert line.endswith(f", each {launches} times" if launches > 1 else "shared memory each")
    tile_k = int(plan["tile"][0].split()[3])
    blocks = 16 * -(-1000 // tile_k)
    rows, head_dim = -(-queries // 128) * 128 * 16 * group, 128
    sums = blocks * 2 * tile_k * head_dim * 4 if launches > 1 else 0
    assert plan["workspace"] == [f"{rows * 8 + rows * head_dim * 4 + sums} bytes"]


def test_workspace_of_gradient_sums_is_bounded(lib: c.CDLL) -> None:
    """By the thread blocks of a launch, however many keys there are."""
    rows = tensor(1, 1 << 20, 16, 128, dtype=abi.FLOAT16)
    plan = long_plan(lib, "H200", "backward", (rows, rows, rows))
    assert any(f", at most {16 * 132} in a launch, each 32 times" in line for line in plan["launch"])
    others = (1 << 20) * 16 * (8 + 128 * 4)
    assert plan["workspace"] == [f"{others + 16 * 132 * 2 * 128 * 128 * 4} bytes"]


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
    plan = long_plan(lib, "H200", "decode", (tensor(1, rows, 1, 128, dtype=dtype), cache, cache), **options)
    assert plan["splits"][0].startswith(f"{splits} ")


def refusal(lib: c.CDLL, arrays: tuple[abi.Tensor, ...], **fields: Any) -> str:
    lib.describe(*DEVICES["H200"])
    text, needed = c.create_string_buffer(1 << 16), c.c_size_t()
    arguments = (*map(c.pointer, arrays), abi.options(abi.DecodeOptions, **fields), text, len(text), c.byref(needed))
    assert lib.flash_attention_decode_explain(*arguments) == abi.OK
    return text.value.decode()


def test_what_codes_lack_is_refused_by_name(lib: c.CDLL) -> None:
    k, v = (tensor(4, 8192, 8, 128, dtype=abi.INT8, address=n * ADDRESS) for n in (4, 8))
    q, half = tensor(4, 1, 32, 128), tensor(4, 8192, 8, 128)
    scale, groups = tensor(8, dtype=abi.FLOAT32), tensor(4, 8192, 8, 4, dtype=abi.FLOAT32)
    for arrays, k_scale, wanted in (
        ((tensor(4, 1, 32, 128, dtype=abi.FLOAT32), k, v), scale, "k_cache of 8 bits with float32 q"),
        ((q, k, v), groups, "k_scale of groups of channels"),
        ((q, half, half), scale, "k_scale of a k_cache that has not 8 bits"),
    ):
        assert wanted in refusal(lib, arrays, k_scale=k_scale, v_scale=scale)


def test_every_kernel_of_the_table_can_be_planned(lib: c.CDLL) -> None:
    """On the first described device that runs the kernel."""
    types = {"bf16": abi.BFLOAT16, "f16": abi.FLOAT16, "f32": abi.FLOAT32}
    planned = 0
    for line in KERNELS:
        operation, backend, dtype, dims, tile, _, marks = line.split()
        if dtype == "any":
            continue
        dim, dim_v = (int(d) for d in (dims if "x" in dims else f"{dims}x{dims}").split("x"))
        name = f"{operation}_{backend}_{dtype}_d{dims}" + ("_small" if "small" in marks else "")
        lib.describe(*DEVICES["A100" if "small" in marks else "H200"])
        q, v = tensor(2, 100, 4, dim, dtype=types[dtype]), tensor(2, 100, 4, dim_v, dtype=types[dtype])
        lines = lines_of(explain(lib, operation, (q, q, v), kernel=name.encode()))
        assert lines["kernel"] == [f"{name}, backend {backend}"]
        if operation != "decode":  # 400 rows of a key head: larger tiles
            assert lines["tile"][0] == "{} queries x {} keys".format(*tile.split("x"))
        planned += 1
    assert planned == len(KERNELS) - 3
