"""Models of Hugging Face transformers that choose attention classes from a table of their own, loaded by name."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest

import libflash

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import libflash.torch  # noqa: E402
from huggingface_checks import assert_near, one_thread  # noqa: E402, F401
from huggingface_models import GROUPED, PICTURE, TEXT, TOKENS, WIDTH, Tiny  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

NAME = "lf_attention"


@pytest.fixture(autouse=True)
def registered() -> None:
    libflash.torch.enable().close()


def by_name(kind: Any, config: Any, state: Any) -> tuple[Any, set[str]]:
    """A model loaded by name, and libflash's warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = kind._from_config(copy.deepcopy(config), attn_implementation=NAME).eval()
    model.load_state_dict(state)
    return model, {str(x.message) for x in caught if NAME in str(x.message)}


GIT = Tiny("GitForCausalLM", "encode", TEXT, {"vision_config": ("GitVisionConfig", PICTURE)})


@pytest.mark.parametrize("padding", [None, "left", "right"])
def test_git(padding: str | None) -> None:
    """Its text has a table, its pictures use the interface."""
    model, x = GIT.build(), GIT.inputs(padding)
    x["pixel_values"] = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(4))
    config = copy.deepcopy(model.config)
    named, warned = by_name(type(model), config, model.state_dict())
    assert warned == {
        'attn_implementation="lf_attention" (model type git): GitSelfAttention does not use transformers\' attention interface, '
        "so libflash does not serve it; the other parts of the model run on libflash"
    }
    assert named.git.image_encoder.config._attn_implementation == NAME
    with torch.no_grad():
        wanted, got = (m(**x).logits[:, -x["input_ids"].shape[1] :][x["attention_mask"].bool()] for m in (model, named))
    assert_near(got, wanted, 1e-5)


def sam() -> tuple[Any, dict[str, Any]]:
    decoder = {"hidden_size": 16, "mlp_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "iou_head_hidden_dim": 16}
    vision = {**WIDTH, "output_channels": 16, "image_size": 32, "patch_size": 4, "window_size": 3, "global_attn_indexes": [1]}
    config = transformers.SamConfig(
        vision_config={**vision, "mlp_dim": 48, "num_pos_feats": 8},
        prompt_encoder_config={"hidden_size": 16, "image_size": 32, "patch_size": 4, "mask_input_channels": 4},
        mask_decoder_config=decoder,
    )
    x = {"pixel_values": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(4))}
    return config, {**x, "input_points": torch.tensor([[[[5.0, 6.0]]], [[[9.0, 20.0]]]])}


def test_sam() -> None:
    """Its vision encoder has a table, its mask decoder uses the interface."""
    config, x = sam()
    torch.manual_seed(0)
    model = transformers.SamModel._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    named, warned = by_name(transformers.SamModel, config, model.state_dict())
    assert len(warned) == 1
    assert "(model type sam_vision_model): SamVisionSdpaAttention does not use" in warned.pop()
    with torch.no_grad():
        assert_near(named(**x).pred_masks, model(**x).pred_masks, 1e-5)
    with pytest.raises(libflash.UnsupportedError, match="output_attentions is True"):
        named(**x, output_attentions=True)


OWN = [
    Tiny("FalconForCausalLM", "text", GROUPED),
    Tiny("GPTJForCausalLM", "text", {**TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}),
    Tiny("GPTNeoForCausalLM", "text", {
        **TOKENS, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]],
    }),
    Tiny("Data2VecVisionModel", "image", PICTURE),
]  # fmt: skip


@pytest.mark.parametrize("tiny", OWN, ids=str)
def test_a_model_that_libflash_cannot_serve_at_all_is_refused_when_it_is_built(tiny: Tiny) -> None:
    kind = getattr(transformers, tiny.model)
    wanted = (
        rf'^attn_implementation="lf_attention": the model of {kind.config_class.__name__} does not use transformers\' attention '
        r'interface \(it computes attention in .*Attention.*\), so libflash cannot serve it; use attn_implementation="eager"$'
    )
    with pytest.raises(libflash.UnsupportedError, match=wanted):
        kind._from_config(kind.config_class(**tiny.sizes), attn_implementation=NAME)
    kind._from_config(kind.config_class(**tiny.sizes), attn_implementation="eager")


def test_a_part_without_the_interface_is_named() -> None:
    """BLIP's pictures have no mask, so that no call could be refused."""
    config = transformers.BlipVisionConfig(**PICTURE)
    with pytest.warns(
        UserWarning,
        match=r'^attn_implementation="lf_attention": BlipVisionModel does not use transformers\' attention interface \(it '
        r"computes attention in Blip\w*Attention(, Blip\w*Attention)*\), so libflash cannot serve it$",
    ):
        transformers.BlipVisionModel._from_config(config, attn_implementation=NAME)


def test_other_names_are_looked_up_as_before() -> None:
    config, _ = sam()
    with pytest.raises(ValueError, match="no_such_attention"):
        transformers.SamModel._from_config(config, attn_implementation="no_such_attention")


def test_parts_of_parts_keep_their_names() -> None:
    """DeepSeek-OCR 2: libflash serves the text and the encoder of pictures, not SAM, whose configuration is inside another."""
    if not hasattr(transformers, "DeepseekOcr2Config"):
        pytest.skip(f"transformers {transformers.__version__} has no DeepseekOcr2Config")
    sam_config = {**WIDTH, "output_channels": 16, "image_size": 64, "patch_size": 4, "global_attn_indexes": [1], "mlp_dim": 48}
    config = transformers.DeepseekOcr2Config(
        text_config={**GROUPED, "mlp_layer_types": ["dense", "dense"]},
        vision_config={"sam_config": sam_config, "encoder_config": {**WIDTH, "num_key_value_heads": 4}},
    )
    names = {"": "eager", "vision_config": {"": "eager", "sam_config": "sdpa", "encoder_config": "eager"}}
    model = transformers.DeepseekOcr2ForConditionalGeneration._from_config(config, attn_implementation=names)

    def chosen() -> dict[str, str]:
        return {name: x.config._attn_implementation for name, x in model.named_modules() if hasattr(x, "config")}

    before = chosen()
    assert before["model.vision_tower.sam_encoder"] == "sdpa"
    with libflash.torch.enable(model, sdpa=False):
        switched = chosen()
        assert switched["model.vision_tower"] == NAME
        assert switched["model.vision_tower.sam_encoder"] == "sdpa"
    assert chosen() == before
