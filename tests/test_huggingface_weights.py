"""Requests for the weights of attention to models of Hugging Face transformers that hand them to no attention module."""

from __future__ import annotations

from typing import Any

import pytest

import libflash

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import libflash.torch  # noqa: E402
from huggingface_checks import assert_near, one_thread  # noqa: E402, F401
from huggingface_models import GROUPED, TEXT, WIDTH, Tiny  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

REFUSED = r"^output_attentions is True; lf_attention does not store the weights of attention; use attn_implementation=\"eager\"$"
PATCHES = {**WIDTH, "patch_embed_hidden_size": 12, "d_ff": 48, "d_kv": 8, "seq_len": 16}
PIX2STRUCT = Tiny("Pix2StructVisionModel", "patches", PATCHES)
BRIDGE_TOWER = Tiny("BridgeTowerModel", "image and text", WIDTH, {
    "text_config": ("BridgeTowerTextConfig", TEXT),
    "vision_config": ("BridgeTowerVisionConfig", {"hidden_size": 64, "num_hidden_layers": 2, "image_size": 16, "patch_size": 4}),
})  # fmt: skip


def inputs(tiny: Tiny) -> dict[str, Any]:
    if tiny is not PIX2STRUCT:
        x = tiny.inputs()
        x["input_ids"].clamp_(min=2)
        return x
    patches = torch.randn(2, 6, 14, generator=torch.Generator().manual_seed(1))
    patches[..., 0], patches[..., 1] = torch.arange(6) // 3 + 1, torch.arange(6) % 3 + 1
    return {"flattened_patches": patches, "attention_mask": torch.ones(2, 6)}


def loaded_by_name(tiny: Tiny) -> Any:
    libflash.torch.enable().close()
    model = tiny.build()
    named = type(model)._from_config(model.config, attn_implementation="lf_attention").eval()
    named.load_state_dict(model.state_dict())
    return named


def weights(out: Any) -> Any:
    first = out.attentions[0]
    return first[0] if isinstance(first, tuple) else first


@pytest.mark.parametrize("tiny", [PIX2STRUCT, BRIDGE_TOWER], ids=str)
def test_a_switched_model(tiny: Tiny) -> None:
    model, x = tiny.build(), inputs(tiny)
    with torch.no_grad():
        wanted = weights(model(**x, output_attentions=True))
        assert wanted.shape[0] == 2
        with libflash.torch.enable(model):
            with pytest.raises(libflash.UnsupportedError, match=REFUSED):
                model(**x, output_attentions=True)
            model(**x, output_attentions=False)
        assert torch.equal(weights(model(**x, output_attentions=True)), wanted)
    assert not any(part._forward_pre_hooks for part in model.modules())


@pytest.mark.parametrize("tiny", [PIX2STRUCT, BRIDGE_TOWER], ids=str)
def test_a_model_loaded_by_name(tiny: Tiny) -> None:
    model, x = loaded_by_name(tiny), inputs(tiny)
    with torch.no_grad():
        model(**x)
        with pytest.raises(libflash.UnsupportedError, match=REFUSED):
            model(**x, output_attentions=True)
        model.set_attn_implementation("eager")
        assert weights(model(**x, output_attentions=True)) is not None


@pytest.mark.parametrize("tiny", [PIX2STRUCT, BRIDGE_TOWER], ids=str)
def test_a_name_that_is_set_later(tiny: Tiny) -> None:
    libflash.torch.enable().close()
    model, x = tiny.build(), inputs(tiny)
    for _ in range(2):
        model.set_attn_implementation("lf_attention")
        with torch.no_grad(), pytest.raises(libflash.UnsupportedError, match=REFUSED):
            model(**x, output_attentions=True)
        model.set_attn_implementation("eager")
    assert len(model._forward_pre_hooks) == 1


def test_a_watched_model_is_traced_as_one_graph() -> None:
    tiny = Tiny("LlamaForCausalLM", "text", {**GROUPED, "num_hidden_layers": 1})
    model, x = loaded_by_name(tiny), tiny.inputs()
    with torch.no_grad():
        wanted = model(**x).logits
        assert model._forward_pre_hooks
        assert_near(torch.compile(model, backend="eager", fullgraph=True)(**x).logits, wanted, 1e-5)
        program = torch.export.export(model, (), {**x, "use_cache": False}, strict=False)
        assert_near(program.module()(**x, use_cache=False).logits, wanted, 1e-5)
