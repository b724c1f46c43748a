"""The decode reference: with a cache, pages, rotary embedding and append it agrees with plain attention."""

from __future__ import annotations

import numpy as np
import pytest
from reference import forward
from reference_decode import decode, merge, merge_backward, rotate

CLOSE = {"rtol": 1e-11, "atol": 1e-12}


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


Q, K_CACHE, V_CACHE = normal(3, 2, 4, 8), normal(3, 20, 2, 8, seed=1), normal(3, 20, 2, 6, seed=2)
LENGTHS = np.array([20, 0, 7])
SINK = normal(4)


@pytest.mark.parametrize(
    "options", [{}, {"causal": False}, {"window_size": (3, 1)}, {"softcap": 1.0, "learnable_sink": normal(4)}]
)
def test_each_sequence_attends_to_its_filled_part(options: dict) -> None:
    got = decode(Q, K_CACHE, V_CACHE, cache_seqlens=LENGTHS, **options)
    for b, n in enumerate(LENGTHS):
        alone = (Q[b : b + 1], K_CACHE[b : b + 1, :n], V_CACHE[b : b + 1, :n])
        o, lse = forward(*alone, **{"causal": True, **options})
        np.testing.assert_allclose(got.out[b], o[0], **CLOSE)
        np.testing.assert_allclose(got.lse[b], lse[0], **CLOSE)


def test_last_row_of_prefill_is_a_decode_step() -> None:
    q, k, v = normal(1, 9, 4, 8), K_CACHE[:1, :9], V_CACHE[:1, :9]
    o, lse = forward(q, k, v, causal=True)
    step = decode(q[:, -1:], k, v)
    np.testing.assert_allclose(step.out[:, 0], o[:, -1], **CLOSE)
    np.testing.assert_allclose(step.lse[:, :, 0], lse[:, :, -1], **CLOSE)


def test_chunks_appended_one_by_one_are_one_prefill() -> None:
    q, k, v = normal(2, 12, 4, 8), normal(2, 12, 2, 8, seed=1), normal(2, 12, 2, 6, seed=2)
    whole, _ = forward(q, k, v, causal=True)
    k_cache, v_cache, start = np.full((2, 15, 2, 8), np.nan), np.full((2, 15, 2, 6), np.nan), 0
    for n in (1, 4, 7):
        rows = slice(start, start + n)
        step = decode(q[:, rows], k_cache, v_cache, cache_seqlens=start, k=k[:, rows], v=v[:, rows])
        np.testing.assert_allclose(step.out, whole[:, rows], **CLOSE)
        k_cache, v_cache, start = step.k_cache, step.v_cache, start + n
    np.testing.assert_array_equal(k_cache[:, :12], k)
    assert np.isnan(k_cache[:, 12:]).all()


@pytest.mark.parametrize("page_size", [1, 3, 4, 20, 32])
def test_pages_are_a_contiguous_cache(page_size: int) -> None:
    columns = -(-22 // page_size)
    table = np.random.default_rng(page_size).permutation(3 * columns + 2)[: 3 * columns].reshape(3, columns).astype(np.int32)
    roomy = [np.concatenate([x, np.zeros((3, 2, *x.shape[2:]))], axis=1) for x in (K_CACHE, V_CACHE)]
    pages = [np.full((3 * columns + 2, page_size, *x.shape[2:]), np.nan) for x in roomy]
    for paged, flat in zip(pages, roomy, strict=True):
        for b in range(3):
            for t in range(22):
                paged[table[b, t // page_size], t % page_size] = flat[b, t]
    new = {"k": normal(3, 2, 2, 8, seed=5), "v": normal(3, 2, 2, 6, seed=6), "cache_seqlens": LENGTHS}
    got, want = decode(Q, *pages, block_table=table, **new), decode(Q, *roomy, **new)
    np.testing.assert_array_equal(got.out, want.out)
    np.testing.assert_array_equal(got.lse, want.lse)
    page, row = table[2, 8 // page_size], 8 % page_size
    np.testing.assert_array_equal(got.k_cache[page, row], new["k"][2, 1])
    assert (got.k_cache != pages[0]).sum() - np.isnan(pages[0]).sum() == 3 * 2 * 2 * 8  # nothing else was written


def test_absent_page_hides_its_keys_and_takes_no_write() -> None:
    k_pages, v_pages = normal(5, 4, 2, 8), normal(5, 4, 2, 6)
    for absent in (-1, 5):
        table = np.array([[3, absent, 1]], dtype=np.int32)
        got = decode(Q[:1], k_pages, v_pages, cache_seqlens=np.array([10]), block_table=table, causal=False)
        rows = [k_pages[[3]].reshape(1, 4, 2, 8), k_pages[[1]].reshape(1, 4, 2, 8)[:, :2]]
        values = [v_pages[[3]].reshape(1, 4, 2, 6), v_pages[[1]].reshape(1, 4, 2, 6)[:, :2]]
        o, _ = forward(Q[:1], np.concatenate(rows, axis=1), np.concatenate(values, axis=1))
        np.testing.assert_allclose(got.out, o, **CLOSE)
        new = {"k": normal(1, 1, 2, 8), "v": normal(1, 1, 2, 6), "cache_seqlens": np.array([5])}
        np.testing.assert_array_equal(decode(Q[:1], k_pages, v_pages, block_table=table, **new).k_cache, k_pages)


def test_append_past_the_capacity_keeps_what_fits() -> None:
    new = {"k": normal(3, 3, 2, 8), "v": normal(3, 3, 2, 6)}
    got = decode(Q, K_CACHE, V_CACHE, cache_seqlens=18, causal=False, **new)
    want = decode(Q, K_CACHE, V_CACHE, cache_seqlens=18, causal=False, **{name: x[:, :2] for name, x in new.items()})
    np.testing.assert_array_equal(got.out, want.out)
    np.testing.assert_array_equal(got.k_cache, want.k_cache)


@pytest.mark.parametrize("filled", [18, 19, 20])
def test_a_row_that_does_not_fit_moves_no_query(filled: int) -> None:
    """The capacity is 20: with a larger one and those rows hidden, the result is the same."""
    new = {"k": normal(3, 2, 2, 8), "v": normal(3, 2, 2, 6), "cache_seqlens": filled}
    q = normal(3, 2, 4, 8, seed=4)
    got = decode(q, K_CACHE, V_CACHE, **new)
    roomy = [np.concatenate([x, np.zeros_like(x[:, :4])], axis=1) for x in (K_CACHE, V_CACHE)]
    after = decode(q, *roomy, **new)
    for i in range(2):
        keys = min(filled + i + 1, 20)
        o, _ = forward(q[:, i : i + 1], after.k_cache[:, :keys], after.v_cache[:, :keys])
        np.testing.assert_allclose(got.out[:, i : i + 1], o, **CLOSE)
    np.testing.assert_array_equal(got.k_cache, after.k_cache[:, :20])
    np.testing.assert_array_equal(got.k_cache[:, :filled], K_CACHE[:, :filled])


def test_cache_batch_idx_and_leftpad() -> None:
    index, pad = np.array([2, 0, 1]), np.array([4, 7, 0])
    got = decode(Q, K_CACHE, V_CACHE, cache_seqlens=LENGTHS, cache_batch_idx=index, cache_leftpad=pad)
    for b in range(3):
        keys = slice(min(pad[b], LENGTHS[b]), LENGTHS[b])
        o, _ = forward(Q[b : b + 1], K_CACHE[[index[b]], keys], V_CACHE[[index[b]], keys], causal=True)
        np.testing.assert_allclose(got.out[b], o[0], **CLOSE)
    with pytest.raises(ValueError, match="cache_batch_idx"):
        decode(Q, K_CACHE, V_CACHE, cache_batch_idx=index, block_table=np.zeros((3, 1), dtype=np.int32))


def angles(dims: int, positions: int = 40) -> np.ndarray:
    return np.arange(positions)[:, None] / 10.0 ** np.linspace(0, 3, dims // 2)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotary_is_a_complex_product(interleaved: bool) -> None:
    table, x, positions = angles(6), normal(1, 3, 2, 8), np.array([[5, 6, 9]])
    got = rotate(x, positions, np.cos(table), np.sin(table), interleaved)
    real, imaginary = (x[..., 0:6:2], x[..., 1:6:2]) if interleaved else (x[..., :3], x[..., 3:6])
    rotated = (real + 1j * imaginary) * np.exp(1j * table[positions])[:, :, None]
    want = np.stack([rotated.real, rotated.imag], axis=-1 if interleaved else -2).reshape(1, 3, 2, 6)
    np.testing.assert_allclose(got[..., :6], want, **CLOSE)
    np.testing.assert_array_equal(got[..., 6:], x[..., 6:])


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotary_makes_scores_depend_on_distance_alone(interleaved: bool) -> None:
    table = {"rotary_cos": np.cos(angles(8)), "rotary_sin": np.sin(angles(8)), "rotary_interleaved": interleaved}
    new = {"k": normal(1, 4, 2, 8), "v": normal(1, 4, 2, 6)}
    here, there = (
        decode(Q[:1, [0, 0, 1, 1]], K_CACHE[:1], V_CACHE[:1], cache_seqlens=n, cache_leftpad=np.array([n]), **new, **table)
        for n in (0, 11)
    )
    np.testing.assert_allclose(here.out, there.out, **CLOSE)
    assert abs(here.k_cache[0, 1] - new["k"][0, 1]).max() > 0.1  # rotated
    np.testing.assert_array_equal(here.v_cache[0, :4], new["v"][0])


def test_without_causal_every_query_row_turns_alike() -> None:
    table = {"rotary_cos": np.cos(angles(8)), "rotary_sin": np.sin(angles(8)), "causal": False}
    twin = Q[:1, [0, 0]]
    new = {"k": normal(1, 1, 2, 8), "v": normal(1, 1, 2, 6), "cache_seqlens": 6}
    free = decode(twin, K_CACHE[:1], V_CACHE[:1], **new, **table).out
    np.testing.assert_array_equal(free[:, 0], free[:, 1])
    windowed = decode(twin, K_CACHE[:1], V_CACHE[:1], window_size=(30, 30), **new, **table).out
    assert abs(windowed[:, 0] - windowed[:, 1]).max() > 1e-3


def test_defaults_of_cache_seqlens() -> None:
    np.testing.assert_array_equal(decode(Q, K_CACHE, V_CACHE).out, decode(Q, K_CACHE, V_CACHE, cache_seqlens=20).out)
    new = {"k": normal(3, 2, 2, 8), "v": normal(3, 2, 2, 6)}
    np.testing.assert_array_equal(decode(Q, K_CACHE, V_CACHE, **new).out, decode(Q, K_CACHE, V_CACHE, cache_seqlens=0, **new).out)


def parts(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    outs, lses = normal(count, 2, 5, 3, 4, seed=seed), 3 * normal(count, 2, 3, 5, seed=seed + 1)
    lses[0, :, :, 1] = -np.inf
    lses[:, :, :, 2] = -np.inf
    outs[0, :, 1] = np.nan  # no key was visible there, so its contents do not matter
    return outs, lses


def test_merge_is_associative_and_commutative() -> None:
    outs, lses = parts(4)
    o, lse = merge(outs, lses)
    assert np.isfinite(o).all()
    assert np.isneginf(lse[:, :, 2]).all()
    np.testing.assert_allclose(merge(outs[::-1], lses[::-1])[0], o, **CLOSE)
    halves = [merge(outs[:2], lses[:2]), merge(outs[2:], lses[2:])]
    again, again_lse = merge(*(np.array(x) for x in zip(*halves, strict=True)))
    np.testing.assert_allclose(again, o, **CLOSE)
    np.testing.assert_allclose(again_lse, lse, **CLOSE)


def test_merge_with_nothing_and_with_itself() -> None:
    outs, lses = parts(1, seed=7)
    outs, lses = np.nan_to_num(outs[0]), lses[0]
    np.testing.assert_array_equal(merge([outs, outs * 0], [lses, np.full_like(lses, -np.inf)])[1], lses)
    o, lse = merge([outs, outs], [lses, lses])
    seen = np.isfinite(lses)
    np.testing.assert_allclose(lse[seen], lses[seen] + np.log(2), **CLOSE)
    np.testing.assert_allclose(o[seen.transpose(0, 2, 1)], outs[seen.transpose(0, 2, 1)], **CLOSE)


def test_merge_gradients_are_central_differences() -> None:
    outs, lses = normal(3, 2, 2, 2), normal(3, 2, 2, seed=1)
    dout, dlse = normal(2, 2, 2, seed=2), normal(2, 2, seed=3)

    def loss(outs: np.ndarray, lses: np.ndarray) -> float:
        o, lse = merge(outs, lses)
        return float((o * dout).sum() + (lse * dlse).sum())

    for index, grad in enumerate(merge_backward(dout, dlse, outs, lses)):
        for at in np.ndindex(grad.shape):
            ends = []
            for sign in (1, -1):
                moved = [outs.copy(), lses.copy()]
                moved[index][at] += sign * 1e-5
                ends.append(loss(*moved))
            np.testing.assert_allclose(grad[at], (ends[0] - ends[1]) / 2e-5, rtol=1e-7, atol=1e-9)
