"""Seed and offset of dropout in device memory: the same mask as with the values, and read when the kernels run."""

from __future__ import annotations

import numpy as np
import pytest
from gpu_kernels import kernels, parameters, supporting

import libflash

torch = pytest.importorskip("torch")
from gpu_case import DTYPES, same_bits, same_sums  # noqa: E402  (needs torch)

P, SEED, OFFSET = 0.25, 2**63 + 2**40 + 7, 2**64 - 2**35 + 1
FORWARD = parameters(supporting(kernels("forward"), dropout_p=P))
BACKWARD = parameters(supporting(kernels("backward"), dropout_p=P))


def state(seed: int = SEED, offset: int = OFFSET) -> torch.Tensor:
    """A tensor aligned to 8 bytes only."""
    numbers = np.array([0, seed, offset], np.uint64).view(np.int64)
    return torch.from_numpy(numbers).cuda()[1:]


def inputs(kernel: dict) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    dims, dtype = (kernel["head_dim"], kernel["head_dim"], kernel["head_dim_v"]), DTYPES[kernel["dtype"]]
    shapes = [(2, rows, heads, dim) for rows, heads, dim in zip((200, 333, 333), (4, 2, 2), dims, strict=True)]
    return [torch.randn(shape, generator=generator).to(dtype).cuda() for shape in shapes]


@pytest.mark.parametrize("kernel", FORWARD)
def test_forward(kernel: dict) -> None:
    x = inputs(kernel)
    by_value = libflash.attention(*x, dropout_p=P, seed=SEED, offset=OFFSET, kernel=kernel["name"])
    for numbers in (state(), state().view(torch.uint64)):
        assert same_bits(libflash.attention(*x, dropout_p=P, seed=numbers, kernel=kernel["name"]), by_value)
    other = libflash.attention(*x, dropout_p=P, seed=state(SEED, OFFSET + 1), kernel=kernel["name"])
    assert not same_bits(other, by_value)


@pytest.mark.parametrize("kernel", BACKWARD)
def test_backward(kernel: dict) -> None:
    q, k, v = inputs(kernel)
    out, lse = libflash.attention(q, k, v, dropout_p=P, seed=SEED, offset=OFFSET, return_lse=True)
    ordered = bool(supporting([kernel], deterministic=True))
    options = {"dropout_p": P, "deterministic": ordered, "kernel": kernel["name"]}
    by_value = libflash.attention_backward(out, q, k, v, out, lse, seed=SEED, offset=OFFSET, **options)
    by_tensor = libflash.attention_backward(out, q, k, v, out, lse, seed=state(), **options)
    for name, one, other in zip(("dq", "dk", "dv"), by_value, by_tensor, strict=True):
        assert same_sums(one, other, ordered or name != "dq"), name


@pytest.mark.parametrize("kernel", FORWARD)
def test_a_graph_reads_it_at_each_replay(kernel: dict) -> None:
    x, numbers = inputs(kernel), state()
    out = torch.empty((*x[0].shape[:3], x[2].shape[3]), dtype=x[0].dtype, device="cuda")
    libflash.attention(*x, dropout_p=P, seed=numbers, out=out, kernel=kernel["name"])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        libflash.attention(*x, dropout_p=P, seed=numbers, out=out, kernel=kernel["name"])
    for seed, offset in ((1, 2), (SEED, 0), (3, OFFSET)):
        numbers.copy_(state(seed, offset))
        out.fill_(torch.nan)
        graph.replay()
        wanted = libflash.attention(*x, dropout_p=P, seed=seed, offset=offset, kernel=kernel["name"])
        assert same_bits(out, wanted)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_host_memory_is_refused() -> None:
    x = [torch.zeros(1, 8, 1, 64, device="cuda") for _ in range(3)]
    with pytest.raises(libflash.InvalidError, match="seed: must be on the device of the first tensor, cuda:0"):
        libflash.attention(*x, dropout_p=P, seed=state().cpu())
