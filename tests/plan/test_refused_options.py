"""Options that no CUDA kernel of an operation supports: explain says so for each kernel."""

from __future__ import annotations

import ctypes as c
from typing import Any

import abi
import pytest
from described import DEVICES, explain, lines_of, tensor

BOUNDED = {"flags": abi.WINDOW, "window_left": 10, "window_right": 0}
REFUSED = [  # operation, options, the reason
    ("decode", {"tree_mask": tensor(512, 8, dtype=abi.INT32), **BOUNDED}, "tree_mask: needs q_positions"),
]


@pytest.mark.parametrize("device", ["A100", "H200"])
@pytest.mark.parametrize(("operation", "options", "reason"), REFUSED, ids=[reason for *_, reason in REFUSED])
def test_no_cuda_kernel_supports_it(lib: c.CDLL, device: str, operation: str, options: dict[str, Any], reason: str) -> None:
    lib.describe(*DEVICES[device])
    rows = tensor(2, 256, 8, 64)
    assert lines_of(explain(lib, operation, (rows, rows, rows)))["kernel"][0].startswith(operation)
    lines = lines_of(explain(lib, operation, (rows, rows, rows), **options))
    assert lines["kernel"] == ["none: UNSUPPORTED"]
    assert reason in " ".join(lines["because"]), lines
