"""Options that JAX traces, although their value must be known: every function refuses them by name, also where it computes at
once on the arrays beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import libflash
from libflash import _option_list as options
from libflash import flash_attn

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import libflash.jax  # noqa: E402
from jax_problem import arrays, problem  # noqa: E402

Q, K, V = arrays((2, 7, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8))
OUT, LSE = libflash.attention(Q, K, V, return_lse=True)
ONE = (np.ones((2, 7, 4, 8), np.float32), *(np.ones((2, 9, 2, 8), np.float32),) * 2)  # of NumPy

VALUES = {
    options.SWITCH: True, options.NUMBER: 0.5, options.INTEGER: 1, options.WINDOW: np.array([1, 2]),
    options.SHARD: np.array([1, 0, 1]), options.SEED: 1, options.OFFSET: 1, options.BEGIN: 1, options.MARGIN: 1,
}  # fmt: skip
FUNCTIONS: dict[str, tuple[str, Callable[..., Any]]] = {  # the operation that has the options
    "attention": ("attention", lambda **o: libflash.attention(Q, K, V, **o)),
    "attention of NumPy": ("attention", lambda **o: libflash.attention(*ONE, **o)),
    "attention_backward": ("attention_backward", lambda **o: libflash.attention_backward(OUT, Q, K, V, OUT, LSE, **o)),
    "attention_tangent": ("attention", lambda **o: libflash.attention_tangent(Q, K, V, Q, **o)),
    "decode": ("decode", lambda **o: libflash.decode(Q[:, :1], K, None if "head_dim_v" in o else V, **o)),
    "decode of NumPy": ("decode", lambda **o: libflash.decode(*ONE, **o)),
    "merge": ("merge", lambda **o: libflash.merge([OUT], [LSE], **o)),
    "cache_write": ("cache_write", lambda **o: libflash.cache_write(*(x[0] for x in ONE[1:]), *ONE[1:], np.arange(9), **o)),
    "explain": ("attention", lambda **o: libflash.explain(Q, K, V, **o)),
    "explain decode": ("decode", lambda **o: libflash.explain(Q, K, None if "head_dim_v" in o else V, op="decode", **o)),
    "jax.attention": ("attention", lambda **o: libflash.jax.attention(Q, K, V, **o)),
    "jax.decode": ("decode", lambda **o: libflash.jax.decode(Q[:, :1], K, None if "head_dim_v" in o else V, **o)),
    "jax.merge": ("merge", lambda **o: libflash.jax.merge([OUT], [LSE], **o)),
    "jax.cache_write": ("cache_write", lambda **o: libflash.jax.cache_write(K[0], V[0], K, V, np.arange(9), **o)),
}
IN_XLA = ("attention", "jax.attention")  # there seed and offset may be traced


def cases() -> Iterator[Any]:
    for function, (operation, _) in FUNCTIONS.items():
        for option in options.options_of(operation):
            of_part = option.adapters == ()
            if option.kind not in VALUES or (of_part and ("jax" in function or function == "attention_tangent")):
                continue
            if option.name == "return_lse" and function == "attention_tangent":
                continue
            if option.kind not in (options.SEED, options.OFFSET) or function not in IN_XLA:
                yield pytest.param(function, option, id=f"{function}-{option.name}".replace(" ", "-"))


@pytest.mark.parametrize(("function", "option"), list(cases()))
def test_a_traced_option_is_refused_by_name(function: str, option: options.Option) -> None:
    call = FUNCTIONS[function][1]
    name = option.name
    text = rf"^{name} is traced \(.*\), and its value .* name {name} in static_argnames of jax\.jit, or close over it"
    with pytest.raises(libflash.UnsupportedError, match=text):
        jax.jit(lambda x: call(**{name: x}))(VALUES[option.kind])


@pytest.mark.parametrize("function", [libflash.attention, libflash.jax.attention])
def test_the_text_is_the_same_everywhere(function: Callable[..., Any]) -> None:
    with pytest.raises(libflash.UnsupportedError) as caught:
        jax.jit(lambda x: function(Q, K, V, num_splits=x))(1)
    assert str(caught.value) == (
        "num_splits is traced (int32[]), and its value is part of the compiled program. Give a Python number: name num_splits in "
        "static_argnames of jax.jit, or close over it"
    )
    with pytest.raises(libflash.UnsupportedError, match=r"multiply q by the scale.*softmax_scale=1\.0"):
        jax.jit(lambda x: function(Q, K, V, softmax_scale=x))(0.5)


@pytest.mark.parametrize("name", ["softcap", "dropout_p"])
@pytest.mark.parametrize("transform", [jax.grad, jax.jit, jax.vmap, lambda f: lambda x: jax.jvp(f, (x,), (x,))])
def test_every_transform_is_named(transform: Callable[..., Any], name: str) -> None:
    x = jnp.full(2, 0.5) if transform is jax.vmap else 0.5
    with pytest.raises(libflash.UnsupportedError, match=rf"^{name} is traced \(float32\[\]\)"):
        transform(lambda x: libflash.attention(Q, K, V, **{name: x}).sum())(x)


def test_entries_of_pairs_and_triples() -> None:
    for call, text in (
        (lambda x: libflash.attention(Q, K, V, window_size=(1, x)), r"window_size\[1\] is traced .* name window_size in"),
        (lambda x: libflash.decode(*ONE, shard=(1, x, 1)), r"shard\[1\] is traced .* name shard in"),
        (lambda x: libflash.jax.decode(Q[:, :1], K, V, shard=(1, x, 1)), r"shard\[1\] is traced .* name shard in"),
        (lambda x: flash_attn.flash_attn_func(Q, K, V, window_size=(x, 0)), r"window_size\[0\] is traced .* name window_size in"),
    ):
        with pytest.raises(libflash.UnsupportedError, match=text):
            jax.jit(call)(0)


@pytest.mark.parametrize("name", ["row_begin", "row_step", "head_begin", "sm_margin"])
def test_options_of_parts_beside_traced_arrays(name: str) -> None:
    """Also with a value that JAX knows, as in grad."""
    call = lambda q, x: libflash.attention(q, K, V, **{name: x}).sum()  # noqa: E731
    for run in (lambda: jax.jit(call)(Q, 1), lambda: jax.grad(call, (0, 1))(Q, 1.0)):
        with pytest.raises(libflash.UnsupportedError, match=f"^{name} cannot be given where PyTorch or JAX trace"):
            run()


def test_set_num_threads() -> None:
    with pytest.raises(libflash.UnsupportedError, match=r"^threads is traced"):
        jax.jit(libflash.set_num_threads)(1)


FLASH_ATTN = {
    "dropout_p": 0.1, "softmax_scale": 0.5, "causal": True, "window_size": np.array([1, 2]), "softcap": 1.0,
    "deterministic": True, "return_attn_probs": True, "num_splits": 1, "pack_gqa": True, "sm_margin": 1, "attention_chunk": 1,
}  # fmt: skip


@pytest.mark.parametrize("name", FLASH_ATTN)
@pytest.mark.parametrize("function", ["func", "varlen", "pages"])
def test_functions_of_flash_attn(function: str, name: str) -> None:
    q, k, v = Q[0], K[:1], V[:1]
    lengths = jnp.array([0, 7], jnp.int32), jnp.array([0, 9], jnp.int32), 7, 9
    pages = {"block_table": jnp.zeros((1, 1), jnp.int32)}
    call = {
        "func": lambda **o: flash_attn.flash_attn_func(Q, K, V, **o),
        "varlen": lambda **o: flash_attn.flash_attn_varlen_func(q, k[0], v[0], *lengths, **o),
        "pages": lambda **o: flash_attn.flash_attn_varlen_func(q, k, v, *lengths, **pages, **o),
    }[function]
    with pytest.raises(libflash.UnsupportedError, match=f"^{name} is traced .* name {name} in static_argnames"):
        jax.jit(lambda x: call(**{name: x}))(FLASH_ATTN[name])


@pytest.mark.parametrize("name", ["num_splits", "softcap", "dropout_p"])
def test_beside_tensors_that_require_gradients(name: str) -> None:
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(np.array(x)).requires_grad_() for x in (Q, K, V))
    with pytest.raises(libflash.UnsupportedError, match=f"^{name} is traced"):
        jax.jit(lambda x: libflash.attention(q, k, v, **{name: x}).sum())(1)


# -- texts: what is no str is refused by name before it is hashed or compared

TEXTS: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "layout": ("layout", "it must be 'bshd', 'bhsd' or 'sbhd'", lambda **o: libflash.jax.attention(Q, K, V, **o)),
    "layout of merge": ("layout", "it must be 'bshd', 'bhsd' or 'sbhd'", lambda **o: libflash.jax.merge([OUT], [LSE], **o)),
    "causal_align": (
        "causal_align", "it must be 'bottom_right' or 'top_left'", lambda **o: libflash.jax.attention(Q, K, V, **o),
    ),
    "cache_dtype of decode": (
        "cache_dtype", "it must be 'e4m3', 'e5m2' or None", lambda **o: libflash.jax.decode(Q[:, :1], K, V, **o),
    ),
    "cache_dtype of cache_write": (
        "cache_dtype",
        "it must be 'e4m3', 'e5m2' or None",
        lambda **o: libflash.jax.cache_write(K[0], V[0], K, V, np.arange(9), **o),
    ),
    "order of positions": ("order", "it must be 'contiguous' or 'zigzag'", lambda **o: libflash.jax.positions(8, 2, **o)),
    "order of shard": ("order", "it must be 'contiguous' or 'zigzag'", lambda **o: libflash.jax.shard(Q, 7, **o)),
    "scheme": (
        "scheme",
        "it must be 'auto', 'ring', 'halo', 'all_gather', 'heads' or 'heads_ring'",
        lambda **o: libflash.jax.explain_context_parallel(K, K, V, ranks=(2,), order="contiguous", **o),
    ),
    "layout of libflash": ("layout", "it must be 'bshd', 'bhsd' or 'sbhd'", lambda **o: libflash.attention(Q, K, V, **o)),
    "causal_align of libflash": (
        "causal_align", "it must be 'bottom_right' or 'top_left'", lambda **o: libflash.attention(Q, K, V, **o),
    ),
    "cache_dtype of libflash": (
        "cache_dtype", "it must be 'e4m3', 'e5m2' or None", lambda **o: libflash.decode(Q[:, :1], K, V, **o),
    ),
    "op of explain": ("op", "it must be 'forward', 'backward' or 'decode'", lambda **o: libflash.explain(Q, K, V, **o)),
}  # fmt: skip


@pytest.mark.parametrize("case", TEXTS)
def test_what_is_no_text(case: str) -> None:
    name, rule, call = TEXTS[case]
    for wrong in ("wrong", ["bshd"], {"bshd": 1}, 3, np.array(["bshd", "bhsd"]), np.array(["bshd"]), jnp.ones(2), b"bshd"):
        with pytest.raises(libflash.InvalidError) as caught:
            call(**{name: wrong})
        assert str(caught.value) == f"{name} is {wrong!r}; {rule}"
    for transform in (jax.jit, jax.grad):
        with pytest.raises(libflash.InvalidError) as caught:
            transform(lambda x: call(**{name: x}))(1.0)
        assert str(caught.value) == f"{name} is traced (float32[]); {rule}"


@pytest.mark.parametrize("wrong", [["max_logit"], {"entropy": 1}, np.array(["entropy"])], ids=lambda x: type(x).__name__)
def test_statistics_that_are_no_texts(wrong: object) -> None:
    with pytest.raises(libflash.InvalidError, match=r"return_stats has .*; it may have 'max_logit' and 'entropy'"):
        libflash.jax.attention(*problem()[:3], return_stats=(wrong,))
