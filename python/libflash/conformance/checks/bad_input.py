"""Calls with invalid arguments. A target must refuse them with an exception of any type; a result would be silently wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from ..case import Inputs
from ..needs import inputs_of
from ..rounding import DTYPES
from .check import qkv


@dataclasses.dataclass(frozen=True)
class BadInput:
    name: str
    make: Callable[..., Inputs]  # from q, k, v
    argument: str  # regular expression for the argument that libflash's own error names
    needs: str = ""  # words of needs.ALL: a target that does not offer them is not called
    contents: bool = False  # the error is in numbers in an array, which on a GPU only a kernel reads

    def __str__(self) -> str:
        return self.name

    def inputs(self, dtype: str) -> Inputs:
        return self.make(*qkv(dtype=DTYPES[dtype]))


def with_options(**options: Any) -> Callable[..., Inputs]:
    return lambda q, k, v: inputs_of(q, k, v, **options)


def lengths(*bounds: int) -> np.ndarray:
    return np.array(bounds, np.int32)


def packed(cu_seqlens_q: np.ndarray, cu_seqlens_k: np.ndarray) -> Callable[..., Inputs]:
    return lambda q, k, v: inputs_of(q[0], k[0], v[0], cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)


def biased(*shape: int) -> Callable[..., Inputs]:
    return lambda q, k, v: inputs_of(q, k, v, bias=np.zeros(shape, q.dtype))


def other_type(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Inputs:
    return inputs_of(q, k.astype(DTYPES["fp16" if q.dtype != np.float16 else "fp32"]), v)


def other_batch(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> Inputs:
    return inputs_of(np.concatenate([q] * 3), np.concatenate([k] * 2), np.concatenate([v] * 2))


# The problem: 1 sequence, 40 queries, 56 keys, 4 query heads, 2 key heads, head_dim 16.
ROWS = [
    BadInput("types of q and k differ", other_type, "k"),
    BadInput("heads of k do not divide heads of q", lambda q, k, v: inputs_of(q[:, :, :3].copy(), k, v), "heads"),
    BadInput("head_dim of q and k differ", lambda q, k, v: inputs_of(q[..., :8].copy(), k, v), "head_dim"),
    BadInput("heads of k and v differ", lambda q, k, v: inputs_of(q, k, v[:, :, :1].copy()), "v"),
    BadInput("lengths of k and v differ", lambda q, k, v: inputs_of(q, k, v[:, 1:].copy()), "v"),
    BadInput("batch of q and k differ", other_batch, "k"),
    BadInput("softmax_scale is NaN", with_options(softmax_scale=float("nan")), "softmax_scale", "softmax_scale"),
    BadInput("softmax_scale is infinite", with_options(softmax_scale=float("inf")), "softmax_scale", "softmax_scale"),
    BadInput("softcap is negative", with_options(softcap=-1.0), "softcap", "softcap"),
    BadInput("softcap is NaN", with_options(softcap=float("nan")), "softcap", "softcap"),
    BadInput("dropout_p is 1", with_options(dropout_p=1.0), "dropout_p", "dropout_p"),
    BadInput("dropout_p is negative", with_options(dropout_p=-0.5), "dropout_p", "dropout_p"),
    BadInput("window_size is below -1", with_options(window_size=(-2, 0)), "window", "window_size bottom_right"),
    BadInput(
        "alibi_slopes of another number of heads",
        with_options(alibi_slopes=np.ones(3, np.float32)),
        "alibi_slopes",
        "alibi_slopes",
    ),
    BadInput("bias with fewer keys", biased(1, 1, 40, 55), "bias", "bias"),
    BadInput("bias of another number of heads", biased(1, 3, 40, 56), "bias", "bias"),
    BadInput("mask with fewer queries", with_options(mask=np.ones((1, 1, 39, 56), bool)), "mask", "mask"),
    BadInput(
        "learnable_sink of another number of heads",
        with_options(learnable_sink=np.zeros(3, np.float32)),
        "learnable_sink",
        "learnable_sink",
    ),
    BadInput("seqused_k beyond the sequence", with_options(seqused_k=lengths(57)), "seqused_k", "seqused_k", contents=True),
    BadInput("seqused_k is negative", with_options(seqused_k=lengths(-1)), "seqused_k", "seqused_k", contents=True),
    BadInput("seqused_k of another batch", with_options(seqused_k=lengths(5, 5)), "seqused_k", "seqused_k"),
    BadInput(
        "cu_seqlens_q decreases",
        packed(lengths(0, 30, 20, 40), lengths(0, 20, 30, 56)),
        "cu_seqlens_q",
        "cu_seqlens_q",
        contents=True,
    ),
    BadInput(
        "cu_seqlens_k ends beyond the rows", packed(lengths(0, 40), lengths(0, 57)), "cu_seqlens_k", "cu_seqlens_q", contents=True
    ),
    BadInput(
        "cu_seqlens_q does not begin with 0",
        packed(lengths(1, 40), lengths(0, 56)),
        "cu_seqlens_q",
        "cu_seqlens_q",
        contents=True,
    ),
]
