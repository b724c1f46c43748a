"""Decode on the GPU from PyTorch (compiled, with graphs, on another stream), CuPy and JAX: the bits of a plain call."""

from __future__ import annotations

import pytest

import libflash

torch = pytest.importorskip("torch")
import libflash.torch  # noqa: E402
from gpu_case import same_bits  # noqa: E402  (needs torch)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def problem(dtype: torch.dtype = torch.bfloat16) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    generator = torch.Generator("cuda").manual_seed(2)
    shapes = ((3, 2, 8, 64), (3, 200, 2, 64), (3, 200, 2, 64), (3, 2, 2, 64), (3, 2, 2, 64))
    q, k_cache, v_cache, k, v = (torch.randn(shape, generator=generator, device="cuda").to(dtype) for shape in shapes)
    lengths = torch.tensor([198, 0, 77], dtype=torch.int32, device="cuda")
    return [q, k_cache, v_cache], {"k": k, "v": v, "cache_seqlens": lengths}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own
def test_compiled_without_a_graph_break() -> None:
    (q, *caches), options = problem()
    wanted_caches = [x.clone() for x in caches]
    wanted = libflash.decode(q, *wanted_caches, **options)
    compiled = torch.compile(lambda *x: libflash.torch.decode(*x, **options) + 0, fullgraph=True)
    assert same_bits(compiled(q, *caches), wanted)
    assert all(map(same_bits, caches, wanted_caches))


def test_on_another_stream() -> None:
    (q, *caches), options = problem()
    wanted = libflash.decode(q, *[x.clone() for x in caches], **options)
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        got = libflash.torch.decode(q, *caches, **options)
    torch.cuda.current_stream().wait_stream(other)
    assert same_bits(got, wanted)


def test_an_operation_has_its_workspace_to_itself() -> None:
    """Concurrent calls on two streams, both with several splits."""
    (q, *caches), options = problem()
    lengths = options["cache_seqlens"]
    wanted = libflash.decode(q, *caches, cache_seqlens=lengths, num_splits=5)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    outs: list[torch.Tensor] = []
    for _ in range(50):
        for stream in streams:
            with torch.cuda.stream(stream):
                outs.append(libflash.torch.decode(q, *caches, cache_seqlens=lengths, num_splits=5))
    torch.cuda.synchronize()
    assert all(same_bits(x, wanted) for x in outs)


def test_cupy() -> None:
    cupy = pytest.importorskip("cupy")
    (q, *caches), options = problem(torch.float16)
    wanted = libflash.decode(q, *[x.clone() for x in caches], **options)
    arrays = [cupy.from_dlpack(x) for x in (q, *caches)]
    got = libflash.decode(*arrays, **{name: cupy.from_dlpack(x) for name, x in options.items()})
    assert isinstance(got, cupy.ndarray)
    assert same_bits(torch.from_dlpack(got), wanted)


def test_jax() -> None:
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU")
    import libflash.jax

    (q, *caches), options = problem(torch.float16)
    wanted_caches = [x.clone() for x in caches]
    wanted = libflash.decode(q, *wanted_caches, **options)
    arrays = [jax.dlpack.from_dlpack(x) for x in (q, *caches)]
    given = {name: jax.dlpack.from_dlpack(x) for name, x in options.items()}
    got, *new = jax.jit(lambda arrays, given: libflash.jax.decode(*arrays, **given))(arrays, given)
    assert same_bits(torch.from_dlpack(got), wanted)
    assert all(same_bits(torch.from_dlpack(x), y) for x, y in zip(new, wanted_caches, strict=True))
