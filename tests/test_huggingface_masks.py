"""Models of Hugging Face transformers in which other code than the attention function reads the mask, or whose modules have an
is_causal that contradicts it.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import libflash.torch  # noqa: E402
from huggingface_checks import assert_near, check_generates, one_thread, result  # noqa: E402, F401
from huggingface_models import BART, EXPERTS, GROUPED, MIXED, MODELS, PICTURE, TEXT, WIDTH, Tiny  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

NAMED = {str(tiny): tiny for tiny in MODELS}

GIT = Tiny("GitForCausalLM", "encode", TEXT, {"vision_config": ("GitVisionConfig", PICTURE)})
VIDEO_TEXT = Tiny("VideoPrismTextModel", "encode", TEXT)


@pytest.mark.filterwarnings("ignore:.*do not use transformers' attention interface")
@pytest.mark.parametrize("tiny", [GIT, VIDEO_TEXT], ids=str)
def test_masks_that_no_attribute_or_another_module_reads(tiny: Tiny) -> None:
    """Causal text without padding: GIT's own attention adds the mask to its scores, VideoPrism's says is_causal = False."""
    if not hasattr(transformers, tiny.model):
        pytest.skip(f"transformers {transformers.__version__} has no {tiny.model}")
    model, x = tiny.build(), tiny.inputs()
    key = "logits" if tiny is GIT else "last_hidden_state"
    with torch.no_grad():
        wanted = model(**x)[key]
        with libflash.torch.enable(model):
            assert_near(model(**x)[key], wanted, 1e-5)


AIMV2 = Tiny("Aimv2TextModel", "encode", {**WIDTH, "vocab_size": 97, "max_position_embeddings": 32, "eos_token_id": 96})
PHI4_VISION = Tiny("Phi4MultimodalVisionModel", "image", {**WIDTH, "image_size": 28, "patch_size": 14, "crop_size": 28})


@pytest.mark.filterwarnings("ignore:.*do not use transformers' attention interface")
@pytest.mark.parametrize("tiny", [AIMV2, PHI4_VISION], ids=str)
def test_attributes_that_contradict_the_mask(tiny: Tiny) -> None:
    """AIMv2's text is causal and its modules say is_causal = False; Phi-4's pictures are not, and their modules say True."""
    if not hasattr(transformers, tiny.model):
        pytest.skip(f"transformers {transformers.__version__} has no {tiny.model}")
    model, generator = tiny.build(), torch.Generator().manual_seed(1)
    x = {"input_ids": torch.randint(0, 97, (2, 9), generator=generator), "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    if tiny is PHI4_VISION:
        x = {"pixel_values": torch.randn(2, 3, 28, 28, generator=generator)}
        x["patch_attention_mask"] = torch.ones(2, 2, 2, dtype=torch.bool)
    with torch.no_grad():
        wanted = model(**x).last_hidden_state
        with libflash.torch.enable(model):
            assert_near(model(**x).last_hidden_state, wanted, 1e-5)


BRIDGE_TOWER = Tiny("BridgeTowerModel", "image and text", WIDTH, {
    "text_config": ("BridgeTowerTextConfig", TEXT),
    "vision_config": ("BridgeTowerVisionConfig", {"hidden_size": 64, "num_hidden_layers": 2, "image_size": 16, "patch_size": 4}),
})  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*do not use transformers' attention interface")
@pytest.mark.parametrize("padding", [None, "left", "right"])
def test_layers_that_join_text_and_pictures(padding: str | None) -> None:
    """BridgeTower's modules there say is_causal = True, although text and pictures see all of each other; pictures never have a
    mask."""
    model, x = BRIDGE_TOWER.build(), BRIDGE_TOWER.inputs(padding)
    x["input_ids"].clamp_(min=2)
    with torch.no_grad():
        wanted = model(**x)
        with libflash.torch.enable(model):
            got = model(**x)
    shown = x["attention_mask"].bool()
    assert_near(got.text_features[shown], wanted.text_features[shown], 1e-5)
    assert_near(got.image_features, wanted.image_features, 1e-5)


@pytest.mark.skipif(not hasattr(transformers, "DiffusionGemmaConfig"), reason="transformers has no DiffusionGemma")
@pytest.mark.parametrize("window", [6, 64])
def test_a_canvas_behind_a_window(window: int) -> None:
    """DiffusionGemma's decoder passes the window, but its queries see all keys of the cache, which are those of the window."""
    text = {**MIXED, **EXPERTS, "sliding_window": window, "num_experts": 4, "top_k_experts": 2, "global_head_dim": 8}
    text |= {"num_global_key_value_heads": 2}
    config = transformers.DiffusionGemmaConfig(text_config=text, vision_config=None, canvas_length=5)
    torch.manual_seed(5)
    model = transformers.DiffusionGemmaForBlockDiffusion(config).eval()
    model.set_attn_implementation("eager")
    ids = torch.arange(3, 27).view(2, 12)
    x = {"input_ids": ids, "decoder_input_ids": ids[:, 2:7]}
    with torch.no_grad():
        wanted = model(**x).logits
        with libflash.torch.enable(model):
            assert_near(model(**x).logits, wanted, 1e-5)


NLLB_MOE = Tiny("NllbMoeForConditionalGeneration", "seq2seq", {
    **BART, "num_experts": 2, "expert_capacity": 64, "encoder_sparse_step": 2, "decoder_sparse_step": 2,
})  # fmt: skip
BIG_BIRD = Tiny("BigBirdPegasusForConditionalGeneration", "seq2seq", {**BART, "attention_type": "original_full"})


@pytest.mark.filterwarnings("ignore:.*do not use transformers' attention interface")
@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("tiny", [NLLB_MOE, BIG_BIRD], ids=str)
def test_masks_that_a_router_or_the_attention_of_the_encoder_reads(tiny: Tiny, padding: str | None) -> None:
    model = tiny.build()
    x = tiny.inputs(padding)
    with torch.no_grad():
        wanted = result(model, x)
        with libflash.torch.enable(model, sdpa=False):
            assert_near(result(model, x), wanted, 1e-5)
    check_generates(model, x, 1e-5)


INFORMER = Tiny("InformerForPrediction", "series", {
    **{name: size for name, size in BART.items() if name.startswith(("encoder", "decoder_a", "decoder_f", "decoder_l"))},
    "d_model": 16, "prediction_length": 5, "context_length": 12, "lags_sequence": [1, 2, 3], "num_time_features": 1,
    "sampling_factor": 1,
})  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*do not use transformers' attention interface")
@pytest.mark.parametrize("distil", [False, True])
@pytest.mark.parametrize("kind", ["prob", "full"])
def test_attention_that_chooses_rows(kind: str, distil: bool) -> None:
    """Informer's own attention adds the mask to the scores of a few rows; with distil its encoder drops rows, so that a mask of
    all rows does not fit."""
    model = INFORMER.build(attention_type=kind, distil=distil)
    torch.manual_seed(2)
    x = {"past_values": torch.randn(2, 15), "past_time_features": torch.randn(2, 15, 1), "past_observed_mask": torch.ones(2, 15)}
    x |= {"future_values": torch.randn(2, 5), "future_time_features": torch.randn(2, 5, 1)}

    def run() -> torch.Tensor:
        torch.manual_seed(1)  # it samples keys
        with torch.no_grad():
            return torch.cat([part.flatten() for part in model(**x).params])

    wanted = run()
    with libflash.torch.enable(model, sdpa=False):
        assert_near(run(), wanted, 1e-5)


@pytest.mark.parametrize("bias", ["use_relative_position_bias", "use_shared_relative_position_bias"])
def test_a_bias_that_the_model_adds_to_the_mask(bias: str) -> None:
    model = Tiny("BeitModel", "image", {**PICTURE, bias: True}).build()
    x = {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))}
    visible = torch.ones(2, 17, dtype=torch.long)
    visible[1, 9:] = 0
    for given in (x, {**x, "attention_mask": visible}):
        with torch.no_grad():
            wanted = model(**given).last_hidden_state
            with libflash.torch.enable(model, sdpa=False):
                assert_near(model(**given).last_hidden_state, wanted, 1e-5)


def test_a_part_without_a_type_that_adds_the_mask_to_its_scores() -> None:
    """Loaded by name, parts whose attention is their own have the name, too."""
    models = "transformers.models.pp_doclayout_v2"
    configs = pytest.importorskip(f"{models}.configuration_pp_doclayout_v2")
    part = pytest.importorskip(f"{models}.modeling_pp_doclayout_v2").PPDocLayoutV2ReadingOrder
    libflash.torch.enable().close()
    generator = torch.Generator().manual_seed(1)
    corners = torch.randint(0, 400, (2, 9, 2), generator=generator)
    visible = torch.arange(9) < torch.tensor([[9], [5]])
    found = []
    for name in ("eager", "lf_attention"):
        torch.manual_seed(0)
        model = part(configs.PPDocLayoutV2ReadingOrderConfig(**WIDTH, attn_implementation=name)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.2)
            found.append(model(torch.cat([corners, corners + 100], -1), torch.zeros(2, 9, dtype=torch.long), visible))
    shown = found[0] > -1e3  # the part fills in -1e4
    assert torch.equal(found[1] > -1e3, shown)
    assert_near(found[1][shown], found[0][shown], 1e-5)


GEMMA4 = Tiny("Gemma4ForCausalLM", "text", {
    **GROUPED, "num_hidden_layers": 4, "head_dim": 8, "global_head_dim": 8, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 97, "sliding_window": 64, "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
})  # fmt: skip


def test_layers_that_get_the_last_rows_alone() -> None:
    """Gemma 4 drops rows that no result needs before layers which reuse keys, so that the mask cannot be left out."""
    if not hasattr(transformers, GEMMA4.model):
        pytest.skip(f"transformers {transformers.__version__} has no {GEMMA4.model}")
    model, x = GEMMA4.build(), GEMMA4.inputs()
    with torch.no_grad():
        wanted = model(**x, logits_to_keep=3).logits
        with libflash.torch.enable(model):
            assert_near(model(**x, logits_to_keep=3).logits, wanted, 1e-5)
    check_generates(model, x, 1e-5)
    check_generates(model, x, 1e-5, cache_implementation="static", disable_compile=True)
    text = x["input_ids"][:1].repeat(1, 2)
    check_generates(model, {"input_ids": text}, 1e-5, prompt_lookup_num_tokens=3)


@pytest.mark.parametrize("tiny", [NAMED["GemmaForCausalLM"], NAMED["Gemma2ForCausalLM"], NAMED["Gemma3ForCausalLM"]], ids=str)
def test_bidirectional_attention_of_a_decoder(tiny: Tiny) -> None:
    """Gemma and Gemma 2 make a causal mask all the same. A row does not depend on the padding of its neighbour."""
    model = tiny.build(use_bidirectional_attention=True)
    if not hasattr(model.config, "use_bidirectional_attention"):
        pytest.skip(f"transformers {transformers.__version__} has no use_bidirectional_attention")
    x = tiny.inputs("right")

    def run(**mask: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(x["input_ids"], use_cache=False, **mask).logits[0]

    wanted = run()
    with libflash.torch.enable(model, sdpa=False):
        alone, beside_padding = run(), run(attention_mask=x["attention_mask"])
    assert_near(alone, wanted, 1e-5)
    assert_near(beside_padding, wanted, 1e-5)


def test_paligemma_without_token_types() -> None:
    tiny = Tiny("PaliGemmaForConditionalGeneration", "text", {"image_token_index": 96, "projection_dim": 32}, {
        "text_config": ("GemmaConfig", {**GROUPED, "head_dim": 16}), "vision_config": ("SiglipVisionConfig", PICTURE),
    })  # fmt: skip
    model = tiny.build()
    tokens = tiny.inputs()["input_ids"].clamp(max=95)
    with torch.no_grad():
        wanted = model(input_ids=tokens).logits
        with libflash.torch.enable(model):
            assert_near(model(input_ids=tokens).logits, wanted, 1e-5)
