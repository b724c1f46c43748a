"""PyTorch: cache_write eager, compiled and as an operator; scales that are numbers."""

from __future__ import annotations

from typing import Any

import pytest

import libflash

torch = pytest.importorskip("torch")
import libflash.flash_attn  # noqa: E402
import libflash.torch  # noqa: E402

SLOTS = [9, -1, 0, 4]


def problem(rows: bool) -> dict[str, Any]:
    torch.manual_seed(3)
    made = {"k": torch.randn(4, 2, 8), "v": torch.randn(4, 2, 8), "slots": torch.tensor(SLOTS)}
    for name in ("k_cache", "v_cache"):
        made[name] = torch.randint(-9, 9, (3, 4, 2, 8), dtype=torch.int8)
    for name in ("k_scale", "v_scale"):
        made[name] = torch.rand(3, 4, 2) if rows else torch.rand(2)
    return made


def copied(x: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() for name, value in x.items()}


@pytest.mark.parametrize("rows", [True, False], ids=["rows", "heads"])
def test_compiled_equals_eager(rows: bool) -> None:
    x = problem(rows)
    eager, compiled = copied(x), copied(x)
    libflash.cache_write(**eager)
    torch.compile(lambda x: libflash.torch.cache_write(**x), fullgraph=True, backend="aot_eager")(compiled)
    for name, value in eager.items():
        assert torch.equal(compiled[name], value), name
    assert not torch.equal(eager["k_cache"], x["k_cache"])


def test_rotated_rope_parts_compile() -> None:
    x = problem(True) | {"k_rope": torch.randn(4, 2, 6), "k_rope_cache": torch.zeros(3, 4, 2, 6)}
    x |= {"rotary_cos": torch.randn(9, 2), "rotary_sin": torch.randn(9, 2), "positions": torch.tensor([8, 0, 3, 5]).int()}
    eager, compiled = copied(x), copied(x)
    libflash.cache_write(**eager)
    torch.compile(lambda x: libflash.torch.cache_write(**x), fullgraph=True, backend="aot_eager")(compiled)
    for name, value in eager.items():
        assert torch.equal(compiled[name], value), name
    assert not torch.equal(eager["k_rope_cache"].flatten(0, 1)[9, :, :4], x["k_rope"][0, :, :4])
    assert torch.equal(eager["k_rope_cache"].flatten(0, 1)[9, :, 4:], x["k_rope"][0, :, 4:])


def test_a_graph_writes_before_it_reads() -> None:
    """Functionalization orders the write and a decode of the same cache."""

    def step(x: dict[str, Any], q: Any, out: bool) -> Any:
        libflash.torch.cache_write(**x)
        lengths = torch.tensor([3, 2, 4], dtype=torch.int32)
        return libflash.torch.decode(
            q, x["k_cache"], x["v_cache"], k_scale=x["k_scale"], v_scale=x["v_scale"], cache_seqlens=lengths
        )

    q = torch.randn(3, 1, 2, 8)
    x = problem(True)
    wanted = step(copied(x), q, True)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(copied(x), q, True)
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("rows", [True, False], ids=["rows", "heads"])
def test_versions(rows: bool) -> None:
    x = problem(rows)
    for function in (libflash.cache_write, libflash.torch.cache_write):
        before = {name: value._version for name, value in x.items()}
        function(**x)
        changed = {name for name, value in x.items() if value._version != before[name]}
        assert changed == {"k_cache", "v_cache"} | ({"k_scale", "v_scale"} if rows else set())


@pytest.mark.parametrize("rows", [True, False], ids=["rows", "heads"])
def test_operator(rows: bool) -> None:
    x = problem(rows)
    parts = (x["k_scale"], x["v_scale"], None) if rows else (None, None, None)
    options = {} if rows else {"k_scale": x["k_scale"], "v_scale": x["v_scale"]}
    arguments = (x["k"], x["v"], x["k_cache"], x["v_cache"], x["slots"], *parts)
    torch.library.opcheck(torch.ops.libflash.cache_write.default, arguments, options)


def test_gradients_are_refused() -> None:
    x = problem(False)
    x["k"].requires_grad_()
    for function in (libflash.cache_write, libflash.torch.cache_write):
        with pytest.raises(libflash.UnsupportedError, match="cache_write has no gradient, and k requires one"):
            function(**x)
    with torch.no_grad():
        libflash.cache_write(**x)


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
def test_caches_of_bytes(dtype: str) -> None:
    """The table for serving engines (tests/examples/README.md): a view as float8 is cache_dtype, for writing and reading."""
    view = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[dtype]
    given, wanted = (torch.zeros(2, 3, 4, 2, 8, dtype=torch.uint8) for _ in range(2))
    rows, scales = torch.randn(4, 2, 8), {"k_scale": torch.tensor(0.5), "v_scale": torch.tensor(0.25)}
    viewed, table = given.view(view).unbind(0), torch.tensor([[2, 1]], dtype=torch.int32)
    libflash.cache_write(rows, rows, *viewed, torch.tensor(SLOTS), **scales)
    libflash.cache_write(rows, rows, *wanted.unbind(0), torch.tensor(SLOTS), **scales, cache_dtype=dtype)
    assert torch.equal(given, wanted)
    assert given[0].flatten(0, 1).any(-1).any(-1).nonzero().flatten().tolist() == sorted(set(SLOTS) - {-1})
    q, options = torch.randn(1, 1, 4, 8), {"block_table": table, "cache_seqlens": torch.tensor([6], dtype=torch.int32)}
    out = libflash.decode(q, *viewed, **options, **scales)
    assert torch.equal(libflash.decode(q, *wanted.unbind(0), **options, **scales, cache_dtype=dtype), out)
    for call in (libflash.decode, libflash.flash_attn.flash_attn_with_kvcache):
        with pytest.raises(libflash.InvalidError, match="k_cache has dtype uint8"):
            call(q, *wanted.unbind(0), **options)


def test_rows_of_padding_are_not_written() -> None:
    """The same table: rows without a sequence in an append, and rows without a slot, which must be left out."""
    caches = torch.zeros(2, 3, 4, 2, 8)
    rows, ends = torch.randn(4, 2, 8), torch.tensor([0, 2], dtype=torch.int32)
    lengths, table = torch.tensor([3], dtype=torch.int32), torch.tensor([[2, 1]], dtype=torch.int32)
    libflash.decode(torch.randn(4, 4, 8), *caches.unbind(0), k=rows, v=rows, cu_seqlens_q=ends, cache_seqlens=lengths,
                    block_table=table)  # fmt: skip
    for cache in caches.flatten(1, 2):
        assert cache.any(-1).any(-1).nonzero().flatten().tolist() == [4, 11]
        assert torch.equal(cache[[11, 4]], rows[:2])
    slots = torch.tensor([0, 7])
    with pytest.raises(libflash.InvalidError, match=r"^slots: shape must be \(rows of k,\) = \(4,\) \(it is \(2,\)\)$"):
        libflash.cache_write(rows, rows, *caches.unbind(0), slots)
    libflash.cache_write(rows[: len(slots)], rows[: len(slots)], *caches.unbind(0), slots)
    assert torch.equal(caches[1].flatten(0, 1)[slots], rows[:2])


def test_positions_without_rotary_tables_are_refused() -> None:
    x = problem(False)
    positions = torch.arange(4, dtype=torch.int32)
    for run in (libflash.torch.cache_write, torch.compile(libflash.torch.cache_write, backend="aot_eager")):
        with pytest.raises(libflash.InvalidError, match=r"^positions: needs rotary_cos and rotary_sin: only"):
            run(**copied(x), positions=positions)


def test_vmap_needs_mapped_caches() -> None:
    x = problem(False)
    with pytest.raises(libflash.UnsupportedError, match="k_cache is written to"):
        torch.vmap(lambda k: libflash.torch.cache_write(**{**x, "k": k}))(torch.randn(2, 4, 2, 8))


def test_scales_that_are_numbers() -> None:
    x = problem(False)
    with_arrays = copied(x) | {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([0.25])}
    with_numbers = copied(x) | {"k_scale": 0.5, "v_scale": 0.25}
    libflash.cache_write(**with_arrays)
    libflash.torch.cache_write(**with_numbers)
    assert torch.equal(with_arrays["k_cache"], with_numbers["k_cache"])
    assert torch.equal(with_arrays["v_cache"], with_numbers["v_cache"])
    q = torch.randn(3, 1, 2, 8)
    wanted = libflash.decode(q, *(with_arrays[name] for name in ("k_cache", "v_cache")), k_scale=with_arrays["k_scale"],
                             v_scale=with_arrays["v_scale"])  # fmt: skip

    def step(q: Any, k_cache: Any, v_cache: Any) -> Any:
        return libflash.torch.decode(q, k_cache, v_cache, k_scale=0.5, v_scale=0.25)

    caches = (with_arrays["k_cache"], with_arrays["v_cache"])
    assert torch.equal(step(q, *caches), wanted)
    assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(q, *caches), wanted)
    assert torch.equal(libflash.decode(q, *caches, k_scale=0.5, v_scale=0.25), wanted)
