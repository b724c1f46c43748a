"""Arguments of the functions of flash_attn.py that are read before a call of the library: their kinds, and bounds of lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import qkv

import libflash
from libflash import flash_attn

Q, K, V = qkv(batch=2, sq=3, sk=8, d=8)
TABLE = np.arange(2, dtype=np.int32)[:, None]
ENDS, KEYS = np.array([0, 1, 3], np.int32), np.array([0, 2, 8], np.int32)
PARTS = np.zeros((2, 1, 3, 4, 8), np.float32)

NO_ARRAYS = {
    "qkv": (flash_attn.flash_attn_qkvpacked_func, (None,), {}),
    "kv": (flash_attn.flash_attn_kvpacked_func, (Q, [1.0]), {}),
    "q": (flash_attn.flash_attn_with_kvcache, ([1.0], K, V), {"cache_seqlens": 3}),
    "k_cache": (flash_attn.flash_attn_with_kvcache, (Q, None, V), {}),
    "v_cache": (flash_attn.flash_attn_with_kvcache, (Q, K, None), {}),
    "qv": (flash_attn.flash_attn_with_kvcache, (Q, K, V), {"qv": [1.0]}),
    "block_table": (flash_attn.flash_attn_with_kvcache, (Q, K, V), {"block_table": [[0]], "cache_batch_idx": TABLE[0]}),
    "cache_batch_idx": (flash_attn.flash_attn_with_kvcache, (Q, K, V), {"block_table": TABLE, "cache_batch_idx": [0]}),
    "out_partial": (flash_attn.flash_attn_combine, ([1.0], PARTS), {}),
    "out": (flash_attn.flash_attn_combine, (PARTS, PARTS[..., 0]), {"out": 3}),
    "cache_seqlens": (flash_attn.get_scheduler_metadata, (2, 1, 8, 4, 2, 8, None), {}),
}


@pytest.mark.parametrize("name", NO_ARRAYS)
def test_what_is_no_array(name: str) -> None:
    function, args, options = NO_ARRAYS[name]
    with pytest.raises(
        TypeError, match=rf"^{name} must be an array, not (None|list \(\[1\.0\]\)|list of 1 elements|list \(\[0\]\)|int \(3\))$"
    ):
        function(*args, **options)


def test_dropout_is_not_none() -> None:
    with pytest.raises(TypeError, match="dropout_p must be a number, not None"):
        flash_attn.flash_attn_func(Q, K, V, None)


def converters() -> list[Any]:
    torch = pytest.importorskip("torch")
    return [np.asarray, torch.from_numpy]


def cached(convert: Any, **options: Any) -> Any:
    q, k, v = (convert(x) for x in (Q.reshape(6, 4, 8)[:3], K, V))
    return flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=4, cu_seqlens_q=convert(ENDS), **options)


def paged(convert: Any, **options: Any) -> Any:
    q, k, v, ends, keys, table = (convert(x) for x in (Q.reshape(6, 4, 8)[:3], K, V, ENDS, KEYS, TABLE))
    options = {"max_seqlen_q": None, "max_seqlen_k": None} | options
    return flash_attn.flash_attn_varlen_func(q, k, v, ends, keys, block_table=table, **options)


@pytest.mark.parametrize(
    ("call", "name", "longest", "sequence"),
    [(cached, "max_seqlen_q", 2, 1), (paged, "max_seqlen_q", 2, 1), (paged, "max_seqlen_k", 6, 1)],
)
def test_bounds_of_lengths(call: Any, name: str, longest: int, sequence: int) -> None:
    """flash-attn computes no rows past max_seqlen_q. On the host, where the lengths are known, such a call is refused."""
    for convert in converters():
        wanted = call(convert)
        for good in (None, 0, longest, 10**6):
            np.testing.assert_array_equal(call(convert, **{name: good}), wanted)
        text = rf"^{name} is {longest - 1}; it must be at least every length \(sequence {sequence} has {longest}\)$"
        with pytest.raises(libflash.InvalidError, match=text):
            call(convert, **{name: longest - 1})
        with pytest.raises(libflash.InvalidError, match=f"{name} is -1; it must be positive"):
            call(convert, **{name: -1})
        with pytest.raises(TypeError, match=rf"{name} must be an integer, not str \('3'\)"):
            call(convert, **{name: "3"})


def test_bound_of_rows_that_are_not_packed() -> None:
    with pytest.raises(libflash.InvalidError, match=r"max_seqlen_q is 2; .* q has 3 rows of each sequence"):
        flash_attn.flash_attn_with_kvcache(Q, K, V, cache_seqlens=4, max_seqlen_q=2)
    flash_attn.flash_attn_with_kvcache(Q, K, V, cache_seqlens=4, max_seqlen_q=3)
