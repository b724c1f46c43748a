"""Seeds, lengths, numbers and arrays that libflash.jax accepts, and refusals of others."""

from __future__ import annotations

import numpy as np
import pytest
from harness import assert_same_bits, qkv, run_python

import libflash

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
import libflash.jax  # noqa: E402
from jax_problem import arrays, problem  # noqa: E402

attention = libflash.jax.attention


def dropped(seed, offset=0, dropout_p=0.5):
    q, k, v = (jnp.asarray(x) for x in qkv())
    return np.asarray(attention(q, k, v, dropout_p=dropout_p, seed=seed, offset=offset))


# -- the seed


def test_a_key_in_either_form_is_the_same_seed() -> None:
    with_key = dropped(jax.random.key(7))
    assert_same_bits(dropped(jax.random.PRNGKey(7)), with_key)
    assert_same_bits(dropped(jax.random.bits(jax.random.key(7), (4,), np.uint32)), with_key)
    assert (dropped(jax.random.key(8)) != with_key).any()
    assert dropped(jax.random.key(7, impl="rbg")).shape == with_key.shape


@pytest.mark.parametrize("form", [jax.random.key, jax.random.PRNGKey, jnp.int32, jnp.uint32], ids=lambda x: x.__name__)
def test_a_new_seed_is_no_new_program(form) -> None:
    """Traced, and inside a scan over steps."""
    traces = []

    @jax.jit
    def step(seed):
        traces.append(1)
        return dropped_in_jit(seed)

    def dropped_in_jit(seed):
        q, k, v = (jnp.asarray(x) for x in qkv())
        return attention(q, k, v, dropout_p=0.5, seed=seed)

    first, second, again = (np.asarray(step(form(i))) for i in (1, 2, 1))
    assert len(traces) == 1
    assert (first != second).any()
    assert_same_bits(first, again)
    assert_same_bits(first, dropped(form(1)))
    seeds = jnp.stack([form(1), form(2)])
    _, both = jax.lax.scan(lambda carry, seed: (carry, dropped_in_jit(seed)), 0, seeds)
    assert_same_bits(both[0], first)
    assert_same_bits(both[1], second)


def test_an_integer_array_is_that_number() -> None:
    for seed, offset in ((5, 0), (5, 9), (2**31 - 1, 1)):
        wanted = dropped(seed, offset)
        assert_same_bits(dropped(jnp.int32(seed), offset), wanted)
        assert_same_bits(dropped(jnp.int32(seed), jnp.uint32(offset)), wanted)
        assert_same_bits(dropped(seed, jnp.int32(offset)), wanted)
        assert_same_bits(dropped(np.int64(seed), np.uint8(offset)), wanted)
    assert_same_bits(dropped(jnp.uint8(200)), dropped(200))
    assert_same_bits(dropped(jnp.uint32(2**32 - 1)), dropped(2**32 - 1))
    assert_same_bits(dropped(jnp.int32(-1)), dropped(2**64 - 1))  # modulo 2**64


def test_seeds_of_calls_that_run_at_once() -> None:
    """libflash.attention of JAX arrays on the CPU without jit: integers of every type, and no keys."""
    q, k, v = (jnp.asarray(x) for x in qkv())
    call = lambda seed, offset=0: libflash.attention(q, k, v, dropout_p=0.5, seed=seed, offset=offset)  # noqa: E731
    for seed in (5, 2**32 - 1):
        for form in (jnp.uint32, np.uint32, lambda x: np.array(x, np.uint32)):
            assert_same_bits(call(form(seed)), dropped(seed))
            assert_same_bits(call(1, form(seed)), dropped(1, seed))
    key, pair = r"seed is key<fry>\[\], a PRNG key; it must be an integer", r"seed is uint32\[2\], a PRNG key"
    for form, said in ((jax.random.key, key), (jax.random.PRNGKey, pair)):
        with pytest.raises(TypeError, match=said):
            call(form(7))
        with pytest.raises(TypeError, match=r"such as int\(jax\.random\.bits\(key\)\)\. libflash\.jax\.attention takes a key"):
            libflash.attention(*qkv(), seed=form(7))
        with pytest.raises(TypeError, match=r"offset is .* a PRNG key"):
            libflash.explain(q, k, v, dropout_p=0.5, offset=form(7))
        seed = int(jax.random.bits(form(7)))
        assert_same_bits(call(seed), dropped(seed))


def test_what_is_no_seed() -> None:
    refused = {
        r"seed is float32\[2\]": (jnp.zeros(2), 0),
        r"seed is int32\[4\]": (jnp.zeros(4, jnp.int32), 0),
        r"seed is uint32\[3\]": (jnp.zeros(3, jnp.uint32), 0),
        r"seed is key<fry>\[2\]": (jax.random.split(jax.random.key(0)), 0),
        "seed is -1": (-1, 0),
        "offset is -3": (0, -3),
        r"offset is float32\[\]": (0, jnp.float32(1)),
        "seed must be an integer or a PRNG key of JAX, not str": ("7", 0),
        "seed must be an integer or a PRNG key of JAX, not None": (None, 0),
        "offset must be an integer, not float": (0, 1.5),
        "offset cannot be given with": (jax.random.key(0), 5),
    }
    for text, (seed, offset) in refused.items():
        for dropout_p in (0.5, 0.0):  # without dropout they would have no effect
            with pytest.raises((ValueError, TypeError), match=text):
                dropped(seed, offset, dropout_p)
    with pytest.raises(libflash.InvalidError, match="offset cannot be given with"):
        jax.jit(lambda offset: dropped(jax.random.key(0), offset))(3)


def test_a_key_has_no_gradient_and_takes_none() -> None:
    q, k, v, *_ = problem()
    loss = lambda q, key: attention(q, k, v, dropout_p=0.5, seed=key).sum()  # noqa: E731
    for key in (jax.random.key(0), jax.random.PRNGKey(0)):
        plain = jax.grad(loss)(q, key)
        gradient, nothing = jax.grad(loss, argnums=(0, 1), allow_int=True)(q, key)
        assert_same_bits(gradient, plain)
        assert nothing.dtype == jax.dtypes.float0


# -- lengths


def test_lengths_as_lists_and_as_int64() -> None:
    q, k, v = arrays((7, 4, 8), (9, 2, 8), (9, 2, 8))
    wanted = attention(q, k, v, cu_seqlens_q=jnp.array([0, 3, 7], jnp.int32), cu_seqlens_k=jnp.array([0, 4, 9], jnp.int32))
    for make in (list, tuple, np.array, lambda x: np.array(x, np.int32), lambda x: [jnp.int32(y) for y in x]):
        got = attention(q, k, v, cu_seqlens_q=make([0, 3, 7]), cu_seqlens_k=make([0, 4, 9]))
        assert_same_bits(got, wanted)
    got = jax.jit(lambda n: attention(q, k, v, cu_seqlens_q=[0, n, 7], cu_seqlens_k=[0, 4, 9]))(3)
    assert_same_bits(got, wanted)
    q, k, v = arrays((2, 1, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8))
    wanted = libflash.jax.decode(q, k, v, cache_seqlens=jnp.array([4, 9], jnp.int32))
    assert_same_bits(libflash.jax.decode(q, k, v, cache_seqlens=[4, 9]), wanted)
    paged = lambda page: libflash.jax.decode(q, k, v, block_table=[[0], [page]], cache_seqlens=np.array([4, 9]))  # noqa: E731
    assert_same_bits(paged(1), wanted)
    assert_same_bits(jax.jit(paged)(1), wanted)


def test_lengths_of_other_types_are_refused() -> None:
    q, k, v = arrays((7, 4, 8), (7, 2, 8), (7, 2, 8))
    for wrong, text in {
        (0.0, 3.0, 7.0): r"cu_seqlens_q is float64\[3\]; it must be int32 or int64",
        (0, 3, 2**40): f"cu_seqlens_q holds {2**40}, which does not fit int32",
    }.items():
        with pytest.raises(libflash.InvalidError, match=text.replace("[", r"\[").replace(r"\\[", r"\[")):
            attention(q, k, v, cu_seqlens_q=list(wrong), cu_seqlens_k=[0, 3, 7])
    for columns in ([[0], [1, 2]], [[jnp.int32(0)], [1, 2]]):
        with pytest.raises(libflash.InvalidError, match="block_table is a list that makes no array of integers: "):
            libflash.jax.decode(q[:2, None], k[:2, None], v[:2, None], block_table=columns)
    with pytest.raises(libflash.InvalidError, match="seqused_k is uint32"):
        attention(q[None], k[None], v[None], seqused_k=jnp.array([3], jnp.uint32))


def test_int64_under_x64() -> None:
    """int64 is converted, traced or not; a value that does not fit int32 does not become a valid one."""
    run_python("""
        import jax, jax.numpy as jnp, numpy as np, libflash, libflash.jax
        jax.config.update("jax_enable_x64", True)
        q, k, v = (jnp.asarray(np.random.default_rng(i).standard_normal((7, 2, 8)), "float32") for i in range(3))
        packed = lambda cu: libflash.jax.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu)
        wanted = packed(jnp.array([0, 3, 7], "int32"))
        wide = jnp.array([0, 3, 7])
        assert wide.dtype == "int64"
        general = lambda cu: libflash.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu)
        for function in (packed, jax.jit(packed), general, jax.jit(general)):
            np.testing.assert_array_equal(function(wide), wanted)
        for wrong in (2**32 + 3, -2**32 + 3):
            try:
                jax.block_until_ready(jax.jit(packed)(jnp.array([0, wrong, 7])))
            except Exception as error:
                assert "cu_seqlens_q" in str(error), error
            else:
                raise AssertionError(wrong)
        seed = lambda n: libflash.jax.attention(q[None], k[None], v[None], dropout_p=0.5, seed=n)
        for n in (5, 2**32 + 5, 2**62):
            np.testing.assert_array_equal(jax.jit(seed)(jnp.int64(n)), seed(n))
        np.testing.assert_array_equal(jax.jit(seed)(jnp.uint64(2**63 + 1)), seed(2**63 + 1))
        np.testing.assert_array_equal(jax.jit(seed)(jnp.int64(-2)), seed(2**64 - 2))
    """)  # fmt: skip


# -- numbers


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("softmax_scale", 0.3), ("softcap", 2.0), ("dropout_p", 0.5), ("causal", True), ("num_splits", 2), ("max_seqlen_q", 300),
        ("deterministic", True),
    ],
)  # fmt: skip
def test_a_traced_number_is_refused_and_a_static_one_works(name: str, value: object) -> None:
    q, k, v, *_ = problem()
    with pytest.raises(libflash.UnsupportedError, match=f"{name} is traced .* name {name} in static_argnames"):
        jax.jit(attention)(q, k, v, **{name: value})
    wanted = attention(q, k, v, **{name: value})
    assert_same_bits(jax.jit(attention, static_argnames=name)(q, k, v, **{name: value}), wanted)
    if name != "deterministic":
        assert_same_bits(jax.jit(libflash.attention, static_argnames=name)(q, k, v, **{name: value}), wanted)


def test_a_traced_scale_is_refused_and_the_text_says_what_to_do() -> None:
    q, k, v, *_ = problem()
    loss = lambda scale: attention(q, k, v, softmax_scale=scale).sum()  # noqa: E731
    for wrapped in (jax.jit(loss), jax.grad(loss)):
        with pytest.raises(libflash.UnsupportedError, match=r"multiply q by the scale.*softmax_scale=1\.0"):
            wrapped(0.3)
    with pytest.raises(libflash.UnsupportedError, match="softmax_scale is traced"):
        jax.jit(lambda scale: libflash.jax.decode(q[:, :1], k, v, softmax_scale=scale))(0.3)
    with pytest.raises(libflash.UnsupportedError, match=r"window_size\[1\] is traced .* name window_size in"):
        jax.jit(lambda right: attention(q, k, v, window_size=(1, right)))(2)
    assert_same_bits(attention(q, k, v, softmax_scale=jnp.float32(0.5)), attention(q, k, v, softmax_scale=0.5))


def test_numbers_are_not_rounded_or_guessed() -> None:
    q, k, v, *_ = problem()
    refused = {
        "num_splits must be an integer, not float": {"num_splits": 1.5},
        "max_seqlen_k must be an integer, not float": {"max_seqlen_k": 9.5},
        r"window_size\[0\] must be an integer, not float": {"window_size": (1.5, 0)},
        "num_splits must be an integer, not bool": {"num_splits": False},
        "max_seqlen_q must be an integer, not bool": {"max_seqlen_q": True},
        r"window_size\[1\] must be an integer, not bool": {"window_size": (1, True)},
        "softmax_scale must be a number, not bool": {"softmax_scale": True},
        "softcap must be a number, not bool": {"softcap": False},
        r"softcap must be a number, not \w+": {"softcap": jnp.array(True)},
        "dropout_p must be a number, not bool": {"dropout_p": np.False_},
        "seed must be an integer, not bool": {"dropout_p": 0.5, "seed": True},
        r"seed must be an integer, not bool_? \(True\)$": {"seed": np.True_},
        "offset must be an integer, not bool": {"dropout_p": 0.5, "offset": np.False_},
        "causal must be a bool, not 'no'": {"causal": "no"},
        "deterministic must be a bool, not 2": {"deterministic": 2},
        "softmax_scale must be a number, not str": {"softmax_scale": "0.5"},
        "kernel must be a str, not int": {"kernel": 3},
        "layout is 3; it must be 'bshd', 'bhsd' or 'sbhd'": {"layout": 3},
    }
    for text, options in refused.items():
        with pytest.raises((TypeError, libflash.InvalidError), match=text):
            attention(q, k, v, **options)
    with pytest.raises(TypeError, match="head_dim_v must be an integer, not bool"):
        libflash.jax.decode(q[:, :1], k, head_dim_v=True)
    with pytest.raises(TypeError, match="softmax_scale must be a number, not bool"):
        libflash.jax.decode(q[:, :1], k, v, softmax_scale=np.True_)
    with pytest.raises(TypeError, match=r"shard\[0\] must be an integer, not bool"):
        libflash.jax.decode(q[:, :1], k, v, shard=(True, 0, 1))
    with pytest.raises(TypeError, match="rotary_interleaved must be a bool"):
        libflash.jax.decode(q[:, :1], k, v, rotary_interleaved="no")


# -- arrays


class Parameter:
    """Wrapped arrays, as in neural network libraries."""

    def __init__(self, value: jax.Array) -> None:
        self.value = value

    def __jax_array__(self) -> jax.Array:
        return self.value


def test_what_counts_as_an_array() -> None:
    q, k, v, bias, sink = problem()
    wanted = attention(q, k, v, bias=bias, learnable_sink=sink)
    assert_same_bits(attention(np.asarray(q), k, np.asarray(v), bias=np.asarray(bias), learnable_sink=sink), wanted)
    assert_same_bits(attention(q, Parameter(k), v, bias=Parameter(bias), learnable_sink=Parameter(sink)), wanted)
    refused = {
        r"q must be an array of JAX or NumPy, not list of 2 elements": (q.tolist(), {}),
        r"q must be an array of JAX or NumPy, not None": (None, {}),
        r"q is a jax\.ShapeDtypeStruct, a shape without data": (jax.ShapeDtypeStruct(q.shape, q.dtype), {}),
        r"alibi_slopes must be an array of JAX or NumPy": (q, {"alibi_slopes": [1.0] * 4}),
        r"bias must be an array": (q, {"bias": 1.0}),
        r"q has 3 dimensions; it needs 4, \(batch, seqlen, heads, head_dim\)": (q[0], {}),
        r"q has 4 dimensions; it needs 3, \(total, heads, head_dim\)": (q, {"cu_seqlens_q": [0, 7]}),
        r"q: dtype must be .* \(it is int32\)": (q.astype(int), {}),
        r"q: dtype must be .* \(it is int8\)": (q.astype("int8"), {}),
        r"q is int16.*; arrays have at most 4 dimensions and one of the types bool, ": (q.astype("int16"), {}),
    }
    for text, (x, options) in refused.items():
        with pytest.raises((TypeError, libflash.InvalidError), match=text):
            attention(x, k, v, **options)
    with pytest.raises(libflash.InvalidError, match=r"q has 3 dimensions; it needs 4, \(batch, seqlen, heads, head_dim\)(\n|$)"):
        libflash.jax.decode(q[0], k, v)


def test_numpy_arrays_whose_values_jax_would_not_see() -> None:
    """A jitted function that is already compiled reads the bytes of another byte order, and the values under a mask."""
    q, k, v = qkv()
    bias, used = np.zeros((40, 56), np.float32), np.array([40], np.int32)
    attention(q, k, v), attention(q, k, v, bias=bias), attention(q, k, v, seqused_k=used)  # compiles
    other_order = lambda x: x.astype(x.dtype.newbyteorder())  # noqa: E731
    for change, kind, text in (
        (other_order, libflash.InvalidError, "{} has dtype [<>][fi]4, which is not in this machine's byte order"),
        (np.ma.masked_array, TypeError, r"{0} is a masked array: its mask would be lost; pass {0}\.filled"),
    ):
        with pytest.raises(kind, match=text.format("q")):
            attention(change(q), k, v)
        with pytest.raises(kind, match=text.format("bias")):
            attention(q, k, v, bias=change(bias))
        with pytest.raises(kind, match=text.format("seqused_k")):
            attention(q, k, v, seqused_k=change(used))
        with pytest.raises(kind, match=text.format("k_scale")):
            libflash.jax.decode(q[:, :1], k, v, k_scale=change(np.ones(1, np.float32)))
        with pytest.raises(kind, match=text.format("slots")):
            libflash.jax.cache_write(k[0], v[0], k, v, change(np.arange(40, dtype=np.int32)))
        with pytest.raises(kind, match=text.format(r"outs\[1\]")):
            libflash.jax.merge([q, change(q)], [np.zeros((1, 4, 40), np.float32)] * 2)


def test_arrays_of_64_bits_need_x64() -> None:
    """Without it JAX clips a length of 2**32 + 3 to 3, and makes results of float32 beside arrays of float64."""
    q, k, v = qkv()
    with jax.enable_x64(True):
        wide = [jax.numpy.asarray(x, "float64") for x in (q, k, v)]
        length, seed = jax.numpy.asarray([2**32 + 3]), jax.numpy.asarray(2**33)
        assert attention(*wide).dtype == "float64"
    outs, lses = [wide[0]] * 2, [np.zeros((1, 4, 40))] * 2
    calls = {
        "q is float64": lambda: attention(*wide),
        "k is float64": lambda: jax.jit(attention)(q, *wide[1:]),
        "bias is float64": lambda: attention(q, k, v, bias=wide[0][..., :1]),
        "k_cache is float64": lambda: libflash.jax.decode(wide[0][0], *wide[1:], cu_seqlens_q=[0, 40]),
        r"outs\[0\] is float64": lambda: libflash.jax.merge(outs, lses),
        "seqused_k is int64": lambda: attention(q, k, v, seqused_k=length),
        "slots is int64": lambda: libflash.jax.cache_write(k[0, :1], v[0, :1], k, v, length),
        "seed is int64": lambda: attention(q, k, v, dropout_p=0.5, seed=seed),
    }
    for text, call in calls.items():
        with pytest.raises(libflash.InvalidError, match=f"^{text}, and jax_enable_x64 is False: JAX would convert parts"):
            call()


def test_arrays_with_another_layout_in_memory() -> None:
    layout = pytest.importorskip("jax.experimental.layout")
    x = problem()[:3]
    wanted = attention(*x)
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    transposed = [jax.device_put(y, layout.Format(layout.Layout((2, 0, 3, 1)), where)) for y in x]
    assert_same_bits(attention(*transposed), wanted)
    assert_same_bits(jax.jit(libflash.attention)(*transposed), wanted)
    with pytest.raises(libflash.InvalidError, match="q: the last dimension must be contiguous"):
        libflash.attention(*transposed)


def test_donated_arrays() -> None:
    q, k, *_ = problem()
    wanted = attention(q, k, k)
    assert_same_bits(jax.jit(attention, donate_argnums=0)(q + 0, k, k), wanted)


def test_bfloat16_with_a_bias_of_either_type() -> None:
    q, k, v = (x.astype(jnp.bfloat16) for x in problem()[:3])
    bias = problem()[3]
    for dtype in (jnp.float32, jnp.bfloat16):
        loss = lambda bias: attention(q, k, v, bias=bias).astype("float32").sum()  # noqa: E731
        assert jax.grad(loss)(bias.astype(dtype)).dtype == dtype
