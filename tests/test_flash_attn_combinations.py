"""flash_attn_with_kvcache in combinations of all options that flash-attn 3's own tests of it have, against the oracle.

Left out, because they are refused: attention_chunk, q of 8 bits, rotary_seqlens other than cache_seqlens.
"""

from __future__ import annotations

import dataclasses
import itertools
import random as of_python
import zlib
from typing import Any

import numpy as np
import pytest
from harness import assert_same_bits, random
from reference_decode import decode as oracle
from sequences import cu_seqlens

from libflash import flash_attn

torch = pytest.importorskip("torch")

BATCH, HEADS, KEYS, DIM = 4, 6, 48, 16
MASKS: dict[str, dict[str, Any]] = {"all": {}, "causal": {"causal": True}, "local": {"window_size": (19, 3)}}
DRAWS = 3  # for each combination of the options that say where keys are and which of them count


@dataclasses.dataclass(frozen=True)
class Combination:
    page_size: int | None
    leftpad: bool
    batch_idx: bool
    packed: bool
    mask: str
    heads_k: int
    rows: int
    new: int  # 0: no new keys
    rotary: int
    interleaved: bool
    splits: int

    def __str__(self) -> str:
        return "-".join(str(x) for x in dataclasses.astuple(self))


def combinations() -> list[Combination]:
    draw = of_python.Random(6)
    found = []
    for where in itertools.product((None, 1, 4, 16), (False, True), (False, True), (False, True), MASKS):
        for _ in range(DRAWS):
            rows = draw.choice((1, 5, 12))
            new = draw.choice((0, rows, draw.randint(1, rows)))
            rotary = draw.choice((0, 8, 16)) if new else 0
            found.append(
                Combination(*where, draw.choice((6, 3, 1)), rows, new, rotary, draw.choice((False, True)), draw.choice((0, 1, 3)))
            )
    return found


def problem(case: Combination) -> tuple[list[np.ndarray], dict[str, Any]]:
    """q, k_cache, v_cache, and the options that flash-attn and the oracle share."""
    draw = np.random.default_rng(zlib.crc32(str(case).encode()))
    entries = BATCH * (2 if case.batch_idx else 1)
    rows_of = [int(n) for n in draw.integers(0, case.rows + 1, BATCH)] if case.packed else [case.rows] * BATCH
    new_of = [int(n) for n in draw.integers(0, case.new + 1, BATCH)] if case.packed else [case.new] * BATCH
    filled = draw.integers(0 if case.new else 1, KEYS - case.rows + 1, BATCH).astype(np.int32)

    def rows(lengths: list[int], most: int, heads: int, seed: int) -> np.ndarray:
        return random(*((sum(lengths),) if case.packed else (BATCH, most)), heads, DIM, seed=seed)

    q = rows(rows_of, case.rows, HEADS, 1)
    caches = [random(entries, KEYS, case.heads_k, DIM, seed=seed) for seed in (2, 3)]
    options: dict[str, Any] = {"cache_seqlens": filled, **MASKS[case.mask]}
    if case.packed:
        options["cu_seqlens_q"] = cu_seqlens(rows_of)
    if case.new:
        options |= {"k": rows(new_of, case.new, case.heads_k, 4), "v": rows(new_of, case.new, case.heads_k, 5)}
        if case.packed:
            options["cu_seqlens_new"] = cu_seqlens(new_of)
    if case.rotary:
        angles = random(KEYS, case.rotary // 2, seed=6)
        options |= {"rotary_cos": np.cos(angles), "rotary_sin": np.sin(angles), "rotary_interleaved": case.interleaved}
    if case.leftpad:
        options["cache_leftpad"] = (filled * draw.random(BATCH)).astype(np.int32)
    if case.batch_idx:
        options["cache_batch_idx"] = draw.permutation(entries)[:BATCH].astype(np.int32)
    if case.page_size is not None:
        pages = entries * KEYS // case.page_size
        options["block_table"] = draw.permutation(pages).astype(np.int32).reshape(entries, -1)
        caches = [x.reshape(pages, case.page_size, case.heads_k, DIM) for x in caches]
    return [q, *caches], options


@pytest.mark.parametrize("case", combinations(), ids=str)
def test_combination(case: Combination) -> None:
    arrays, options = problem(case)
    asked = dict(options, causal=case.mask == "causal")
    if "block_table" in asked and "cache_batch_idx" in asked:
        asked["block_table"] = asked["block_table"][asked.pop("cache_batch_idx")]
    wanted = oracle(*arrays, **asked)
    tensors = {n: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    for name, other in (("cu_seqlens_new", "cu_seqlens_k_new"), ("block_table", "page_table")):
        if name in tensors:
            tensors[other] = tensors.pop(name)
    if "window_size" in tensors:
        tensors["window_size"] = torch.tensor(tensors["window_size"])
    made = flash_attn.get_scheduler_metadata(
        BATCH, case.rows, KEYS, HEADS, case.heads_k, DIM, tensors["cache_seqlens"], torch.float32, headdim_v=DIM,
        cu_seqlens_q=tensors.get("cu_seqlens_q"), cu_seqlens_k_new=tensors.get("cu_seqlens_k_new"),
        cache_leftpad=tensors.get("cache_leftpad"), max_seqlen_k_new=case.new, page_size=case.page_size,
        causal=case.mask == "causal", window_size=tensors.get("window_size", (-1, -1)), num_splits=case.splits,
    )  # fmt: skip
    results = []
    for metadata in (None, made):
        q, *caches = (torch.from_numpy(x.copy()) for x in arrays)
        out, lse = flash_attn.flash_attn_with_kvcache(
            q, *caches, **tensors, max_seqlen_q=case.rows if case.packed else None, rotary_seqlens=tensors["cache_seqlens"],
            num_splits=case.splits, return_softmax_lse=True, scheduler_metadata=metadata,
        )  # fmt: skip
        results.append([x.numpy() for x in (out, lse, *caches)])
    for got, same in zip(*results, strict=True):
        assert_same_bits(got, same)
    for got, exact in zip(results[0], (wanted.out, wanted.lse), strict=False):
        np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5)
    for got, exact in zip(results[0][2:], (wanted.k_cache, wanted.v_cache), strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-6)
    assert_same_bits(results[0][3], wanted.v_cache)
