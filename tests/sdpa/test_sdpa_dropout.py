"""Dropout masks under libflash.torch.enable: a backward pass uses the mask of its forward pass, whichever library drew it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import libflash

torch = pytest.importorskip("torch")

import libflash.torch  # noqa: E402
from sdpa_operators import CUDNN, EFFICIENT, FLASH, FUNCTIONS, forward_and_backward, on_cpu  # noqa: E402
from sdpa_problem import problem  # noqa: E402

from libflash import _torch_sdpa, _torch_sdpa_random  # noqa: E402
from libflash import _torch_sdpa_operators as operators  # noqa: E402


@pytest.mark.parametrize("name", [FLASH, CUDNN, EFFICIENT])
def test_backward_refuses_a_mask_that_pytorch_drew(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = (torch.tensor(7), torch.tensor(4))
    monkeypatch.setattr(_torch_sdpa_random, "as_rng_state", lambda state: theirs)
    monkeypatch.setattr(_torch_sdpa_random, "as_seed_and_offset", lambda state: theirs)
    with pytest.raises(libflash.UnsupportedError, match="PyTorch's kernel drew the mask"):
        forward_and_backward(name, [x.detach() for x in problem()], None, 0.5, causal=False)


def test_pytorch_does_not_get_a_mask_that_libflash_drew(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise libflash.UnsupportedError("deterministic: no kernel here")

    monkeypatch.setattr(operators._core, "attention_backward", refuse)
    with pytest.raises(RuntimeError, match=r"libflash drew the dropout mask and has no kernel.*deterministic: no kernel here"):
        forward_and_backward(EFFICIENT, [x.detach() for x in problem()], None, 0.5, causal=False)


@pytest.mark.parametrize("keys", [33, 150])
def test_fill_mask(keys: int) -> None:
    """fill_mask gives the form that PyTorch's tests use: entries above dropout_p are kept."""
    q, k, v = (x.detach() for x in problem(20, keys))
    torch.manual_seed(5)
    out, _, seed, offset = on_cpu(EFFICIENT, q, k, v, None, True, 0.3)
    with torch.no_grad():
        mask = _torch_sdpa.fill_mask(torch.empty(2, 4, 20, keys), 0.3, seed.item(), offset.item())
    p = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1)
    torch.testing.assert_close((p * (mask > 0.3) / 0.7) @ v, out)
    assert abs((mask == 0).float().mean() - 0.3) < 0.02
    with pytest.raises(libflash.UnsupportedError, match="PyTorch's kernel drew the mask"):
        _torch_sdpa.fill_mask(mask, 0.3, 7, 4)


@pytest.mark.parametrize("name", [FLASH, CUDNN, EFFICIENT])
def test_dropout_in_a_captured_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed and offset stay in tensors, which the library reads when it runs. is_ours() reads neither."""
    monkeypatch.setattr(_torch_sdpa_random, "capturing", lambda x: True)
    leaves = [x.detach() for x in problem()]
    out, gradients, dout, (first, second) = forward_and_backward(name, leaves, None, 0.5, causal=False)
    monkeypatch.setattr(_torch_sdpa_random, "MARK", None)  # comparing the value of a number would fail
    assert _torch_sdpa_random.is_ours(second)
    assert not _torch_sdpa_random.is_ours(second.clone())
    leaves = [x.clone().requires_grad_() for x in leaves]
    numbers = {"seed": int(first.flatten()[0]), "offset": int(second)}
    wanted = libflash.torch.attention(*leaves, layout="bhsd", softmax_scale=0.3, dropout_p=0.5, **numbers)
    torch.testing.assert_close(out, wanted.detach())
    torch.testing.assert_close(tuple(gradients[:3]), torch.autograd.grad(wanted, leaves, dout))


@pytest.fixture
def backward_kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(_torch_sdpa_random, "masks", type(_torch_sdpa_random.masks)())
    kernels = _torch_sdpa._BackwardKernels()
    kernels.start([])
    return kernels


def test_backward_operators_stay_while_libflash_has_drawn_masks(backward_kernels: Any) -> None:
    operator = next(pair[1] for pair in _torch_sdpa._operators() if pair[1].name == f"{EFFICIENT}_backward")
    seen = []
    operator.function = lambda *args: seen.append("libflash")
    operator.function.__signature__ = inspect.signature(FUNCTIONS[operator.name])
    operator.original = lambda: type("Kernel", (), {"call_boxed": staticmethod(lambda *args: seen.append("PyTorch"))})
    kernel = backward_kernels.kernel(operator)
    mine, theirs = ([None] * 7 + [seed, offset, 0.5, [True] * 4] for seed, offset in (
        _torch_sdpa_random.as_seed_and_offset(_torch_sdpa_random.draw(0.5, torch.zeros(1))), (torch.tensor(7), torch.tensor(4))
    ))  # fmt: skip
    kernel(None, *theirs)
    backward_kernels.stop()
    assert backward_kernels.library is not None
    kernel(None, *theirs)
    kernel(None, *mine)
    assert seen == ["libflash", "PyTorch", "libflash"]


def test_backward_operators_are_removed_where_no_mask_was_drawn(backward_kernels: Any) -> None:
    backward_kernels.stop()
    assert backward_kernels.library is None


def test_any_number_of_pytorch_is_not_ours() -> None:
    """Without dropout its operators leave the offset, uint64, as it happens to be in memory."""
    for number in (0, 2**63, 13836327163894169600, 2**64 - 1):
        assert not _torch_sdpa_random.is_ours(torch.tensor(number, dtype=torch.uint64))
    assert _torch_sdpa_random.is_ours(torch.tensor(_torch_sdpa_random.MARK, dtype=torch.uint64))
