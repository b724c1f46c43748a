"""PyTorch: decode over caches of 8 bits, with scales of rows that an append writes, eager and compiled."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import libflash

torch = pytest.importorskip("torch")
import libflash.torch  # noqa: E402

CODES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}
every_code = pytest.mark.parametrize("code", CODES)


def problem(code: str) -> dict[str, Any]:
    torch.manual_seed(7)
    made = {name: torch.randn(2, 40, 2, 32).to(CODES[code]) for name in ("k_cache", "v_cache")}
    made |= {name: torch.rand(2, 40, 2) + 0.5 for name in ("k_scale", "v_scale")}
    made |= {name: torch.randn(2, 3, 2, 32, dtype=torch.bfloat16) for name in ("k", "v")}
    return made | {"q": torch.randn(2, 3, 4, 32, dtype=torch.bfloat16), "cache_seqlens": torch.tensor([20, 5], dtype=torch.int32)}


def copied(x: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() for name, value in x.items()}


def same(got: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return all(torch.equal(got[name].view(torch.uint8), wanted[name].view(torch.uint8)) for name in wanted)


@every_code
@pytest.mark.parametrize("append", [False, True])
def test_compiled_equals_eager(code: str, append: bool) -> None:
    x = problem(code)
    if not append:
        del x["k"], x["v"]
    eager, compiled = copied(x), copied(x)
    wanted = libflash.decode(**eager, return_lse=True)
    function = torch.compile(lambda x: libflash.torch.decode(**x, return_lse=True), fullgraph=True, backend="aot_eager")
    got = function(compiled)
    assert torch.equal(got[0], wanted[0])
    assert torch.equal(got[1], wanted[1])
    assert same(compiled, eager)
    assert same(eager, x) != append


def test_an_append_counts_versions_of_what_it_writes() -> None:
    x = problem("int8")
    before = {name: value._version for name, value in x.items()}
    libflash.decode(**x)
    assert {name for name, value in x.items() if value._version != before[name]} == {"k_cache", "v_cache", "k_scale", "v_scale"}
    x |= {"k_scale": torch.ones(1), "v_scale": torch.ones(2)}
    before = {name: value._version for name, value in x.items()}
    libflash.torch.decode(**x)
    assert {name for name, value in x.items() if value._version != before[name]} == {"k_cache", "v_cache"}


@every_code
def test_autocast_does_not_cast_codes(code: str) -> None:
    x = problem(code)
    wanted = libflash.decode(**copied(x))
    with torch.autocast("cpu", torch.bfloat16):
        got = libflash.torch.decode(**copied(x) | {"q": x["q"].float()})
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("scale", [0.5, np.float32(0.5), torch.tensor(0.5)], ids=lambda x: type(x).__name__)
def test_one_scale_for_all(scale: Any) -> None:
    """As engines keep it: a tensor without dimensions. Eager, compiled, under vmap, and in cache_write."""
    x = {name: value for name, value in problem("e4m3").items() if name not in ("k", "v", "k_scale", "v_scale")}
    given, wanted = ({"k_scale": s, "v_scale": s} for s in (scale, torch.tensor([0.5])))

    def call(x: dict[str, Any], scales: dict[str, Any]) -> torch.Tensor:
        return libflash.torch.decode(**x, **scales)

    one = call(x, wanted)
    assert torch.equal(call(x, given), one)
    assert torch.equal(libflash.decode(**x, **given), one)
    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(x, given), one)
    rest = {name: value for name, value in x.items() if name != "q"}
    mapped = torch.vmap(lambda q: libflash.torch.decode(q, **rest, **given))(x["q"][None])
    assert torch.equal(mapped[0], one)
    rows, slots = torch.randn(2, 2, 32, dtype=torch.bfloat16), torch.tensor([3, 5])
    caches = [[x[name].clone() for name in ("k_cache", "v_cache")] for _ in range(2)]
    libflash.torch.cache_write(rows, rows, *caches[0], slots, **given)
    libflash.torch.cache_write(rows, rows, *caches[1], slots, **wanted)
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(*caches, strict=True))


@pytest.mark.parametrize("scale", [True, np.bool_(True)], ids=repr)
def test_what_is_no_scale(scale: Any) -> None:
    with pytest.raises(TypeError, match=r"k_scale must be .*, not .*bool"):
        libflash.torch.decode(**problem("e4m3") | {"k_scale": scale})


@pytest.mark.parametrize("rotates", [False, True])
def test_values_that_are_channels_of_keys(rotates: bool) -> None:
    torch.manual_seed(8)
    cache, rope = torch.randn(2, 40, 1, 64).to(torch.float8_e4m3fn), torch.randn(2, 40, 1, 16, dtype=torch.bfloat16)
    new, new_rope = torch.randn(2, 2, 1, 64, dtype=torch.bfloat16), torch.randn(2, 2, 1, 16, dtype=torch.bfloat16)
    q = torch.randn(2, 2, 8, 80, dtype=torch.bfloat16)
    x = {"q": q, "k_cache": cache, "k_rope_cache": rope, "k_scale": torch.rand(2, 40, 1, 4), "k": new, "k_rope": new_rope}
    x["cache_seqlens"] = torch.tensor([20, 5], dtype=torch.int32)
    if rotates:
        x |= {"rotary_cos": torch.randn(40, 6), "rotary_sin": torch.randn(40, 6)}
    eager, compiled = copied(x), copied(x)
    wanted = libflash.torch.decode(**eager, head_dim_v=48)
    function = torch.compile(lambda x: libflash.torch.decode(**x, head_dim_v=48), fullgraph=True, backend="aot_eager")
    assert torch.equal(function(compiled), wanted)
    assert same(compiled, eager)
    assert wanted.shape == (2, 2, 8, 48)
    if rotates:
        assert not torch.equal(eager["k_rope_cache"][0, 20:22], new_rope[0])
        return
    read = {name: value for name, value in eager.items() if name not in ("k", "k_rope")}
    read["cache_seqlens"] = torch.tensor([22, 7])
    assert torch.equal(function(read), wanted)
    real = (eager["k_cache"].float() * eager["k_scale"].repeat_interleave(16, -1)).bfloat16()
    joined = torch.cat([real, eager["k_rope_cache"]], -1)
    plain = libflash.decode(q, joined, joined[..., :48].contiguous(), cache_seqlens=read["cache_seqlens"])
    torch.testing.assert_close(wanted, plain, rtol=2.0**-5, atol=2.0**-5)


def packed(x: dict[str, Any]) -> dict[str, Any]:
    """Two and three query rows and new rows; the last row belongs to no sequence."""
    rows = {name: value.flatten(0, 1) if name in ("q", "k", "v", "k_rope") else value for name, value in x.items()}
    return rows | {"cu_seqlens_q": torch.tensor([0, 2, 5], dtype=torch.int32)}


@every_code
def test_packed_rows_compile(code: str) -> None:
    x = packed(problem(code))
    eager, compiled = copied(x), copied(x)
    wanted, wanted_lse = libflash.decode(**eager, return_lse=True)
    function = torch.compile(lambda x: libflash.torch.decode(**x, return_lse=True), fullgraph=True, backend="aot_eager")
    out, lse = function(compiled)
    assert torch.equal(out[:5], wanted[:5])
    assert torch.equal(lse[:, :5], wanted_lse[:, :5])
    assert not out[5:].any()
    assert (lse[:, 5:] == -torch.inf).all()
    assert same(compiled, eager)
    assert not same(eager, x)


def test_packed_rows_and_trees_with_values_that_are_channels_of_keys() -> None:
    torch.manual_seed(9)
    x = {"q": torch.randn(2, 3, 8, 80), "k": torch.randn(2, 3, 1, 64), "k_rope": torch.randn(2, 3, 1, 16)}
    x |= {"k_cache": torch.randn(2, 40, 1, 64).to(torch.float8_e4m3fn), "k_rope_cache": torch.randn(2, 40, 1, 16)}
    x |= {"k_scale": torch.rand(2, 40, 1, 4), "cache_seqlens": torch.tensor([20, 5], dtype=torch.int32)}
    x = packed(x) | {"tree_mask": torch.tensor([[1], [3], [1], [3], [5], [0]], dtype=torch.int32)}
    eager, compiled = copied(x), copied(x)
    wanted = libflash.torch.decode(**eager, head_dim_v=48)
    assert wanted.shape == (6, 8, 48)
    assert not wanted[5:].any()
    function = torch.compile(lambda x: libflash.torch.decode(**x, head_dim_v=48), fullgraph=True, backend="aot_eager")
    assert torch.equal(function(compiled), wanted)
    assert same(compiled, eager)
    arrays = {name: value.clone() for name, value in x.items()}
    out = torch.zeros(6, 8, 48)
    libflash.decode(**arrays, head_dim_v=48, out=out)
    assert torch.equal(out, wanted)
    with pytest.raises(libflash.InvalidError, match="head_dim_v"):
        libflash.torch.decode(**x)


@every_code
def test_tensors_equal_arrays(code: str) -> None:
    """int8 of NumPy; float8 as bytes with cache_dtype."""
    x = problem(code)
    wanted = libflash.decode(**copied(x))
    arrays = {name: value.clone() for name, value in x.items()}
    for name in ("k_cache", "v_cache"):
        arrays[name] = arrays[name].view(torch.uint8 if code != "int8" else torch.int8)
    got = libflash.decode(**arrays, **({} if code == "int8" else {"cache_dtype": code}))
    assert torch.equal(got, wanted)


def test_wrong_shapes_are_refused_while_tracing() -> None:
    x = problem("int8") | {"k_scale": torch.ones(3)}
    with torch._subclasses.FakeTensorMode() as mode, pytest.raises(libflash.InvalidError, match="k_scale: shape must be"):
        libflash.torch.decode(**{name: mode.from_tensor(value) for name, value in x.items()})


def test_gradients_are_refused() -> None:
    x = problem("e4m3") | {"k_scale": torch.ones(2, requires_grad=True)}
    with pytest.raises(libflash.UnsupportedError, match="k_scale requires one"):
        libflash.torch.decode(**x)
    with pytest.raises(libflash.UnsupportedError, match="k_scale requires one"):
        libflash.decode(**x)


def test_in_a_fresh_thread() -> None:
    x = problem("int8")
    wanted, found = libflash.decode(**copied(x)), []
    thread = threading.Thread(target=lambda: found.append(libflash.decode(**copied(x))))
    thread.start()
    thread.join()
    assert torch.equal(found[0], wanted)
