"""Arguments of the functions of flash_attn.py, as libflash takes them."""

from __future__ import annotations

import sys
from typing import Any

from . import _core
from . import _flash_attn_three as three
from ._arguments import plainly, refuse_traced
from ._errors import InvalidError

Array = Any
NO_WINDOW = (-1, -1)


def check_flags(**flags: Any) -> None:
    for name, x in flags.items():
        if type(x) is not bool:
            _core.flag(x, name)


def window_of(window_size: Any) -> tuple[int | None, int | None]:
    """(left, right) from a pair or an array of two integers, as in flash-attn."""
    if window_size is None:
        return NO_WINDOW
    if not isinstance(window_size, (tuple, list)):
        refuse_traced(window_size, "window_size")
    pair = window_size.tolist() if hasattr(window_size, "tolist") else window_size
    try:
        left, right = (None if x is None else three.size(x, f"window_size[{i}]") for i, x in enumerate(pair))
    except (TypeError, ValueError) as error:
        raise TypeError(f"window_size must be two integers (left, right), not {plainly(window_size)}") from error
    return left, right


def contiguous_rows(x: Any) -> Any:
    """x; a copy of a PyTorch tensor whose last dimension is not contiguous, as in flash-attn."""
    return x.contiguous() if x is not None and three.is_tensor(x) and x.stride(-1) != 1 else x


def unpack(packed: Array, count: int, name: str, ndim: int) -> Any:
    three.require_arrays(**{name: packed})
    if packed.ndim != ndim or packed.shape[-3] != count:
        raise InvalidError(
            f"{name} has shape {tuple(packed.shape)}; it needs {ndim} dimensions, the last but two of size {count}"
        )
    if three.is_tensor(packed):
        return tuple(packed.unbind(-3))  # the gradient of unbind is a single stack
    return tuple(packed[..., i, :, :] for i in range(count))


def full_lengths(q: Array, given: Any, batch: int) -> Array:
    length = given if three.is_symbolic(given) else int(given)
    if isinstance(given, bool) or not 0 <= length < 2**31:
        raise InvalidError(f"cache_seqlens is {given}; as a number it must be 0 to 2**31 - 1")
    if three.is_tensor(q):
        from ._torch_dtensor import beside

        torch = sys.modules["torch"]
        return beside(q, torch.full((batch,), length, dtype=torch.int32, device=q.device))
    if three.is_instance(
        q, "jax", "Array"
    ):  # not on q's device: inside jit there is none, and JAX moves an array that is on no chosen device
        return sys.modules["jax.numpy"].full((batch,), length, dtype="int32")
    module = q.__array_namespace__() if hasattr(q, "__array_namespace__") else sys.modules[type(q).__module__.partition(".")[0]]
    return module.full((batch,), length, dtype="int32")


def numpy_seed(q: Array) -> int:
    if not three.is_instance(q, "numpy", "ndarray"):
        raise InvalidError(f"dropout_p: no generator is known for {type(q).__name__}; call libflash.attention with a seed")
    return int(sys.modules["numpy"].random.randint(2**63 - 1, dtype="int64"))


def splits_option(num_splits: int) -> dict[str, Any]:
    """num_splits, if given. With 0, libflash's default, the library chooses."""
    return {} if type(num_splits) is int and num_splits == 0 else {"num_splits": num_splits}
