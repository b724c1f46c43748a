"""JAX: decode over caches of 8 bits under jit, rope parts of keys, scales that an append writes; cache_write; invariant rows."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from harness import random

import libflash

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
import libflash.jax  # noqa: E402

CODES = {"e4m3": np.dtype(ml_dtypes.float8_e4m3fn), "e5m2": np.dtype(ml_dtypes.float8_e5m2), "int8": np.dtype(np.int8)}
every_code = pytest.mark.parametrize("code", CODES)
B, HEADS_Q, HEADS_K, DIM, CAPACITY = 2, 4, 2, 16, 40
LENGTHS = np.array([20, 5], np.int32)
SCALES = {"number": None, "heads": (HEADS_K,), "sequences": (B, HEADS_K), "rows": (B, CAPACITY, HEADS_K),
          "groups": (B, CAPACITY, HEADS_K, 4)}  # fmt: skip


def problem(code: str, scale: str, append: bool) -> dict[str, Any]:
    made: dict[str, Any] = {"q": random(B, 3, HEADS_Q, DIM, seed=1)}
    for name, seed in (("k_cache", 2), ("v_cache", 3)):
        made[name] = (9 * random(B, CAPACITY, HEADS_K, DIM, seed=seed)).astype(CODES[code])
    for name, seed in (("k_scale", 4), ("v_scale", 5)):
        made[name] = 0.25 if scale == "number" else np.abs(random(*SCALES[scale], seed=seed)) + np.float32(0.1)
    if append:
        made |= {name: random(B, 3, HEADS_K, DIM, seed=seed) for name, seed in (("k", 6), ("v", 7))}
    return made | {"cache_seqlens": LENGTHS}


def copied(x: dict[str, Any]) -> dict[str, Any]:
    return {name: np.array(value) if isinstance(value, np.ndarray) else value for name, value in x.items()}


def same(got: Any, wanted: Any) -> None:
    got, wanted = np.asarray(got), np.asarray(wanted)
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    assert np.ascontiguousarray(got).tobytes() == np.ascontiguousarray(wanted).tobytes()


@every_code
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("append", [False, True])
def test_jit_equals_numpy(code: str, scale: str, append: bool) -> None:
    x = problem(code, scale, append)
    ours = copied(x)
    wanted = libflash.decode(**ours, return_lse=True)
    static = {name: value for name, value in x.items() if not isinstance(value, np.ndarray)}
    arrays = {name: jnp.asarray(value) for name, value in x.items() if isinstance(value, np.ndarray)}
    got = jax.jit(lambda given: libflash.jax.decode(**given, **static, return_lse=True))(arrays)
    written = ["k_cache", "v_cache"] if append else []
    if append and scale in ("rows", "groups"):
        written += ["k_scale", "v_scale"]
    assert len(got) == 2 + len(written)
    for one, other in zip(got, [*wanted, *(ours[name] for name in written)], strict=True):
        same(one, other)


@pytest.mark.parametrize("scale", [0.5, np.float32(0.5), np.array(0.5, np.float32), "jax"], ids=lambda x: type(x).__name__)
def test_one_scale_for_all(scale: Any) -> None:
    """Numbers, and arrays without dimensions, eager and jitted; a bool is none."""
    scale = jnp.float32(0.5) if isinstance(scale, str) else scale
    x = {name: value for name, value in problem("int8", "number", False).items() if not name.endswith("scale")}
    wanted = libflash.decode(**x, k_scale=0.5, v_scale=0.5)
    same(libflash.jax.decode(**x, k_scale=scale, v_scale=scale), wanted)
    same(jax.jit(lambda x, s: libflash.jax.decode(**x, k_scale=s, v_scale=s))(x, scale), wanted)
    arrays = {name: jnp.asarray(value) for name, value in x.items()}
    same(libflash.decode(**arrays, k_scale=scale, v_scale=scale), wanted)
    with pytest.raises(TypeError, match="k_scale must be an array"):
        libflash.jax.decode(**x, k_scale=True, v_scale=scale)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "head_dim_v is None; without v_cache it must be given"),
        ({"head_dim_v": 17}, "head_dim_v is 17; it must be at least 1 and at most the channels of k_cache, 16"),
        ({"head_dim_v": 8, "v_cache": np.zeros((B, CAPACITY, HEADS_K, DIM), np.float32)}, "head_dim_v is 8; it is given only w"),
    ],
)
def test_channels_of_values_are_checked(given: dict, text: str) -> None:
    q, cache = random(B, 1, HEADS_Q, DIM), np.zeros((B, CAPACITY, HEADS_K, DIM), np.float32)
    with pytest.raises(libflash.InvalidError, match=text):
        libflash.jax.decode(q, cache, **given)
    with pytest.raises(TypeError, match=r"k_cache must be an array of JAX or NumPy, not list of 2 elements"):
        libflash.jax.decode(q, cache.tolist(), **{"head_dim_v": 8} | given)


@pytest.mark.parametrize("code", ["e4m3", "e5m2"])
def test_bytes_as_codes(code: str) -> None:
    x = problem(code, "rows", True)
    wanted = libflash.jax.decode(**x)
    for name in ("k_cache", "v_cache"):
        x[name] = x[name].view(np.uint8)
    got = libflash.jax.decode(**x, cache_dtype=code)
    assert got[1].dtype == got[2].dtype == np.uint8
    for one, other in zip(got, wanted, strict=True):
        same(one, np.asarray(other).view(one.dtype))
    with pytest.raises(libflash.InvalidError, match="cache_dtype is 'e4m3'"):
        libflash.jax.decode(**x | {"k_cache": x["k_cache"].view(np.int8)}, cache_dtype="e4m3")


@pytest.mark.parametrize("rotates", [False, True])
def test_parts_of_keys(rotates: bool) -> None:
    """A latent cache of codes with a rope part, which the call may rotate; the values are channels of the keys."""
    q, latent = random(B, 1, HEADS_Q, 24, seed=1), (9 * random(B, CAPACITY, 1, 16, seed=2)).astype(np.int8)
    rope, scale = random(B, CAPACITY, 1, 8, seed=3), np.abs(random(B, CAPACITY, 1, seed=4))
    options = {"k": random(B, 1, 1, 16, seed=5), "k_rope": random(B, 1, 1, 8, seed=6), "head_dim_v": 16}
    if rotates:
        options |= {name: random(CAPACITY, 3, seed=seed) for name, seed in (("rotary_cos", 7), ("rotary_sin", 8))}
    ours = [latent.copy(), rope.copy(), scale.copy()]
    wanted = libflash.decode(q, ours[0], k_rope_cache=ours[1], k_scale=ours[2], cache_seqlens=LENGTHS, **options)
    static = options.pop("head_dim_v")

    @jax.jit
    def step(q: Any, latent: Any, rope: Any, scale: Any, options: Any) -> Any:
        return libflash.jax.decode(
            q, latent, k_rope_cache=rope, k_scale=scale, cache_seqlens=LENGTHS, head_dim_v=static, **options
        )

    got = step(q, latent, rope, scale, options)
    for one, other in zip(got, [wanted, ours[0], ours[2], ours[1]], strict=True):
        same(one, other)


@pytest.mark.parametrize("packed", [False, True])
def test_invariant_rows(packed: bool) -> None:
    x = problem("int8", "rows", False) | {"invariant": True}
    if packed:
        x["q"] = x["q"].reshape(-1, HEADS_Q, DIM)
        x["cu_seqlens_q"] = np.array([0, 5, 6], np.int32)
    wanted = libflash.decode(**x)
    invariant = x.pop("invariant")
    got = jax.jit(lambda given: libflash.jax.decode(**given, invariant=invariant))(x)
    same(got, wanted)
    with pytest.raises(libflash.InvalidError, match="num_splits: must be 0 with"):
        libflash.jax.decode(**x, invariant=True, num_splits=2)


def test_vmap() -> None:
    x = [problem("int8", "rows", True) for _ in range(2)]
    x[1]["q"] = x[1]["q"][::-1].copy()
    stacked = {name: np.stack([y[name] for y in x]) for name in x[0]}
    got = jax.vmap(lambda given: libflash.jax.decode(**given))(stacked)
    for i in range(2):
        for one, other in zip(got, libflash.jax.decode(**x[i]), strict=True):
            same(one[i], other)


def test_libflash_decode_goes_there() -> None:
    x = problem("e4m3", "number", False)
    wanted = libflash.decode(**copied(x))
    arrays = {name: jnp.asarray(value) for name, value in x.items() if isinstance(value, np.ndarray)}
    got = jax.jit(lambda given: libflash.decode(**given, k_scale=0.25, v_scale=0.25))(arrays)
    same(got, wanted)


def test_cache_write_rotates_rope_parts() -> None:
    x: dict[str, Any] = {"k": random(3, 1, 16, seed=1), "k_rope": random(3, 1, 8, seed=2)}
    x |= {"k_cache": np.zeros((2, 4, 1, 16), np.float32), "k_rope_cache": np.zeros((2, 4, 1, 8), np.float32)}
    x |= {"rotary_cos": random(9, 3, seed=3), "rotary_sin": random(9, 3, seed=4)}
    x |= {"slots": np.array([7, 0, 2], np.int32), "positions": np.array([8, 0, 5], np.int32)}
    ours = copied(x)
    libflash.cache_write(**ours, v=None, v_cache=None)
    got = jax.jit(lambda given: libflash.jax.cache_write(**given, v=None, v_cache=None))(x)
    for one, name in zip(got, ("k_cache", "k_rope_cache"), strict=True):
        same(one, ours[name])
    assert (ours["k_rope_cache"][1, 3] != x["k_rope"][0]).any()


@pytest.mark.parametrize("code", [*CODES, "float32"])
@pytest.mark.parametrize("scale", SCALES)
def test_cache_write(code: str, scale: str) -> None:
    if scale == "sequences" or (code == "float32" and scale in ("rows", "groups")):
        return
    x = problem(code, scale, False) if code != "float32" else problem("int8", scale, False)
    x = {name: x[name] for name in ("k_cache", "v_cache", "k_scale", "v_scale")}
    if code == "float32":
        x = {name: value.astype(np.float32) if name.endswith("cache") else value for name, value in x.items()}
    rows = {name: random(5, HEADS_K, DIM, seed=seed) for name, seed in (("k", 6), ("v", 7))}
    slots = np.array([3, -1, 79, 40, 0], np.int32)
    ours = copied(x)
    libflash.cache_write(**rows, **ours, slots=slots)
    static = {name: value for name, value in x.items() if not isinstance(value, np.ndarray)}
    arrays = {name: value for name, value in (x | rows).items() if isinstance(value, np.ndarray)}
    step = jax.jit(lambda given, slots: libflash.jax.cache_write(**given, **static, slots=slots))
    got = step(arrays, slots)
    written = ["k_cache", "v_cache", *(["k_scale", "v_scale"] if scale in ("rows", "groups") else [])]
    for one, name in zip(got, written, strict=True):
        same(one, ours[name])


def test_cache_write_of_keys_alone_and_donation() -> None:
    k, cache = random(2, 1, 8, seed=1), np.zeros((2, 4, 1, 8), np.float32)
    wanted = cache.copy()
    libflash.cache_write(k, None, wanted, None, np.array([7, 2]))
    step = jax.jit(lambda cache, k, slots: libflash.jax.cache_write(k, None, cache, None, slots), donate_argnums=0)
    old = jnp.asarray(cache)
    got = step(old, k, np.array([7, 2], np.int32))
    same(got, wanted)
    assert old.is_deleted()


@pytest.mark.parametrize(
    "change",
    [
        {"k": np.zeros((2, 1, 7), np.float32)},
        {"k": np.zeros((1, 2, 1, 8), np.float32)},
        {"k": np.zeros((2, 1, 8), np.int32)},
        {"k_cache": np.zeros((2, 4, 8), np.float32)},
        {"k_cache": np.zeros((2, 4, 1, 8), np.float16)},
        {"v_cache": np.zeros((2, 5, 1, 6), np.float32)},
        {"v": np.zeros((3, 1, 6), np.float32)},
        {"slots": np.zeros(3, np.int32)},
        {"slots": np.zeros(2, np.float32)},
        {"k_scale": np.ones((2, 1), np.float32)},
        {"rotary_cos": np.ones((4, 2), np.float32)},
        {"k_rope": np.ones((2, 1, 4), np.float32)},
        {"positions": np.zeros(2, np.int32)},
        {"positions": np.zeros(3, np.int32), **dict.fromkeys(("rotary_cos", "rotary_sin"), np.ones((4, 2), np.float32))},
    ],
    ids=lambda change: "-".join((*change, *map(str, next(iter(change.values())).shape))),
)
def test_cache_write_is_checked_while_tracing(change: dict) -> None:
    """With the error of the call that runs at once."""
    x = {"k": random(2, 1, 8, seed=1), "v": random(2, 1, 6, seed=2), "slots": np.array([7, 2], np.int32)}
    x |= {"k_cache": np.zeros((2, 4, 1, 8), np.float32), "v_cache": np.zeros((2, 4, 1, 6), np.float32)}
    jax.eval_shape(lambda given: libflash.jax.cache_write(**given), x)
    x |= change
    with pytest.raises(libflash.InvalidError) as eager:
        libflash.cache_write(**x)
    with pytest.raises(libflash.InvalidError) as traced:
        jax.eval_shape(lambda given: libflash.jax.cache_write(**given), x)
    assert str(traced.value) == str(eager.value)


def test_cache_write_refusals() -> None:
    k, cache = random(2, 1, 8, seed=1), np.zeros((2, 4, 1, 8), np.float32)
    with pytest.raises(Exception, match="two rows must not be written to the same slot"):
        libflash.jax.cache_write(k, None, cache, None, np.array([7, 7], np.int32)).block_until_ready()
    with pytest.raises(libflash.InvalidError, match="v and v_cache must be given together"):
        libflash.jax.cache_write(k, k, cache, None, np.array([7, 1], np.int32))
    with pytest.raises(libflash.UnsupportedError, match="cache_write has no gradient"):
        jax.grad(lambda k: libflash.jax.cache_write(k, None, cache, None, np.array([7, 1], np.int32)).sum())(k)
