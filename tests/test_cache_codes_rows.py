"""Decode on the CPU with packed rows, trees and positions over caches of codes, with scales, rope parts and views."""

from __future__ import annotations

import numpy as np
import pytest
from harness import BFLOAT16, assert_same_bits, random
from libflash.conformance.reference_cache import CODES, LARGEST, to_codes
from sequences import cu_seqlens

import libflash

KERNELS = [k["name"] for k in libflash.info()["kernels"] if k["operation"] == "decode" and k["backend"] == "cpu" and k["usable"]]
every_kernel = pytest.mark.parametrize("kernel", KERNELS)
every_code = pytest.mark.parametrize("code", CODES)
CACHED = np.array([150, 1, 0, 77, 200], np.int32)
ROWS = (1, 3, 0, 40, 2)
HEADS_Q, HEADS_K, DIM, CAPACITY = 6, 2, 32, 260


def codes(seed: int, code: str, *shape: int) -> np.ndarray:
    one = np.full(1, 4 / LARGEST[CODES[code]], np.float32)
    return to_codes(random(*shape, seed=seed).astype(np.float32), one, CODES[code])


def problem(code: str, per_row: bool) -> dict:
    """Caches and scales of every sequence."""
    shape = (len(CACHED), CAPACITY, HEADS_K)
    made = {name: codes(seed, code, *shape, DIM) for seed, name in enumerate(("k_cache", "v_cache"))}
    for seed, name in enumerate(("k_scale", "v_scale"), 5):
        made[name] = (0.01 + 0.01 * np.abs(random(*(shape if per_row else (len(CACHED), HEADS_K)), seed=seed))).astype(np.float32)
    return made


@every_kernel
@every_code
@pytest.mark.parametrize("per_row", [False, True], ids=["scale-of-sequence", "scale-of-row"])
def test_every_sequence_is_as_if_alone(kernel: str, code: str, per_row: bool) -> None:
    """Bit for bit with a split size: results, appended codes and computed scales."""
    q, k, v = (random(sum(ROWS), heads, DIM, seed=s).astype(BFLOAT16) for s, heads in enumerate((HEADS_Q, HEADS_K, HEADS_K), 8))
    start, options = cu_seqlens(ROWS), dict(split_size=128, return_lse=True, kernel=kernel, softcap=20.0)
    alone, whole = problem(code, per_row), problem(code, per_row)
    o, lse = libflash.decode(q, **whole, k=k, v=v, cu_seqlens_q=start, cache_seqlens=CACHED, **options)
    for b in range(len(CACHED)):
        at, own = slice(start[b], start[b + 1]), {name: x[b : b + 1] for name, x in alone.items()}
        wanted = libflash.decode(q[None, at], **own, k=k[None, at], v=v[None, at], cache_seqlens=CACHED[b : b + 1], **options)
        assert_same_bits(o[at], wanted[0][0])
        assert_same_bits(np.ascontiguousarray(lse[:, at]), np.ascontiguousarray(wanted[1][0]))
    for name, x in whole.items():
        assert_same_bits(x.view(np.uint8), alone[name].view(np.uint8))
    assert not np.array_equal(whole["k_cache"].view(np.uint8), problem(code, per_row)["k_cache"].view(np.uint8))


@every_kernel
@pytest.mark.parametrize("rows", [2, 3, 12])
@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_scales_in_gaps_do_not_matter(kernel: str, rows: int, broken: float) -> None:
    """Row 0 does not see the last key, which has no bit in it; all other rows do. Few rows and many: two parts of the engine."""
    x = {name: a[:1] for name, a in problem("int8", True).items()}
    q = random(rows, HEADS_Q, DIM, seed=3).astype(np.float32)
    bits = np.full((rows, 1), -1, np.int32)
    bits[0] = (1 << (rows - 1)) - 1
    options = dict(cu_seqlens_q=cu_seqlens((rows,)), cache_seqlens=CACHED[:1], tree_mask=bits, return_lse=True, kernel=kernel)
    wanted, wanted_lse = libflash.decode(q, **x, **options)
    for name in ("k_scale", "v_scale"):
        scale = x[name].copy()
        scale[0, CACHED[0] - 1] = broken
        out, lse = libflash.decode(q, **{**x, name: scale}, **options)
        assert_same_bits(out[:1], wanted[:1])
        assert_same_bits(lse[:, :1].copy(), wanted_lse[:, :1].copy())
        assert not np.isfinite(out[1:]).all()


@every_kernel
@every_code
@pytest.mark.parametrize("positions", [False, True])
def test_appended_keys_are_rotated_before_they_are_rounded(kernel: str, code: str, positions: bool) -> None:
    """The codes are those of the rows that the same call appends to a cache of q's type."""
    q, k, v = (random(sum(ROWS), heads, DIM, seed=s).astype(BFLOAT16) for s, heads in enumerate((HEADS_Q, HEADS_K, HEADS_K), 8))
    angles, start = np.arange(300)[:, None] * 0.1 ** np.linspace(0, 3, DIM // 2), cu_seqlens(ROWS)
    options = {"rotary_cos": np.cos(angles).astype(np.float32), "rotary_sin": np.sin(angles).astype(np.float32), "kernel": kernel}
    options |= {"k": k, "v": v, "cu_seqlens_q": start, "cache_seqlens": CACHED}
    if positions:
        options["q_positions"] = np.concatenate([c + np.arange(n) // 2 for c, n in zip(CACHED, ROWS, strict=True)]).astype(
            np.int32
        )
    x = problem(code, False)
    plain = [np.zeros(x["k_cache"].shape, BFLOAT16) for _ in range(2)]
    libflash.decode(q, *plain, **options)
    libflash.decode(q, **x, **options)
    for name, rotated in zip(("k", "v"), plain, strict=True):
        for b, n in enumerate(ROWS):
            at = slice(CACHED[b], CACHED[b] + n)
            wanted = to_codes(rotated[b, at], x[f"{name}_scale"][b][None, :, None], CODES[code])
            assert_same_bits(x[f"{name}_cache"][b, at].view(np.uint8), wanted.view(np.uint8))
    if positions:  # key 78 of sequence 3 has position 77
        tables = {name: options[name] for name in ("rotary_cos", "rotary_sin")}
        alone, row = [np.zeros((1, 100, HEADS_K, DIM), BFLOAT16) for _ in range(2)], slice(start[3] + 1, start[3] + 2)
        libflash.decode(q[None, :1], *alone, k=k[None, row], v=v[None, row], cache_seqlens=CACHED[3:4], **tables)
        assert_same_bits(plain[0][3, 78].copy(), alone[0][0, 77].copy())


@every_kernel
@pytest.mark.parametrize("tree", [False, True])
def test_packed_rows_over_inline_slots(kernel: str, tree: bool) -> None:
    """MLA: codes, scales of groups and rope parts are views of slots of 656 bytes; values are channels of keys. The reference
    is a cache of float32 that holds the real values."""
    slots = np.zeros((40, 16, 1, 656), np.uint8)
    views = {
        "k_cache": slots[..., :512].view(CODES["e4m3"]),
        "k_scale": slots[..., 512:528].view(np.float32),
        "k_rope_cache": slots[..., 528:].view(BFLOAT16),
    }
    lengths, table = (70, 0, 1, 5), np.random.default_rng(1).permutation(40).astype(np.int32).reshape(4, 10)
    starts, options = cu_seqlens(lengths), {"block_table": table, "kernel": kernel}
    new = {"k": random(76, 1, 512, seed=1).astype(BFLOAT16), "k_rope": random(76, 1, 64, seed=2).astype(BFLOAT16)}
    libflash.decode(np.zeros((76, 3, 576), BFLOAT16), **views, **new, cu_seqlens_q=starts, head_dim_v=512, **options)
    read = {"cu_seqlens_q": starts, "cache_seqlens": np.array(lengths, np.int32), "return_lse": True, **options}
    if tree:
        rows = np.tril(np.random.default_rng(2).random((76, 96)) < 0.7) | np.eye(76, 96, dtype=bool)
        words = (rows.reshape(76, 3, 32) * (1 << np.arange(32, dtype=np.uint64))).sum(-1)
        read["tree_mask"] = words.astype(np.uint32).view(np.int32)
    q = random(76, 3, 576, seed=3).astype(BFLOAT16)
    out, lse = libflash.decode(q, **views, **read, head_dim_v=512)
    real = views["k_cache"].astype(np.float32) * views["k_scale"].repeat(128, axis=-1)
    joined = np.concatenate([real, views["k_rope_cache"].astype(np.float32)], axis=-1)
    wanted, wanted_lse = libflash.decode(q.astype(np.float32), joined, joined[..., :512].copy(), **read)
    np.testing.assert_allclose(out.astype(np.float32), wanted, rtol=2.0**-6, atol=2.0**-7)
    np.testing.assert_allclose(lse, wanted_lse, rtol=2.0**-10, atol=2.0**-7)


@every_kernel
def test_a_refused_packed_append_changes_nothing(kernel: str) -> None:
    x = problem("int8", True)
    before = {name: a.copy() for name, a in x.items()}
    q, new = random(46, HEADS_Q, DIM, seed=1).astype(BFLOAT16), random(46, HEADS_K, DIM, seed=2).astype(BFLOAT16)
    lengths = CACHED.copy()
    lengths[3] = CAPACITY - 39
    with pytest.raises(libflash.InvalidError, match=r"^k: .*sequence 3: 221 \+ 40, capacity 260"):
        libflash.decode(q, **x, k=new, v=new, cu_seqlens_q=cu_seqlens(ROWS), cache_seqlens=lengths, kernel=kernel)
    for name, a in x.items():
        assert_same_bits(a, before[name])


def test_explain_names_both() -> None:
    x = problem("int8", True)
    caches, scales = [x[name] for name in ("k_cache", "v_cache")], {name: x[name] for name in ("k_scale", "v_scale")}
    text = libflash.explain(random(46, HEADS_Q, DIM), *caches, op="decode", cu_seqlens_q=cu_seqlens(ROWS), **scales)
    assert "queries packed 46 rows" in text
    assert "decode_cpu" in text
