"""Random state of dropout in PyTorch's attention operators.

A forward operator returns two tensors that only its backward operator reads. PyTorch's kernels store a Philox seed and offset in
them, libflash a seed and MARK. From the second tensor a backward operator knows which library drew the mask: the forward pass may
have run on PyTorch's kernel although libflash is active now, or vice versa.

The tensors are in host memory. While a CUDA graph is captured they are on the device, because the graph draws a new seed in each
replay. Their values cannot be read then, and the storage offset of the second tensor says which library drew the mask.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch

from ._errors import UnsupportedError

Tensor = torch.Tensor
MARK = int.from_bytes(b"libflash", "big")  # PyTorch's offsets are small multiples of 4
MARK_OFFSET = 2  # storage offset of the second tensor; PyTorch's is 0. PyTorch's compiler requires 16 bytes of alignment

masks: Counter[str] = Counter()  # "drawn": number of masks since the process began


class RandomState(NamedTuple):
    """Options of the library, and the numbers (seed, MARK, MARK, unused) for the backward pass."""

    options: dict[str, Any]
    numbers: Tensor


def capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def draw(dropout_p: float, query: Tensor) -> RandomState:
    """A new state from PyTorch's default generator; while a graph is captured, from the device's generator."""
    device = query.device if capturing(query) else torch.device("cpu")
    if dropout_p == 0:
        return RandomState({}, torch.zeros(4, dtype=torch.int64, device=device))
    masks["drawn"] += 1
    numbers = torch.randint(2**63 - 1, (4,), dtype=torch.int64, device=device)
    numbers[1:].fill_(MARK)
    state = {"seed": numbers[:2]} if capturing(query) else {"seed": int(numbers[0]), "offset": MARK}
    return RandomState({"dropout_p": dropout_p, **state}, numbers)


def as_rng_state(state: RandomState) -> tuple[Tensor, Tensor]:
    """For operators that return rng_state, two elements, and a tensor that they do not use."""
    return state.numbers[:2].view(torch.uint64), state.numbers[MARK_OFFSET].view(torch.uint64)


def as_seed_and_offset(state: RandomState) -> tuple[Tensor, Tensor]:
    """For operators that return seed and offset, one element each."""
    return state.numbers[0], state.numbers[MARK_OFFSET]


def is_ours(second: Tensor | None) -> bool:
    """True if libflash drew the mask; `second` is the second tensor of the state."""
    if second is None or second.numel() != 1:
        return False
    if capturing(second):
        return second.storage_offset() == MARK_OFFSET
    return int(second.view(torch.int64)) == MARK  # PyTorch's is uint64 and, without dropout, any number


def redraw(dropout_p: float, first: Tensor, second: Tensor | None) -> dict[str, Any]:
    """The options of a backward pass, from the state that the forward pass returned.

    Raises UnsupportedError for the state of a mask that PyTorch's kernel drew.
    """
    if dropout_p == 0:
        return {}
    if second is None or not is_ours(second):
        raise UnsupportedError("dropout_p: PyTorch's kernel drew the mask in the forward pass")
    if first.is_cuda or capturing(first):
        return {"dropout_p": dropout_p, "seed": first if first.numel() == 2 else torch.stack([first, second])}
    return {"dropout_p": dropout_p, "seed": int(first.flatten()[0]), "offset": MARK}
