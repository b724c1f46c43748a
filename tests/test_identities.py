"""Identities of attention itself: shifts, powers of two, sums, derivatives, sinks, merging, block masks, dropout (M13-M24).

These tests need no reference. Results have the same bits if the computation is the same; otherwise they differ by less than
rounding errors of the storage type.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from dropout_mask import keep_mask
from harness import assert_close, assert_same_bits, attention, cpu_kernels, gradients, problem, random

import libflash

ISAS = pytest.mark.parametrize("isa", cpu_kernels())
DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
NAMES = ("o", "lse", "dq", "dk", "dv")


@ISAS
def test_m13_keys_moved_by_one_vector(isa: str) -> None:
    q, k, v, dout = problem("float32")
    c = random(32, seed=20)
    one, other = gradients(q, k, v, dout, isa, causal=True), gradients(q, k + c, v, dout, isa, causal=True)
    for name in ("o", "dq", "dv"):
        assert_close(other[name], one[name], name, factor=10)
    shift = np.einsum("bihd,d->bhi", q, c) / np.sqrt(32)
    assert_close(other["lse"], (one["lse"] + shift).astype(np.float32), "lse", factor=10)


@ISAS
@DTYPES
@pytest.mark.parametrize("power", [-3, 5])
def test_m14_m15_powers_of_two(isa: str, dtype: str, power: int) -> None:
    """They change exponents only, and no bit of a mantissa."""
    q, k, v, dout = problem(dtype)
    if dtype == "float16":  # no subnormals, which lose bits
        power, dout = abs(power), dout * np.float16(2**6)
    factor = q.dtype.type(2.0**power)
    scale = 1 / np.sqrt(32)
    base = gradients(q, k, v, dout, isa, softmax_scale=scale)
    scaled = gradients(q * factor, k, v, dout, isa, softmax_scale=scale * 2.0**-power)
    for name in ("o", "lse", "dk", "dv"):
        assert_same_bits(scaled[name], base[name], name)
    if dtype != "float16":
        assert_same_bits(scaled["dq"] * factor, base["dq"], "dq")
        assert_same_bits(attention(q, k, v * factor, isa)[0], attention(q, k, v, isa)[0] * factor, "o for v")
        more = gradients(q, k, v, dout * factor, isa, softmax_scale=scale)
        for name in ("dq", "dk", "dv"):
            assert_same_bits(more[name], base[name] * factor, f"{name} for dout")


@ISAS
def test_m16_m17_m18_sums(isa: str) -> None:
    """Linear in v and in dout; the columns of dv have the sums of those of dout; rows of dS sum to 0."""
    q, k, v, dout = problem("float32", hk=4)
    other_v, other_dout = random(*v.shape, seed=30), random(*dout.shape, seed=31)
    one, two, both = (gradients(q, k, x, y, isa) for x, y in ((v, dout), (other_v, dout), (v + other_v, dout)))
    assert_close(both["o"], one["o"] + two["o"], "o")
    moved = gradients(q, k, v, other_dout, isa)
    sums = gradients(q, k, v, dout + other_dout, isa)
    for name in ("dq", "dk", "dv"):
        assert_close(sums[name], one[name] + moved[name], name, factor=3)
    assert_close(one["dv"].sum(axis=1), dout.sum(axis=1), "columns of dv", factor=10)
    flat = gradients(q, np.ones_like(k), v, dout, isa)
    assert np.abs(flat["dq"]).max() < 1e-5, "with equal keys dq is 0"
    assert np.abs(gradients(q, k, np.ones_like(v), dout, isa)["o"] - 1).max() < 1e-6


@ISAS
@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"softcap": 2.0},
        {"window_size": (5, 2)},
        {"bias": random(1, 4, 12, 17, seed=40, dtype="float64")},
        {"learnable_sink": random(4, seed=41, dtype="float64")},
        {"dropout_p": 0.25, "seed": 9},
    ],
    ids=lambda options: next(iter(options)),
)
def test_m19_gradients_are_derivatives(isa: str, options: dict) -> None:
    """Central differences of sum(dout * o) + sum(dlse * lse) along a random direction, float64."""
    q, k, v, dout = problem("float64", batch=1, sq=12, sk=17, d=8)
    dlse = random(1, 4, 12, seed=42, dtype="float64")
    if options.get("window_size"):
        dlse[:] = 0  # some rows see no key
    got = gradients(q, k, v, dout, isa, dlse=dlse, **options)
    inputs = {"q": q, "k": k, "v": v} | {name: options[name] for name in ("bias", "learnable_sink") if name in options}
    names = {"q": "dq", "k": "dk", "v": "dv", "bias": "dbias", "learnable_sink": "dsink"}
    for index, name in enumerate(inputs):
        step = random(*inputs[name].shape, seed=50 + index, dtype="float64")

        def loss(t: float, name: str = name, step: np.ndarray = step) -> float:
            moved = inputs | {name: inputs[name] + t * step}
            extra = {key: moved[key] for key in ("bias", "learnable_sink") if key in moved}
            o, lse = attention(moved["q"], moved["k"], moved["v"], isa, **(options | extra))
            return float((dout * o).sum() + np.where(dlse == 0, 0, dlse * lse).sum())

        h = 1e-5
        slope = (loss(h) - loss(-h)) / (2 * h)
        np.testing.assert_allclose((got[names[name]] * step).sum(), slope, rtol=1e-6, atol=1e-7, err_msg=name)


@ISAS
def test_m20_sink_is_a_key_without_value(isa: str) -> None:
    q, k, v, dout = problem("float32", sq=40, sk=60)
    sink = random(4, seed=60)
    one = gradients(q, k, v, dout, isa, learnable_sink=sink)
    zeros = np.zeros((2, 1, 2, 32), np.float32)
    bias = np.zeros((1, 4, 1, 61), np.float32)
    bias[0, :, 0, 60] = sink
    other = gradients(q, np.concatenate([k, zeros], 1), np.concatenate([v, zeros], 1), dout, isa, bias=bias)
    for name in ("o", "lse", "dq"):
        assert_close(one[name], other[name], name)
    for name in ("dk", "dv"):
        assert_close(one[name], other[name][:, :60], name)
    assert_close(one["dsink"], other["dbias"][0, :, 0, 60].copy(), "dsink", factor=10)


def test_m21_merge() -> None:
    outs = [random(2, 30, 4, 16, seed=i) for i in range(3)]
    lses = [random(2, 4, 30, seed=10 + i) * 5 for i in range(3)]
    lses[1][:, :, 7] = -np.inf
    all_out, all_lse = libflash.merge(outs, lses)
    swapped = libflash.merge(outs[::-1], lses[::-1])
    nested = libflash.merge([libflash.merge(outs[:2], lses[:2])[0], outs[2]], [libflash.merge(outs[:2], lses[:2])[1], lses[2]])
    for out, lse in (swapped, nested):
        assert_close(out, all_out)
        assert_close(lse, all_lse)
    nothing = np.full_like(outs[0], np.nan), np.full_like(lses[0], -np.inf)
    identity = libflash.merge([outs[0], nothing[0]], [lses[0], nothing[1]])
    assert_same_bits(identity[0], outs[0])
    assert_same_bits(identity[1], lses[0])
    twice = libflash.merge([outs[0]] * 2, [lses[0]] * 2)
    assert_close(twice[0], outs[0])
    assert_close(twice[1], (lses[0] + np.log(2)).astype(np.float32))
    empty_out, empty_lse = libflash.merge([nothing[0]] * 2, [nothing[1]] * 2)
    assert not empty_out.any()
    assert (empty_lse == -np.inf).all()


@ISAS
@DTYPES
def test_m22_block_masks(isa: str, dtype: str) -> None:
    q, k, v, dout = problem(dtype, batch=1, sq=300, sk=300, hq=2)
    ones, causal = np.ones((1, 1, 3, 3), bool), np.tri(3, dtype=bool)[None, None]
    some = np.array([[[[1, 0, 1], [0, 0, 0], [1, 1, 0]], [[0, 1, 0], [1, 0, 1], [0, 0, 1]]]], bool)
    element = some.repeat(128, 2).repeat(128, 3)[:, :, :300, :300]
    pairs = [
        ({"block_mask": ones}, {}),
        ({"block_mask": causal, "causal": True}, {"causal": True}),
        ({"block_mask": some}, {"mask": element}),
    ]
    for one, other in pairs:
        left, right = gradients(q, k, v, dout, isa, **one), gradients(q, k, v, dout, isa, **other)
        for name in NAMES:
            assert_close(left[name], right[name], f"{name} {list(one)}")


@ISAS
@pytest.mark.parametrize("shape", [(1, 40, 40), (2, 130, 72)], ids=["one", "several"])
def test_m23_m24_dropout(isa: str, shape: tuple[int, int, int]) -> None:
    """With q = 0 and the rows of v the unit vectors, o shows the mask itself. It is that of the definition, and passes tests of
    randomness.
    """
    batch, sq, sk = shape
    q, k = np.zeros((batch, sq, 4, 8), np.float32), random(batch, sk, 2, 8)
    v = np.broadcast_to(np.eye(sk, dtype=np.float32)[None, :, None], (batch, sk, 2, sk)).copy()
    p = 0.375
    shown = {}
    for seed, offset in ((0, 0), (1, 0), (0, 1), (2**63 + 5, 2**40)):
        o, lse = attention(q, k, v, isa, dropout_p=p, seed=seed, offset=offset)
        shown[seed, offset] = kept = np.rint(o * sk * (1 - p)).astype(bool)
        for b, h in itertools.product(range(batch), range(4)):
            np.testing.assert_array_equal(kept[b, :, h], keep_mask(p, seed, offset, b, 4, h, sq, sk))
        np.testing.assert_allclose(lse, np.log(sk), rtol=1e-6, err_msg="lse is that of the undropped row")
        for part in (kept, *np.moveaxis(kept, 2, 0)):
            sigma = np.sqrt(p * (1 - p) / part.size)
            assert abs(part.mean() - (1 - p)) < 5 * sigma
    masks = [(kept - (1 - p)).ravel() for kept in shown.values()]
    masks += [(shown[0, 0][:, :, h] - (1 - p)).ravel() for h in range(4)]
    for one, other in itertools.combinations([m for m in masks if m.size == masks[0].size], 2):
        assert abs((one * other).mean()) < 5 * p * (1 - p) / np.sqrt(one.size), "masks of two seeds have nothing in common"
    rows = (shown[0, 0][:, 1:] - (1 - p)) * (shown[0, 0][:, :-1] - (1 - p))
    assert abs(rows.mean()) < 5 * p * (1 - p) / np.sqrt(rows.size)


@ISAS
def test_m23_dropout_is_the_same_everywhere(isa: str) -> None:
    """Forward and backward, packed and dense, any split: one mask. p = 0: no mask."""
    q, k, v, dout = problem("float32", batch=1, hk=4)
    options = {"dropout_p": 0.5, "seed": 11}
    got = gradients(q, k, v, dout, isa, **options)
    assert_close((got["dv"] * v).sum(axis=(1, 3)), (got["o"] * dout).sum(axis=(1, 3)), "<dv, v> = <dout, o>", factor=30)
    cu_q, cu_k = np.array([0, 90], np.int32), np.array([0, 150], np.int32)
    packed, _ = attention(q[0], k[0], v[0], isa, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options)
    assert_close(packed, got["o"][0])
    for splits in (1, 2, 7):
        assert_close(attention(q, k, v, isa, num_splits=splits, **options)[0], got["o"], str(splits))
    assert_close(attention(q[:, :33], k, v, isa, **options)[0], got["o"][:, :33], "the mask of the first rows")
    assert_same_bits(attention(q, k, v, isa, dropout_p=0.0, seed=11)[0], attention(q, k, v, isa)[0])
    mean = np.mean([attention(q, k, v, isa, dropout_p=0.5, seed=seed)[0] for seed in range(200)], axis=0)
    plain = attention(q, k, v, isa)[0]
    assert np.sqrt(((mean - plain) ** 2).mean()) < 0.2 * np.sqrt((plain**2).mean()), "on average dropout does nothing"
