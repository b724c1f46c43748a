"""The attention function for continuous batching in Hugging Face transformers (`model.generate_batch`).

transformers packs chunks of prompts and single new tokens of many requests into one row, (1, heads, total, head_dim), and keeps
keys and values in pages. A layer with full attention is one call of `libflash.decode`, which appends the new keys to the pages
and reads the pages in place. For layers with a sliding window, whose pages are a ring buffer that new keys overwrite,
transformers gathers the keys of each request, and one call with packed sequences computes attention over them.

The name contains "flash", because transformers makes masks of (total, all keys) for other names and refuses unknown names.
enable(model, paged=True) sets the name: if a user requested such a name, transformers would look for a package.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._compile import _disable_dynamo as outside_of_compilers

from ._errors import UnsupportedError
from ._torch_hf import in_accepted_type, refuse_unknown
from ._torch_hf_weights import refuse_weights

NAME = "lf_flash_paged"

Tensor = torch.Tensor

# Keywords of continuous batching that other parts of the model and of transformers read.
HARMLESS = {"logits_indices", "logits_processor_args", "max_length_q"}


@outside_of_compilers  # the pages are views of one tensor, which every layer writes
def forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    cache: Any = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: dict[str, Tensor] | None = None,
    max_length_k: dict[str, int] | None = None,
    read_index: list[Tensor] | None = None,
    write_index: list[Tensor] | None = None,
    block_table: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query (1, heads, total, head_dim), key and value with their own number of heads; out (1, total, heads, head_dim).

    cache : transformers' PagedAttentionCache, to which the new keys and values are added
    cu_seq_lens_q : (requests + 1,); cu_seq_lens_k : likewise for all keys, including new keys, for each type of layer
    read_index, write_index : for each type of layer, the rows of the cache that hold the keys, and the rows for the new keys
    block_table : (types of layers, requests, columns), in place of read_index and write_index

    Raises UnsupportedError for unknown arguments and for options that a paged cache of transformers cannot have.
    """
    refuse_unknown(module, others, NAME, HARMLESS)
    refuse_weights(module, others, NAME)
    kind = type(module).__name__
    if cache is None or cu_seq_lens_q is None or cu_seq_lens_k is None:
        raise UnsupportedError(
            f"{kind} passes no paged cache; {NAME} serves generate_batch() alone, and models that hand its arguments to their "
            "attention; for other calls use libflash.torch.enable(model) without paged=True"
        )
    refuse_other_mathematics(module, attention_mask, is_causal, dropout, s_aux)
    allocator = allocator_of(cache, module)
    options: dict[str, Any] = {"causal": True, "softmax_scale": scaling, "softcap": softcap or 0.0}
    window = window_of(allocator, kind, sliding_window)
    if window is not None:
        options["window_size"] = (window - 1, 0)
    if s_aux is not None:
        options["learnable_sink"] = in_accepted_type(query, s_aux)

    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    options["cu_seqlens_q"] = ends = cu_seq_lens_q.to(torch.int32)
    keys = cu_seq_lens_k[allocator.layer_type].to(torch.int32)
    if allocator.supports_block_table:
        # Each block of the cache has a page of keys and a page of values of every layer: the stride between the pages of one
        # layer.
        step = allocator.block_physical_stride // allocator.tokens_per_page
        pages = tuple(x[::step] for x in allocator.get_cache_for_block_table(module.layer_idx))
        if block_table is not None:
            table = block_table[allocator.index] // step
        else:
            longest = max_length_k[allocator.layer_type] if max_length_k else None
            table = table_of(rows_of(allocator, read_index, write_index), keys, allocator, longest)
        return in_pages(q, k, v, pages, table, keys.diff() - ends.diff(), options)[None], None
    given = {"cu_seq_lens_k": cu_seq_lens_k, "max_length_k": max_length_k, "read_index": read_index, "write_index": write_index}
    if block_table is not None:
        raise UnsupportedError(f"{kind} passes block_table for a sliding window; set max_blocks_per_request to 0")
    gathered = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=given)
    return in_rows(q, *(x[0].transpose(0, 1) for x in gathered), keys, options)[None], None


def in_pages(
    q: Tensor, k: Tensor, v: Tensor, pages: tuple[Tensor, ...], table: Tensor, before: Tensor, options: dict[str, Any]
) -> Tensor:
    """Append k and v to the pages, after the `before` keys of each request, and attend to them there."""
    from .torch import decode

    k_pages, v_pages = pages
    out = decode(q, k_pages, v_pages, k=k, v=v, cache_seqlens=before, block_table=table, **options)
    assert isinstance(out, Tensor)
    return out


def in_rows(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_k: Tensor, options: dict[str, Any]) -> Tensor:
    from .torch import attention

    out = attention(q, k, v, cu_seqlens_k=cu_seqlens_k, **options)
    assert isinstance(out, Tensor)
    return out


def rows_of(allocator: Any, read_index: list[Tensor] | None, write_index: list[Tensor] | None) -> Tensor:
    """The rows of the cache that hold the keys of this step. Nothing is read if no request has older keys."""
    assert read_index is not None
    assert write_index is not None
    rows = read_index[allocator.index]
    return rows if rows.numel() else write_index[allocator.index]


def table_of(rows: Tensor, cu_seqlens_k: Tensor, allocator: Any, longest: int | None = None) -> Tensor:
    """(requests, columns): the blocks of requests whose keys are these rows of the cache, one request after the other.

    A page is the first rows of a block. Each request begins at the start of a page, and its rows are consecutive inside a page.
    -1 means that a request has no page. With `longest`, the most keys of a request, the host does not wait for the GPU.
    """
    page_size, block_size = allocator.tokens_per_page, allocator.block_physical_stride
    lengths = cu_seqlens_k.diff()
    if longest is None:
        longest = int(lengths.max()) if len(lengths) else 0
    first = torch.arange(0, max(longest, 1), page_size, device=rows.device)
    inside = first < lengths[:, None]
    at = (cu_seqlens_k[:-1, None] + first).clamp(max=max(len(rows) - 1, 0))
    starts = torch.where(inside, rows[at], -block_size) if len(rows) else torch.full_like(at, -block_size)
    check_rows(starts % block_size == 0)
    return (starts // block_size).to(torch.int32)


def check_rows(expected: Tensor) -> None:
    """Check the rows. On a GPU a device-side assertion fails instead, so that the host need not wait."""
    said = f"transformers {version()} writes keys to other rows of its cache than {NAME} expects"
    if expected.is_cuda:
        torch.ops.aten._assert_async.msg(expected.all(), said)
    elif not expected.all():
        raise UnsupportedError(said)


def refuse_other_mathematics(
    module: torch.nn.Module, attention_mask: Tensor | None, is_causal: bool | None, dropout: float, s_aux: Tensor | None
) -> None:
    kind = type(module).__name__
    if attention_mask is not None:
        raise UnsupportedError(f"{kind} passes an attention_mask with a paged cache; {NAME} knows causality and windows only")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedError(f"{kind} is not causal; {NAME} serves causal attention only")
    if dropout and module.training:
        raise UnsupportedError(f"{kind} passes dropout={dropout} with a paged cache; continuous batching is for evaluation")
    if s_aux is None and getattr(module, "sinks", None) is not None:
        raise UnsupportedError(f"{kind} has sinks and passes no s_aux")


def window_of(allocator: Any, kind: str, sliding_window: int | None) -> int | None:
    """How many keys a row sees, including its own. None: all."""
    kept: int | None = getattr(allocator, "sliding_window", None)
    if kept is not None and sliding_window is not None and sliding_window != kept:
        raise UnsupportedError(f"{kind} passes sliding_window={sliding_window}; its cache keeps {kept} keys")
    return sliding_window if kept is None else kept


def allocator_of(cache: Any, module: torch.nn.Module) -> Any:
    """transformers' allocator of the layer's pages."""
    try:
        return cache.layer_to_allocator[module.layer_idx]
    except AttributeError as error:
        raise UnsupportedError(f"transformers {version()}: {error}; {NAME} needs version 5.23 or later") from error


def version() -> str:
    import transformers

    return str(transformers.__version__)


def mask(*args: Any, use_vmap: bool = False, **options: Any) -> None:
    """Returns no mask: causality and windows need none here. use_vmap: the model has its own mask rule."""
    if use_vmap:
        raise UnsupportedError(f"the model makes a mask with a rule of its own; {NAME} knows causality and windows only")


def register() -> None:
    """Register the name in transformers; repeated calls change nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, forward)
    AttentionMaskInterface.register(NAME, mask)
