"""The options for type checkers and editors: one list per operation, which overloads and adapters share.

`A` is the type of an option's array: any array with DLPack for libflash.attention, a tensor for libflash.torch.
python/write_options writes ScoreOptions, AttentionOptions and DecodeOptions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Literal, TypeAlias, TypedDict, TypeVar

from ._block_mask import BlockMask

A = TypeVar("A")
Window: TypeAlias = Sequence[int | None] | None
Shard: TypeAlias = Sequence[int]
Align: TypeAlias = Literal["bottom_right", "top_left"]
CacheDtype: TypeAlias = Literal["e4m3", "e5m2"]
Layout: TypeAlias = Literal["bshd", "bhsd", "sbhd"]


class CallOptions(TypedDict, total=False):
    backend: str | None
    kernel: str | None


class Results(TypedDict, Generic[A], total=False):
    out: A | None
    lse: A | None


class ScoreOptions(CallOptions, Generic[A], total=False):
    causal: bool
    window_size: Window
    softmax_scale: float | None
    softcap: float | None
    alibi_slopes: A | None
    learnable_sink: A | None
    num_splits: int


class AttentionOptions(ScoreOptions[A], Generic[A], total=False):
    """The options of attention and attention_backward, without seed, whose type differs between the adapters."""

    causal_align: Align
    bias: A | None
    mask: A | None
    block_mask: A | BlockMask | None
    dropout_p: float
    offset: int
    layout: Layout
    cu_seqlens_q: A | None
    cu_seqlens_k: A | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    seqused_q: A | None
    seqused_k: A | None


class DecodeOptions(ScoreOptions[A], Results[A], Generic[A], total=False):
    cache_seqlens: A | None
    block_table: A | None
    cache_batch_idx: A | None
    cache_leftpad: A | None
    k: A | None
    v: A | None
    rotary_cos: A | None
    rotary_sin: A | None
    rotary_interleaved: bool
    split_size: int
    k_scale: float | A | None
    v_scale: float | A | None
    k_rope_cache: A | None
    k_rope: A | None
    head_dim_v: int | None
    cache_dtype: CacheDtype | None
    cu_seqlens_q: A | None
    cu_seqlens_new: A | None
    q_positions: A | None
    tree_mask: A | None
    cu_seqlens_tree: A | None
    shared_groups: A | None
    shared_lens: A | None
    schedule: A | None
    shard: Shard
    invariant: bool


class MergeOptions(CallOptions, Results[A], Generic[A], total=False):
    layout: Layout
