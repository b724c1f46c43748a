"""Refusals before and by the library: the exception and its text; and refused calls write nothing."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest
from harness import qkv
from libflash.conformance.checks.bad_input import ROWS, BadInput

import libflash


def backward(arrays, **options):
    out, lse = libflash.attention(*arrays, return_lse=True)
    return libflash.attention_backward(out, *arrays, out, lse, **options)


def merge(arrays, **options):
    out, lse = libflash.attention(*arrays, return_lse=True)
    return libflash.merge([out], [lse], **options)


FLAGS = {
    "causal of attention": ("causal", lambda a, **o: libflash.attention(*a, **o)),
    "return_lse of attention": ("return_lse", lambda a, **o: libflash.attention(*a, **o)),
    "causal of backward": ("causal", backward),
    "deterministic": ("deterministic", backward),
    "causal of decode": ("causal", lambda a, **o: libflash.decode(*a, **o)),
    "return_lse of decode": ("return_lse", lambda a, **o: libflash.decode(*a, **o)),
    "rotary_interleaved": ("rotary_interleaved", lambda a, **o: libflash.decode(*a, **o)),
    "return_lse of merge": ("return_lse", merge),
    "causal of explain": ("causal", lambda a, **o: libflash.explain(*a, **o)),
    "return_lse of explain": ("return_lse", lambda a, **o: libflash.explain(*a, **o)),
    "deterministic of explain": ("deterministic", lambda a, **o: libflash.explain(*a, op="backward", **o)),
    "rotary_interleaved of explain": ("rotary_interleaved", lambda a, **o: libflash.explain(*a, op="decode", **o)),
}


@pytest.mark.parametrize("case", FLAGS)
def test_flags_are_bools(case: str) -> None:
    """Text such as "no" counts as true in Python, so values other than bools are refused. NumPy's bools are bools."""
    name, call = FLAGS[case]
    arrays = qkv(d=8)
    for good in (True, False, np.True_, np.False_):
        call(arrays, **{name: good})
    for bad, text in (
        ("no", "'no'"),
        (1, "1"),
        (0.0, r"0\.0"),
        (None, "None"),
        (np.array([True]), r"ndarray \(bool, shape \(1,\)\)"),
    ):
        with pytest.raises(TypeError, match=rf"{name} must be a bool, not {text}$"):
            call(arrays, **{name: bad})


TYPE_ERRORS = {
    "q is a list": (lambda a: libflash.attention([1.0], a[1], a[2]), r"q must be an array .* not list"),
    "k is None": (lambda a: libflash.attention(a[0], None, a[2]), r"k must be an array"),
    "mask is a list": (lambda a: libflash.attention(*a, mask=[[True]]), r"mask must be an array"),
    "out is a list": (lambda a: libflash.attention(*a, out=[]), r"out must be an array"),
    "cu_seqlens is a tuple": (lambda a: libflash.attention(*a, cu_seqlens_q=(0, 4)), r"cu_seqlens_q must be an array"),
    "scale is text": (lambda a: libflash.attention(*a, softmax_scale="1"), r"softmax_scale must be a number, not str \('1'\)$"),
    "softcap is a list": (lambda a: libflash.attention(*a, softcap=[1]), r"softcap must be a number, not list"),
    "a long value is cut": (lambda a: libflash.attention(*a, softcap="x" * 9999), r"number, not str \('x{59}\.\.\.\)$"),
    "a long list is counted": (lambda a: libflash.attention(*a, mask=[1.0] * 999), r"not list \(list of 999 elements\)$"),
    "an array has a shape": (
        lambda a: libflash.attention(*a, softmax_scale=a[0]),
        r"not ndarray \(float32, shape \(1, 40, 4, 8\)\)$",
    ),
    "seed is None": (
        lambda a: libflash.attention(*a, seed=None),
        r"^seed is None; it must be an integer from 0 to .* libflash\.torch\.attention takes None and draws a seed$",
    ),
    "lists of a block mask": (
        lambda a: libflash.BlockMask([1], a[0], a[0], a[0]),
        r"^row_counts must be an array, not list \(\[1\]\);",
    ),
    "scale of a cache is a bool": (
        lambda a: libflash.decode(a[0][:, :1], *a[1:], k_scale=True),
        r"k_scale must be a number or an array, not bool \(True\)",
    ),
    "seed is a float": (lambda a: libflash.attention(*a, seed=1.0), r"seed must be an integer, not float \(1\.0\)$"),
    "splits is text": (lambda a: libflash.attention(*a, num_splits="1"), r"num_splits must be an integer, not str"),
    "splits is an array of a float": (
        lambda a: libflash.attention(*a, num_splits=np.array(1.0)),
        r"num_splits must be an integer, not ndarray",
    ),
    "seed is an array of floats": (lambda a: libflash.attention(*a, seed=np.array(1.0)), r"seed must be an integer, not ndarray"),
    "window is a number": (lambda a: libflash.attention(*a, window_size=3), r"window_size must be a pair"),
    "window of three": (lambda a: libflash.attention(*a, window_size=(1, 2, 3)), r"window_size must be a pair"),
    "window of floats": (lambda a: libflash.attention(*a, window_size=(1.0, 2)), r"window_size\[0\] must be an integer"),
    "window of bools": (
        lambda a: libflash.attention(*a, window_size=(2, True)),
        r"window_size\[1\] must be an integer, not bool",
    ),
    "shard of bools": (lambda a: libflash.decode(*a, shard=(True, 0, 1)), r"shard\[0\] must be an integer, not bool"),
    "kernel is a number": (lambda a: libflash.attention(*a, kernel=1), r"kernel must be a str, not int"),
    "backend is bytes": (lambda a: libflash.attention(*a, backend=b"cpu"), r"backend must be a str, not bytes"),
    "stream is text": (lambda a: libflash.attention(*a, stream="1"), r"stream must be a CUDA stream handle"),
    "stream is a bool": (lambda a: libflash.attention(*a, stream=True), r"stream must be a CUDA stream handle"),
    "unknown option": (lambda a: libflash.attention(*a, is_causal=True), r"is_causal"),
    "too many arrays": (lambda a: libflash.attention(*a, True), r"positional"),
    "masked array": (lambda a: libflash.attention(np.ma.masked_array(a[0]), *a[1:]), r"q is a masked array"),
    "merge of an array": (lambda a: libflash.merge(a[0], a[1]), r"outs must be a list or tuple of arrays"),
    "explain knows no such": (lambda a: libflash.explain(*a, k_cache=1), r"explain\(\) knows no option 'k_cache'"),
    "threads is a bool": (lambda a: libflash.set_num_threads(True), r"threads must be an integer, not bool"),
    "threads is a float": (lambda a: libflash.set_num_threads(1.5), r"threads must be an integer"),
}


@pytest.mark.parametrize("case", TYPE_ERRORS)
def test_wrong_kind_of_object(case: str) -> None:
    call, text = TYPE_ERRORS[case]
    with pytest.raises(TypeError, match=text) as caught:
        call(qkv(d=8))
    assert not isinstance(caught.value, libflash.Error)


REAL_NUMBERS = {
    "attention": (("softmax_scale", "softcap", "dropout_p"), lambda a, **o: libflash.attention(*a, **o)),
    "backward": (("softmax_scale", "softcap", "dropout_p"), backward),
    "decode": (("softmax_scale", "softcap"), lambda a, **o: libflash.decode(*a, **o)),
    "explain": (("softmax_scale", "softcap", "dropout_p"), lambda a, **o: libflash.explain(*a, **o)),
}


@pytest.mark.parametrize("bad", [True, False, np.True_, np.False_, np.array(True)], ids=repr)
@pytest.mark.parametrize("function", REAL_NUMBERS)
def test_bools_are_no_real_numbers(function: str, bad: object) -> None:
    """In Python they count as 1 and 0."""
    names, call = REAL_NUMBERS[function]
    arrays = qkv(d=8)
    for name in names:
        with pytest.raises(
            TypeError, match=rf"{name} must be a number, not (bool_? \((True|False)\)|ndarray \(bool, shape \(\)\))$"
        ):
            call(arrays, **{name: bad})
        for good in (np.float32(0.5), np.array(0.5)):
            call(arrays, **{name: good})


INVALID = {
    "axes of layout exchanged": (
        lambda a: libflash.attention(*a, layout="bhsd"),
        r'k: the heads of q must be a multiple .*; layout is "bhsd", and q, k and v have shapes \(1, 40, 4, 8\), \(1, 56, 2, 8\) '
        r'and \(1, 56, 2, 8\): they agree with layout="bshd"$',
    ),
    "axes of arrays exchanged": (
        lambda a: libflash.attention(*(x.swapaxes(1, 2).copy() for x in a)),
        r'layout is "bshd", and .*: they agree with layout="bhsd"$',
    ),
    "axes exchanged, explained": (lambda a: libflash.explain(*a, layout="sbhd"), r'layout is "sbhd", .* with layout="bshd"$'),
    "axes exchanged, backward": (
        lambda a: libflash.attention_backward(a[0], *a, a[0], np.zeros((1, 4, 40), "f4"), layout="bhsd"),
        r'layout is "bhsd", .*: they agree with layout="bshd"$',
    ),
    "no layout fits": (lambda a: libflash.attention(a[0], a[1], a[2][:, :50]), r"v: shape must be .* \(it is \(1, 50, 2, 8\)\)$"),
    "caches of another order": (
        lambda a: libflash.decode(a[0][:, :1], *(x.swapaxes(1, 2).copy() for x in a[1:])),
        r"q has 4, k_cache has 56\); decode takes q as \(batch, seqlen, heads, head_dim\) and caches as",
    ),
    "blocks of a block mask": (
        lambda a: libflash.attention(*a, block_mask=np.ones((1, 3, 2, 2), bool)),
        r"^block_mask: shape must be \(batch or 1, .*\) = \(1, 4 or 1, 1, 1\); it is \(1, 3, 2, 2\)$",
    ),
    "blocks of lists": (
        lambda a: libflash.attention(*a, block_mask=libflash.compress_block_mask(np.ones((1, 1, 2, 1), bool))),
        r"^block_mask\.row_indices: shape must be .* = \(1, 4 or 1, 1, 1\); it is \(1, 1, 2, 1\)$",
    ),
    "bound below the rows": (
        lambda a: libflash.attention(*a, max_seqlen_q=39),
        r"max_seqlen_q is 39; it must be at least every length, and the seqlen of q is 40",
    ),
    "bound below the keys": (
        lambda a: libflash.attention(*(x.swapaxes(1, 2).copy() for x in a), layout="bhsd", max_seqlen_k=55),
        r"max_seqlen_k is 55; .* the seqlen of k is 56",
    ),
    "bound below the keys, explained": (lambda a: libflash.explain(*a, max_seqlen_k=55), "max_seqlen_k is 55"),
    "null character in a name": (lambda a: libflash.attention(*a, kernel="forward_cpu\0x"), r"kernel is 'forward_cpu\\x00x'; it"),
    "scale of a cache": (
        lambda a: libflash.decode(a[0][:, :1], *a[1:], k_scale=float("nan")),
        "k_scale is nan; it must be finite",
    ),
    "dtype beside cache_dtype": (
        lambda a: libflash.decode(a[0][:, :1], *a[1:], cache_dtype="e4m3"),
        "cache_dtype is 'e4m3', but k_cache is neither that nor uint8: float32",
    ),
    "number of many digits": (
        lambda a: libflash.attention(*a, num_splits=10**5000),
        "num_splits is an integer of 16610 bits, which",
    ),
    "scale of many digits": (
        lambda a: libflash.attention(*a, softmax_scale=10**5000),
        "softmax_scale is an integer of 16610 bits",
    ),
    "layout": (lambda a: libflash.attention(*a, layout="hbsd"), r"layout is 'hbsd'; it must be 'bshd', 'bhsd' or 'sbhd'"),
    "align": (lambda a: libflash.attention(*a, causal_align="left"), r"causal_align is 'left'"),
    "seed": (lambda a: libflash.attention(*a, seed=-1), r"seed is -1; it must be from 0 to 2\*\*64 - 1"),
    "offset": (lambda a: libflash.attention(*a, offset=2**64), r"offset is 18446744073709551616"),
    "splits": (lambda a: libflash.attention(*a, num_splits=2**63), r"num_splits is 9223372036854775808, which does not fit"),
    "stream": (lambda a: libflash.attention(*a, stream=-1), r"stream is -1"),
    "rank of q": (lambda a: libflash.attention(a[0][0], *a[1:]), r"q has 3 dimensions; it needs 4"),
    "rank of packed q": (
        lambda a: libflash.attention(*a, cu_seqlens_q=np.array([0, 1], "i4")),
        r"q has 4 dimensions; it needs 3",
    ),
    "rank of v": (lambda a: libflash.attention(*a[:2], a[2][0]), r"v has 3 dimensions.* without cu_seqlens_k; packed, "),
    "packed k without lengths": (
        lambda a: libflash.attention(a[0][0], a[1][0], a[2][0], cu_seqlens_q=np.array([0, 40], "i4")),
        r"k has 3 dimensions; .* without cu_seqlens_k; packed, with 3, cu_seqlens_k must be given",
    ),
    "packed k without lengths, explained": (
        lambda a: libflash.explain(a[0][0], a[1][0], a[2][0], cu_seqlens_q=np.array([0, 40], "i4")),
        r"k: must have 4 dimensions, .* without cu_seqlens_k",
    ),
    "backend": (
        lambda a: libflash.attention(*a, backend="gpu"),
        r'backend: must be the name of a backend, if it is given \("gpu", the names are ',
    ),
    "k alone": (
        lambda a: libflash.decode(*a, k=a[1][:, :1].copy()),
        r"k and v must be given together \(v is None\)",
    ),
    "values of more channels than keys": (
        lambda a: libflash.decode(a[0][..., :5].copy(), a[1][..., :5], a[1]),
        r"v_cache: as a view of k_cache must have at most the channels of the keys \(8 of 5\)",
    ),
    "five dimensions": (lambda a: libflash.attention(a[0][None], *a[1:]), r"q has 5 dimensions; at most 4"),
    "integers": (lambda a: libflash.attention(a[0].astype("i8"), *a[1:]), r"q has dtype int64"),
    "complex": (lambda a: libflash.attention(a[0].astype("c8"), *a[1:]), r"q has dtype complex64"),
    "fp8": (
        lambda a: libflash.attention(a[0].astype(ml_dtypes.float8_e4m3fn), *a[1:]),
        r"q: dtype must be .* \(it is float8_e4m3fn\)",
    ),
    "text": (lambda a: libflash.attention(a[0].astype("U4"), *a[1:]), r"q has dtype str"),
    "strides": (
        lambda a: libflash.attention(a[0][..., ::2], a[1][..., :4], a[2]),
        r"q: the last dimension must be contiguous .*; numpy\.ascontiguousarray\(q\) and q\.contiguous\(\) of PyTorch",
    ),
    "negative stride": (lambda a: libflash.attention(a[0][:, ::-1], *a[1:]), r"q.*negative"),
    "out in place": (lambda a: libflash.attention(*a, out=a[0]), r"out.*overlap|overlap.*out"),
    "out dtype": (lambda a: libflash.attention(*a, out=a[0].astype("f8")), r"out"),
    "out shape": (lambda a: libflash.attention(*a, out=a[0][:, 1:].copy()), r"out"),
    "mask dtype": (lambda a: libflash.attention(*a, mask=np.ones((1, 56), np.uint8)), r"mask has dtype uint8"),
    "lengths dtype": (lambda a: libflash.attention(*a, seqused_k=np.ones(1, "i2")), r"seqused_k has dtype int16; int32"),
    "explain op": (lambda a: libflash.explain(*a, op="sideways"), r"op is 'sideways'"),
    "explain like the call": (lambda a: libflash.explain(*a, softcap=-1), r"softcap"),
    "threads": (lambda a: libflash.set_num_threads(-1), r"threads is -1"),
    "merge of none": (lambda a: libflash.merge([], []), r"outs has 0 arrays; it needs 1 or more"),
    "merge unlike": (lambda a: libflash.merge([a[0]], []), r"outs has 1 arrays and lses 0"),
}


@pytest.mark.parametrize("case", INVALID)
def test_invalid(case: str) -> None:
    call, text = INVALID[case]
    with pytest.raises(libflash.InvalidError, match=text) as caught:
        call(qkv(d=8))
    assert isinstance(caught.value, ValueError)
    assert (caught.value.status, caught.value.status_name) == (1, "INVALID")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_bad_input_of_the_conformance_kit(row: BadInput, dtype: str) -> None:
    x = row.inputs(dtype)
    with pytest.raises(libflash.InvalidError, match=row.argument):
        libflash.attention(x.q, x.k, x.v, **x.options)


def test_refused_calls_leave_outputs_alone() -> None:
    q, k, v = qkv()
    out, lse = np.full_like(q, 7), np.full((1, 4, 40), 7, np.float32)
    for options in ({"softcap": -1}, {"layout": "x"}, {"kernel": "no_such"}, {"seqused_k": np.array([99], "i4")}):
        with pytest.raises(libflash.Error):
            libflash.attention(q, k, v, out=out, lse=lse, **options)
        assert (out == 7).all()
        assert (lse == 7).all()


def test_unsupported() -> None:
    q, k, v = qkv()
    for options in ({"kernel": "no_such_kernel"}, {"backend": "sm90"}):
        with pytest.raises(libflash.UnsupportedError) as caught:
            libflash.attention(q, k, v, **options)
        assert isinstance(caught.value, NotImplementedError)
        assert caught.value.status_name == "UNSUPPORTED"
        assert next(iter(options.values())) in str(caught.value)
        assert "NULL" not in str(caught.value)


def test_texts_have_pythons_names() -> None:
    q, k, v = qkv()
    out, lse = libflash.attention(q, k, v, return_lse=True)
    sink = np.zeros(q.shape[2], np.float32)
    refused = {
        "window_size[0]: must be -1": lambda: libflash.attention(q, k, v, window_size=(-3, 0)),
        "resume=True": lambda: libflash.attention(q, k, v, out=out, lse=lse, resume=True, learnable_sink=sink),
        "invariant=True": lambda: libflash.decode(q, k, v, invariant=True, num_splits=3),
        'causal_align="top_left" has no meaning with positions of rows and keys': lambda: libflash.attention(
            q, k, v, causal_align="top_left", causal=True, row_begin=0, column_begin=0
        ),
        "(None)": lambda: libflash.decode(q, k, v, shard=(2, 0, 1)),
    }
    for text, call in refused.items():
        with pytest.raises(libflash.InvalidError) as caught:
            call()
        assert text in str(caught.value)
        assert not re.search("FLASH_|NULL|window_left", str(caught.value))


def test_an_unknown_kernel_is_answered_with_the_names() -> None:
    names = [k["name"] for k in libflash.info()["kernels"] if k["operation"] == "forward" and k["backend"] == "cpu"]
    with pytest.raises(libflash.UnsupportedError) as caught:
        libflash.attention(*qkv(), kernel="no_such_kernel")
    text = f"kernel: must be one of the kernels for forward on the CPU in this build: {', '.join(names)}"
    assert str(caught.value) == f'{text} ("no_such_kernel")'
