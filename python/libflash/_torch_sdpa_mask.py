"""The operator with which PyTorch's tests get the dropout mask of memory-efficient attention. It returns libflash's mask."""

from __future__ import annotations

import torch

from . import _core
from ._errors import UnsupportedError
from ._torch_sdpa_random import MARK

Tensor = torch.Tensor
CHUNK = 64  # keys at a time; every kernel supports this head_dim_v


def fill_mask(self: Tensor, dropout_p: float, seed: int, offset: int) -> Tensor:
    """Fill self, (batch, heads, seqlen_q, seqlen_k), with 1 where the mask of seed keeps an entry and 0 where it drops it.

    PyTorch's kernel returns random numbers instead, which its tests compare with dropout_p. The library does not store this
    matrix. It is computed by attention itself: with one-hot values, out has the columns of the mask.
    """
    if offset != MARK:
        raise UnsupportedError("offset: PyTorch's kernel drew the mask")
    batch, heads, rows, keys = self.shape
    q, k = self.new_zeros((batch, heads, rows, CHUNK)), self.new_zeros((batch, heads, keys, CHUNK))
    for first in range(0, keys, CHUNK):
        v = self.new_zeros((keys, CHUNK))
        v[first : first + CHUNK].fill_diagonal_(1)
        kept = _core.attention(
            q, k, v.expand(batch, heads, keys, CHUNK), layout="bhsd", dropout_p=dropout_p, seed=seed, offset=offset
        )
        self[..., first : first + CHUNK] = kept[..., : keys - first] > 0
    return self
