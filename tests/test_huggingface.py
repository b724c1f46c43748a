"""libflash.torch.enable with a Hugging Face model: a small random one, nothing is downloaded."""

from __future__ import annotations

import pytest

import libflash

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import libflash.torch  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def model(**options: object) -> object:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=96, **options,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def padded() -> dict[str, torch.Tensor]:
    """One whole row and one with padding on the left."""
    torch.manual_seed(1)
    tokens = torch.randint(2, 96, (2, 13))
    mask = torch.ones_like(tokens)
    mask[1, :5] = 0
    return {"input_ids": tokens * mask, "attention_mask": mask}


def logits(network: object, x: dict[str, torch.Tensor]) -> torch.Tensor:
    return network(**x).logits[x["attention_mask"].bool()]


@pytest.mark.parametrize("pad", [False, True])
def test_same_logits_and_gradients_as_eager(pad: bool) -> None:
    x = padded()
    if not pad:
        x["attention_mask"] = torch.ones_like(x["attention_mask"])
    network = model()
    network.set_attn_implementation("eager")
    wanted = logits(network, x)
    parameters = list(network.parameters())
    wanted_gradients = torch.autograd.grad(wanted.square().mean(), parameters)
    with libflash.torch.enable(network):
        assert network.config._attn_implementation == "lf_attention"
        got = logits(network, x)
        gradients = torch.autograd.grad(got.square().mean(), parameters)
    assert network.config._attn_implementation == "eager"
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients, wanted_gradients, rtol=1e-3, atol=1e-5)


def test_same_tokens() -> None:
    network, x = model(), padded()
    options = {"max_new_tokens": 8, "do_sample": False}
    network.set_attn_implementation("eager")
    wanted = network.generate(**x, **options)
    with libflash.torch.enable(network):
        assert torch.equal(network.generate(**x, **options), wanted)
    with libflash.torch.enable():
        network.set_attn_implementation("sdpa")
        assert torch.equal(network.generate(**x, **options), wanted)


def test_sliding_window() -> None:
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        sliding_window=4, pad_token_id=0,
    )  # fmt: skip
    network, x = transformers.MistralForCausalLM(config).eval(), padded()
    network.set_attn_implementation("eager")
    wanted = logits(network, x)
    with libflash.torch.enable(network):
        torch.testing.assert_close(logits(network, x), wanted, rtol=1e-4, atol=1e-5)
