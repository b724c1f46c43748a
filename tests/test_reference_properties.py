"""Identities of attention, checked for the reference; and its defined results in edge cases."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from reference import backward, forward
from reference_decode import merge

CLOSE = {"rtol": 1e-11, "atol": 1e-12}


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def qkv(sq: int = 6, sk: int = 9, hq: int = 4, hk: int = 2, d: int = 8) -> tuple[np.ndarray, ...]:
    return normal(2, sq, hq, d), normal(2, sk, hk, d, seed=1), normal(2, sk, hk, d, seed=2)


def same(a: tuple | list, b: tuple | list) -> None:
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x, y, **CLOSE)


def test_permuting_keys_permutes_their_gradients() -> None:
    q, k, v = qkv()
    order = np.random.default_rng(0).permutation(9)
    same(forward(q, k, v), forward(q, k[:, order], v[:, order]))
    dout = normal(2, 6, 4, 8, seed=3)
    plain, permuted = backward(dout, q, k, v), backward(dout, q, k[:, order], v[:, order])
    same([plain.dk[:, order], plain.dv[:, order], plain.dq], [permuted.dk, permuted.dv, permuted.dq])


def test_grouped_heads_are_repeated_key_heads() -> None:
    q, k, v = qkv()
    whole = [np.repeat(x, 2, axis=2) for x in (k, v)]
    same(forward(q, k, v, causal=True), forward(q, *whole, causal=True))
    dout = normal(2, 6, 4, 8, seed=3)
    grouped, repeated = backward(dout, q, k, v), backward(dout, q, *whole)
    same([grouped.dk, grouped.dv], [x.reshape(2, 9, 2, 2, 8).sum(axis=3) for x in (repeated.dk, repeated.dv)])


def test_causal_rows_need_only_their_prefix() -> None:
    q, k, v = qkv(9, 9)
    o, lse = forward(q, k, v, causal=True)
    same((o[:, :4], lse[:, :, :4]), forward(q[:, :4], k[:, :4], v[:, :4], causal=True))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (2, 1)}, {"softcap": 2.0, "causal": True}])
def test_packed_is_each_sequence_alone_and_padded_dense(options: dict) -> None:
    q, k, v = normal(12, 4, 8), normal(14, 2, 8, seed=1), normal(14, 2, 8, seed=2)
    dout, dlse = normal(12, 4, 8, seed=3), normal(4, 12, seed=4)
    bounds_q, bounds_k = [0, 5, 5, 12], [0, 4, 7, 14]
    packed = {"cu_seqlens_q": np.array(bounds_q), "cu_seqlens_k": np.array(bounds_k)}
    o, lse = forward(q, k, v, **packed, **options)
    grad = backward(dout, q, k, v, dlse=dlse, **packed, **options)
    padded = [np.full((3, 8, x.shape[1], 8), 7.0) for x in (q, k, v)]
    for b in range(3):
        rows, keys = slice(*bounds_q[b : b + 2]), slice(*bounds_k[b : b + 2])
        alone = (q[None, rows], k[None, keys], v[None, keys])
        same((o[None, rows], lse[None, :, rows]), forward(*alone, **options))
        one = backward(dout[None, rows], *alone, dlse=dlse[None, :, rows], **options)
        same((grad.dq[None, rows], grad.dk[None, keys], grad.dv[None, keys]), (one.dq, one.dk, one.dv))
        for target, source in zip(padded, alone, strict=True):
            target[b, : source.shape[1]] = source[0]
    used = {"seqused_q": np.diff(bounds_q), "seqused_k": np.diff(bounds_k)}
    dense, dense_lse = forward(*padded, **used, **options)
    for b in range(3):
        n = used["seqused_q"][b]
        same((dense[b, :n], dense_lse[b, :, :n]), (o[bounds_q[b] :][:n], lse[:, bounds_q[b] :][:, :n]))
        assert not dense[b, n:].any()
        assert np.isneginf(dense_lse[b, :, n:]).all()


@pytest.mark.parametrize("cuts", [(0, 9), (0, 4, 9), (0, 1, 1, 5, 9), (0, 0, 9, 9)])
def test_merging_ranges_of_keys_is_one_pass(cuts: tuple[int, ...]) -> None:
    q, k, v = qkv()
    parts = [forward(q, k[:, a:b], v[:, a:b]) for a, b in itertools.pairwise(cuts)]
    same(forward(q, k, v), merge(*(np.array(x) for x in zip(*parts, strict=True))))


def test_windows() -> None:
    q, k, v = qkv(9, 9)
    same(forward(q, k, v, causal=True), forward(q, k, v, window_size=(-1, 0)))
    same(forward(q, k, v), forward(q, k, v, window_size=(9, 9)))
    diagonal, _ = forward(q, k, v, window_size=(0, 0))
    np.testing.assert_array_equal(diagonal, np.repeat(v, 2, axis=2))
    same(forward(q, k, v, window_size=(3, 2)), forward(q, k, v, mask=band(9, 9, 3, 2)))
    q, k, v = qkv(4, 9)
    same(forward(q, k, v, window_size=(3, 2)), forward(q, k, v, mask=band(4, 9, 3, 2, shift=5)))
    same(forward(q, k, v, window_size=(3, 2), causal_align="top_left"), forward(q, k, v, mask=band(4, 9, 3, 2)))


def band(sq: int, sk: int, left: int, right: int, shift: int = 0) -> np.ndarray:
    distance = np.arange(sk)[None, :] - np.arange(sq)[:, None] - shift
    return ((distance >= -left) & (distance <= right))[None, None]


def test_adding_a_vector_to_every_key_shifts_lse() -> None:
    q, k, v = qkv()
    c, dout = normal(8, seed=5), normal(2, 6, 4, 8, seed=3)
    (o, lse), (shifted, shifted_lse) = forward(q, k, v), forward(q, k + c, v)
    same((o, lse + (q @ c).transpose(0, 2, 1) / np.sqrt(8)), (shifted, shifted_lse))
    a, b = backward(dout, q, k, v), backward(dout, q, k + c, v)
    same((a.dq, a.dv), (b.dq, b.dv))


def test_sums() -> None:
    q, k, v = qkv()
    dout = normal(2, 6, 4, 8, seed=3)
    np.testing.assert_allclose(forward(q, k, np.ones_like(v))[0], 1, **CLOSE)
    grad = backward(dout, q, np.ones_like(k), v)
    np.testing.assert_allclose(grad.dq, 0, atol=1e-14)  # rows of ds sum to zero
    np.testing.assert_allclose(grad.dv.sum(axis=1), dout.reshape(2, 6, 2, 2, 8).sum(axis=(1, 3)), **CLOSE)


def test_sink_is_a_key_without_value() -> None:
    q, k, v = qkv(hq=2)
    sink, dout, dlse = np.array([0.3, -1.0]), normal(2, 6, 2, 8, seed=3), normal(2, 2, 6, seed=4)
    more = [np.concatenate([x, np.zeros((2, 1, 2, 8))], axis=1) for x in (k, v)]
    bias = np.zeros((1, 2, 1, 10))
    bias[0, :, 0, -1] = sink
    same(forward(q, k, v, learnable_sink=sink), forward(q, *more, bias=bias))
    as_sink, as_key = backward(dout, q, k, v, dlse=dlse, learnable_sink=sink), backward(dout, q, *more, dlse=dlse, bias=bias)
    same((as_sink.dq, as_sink.dk, as_sink.dsink), (as_key.dq, as_key.dk[:, :-1], as_key.dbias[0, :, 0, -1]))
    same(forward(q, k, v), forward(q, k, v, learnable_sink=np.full(2, -np.inf)))
    high, high_lse = forward(q, k, v, learnable_sink=np.full(2, 2000.0))
    assert abs(high).max() == 0  # the sink has all the weight, nothing overflows
    assert (high_lse == 2000).all()


def test_block_mask_is_its_dense_mask() -> None:
    q, k, v = normal(2, 200, 2, 4), normal(2, 300, 1, 4, seed=1), normal(2, 300, 1, 4, seed=2)
    for shape in ((2, 2, 2, 3), (1, 1, 2, 3), (1, 2, 2, 3), (2, 1, 2, 3)):
        blocks = np.random.default_rng(0).random(shape) < 0.5
        dense = blocks.repeat(128, axis=2).repeat(128, axis=3)[:, :, :200, :300]
        same(forward(q, k, v, block_mask=blocks, causal=True), forward(q, k, v, mask=dense, causal=True))
    same(forward(q, k, v, block_mask=np.ones((1, 1, 2, 3), dtype=bool)), forward(q, k, v))


def test_bias_of_minus_infinity_hides() -> None:
    q, k, v = qkv()
    mask = np.random.default_rng(0).random((2, 4, 6, 9)) < 0.5
    mask[0, 1, 2] = False
    bias = np.where(mask, 0.0, -np.inf)
    same(forward(q, k, v, mask=mask), forward(q, k, v, bias=bias))
    grad = backward(normal(2, 6, 4, 8), q, k, v, bias=bias)
    assert all(np.isfinite(x).all() for x in (grad.dq, grad.dk, grad.dv, grad.dbias))
    assert not grad.dbias[~mask].any()
    v[:, 4] = np.nan
    bias[..., 4] = -np.inf
    assert np.isfinite(forward(q, k, v, bias=bias)[0]).all()  # not even a NaN has an effect


def test_softcap_at_its_ends() -> None:
    q, k, v = qkv()
    same(forward(q, k, v), forward(q, k, v, softcap=1e30))
    uniform = np.repeat(v, 2, axis=2).mean(axis=1, keepdims=True)
    np.testing.assert_allclose(forward(q, k, v, softcap=1e-9)[0], uniform.repeat(6, axis=1), rtol=0, atol=1e-8)


# Defined results in edge cases.


@pytest.mark.parametrize("options", [{"causal": True}, {"mask": np.zeros((1, 1, 1, 1), dtype=bool)}, {"window_size": (1, 0)}])
def test_rows_without_a_key(options: dict) -> None:
    q, k, v = qkv(9, 3)
    sink, dlse = np.arange(4.0), normal(2, 4, 9)
    empty = np.zeros(9, dtype=bool)
    empty[: 9 if "mask" in options else 6] = True
    for extra, bottom in (({}, np.full(4, -np.inf)), ({"learnable_sink": sink}, sink)):
        o, lse = forward(q, k, v, **options, **extra)
        grad = backward(np.ones_like(q), q, k, v, dlse=dlse, **options, **extra)
        assert not o[:, empty].any()
        np.testing.assert_array_equal(lse[:, :, empty], np.broadcast_to(bottom[None, :, None], lse[:, :, empty].shape))
        assert not grad.dq[:, empty].any()
        assert all(np.isfinite(x).all() for x in (grad.dq, grad.dk, grad.dv))
        assert np.isfinite(lse[:, :, ~empty]).all()
    if empty.all():  # lse is the sink itself: its gradient is that of lse
        np.testing.assert_allclose(grad.dsink, dlse.sum(axis=(0, 2)))


@pytest.mark.parametrize(("sq", "sk", "batch", "hq"), [(0, 4, 1, 2), (4, 0, 1, 2), (0, 0, 1, 2), (4, 4, 0, 2), (4, 4, 1, 0)])
def test_empty_dimensions(sq: int, sk: int, batch: int, hq: int) -> None:
    q, k, v = normal(batch, sq, hq, 8), normal(batch, sk, hq, 8), normal(batch, sk, hq, 5)
    o, lse = forward(q, k, v, causal=True)
    grad = backward(normal(batch, sq, hq, 5), q, k, v, causal=True)
    assert (o.shape, lse.shape) == ((batch, sq, hq, 5), (batch, hq, sq))
    assert (grad.dq.shape, grad.dk.shape, grad.dv.shape) == (q.shape, k.shape, v.shape)
    if sk == 0:
        assert not o.any()
        assert np.isneginf(lse).all()
        assert not grad.dq.any()


def finite_everywhere_but(x: np.ndarray, where: np.ndarray) -> None:
    np.testing.assert_array_equal(np.isnan(x), np.broadcast_to(where, x.shape))


def test_nan_in_a_query_stays_in_its_row_and_head() -> None:
    q, k, v = qkv()
    q[1, 2, 3] = np.nan
    o, lse = forward(q, k, v)
    row = np.zeros((2, 6, 4, 1), dtype=bool)
    row[1, 2, 3] = True
    finite_everywhere_but(o, row)
    finite_everywhere_but(lse, row[..., 0].transpose(0, 2, 1))
    grad = backward(np.ones_like(o), q, k, v)
    finite_everywhere_but(grad.dq, row)
    key_head = np.zeros((2, 1, 2, 1), dtype=bool)
    key_head[1, :, 1] = True
    finite_everywhere_but(grad.dk, key_head)


@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_in_a_key_reaches_only_rows_that_see_it(which: str, value: float) -> None:
    q, k, v = qkv(9, 9)
    clean, clean_lse = forward(q, k, v, causal=True)
    clean_grad = backward(np.ones_like(q), q, k, v, causal=True)
    (k if which == "k" else v)[0, 6, 1] = value
    o, lse = forward(q, k, v, causal=True)
    grad = backward(np.ones_like(q), q, k, v, causal=True)
    untouched = np.ones((2, 9, 4), dtype=bool)
    untouched[0, 6:, 2:] = False
    same((o[untouched], lse.transpose(0, 2, 1)[untouched]), (clean[untouched], clean_lse.transpose(0, 2, 1)[untouched]))
    same([grad.dq[untouched]], [clean_grad.dq[untouched]])
    if (which, value) != ("k", np.inf):  # a score of -inf hides the key, one of +inf makes NaN
        assert not np.isfinite(o[0, 6:, 2:]).all(axis=-1).any()
    assert np.isfinite(grad.dv[:, :, 0]).all()


def test_a_far_higher_logit_takes_all() -> None:
    q, k, v = np.ones((1, 1, 1, 1)), np.arange(5.0).reshape(1, 5, 1, 1) * 800, normal(1, 5, 1, 3)
    o, lse = forward(q, k, v, softmax_scale=1.0)
    np.testing.assert_array_equal(o[0, 0, 0], v[0, 4, 0])
    assert lse == 3200
    low, _ = forward(q, k - 3e5, v, softmax_scale=1.0)
    np.testing.assert_array_equal(low, o)
