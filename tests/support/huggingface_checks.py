"""A Hugging Face model on libflash against the same model with transformers' "eager" attention, on any device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import libflash.torch
import pytest
import torch
from huggingface_models import Inputs, Tensor, Tiny

import libflash

WHOLE = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One thread, in test modules that import this: for small models synchronisation takes longer than the computation."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    libflash.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def on(device: str, model: Any, inputs: Inputs, dtype: torch.dtype = torch.float32) -> tuple[Any, Inputs]:
    moved = {name: x.to(device, dtype if x.is_floating_point() else None) for name, x in inputs.items()}
    return model.to(device, dtype), moved


def result(model: Any, inputs: Inputs) -> Tensor:
    """The model's results without rows of padding, which see masked keys in one implementation and none in the other."""
    out = model(**inputs)
    if "text_embeds" in out:
        return torch.cat([out.text_embeds, out.image_embeds, out.logits_per_text], -1)
    rows = out["logits"] if "logits" in out else out["last_hidden_state"]
    visible = inputs.get("attention_mask")
    if visible is not None and "decoder_input_ids" not in inputs:
        if "input_values" in inputs:
            visible = model._get_feature_vector_attention_mask(rows.shape[1], visible)
        rows = rows[visible.bool()]
    return rows


def assert_near(got: Tensor, wanted: Tensor, bound: float) -> None:
    assert got.isfinite().all()
    error = (got - wanted).abs().max()
    assert error <= bound * wanted.abs().max(), f"error {float(error):.3g}, the largest value is {float(wanted.abs().max()):.3g}"


def check_logits_and_gradients(model: Any, inputs: Inputs, bound: float) -> None:
    """Compare the results and the gradients of all parameters. Errors are relative to the largest result or gradient."""

    def run() -> tuple[Tensor, Tensor]:
        rows = result(model, inputs)
        parameters = [x for x in model.parameters() if x.requires_grad]
        found = torch.autograd.grad(rows.square().mean(), parameters, allow_unused=True)
        return rows.detach(), torch.cat([x.flatten() for x in found if x is not None])

    wanted, wanted_gradients = run()
    with libflash.torch.enable(model):
        got, gradients = run()
    assert_near(got, wanted, bound)
    assert gradients.shape == wanted_gradients.shape
    assert wanted_gradients.abs().max() > 0
    assert_near(gradients, wanted_gradients, 10 * bound)


def check_half(model: Any, inputs: Inputs) -> None:
    """In bfloat16, no worse than eager, both against float32 with the same weights."""

    def half() -> Tensor:
        with torch.no_grad():
            return result(*on(inputs_device(inputs), model.bfloat16(), inputs, torch.bfloat16)).float()

    eager = half()
    with libflash.torch.enable(model):
        got = half()
    rounded = {name: x.bfloat16().float() if x.is_floating_point() else x for name, x in inputs.items()}
    with torch.no_grad():
        exact = result(model.float(), rounded)
    allowed = 2 * (eager - exact).square().mean().sqrt() + 1e-3 * exact.square().mean().sqrt()
    assert (got - exact).square().mean().sqrt() <= allowed


def inputs_device(inputs: Inputs) -> str:
    return str(next(iter(inputs.values())).device)


def check_generates(model: Any, inputs: Inputs, bound: float, **options: Any) -> None:
    """The same tokens from the same logits."""
    inputs = {name: x for name, x in inputs.items() if name != "decoder_input_ids"}
    wanted = model.generate(**inputs, **WHOLE, **options)
    with libflash.torch.enable(model):
        got = model.generate(**inputs, **WHOLE, **options)
    for step, wanted_step in zip(got.logits, wanted.logits, strict=True):
        assert_near(step, wanted_step, bound)
    assert torch.equal(got.sequences, wanted.sequences)


def check_packed(model: Any, tiny: Tiny, device: str, bound: float) -> None:
    """Three sequences in one row give the results of each alone: separated by their positions, with the lengths that users of
    flash-attention pass, and by these alone if there is a cache, where transformers does not use the positions."""
    model, inputs = on(device, model, tiny.inputs())
    tokens = inputs["input_ids"].reshape(1, -1)
    sequences = tokens.split([4, 1, tokens.shape[1] - 5], 1)
    ends = torch.tensor([0, 4, 5, tokens.shape[1]], dtype=torch.int32, device=device)
    longest = int(ends.diff().max())
    lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    positions = torch.cat([torch.arange(x.shape[1], device=device) for x in sequences])[None]
    ways: list[dict[str, Any]] = [{"use_cache": False}, {"use_cache": False, **lengths}]
    if tiny.hands_lengths_down and "attention_chunk_size" not in tiny.sizes:  # chunks are counted from the positions
        ways.append({"use_cache": True, **lengths})
    with torch.no_grad():
        alone = torch.cat([result(model, {"input_ids": x}) for x in sequences], 1)
        wanted = result(model, {"input_ids": tokens, "position_ids": positions, "use_cache": False})
        assert_near(wanted, alone, bound)
        with libflash.torch.enable(model):
            for way in ways:
                assert_near(result(model, {"input_ids": tokens, "position_ids": positions, **way}), wanted, bound)
