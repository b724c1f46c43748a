"""Continuous batching of transformers (generate_batch) on libflash, against generate() for each prompt alone, on any device."""

from __future__ import annotations

from typing import Any

import libflash.torch
import pytest
import torch
import transformers
from huggingface_models import END, PAD, VOCABULARY, Tiny

NEW = 8
REFUSED = {  # by libflash, the last one by transformers
    "StableLmForCausalLM": "StableLmAttention passes no paged cache; lf_flash_paged serves generate_batch",
    "DeepseekV3ForCausalLM": "k_cache: shape must be that of v_cache, with the head_dim of q",
    "Llama4ForCausalLM": "Invalid layer type: chunked_attention",
}


def prompts(*lengths: int, begin: list[int] | None = None) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [(begin or []) + torch.randint(END + 1, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


LENGTHS = (13, 4, 21, 1, 9)  # the third is longer than the rows of a step, and all but two longer than the windows
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": -1, "pad_token_id": PAD}


def alone(model: Any, given: list[list[int]]) -> list[list[int]]:
    return [model.generate(torch.tensor([one], device=model.device), **GREEDY)[0, len(one) :].tolist() for one in given]


def batched(model: Any, given: list[list[int]], **settings: Any) -> list[Any]:
    # No asynchronous batching: if steps overlap, tokens can be wrong on a busy GPU, with transformers' own attention, too.
    defaults = {"page_size": 4, "num_blocks": 64, "max_batch_tokens": 16, "use_async_batching": False}
    config = transformers.ContinuousBatchingConfig(**{**defaults, **settings})
    with libflash.torch.enable(model, paged=True, sdpa=False):
        made = model.generate_batch(
            given, generation_config=transformers.GenerationConfig(**GREEDY), continuous_batching_config=config
        )
    return list(made.values())


def check(model: Any, given: list[list[int]], **settings: Any) -> None:
    wanted = alone(model, given)
    got = batched(model, given, **settings)
    assert [one.error for one in got] == [None] * len(given)
    assert [one.generated_tokens for one in got] == wanted
    assert len({tuple(one) for one in wanted}) > 1


def check_kind(tiny: Tiny, device: str = "cpu", **settings: Any) -> None:
    """Models of this kind give the same tokens as alone, or are refused with the text in REFUSED."""
    model, said = tiny.build().to(device), REFUSED.get(str(tiny))
    if said is None:
        check(model, prompts(*LENGTHS), **settings)
    elif "layer type" in said:
        with pytest.raises(ValueError, match=said):
            batched(model, prompts(4))
    else:
        assert all(one.error is not None and said in str(one.error) for one in batched(model, prompts(4, 9)))
