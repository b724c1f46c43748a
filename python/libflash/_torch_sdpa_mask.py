"""The dropout mask of libflash where PyTorch's tests ask for that of its memory-efficient kernel."""

from __future__ import annotations

import torch

from . import _core
from ._errors import UnsupportedError
from ._torch_sdpa_random import MARK

Tensor = torch.Tensor
CHUNK = 64  # keys at a time: a head_dim_v that every kernel has


def fill_mask(self: Tensor, dropout_p: float, seed: int, offset: int) -> Tensor:
    """Fill self, (batch, heads, seqlen_q, seqlen_k), with 1 where the mask of seed keeps an entry and 0 where it drops it.

    PyTorch's kernel fills in the random numbers, which are compared with dropout_p. The library never has this matrix: with
    one-hot values, out holds its columns.
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
