"""The kernels that a library must have to be measured."""

from __future__ import annotations

import machine
import sources


def test_kernels_of_the_table() -> None:
    lines = ["# operation folder dtype", "merge any any - - - dev", "forward sm80 bf16 128 128x64 1 -"]
    table = "\n".join([*lines, "forward sm90 f16 192x128 - 2 -", ""])
    built = ["merge_any", "forward_sm80_bf16_d128"]
    assert machine.table_kernels(table) == {
        "merge_any": "any",
        "forward_sm80_bf16_d128": "sm80",
        "forward_sm90_f16_d192x128": "sm90",
    }
    assert machine.missing_kernels(table, built, 89) == []
    assert machine.missing_kernels(table, built, 90) == ["forward_sm90_f16_d192x128"]
    assert machine.missing_kernels(table, built[:1], 80) == ["forward_sm80_bf16_d128"]


def test_small_kernels() -> None:
    """One without another kernel for the same problems must be there; it does not stand for that other kernel."""
    lines = ["forward sm80 f64 128 128x32 1 large", "forward sm80 f64 128 32x16 1 small", "forward sm80 f64 512 16x8 1 small"]
    large, small = "forward_sm80_f64_d128", "forward_sm80_f64_d512_small"
    assert machine.missing_kernels("\n".join(lines), [large, small], 90) == []
    assert machine.missing_kernels("\n".join(lines), [f"{large}_small"], 90) == [large, small]


def test_kernels_of_statistics() -> None:
    """They do not stand for the plain kernel of the same head_dim, nor it for them."""
    plain, statistics = "forward sm90 bf16 64 192x128 4 dev", "forward sm90 bf16 64 192x128 4 dev,statistics"
    small = "forward sm80 bf16 512 32x32 1 small,statistics"
    assert machine.missing_kernels("\n".join([plain, statistics, small]), ["forward_sm90_bf16_d64"], 90) == [
        "forward_sm90_bf16_d64_statistics",
        "forward_sm80_bf16_d512_small_statistics",
    ]


def test_the_kernel_table_of_this_repository() -> None:
    """As many names as lines, but for the small kernels beside others."""
    text = (sources.ROOT / "libflash/cuda/kernels.table").read_text()
    lines = [line.split() for line in text.splitlines() if line[:1].islower()]
    names = machine.table_kernels(text)
    assert "merge_any" in names
    assert len([line for line in lines if "small" not in line[-1]]) < len(names) < len(lines)
