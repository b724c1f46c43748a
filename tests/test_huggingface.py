"""Hugging Face models of every kind on libflash against transformers' "eager" attention. Nothing is downloaded."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from huggingface_checks import check_generates, check_half, check_logits_and_gradients, check_packed, one_thread  # noqa: E402, F401
from huggingface_models import MODELS, PRESENT, Tiny, cases, padded_cases  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

EXACT = 1e-5  # float32; relative to the largest value
GENERATING = [tiny for tiny in MODELS if tiny.generates]


def test_enough_models() -> None:
    assert len(PRESENT) >= 33


@pytest.mark.parametrize(("tiny", "padding"), padded_cases(MODELS))
def test_logits_and_gradients(tiny: Tiny, padding: str | None) -> None:
    check_logits_and_gradients(tiny.build(), tiny.inputs(padding), EXACT)


@pytest.mark.parametrize("tiny", cases(MODELS))
def test_bfloat16(tiny: Tiny) -> None:
    check_half(tiny.build(), tiny.inputs("right"))


@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("tiny", cases(GENERATING))
def test_generates(tiny: Tiny, padding: str | None) -> None:
    check_generates(tiny.build(), tiny.inputs(padding), EXACT)


@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("tiny", cases([tiny for tiny in GENERATING if tiny.generates_static]))
def test_generates_with_a_static_cache(tiny: Tiny, padding: str | None) -> None:
    check_generates(tiny.build(), tiny.inputs(padding), EXACT, cache_implementation="static")


@pytest.mark.parametrize("tiny", cases([tiny for tiny in MODELS if tiny.packs]))
def test_packed(tiny: Tiny) -> None:
    check_packed(tiny.build(), tiny, "cpu", EXACT)
