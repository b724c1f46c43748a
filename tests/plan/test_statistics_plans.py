"""Plans of forward with statistics of rows for described GPUs: kernels, launches, and what is refused."""

from __future__ import annotations

import ctypes as c

import abi
import pytest
from described import ADDRESS, DEVICES, explain, lines_of, tensor

TYPES = {"bf16": abi.BFLOAT16, "f16": abi.FLOAT16, "f32": abi.FLOAT32, "f64": abi.FLOAT64}
ROWS, HEADS = 1000, 16


def arrays(dtype: str, head_dim: int, rows: int = ROWS, keys: int = ROWS) -> tuple[abi.Tensor, ...]:
    k = tensor(2, keys, 4, head_dim, dtype=TYPES[dtype])
    return tensor(2, rows, HEADS, head_dim, dtype=TYPES[dtype]), k, k


def outputs(dtype: str, *, heads: bool = False, rows: int = ROWS) -> dict[str, abi.Tensor]:
    number = TYPES["f64" if dtype == "f64" else "f32"]
    largest = tensor(HEADS, dtype=number) if heads else tensor(2, HEADS, rows, dtype=number)
    return {"max_logit": largest, "entropy": tensor(2, HEADS, rows, dtype=number, address=2 * ADDRESS)}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("head_dim", "kernel"), [(40, 64), (64, 64), (72, 128), (128, 128), (136, 256), (256, 256)])
def test_the_kernel_that_runs(lib: c.CDLL, device: str, dtype: str, head_dim: int, kernel: int) -> None:
    lib.describe(*DEVICES[device])
    backend = "sm90" if device == "H200" and dtype in ("bf16", "f16") else "sm80"
    least = max(kernel, 128) if dtype == "f64" else kernel
    for options in ({}, {"softcap": 20.0}):
        of = "sm80" if options else backend
        for heads in (False, True):
            made = outputs(dtype, heads=heads)
            lines = lines_of(explain(lib, "forward", arrays(dtype, head_dim), **made, **options))
            assert lines["kernel"] == [f"forward_{of}_{dtype}_d{least}_statistics, backend {of}"]
            assert lines["instance"] == ["plain, entropy" if of == "sm90" else "general"]
            names = [line.split(":")[0] for line in lines["launch"]]
            assert names == ["first maxima of heads"] * heads + ["attention"]


def test_the_instance_of_sm90(lib: c.CDLL) -> None:
    lib.describe(*DEVICES["H200"])

    def instance(*names: str, **options: object) -> list[str]:
        made = {name: out for name, out in outputs("bf16").items() if name in names}
        return lines_of(explain(lib, "forward", arrays("bf16", 64), **made, **options))["instance"]

    assert instance("max_logit") == instance("max_logit", causal=True) == ["plain, largest scores"]
    assert instance("entropy") == instance("max_logit", "entropy") == ["plain, entropy"]
    assert instance("max_logit", sm_margin=2) == ["statistics"]  # a dynamic schedule


@pytest.mark.parametrize("dtype", TYPES)
def test_nothing_changes_without_them(lib: c.CDLL, dtype: str) -> None:
    lib.describe(*DEVICES["H200"])
    assert "statistics" not in lines_of(explain(lib, "forward", arrays(dtype, 64)))["kernel"][0]


def test_head_maxima_without_rows_or_keys(lib: c.CDLL) -> None:
    """They are written though there is nothing to compute."""
    lib.describe(*DEVICES["A100"])
    made = {"max_logit": outputs("bf16", heads=True)["max_logit"]}
    lines = lines_of(explain(lib, "forward", arrays("bf16", 64, rows=0), **made))
    assert [line.split(":")[0] for line in lines["launch"]] == ["first maxima of heads"]


def test_long_sums(lib: c.CDLL) -> None:
    """With 256 channels the kernel of sm90 has none."""
    lib.describe(*DEVICES["H200"])
    for head_dim, backend in ((128, "sm90"), (256, "sm80")):
        made = outputs("f16", rows=10)
        lines = lines_of(explain(lib, "forward", arrays("f16", head_dim, rows=10, keys=100000), **made))
        assert lines["kernel"][0].endswith(f"backend {backend}")
        assert lines["workspace"][0] != "0 bytes"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "tile"), [("bf16", "32x32"), ("f16", "32x32"), ("f32", "32x16"), ("f64", "8x8")])
def test_wide_heads(lib: c.CDLL, device: str, dtype: str, tile: str) -> None:
    """One kernel of each type for every GPU."""
    lib.describe(*DEVICES[device])
    q, k, v = arrays(dtype, 264)
    narrow = tensor(2, ROWS, 4, 64, dtype=TYPES[dtype])
    for operands in ((q, k, v), arrays(dtype, 512), (q, k, narrow)):
        for options in ({}, {"softcap": 20.0}, {"flags": abi.CAUSAL}):
            for heads in (False, True):
                lines = lines_of(explain(lib, "forward", operands, **outputs(dtype, heads=heads), **options))
                assert lines["kernel"] == [f"forward_sm80_{dtype}_d512_small_statistics, backend sm80"]
                assert lines["instance"] == ["general"]
                assert lines["tile"][0] == "{} queries x {} keys".format(*tile.split("x"))


def test_long_sums_of_wide_heads(lib: c.CDLL) -> None:
    lib.describe(*DEVICES["L40S"])
    for dtype in TYPES:
        lines = lines_of(explain(lib, "forward", arrays(dtype, 512, rows=10, keys=100000), **outputs(dtype, rows=10)))
        assert (lines["workspace"][0] == "0 bytes") == (dtype == "f64")


def test_more_channels_are_refused(lib: c.CDLL) -> None:
    lib.describe(*DEVICES["H200"])
    assert "head_dim: must be at most 512 for this kernel" in explain(lib, "forward", arrays("bf16", 520), **outputs("bf16"))


def test_another_kernel_is_refused(lib: c.CDLL) -> None:
    """One for calls without statistics."""
    lib.describe(*DEVICES["H200"])
    for kernel in (b"forward_sm90_bf16_d512", b"forward_sm80_bf16_d512"):
        text = explain(lib, "forward", arrays("bf16", 512), kernel=kernel, **outputs("bf16"))
        assert "max_logit: the kernel does not support it" in text
