"""Small random Hugging Face models of every kind, with inputs, for the adapter's tests on the CPU and on a GPU.

Nothing is downloaded. Sizes are the smallest with grouped queries, several layers and windows shorter than the texts.
"""

from __future__ import annotations

import inspect
import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers

Tensor = torch.Tensor
Inputs = dict[str, Tensor]

VOCABULARY = 97
PAD, BEGIN, END = 0, 1, 2
LENGTH = 13
WINDOW = 5  # window of sliding-window layers: shorter than the texts

TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "bos_token_id": BEGIN, "eos_token_id": END}
WIDTH = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48}
TEXT = {**TOKENS, **WIDTH, "max_position_embeddings": 64}
GROUPED = {**TEXT, "num_key_value_heads": 2}
WINDOWED = {**GROUPED, "sliding_window": WINDOW}
MIXED = {**WINDOWED, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
PICTURE = {**WIDTH, "image_size": 16, "patch_size": 4}
GPT2 = {**TOKENS, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64}
CHUNKED = {
    **GROUPED, "head_dim": 8, "attention_chunk_size": WINDOW, "num_local_experts": 2, "intermediate_size_mlp": 48,
    "layer_types": ["chunked_attention", "full_attention"],
}  # fmt: skip
LATENT = {
    **TEXT, **EXPERTS, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
MODERN = {**TEXT, "layer_types": ["sliding_attention", "full_attention"], "cls_token_id": 3, "sep_token_id": 4}
DISTILBERT = {**TOKENS, "dim": 32, "n_heads": 4, "n_layers": 2, "hidden_dim": 48, "max_position_embeddings": 64}
T5 = {
    **TOKENS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 2, "num_decoder_layers": 2,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "decoder_start_token_id": PAD,
}  # fmt: skip
BART = {
    **TOKENS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    "decoder_start_token_id": END, "forced_eos_token_id": None,
}  # fmt: skip
WHISPER = {
    **BART, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 64, "begin_suppress_tokens": None,
}  # fmt: skip
SOUND = {
    **WIDTH, "conv_dim": (8, 8), "conv_kernel": (8, 3), "conv_stride": (4, 2), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0, "layerdrop": 0.0,
    "vocab_size": VOCABULARY,
}  # fmt: skip


def both(family: str, text: dict[str, Any]) -> dict[str, tuple[str, dict[str, Any]]]:
    return {"text_config": (f"{family}TextConfig", text), "vision_config": (f"{family}VisionConfig", PICTURE)}


@dataclass(frozen=True)
class Tiny:
    """A model class, the sizes of its configuration, and its inputs.

    takes: "text" that it continues, text to "encode", text to text ("seq2seq"), "image", "sound", "image and text", or
    "spectrum" to text.
    """

    model: str
    takes: str
    sizes: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)  # nested configurations: class and sizes

    def __str__(self) -> str:
        return self.model

    @property
    def generates(self) -> bool:
        return self.takes in ("text", "seq2seq", "spectrum")

    @property
    def generates_static(self) -> bool:
        """Whether transformers itself supports a static cache."""
        if "attention_chunk_size" not in self.sizes:
            return self.generates
        from transformers.masking_utils import create_chunked_causal_mask

        return "block_sequence_ids" in inspect.signature(create_chunked_causal_mask).parameters

    @property
    def packs(self) -> bool:
        """Whether transformers separates packed sequences by their positions."""
        return self.takes == "text" and self.model not in ("BioGptForCausalLM", "GptOssForCausalLM", "OPTForCausalLM")

    @property
    def hands_lengths_down(self) -> bool:
        """Whether keyword arguments of the model reach its attention."""
        return self.model != "StableLmForCausalLM"

    @property
    def pads(self) -> bool:
        return self.takes not in ("image", "spectrum")

    def build(self, **changes: Any) -> Any:
        """With transformers' "eager" attention and random weights, large enough that attention is not uniform."""
        torch.manual_seed(0)
        kind = getattr(transformers, self.model)
        parts = {name: getattr(transformers, config)(**sizes) for name, (config, sizes) in self.parts.items()}
        model = kind(kind.config_class(**{**self.sizes, **parts, **changes, "attn_implementation": "eager"})).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1 or name.endswith(("bias", "sinks")):
                    parameter.normal_(0, 0.2)
        return model

    def inputs(self, padding: str | None = None) -> Inputs:
        """Two examples; with padding "left" or "right", the second text or sound is shorter."""
        generator = torch.Generator().manual_seed(1)

        def tokens(length: int) -> Tensor:
            return torch.randint(END + 1, VOCABULARY, (2, length), generator=generator)

        if self.takes == "image":
            return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
        if self.takes == "spectrum":
            return {"input_features": torch.randn(2, 8, 40, generator=generator), "decoder_input_ids": tokens(6)}
        if self.takes == "sound":
            visible = torch.ones(2, 200, dtype=torch.long)
            if padding:
                visible[1, slice(0, 80) if padding == "left" else slice(-80, None)] = 0
            return {"input_values": torch.randn(2, 200, generator=generator) * visible, "attention_mask": visible}
        visible = torch.ones(2, LENGTH, dtype=torch.long)
        if padding:
            visible[1, slice(0, 4) if padding == "left" else slice(-4, None)] = 0
        found = {"input_ids": tokens(LENGTH) * visible + PAD * (1 - visible), "attention_mask": visible}
        if self.takes == "seq2seq":
            found["decoder_input_ids"] = tokens(7)
        if self.takes == "image and text":
            found["pixel_values"] = torch.randn(2, 3, 16, 16, generator=generator)
        return found


MODELS = [
    # decoders
    Tiny("LlamaForCausalLM", "text", GROUPED),
    Tiny("MistralForCausalLM", "text", WINDOWED),
    Tiny("MixtralForCausalLM", "text", {**WINDOWED, "num_local_experts": 4}),
    Tiny("Qwen2ForCausalLM", "text", GROUPED),
    Tiny("Qwen3ForCausalLM", "text", {**GROUPED, "head_dim": 8}),
    Tiny("Qwen3MoeForCausalLM", "text", {**GROUPED, **EXPERTS, "head_dim": 8, "num_experts": 4}),
    Tiny("GemmaForCausalLM", "text", {**GROUPED, "head_dim": 16}),
    Tiny("Gemma2ForCausalLM", "text", {**MIXED, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8}),
    Tiny("Gemma3ForCausalLM", "text", {**MIXED, "query_pre_attn_scalar": 8}),
    Tiny("GptOssForCausalLM", "text", {**MIXED, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_scaling": None}),
    Tiny("GPT2LMHeadModel", "text", GPT2),
    Tiny("GPTNeoXForCausalLM", "text", TEXT),
    Tiny("GPTBigCodeForCausalLM", "text", GPT2),
    Tiny("BioGptForCausalLM", "text", TEXT),
    Tiny("OPTForCausalLM", "text", {**TEXT, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    Tiny("PhiForCausalLM", "text", GROUPED),
    Tiny("Phi3ForCausalLM", "text", WINDOWED),
    Tiny("StableLmForCausalLM", "text", GROUPED),
    Tiny("Starcoder2ForCausalLM", "text", WINDOWED),
    Tiny("OlmoForCausalLM", "text", GROUPED),
    Tiny("Olmo2ForCausalLM", "text", GROUPED),
    Tiny("CohereForCausalLM", "text", GROUPED),
    Tiny("Cohere2ForCausalLM", "text", MIXED),
    Tiny("GraniteForCausalLM", "text", {**GROUPED, "attention_multiplier": 0.3}),
    Tiny("SmolLM3ForCausalLM", "text", GROUPED),
    Tiny("Glm4ForCausalLM", "text", {**GROUPED, "head_dim": 8}),
    Tiny("Llama4ForCausalLM", "text", CHUNKED),
    Tiny("DeepseekV3ForCausalLM", "text", LATENT),
    Tiny("ModernBertDecoderForCausalLM", "text", {**MODERN, "local_attention": WINDOW}),
    # encoders
    Tiny("BertForMaskedLM", "encode", TEXT),
    Tiny("RobertaForMaskedLM", "encode", TEXT),
    Tiny("ElectraForMaskedLM", "encode", {**TEXT, "embedding_size": 32}),
    Tiny("DistilBertForMaskedLM", "encode", DISTILBERT),
    Tiny("AlbertForMaskedLM", "encode", {**TEXT, "embedding_size": 16}),
    Tiny("ModernBertForMaskedLM", "encode", {**MODERN, "local_attention": 2 * WINDOW}),
    Tiny("SplinterModel", "encode", {**TEXT, "question_token_id": 3}),
    Tiny("ViTModel", "image", PICTURE),
    Tiny("DeiTModel", "image", PICTURE),
    Tiny("Dinov2Model", "image", PICTURE),
    Tiny("CLIPModel", "image and text", {}, both("CLIP", TEXT)),
    Tiny("SiglipModel", "image and text", {}, both("Siglip", {**TEXT, "projection_size": 32})),
    Tiny("Wav2Vec2ForCTC", "sound", SOUND),
    Tiny("HubertForCTC", "sound", SOUND),
    Tiny("Wav2Vec2ConformerForCTC", "sound", {**SOUND, "position_embeddings_type": "relative"}),
    # encoder and decoder
    Tiny("WhisperForConditionalGeneration", "spectrum", WHISPER),
    Tiny("T5ForConditionalGeneration", "seq2seq", T5),
    Tiny("MT5ForConditionalGeneration", "seq2seq", T5),
    Tiny("UMT5ForConditionalGeneration", "seq2seq", T5),
    Tiny("SwitchTransformersForConditionalGeneration", "seq2seq", {**T5, "num_experts": 2, "expert_capacity": 64}),
    Tiny("LongT5ForConditionalGeneration", "seq2seq", {**T5, "local_radius": 3}),
    Tiny("BartForConditionalGeneration", "seq2seq", BART),
    Tiny("MBartForConditionalGeneration", "seq2seq", BART),
    Tiny("MarianMTModel", "seq2seq", {**BART, "decoder_vocab_size": VOCABULARY}),
    Tiny("PegasusForConditionalGeneration", "seq2seq", BART),
]
with warnings.catch_warnings():  # transformers imports a model on first use, with warnings
    warnings.simplefilter("ignore")
    PRESENT = [tiny for tiny in MODELS if hasattr(transformers, tiny.model)]


def cases(models: list[Tiny]) -> list[Any]:
    """For pytest.mark.parametrize: each by its name; a class that this transformers lacks is a skipped test with that reason."""
    lacks = f"transformers {transformers.__version__} has no "
    return [
        pytest.param(tiny, id=str(tiny), marks=() if tiny in PRESENT else pytest.mark.skip(reason=lacks + tiny.model))
        for tiny in models
    ]


def padded_cases(models: list[Tiny]) -> list[Any]:
    """(model, padding) for models that support padding."""
    return [
        pytest.param(*case.values, padding, id=f"{case.id}-{padding or 'whole'}", marks=case.marks)
        for case in cases(models)
        for padding in ((None, "left", "right") if case.values[0].pads else (None,))
    ]
