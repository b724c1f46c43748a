"""Random state of dropout in PyTorch's attention operators.

A forward operator returns two tensors that only its backward operator reads. PyTorch's kernels keep a Philox seed and offset
there. libflash keeps a seed and, in the second tensor, MARK, so that a backward operator knows whose mask it has to draw again:
a forward pass may run on one library and its backward pass start when the other one is active.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch

from ._errors import UnsupportedError

Tensor = torch.Tensor
MARK = int.from_bytes(b"libflash", "big")  # PyTorch's offsets are small multiples of 4

masks: Counter[str] = Counter()  # "drawn": how many since the process began


class RandomState(NamedTuple):
    """What forward and backward share: `options` for the library, and the seed as a number."""

    options: dict[str, Any]
    seed: int


def draw(dropout_p: float) -> RandomState:
    """A new state from PyTorch's default generator."""
    if dropout_p == 0:
        return RandomState({}, 0)
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError("dropout_p: dropout in a CUDA graph would drop the same entries in every replay")
    masks["drawn"] += 1
    seed = int(torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu"))
    return RandomState({"dropout_p": dropout_p, "seed": seed, "offset": MARK}, seed)


def as_rng_state(state: RandomState) -> tuple[Tensor, Tensor]:
    """For operators that return rng_state, two elements, and a tensor that they do not use."""
    mark = MARK if state.options else 0
    return torch.tensor([state.seed, mark], dtype=torch.uint64), torch.tensor(mark, dtype=torch.uint64)


def as_seed_and_offset(state: RandomState) -> tuple[Tensor, Tensor]:
    """For operators that return seed and offset, one element each."""
    return torch.tensor(state.seed), torch.tensor(MARK if state.options else 0)


def is_ours(second: Tensor | None) -> bool:
    """Whether libflash drew the mask, from the second tensor of the state. PyTorch's is on the device under graph capture, where
    it cannot be read."""
    return second is not None and second.device.type == "cpu" and second.numel() == 1 and int(second) == MARK


def redraw(dropout_p: float, first: Tensor, second: Tensor | None) -> dict[str, Any]:
    """The options of a backward pass from the state that the forward pass returned.

    Raises UnsupportedError for the state of a mask that PyTorch's kernel drew.
    """
    if dropout_p == 0:
        return {}
    if not is_ours(second):
        raise UnsupportedError("dropout_p: PyTorch's kernel drew the mask in the forward pass")
    return {"dropout_p": dropout_p, "seed": int(first.flatten()[0]), "offset": MARK}
