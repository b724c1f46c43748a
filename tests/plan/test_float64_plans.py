"""Plans of float64 for described GPUs: kernels, instances and workspaces, and what is refused."""

from __future__ import annotations

import ctypes as c

import abi
import pytest
from described import DEVICES, explain, lines_of, tensor

STATISTICS = 2 * 1024 * 16 * 16  # bytes: two numbers of each row, rounded up to units of 128, of two sequences with 16 heads


def rows(head_dim: int, head_dim_v: int | None = None) -> tuple[abi.Tensor, ...]:
    q, k, v = (tensor(2, 1000, heads, head_dim, dtype=abi.FLOAT64) for heads in (16, 4, 4))
    v.shape[3] = head_dim_v or head_dim
    return q, k, v


LARGE = {"64": "64 queries x 32 keys", "128": "128 queries x 32 keys", "256": "64 queries x 16 keys"}
SMALL = {"64": "64 queries x 32 keys", "128_small": "32 queries x 16 keys", "256_small": "16 queries x 8 keys"}
WIDE = {"512_small": "16 queries x 8 keys"}  # for every GPU
BACKWARD = {64: "32 queries x 32 keys", 128: "16 queries x 16 keys", 256: "8 queries x 16 keys", 512: "8 queries x 8 keys"}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("head_dim", "kernel"), [(7, 64), (65, 128), (129, 256), (256, 256), (257, 512)])
def test_the_kernel_that_runs(lib: c.CDLL, device: str, head_dim: int, kernel: int) -> None:
    """On every GPU, with one instance whatever the options are."""
    lib.describe(*DEVICES[device])
    tiles = (LARGE if device == "H200" else SMALL) | WIDE
    name, forward = next(item for item in tiles.items() if item[0].startswith(str(kernel)))
    for options in ({}, {"softcap": 20.0}):
        lines = lines_of(explain(lib, "forward", rows(head_dim), **options))
        assert lines["kernel"] == [f"forward_sm80_f64_d{name}, backend sm80"]
        assert (lines["instance"], lines["tile"]) == (["general"], [forward])
        assert lines["workspace"] == ["0 bytes"]
        lines = lines_of(explain(lib, "backward", rows(head_dim), **options))
        small = "_small" if kernel == 512 else ""
        assert lines["kernel"] == [f"backward_sm80_f64_d{kernel}{small}, backend sm80"]
        assert (lines["instance"], lines["tile"][0]) == (["general"], BACKWARD[kernel])
        assert [line.split(":")[0] for line in lines["launch"]] == ["softmax statistics", "dk and dv", "dq"]
        assert lines["workspace"] == [f"{STATISTICS} bytes"]


@pytest.mark.parametrize("device", DEVICES)
def test_tangents(lib: c.CDLL, device: str) -> None:
    """The call before them is in float64, and so is its LSE."""
    lib.describe(*DEVICES[device])
    q, k, v = rows(64)
    tangents = {"q": q, "k": k, "v": v}
    lines = lines_of(explain(lib, "forward_tangent", (q, k, v), tangents=tangents))
    assert lines["kernel"] == ["forward_tangent_sm80_f64_d128, backend sm80"]
    assert lines["before"] == ["forward, by forward_sm80_f64_d64 (general)"]
    lines = lines_of(explain(lib, "backward_tangent", (q, k, v), tangents=tangents))
    assert lines["kernel"] == ["backward_tangent_sm80_f64_d128, backend sm80"]
    assert lines["tile"] == ["16 rows x 16 of the other side"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dims", "kernel"), [((129,), "256"), ((257,), "512_small"), ((40, 512), "512_small")])
def test_tangents_of_wide_heads(lib: c.CDLL, device: str, dims: tuple[int, ...], kernel: str) -> None:
    lib.describe(*DEVICES[device])
    arrays = rows(*dims)
    for operation, sides in (("forward_tangent", "8 queries x 8 keys"), ("backward_tangent", "8 rows x 8 of the other side")):
        lines = lines_of(explain(lib, operation, arrays, tangents=dict(zip("qkv", arrays, strict=True))))
        assert (lines["kernel"], lines["tile"]) == ([f"{operation}_sm80_f64_d{kernel}, backend sm80"], [sides])


def test_more_keys_than_accumulators_can_add(lib: c.CDLL) -> None:
    """Not in float64: neither parts nor other instances."""
    lib.describe(*DEVICES["H200"])
    x = tensor(1, 100000, 1, 64, dtype=abi.FLOAT64)
    assert "at most" not in explain(lib, "forward", (x, x, x))
    assert "times" not in explain(lib, "backward", (x, x, x))
    assert lines_of(explain(lib, "forward_tangent", (x, x, x), tangents={"q": x}))["kernel"][0].startswith("forward_tangent")


def test_what_has_no_kernel(lib: c.CDLL) -> None:
    lib.describe(*DEVICES["H200"])
    wide, x = tensor(1, 8, 1, 513, dtype=abi.FLOAT64), tensor(1, 8, 1, 64, dtype=abi.FLOAT64)
    refused = explain(lib, "forward", (wide, wide, wide))
    assert "head_dim: must be at most 512 for this kernel (513)" in refused
    refused = explain(lib, "forward_tangent", (wide, wide, wide), tangents={"q": wide})
    assert "head_dim: must be at most 512 for this kernel (513)" in refused
    assert "dtype: decode of float64 runs on the CPU only (float64)" in explain(lib, "decode", (x, x, x))
