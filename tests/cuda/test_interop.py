"""Streams, allocators and mixed libraries on a GPU: work runs on the caller's stream, in order, and the host does not wait.

Uses merge, which needs no kernel beyond those that every CUDA build has.
"""

from __future__ import annotations

import time

import numpy as np
import pytest

import libflash

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

SLOW = 40_000_000  # cycles: some 20 ms
SHAPE = (2, 300, 8, 64)


def parts(count: int = 3, seed: int = 0) -> tuple[list, list]:
    generator = torch.Generator().manual_seed(seed)
    outs = [torch.randn(SHAPE, generator=generator, dtype=torch.float32).half().cuda() for _ in range(count)]
    lses = [torch.randn((2, 8, 300), generator=generator).cuda() for _ in range(count)]
    return outs, lses


def wanted(outs: list, lses: list) -> torch.Tensor:
    out, _ = libflash.merge([x.cpu() for x in outs], [x.cpu() for x in lses])
    return out


def late_copies(outs: list, lses: list, stream: torch.cuda.Stream) -> tuple[list, list]:
    """Copies that contain NaN until `stream` has slept: reading them too early gives NaN."""
    made = [[torch.full_like(x, float("nan")) for x in group] for group in (outs, lses)]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLOW)
        for group, sources in zip(made, (outs, lses), strict=True):
            for x, source in zip(group, sources, strict=True):
                x.copy_(source)
    return made[0], made[1]


def assert_right(out: object, outs: list, lses: list) -> None:
    torch.cuda.synchronize()
    got = torch.from_dlpack(out) if not isinstance(out, torch.Tensor) else out
    assert torch.allclose(got.cpu().float(), wanted(outs, lses).float(), atol=2e-3)


def test_current_stream_and_no_waiting() -> None:
    outs, lses = parts()
    libflash.merge(outs, lses)  # the first launch loads the module
    stream = torch.cuda.Stream()
    late_outs, late_lses = late_copies(outs, lses, stream)
    start = time.perf_counter()
    with torch.cuda.stream(stream):
        out, lse = libflash.merge(late_outs, late_lses)
    host = time.perf_counter() - start
    assert not stream.query(), "the call returned before its work was done"
    assert host < 0.010
    assert_right(out, outs, lses)
    assert out.is_cuda
    assert lse.dtype == torch.float32


@pytest.mark.parametrize("kind", ["handle", "stream"])
def test_given_stream(kind: str) -> None:
    outs, lses = parts()
    for _ in range(5):  # memory that is freed on one stream and allocated on another must not be mixed up
        stream = torch.cuda.Stream()
        late_outs, late_lses = late_copies(outs, lses, stream)
        given = stream.cuda_stream if kind == "handle" else stream
        out, _ = libflash.merge(late_outs, late_lses, stream=given)
        assert_right(out, outs, lses)


def test_graph_capture() -> None:
    outs, lses = parts()
    out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    libflash.merge(outs, lses, out=out, lse=lse)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        libflash.merge(outs, lses, out=out, lse=lse)
        made, _ = libflash.merge(outs, lses)
    for seed in (1, 2):
        other_outs, other_lses = parts(seed=seed)
        for x, y in zip([*outs, *lses], [*other_outs, *other_lses], strict=True):
            x.copy_(y)
        graph.replay()
        assert_right(out, other_outs, other_lses)
        assert torch.equal(out, made)


def test_cupy() -> None:
    cupy = pytest.importorskip("cupy")
    outs, lses = parts()
    stream = cupy.cuda.Stream(non_blocking=True)
    mine = torch.cuda.ExternalStream(stream.ptr)
    late_outs, late_lses = late_copies(outs, lses, mine)
    cupy_outs, cupy_lses = ([cupy.from_dlpack(x) for x in group] for group in (outs, lses))
    torch.cuda.synchronize()
    with stream:
        for to, late in zip([*cupy_outs, *cupy_lses], [*late_outs, *late_lses], strict=True):
            to[...] = cupy.nan
            with torch.cuda.stream(mine):
                torch.from_dlpack(to).copy_(late)
        out, lse = libflash.merge(cupy_outs, cupy_lses)
    assert isinstance(out, cupy.ndarray)
    assert (out.dtype, lse.dtype, out.shape) == (np.float16, np.float32, SHAPE)
    assert_right(out, *parts())
    again, _ = libflash.merge(cupy_outs, cupy_lses, stream=stream)
    assert_right(again, *parts())


@pytest.mark.parametrize("first", ["torch", "cupy"])
def test_libraries_mix(first: str) -> None:
    """Two libraries on two streams: the call's stream, that of the first array's library, waits for the other."""
    cupy = pytest.importorskip("cupy")
    outs, lses = parts()
    torch_stream, cupy_stream = torch.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
    slow = torch.cuda.ExternalStream(cupy_stream.ptr) if first == "torch" else torch_stream
    late_outs, late_lses = late_copies(outs, lses, slow)
    with torch.cuda.stream(torch_stream), cupy_stream:
        if first == "torch":
            torch_stream.wait_stream(slow)  # for the outs, which are PyTorch's own affair
            out, _ = libflash.merge(late_outs, [cupy.asarray(x) for x in late_lses])
        else:
            out, _ = libflash.merge([cupy.asarray(x) for x in outs], late_lses)
    assert_right(out, outs, lses)


def test_devices_must_agree() -> None:
    outs, lses = parts()
    with pytest.raises(libflash.InvalidError, match="device"):
        libflash.merge(outs, [x.cpu() for x in lses])
    q = torch.zeros(1, 4, 2, 64, dtype=torch.float16, device="cuda")
    with pytest.raises(libflash.InvalidError, match="seqused_k is int64 on a CUDA device"):
        libflash.attention(q, q, q, seqused_k=torch.tensor([4], device="cuda"))


def test_jax_arrays_on_a_gpu_go_to_the_jax_adapter() -> None:
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("no JAX for CUDA")
    x = jax.random.normal(jax.random.key(0), (1, 4, 2, 64), "float16")
    out = libflash.attention(x, x, x)
    assert isinstance(out, jax.Array)
    host = np.asarray(x)
    np.testing.assert_allclose(np.asarray(out, "float32"), np.asarray(libflash.attention(host, host, host), "float32"), atol=2e-3)


def test_memory_is_given_back() -> None:
    outs, lses = parts()
    torch.cuda.synchronize()
    libflash.merge(outs, lses)
    before = torch.cuda.memory_allocated()
    for _ in range(500):
        libflash.merge(outs, lses)
        libflash.merge(outs, lses, stream=torch.cuda.current_stream())
    assert torch.cuda.memory_allocated() == before
