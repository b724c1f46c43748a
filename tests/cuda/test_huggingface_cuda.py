"""Hugging Face models of every kind on the GPU, on libflash against transformers' "eager" attention."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from huggingface_checks import (  # noqa: E402
    check_generates,
    check_half,
    check_logits_and_gradients,
    check_packed,
    on,
)
from huggingface_models import MODELS, PRESENT, Tiny, cases, padded_cases  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

EXACT = 1e-4  # float32; relative to the largest value
GENERATING = [tiny for tiny in MODELS if tiny.generates]
NAMED = {str(tiny): tiny for tiny in MODELS}


@pytest.fixture(autouse=True)
def float32_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without TF32, which cuDNN's convolutions use by default: its rounding errors are larger than the tolerance."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def test_enough_models() -> None:
    assert len(PRESENT) >= 33


@pytest.mark.parametrize(("tiny", "padding"), padded_cases(MODELS))
def test_logits_and_gradients(tiny: Tiny, padding: str | None) -> None:
    check_logits_and_gradients(*on("cuda", tiny.build(), tiny.inputs(padding)), EXACT)


@pytest.mark.parametrize(("tiny", "padding"), padded_cases(MODELS))
def test_bfloat16(tiny: Tiny, padding: str | None) -> None:
    check_half(*on("cuda", tiny.build(), tiny.inputs(padding)))


@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("tiny", cases(GENERATING))
def test_generates(tiny: Tiny, padding: str | None) -> None:
    check_generates(*on("cuda", tiny.build(), tiny.inputs(padding)), EXACT)


@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("tiny", cases([tiny for tiny in GENERATING if tiny.generates_static]))
def test_generates_with_a_static_cache(tiny: Tiny, padding: str | None) -> None:
    options: dict[str, Any] = {"cache_implementation": "static", "disable_compile": True}
    check_generates(*on("cuda", tiny.build(), tiny.inputs(padding)), EXACT, **options)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma2ForCausalLM", "T5ForConditionalGeneration"])
def test_generates_with_a_static_cache_compiled(name: str) -> None:
    """As transformers does by itself on a GPU."""
    tiny = NAMED[name]
    check_generates(*on("cuda", tiny.build(), tiny.inputs("left")), EXACT, cache_implementation="static")


@pytest.mark.parametrize("tiny", cases([tiny for tiny in MODELS if tiny.packs]))
def test_packed(tiny: Tiny) -> None:
    check_packed(tiny.build(), tiny, "cuda", EXACT)


# -- continuous batching


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "MistralForCausalLM", "Gemma3ForCausalLM"])
def test_continuous_batching(name: str, graphs: bool) -> None:
    """Pages are read in place, also in captured graphs; the tokens are those of generate() for each prompt alone."""
    allocators = "transformers.generation.continuous_batching.cache_allocators"
    pytest.importorskip(allocators, reason="needs transformers 5.23 or later")
    from test_huggingface_batching import LENGTHS, check, prompts

    check(NAMED[name].build().to("cuda"), prompts(*LENGTHS), use_cuda_graph=graphs)
