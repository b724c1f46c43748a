"""context_parallel_decode on gloo processes: the same bits on all ranks, equal to one device; errors on all ranks."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import pytest
from decode_cases import DecodeCase

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)

import libflash.torch  # noqa: E402
from context_ranks import run_ranks  # noqa: E402
from decode_ranks import CASES, check_ranks  # noqa: E402
from two_processes import run_in_pairs, run_in_two_processes  # noqa: E402

import libflash  # noqa: E402

LENGTHS = torch.tensor([29, 40], dtype=torch.int32)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_three_ranks(case: DecodeCase, tmp_path: pathlib.Path) -> None:
    check_ranks(case, 3, tmp_path)


def wrong_calls(rank: int) -> list[str]:
    q, cache = torch.zeros(2, 1, 4, 16), torch.zeros(2, 24, 2, 16)
    refused = []

    def attempt(**options: Any) -> None:
        with pytest.raises(libflash.InvalidError) as info:
            libflash.torch.context_parallel_decode(q, cache, cache, **({"cache_seqlens": LENGTHS} | options))
        refused.append(str(info.value))

    attempt(cache_seqlens=LENGTHS + rank)
    attempt(shard_keys=1 + rank)
    attempt(cache_seqlens=LENGTHS + 20)
    attempt(shard=(2, 0, 1))
    attempt(out=torch.zeros_like(q))
    attempt(cache_seqlens=None)
    return refused


def test_errors_reach_all_ranks(tmp_path: pathlib.Path) -> None:
    words = ("cache_seqlens must be the same", "shard_keys must be the same", "cache_seqlens: must be at least 0", "shard cannot",
             "out cannot", "cache_seqlens: is required")  # fmt: skip
    for rank, refused in enumerate(run_ranks(2, tmp_path, wrong_calls)):
        assert all(expected in said for said, expected in zip(refused, words, strict=True)), (rank, refused)


def test_one_rank_is_decode(tmp_path: pathlib.Path) -> None:
    (made,) = run_ranks(1, tmp_path, alone)
    assert made


def alone(rank: int) -> bool:
    q, cache = torch.randn(2, 1, 4, 16).bfloat16(), torch.randn(2, 64, 2, 16).bfloat16()
    got = libflash.torch.context_parallel_decode(q, cache, cache, cache_seqlens=LENGTHS)
    return rank == 0 and torch.equal(got, libflash.decode(q, cache, cache, cache_seqlens=LENGTHS))


@pytest.mark.parametrize("call", ["ring", "all_gather", "heads", "backward", "decode"])
def test_a_rank_that_ends(call: str, tmp_path: pathlib.Path) -> None:
    """The other one raises within the time limit of the group."""
    assert "raised" in run_in_two_processes("context_faults.py", tmp_path, call, seconds=100)[0]


def test_a_rank_that_is_stuck(tmp_path: pathlib.Path) -> None:
    """It does not end, and so closes no connection: the time limit of the group is what ends the wait, 8 s here. All calls wait
    at the same time.
    """
    calls = [(call, "stuck") for call in ("ring", "heads", "decode")]
    for (call, _), (said, _) in zip(calls, run_in_pairs("context_faults.py", tmp_path, calls, seconds=100), strict=True):
        waited = re.search(r"raised after (\d+) s: .*[Tt]imed out", said)
        assert waited, (call, said)
        assert 7 <= int(waited[1]) <= 20, (call, said)
