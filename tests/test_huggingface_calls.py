"""What the attention function for Hugging Face models does with each argument, what it refuses, and how models are switched on
and off.
"""

from __future__ import annotations

import importlib
import pathlib
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest

import libflash

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import libflash.torch  # noqa: E402
from huggingface_checks import assert_near, check_generates, one_thread, result  # noqa: E402, F401
from huggingface_models import GROUPED, MODELS, TEXT, TOKENS, WINDOWED, Tiny  # noqa: E402

from libflash import _torch_hf, _torch_hf_interface  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

NAMED = {str(tiny): tiny for tiny in MODELS}
LLAMA, T5, MISTRAL = NAMED["LlamaForCausalLM"], NAMED["T5ForConditionalGeneration"], NAMED["MistralForCausalLM"]
FALCON = Tiny("FalconForCausalLM", "text", GROUPED)
BLOOM = Tiny("BloomForCausalLM", "text", {**TOKENS, "hidden_size": 32, "n_layer": 2, "n_head": 4})
CLAP = Tiny("ClapModel", "text", {}, {"text_config": ("ClapTextConfig", TEXT), "audio_config": ("ClapAudioConfig", {
    "depths": [1, 1], "num_attention_heads": [2, 2], "patch_embeds_hidden_size": 16, "hidden_size": 32, "spec_size": 64,
    "num_mel_bins": 16, "window_size": 4,
})})  # fmt: skip


class Layer(torch.nn.Module):
    """An attention module like those of transformers."""

    def __init__(self, is_causal: bool | None = True) -> None:
        super().__init__()
        if is_causal is not None:
            self.is_causal = is_causal


def qkv(queries: int, keys: int, heads: int = 2, batch: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(batch, 4, queries, 8), (batch, heads, keys, 8), (batch, heads, keys, 8)]
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


def eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, added: Any = 0.0, scaling: float = 8**-0.5) -> torch.Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return ((q @ k.mT * scaling + added).softmax(-1) @ v).transpose(1, 2)


def call(layer: Layer, tensors: list[torch.Tensor], mask: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    out, weights = _torch_hf.forward(layer.eval() if "dropout" not in options else layer, *tensors, mask, **options)
    assert weights is None
    return out


def below(queries: int, keys: int) -> torch.Tensor:
    """Added to the scores: query i sees keys 0 to i."""
    hidden = torch.arange(keys)[None] > torch.arange(queries)[:, None]
    return torch.zeros(queries, keys).masked_fill(hidden, -float("inf"))


# -- causality and masks


def test_no_mask_means_top_left_causality() -> None:
    """transformers fills a static cache from the start; later slots are empty."""
    x = qkv(5, 9)
    assert_near(call(Layer(), x), eager(*x, below(5, 9)), 1e-5)


def test_no_mask_with_fewer_keys_than_queries() -> None:
    x = qkv(9, 5)
    assert_near(call(Layer(), x), eager(*x, below(9, 5)), 1e-5)


def test_no_mask_of_one_query_or_of_a_layer_that_is_not_causal_is_full_attention() -> None:
    x = qkv(1, 9)
    assert_near(call(Layer(), x), eager(*x), 1e-5)
    x = qkv(5, 9)
    assert_near(call(Layer(False), x), eager(*x), 1e-5)
    assert_near(call(Layer(), x, is_causal=False), eager(*x), 1e-5)


def test_a_layer_that_does_not_say_whether_it_is_causal() -> None:
    x = qkv(5, 5)
    with pytest.raises(libflash.UnsupportedError, match=r"Layer passes no attention_mask and does not say whether it is causal"):
        call(Layer(None), x)
    assert_near(call(Layer(None), x, is_causal=True), eager(*x, below(5, 5)), 1e-5)
    assert_near(call(Layer(None), x, torch.ones(1, 1, 5, 5, dtype=torch.bool)), eager(*x), 1e-5)


def test_a_mask_says_everything() -> None:
    x = qkv(5, 9)
    keep = torch.rand(2, 1, 5, 9, generator=torch.Generator().manual_seed(0)) > 0.4
    keep[..., 0] = True
    added = torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)
    wanted = eager(*x, added)
    assert_near(call(Layer(), x, keep), wanted, 1e-5)
    assert_near(call(Layer(), x, added), wanted, 1e-5)
    with pytest.raises(libflash.InvalidError, match=r"attention_mask is torch.int64; it must be bool or floating-point"):
        call(Layer(), x, keep.long())


def test_rows_that_are_not_dense() -> None:
    """Inkling transposes the results of a convolution over the tokens."""
    x = qkv(5, 5)
    wanted = eager(*x, below(5, 5))
    strided = [y.mT.contiguous().mT for y in x]
    assert all(y.stride(-1) != 1 for y in strided)
    got = call(Layer(), strided)
    assert_near(got, wanted, 1e-5)
    for a, b in zip(*(torch.autograd.grad(out.square().sum(), x) for out in (got, wanted)), strict=True):
        assert_near(a, b, 1e-4)


# -- options


@pytest.mark.parametrize("keys", [5, 9])
@pytest.mark.parametrize("mask", ["none", "bool", "float"])
def test_position_bias_is_added_with_its_gradient(mask: str, keys: int) -> None:
    x = qkv(5, keys, heads=4)
    bias = torch.randn(1, 4, 5, keys, generator=torch.Generator().manual_seed(5)).requires_grad_()
    added = below(5, keys)
    given = {"none": None, "bool": (added == 0)[None, None], "float": added[None, None]}[mask]
    wanted = eager(*x, bias + added)
    got = call(Layer(), x, given, position_bias=bias)
    assert_near(got, wanted, 1e-5)
    leaves = [*x, bias]
    for a, b in zip(*(torch.autograd.grad(out.square().sum(), leaves) for out in (got, wanted)), strict=True):
        assert_near(a, b, 1e-4)


def test_scaling_softcap_and_sinks() -> None:
    x = qkv(5, 5)
    q, k, v = x
    assert_near(call(Layer(False), x, scaling=0.7), eager(*x, scaling=0.7), 1e-5)
    k4, v4 = (y.repeat_interleave(2, 1) for y in (k, v))
    capped = 2 * torch.tanh(q @ k4.mT * 0.7 / 2)
    assert_near(call(Layer(False), x, scaling=0.7, softcap=2.0), (capped.softmax(-1) @ v4).transpose(1, 2), 1e-5)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    scores = torch.cat([q @ k4.mT * 0.7, sinks.view(1, 4, 1, 1).expand(2, 4, 5, 1)], -1)
    assert_near(call(Layer(False), x, scaling=0.7, s_aux=sinks), (scores.softmax(-1)[..., :-1] @ v4).transpose(1, 2), 1e-5)
    layer = Layer(False)
    layer.sinks = sinks
    with pytest.raises(libflash.UnsupportedError, match=r"Layer has sinks and passes no s_aux"):
        call(layer, x)


def test_dropout_in_training_only() -> None:
    x = [y.detach() for y in qkv(5, 5)]
    wanted = eager(*x)
    assert_near(call(Layer(False).eval(), x), wanted, 1e-5)
    out, _ = _torch_hf.forward(Layer(False).eval(), *x, None, dropout=0.4)
    assert_near(out, wanted, 1e-5)
    layer = Layer(False).train()
    draws = torch.stack([call(layer, x, dropout=0.4) for _ in range(600)])
    assert (draws[0] - draws[1]).abs().max() > 0.1
    standard_error = draws.std(0) / 600**0.5
    assert ((draws.mean(0) - wanted).abs() <= 5 * standard_error + 1e-6).all()
    first, second = (torch.manual_seed(7) and call(layer, x, dropout=0.4) for _ in range(2))
    assert torch.equal(first, second)


# -- what is refused


@pytest.mark.parametrize("name", ["indices", "block_indices", "sinks", "head_mask", "cache", "block_table", "something_new"])
def test_an_unknown_keyword_is_refused_by_name(name: str) -> None:
    x = qkv(5, 5)
    call(Layer(), x, **{name: None})
    with pytest.raises(libflash.UnsupportedError, match=rf"Layer passes {name}, which lf_attention does not know"):
        call(Layer(), x, **{name: torch.ones(1)})


def test_a_keyword_that_only_other_parts_of_the_model_read() -> None:
    """The layers of LFM3-VL hand the sizes of the pictures to their attention, too."""
    x = qkv(5, 5)
    assert_near(call(Layer(False), x, grid_thw=[[1, 1, 5]]), eager(*x), 1e-5)


def test_a_window_that_is_not_in_a_mask() -> None:
    x = qkv(5, 5)
    assert_near(call(Layer(), x, sliding_window=5), eager(*x, below(5, 5)), 1e-5)
    with pytest.raises(libflash.UnsupportedError, match=r"Layer passes sliding_window=4 for 5 keys and no attention_mask"):
        call(Layer(), x, sliding_window=4)


def test_half_of_the_packed_lengths() -> None:
    ends = torch.tensor([0, 2, 5], dtype=torch.int32)
    with pytest.raises(libflash.InvalidError, match=r"cu_seq_lens_q and cu_seq_lens_k must be given together"):
        call(Layer(), qkv(5, 5, batch=1), cu_seq_lens_q=ends)
    with pytest.raises(libflash.UnsupportedError, match=r"are given for 5 queries and 9 keys"):
        call(Layer(False), qkv(5, 9, batch=1), cu_seq_lens_q=ends, cu_seq_lens_k=ends)


@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_lengths_of_two_rows(with_mask: bool, dtype: torch.dtype) -> None:
    x = qkv(5, 5)
    ends = torch.tensor([0, 2, 5, 9, 10], dtype=dtype)
    sequence = torch.tensor([[0, 0, 1, 1, 1], [2, 2, 2, 2, 3]])
    same = (sequence[:, :, None] == sequence[:, None])[:, None]
    wanted = eager(*x, below(5, 5).masked_fill(~same, -float("inf")))
    options = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 4, "max_length_k": 4}
    mask = (below(5, 5) == 0)[None, None] if with_mask else None
    assert_near(call(Layer(), x, mask, **options), wanted, 1e-5)


@pytest.mark.parametrize("with_mask", [False, True])
def test_packed_lengths_of_queries_and_keys_differ(with_mask: bool) -> None:
    x = qkv(5, 5, batch=1)
    same = torch.tensor([0, 0, 1, 1, 1])[:, None] == torch.tensor([0, 0, 0, 1, 1])
    options = {"cu_seq_lens_q": torch.tensor([0, 2, 5]), "cu_seq_lens_k": torch.tensor([0, 3, 5])}
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool) if with_mask else None
    assert_near(call(Layer(False), x, mask, **options), eager(*x, torch.zeros(5, 5).masked_fill(~same, -float("inf"))), 1e-5)


@pytest.mark.parametrize("tiny", [LLAMA, NAMED["GPT2LMHeadModel"], NAMED["BertForMaskedLM"], T5], ids=str)
def test_weights_of_attention_are_refused(tiny: Tiny) -> None:
    model = tiny.build()
    x = tiny.inputs()
    refused = pytest.raises(
        libflash.UnsupportedError, match=r"output_attentions is True; lf_attention does not store the weights"
    )
    with libflash.torch.enable(model):
        with refused:
            model(**x, output_attentions=True)
        model(**x, output_attentions=False, output_hidden_states=True)
        if tiny.generates:
            with refused:
                model.generate(x["input_ids"], max_new_tokens=2, output_attentions=True, return_dict_in_generate=True)


def test_weights_of_attention_are_refused_in_the_configuration() -> None:
    model = LLAMA.build(output_attentions=True)
    refused = pytest.raises(
        libflash.UnsupportedError, match=r"output_attentions is True; lf_attention does not store the weights"
    )
    with libflash.torch.enable(model), refused:
        model(**LLAMA.inputs())


# -- generation beyond greedy, training, compilation


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("tiny", [LLAMA, T5], ids=str)
def test_beam_search(tiny: Tiny, cache: str) -> None:
    options = {"num_beams": 3} | ({"cache_implementation": "static"} if cache == "static" else {})
    check_generates(tiny.build(), tiny.inputs("left"), 1e-5, **options)


@pytest.mark.parametrize("tiny", [LLAMA, MISTRAL, NAMED["Gemma2ForCausalLM"]], ids=str)
def test_a_text_in_two_parts(tiny: Tiny) -> None:
    """The second part's queries see the first part in the cache."""
    model, tokens = tiny.build(), tiny.inputs()["input_ids"]
    with torch.no_grad():
        whole = model(tokens).logits
        with libflash.torch.enable(model):
            first = model(tokens[:, :8])
            second = model(tokens[:, 8:], past_key_values=first.past_key_values)
    assert_near(torch.cat([first.logits, second.logits], 1), whole, 1e-5)


def test_training_keeps_keywords_of_the_trainer() -> None:
    model, x = LLAMA.build(), LLAMA.inputs("right")
    labels = x["input_ids"].masked_fill(x["attention_mask"] == 0, -100)
    options = {"labels": labels, "num_items_in_batch": torch.tensor(20), "use_cache": False}
    wanted = model.train()(**x, **options).loss
    model.gradient_checkpointing_enable()
    with libflash.torch.enable(model):
        got = model(**x, **options).loss
        got.backward()
    assert_near(got, wanted, 1e-5)
    assert all(parameter.grad is not None for parameter in model.parameters())


# -- switching models


def implementations(model: Any) -> set[str]:
    return {part.config._attn_implementation for part in model.modules() if hasattr(part, "config")}


@pytest.mark.parametrize("tiny", [LLAMA, T5, NAMED["BartForConditionalGeneration"], NAMED["CLIPModel"]], ids=str)
def test_every_part_is_switched_and_switched_back(tiny: Tiny) -> None:
    """Some models give their parts copies of the configuration."""
    model = tiny.build()
    assert implementations(model) == {"eager"}
    with libflash.torch.enable(model):
        assert implementations(model) == {"lf_attention"}
    assert implementations(model) == {"eager"}


def test_switches_close_in_any_order() -> None:
    model = LLAMA.build()
    first, second = libflash.torch.enable(model), libflash.torch.enable(model)
    first.close()
    assert implementations(model) == {"lf_attention"}
    second.close()
    assert implementations(model) == {"eager"}


def test_an_implementation_chosen_since_stays() -> None:
    model = LLAMA.build()
    with libflash.torch.enable(model):
        model.set_attn_implementation("sdpa")
    assert implementations(model) == {"sdpa"}


@pytest.mark.parametrize("tiny", [FALCON, BLOOM], ids=str)
def test_a_model_without_the_interface_is_refused_by_name(tiny: Tiny) -> None:
    model, other = tiny.build(), LLAMA.build()
    wanted = rf"{tiny} does not use transformers' attention interface \(it computes attention in \w*Attention\)"
    with pytest.raises(TypeError, match=wanted):
        libflash.torch.enable(other, model)
    assert implementations(other) == {"eager"}  # all or none


def test_a_part_without_the_interface_is_named() -> None:
    model = CLAP.build()
    with pytest.warns(UserWarning, match=r"ClapModel runs on libflash except ClapAudioSelfAttention") as caught:
        libflash.torch.enable(model).close()
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        libflash.torch.enable(LLAMA.build()).close()


@pytest.mark.parametrize(
    ("make", "kind"), [(lambda: torch.nn.Linear(2, 2), "Linear"), (lambda: 5, r"int \(5\)"), (lambda: torch.nn.Linear, "type")]
)
def test_what_is_no_model_is_refused_in_words(make: Callable[[], Any], kind: str) -> None:
    with pytest.raises(TypeError, match=rf"^{kind} is no Hugging Face model: neither it nor a part of it"):
        libflash.torch.enable(make())


def test_a_model_in_a_wrapper() -> None:
    model = LLAMA.build()
    with libflash.torch.enable(torch.nn.Sequential(model)):
        assert implementations(model) == {"lf_attention"}


def test_loaded_by_name() -> None:
    """`attn_implementation=` of a configuration or of from_pretrained."""
    libflash.torch.enable().close()
    model, x = MISTRAL.build(), MISTRAL.inputs("left")
    wanted = result(model, x)
    named = transformers.MistralForCausalLM(transformers.MistralConfig(**WINDOWED, attn_implementation="lf_attention")).eval()
    named.load_state_dict(model.state_dict())
    assert implementations(named) == {"lf_attention"}
    assert_near(result(named, x), wanted, 1e-5)


BY_NAME = [
    BLOOM, Tiny("MPNetForMaskedLM", "encode", TEXT), Tiny("BlipTextModel", "encode", TEXT),
    Tiny("XGLMForCausalLM", "text", {**TOKENS, "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48}),
]  # fmt: skip


@pytest.mark.parametrize("tiny", BY_NAME, ids=str)
def test_a_model_without_the_interface_is_refused_when_loaded_by_name(tiny: Tiny) -> None:
    """transformers accepts every name for every model and asks for a mask, which such a model adds to its scores."""
    libflash.torch.enable().close()
    if tiny.model == "BlipTextModel":
        from transformers.models.blip.modeling_blip_text import BlipTextModel as kind
    else:
        kind = getattr(transformers, tiny.model)
    model = kind(kind.config_class(**tiny.sizes, attn_implementation="lf_attention")).eval()
    config = kind.config_class.__name__
    wanted = rf'^attn_implementation="lf_attention": the model of {config} does not use transformers\' attention interface \(it '
    wanted += (
        r'computes attention in (\w*Attention, )*\w*Attention\), so libflash cannot serve it; use attn_implementation="eager"$'
    )
    for padding in (None, "right"):
        with pytest.raises(libflash.UnsupportedError, match=wanted):
            model(**tiny.inputs(padding))


def test_a_compiled_model_without_the_interface_is_refused() -> None:
    libflash.torch.enable().close()
    config = transformers.BloomConfig(**BLOOM.sizes, attn_implementation="lf_attention")
    model = torch.compile(transformers.BloomForCausalLM(config).eval(), backend="eager")
    with pytest.raises(libflash.UnsupportedError, match=r"the model of BloomConfig does not use"):
        model(**BLOOM.inputs())
    llama = LLAMA.build()
    wanted = result(llama, LLAMA.inputs("left"))
    with libflash.torch.enable(llama):
        got = result(torch.compile(llama, backend="eager", fullgraph=True), LLAMA.inputs("left"))
    assert_near(got, wanted, 1e-5)


# Models as they come with trust_remote_code: configuration_x.py, modeling_x.py and other files, in a package of any name.
REMOTE_CONFIG = "from transformers import BloomConfig, LlamaConfig\n\n\nclass RemoteConfig({base}Config):\n    pass\n"
OWN = """
class RemoteAttention(torch.nn.Module):
    def forward(self, q, k, v):
        return {call}(q, k, v)


class RemoteModel(PreTrainedModel):
    config_class = RemoteConfig
"""
REMOTE = {  # what modeling_x.py contains, and whether the name is refused
    "its own attention": (OWN.format(call="F.scaled_dot_product_attention"), True),
    "the table": ("from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS\n" + OWN.format(call="F.softmax"), False),
    "another name": ("from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as TABLE\n" + OWN.format(call="id"), False),
    "through a module": ("from transformers import modeling_utils\n" + OWN.format(
        call="modeling_utils.ALL_ATTENTION_FUNCTIONS['x']"), False),
    "through a function": ("from .helpers_x import attend\n" + OWN.format(call="attend"), False),
    "an imported layer": ("from transformers.models.llama.modeling_llama import LlamaDecoderLayer\n" + OWN.format(
        call="id"), False),
    "an inherited attention": (
        "from transformers.models.llama.modeling_llama import LlamaAttention\n\n\nclass RemoteAttention(LlamaAttention):\n"
        "    pass\n\n\nclass RemoteModel(PreTrainedModel):\n    config_class = RemoteConfig\n", False),
    "no attention": ("class RemoteModel(PreTrainedModel):\n    config_class = RemoteConfig\n", False),
    "no model": ("class RemoteAttention(torch.nn.Module):\n    pass\n", False),
}  # fmt: skip
HEAD = "import torch\nimport torch.nn.functional as F\nfrom transformers import PreTrainedModel\n\n"
HEAD += "from .configuration_x import RemoteConfig\n\n"
HELPERS = "from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS\n\n\ndef attend(*x):\n    return x\n"


def imported(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, modeling: str, base: str) -> type:
    """The class of configurations of a package with these models."""
    package = folder / "remote_x"
    package.mkdir()
    files = {"__init__": "", "configuration_x": REMOTE_CONFIG.format(base=base), "modeling_x": HEAD + modeling}
    for name, text in {**files, "helpers_x": HELPERS}.items():
        (package / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    for name in ("", ".helpers_x", ".configuration_x", ".modeling_x"):
        monkeypatch.delitem(sys.modules, f"remote_x{name}", raising=False)
    importlib.import_module("remote_x.modeling_x")
    found = importlib.import_module("remote_x.configuration_x").RemoteConfig
    assert isinstance(found, type)
    return found


@pytest.mark.parametrize("case", list(REMOTE))
def test_remote_code_is_refused_only_if_it_is_known_not_to_use_the_interface(
    case: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modeling, refused = REMOTE[case]
    classes = _torch_hf_interface.classes_without_interface(imported(tmp_path, monkeypatch, modeling, "Llama"))
    assert classes == (["RemoteAttention"] if refused else [])


def test_a_configuration_without_models_is_judged_by_its_base(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with AutoModel.register(RemoteConfig, BloomModel)."""
    assert _torch_hf_interface.classes_without_interface(imported(tmp_path, monkeypatch, "", "Bloom")) == ["BloomAttention"]
    assert _torch_hf_interface.classes_without_interface(int) == []


def test_models_under_sdpa() -> None:
    """transformers' "sdpa" implementation, with libflash as PyTorch's function."""
    for tiny in (LLAMA, NAMED["BartForConditionalGeneration"]):
        model = tiny.build()
        wanted = result(model, tiny.inputs("right"))
        model.set_attn_implementation("sdpa")
        with libflash.torch.enable():
            assert_near(result(model, tiny.inputs("right")), wanted, 1e-5)
