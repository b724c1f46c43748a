"""Checks of arguments that the interfaces share: values that must be known, texts, lists of arrays."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from operator import index
from typing import Any

from ._errors import InvalidError, UnsupportedError


def is_traced(x: Any) -> bool:
    """Whether x is JAX's placeholder for a value inside jit, grad and vmap. Where JAX is not loaded, nothing is."""
    tracer = getattr(getattr(sys.modules.get("jax"), "core", None), "Tracer", None)
    return tracer is not None and isinstance(x, tracer)


def shown(x: Any) -> str:
    """A refused value, for an error text."""
    return f"traced ({x.dtype}{list(x.shape)})" if is_traced(x) else shortened(x)


LONGEST = 60  # characters of a value in an error text


def shortened(x: Any) -> str:
    """repr() of x, of a long one its begin. A long list or an integer of many digits is not written in full first."""
    if isinstance(x, (list, tuple)) and len(x) > LONGEST // 2:
        return f"{type(x).__name__} of {len(x)} elements"
    try:
        text = repr(x[: LONGEST + 1] if isinstance(x, (str, bytes)) else x)
    except ValueError:  # Python does not convert integers of more than 4300 digits
        return f"an integer of {x.bit_length()} bits" if isinstance(x, int) else type(x).__name__
    return text if len(text) <= LONGEST else text[:LONGEST] + "..."


def described(x: Any) -> str:
    """A refused object of a wrong kind, for an error text: its type, and its value or shape."""
    kind = type(x).__name__
    if x is None:
        return "None"
    if type(x).__module__ == "numpy" and not hasattr(x, "__dlpack__") and hasattr(x, "item"):
        return f"{kind} ({shortened(x.item())})"
    if hasattr(x, "dtype") and hasattr(x, "shape"):  # an array is never printed: it may be on a GPU, or have no values
        return f"{kind} ({x.dtype}, shape {tuple(x.shape)})"
    if isinstance(x, (bool, int, float, complex, str, bytes)):
        return f"{kind} ({shortened(x)})"
    if isinstance(x, (list, tuple)) and all(isinstance(y, (bool, int, float, str, type(None))) for y in x[: LONGEST // 2 + 1]):
        return f"{kind} ({shortened(x)})"
    return f"{kind} of {len(x)} elements" if isinstance(x, (list, tuple, dict, set)) else kind


def plainly(x: Any) -> str:
    """A refused value whose type is plain from how it is written, such as 'no', 1 or (1, 2, 3); else as described() writes it."""
    return shortened(x) if isinstance(x, (str, int, float, tuple, list)) and not hasattr(x, "dtype") else described(x)


def refuse_traced(x: Any, name: str) -> None:
    """Refuse a value that is not known while JAX compiles the program."""
    if not is_traced(x):
        return
    text = (
        f"{name} is {shown(x)}, and its value is part of the compiled program. Give a Python number: "
        f"name {name.partition('[')[0]} in static_argnames of jax.jit, or close over it"
    )
    if name == "softmax_scale":
        text += "; or multiply q by the scale, which rounds q once more, and give softmax_scale=1.0"
    raise UnsupportedError(text)


def is_bool(x: Any) -> bool:
    """Whether x is True, False, or an array of such values. In Python they are integers."""
    return isinstance(x, bool) or str(getattr(x, "dtype", "")) in ("bool", "torch.bool")


def integer(x: Any, name: str) -> int:
    """An int of Python from an integer of any library."""
    if type(x) is int:
        return x
    refuse_traced(x, name)
    if not is_bool(x):
        try:
            return index(x)
        except TypeError:  # also of an array that holds no single integer
            pass
    raise TypeError(f"{name} must be an integer, not {described(x)}")


def refuse_bool(x: Any, name: str) -> None:
    """Refuse True and False in the place of a real number, as integer() does in the place of an integer."""
    if is_bool(x):
        raise TypeError(f"{name} must be a number, not {described(x)}")


def real(x: Any, name: str) -> float:
    """A float of Python from a number of any library."""
    refuse_traced(x, name)
    refuse_bool(x, name)
    try:
        if not isinstance(x, (str, bytes, bytearray)):
            return float(x)
    except OverflowError:
        raise InvalidError(f"{name} is {shortened(x)}, which does not fit float64") from None
    except (TypeError, ValueError):
        pass
    raise TypeError(f"{name} must be a number, not {described(x)}")


def one_of(value: Any, allowed: Iterable[str | None], name: str) -> Any:
    """value, if it is one of `allowed`. Other types are not compared: an array has no single truth value, and a list no hash."""
    if (value is None or isinstance(value, str)) and value in allowed:
        return value
    *others, last = map(repr, allowed)
    raise InvalidError(f"{name} is {shown(value)}; it must be {', '.join(others)} or {last}")


def refuse_key(x: Any, name: str) -> None:
    """Refuse a PRNG key of JAX: an array of keys, or uint32[2] as jax.random.PRNGKey makes it."""
    jax, dtype = sys.modules.get("jax"), str(getattr(x, "dtype", ""))
    if jax is None or not isinstance(x, jax.Array):
        return
    if dtype.startswith("key<") or (dtype == "uint32" and x.shape == (2,)):
        raise TypeError(
            f"{name} is {dtype}{list(x.shape)}, a PRNG key; it must be an integer, such as int(jax.random.bits(key)). "
            "libflash.jax.attention takes a key as seed"
        )


def refuse_subclass(x: Any, name: str) -> None:
    """Refuse a tensor of PyTorch whose class has operations of its own, with what is a plain tensor of the same numbers."""
    plain = f"{name}.as_subclass(torch.Tensor)"
    if hasattr(x, "full_tensor"):  # a DTensor, which has no memory of its own
        plain = f"{name}.to_local() is this rank's part, {name}.full_tensor() the whole"
    raise TypeError(
        f"{name} is a {type(x).__module__}.{type(x).__name__}, a subclass of torch.Tensor with operations of its own, which "
        f"libflash would not call; pass a plain tensor: {plain}"
    )


def check_parts(outs: Any, lses: Any) -> None:
    """Check the containers that merge gets."""
    for name, given in (("outs", outs), ("lses", lses)):
        if not isinstance(given, (list, tuple)):
            raise TypeError(f"{name} must be a list or tuple of arrays, not {described(given)}")
    if len(outs) != len(lses):
        raise InvalidError(f"outs has {len(outs)} arrays and lses {len(lses)}; they must have the same length")
    if not 1 <= len(outs) < 2**31:
        raise InvalidError(f"outs has {len(outs)} arrays; it needs 1 or more, and fewer than 2**31")


def short_bound(name: str, bound: int, array: str, length: int) -> InvalidError:
    return InvalidError(f"{name} is {bound}; it must be at least every length, and the seqlen of {array} is {length}")


Shape = tuple[int, ...]
LAYOUTS = ("bshd", "bhsd", "sbhd")


def layout_hint(text: str, layout: str, q: Shape, k: Shape, v: Shape) -> str:
    """What to add to an error text about the shapes of k and v: the layouts in which these arrays would agree."""
    if not text.startswith(("k: the heads", "k: shape", "v: shape")) or not len(q) == len(k) == len(v) == 4:
        return ""
    others = [f'layout="{other}"' for other in LAYOUTS if other != layout and shapes_agree(other, q, k, v)]
    if not others or shapes_agree(layout, q, k, v):
        return ""
    return f'; layout is "{layout}", and q, k and v have shapes {q}, {k} and {v}: they agree with {" or ".join(others)}'


def shapes_agree(layout: str, q: Shape, k: Shape, v: Shape) -> bool:
    batch, rows, heads = (layout.index(axis) for axis in "bsh")
    if not q[batch] == k[batch] == v[batch] or k[rows] != v[rows] or k[heads] != v[heads] or q[3] != k[3]:
        return False
    return k[heads] > 0 and q[heads] % k[heads] == 0
