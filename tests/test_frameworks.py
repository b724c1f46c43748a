"""libflash.attention with the arrays of PyTorch and JAX: results, refusals, and calls that the adapters get."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from harness import assert_same_bits, qkv, run_python

import libflash


def torch_qkv(**shape) -> list:
    torch = pytest.importorskip("torch")
    return [torch.from_numpy(x) for x in qkv(**shape)]


def test_torch_results_are_those_of_numpy() -> None:
    torch = pytest.importorskip("torch")
    arrays, tensors = qkv(), torch_qkv()
    out, lse = libflash.attention(*tensors, causal=True, return_lse=True)
    wanted, wanted_lse = libflash.attention(*arrays, causal=True, return_lse=True)
    assert type(out) is type(lse) is torch.Tensor
    assert_same_bits(out.numpy(), wanted)
    assert_same_bits(lse.numpy(), wanted_lse)
    gradients = libflash.attention_backward(torch.ones_like(out), *tensors, out, lse, causal=True)
    for one, other in zip(
        gradients, libflash.attention_backward(np.ones_like(wanted), *arrays, wanted, wanted_lse, causal=True), strict=True
    ):
        assert_same_bits(one.numpy(), other)
    mask = torch.rand(1, 1, 1, 1) < 2
    lists = libflash.compress_block_mask(mask)
    assert isinstance(lists.row_counts, torch.Tensor)
    assert_same_bits(libflash.attention(*tensors, block_mask=lists).numpy(), libflash.attention(*tensors).numpy())


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float64"])
def test_torch_dtypes(name: str) -> None:
    torch = pytest.importorskip("torch")
    q, k, v = (x.to(getattr(torch, name)) for x in torch_qkv())
    out, lse = libflash.attention(q, k, v, return_lse=True)
    assert out.dtype == q.dtype
    assert lse.dtype == (torch.float64 if name == "float64" else torch.float32)
    assert torch.allclose(out.float(), libflash.attention(q.float(), k.float(), v.float()), atol=0.02)
    assert_same_bits(
        libflash.attention(q, k, v, out=torch.empty_like(q)).view(torch.uint8).numpy(), out.view(torch.uint8).numpy()
    )


def test_torch_outputs_are_contiguous_in_the_layout() -> None:
    torch = pytest.importorskip("torch")
    q, k, v = torch_qkv()
    out = libflash.attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), layout="bhsd")
    assert out.shape == (1, 4, 40, 16)
    assert out.is_contiguous()
    assert torch.equal(out.transpose(1, 2), libflash.attention(q, k, v))


def test_libraries_mix() -> None:
    """Options may come from another library than q; the result is an array of q's library."""
    torch = pytest.importorskip("torch")
    q, k, v = torch_qkv(batch=2)
    slopes, used = np.array([0.5, 0.25, 0.125, 0.0625], np.float32), np.array([30, 56], np.int32)
    out = libflash.attention(q, k.numpy(), v, alibi_slopes=slopes, seqused_k=used)
    assert isinstance(out, torch.Tensor)
    same = libflash.attention(q.numpy(), k, v, alibi_slopes=torch.from_numpy(slopes), seqused_k=torch.from_numpy(used))
    assert isinstance(same, np.ndarray)
    assert_same_bits(out.numpy(), same)
    into = np.empty_like(same)
    assert libflash.attention(q, k, v, alibi_slopes=slopes, seqused_k=used, out=into) is into
    assert_same_bits(into, same)


def test_torch_gradients_are_recorded() -> None:
    torch = pytest.importorskip("torch")
    q, k, v = torch_qkv()
    plain = libflash.attention(q, k, v, causal=True, softcap=5.0)
    for leaf in (q, k, v):
        leaf.requires_grad_(True)
    slopes = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
    out = libflash.attention(q, k, v, causal=True, softcap=5.0)
    assert out.requires_grad
    assert torch.equal(out.detach(), plain)
    libflash.attention(q, k, v, alibi_slopes=slopes).sum().backward()
    assert all(x.grad is not None for x in (q, k, v))
    with torch.no_grad():
        assert not libflash.attention(q, k, v).requires_grad
    with pytest.raises(libflash.InvalidError, match="out and lse cannot be given"):
        libflash.attention(q, k, v, out=torch.empty_like(q))
    with pytest.raises(libflash.UnsupportedError, match="decode has no gradient"):
        libflash.decode(q, k, v)
    out, _ = libflash.merge([out, out.detach()], [torch.zeros(1, 4, 40)] * 2)
    assert out.requires_grad


def test_dropout_of_the_two_faces_is_the_same() -> None:
    """seed=0 is a seed; no random one is drawn."""
    torch = pytest.importorskip("torch")
    q, k, v = torch_qkv()
    plain = libflash.attention(q, k, v, dropout_p=0.5)
    q.requires_grad_(True)
    assert torch.equal(libflash.attention(q, k, v, dropout_p=0.5).detach(), plain)
    assert torch.equal(libflash.attention(q, k, v, dropout_p=0.5, seed=5, offset=2**40).detach(),
                       libflash.attention(q.detach(), k, v, dropout_p=0.5, seed=5, offset=2**40))  # fmt: skip


def test_torch_tensors_without_data_are_refused() -> None:
    torch = pytest.importorskip("torch")
    q, k, v = torch_qkv()
    with pytest.raises(TypeError, match="q cannot be exported through DLPack: Cannot pack tensors on meta"):
        libflash.attention(q.to("meta"), k, v)
    with pytest.raises(TypeError, match="q cannot be exported through DLPack"):
        libflash.attention(torch.eye(3).to_sparse(), k, v)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = mode.from_tensor(q)
    with pytest.raises(TypeError, match="q is a FakeTensor"):
        libflash.attention(fake, k, v)


def test_torch_subclasses() -> None:
    torch = pytest.importorskip("torch")
    q, k, v = torch_qkv()
    with torch.no_grad():
        assert type(libflash.attention(torch.nn.Parameter(q), k, v)) is torch.Tensor


def test_torch_memory_is_given_back() -> None:
    torch = pytest.importorskip("torch")
    tensors = torch_qkv()
    libflash.attention(*tensors, return_lse=True)
    gc.collect()
    before, references = sys.getallocatedblocks(), [sys.getrefcount(x) for x in tensors]
    for _ in range(1000):
        libflash.attention(*tensors, return_lse=True)
        libflash.attention(*tensors, out=torch.empty_like(tensors[0]))
    gc.collect()
    assert [sys.getrefcount(x) for x in tensors] == references
    assert sys.getallocatedblocks() - before < 200


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_jax(name: str) -> None:
    jax = pytest.importorskip("jax")
    arrays = qkv(dtype=name)
    inputs = [jax.numpy.asarray(x) for x in arrays]
    out, lse = libflash.attention(*inputs, return_lse=True, causal=True)
    wanted, wanted_lse = libflash.attention(*arrays, return_lse=True, causal=True)
    assert isinstance(out, jax.Array)
    assert isinstance(lse, jax.Array)
    assert out.dtype == arrays[0].dtype
    assert_same_bits(np.asarray(out), wanted)
    assert_same_bits(np.asarray(lse), wanted_lse)
    gradients = libflash.attention_backward(jax.numpy.ones_like(out), *inputs, out, lse, causal=True)
    others = libflash.attention_backward(np.ones_like(wanted), *arrays, wanted, wanted_lse, causal=True)
    for one, other in zip(gradients, others, strict=True):
        assert isinstance(one, jax.Array)
        assert_same_bits(np.asarray(one), other)
    assert_same_bits(np.asarray((out + 0).astype("float32")), wanted.astype("float32"), "the result is an array to compute with")


def test_jax_results_do_not_share_memory() -> None:
    """Each result has its own memory, however many there are."""
    jax = pytest.importorskip("jax")
    inputs = [jax.numpy.asarray(x) for x in qkv()]
    outs = [libflash.attention(*inputs, softmax_scale=float(i)) for i in range(20)]
    gc.collect()
    for i, out in enumerate(outs):
        assert_same_bits(np.asarray(out), np.asarray(libflash.attention(*inputs, softmax_scale=float(i))))


def test_jax_masks_and_lengths() -> None:
    jax = pytest.importorskip("jax")
    q, k, v = qkv(batch=2)
    mask, used = np.random.default_rng(0).random((40, 56)) < 0.5, np.array([50, 20], np.int32)
    wanted = libflash.attention(q, k, v, mask=mask, seqused_k=used)
    inputs = [jax.numpy.asarray(x) for x in (q, k, v)]
    assert_same_bits(
        np.asarray(libflash.attention(*inputs, mask=jax.numpy.asarray(mask), seqused_k=jax.numpy.asarray(used))), wanted
    )
    lists = libflash.compress_block_mask(jax.numpy.ones((1, 1, 1, 1), bool))
    assert isinstance(lists.col_indices, jax.Array)
    assert_same_bits(np.asarray(libflash.attention(*inputs, block_mask=lists)), libflash.attention(q, k, v))


def test_jax_refusals() -> None:
    jax = pytest.importorskip("jax")
    q, k, v = (jax.numpy.asarray(x) for x in qkv())
    with pytest.raises(TypeError, match="out is a JAX array; those are immutable"):
        libflash.attention(q, k, v, out=q + 0)
    with pytest.raises(TypeError, match="k_cache is a JAX array"):
        libflash.decode(q[:, :1], k, v, k=k[:, :1], v=v[:, :1])
    given = np.empty(q.shape, np.float32)
    assert libflash.attention(q, k, v, out=given) is given
    with pytest.raises(TypeError, match=r"q is a jax\.ShapeDtypeStruct"):
        libflash.attention(jax.ShapeDtypeStruct(q.shape, q.dtype), k, v)
    for i, name in enumerate("qkv"):
        gone = [q + 0, k + 0, v + 0]
        gone[i].delete()
        with pytest.raises(libflash.InvalidError, match=f"{name} is a JAX array without data"):
            libflash.attention(*gone)


def test_traced_arrays_go_to_the_adapter() -> None:
    """libflash.attention, decode and merge inside jit, grad and vmap, whichever of the arrays is traced."""
    jax = pytest.importorskip("jax")
    q, k, v = (jax.numpy.asarray(x) for x in qkv())
    wanted = libflash.attention(q, k, v)
    assert_same_bits(np.asarray(jax.jit(libflash.attention)(q, k, v)), np.asarray(wanted))
    for i in range(3):
        one = jax.jit(lambda x, i=i: libflash.attention(*(x if i == j else y for j, y in enumerate((q, k, v)))))
        assert_same_bits(np.asarray(one((q, k, v)[i])), np.asarray(wanted))
    bias = jax.numpy.asarray(qkv()[0][0, :, :1, 0] + jax.numpy.zeros((40, 56), "float32"))
    options = {"causal": True, "softcap": 3.0, "return_lse": True, "window_size": (9, 0)}
    got = jax.jit(lambda bias: libflash.attention(q, k, v, bias=bias, **options))(bias)
    for mine, other in zip(got, libflash.attention(q, k, v, bias=bias, **options), strict=True):
        assert_same_bits(np.asarray(mine), np.asarray(other))
    gradient = jax.grad(lambda q: (libflash.attention(q, k, v) ** 2).sum())(q)
    other = jax.grad(lambda q: (libflash.jax.attention(q, k, v) ** 2).sum())(q)
    assert_same_bits(np.asarray(gradient), np.asarray(other))
    several = jax.vmap(libflash.attention)(*(x[None].repeat(2, 0) for x in (q, k, v)))
    assert_same_bits(np.asarray(several[1]), np.asarray(wanted))

    lengths = jax.numpy.array([9], "int32")
    got = jax.jit(lambda n: libflash.decode(q[:, :1], k, v, cache_seqlens=n))(lengths)
    assert_same_bits(np.asarray(got), np.asarray(libflash.decode(q[:, :1], k, v, cache_seqlens=lengths)))
    out, lse = libflash.attention(q, k, v, return_lse=True)
    for mine, other in zip(
        jax.jit(libflash.merge, static_argnames=("return_lse", "layout"))([out, out], [lse, lse]),
        libflash.merge([out, out], [lse, lse]), strict=True,
    ):  # fmt: skip
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)


def test_what_traced_arrays_do_not_allow() -> None:
    jax = pytest.importorskip("jax")
    q, k, v = (jax.numpy.asarray(x) for x in qkv())
    array = np.empty(q.shape, np.float32)
    refused = {
        "out cannot be given": lambda q: libflash.attention(q, k, v, out=array),
        "stream cannot be given": lambda q: libflash.attention(q, k, v, stream=0),
        "lse cannot be given": lambda q: libflash.merge([q], [q[..., 0].transpose(0, 2, 1)], lse=array),
        "k and v would be written into caches": lambda q: libflash.decode(q, k, v, k=k, v=v),
        "backend and kernel cannot be given": lambda q: libflash.merge([q], [q[..., 0].transpose(0, 2, 1)], backend="cpu"),
        r"q is a JAX tracer .*jax\.grad": lambda q: libflash.attention_backward(q, q, k, v, q, q),
        r"q is a JAX tracer ": lambda q: libflash.explain(q, k, v),
        r"k is a JAX tracer .*give all arrays to libflash\.jax\.attention": lambda k: libflash.attention(array, k, v),
    }
    for text, function in refused.items():
        with pytest.raises((TypeError, ValueError, NotImplementedError), match=text):
            jax.jit(function)(q)


@pytest.mark.parametrize("first", ["numpy", "jax"])
def test_tensors_with_gradients_beside_other_arrays_are_refused(first: str) -> None:
    """No gradient would be recorded, and `out` would keep a wrong one."""
    torch = pytest.importorskip("torch")
    x = np.ones((1, 4, 2, 16), np.float32)
    q = pytest.importorskip("jax").numpy.asarray(x) if first == "jax" else x
    lse = np.zeros((1, 2, 4), np.float32)
    p = torch.ones(1, 4, 2, 16, requires_grad=True)
    calls: dict[str, Callable[[Any], Any]] = {
        "k": lambda p: libflash.attention(q, p, x),
        "out": lambda p: libflash.attention(q, x, x, out=p),
        "learnable_sink": lambda p: libflash.attention(q, x, x, learnable_sink=p[0, 0, :, 0]),
        "dout": lambda p: libflash.attention_backward(p, q, x, x, x, lse),
        "k_cache": lambda p: libflash.decode(q, p, x),
        r"outs\[1\]": lambda p: libflash.merge([q, p], [lse, lse]),
    }
    for name, call in calls.items():
        with pytest.raises(libflash.InvalidError, match=rf"^{name} is a torch\.Tensor that requires a gradient"):
            call(p)
        call(p.detach())
        with torch.no_grad():
            call(p)


def test_traced_arrays_beside_tensors_with_gradients_are_refused() -> None:
    jax, torch = pytest.importorskip("jax"), pytest.importorskip("torch")
    q = torch.zeros(1, 4, 2, 16, requires_grad=True)
    for name, function in {
        "k": lambda x: libflash.attention(q, x, x),
        "bias": lambda x: libflash.attention(q, q, q, bias=x),
        "k_cache": lambda x: libflash.decode(q, x, x),
        r"outs\[1\]": lambda x: libflash.merge([q, x], [q[..., 0], x[..., 0]]),
    }.items():
        with pytest.raises(TypeError, match=rf"^{name} must be a torch\.Tensor, not \w*Tracer"):
            jax.jit(function)(jax.numpy.zeros((1, 4, 2, 16)))


def test_a_framework_that_is_not_loaded_is_not_imported() -> None:
    """NumPy calls import neither PyTorch nor JAX, PyTorch calls not JAX."""
    pytest.importorskip("torch")
    code = """
        import sys, numpy, libflash
        x = numpy.zeros((1, 2, 1, 4), "float32")
        libflash.attention(x, x, x)
        print(sorted({"torch", "jax", "ml_dtypes", "cupy"} & set(sys.modules)))
        import torch
        y = torch.zeros(1, 2, 1, 4)
        libflash.attention(y, y, y)
        print(sorted({"jax", "cupy"} & set(sys.modules)))
    """
    assert run_python(code).split("\n")[:2] == ["[]", "[]"]


def test_fp8_is_refused_by_name() -> None:
    torch = pytest.importorskip("torch")
    q, k, v = torch_qkv()
    with pytest.raises(libflash.InvalidError, match=r"q: dtype must be .* \(it is float8_e4m3fn\)"):
        libflash.attention(q.to(torch.float8_e4m3fn), k, v)
    with pytest.raises(libflash.InvalidError, match=r"q: dtype must be .* \(it is float8_e5m2\)"):
        libflash.attention(q.numpy().astype(ml_dtypes.float8_e5m2), k.numpy(), v.numpy())
