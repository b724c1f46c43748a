"""libflash.torch.decode on shards of the keys, and with the hint of shared keys: eager, as an operator, in compiled graphs."""

from __future__ import annotations

import re
from typing import Any

import pytest

import libflash

torch = pytest.importorskip("torch")

import libflash.torch  # noqa: E402

COUNT, KEYS = 3, 4
LENGTHS = torch.tensor([29, 40], dtype=torch.int32)


def problem(dtype: Any = torch.bfloat16) -> tuple[Any, list[list[Any]], list[Any]]:
    """q, the caches of each shard, and the whole caches."""
    generator = torch.Generator().manual_seed(1)
    q, *whole = (torch.randn(shape, generator=generator).to(dtype) for shape in ((2, 3, 4, 16), (2, 48, 2, 16), (2, 48, 2, 16)))
    here = [torch.arange(48)[torch.arange(48) // KEYS % COUNT == i] for i in range(COUNT)]
    return q, [[x[:, rows].contiguous() for x in whole] for rows in here], whole


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_merged_shards_are_the_whole(dtype: Any) -> None:
    q, parts, whole = problem(dtype)

    def merged(q: Any, parts: Any) -> Any:
        results = [
            libflash.torch.decode(q, *part, cache_seqlens=LENGTHS, return_lse=True, shard=(COUNT, i, KEYS))
            for i, part in enumerate(parts)
        ]
        return results, libflash.torch.merge([x[0] for x in results], [x[1] for x in results])

    results, (out, lse) = merged(q, parts)
    assert all(x.dtype == (torch.float64 if dtype == torch.float64 else torch.float32) for x, _ in results)
    wanted = libflash.decode(q.double(), *(x.double() for x in whole), cache_seqlens=LENGTHS, return_lse=True)
    torch.testing.assert_close((out.double(), lse.double()), wanted, rtol=1e-4, atol=1e-4)
    compiled, total = torch.compile(merged, fullgraph=True, backend="aot_eager")(q, parts)
    assert all(torch.equal(*pair) for x, y in zip(compiled, results, strict=True) for pair in zip(x, y, strict=True))
    assert torch.equal(total[0], out)


def test_operator() -> None:
    q, parts, _ = problem()
    options = {"cache_seqlens": LENGTHS, "shard": [COUNT, 1, KEYS]}
    torch.library.opcheck(torch.ops.libflash.decode.default, (q, *parts[1]), options)
    options |= {"shared_groups": torch.tensor([0, 1], dtype=torch.int32), "shared_lens": torch.tensor([3], dtype=torch.int32)}
    torch.library.opcheck(torch.ops.libflash.decode.default, (q, *parts[1]), options)


def test_packed_rows() -> None:
    q, parts, _ = problem()
    options = {"cu_seqlens_q": torch.tensor([0, 2, 5], dtype=torch.int32), "cache_seqlens": LENGTHS, "shard": (COUNT, 1, KEYS)}
    rows = q.reshape(6, 4, 16)
    out = libflash.torch.decode(rows, *parts[1], **options)
    assert out.dtype == torch.float32
    assert not out[5].any()
    wanted = libflash.decode(rows[:5], *parts[1], **options)
    assert torch.equal(out[:5], wanted)


def test_out_of_another_type() -> None:
    q, parts, whole = problem()
    out = torch.empty(2, 3, 4, 16)
    libflash.torch.decode(q, *whole, cache_seqlens=LENGTHS, out=out)
    assert torch.equal(out.bfloat16(), libflash.decode(q, *whole, cache_seqlens=LENGTHS))

    def step(q: Any, caches: Any, out: Any, **options: Any) -> Any:
        return libflash.torch.decode(q, *caches, cache_seqlens=LENGTHS, out=out, **options)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"out is torch\.float32"):
        compiled(q, whole, out)
    wanted = libflash.decode(q, *parts[0], cache_seqlens=LENGTHS, shard=(COUNT, 0, KEYS))
    assert torch.equal(compiled(q, parts[0], out, shard=(COUNT, 0, KEYS)), wanted)


def test_the_hint() -> None:
    q, _, whole = problem()
    options = {"cache_batch_idx": torch.tensor([1, 1], dtype=torch.int32), "cache_seqlens": LENGTHS}
    hint = {"shared_groups": torch.tensor([0, 2], dtype=torch.int32), "shared_lens": torch.tensor([29], dtype=torch.int32)}
    wanted = libflash.decode(q, *whole, **options)
    assert torch.equal(libflash.torch.decode(q, *whole, **options, **hint), wanted)
    compiled = torch.compile(lambda q: libflash.torch.decode(q, *whole, **options, **hint), backend="aot_eager")
    assert torch.equal(compiled(q), wanted)
    with pytest.raises(libflash.InvalidError, match="shared_lens: must be at most cache_seqlens"):
        libflash.torch.decode(q, *whole, **options, **hint | {"shared_lens": torch.tensor([30], dtype=torch.int32)})


@pytest.mark.parametrize("shard", [None, 2, (2, 0)])
def test_a_shard_is_a_triple(shard: Any) -> None:
    q, cache = torch.zeros(1, 1, 2, 8), torch.zeros(1, 4, 2, 8)
    with pytest.raises(TypeError, match=rf"shard must be a triple \(count, index, keys\), not {re.escape(repr(shard))}"):
        libflash.torch.decode(q, cache, cache, shard=shard)
