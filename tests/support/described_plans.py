"""Problems whose plans tests check on described GPUs (described.py), and the parts of a plan that they check."""

from __future__ import annotations

import ctypes as c
from typing import Any, NamedTuple

import abi
import pytest
from described import ADDRESS, DEVICES, explain, lines_of, tensor

SLOPES = tensor(16, dtype=abi.FLOAT32)
BLOCKS = tensor(1, 1, 8, 8, dtype=abi.BOOL)
LISTS = abi.BlockLists(*(tensor(1, 1, 8, *last, dtype=abi.INT32) for last in ((), (8,), (), (8,))))
SCORES, DSCORES = tensor(1, 16, 1000, 1000), tensor(1, 16, 1000, 1000, address=2 * ADDRESS)
MASK = tensor(1, 1, 1000, 1000, dtype=abi.BOOL)
USED = tensor(2, dtype=abi.INT32)


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


def name_of(case: object) -> str:
    assert isinstance(case, Case)
    options = "-".join(name for name in case.options if name != "backend")
    return f"{case.device}-{case.expected['kernel'].partition(',')[0]}-{options or 'plain'}"


def instance_cases(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=name_of)


def plan_lines(lib: c.CDLL, device: str, operation: str, arrays: tuple[abi.Tensor, ...], **options: Any) -> dict[str, list[str]]:
    lib.describe(*DEVICES[device])
    return lines_of(explain(lib, operation, arrays, **options))


def check_instance(lib: c.CDLL, case: Case) -> None:
    lines = plan_lines(lib, case.device, case.operation, case.arrays, **case.options)
    for label, start in case.expected.items():
        assert lines[label][0].startswith(start), f"{label}: {lines[label][0]}"
    if "tile" in case.expected:
        assert lines["tile"][0] == case.expected["tile"]


def launches(lib: c.CDLL, case: Case) -> list[str]:
    lines = plan_lines(lib, case.device, case.operation, case.arrays, **case.options)["launch"]
    return [line.partition(" threads")[0] for line in lines]
