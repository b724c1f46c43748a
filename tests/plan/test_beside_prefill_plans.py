"""Long chunks and the other rows of a decode call: `explain` says whether their kernels run at the same time, and whether thread
blocks of the prefill kernel work in pairs.
"""

from __future__ import annotations

import ctypes as c
from typing import Any

import abi
import pytest
from described import DEVICES, explain, tensor

SAID = ", at the same time as decode"
CACHE = tensor(4, 8192, 8, 128)
PACKED, DENSE = tensor(1000, 32, 128), tensor(4, 80, 32, 128)
CU = {"cu_seqlens_q": tensor(5, dtype=abi.INT32)}
SHARED = {"shared_groups": tensor(2, dtype=abi.INT32), "shared_lens": tensor(1, dtype=abi.INT32)}


def plan_text(lib: c.CDLL, *arrays: abi.Tensor, device: str = "H200", **options: Any) -> str:
    lib.describe(*DEVICES[device])
    return explain(lib, "decode", arrays, **options)


# The hint of shared keys is ignored where rows are packed.
@pytest.mark.parametrize("more", [{}, SHARED, {"causal": True}], ids=["plain", "hint", "causal"])
def test_the_launch_of_prefill_says_it(lib: c.CDLL, more: dict[str, Any]) -> None:
    text = plan_text(lib, PACKED, CACHE, CACHE, **CU, **more)
    decode, prefill = text.split("long chunks")
    assert "attention: " in decode
    assert SAID not in decode
    assert next(line for line in prefill.splitlines() if "attention: " in line).endswith(SAID)
    assert prefill.count(SAID) == 1


def test_prefill_of_invariant_rows_follows_decode(lib: c.CDLL) -> None:
    text = plan_text(lib, PACKED, CACHE, CACHE, flags=abi.INVARIANT_ROWS, **CU)
    decode, prefill = text.split("long chunks")
    assert "attention: " in decode
    assert "attention: " in prefill
    assert SAID not in text


def test_chunks_without_other_rows_run_alone(lib: c.CDLL) -> None:
    text = plan_text(lib, DENSE, CACHE, CACHE)
    assert "long chunks" in text
    assert SAID not in text


def test_shared_keys_have_no_prefill(lib: c.CDLL) -> None:
    caches = tensor(64, 8192, 8, 128)
    text = plan_text(lib, tensor(64, 1, 32, 128), caches, caches, **SHARED)
    assert "shared keys: " in text
    assert SAID not in text


def test_without_prefill_kernels_nothing_is_said(lib: c.CDLL) -> None:
    text = plan_text(lib, PACKED, CACHE, CACHE, device="A100", **CU)
    assert "long chunks" not in text
    assert SAID not in text


@pytest.mark.parametrize(("heads_q", "head_dim", "pairs"), [(32, 128, True), (16, 64, True), (24, 128, False), (32, 96, False)])
def test_pairs_need_two_query_heads_of_a_key_head(lib: c.CDLL, heads_q: int, head_dim: int, pairs: bool) -> None:
    """With 96 channels there are three consumer warpgroups, which have too few registers."""
    cache = tensor(4, 8192, 8, head_dim)
    text = plan_text(lib, tensor(1000, heads_q, head_dim), cache, cache, **CU)
    launch = next(line for line in text.split("long chunks")[1].splitlines() if "attention: " in line)
    assert ("in pairs that share loads of keys" in launch) == pairs


def test_invariant_rows_have_no_pairs(lib: c.CDLL) -> None:
    assert "in pairs" not in plan_text(lib, PACKED, CACHE, CACHE, flags=abi.INVARIANT_ROWS, **CU)
