"""libflash.torch inside compiled functions, where calls write to views that do not begin at the beginning of their storage. The
compiler of PyTorch 2.13 loses a storage offset that depends on symbolic sizes."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import libflash.torch  # noqa: E402

Tensor = torch.Tensor


def layers(*shape: int) -> Tensor:
    return torch.arange(3.0).view(3, *[1] * len(shape)).expand(3, *shape).clone()


def attention_to_a_layer(x: Tensor, memory: Tensor) -> None:
    libflash.torch.attention(x, x, x, out=memory[1])


def append_to_a_layer(x: Tensor, memory: Tensor) -> None:
    libflash.torch.decode(x[:, -1:], memory[1], memory[2], k=x, v=x, cache_seqlens=torch.tensor([0, 1], dtype=torch.int32))


def append_to_a_layer_of_keys(x: Tensor, memory: Tensor) -> None:
    lengths = torch.tensor([0, 1], dtype=torch.int32)
    libflash.torch.decode(x[:, -1:], memory[2], k=x, head_dim_v=4, cache_seqlens=lengths)


def write_to_slots_of_a_layer(x: Tensor, memory: Tensor) -> None:
    libflash.torch.cache_write(x[:, 0], x[:, 1], memory[1], memory[2], torch.tensor([4, 0]))


CALLS = (attention_to_a_layer, append_to_a_layer, append_to_a_layer_of_keys, write_to_slots_of_a_layer)


@pytest.mark.filterwarnings("ignore")  # of PyTorch's own tools
@pytest.mark.parametrize("call", CALLS)
def test_views_that_are_made_in_the_graph(call) -> None:
    """Of every layer the compiled call writes what the eager call writes, for further sizes, too."""
    torch._dynamo.reset()
    compiled = torch.compile(call, dynamic=True, fullgraph=True)
    for seqlen in (5, 6):
        x, wanted, got = torch.randn(2, seqlen, 4, 8), layers(2, seqlen, 4, 8), layers(2, seqlen, 4, 8)
        if call is not attention_to_a_layer:
            x = x[:, :2].clone()
        call(x, wanted)
        assert not torch.equal(wanted, got)
        compiled(x, got)
        torch.testing.assert_close(got, wanted)


@pytest.mark.filterwarnings("ignore")  # of PyTorch's own tools
def test_views_that_are_arguments() -> None:
    torch._dynamo.reset()

    def append(x: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor) -> Tensor:
        return libflash.torch.decode(x, k_cache, v_cache, k=x, v=x, cache_seqlens=lengths)

    x, wanted, got = torch.randn(2, 1, 4, 8), layers(2, 6, 4, 8), layers(2, 6, 4, 8)
    lengths = torch.tensor([0, 5], dtype=torch.int32)
    out = append(x, wanted[1], wanted[2], lengths)
    torch.testing.assert_close(torch.compile(append, dynamic=True, fullgraph=True)(x, got[1], got[2], lengths), out)
    assert not torch.equal(wanted, layers(2, 6, 4, 8))
    torch.testing.assert_close(got, wanted)


@pytest.mark.filterwarnings("ignore")  # of PyTorch's own tools
def test_a_view_that_depends_on_data_is_refused() -> None:
    torch._dynamo.reset()

    def write(x: Tensor, memory: Tensor, layer: Tensor) -> None:
        number = layer.item()
        torch._check(number >= 0)
        torch._check(number < 3)
        libflash.torch.attention(x, x, x, out=memory.select(0, number))

    with (
        torch._dynamo.config.patch(capture_scalar_outputs=True),
        pytest.raises(Exception, match=r"out is a view with the storage offset .*u0.*, which depends on data: PyTorch's"),
    ):
        torch.compile(write, fullgraph=True)(torch.randn(2, 5, 4, 8), layers(2, 5, 4, 8), torch.tensor(1))


class ToALayer(torch.nn.Module):
    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        libflash.torch.attention(x, x, x, out=memory[1])
        return x + 1


@pytest.mark.filterwarnings("ignore")  # of PyTorch's own tools
@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_program_with_dynamic_sizes(strict: bool, tmp_path) -> None:
    """It writes to the view; PyTorch's compiler would make another program of it, and is refused."""
    batch = torch.export.Dim("batch", min=2, max=64)
    given = torch.randn(2, 5, 4, 8), layers(2, 5, 4, 8)
    exported = torch.export.export(ToALayer(), given, dynamic_shapes=({0: batch}, {1: batch}), strict=strict)
    x, wanted, got = torch.randn(3, 5, 4, 8), layers(3, 5, 4, 8), layers(3, 5, 4, 8)
    ToALayer()(x, wanted)
    exported.module()(x, got)
    assert not torch.equal(wanted, layers(3, 5, 4, 8))
    torch.testing.assert_close(got, wanted)
    with pytest.raises(Exception, match=r"out is a view with the storage offset .*, which depends on dynamic dimensions"):
        torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "model.pt2"))
