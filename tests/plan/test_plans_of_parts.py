"""Parts of problems on described GPUs: which kernels run them, and what is refused."""

from __future__ import annotations

import ctypes as c
from typing import Any

import abi
import pytest
from described import ADDRESS, DEVICES, explain, lines_of, tensor
from described_plans import SLOPES, USED

POSITIONS = tensor(2, 1000, dtype=abi.INT32)
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
                assert f"{name}: the kernel does not support it" in text


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
    for given in ({"flags": abi.POSITIONS, "row_positions": POSITIONS}, {**placed, "row_step": 2}):
        assert "alibi_slopes: the CUDA kernels know them only with rows" in explain(
            lib, operation, (q, q, q), **given, alibi_slopes=SLOPES
        )
