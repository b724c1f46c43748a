"""libflash.jax on the GPU: jit, eager, gradients, vmap, and other libraries on the same GPU."""

from __future__ import annotations

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # set before JAX starts, because other processes use the same GPU

import cases
import numpy as np
import pytest
from case import Case
from convert import jax_run
from harness import assert_same_bits, python, random

import libflash

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import libflash.jax  # noqa: E402
from jax_problem import definition, everything  # noqa: E402
from test_jax_cache_codes import CODES, SCALES  # noqa: E402
from test_jax_cache_codes import test_cache_write as check_cache_write  # noqa: E402
from test_jax_cache_codes import (  # noqa: E402
    test_cache_write_of_keys_alone_and_donation as check_cache_write_in_place,
)

DTYPES = ["float16", "bfloat16", "float32"]
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-20}  # of a float those of the exponential, of P and dS
OPTIONS = [case for case in [*cases.singles(), *cases.option_pairs()[::3]] if case.dtype in ("fp16", "bf16", "fp32")]
OPTIONS += [cases.by_name("size-packed-empty"), cases.by_name("poison-unused-packed-bf16")]


@pytest.fixture(autouse=True)
def gpu() -> None:
    """Called when a test runs, not at collection, because it starts CUDA in the process."""
    if jax.default_backend() != "gpu":
        pytest.skip("no JAX for CUDA")


def arrays(dtype: str, *shapes: tuple[int, ...]) -> list:
    return [jnp.asarray(random(*shape, seed=i)).astype(dtype) for i, shape in enumerate(shapes)]


def problem(dtype: str = "bfloat16") -> list:
    """q, k, v, bias, sink."""
    q, k, v, bias, sink = arrays(dtype, (2, 130, 4, 64), (2, 200, 2, 64), (2, 200, 2, 40), (1, 4, 130, 200), (4,))
    return [q, k, v, bias, sink.astype("float32")]


def loss_of(function):
    """With weights in float32, whatever the type of out."""

    def loss(*x):
        out, lse = function(*x)
        weights = jnp.cos(jnp.arange(out.size, dtype="float32")).reshape(out.shape)
        return (out.astype("float32") * weights).sum() + jnp.sin(lse).sum()

    return loss


def repeatable(*x):
    return everything(*x, deterministic=True)


def assert_close(got: object, wanted: object, tolerance: float) -> None:
    """Relative root mean square error."""

    def one(x: jax.Array, y: jax.Array) -> None:
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert x.shape == y.shape
        assert np.sqrt(((x - y) ** 2).mean()) <= tolerance * np.sqrt((y**2).mean())

    jax.tree.map(one, got, wanted)


# -- numbers


@pytest.mark.parametrize("case", OPTIONS, ids=str)
def test_every_option_against_the_reference(case: Case) -> None:
    case.check(**jax_run(case, libflash.jax.attention))


def test_rows_of_no_sequence_are_zero() -> None:
    case = cases.by_name("poison-unused-packed-bf16")
    got = jax_run(case, libflash.jax.attention)
    rows_q, rows_k = sum(case.seqlen_q), sum(case.seqlen_k)
    assert not got["o"][rows_q:].any()
    assert (got["lse"][:, rows_q:] == -np.inf).all()
    assert not got["dq"][rows_q:].any()
    assert not any(got[name][rows_k:].any() for name in ("dk", "dv"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_agree_with_the_definition(dtype: str) -> None:
    """Against float32 from the same values. The library rounds probabilities, out, dout, dS and the gradients:
    five roundings, each with a root mean square of 0.43 units."""
    x = problem(dtype)
    wide = [y.astype("float32") for y in x]
    with jax.default_matmul_precision("highest"):
        exact = definition(*wide)
        wanted = jax.grad(loss_of(definition), argnums=range(5))(*wide)
    assert_close(everything(*x), exact, 2 * ROUNDING[dtype])
    assert_close(jax.grad(loss_of(everything), argnums=range(5))(*x), wanted, 4 * ROUNDING[dtype])


def test_jit_and_eager_agree() -> None:
    """The same bits; gradients except for the weights of the loss, which XLA fuses and may round differently."""
    x = problem()
    for got, wanted in zip(jax.jit(everything)(*x), everything(*x), strict=True):
        assert_same_bits(np.asarray(got), np.asarray(wanted))
    gradient = jax.value_and_grad(loss_of(repeatable), argnums=range(5))
    assert_close(jax.jit(gradient)(*x)[1], gradient(*x)[1], 2 * ROUNDING["bfloat16"])


def test_results_are_on_the_gpu_and_run_again_and_again() -> None:
    """XLA may record the calls into a CUDA graph; new contents must give new results."""
    function = jax.jit(lambda q, k, v: libflash.jax.attention(q * 1.0, k, v, causal=True) + 1)
    q, k, v, *_ = problem()
    for turn in range(8):
        got = function(q + turn, k, v)
        assert next(iter(got.devices())).platform in ("gpu", "cuda")
        assert_same_bits(np.asarray(got), np.asarray(libflash.jax.attention(q + turn, k, v, causal=True) + 1))


@pytest.mark.parametrize("layout", ["bhsd", "sbhd"])
def test_layouts(layout: str) -> None:
    axes = ["bshd".index(axis) for axis in layout]
    q, k, v, *rest = problem()
    out, lse = everything(*(x.transpose(axes) for x in (q, k, v)), *rest, layout=layout)
    wanted, wanted_lse = everything(q, k, v, *rest)
    assert_same_bits(np.asarray(out), np.asarray(wanted.transpose(axes)))
    assert_same_bits(np.asarray(lse), np.asarray(wanted_lse))


@pytest.mark.parametrize("seqlens", [(0, 5), (5, 0), (0, 0)])
def test_no_rows_or_no_keys(seqlens: tuple[int, int]) -> None:
    q, k, v = arrays("float16", (2, seqlens[0], 4, 8), (2, seqlens[1], 2, 8), (2, seqlens[1], 2, 8))
    out, lse = libflash.jax.attention(q, k, v, return_lse=True)
    assert not out.any()
    assert (lse == -jnp.inf).all()
    for gradient in jax.grad(lambda *x: libflash.jax.attention(*x).sum(), argnums=(0, 1, 2))(q, k, v):
        assert not gradient.any()


# -- transformations


@pytest.mark.parametrize("axes", [(0, 0, 0, 0, 0), (0, 0, 0, None, None), (0, None, None, None, None)], ids=str)
def test_vmap(axes: tuple) -> None:
    """Forward and backward equal one call after the other, whichever operands are mapped."""
    x = [jnp.stack([y, y * 2, y + 1]) if axis is not None else y for y, axis in zip(problem(), axes, strict=True)]

    def both(*x):
        return everything(*x), jax.grad(loss_of(everything), argnums=range(5))(*x)

    got = jax.vmap(both, axes)(*x)
    for i in range(3):
        one = both(*(y if axis is None else y[i] for y, axis in zip(x, axes, strict=True)))
        assert_close(jax.tree.map(lambda y, i=i: y[i], got), one, 2 * ROUNDING["bfloat16"])


def test_remat_and_scan() -> None:
    """Layers in a scan, their attention computed again in the backward pass."""
    q, k, v = arrays("bfloat16", (2, 130, 4, 64), (2, 200, 2, 64), (2, 200, 2, 64))

    def layers(attention, q):
        return jax.lax.scan(lambda x, scale: (attention(x * scale, k, v), None), q, jnp.ones(3, q.dtype))[0].astype("float32")

    plain = jax.grad(lambda q: layers(libflash.jax.attention, q).sum())(q)
    again = jax.jit(jax.grad(lambda q: layers(jax.checkpoint(libflash.jax.attention), q).sum()))(q)
    assert_close(again, plain, 4 * ROUNDING["bfloat16"])


# -- dropout


def directions(x: list) -> list:
    return [jnp.asarray(random(*y.shape, seed=10 + i)).astype(y.dtype) for i, y in enumerate(x)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_tangents_and_second_derivatives_agree_with_the_definition(dtype: str) -> None:
    """jvp of attention and of its gradient, and the gradient of a gradient's length."""
    x = problem(dtype)

    def derivatives(function, x: list, along: list) -> list:
        gradient = jax.grad(loss_of(function), argnums=range(5))
        length = lambda *x: sum((y.astype("float32") ** 2).sum() for y in gradient(*x))  # noqa: E731
        return [jax.jvp(gradient, x, along)[1], jax.grad(length, argnums=range(5))(*x)]

    with jax.default_matmul_precision("highest"):
        wide = [[y.astype("float32") for y in some] for some in (x, directions(x))]
        moved = jax.jvp(definition, *wide)[1]
        wanted = derivatives(definition, *wide)
    assert_close(jax.jvp(everything, x, directions(x))[1], moved, 2 * ROUNDING[dtype])
    assert_close(derivatives(everything, x, directions(x)), wanted, 4 * ROUNDING[dtype])


def test_dropout_is_that_of_the_cpu() -> None:
    q, k, v, *_ = problem("float16")
    options = {"dropout_p": 0.5, "seed": 2**63 + 5, "offset": 2**64 - 1}
    got = libflash.jax.attention(q, k, v, **options)
    wanted = libflash.attention(*(np.asarray(x) for x in (q, k, v)), **options)
    np.testing.assert_allclose(np.asarray(got, np.float32), wanted.astype(np.float32), rtol=2e-3, atol=2e-3)


def test_a_new_key_is_no_new_program() -> None:
    """The kernels read the seed when they run: the same mask as on the CPU, forward and backward, with one program."""
    q, k, v, *_ = problem("float16")
    traces = []

    @jax.jit
    def step(q, key):
        traces.append(1)
        attention = lambda q: libflash.jax.attention(q, k, v, dropout_p=0.5, seed=key)  # noqa: E731
        out, back = jax.vjp(attention, q)
        return out, back(jnp.ones_like(out))[0]

    for i in (0, 1, 0):
        key = jax.random.key(i)
        out, gradient = step(q, key)
        low, high, *offset = (int(x) for x in jax.random.bits(key, (4,), np.uint32))
        numbers = {"dropout_p": 0.5, "seed": low + (high << 32), "offset": offset[0] + (offset[1] << 32)}
        assert_same_bits(np.asarray(out), np.asarray(libflash.jax.attention(q, k, v, **numbers)))
        wanted = libflash.attention(*(np.asarray(x) for x in (q, k, v)), **numbers)
        np.testing.assert_allclose(np.asarray(out, np.float32), wanted.astype(np.float32), rtol=2e-3, atol=2e-3)
        by_value = jax.grad(lambda q, numbers=numbers: libflash.jax.attention(q, k, v, **numbers).astype("float32").sum())(q)
        assert_close(gradient, by_value, 4 * ROUNDING["float16"])
    assert len(traces) == 1


# -- libflash.attention


def test_arrays_on_the_gpu_go_to_the_adapter() -> None:
    """XLA orders all work on its arrays, traced or not."""
    q, k, v, *_ = problem()
    wanted = libflash.jax.attention(q, k, v, causal=True)
    assert_same_bits(np.asarray(libflash.attention(q, k, v, causal=True)), np.asarray(wanted))
    assert_same_bits(np.asarray(jax.jit(lambda *x: libflash.attention(*x, causal=True))(q, k, v)), np.asarray(wanted))
    assert_same_bits(np.asarray(libflash.decode(q, k, v)), np.asarray(libflash.jax.decode(q, k, v)))
    with pytest.raises(libflash.InvalidError, match="out cannot be given"):
        libflash.attention(q, k, v, out=np.empty(q.shape, np.float32))
    with pytest.raises(libflash.UnsupportedError, match="q is a JAX array on a GPU"):
        libflash.explain(q, k, v)


def test_symbolic_dimensions_are_refused() -> None:
    shapes = [jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, s, 4, 64"), jnp.bfloat16)] * 3
    with pytest.raises(libflash.UnsupportedError, match="symbolic dimensions"):
        jax.export.export(jax.jit(libflash.jax.attention))(*shapes)


# -- devices


def test_types_without_a_kernel_are_refused_while_tracing() -> None:
    with jax.enable_x64(True):
        q, k, v, *_ = (x.astype("float64") for x in problem())
        for wrap in (lambda f: f, jax.jit, lambda f: lambda *x: jax.eval_shape(f, *x)):
            with pytest.raises(libflash.UnsupportedError, match="float64"):
                wrap(libflash.jax.decode)(q, k, v)


def test_arrays_on_the_cpu_stay_there() -> None:
    """The same program, compiled for the device of its arrays."""
    x = [jax.device_put(y, jax.devices("cpu")[0]) for y in problem()]
    got = jax.jit(everything)(*x)
    assert all(next(iter(y.devices())).platform == "cpu" for y in got)
    q, k, v, bias, sink = (np.asarray(y) for y in x)
    wanted = libflash.attention(q, k, v, bias=bias, learnable_sink=sink, causal=True, return_lse=True)
    for y, z in zip(got, wanted, strict=True):
        assert_same_bits(np.asarray(y), z)


def test_sharded_over_two_gpus() -> None:
    if jax.device_count() < 2:
        pytest.skip("needs two GPUs")
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    q, k, v, *_ = problem()
    attention = jax.jit(lambda q, k, v: libflash.jax.attention(q, k, v, causal=True))
    gradient = jax.jit(jax.grad(lambda *x: attention(*x).astype("float32").sum(), argnums=(0, 1, 2)))
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    where = NamedSharding(mesh, PartitionSpec(None, None, "heads"))
    shards = [jax.device_put(x, where) for x in (q, k, v)]
    assert attention(*shards).sharding.is_equivalent_to(where, 4)
    assert_same_bits(np.asarray(attention(*shards)), np.asarray(attention(q, k, v)))
    assert_close(gradient(*shards), gradient(q, k, v), 2 * ROUNDING["bfloat16"])


BESIDE = """
    import {first}
    import {second}
    import numpy as np
    import jax.numpy as jnp
    import torch
    import libflash, libflash.jax
    x = np.random.default_rng(0).standard_normal((2, 100, 4, 64)).astype(np.float16)
    for turn in range(2):
        mine = libflash.attention(*[torch.from_numpy(x).cuda()] * 3, causal=True)
        other = libflash.jax.attention(*[jnp.asarray(x)] * 3, causal=True)
    gradient = jax.grad(lambda x: libflash.jax.attention(x, x, x, causal=True).astype("float32").sum())(jnp.asarray(x))
    print(jax.default_backend(), np.array_equal(mine.cpu().numpy(), np.asarray(other)), bool(jnp.isfinite(gradient).all()))
"""


@pytest.mark.parametrize("order", [("jax", "torch"), ("torch", "jax")], ids="-".join)
def test_beside_pytorch(order: tuple[str, str]) -> None:
    """PyTorch, JAX and libflash on one GPU, imported in either order; the same kernel gives both the same bits."""
    pytest.importorskip("torch")
    done = python(BESIDE.format(first=order[0], second=order[1]), XLA_PYTHON_CLIENT_PREALLOCATE="false")
    assert done.stdout == "gpu True True\n", done.stderr


RECORDED = """
    import jax
    import jax.numpy as jnp
    import numpy as np
    import libflash.jax
    q, k, v = (jnp.asarray(np.random.default_rng(i).standard_normal((2, 100, 4, 64)), "bfloat16") for i in range(3))
    loss = lambda q: (libflash.jax.attention(q, k, v, causal=True, deterministic=True).astype("float32") ** 2).sum()
    step = jax.jit(jax.grad(loss))
    wanted = [np.asarray(jax.grad(loss)(q * n), "float32") for n in (1, 2, 3)]
    for turn in range(9):
        got, right = np.asarray(step(q * (1 + turn % 3)), "float32"), wanted[turn % 3]
        assert (abs(got - right) <= 0.02 * abs(right).max()).all()
    print("same")
"""


@pytest.mark.parametrize("code", [*CODES, "float32"])
@pytest.mark.parametrize("scale", SCALES)
def test_cache_write_has_the_bits_of_the_cpu(code: str, scale: str) -> None:
    check_cache_write(code, scale)


def test_cache_write_in_place() -> None:
    check_cache_write_in_place()


def test_recorded_into_cuda_graphs() -> None:
    """With XLA options that record custom calls into CUDA graphs, even a single one."""
    flags = {
        "XLA_FLAGS": "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    if python("import jax; jax.devices()", **flags).returncode != 0:
        pytest.skip("this XLA has other names for these flags")
    done = python(RECORDED, **flags)
    assert done.stdout == "same\n", done.stderr
