"""Checks and conversions of the arguments of libflash.jax: arrays, lengths, seeds; static numbers and texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from . import _core, _option_list
from ._arguments import described, integer, one_of, plainly, real, refuse_traced, short_bound, shortened
from ._errors import InvalidError
from ._jax_calls import CAUSAL, DETERMINISTIC, SCALE, TOP_LEFT, WINDOW, Options
from ._option_list import OPTIONS, Option, names_of
from ._scalar import is_scalar

Array: TypeAlias = Any  # of JAX or NumPy
INT32 = np.iinfo(np.int32)
LENGTHS = (*names_of(_option_list.LENGTHS, "attention"), *names_of(_option_list.LENGTHS, "decode"))

# -- numbers and texts


def known(x: Any, name: str) -> Any:
    """x, if its value is known while the program is compiled."""
    refuse_traced(x, name)
    return x


def switch(x: Any, name: str) -> bool:
    return _core.flag(known(x, name), name)


def text(x: str | None, name: str) -> str:
    if x is not None and not isinstance(x, str):
        raise TypeError(f"{name} must be a str, not {described(x)}")
    return x or ""


def signed_integer(x: Any, name: str) -> int:
    """An integer that fits XLA's attributes, whose own error would not name it."""
    value = integer(x, name)
    if not -(2**63) <= value < 2**63:
        raise InvalidError(f"{name} is {shortened(value)}, which does not fit 64 bits")
    return value


def window(window_size: Any) -> dict[str, int]:
    if window_size is None:
        return {}
    known(window_size, "window_size")
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"window_size must be a pair (left, right), not {plainly(window_size)}")
    left, right = (-1 if side is None else signed_integer(side, f"window_size[{i}]") for i, side in enumerate(window_size))
    return {} if left == right == -1 else {"window_left": left, "window_right": right}


def flags(causal: Any, causal_align: str, window_size: Any, softmax_scale: Any, deterministic: Any = False) -> int:
    value = CAUSAL if switch(causal, "causal") else 0
    value |= TOP_LEFT if one_of(causal_align, ("bottom_right", "top_left"), "causal_align") == "top_left" else 0
    value |= WINDOW if window(window_size) else 0
    value |= SCALE if softmax_scale is not None else 0
    return value | (DETERMINISTIC if switch(deterministic, "deterministic") else 0)


def static_options(function: str, given: dict[str, Any]) -> dict[str, Any]:
    """The numbers and texts among the arguments, as fields of Options."""
    made: dict[str, Any] = window(given["window_size"])
    for option, read, zero in STATIC[function]:
        if option.name in given:
            value = given[option.name]
            made[option.name] = zero if value is None and takes_none(option) else read(value, option.name)
    return made


def takes_none(option: Option) -> bool:
    return option.default is None or option.nullable


def options_of(function: str) -> list[Option]:
    return [option for option in OPTIONS if function in option.functions and option.jax]


READERS: dict[str, tuple[Callable[[Any, str], Any], Any]] = {"float": (real, 0.0), "int": (signed_integer, 0), "str": (text, "")}
STATIC = {
    function: [
        (option, *READERS[option.kind.type])
        for option in options_of(function)
        if option.kind in (_option_list.NUMBER, _option_list.INTEGER, _option_list.TEXT)
    ]
    for function in ("attention", "decode")
}

# -- arrays


def array(x: Any, name: str) -> Array:
    """An array of JAX or NumPy, traced or not."""
    if not isinstance(x, (jax.Array, np.ndarray)) and hasattr(x, "__jax_array__"):  # parameters of neural network libraries
        x = x.__jax_array__()
    if isinstance(x, jax.Array):
        return within_64_bits(x, name)
    if isinstance(x, np.ndarray):
        return native(x, name)
    if isinstance(x, jax.ShapeDtypeStruct):
        raise TypeError(f"{name} is a jax.ShapeDtypeStruct, a shape without data: use jax.eval_shape")
    raise TypeError(f"{name} must be an array of JAX or NumPy, not {described(x)}")


def within_64_bits(x: Array, name: str) -> Array:
    """x, unless it is an array of 64 bits that is older than `jax_enable_x64=False`: JAX makes arrays of 32 bits beside it, in
    results that are filled, in derivatives and where integers are clipped."""
    if x.dtype in (np.float64, np.int64, np.uint64) and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        narrow = x.dtype.name.replace("64", "32")
        raise InvalidError(
            f"{name} is {x.dtype.name}, and jax_enable_x64 is False: JAX would convert parts of the computation to {narrow}; "
            f"call within jax.enable_x64(True), or pass {name}.astype('{narrow}')"
        )
    return x


def native(x: np.ndarray, name: str) -> np.ndarray:
    """x; refuses masked arrays and other byte orders, because a jitted function that is already compiled ignores both."""
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array: its mask would be lost; pass {name}.filled(...)")
    if not x.dtype.isnative:
        raise InvalidError(f"{name} has dtype {x.dtype.str}, which is not in this machine's byte order")
    return x


def arrays_of(**given: Any) -> list[Array]:
    return [array(x, name) for name, x in given.items()]


def lengths(x: Any, name: str) -> Array:
    """Lengths, indices and positions as int32: from arrays of int32 or int64, or lists. An int64 in a JAX array that does not fit
    becomes the nearest int32, because the value may be traced. As a length or an index it is still invalid, and is refused where
    these are checked; as a position it is still after, or before, every key."""
    x = array_or_list(x, name)
    if x.dtype == np.int32:
        return x
    if x.dtype != np.int64:
        raise InvalidError(f"{name} is {x.dtype.name}{list(x.shape)}; it must be int32 or int64")
    if isinstance(x, jax.Array):
        return (x if name == "tree_mask" else jnp.clip(x, INT32.min, INT32.max)).astype(np.int32)  # bits keep the low 32
    for value in (x.min(initial=0), x.max(initial=0)):
        if not INT32.min <= value <= INT32.max:
            raise InvalidError(f"{name} holds {value}, which does not fit int32")
    return x.astype(np.int32)


def array_or_list(x: Any, name: str) -> Array:
    if not isinstance(x, (list, tuple)):
        return array(x, name)
    try:
        made = jnp.asarray(x) if any(isinstance(y, jax.Array) for y in jax.tree.leaves(x)) else np.asarray(x)
    except (OverflowError, TypeError, ValueError) as error:
        raise InvalidError(f"{name} is a list that makes no array of integers: {error}") from error
    return made if made.size else made.astype(np.int32)


def slot_numbers(slots: Any) -> Array:
    """Slots as int32 or int64. Without x64 JAX would convert int64 of NumPy modulo 2**32, and a slot outside of the cache could
    become one inside."""
    slots = array_or_list(slots, "slots")
    if slots.dtype not in (np.int32, np.int64):
        raise InvalidError(f"slots: dtype must be int32 or int64 (it is {slots.dtype})")
    if isinstance(slots, np.ndarray) and slots.dtype == np.int64 and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        return np.clip(slots, INT32.min, INT32.max).astype(np.int32)
    return slots


def operands(given: dict[str, Any]) -> dict[str, Array]:
    """The optional arrays that were given."""
    return {
        name: lengths(x, name) if name in LENGTHS else four_dimensions(x, name) if name in ("bias", "mask") else array(x, name)
        for name, x in given.items()
        if x is not None
    }


def arrays_among(function: str, given: dict[str, Any]) -> dict[str, Array]:
    """The optional arrays among the arguments that were given."""
    return operands({option.name: as_array(option, given[option.name]) for option in ARRAYS[function] if option.name in given})


ARRAYS = {function: [option for option in options_of(function) if option.kind.array] for function in ("attention", "decode")}


def as_array(option: Option, value: Any) -> Any:
    return scale_array(value, option.name) if option.kind is _option_list.SCALES else value


def scale_array(scale: float | Array | None, name: str) -> Array | None:
    """The scale as an array. A number, or an array without dimensions, is one scale for all keys and heads."""
    if isinstance(scale, (jax.Array, np.ndarray)):
        return scale.reshape(1) if scale.ndim == 0 else scale
    if is_scalar(scale) and not np.isfinite(scale):
        raise InvalidError(f"{name} is {scale}; it must be finite")
    return jnp.full(1, scale, jnp.float32) if is_scalar(scale) else scale


def check_bounds(q: Array, k: Array, options: Options, given: dict[str, Any]) -> None:
    """Refuse upper bounds below the lengths that the shapes say, as libflash.attention does."""
    axis = options.layout.index("s")
    for side, x, bound in (("q", q, options.max_seqlen_q), ("k", k, options.max_seqlen_k)):
        known_by_shape = x.ndim == 4 and given[f"cu_seqlens_{side}"] is None and given[f"seqused_{side}"] is None
        if bound > 0 and known_by_shape and isinstance(x.shape[axis], int) and x.shape[axis] > bound:
            raise short_bound(f"max_seqlen_{side}", bound, side, x.shape[axis])


def four_dimensions(x: Any, name: str) -> Array:
    """x with axes of size 1 in front, so that vmap and sharding find the batch and the heads."""
    x = array(x, name)
    if x.ndim > 4:
        raise InvalidError(f"{name} has {x.ndim} dimensions; at most 4")
    return x if x.ndim == 4 else x.reshape((1,) * (4 - x.ndim) + x.shape)


# -- the random state of dropout


def random_state(seed: Any, offset: Any) -> tuple[dict[str, int], Array | None]:
    """Seed and offset, as numbers or as uint32[4], low words first, which the program reads when it runs."""
    seed, offset = checked_random_state(seed, offset)
    if is_number(seed) and is_number(offset):
        return {"seed": signed(seed), "offset": signed(offset)}, None
    if is_integer(seed):
        return {}, jnp.concatenate([two_words(seed), two_words(offset)])
    if seed.shape == (4,):
        return {}, seed
    key = jax.random.wrap_key_data(seed, impl="threefry2x32") if seed.shape == (2,) else seed
    return {}, jax.random.bits(key, (4,), np.uint32)


def checked_random_state(seed: Any, offset: Any) -> tuple[Any, Any]:
    """Seed and offset as numbers or arrays. Also for a call without dropout, which has no other use for them."""
    seed, offset = number_or_array(seed, "seed"), number_or_array(offset, "offset")
    if is_integer(seed):
        if not is_integer(offset):
            raise InvalidError(f"offset is {offset.dtype}{list(offset.shape)}; it must be an integer")
        return seed, offset
    if not is_number(offset) or offset != 0:
        raise InvalidError("offset cannot be given with a PRNG key or uint32[4] as seed, which holds it; give an integer seed")
    words = seed.dtype == np.uint32 and seed.shape in ((2,), (4,))
    if not words and not (jnp.issubdtype(seed.dtype, jax.dtypes.prng_key) and seed.shape == ()):
        raise InvalidError(
            f"seed is {seed.dtype}{list(seed.shape)}; it must be an integer, one PRNG key (jax.random.key, or uint32[2] from "
            "jax.random.PRNGKey), or uint32[4]"
        )
    return seed, offset


def number_or_array(x: Any, name: str) -> Any:
    if isinstance(x, (bool, np.bool_)):
        integer(x, name)  # refuses it
    if not is_number(x):
        if not hasattr(x, "dtype") and not hasattr(x, "__jax_array__"):
            kinds = "an integer or a PRNG key of JAX" if name == "seed" else "an integer"
            raise TypeError(f"{name} must be {kinds}, not {described(x)}")
        return array(x, name)
    if not 0 <= x < 2**64:
        raise InvalidError(f"{name} is {shortened(x)}; it must be from 0 to 2**64 - 1")
    return x


def is_number(x: Any) -> bool:
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool)


def is_integer(x: Any) -> bool:
    """Whether x, a number or an array, is one integer."""
    return is_number(x) or (x.shape == () and jnp.issubdtype(x.dtype, np.integer))


def signed(value: int) -> int:
    """The value as a signed 64-bit integer, the type of XLA's attributes."""
    return int(value) - 2**64 if value >= 2**63 else int(value)


def two_words(x: Any) -> Array:
    """The low and the high 32 bits of an integer, modulo 2**64 if it is an array."""
    if is_number(x):
        x = int(x)
        return jnp.array([x % 2**32, x >> 32], np.uint32)
    narrow = x.dtype.itemsize <= 4
    sign = jnp.where(x < 0, np.uint32(2**32 - 1), np.uint32(0))
    return jnp.stack([jnp.asarray(x).astype(np.uint32), sign if narrow else (x >> 32).astype(np.uint32)])
