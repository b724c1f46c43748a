"""Continuous batching of transformers on the GPU, with and without CUDA graphs: the tokens of generate() for each prompt."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.generation.continuous_batching.cache_allocators", reason="needs transformers 5.23 or later")

from huggingface_batching import LENGTHS, check, check_kind, prompts  # noqa: E402
from huggingface_models import MODELS, Tiny, cases  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

NAMED = {str(tiny): tiny for tiny in MODELS}
SETTINGS: dict[str, dict[str, Any]] = {
    "small pages": {"page_size": 4, "max_batch_tokens": 5},
    "large pages": {"page_size": 16, "max_batch_tokens": 64},
    "no CUDA graphs": {"use_cuda_graph": False},
    "CUDA graphs": {"use_cuda_graph": True},
    "block tables": {"max_blocks_per_request": 10, "use_cuda_graph": True},
}


# PyTorch cannot capture their products in float32.
WITH_EXPERTS = ("MixtralForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM")


@pytest.mark.parametrize("tiny", cases([tiny for tiny in MODELS if tiny.takes == "text"]))
def test_tokens_are_those_of_generate(tiny: Tiny) -> None:
    check_kind(tiny, "cuda", use_cuda_graph=str(tiny) not in WITH_EXPERTS)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=list(SETTINGS))
@pytest.mark.parametrize("tiny", [NAMED["LlamaForCausalLM"], NAMED["Gemma3ForCausalLM"]], ids=str)
def test_settings(tiny: Tiny, settings: dict[str, Any]) -> None:
    check(tiny.build().to("cuda"), prompts(*LENGTHS), **settings)
