"""Refusals of libflash.jax, when tracing and when running."""

from __future__ import annotations

import numpy as np
import pytest

import libflash

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import libflash.jax  # noqa: E402
from jax_problem import arrays, problem  # noqa: E402
from libflash._jax_calls import ATTENTION_OPERANDS  # noqa: E402

from libflash import _jax_ffi  # noqa: E402


def test_refusals_come_from_the_library_while_tracing() -> None:
    q, k, v, *_ = problem()
    attention = libflash.jax.attention
    for wrap in (
        lambda f: f,
        jax.jit,
        lambda f: jax.vmap(f, in_axes=None, axis_size=2),
        lambda f: lambda *x: jax.eval_shape(f, *x),
    ):
        with pytest.raises(libflash.InvalidError, match=r"v: shape .*\(2, 5, 2, 5\)"):
            wrap(attention)(q, k, v[:, :5])
    refused = [
        (libflash.InvalidError, "softcap", {"softcap": -1.0}),
        (libflash.InvalidError, "layout is 'hbsd'", {"layout": "hbsd"}),
        (libflash.InvalidError, "causal_align is 'left'", {"causal_align": "left"}),
        (libflash.InvalidError, "dropout_p", {"dropout_p": 1.0}),
        (libflash.InvalidError, "seed is -1", {"dropout_p": 0.5, "seed": -1}),
        (libflash.InvalidError, r"seed is float32\[2\]", {"dropout_p": 0.5, "seed": jnp.zeros(2)}),
        (libflash.InvalidError, "bias has 5 dimensions", {"bias": jnp.zeros((1, 1, 1, 1, 1))}),
        (libflash.InvalidError, r"mask is int16\[", {"mask": jnp.zeros((7, 9), jnp.int16)}),
        (libflash.InvalidError, "BlockMask", {"block_mask": libflash.BlockMask(*[np.zeros(1)] * 4)}),
        (libflash.UnsupportedError, "no_such_kernel", {"kernel": "no_such_kernel"}),
        (libflash.UnsupportedError, "sm90", {"backend": "sm90"}),
        (TypeError, "window_size", {"window_size": 3}),
        (libflash.InvalidError, r"window_size\[0\] is 9223372036854775808, which", {"window_size": (2**63, 0)}),
        (libflash.InvalidError, "num_splits is 1180591620717411303424, which", {"num_splits": 2**70}),
        (ValueError, "longer than", {"kernel": "x" * 200}),
    ]
    for kind, text, options in refused:
        with pytest.raises(kind, match=text):
            attention(q, k, v, **options)
    with pytest.raises(libflash.UnsupportedError, match="alibi_slopes"):
        jax.grad(lambda slopes: attention(q, k, v, alibi_slopes=slopes).sum())(jnp.ones(4))
    with pytest.raises(libflash.InvalidError, match="k and v"):
        libflash.jax.decode(q, k, v, k=k)
    with pytest.raises(libflash.InvalidError, match=r"shard\[2\] is 9223372036854775808, which"):
        libflash.jax.decode(q, k, v, shard=(2, 0, 2**63))
    with pytest.raises(libflash.InvalidError, match=r"outs\[1\]"):
        libflash.jax.merge([q, k], [jnp.zeros((2, 4, 7))] * 2)


def test_refusals_of_values_come_when_it_runs() -> None:
    """Lengths are data: wrong ones are refused on the CPU when the program runs, with the library's text."""
    q, k, v = arrays((7, 4, 8), (7, 2, 8), (7, 2, 8))
    cu = jnp.array([0, 3, 99], jnp.int32)
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=r"INVALID_ARGUMENT: cu_seqlens_q.*99"):
        libflash.jax.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu).block_until_ready()


def test_refusals_of_values_have_the_names_of_the_arguments() -> None:
    """What the library calls k_new is k here, as in refusals of shapes."""
    q, cache = jnp.zeros((1, 1, 2, 8)), jnp.zeros((1, 4, 2, 8))
    call = jax.jit(lambda lengths: libflash.jax.decode(q, cache, cache, k=q, v=q, cache_seqlens=lengths))
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="INVALID_ARGUMENT: k: its rows must fit into the cache"):
        call(jnp.array([4]))


def test_handlers_check_what_they_get() -> None:
    """Attributes of a wrong type and a wrong number of operands are refused and not read."""
    shape = jax.ShapeDtypeStruct((1, 1, 1, 1), np.float32)
    results = [shape, jax.ShapeDtypeStruct((1, 1, 1), np.float32)]
    x = jnp.zeros(shape.shape)
    refused = {
        "attribute flags must be a 64-bit integer": ((x, x, x), {"flags": np.int32(0)}),
        "attribute softcap must be a 64-bit float": ((x, x, x), {"softcap": np.float32(1)}),
        "attribute kernel must be a text": ((x, x, x), {"kernel": np.int64(1)}),
        "unknown attribute colour": ((x, x, x), {"colour": np.int64(1)}),
        "takes 3 operands and 2 results, not 2 and 2": ((x, x), {}),
        "layout is 7": ((x, x, x), {"layout": np.int64(7)}),
        "at most 4 of a type that libflash has": ((x, x, x.astype(np.int16)), {}),
        "seed must become": ((x, x, x, x), {"operands": np.int64(1 << 32)}),
    }
    for text, (operands, attributes) in refused.items():
        with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=text):
            jax.block_until_ready(jax.ffi.ffi_call("libflash_forward", results)(*operands, **attributes))


def test_handlers_of_tangents_check_what_they_get() -> None:
    x, lse = jnp.zeros((1, 1, 1, 1)), jnp.zeros((1, 1, 1))
    like, rows = jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(lse.shape, lse.dtype)
    bits = lambda *names: {"operands": np.int64(sum(1 << ATTENTION_OPERANDS.index(name) for name in names))}  # noqa: E731
    forward, backward = ("libflash_forward_tangent", [like, rows]), ("libflash_backward_tangent", [like] * 3)
    primal, gradient = (x, x, x, x, lse), (x, x, x, x, x, lse)
    refused = [
        ("takes 5 operands and 2 results, not 3 and 2", forward, (x, x, x), {}),
        ("takes 6 operands and 2 results, not 5 and 2", forward, primal, bits("tq")),
        ("takes 6 operands and 3 results, not 5 and 3", backward, primal, {}),
        ("takes 6 operands and 5 results, not 6 and 3", backward, gradient, {"operands": np.int64(1 << 36)}),
        (r"tangents\.q: shape", forward, (*primal, jnp.zeros((1, 2, 1, 1))), bits("tq")),
        (r"tangents\.v: shape", backward, (*gradient, jnp.zeros((1, 1, 1, 2))), bits("tv")),
        (r"tangents\.bias: needs bias", forward, (*primal, x), bits("tbias")),
        ("dlse: needs delta", forward, (*primal, lse), bits("dlse")),
        (r"tangents\.dout: needs delta", forward, (*primal, x), bits("tdout")),
        (r"lse: shape", forward, (x, x, x, x, jnp.zeros((1, 1, 2))), {}),
    ]
    for text, (target, results), operands, attributes in refused:
        with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=text):
            jax.block_until_ready(jax.ffi.ffi_call(target, results)(*operands, **attributes))


def test_shape_check_refuses_garbage() -> None:
    good = ((11, (1, 2, 3, 4)),) * 3
    assert _jax_ffi.workspace_size(0, 0, good, ((11, (1, 2, 3, 4)), (11, (1, 3, 2))), {})[0] == 0
    for arguments in [(9, 0, good, good, {}), (0, 0, ((11, (1,) * 5),) * 3, good, {}), (0, 0, good * 11, good, {})]:
        with pytest.raises(ValueError, match=r".+"):
            _jax_ffi.workspace_size(*arguments)
    for arguments in [(0, 0, (3,), good, {}), (0, 0, good, good, {"flags": "x"}), (0, 0, ((11, ("a",)),) * 3, good, {})]:
        with pytest.raises(TypeError):
            _jax_ffi.workspace_size(*arguments)


FLAGS = {
    "causal": libflash.jax.attention,
    "return_lse": libflash.jax.attention,
    "deterministic": libflash.jax.attention,
    "causal of decode": libflash.jax.decode,
    "rotary_interleaved of decode": libflash.jax.decode,
    "return_lse of decode": libflash.jax.decode,
    "return_lse of merge": lambda q, k, v, **o: libflash.jax.merge([q], [jnp.zeros((2, 4, 7))], **o),
}


@pytest.mark.parametrize("case", FLAGS)
def test_flags_are_bools(case: str) -> None:
    """Text such as "no" counts as true in Python, so it is refused; so is 1 after a call with True was compiled."""
    name = case.partition(" ")[0]
    q, k, v, *_ = problem()
    for good in (True, np.False_):
        FLAGS[case](q, k, v, **{name: good})
    for bad, text in (
        ("no", "'no'"),
        (1, "1"),
        (0.0, r"0\.0"),
        (None, "None"),
        (np.array([True]), r"ndarray \(bool, shape \(1,\)\)"),
    ):
        with pytest.raises(TypeError, match=rf"{name} must be a bool, not {text}$"):
            FLAGS[case](q, k, v, **{name: bad})
