"""libflash.torch.decode, and merge with its gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import libflash

torch = pytest.importorskip("torch")

import libflash.torch  # noqa: E402
from torch_problem import qkv, tensors  # noqa: E402


def test_decode_is_that_of_the_library() -> None:
    q, k_cache, v_cache, k, v = tensors((2, 3, 4, 8), (2, 9, 2, 8), (2, 9, 2, 5), (2, 3, 2, 8), (2, 3, 2, 5), grad=False)
    cos, sin = tensors((9, 2), (9, 2), grad=False)
    options = {
        "cache_seqlens": torch.tensor([4, 6], dtype=torch.int32),
        "rotary_cos": cos,
        "rotary_sin": sin,
        "rotary_interleaved": False,
        "window_size": (4, 0),
        "softmax_scale": 0.3,
        "softcap": 2.0,
        "num_splits": 2,
        "learnable_sink": torch.zeros(4),
    }
    mine, other = (k_cache.clone(), v_cache.clone()), (k_cache.clone(), v_cache.clone())
    got = libflash.torch.decode(q, *mine, k=k, v=v, return_lse=True, **options)
    wanted = libflash.decode(q, *other, k=k, v=v, return_lse=True, **options)
    assert all(map(torch.equal, (*got, *mine), (*wanted, *other)))
    with pytest.raises(libflash.InvalidError, match="k and v"):
        libflash.torch.decode(q, *mine, k=k)


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "sbhd", "packed"])
def test_merge_gradcheck(layout: str) -> None:
    shape = {"bshd": (2, 3, 4, 5), "bhsd": (2, 4, 3, 5), "sbhd": (3, 2, 4, 5), "packed": (3, 4, 5)}[layout]
    outs = tensors(shape, shape, shape, dtype=torch.float64)
    rows = (4, 3) if layout == "packed" else (2, 4, 3)
    lses = tensors(rows, rows, rows, dtype=torch.float64)

    def function(*parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return libflash.torch.merge(parts[:3], parts[3:], layout="bshd" if layout == "packed" else layout)

    assert torch.autograd.gradcheck(function, (*outs, *lses))


def test_merge_of_parts_is_the_whole() -> None:
    q, k, v = qkv(torch.float64)
    parts = [libflash.torch.attention(q, k[:, i : i + 3], v[:, i : i + 3], return_lse=True) for i in (0, 3, 6)]
    out, lse = libflash.torch.merge(*zip(*parts, strict=True))
    whole, whole_lse = libflash.torch.attention(q, k, v, return_lse=True)
    torch.testing.assert_close((out, lse), (whole, whole_lse), rtol=1e-12, atol=1e-12)
    got = torch.autograd.grad(out.square().sum() + lse.sum(), (q, k, v))
    wanted = torch.autograd.grad(whole.square().sum() + whole_lse.sum(), (q, k, v))
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


def test_merge_ignores_empty_parts_whatever_they_hold() -> None:
    out, lse = torch.randn(1, 2, 3, 4), torch.randn(1, 3, 2)
    garbage = torch.full_like(out, torch.nan).requires_grad_()
    nothing = torch.full_like(lse, -torch.inf).requires_grad_()
    part = out.clone().requires_grad_()
    merged, total = libflash.torch.merge([part, garbage], [lse, nothing])
    assert torch.equal(merged, out)
    assert torch.equal(total, lse)
    gradients = torch.autograd.grad(merged.sum() + total.sum(), (part, garbage, nothing))
    assert torch.equal(gradients[0], torch.ones_like(out))
    assert not gradients[1].any()
    assert not gradients[2].any()
    empty = libflash.torch.merge([garbage, garbage], [nothing, nothing])
    assert not any(gradient.any() for gradient in torch.autograd.grad(empty[0].sum(), (garbage, nothing)))


def test_autocast_casts_decode_but_not_a_cache_that_is_written() -> None:
    q, k_cache, v_cache, k, v = tensors((2, 1, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8), (2, 1, 2, 8), (2, 1, 2, 8), grad=False)
    lengths = torch.tensor([4, 6], dtype=torch.int32)
    low = [x.bfloat16() for x in (q, k_cache, v_cache, k, v)]
    for call in (libflash.torch.decode, libflash.decode):
        with torch.autocast("cpu", torch.bfloat16):
            out = call(q, k_cache, v_cache, cache_seqlens=lengths)
            assert torch.equal(out, call(*low[:3], cache_seqlens=lengths))
            assert out.dtype == torch.bfloat16
            mine, other = [x.clone() for x in low[1:3]], [x.clone() for x in low[1:3]]
            out = call(q, *mine, k=k, v=v, cache_seqlens=lengths)
            assert torch.equal(out, call(low[0], *other, k=low[3], v=low[4], cache_seqlens=lengths))
            assert torch.equal(mine[0], other[0])
            cache = k_cache.clone(), v_cache.clone()
            assert call(low[0], *cache, k=low[3], v=low[4], cache_seqlens=lengths).dtype == torch.float32
            assert not torch.equal(cache[0], k_cache)


def test_autocast_refuses_written_caches_of_several_types() -> None:
    q, k_cache, part, k, new = tensors((1, 1, 2, 12), (1, 5, 1, 8), (1, 5, 1, 4), (1, 1, 1, 8), (1, 1, 1, 4), grad=False)
    options = dict(k=k, cache_seqlens=torch.tensor([3], dtype=torch.int32))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(libflash.InvalidError, match="k_rope_cache: dtype"):
        libflash.torch.decode(q, k_cache.bfloat16(), head_dim_v=8, k_rope_cache=part, k_rope=new, **options)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(libflash.InvalidError, match="v_cache: dtype"):
        libflash.torch.decode(q[..., :8], k_cache.bfloat16(), part, v=new, **options)


@pytest.mark.parametrize("call", [libflash.decode, libflash.torch.decode])
@pytest.mark.parametrize("name", ["rotary_cos", "rotary_sin"])
def test_decode_refuses_gradients_of_rotary_tables(call: Callable[..., object], name: str) -> None:
    q, cache = tensors((1, 1, 2, 8), (1, 5, 2, 8), grad=False)
    tables = dict.fromkeys(("rotary_cos", "rotary_sin"), torch.ones(8, 2)) | {name: torch.ones(8, 2, requires_grad=True)}
    with pytest.raises(libflash.UnsupportedError, match=f"decode has no gradient, and {name} requires one"):
        call(q, cache, cache, **tables)


def test_appending_is_noticed_by_autograd() -> None:
    q, k_cache, v_cache, k, v = tensors((2, 1, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8), (2, 1, 2, 8), (2, 1, 2, 8), grad=False)
    lengths = torch.tensor([4, 6], dtype=torch.int32)
    for call in (libflash.torch.decode, libflash.decode):
        for cache in (k_cache, v_cache):
            product = cache * torch.ones((), requires_grad=True)
            call(q, k_cache, v_cache, k=k, v=v, cache_seqlens=lengths)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.sum().backward()
        before = k_cache._version
        call(q, k_cache, v_cache, cache_seqlens=lengths)
        assert k_cache._version == before


def test_out_and_lse_are_written() -> None:
    q, k_cache, v_cache = qkv(grad=False)
    wanted, wanted_lse = libflash.decode(q, k_cache, v_cache, return_lse=True)
    out, lse = torch.empty_like(wanted), torch.empty_like(wanted_lse)
    got = libflash.torch.decode(q, k_cache, v_cache, out=out, lse=lse, return_lse=True)
    assert got[0] is out
    assert got[1] is lse
    assert torch.equal(out, wanted)
    assert torch.equal(lse, wanted_lse)


def test_merge_takes_parts_of_several_types_under_autocast() -> None:
    q, k, v = qkv(grad=False)
    whole = libflash.attention(q, k, v)
    with torch.autocast("cpu", torch.bfloat16):
        parts = [libflash.torch.attention(q, k[:, i : i + 5], v[:, i : i + 5], return_lse=True) for i in (0, 5)]
        out, lse = libflash.merge(*zip(*parts, strict=True))
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(out.float(), whole, rtol=2e-2, atol=2e-2)


# -- packed rows


def packed_problem() -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    """q with one row more than its sequences have, caches, new rows; and lengths."""
    shapes = (8, 4, 8), (3, 9, 2, 8), (3, 9, 2, 5), (5, 2, 8), (5, 2, 5)
    lengths = {"cu_seqlens_q": [0, 2, 2, 7], "cu_seqlens_new": [0, 2, 2, 5], "cache_seqlens": [4, 9, 6]}
    return tensors(*shapes, grad=False), {name: torch.tensor(x, dtype=torch.int32) for name, x in lengths.items()}


def test_packed_decode_is_that_of_the_library() -> None:
    (q, k_cache, v_cache, k, v), lengths = packed_problem()
    mine, other = (k_cache.clone(), v_cache.clone()), (k_cache.clone(), v_cache.clone())
    out, lse = libflash.torch.decode(q, *mine, k=k, v=v, return_lse=True, **lengths)
    wanted, wanted_lse = libflash.decode(q, *other, k=k, v=v, return_lse=True, **lengths)
    assert all(map(torch.equal, (out[:7], lse[:, :7], *mine), (wanted[:7], wanted_lse[:, :7], *other)))
    assert not out[7:].any()
    assert (lse[:, 7:] == -torch.inf).all()


@pytest.mark.parametrize("append", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_packed_decode_compiles(append: bool, dynamic: bool) -> None:
    (q, *caches, k, v), lengths = packed_problem()
    new = {"k": k, "v": v} if append else {}
    if not append:
        del lengths["cu_seqlens_new"]

    def step(q: torch.Tensor, caches: list[torch.Tensor], lengths: dict[str, torch.Tensor]) -> torch.Tensor:
        return libflash.torch.decode(q * 2, *caches, **new, **lengths)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for starts in ([0, 2, 2, 7], [0, 0, 1, 2]):
        lengths["cu_seqlens_q"] = torch.tensor(starts, dtype=torch.int32)
        mine, other = ([x.clone() for x in caches] for _ in range(2))
        got, wanted = compiled(q, mine, lengths), step(q, other, lengths)
        assert all(map(torch.equal, (got, *mine), (wanted, *other)))


def test_compiled_packed_decode_leaves_other_rows_of_out_as_they_are() -> None:
    (q, *caches, _, _), lengths = packed_problem()
    starts = lengths["cu_seqlens_q"]

    def step(out: torch.Tensor, lse: torch.Tensor) -> None:
        libflash.torch.decode(q, *caches, cu_seqlens_q=starts, out=out, lse=lse)

    mine, other = ([torch.full((8, 4, 5), 3.0), torch.full((4, 8), 3.0)] for _ in range(2))
    torch.compile(step, fullgraph=True, backend="aot_eager")(*mine)
    step(*other)
    assert (other[0][7] == 3).all()
    assert all(map(torch.equal, mine, other))


def test_packed_decode_without_data() -> None:
    (q, *caches, k, v), lengths = packed_problem()
    meta = [x.to("meta") for x in (q, *caches, k, v)]
    starts = {name: x.to("meta") for name, x in lengths.items()}
    out, lse = libflash.torch.decode(*meta[:3], k=meta[3], v=meta[4], return_lse=True, **starts)
    assert (out.shape, lse.shape) == ((8, 4, 5), (4, 8))
    with pytest.raises(libflash.InvalidError, match=r"cache_seqlens: shape must be \(batch,\) = \(3,\)"):
        libflash.torch.decode(*meta[:3], cu_seqlens_q=starts["cu_seqlens_q"], cache_seqlens=starts["cache_seqlens"][:2])
    with pytest.raises(libflash.InvalidError, match="q needs 3"):
        libflash.torch.decode(*meta[:3])


def test_packed_decode_under_vmap() -> None:
    (q, *caches, _, _), lengths = packed_problem()
    queries = torch.stack([q, q.flip(0)])
    starts = lengths["cu_seqlens_q"]

    def one(q: torch.Tensor) -> torch.Tensor:
        return libflash.torch.decode(q, *caches, cu_seqlens_q=starts)

    assert torch.equal(torch.vmap(one)(queries), torch.stack([one(q) for q in queries]))


def test_positions_in_any_order_of_axes_under_vmap() -> None:
    """The slices of a mapped array of integers are dense for the library, whichever axis is mapped."""
    q, k_cache, v_cache = (torch.randn(2, n, 2, 8) for n in (3, 9, 9))
    positions = torch.arange(12, dtype=torch.int32).reshape(2, 2, 3)  # (batch, mapped, row)

    def one(rows: torch.Tensor) -> torch.Tensor:
        return libflash.torch.decode(q, k_cache, v_cache, q_positions=rows, window_size=(2, 0))

    wanted = [one(rows.contiguous()) for rows in positions.unbind(1)]
    assert torch.equal(torch.vmap(one, in_dims=1)(positions), torch.stack(wanted))


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated:DeprecationWarning")
def test_packed_decode_with_long_lengths_and_in_a_trace() -> None:
    """int64 lengths on the CPU, and torch.jit.trace."""
    (q, *caches, _, _), lengths = packed_problem()
    starts = lengths["cu_seqlens_q"]

    def step(q: torch.Tensor) -> torch.Tensor:
        return libflash.torch.decode(q, *caches, cu_seqlens_q=starts.long())

    wanted = libflash.torch.decode(q, *caches, cu_seqlens_q=starts)
    assert torch.equal(step(q), wanted)
    assert torch.equal(torch.jit.trace(step, (torch.zeros_like(q),))(q), wanted)


@pytest.mark.parametrize("channels", [-1, 0, 17, 2**40])
def test_head_dim_v_is_refused_before_a_result_is_made(channels: int) -> None:
    q, cache, cu = torch.randn(5, 4, 16), torch.randn(2, 8, 2, 16), torch.tensor([0, 2, 5], dtype=torch.int32)
    with pytest.raises(libflash.InvalidError, match=rf"head_dim_v is {channels}; it must be at least 1 and at most"):
        libflash.torch.decode(q, cache, None, head_dim_v=channels, cu_seqlens_q=cu)


def test_a_cache_without_a_head_is_named() -> None:
    q, cache, rope = torch.randn(2, 1, 4, 40), torch.randn(8, 4, 32), torch.randn(8, 4, 8)
    with pytest.raises(libflash.InvalidError, match="q and k_cache have 4 and 3 dimensions"):
        libflash.torch.decode(q, cache, None, k_rope_cache=rope, head_dim_v=32)
