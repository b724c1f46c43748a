"""Plans of tangents for described GPUs: the kernel and instance that run, the forward call before them, and what is refused."""

from __future__ import annotations

import ctypes as c
from typing import Any

import abi
import pytest
from described import ADDRESS, DEVICES, explain, lines_of, tensor

BLOCKS = tensor(1, 1, 8, 8, dtype=abi.BOOL)
TYPES = {"bf16": abi.BFLOAT16, "f16": abi.FLOAT16, "f32": abi.FLOAT32, "f64": abi.FLOAT64}


def rows(head_dim: int, dtype: str = "bf16", keys: int = 1000) -> tuple[abi.Tensor, ...]:
    """Two sequences of 1000 queries, 16 heads."""
    k = tensor(2, keys, 16, head_dim, dtype=TYPES[dtype])
    return tensor(2, 1000, 16, head_dim, dtype=TYPES[dtype]), k, k


def plan(
    lib: c.CDLL, device: str, arrays: tuple[abi.Tensor, ...], given: tuple[str, ...] = ("q", "k", "v"), **options: Any
) -> str:
    lib.describe(*DEVICES[device])
    flags = options.pop("tangent_flags", abi.FROM_LSE)
    inputs = dict(zip(("q", "k", "v"), arrays, strict=True))
    tangents = {name: inputs[name] for name in given} | {"flags": flags}
    return explain(lib, "forward_tangent", arrays, tangents=tangents, **options)


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "name", "tile", "general"),
    [
        ("A100", "bf16", 64, "bf16_d64", "128 queries x 32 keys", "64 queries x 32 keys"),
        ("A100", "f16", 80, "f16_d96", "128 queries x 32 keys", "64 queries x 32 keys"),
        ("L40S", "bf16", 128, "bf16_d128", "128 queries x 32 keys", "64 queries x 32 keys"),
        ("A100", "f16", 192, "f16_d192", "64 queries x 32 keys", "64 queries x 32 keys"),
        ("RTX 5090", "bf16", 256, "bf16_d256", "64 queries x 16 keys", "64 queries x 16 keys"),
        ("L40S", "f32", 128, "f32_d128", "64 queries x 16 keys", "64 queries x 16 keys"),
    ],
)
def test_the_instance_that_runs(lib: c.CDLL, device: str, dtype: str, head_dim: int, name: str, tile: str, general: str) -> None:
    for options, instance, wanted in (({}, "plain", tile), ({"softcap": 30.0}, "general", general)):
        lines = lines_of(plan(lib, device, rows(head_dim, dtype), **options))
        assert lines["kernel"] == [f"forward_tangent_sm80_{name}, backend sm80"]
        assert (lines["instance"], lines["tile"]) == ([instance], [wanted])
        assert lines["workspace"] == ["0 bytes"]


@pytest.mark.parametrize("device", ["A100", "L40S", "H200", "RTX 5090"])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "name", "tile"),
    [("f32", 256, "d256", 16)]
    + [(*x, dim, "d512_small", y) for *x, y in (("bf16", 32), ("f16", 32), ("f32", 16), ("f64", 8)) for dim in (264, 512)],
)
def test_wide_heads(lib: c.CDLL, device: str, dtype: str, head_dim: int, name: str, tile: int) -> None:
    """Tensors that are loaded one after the other: one instance, which fits every GPU."""
    for options in ({}, {"softcap": 30.0}):
        lines = lines_of(plan(lib, device, rows(head_dim, dtype), **options))
        assert lines["kernel"] == [f"forward_tangent_sm80_{dtype}_{name}, backend sm80"]
        assert (lines["instance"], lines["tile"]) == (["general"], [f"{tile} queries x {tile} keys"])
    lines = lines_of(explain_backward(lib, device, rows(head_dim, dtype)))
    assert lines["kernel"] == [f"backward_tangent_sm80_{dtype}_{name}, backend sm80"]
    assert lines["tile"] == [f"{tile} rows x {tile} of the other side"]


@pytest.mark.parametrize(
    ("dtype", "head_dim", "name", "queries"),
    [("bf16", 64, "bf16_d64", 192), ("bf16", 128, "bf16_d128", 128), ("f16", 80, "f16_d128", 128)],
)
def test_the_instance_on_hopper(lib: c.CDLL, dtype: str, head_dim: int, name: str, queries: int) -> None:
    """Fused with forward unless out and LSE are given."""
    for flags, instance in ((0, "fused with forward"), (abi.FROM_LSE, "plain")):
        lines = lines_of(plan(lib, "H200", rows(head_dim, dtype), tangent_flags=flags))
        assert lines["kernel"] == [f"forward_tangent_sm90_{name}, backend sm90"]
        assert (lines["instance"], lines["tile"]) == ([instance], [f"{queries} queries x 64 keys"])
        assert "before" not in lines


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_delta_on_hopper(lib: c.CDLL, head_dim: int) -> None:
    """The kernels of sm90 write delta, and those of the tangent of backward read it."""
    q, k, v = rows(head_dim)
    lse = tensor(2, 16, 1000, dtype=abi.FLOAT32)
    lib.describe(*DEVICES["H200"])
    written = {"cotangent": q, "delta": lse, "q": q, "flags": abi.FROM_LSE}
    lines = lines_of(explain(lib, "forward_tangent", (q, k, v), tangents=written, delta=lse))
    assert lines["kernel"] == [f"forward_tangent_sm90_bf16_d{head_dim}, backend sm90"]
    read = {"q": q, "delta": lse}
    lines = lines_of(explain(lib, "backward_tangent", (q, k, v), tangents=read, delta=lse))
    assert lines["kernel"] == [f"backward_tangent_sm90_bf16_d{head_dim}, backend sm90"]


@pytest.mark.parametrize(("dtype", "head_dim"), [("bf16", 256), ("f16", 192), ("bf16", 136)])
def test_many_channels_on_hopper(lib: c.CDLL, dtype: str, head_dim: int) -> None:
    """There are no registers for both accumulators: forward is called before, unless out and LSE are given."""
    of_forward = f"forward, by forward_sm90_{dtype}_d{256 if head_dim > 192 else 192} (plain)"
    for flags, before in ((0, [of_forward]), (abi.FROM_LSE, None)):
        lines = lines_of(plan(lib, "H200", rows(head_dim, dtype), tangent_flags=flags))
        assert lines["kernel"] == [f"forward_tangent_sm90_{dtype}_d256, backend sm90"]
        assert (lines["instance"], lines["tile"]) == (["plain"], ["128 queries x 64 keys"])
        assert lines.get("before") == before


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"softcap": 30.0}, "softcap: the kernel does not support it"),
        ({"block_mask": BLOCKS}, "block_mask: the kernel does not support it"),
        ({"softmax_scale": -1.0, "flags": abi.SCALE}, "softmax_scale: must be positive for it"),
    ],
)
def test_what_the_hopper_kernel_lacks(lib: c.CDLL, options: dict[str, Any], reason: str) -> None:
    text = plan(lib, "H200", rows(64), **options)
    assert lines_of(text)["kernel"] == ["forward_tangent_sm80_bf16_d64, backend sm80"]
    assert reason in text


def test_rows_that_tma_cannot_read(lib: c.CDLL) -> None:
    q, k, v = rows(64)
    lib.describe(*DEVICES["H200"])
    odd = tensor(2, 1000, 16, 64, address=ADDRESS + 2)
    text = explain(lib, "forward_tangent", (q, k, v), tangents={"k": odd})
    assert "tangents.k: its address and its strides must be multiples of 16 bytes for it" in text


def test_rows_that_are_not_aligned(lib: c.CDLL) -> None:
    """Of any tangent: the general instance loads them."""
    q, k, v = rows(64)
    for name in ("q", "k", "v"):
        lib.describe(*DEVICES["H200"])
        odd = tensor(2, 1000, 16, 64, address=ADDRESS + 2)
        text = explain(lib, "forward_tangent", (q, k, v), tangents={name: odd, "flags": abi.FROM_LSE})
        assert lines_of(text)["instance"] == ["general"], name


def test_forward_runs_before(lib: c.CDLL) -> None:
    """Unless out and LSE are given. It chooses its own kernel, of the requested backend."""
    assert "before" not in lines_of(plan(lib, "H200", rows(128)))
    general, plain = "forward_sm90_bf16_d128 (general)", "forward_sm80_bf16_d128 (plain)"
    for options, name in (({"softcap": 30.0}, general), ({"backend": b"sm80"}, plain)):
        lines = lines_of(plan(lib, "H200", rows(128), tangent_flags=0, **options))
        assert lines["kernel"] == ["forward_tangent_sm80_bf16_d128, backend sm80"]
        assert lines["before"] == [f"forward, by {name}"]
    named = {"kernel": b"forward_tangent_sm80_bf16_d256"}
    assert lines_of(plan(lib, "H200", rows(128), tangent_flags=0, **named))["kernel"][0].startswith(
        "forward_tangent_sm80_bf16_d256"
    )


def size_of(lib: c.CDLL, lse: abi.Tensor | None, flags: int, **options: Any) -> int:
    lib.describe(*DEVICES["H200"])
    q, k, v = rows(64)
    out, tout = (tensor(2, 1000, 16, 64, address=n * ADDRESS) for n in (2, 3))
    tangents = abi.options(abi.Tangents, q=q, out=tout, flags=flags)
    size = c.c_size_t()
    views = [c.pointer(x) if x else None for x in (q, k, v, out, lse)]
    status = lib.flash_attention_forward_tangent_workspace_size(
        *views, tangents, abi.options(abi.AttentionOptions, **options), c.byref(size)
    )
    assert status == abi.OK, lib.flash_last_error().decode()
    return size.value


def test_workspace(lib: c.CDLL) -> None:
    """The one of forward, and an LSE that the caller does not request."""
    lse = tensor(2, 16, 1000, dtype=abi.FLOAT32, address=4 * ADDRESS)
    assert size_of(lib, lse, abi.FROM_LSE) == size_of(lib, lse, 0) == size_of(lib, None, 0) == 0
    assert size_of(lib, None, 0, backend=b"sm80") == 2 * 16 * 1000 * 4
    of_forward = size_of(lib, lse, 0, block_mask=BLOCKS)
    assert of_forward > 0
    assert size_of(lib, None, 0, block_mask=BLOCKS) == of_forward + 2 * 16 * 1000 * 4


@pytest.mark.parametrize(("dtype", "most"), [("bf16", 131072), ("f16", 32768), ("f32", 32768)])
def test_more_keys_than_an_accumulator_adds_up(lib: c.CDLL, dtype: str, most: int) -> None:
    arch = "sm80" if dtype == "f32" else "sm90"
    name = f"forward_tangent_{arch}_{dtype}_d64, backend {arch}"
    assert lines_of(plan(lib, "H200", rows(64, dtype, most)))["kernel"] == [name]
    text = plan(lib, "H200", rows(64, dtype, most + 1))
    assert lines_of(text)["kernel"] == ["none: UNSUPPORTED"]
    assert f"k: the kernel adds up at most {most} keys without loss of precision ({most + 1})" in text
    window = {"flags": abi.WINDOW, "window_left": 1000, "window_right": 0}
    assert lines_of(plan(lib, "H200", rows(64, dtype, most + 1), **window))["instance"] == ["plain"]


def explain_backward(lib: c.CDLL, device: str, arrays: tuple[abi.Tensor, ...], **fields: Any) -> str:
    lib.describe(*DEVICES[device])
    q, k, v = arrays
    return explain(lib, "backward_tangent", arrays, tangents={"q": q, "k": k, "v": v, **fields.pop("tangents", {})}, **fields)


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "name", "tile"),
    [
        ("A100", "bf16", 64, "bf16_d64", "64 rows x 32"),
        ("L40S", "f16", 128, "f16_d128", "64 rows x 32"),
        ("RTX 5090", "bf16", 256, "bf16_d256", "32 rows x 16"),
        ("L40S", "f32", 128, "f32_d128", "32 rows x 16"),
        ("A100", "f32", 256, "f32_d256", "16 rows x 16"),
    ],
)
def test_backward(lib: c.CDLL, device: str, dtype: str, head_dim: int, name: str, tile: str) -> None:
    """In the described library, step s has 1000 + 100 s threads; the only instance is number 1."""
    lines = lines_of(explain_backward(lib, device, rows(head_dim, dtype)))
    assert lines["kernel"] == [f"backward_tangent_sm80_{name}, backend sm80"]
    assert lines["tile"] == [f"{tile} of the other side"]
    blocks = 2 * 16 * -(-1000 // int(tile.split(maxsplit=1)[0]))
    assert [line.partition(" threads")[0] for line in lines["launch"]] == [
        "statistics of rows: 256 thread blocks of 1001",
        *(f"tangent of d{x}: {blocks} thread blocks of 1101" for x in "qkv"),
    ]
    assert lines["workspace"] == [f"{2 * 16 * 1024 * 16} bytes"]


@pytest.mark.parametrize(
    ("dtype", "head_dim", "name", "tile"),
    [
        ("bf16", 64, "bf16_d64", "128 rows x 64"),
        ("bf16", 128, "bf16_d128", "128 rows x 32"),
        ("f16", 80, "f16_d128", "128 rows x 32"),
    ],
)
def test_backward_on_hopper(lib: c.CDLL, dtype: str, head_dim: int, name: str, tile: str) -> None:
    """One kernel for the queries, one for the keys, with an instance for double backward, where dout has no tangent."""
    q, k, v = rows(head_dim, dtype)
    for tangents, instance, number in (({}, "dout without tangent", 1), ({"dout": q}, "plain", 0)):
        lines = lines_of(explain_backward(lib, "H200", (q, k, v), tangents=tangents))
        assert lines["kernel"] == [f"backward_tangent_sm90_{name}, backend sm90"]
        assert (lines["instance"], lines["tile"]) == ([instance], [f"{tile} of the other side"])
        assert [line.partition(" threads")[0] for line in lines["launch"]] == [
            f"statistics of rows: 256 thread blocks of {1000 + number}",
            f"tangent of dq: 132 thread blocks of {1100 + number}",
            f"tangents of dk and dv: 132 thread blocks of {1300 + number}",
        ]
        assert lines["workspace"] == [f"{2 * 16 * 1024 * 16 + 256} bytes"]  # the counters


@pytest.mark.parametrize(("dtype", "head_dim"), [("bf16", 256), ("f16", 192), ("bf16", 136)])
def test_backward_of_many_channels_on_hopper(lib: c.CDLL, dtype: str, head_dim: int) -> None:
    """A thread block for each tile of 64 rows."""
    q, k, v = rows(head_dim, dtype)
    for tangents, instance, number in (({}, "dout without tangent", 1), ({"dout": q}, "plain", 0)):
        lines = lines_of(explain_backward(lib, "H200", (q, k, v), tangents=tangents))
        assert lines["kernel"] == [f"backward_tangent_sm90_{dtype}_d256, backend sm90"]
        assert (lines["instance"], lines["tile"]) == ([instance], ["64 rows x 32 of the other side"])
        assert [line.partition(" threads")[0] for line in lines["launch"]] == [
            f"statistics of rows: 256 thread blocks of {1000 + number}",
            f"tangent of dq: 512 thread blocks of {1100 + number}",
            f"tangents of dk and dv: 512 thread blocks of {1300 + number}",
        ]
        assert lines["workspace"] == [f"{2 * 16 * 1024 * 16} bytes"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"softcap": 30.0}, "softcap: the kernel does not support it"),
        ({"block_mask": BLOCKS}, "block_mask: the kernel does not support it"),
        (
            {"tangents": {"dout": tensor(2, 1000, 16, 64, address=ADDRESS + 2)}},
            "tangents.dout: its address and its strides must be",
        ),
        ({"tangents": {"dv": tensor(2, 1000, 16, 64, address=ADDRESS + 2)}}, "tangents.dv: its address and its strides must be"),
    ],
)
def test_what_the_hopper_kernel_of_backward_lacks(lib: c.CDLL, options: dict[str, Any], reason: str) -> None:
    text = explain_backward(lib, "H200", rows(64), **options)
    assert lines_of(text)["kernel"] == ["backward_tangent_sm80_bf16_d64, backend sm80"]
    assert reason in text


def test_backward_takes_a_negative_scale(lib: c.CDLL) -> None:
    text = explain_backward(lib, "H200", rows(64), softmax_scale=-1.0, flags=abi.SCALE)
    assert lines_of(text)["kernel"] == ["backward_tangent_sm90_bf16_d64, backend sm90"]


@pytest.mark.parametrize(
    ("shape", "head_dim", "dtype", "tiles"),
    [
        ((2, 16, 1000, 1000), 64, "bf16", 2 * 16 * 16 * 32),
        ((1, 16, 1000, 1000), 128, "f16", 16 * 16 * 32),
        ((1, 1, 1, 1000), 256, "bf16", 63),
        ((16, 1000, 1), 64, "f32", 16 * 16),
        ((1, 1), 128, "f64", 1),
    ],
)
def test_tangent_of_dbias(lib: c.CDLL, shape: tuple[int, ...], head_dim: int, dtype: str, tiles: int) -> None:
    """A thread block of the kernel of tdq for each tile of the bias, also on Hopper."""
    bias, dbias = (tensor(*shape, dtype=TYPES[dtype], address=address) for address in (3 * ADDRESS, 4 * ADDRESS))
    text = explain_backward(lib, "H200", rows(head_dim, dtype), bias=bias, tangents={"dbias": dbias})
    lines = lines_of(text)
    assert lines["kernel"] == [f"backward_tangent_sm80_{dtype}_d{head_dim}, backend sm80"]
    of_dq, of_dbias = lines["launch"][1], lines["launch"][-1]
    assert of_dbias.startswith(f"tangent of dbias: {tiles} thread blocks of ")
    assert of_dbias.partition("blocks")[2] == of_dq.partition("blocks")[2]
    if dtype in ("bf16", "f16"):
        assert "bias: the kernel does not support it" in text


def test_what_backward_refuses(lib: c.CDLL) -> None:
    q, k = tensor(1, 16384, 16, 64, dtype=abi.FLOAT16), tensor(1, 1000, 4, 64, dtype=abi.FLOAT16)
    text = explain_backward(lib, "H200", (q, k, k))
    assert "q: the kernel adds up at most 32768 rows of the heads that share a key head" in text


def test_what_no_kernel_has(lib: c.CDLL) -> None:
    text = plan(lib, "H200", rows(513))
    assert lines_of(text)["kernel"] == ["none: UNSUPPORTED"]
    assert "head_dim: must be at most 512 for this kernel (513)" in text
