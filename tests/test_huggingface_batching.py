"""Continuous batching of transformers (generate_batch) on libflash: the tokens that generate() gives for each prompt alone."""

from __future__ import annotations

import types
from typing import Any

import pytest

import libflash

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.generation.continuous_batching.cache_allocators", reason="needs transformers 5.23 or later")

import libflash.torch  # noqa: E402
from huggingface_batching import LENGTHS, check, check_kind, prompts  # noqa: E402
from huggingface_checks import one_thread  # noqa: E402, F401
from huggingface_models import MODELS, Tiny, cases  # noqa: E402
from transformers.generation.continuous_batching import initialization  # noqa: E402
from transformers.generation.continuous_batching.cache import PagedAttentionCache  # noqa: E402

from libflash import _torch_hf_paged as paged  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

DECODERS = [tiny for tiny in MODELS if tiny.takes == "text"]
NAMED = {str(tiny): tiny for tiny in MODELS}
LLAMA, MISTRAL, GEMMA3 = NAMED["LlamaForCausalLM"], NAMED["MistralForCausalLM"], NAMED["Gemma3ForCausalLM"]


@pytest.mark.parametrize("tiny", cases(DECODERS))
def test_tokens_are_those_of_generate(tiny: Tiny) -> None:
    """Chunks of prompts beside rows of decode; grouped queries, windows, sinks, softcap."""
    check_kind(tiny)


@pytest.mark.parametrize(("page_size", "rows"), [(4, 5), (16, 64), (7, 3)])
@pytest.mark.parametrize("tiny", [LLAMA, MISTRAL, GEMMA3], ids=str)
def test_pages_and_chunks_of_any_size(tiny: Tiny, page_size: int, rows: int) -> None:
    check(tiny.build(), prompts(*LENGTHS), page_size=page_size, max_batch_tokens=rows)


def test_pages_of_full_attention_are_read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers gathers keys for sliding windows only."""
    gathered = []
    update = PagedAttentionCache.update

    def watched(cache: Any, **given: Any) -> Any:
        gathered.append(given["layer_idx"])
        return update(cache, **given)

    monkeypatch.setattr(PagedAttentionCache, "update", watched)
    check(LLAMA.build(), prompts(*LENGTHS))
    assert gathered == []
    check(GEMMA3.build(), prompts(*LENGTHS))
    assert set(gathered) == {0}


def test_shared_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    matched = []
    search = PagedAttentionCache.search_prefix_match

    def watched(cache: Any, request_id: str, prompt_ids: list[int]) -> int:
        matched.append(search(cache, request_id, prompt_ids))
        return matched[-1]

    monkeypatch.setattr(PagedAttentionCache, "search_prefix_match", watched)
    begin = prompts(14)[0]
    check(LLAMA.build(), prompts(3, 9, 1, begin=begin), max_requests_per_batch=1)
    assert max(matched) >= 12


def test_block_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers passes them on a GPU, for steps without prompts. Here without its condition."""
    monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", lambda *given: None)
    seen = []
    in_pages = paged.in_pages

    def watched(q: Any, k: Any, v: Any, pages: Any, table: Any, before: Any, options: Any) -> Any:
        seen.append(table.shape[1])
        return in_pages(q, k, v, pages, table, before, options)

    monkeypatch.setattr(paged, "in_pages", watched)
    check(LLAMA.build(), prompts(*LENGTHS), max_blocks_per_request=10)
    assert 10 in seen


def test_padded_steps() -> None:
    """torch.compile makes transformers pad rows and requests of a step."""
    compiled = transformers.CompileConfig(backend="eager", fullgraph=False)
    check(LLAMA.build(), prompts(5, 2), varlen_compile_config=compiled, q_padding_interval_size=8, kv_padding_interval_size=32)


# -- the function by itself


class Layer(torch.nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.is_causal, self.layer_idx = True, 0
        for name, x in attributes.items():
            setattr(self, name, x)


class Ring:
    """An allocator of a layer with a window of 5."""

    layer_type, index, supports_block_table, sliding_window = "sliding_attention", 0, False, 5


class RingCache:
    def __init__(self) -> None:
        self.layer_to_allocator = {0: Ring()}

    def update(self, *, key_states: Any, value_states: Any, layer_idx: int, kwargs: dict[str, Any]) -> Any:
        return key_states, value_states


def call(layer: Layer, *, mask: Any = None, **options: Any) -> Any:
    x = torch.randn(1, 2, 7, 8, generator=torch.Generator().manual_seed(0))
    ends = torch.tensor([0, 7], dtype=torch.int32)
    given = {"cache": RingCache(), "cu_seq_lens_q": ends, "cu_seq_lens_k": {"sliding_attention": ends}, **options}
    return paged.forward(layer, x, x, x, mask, **given)[0], x


def test_the_window_is_that_of_the_cache() -> None:
    got, x = call(Layer().eval())
    rows = x.transpose(1, 2)
    assert torch.equal(got, libflash.torch.attention(rows, rows, rows, causal=True, window_size=(4, 0)))
    assert torch.equal(call(Layer().eval(), sliding_window=5)[0], got)


REFUSALS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no cache": ({}, {"cache": None}, "Layer passes no paged cache; lf_flash_paged serves generate_batch"),
    "no lengths": ({}, {"cu_seq_lens_k": None}, "Layer passes no paged cache"),
    "mask": ({}, {"mask": torch.ones(1, 1, 7, 7)}, "Layer passes an attention_mask with a paged cache"),
    "not causal": ({"is_causal": False}, {}, "Layer is not causal"),
    "told not causal": ({}, {"is_causal": False}, "Layer is not causal"),
    "dropout": ({}, {"dropout": 0.1}, "Layer passes dropout=0.1 with a paged cache"),
    "sinks": ({"sinks": 1}, {}, "Layer has sinks and passes no s_aux"),
    "window": ({}, {"sliding_window": 6}, "Layer passes sliding_window=6; its cache keeps 5 keys"),
    "unknown": ({}, {"position_bias": torch.zeros(1)}, "passes position_bias, which lf_flash_paged does not know"),
    "weights": ({}, {"output_attentions": True}, "output_attentions is True; lf_flash_paged does not store"),
    "block table": ({}, {"block_table": torch.zeros(1, 1, 1)}, "Layer passes block_table for a sliding window"),
    "other cache": ({}, {"cache": object()}, "no attribute 'layer_to_allocator'; lf_flash_paged needs version 5.23"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    attributes, options, said = REFUSALS[name]
    with pytest.raises(libflash.UnsupportedError, match=said):
        call(Layer(**attributes), **options)


def test_masks_with_a_rule_of_their_own_are_refused() -> None:
    assert paged.mask(batch_size=1, use_vmap=False) is None
    with pytest.raises(libflash.UnsupportedError, match="a rule of its own"):
        paged.mask(batch_size=1, use_vmap=True)


def test_table_of_rows() -> None:
    rows = torch.tensor([24, 25, 26, 27, 8, 9, 40])
    blocks = types.SimpleNamespace(tokens_per_page=4, block_physical_stride=8)
    ends = torch.tensor([0, 6, 6, 7], dtype=torch.int32)
    assert paged.table_of(rows, ends, blocks).tolist() == [[3, 1], [-1, -1], [5, -1]]
    assert paged.table_of(rows, ends, blocks, 9).tolist() == [[3, 1, -1], [-1, -1, -1], [5, -1, -1]]
    assert paged.table_of(rows[:0], torch.tensor([0, 0], dtype=torch.int32), blocks).tolist() == [[-1]]
    with pytest.raises(libflash.UnsupportedError, match="writes keys to other rows"):
        paged.table_of(rows + 1, torch.tensor([0, 7], dtype=torch.int32), blocks)


@pytest.mark.parametrize("first_closed", [0, 1])
def test_switched_on_and_off(first_closed: int) -> None:
    model = LLAMA.build()
    switches = [libflash.torch.enable(model, sdpa=False), libflash.torch.enable(model, sdpa=False, paged=True)]
    assert model.config._attn_implementation == paged.NAME
    switches[first_closed].close()
    assert model.config._attn_implementation == ("lf_attention" if first_closed else paged.NAME)
    switches[1 - first_closed].close()
    assert model.config._attn_implementation == "eager"
