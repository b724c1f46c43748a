"""The options of libflash.torch for type checkers and editors: one list an operation, which its overloads share."""

from __future__ import annotations

from typing import Literal, TypedDict

from torch import Tensor

from ._block_mask import BlockMask

Window = tuple[int | None, int | None] | list[int | None] | None


class ScoreOptions(TypedDict, total=False):
    causal: bool
    window_size: Window
    softmax_scale: float | None
    softcap: float | None
    alibi_slopes: Tensor | None
    learnable_sink: Tensor | None
    num_splits: int
    out: Tensor | None
    lse: Tensor | None
    backend: str | None
    kernel: str | None


class AttentionOptions(ScoreOptions, total=False):
    causal_align: Literal["bottom_right", "top_left"]
    bias: Tensor | None
    mask: Tensor | None
    block_mask: Tensor | BlockMask | None
    dropout_p: float
    seed: int | Tensor | None
    offset: int
    layout: Literal["bshd", "bhsd", "sbhd"]
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    deterministic: bool


class DecodeOptions(ScoreOptions, total=False):
    cache_seqlens: Tensor | None
    block_table: Tensor | None
    cache_batch_idx: Tensor | None
    cache_leftpad: Tensor | None
    k: Tensor | None
    v: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    rotary_interleaved: bool
    split_size: int


class MergeOptions(TypedDict, total=False):
    layout: Literal["bshd", "bhsd", "sbhd"]
    out: Tensor | None
    lse: Tensor | None
    backend: str | None
    kernel: str | None
