"""CuPy arrays and streams: forward and backward, with CuPy arrays as results. For merge and mixed libraries see
test_interop.py.
"""

from __future__ import annotations

import dataclasses

import cases
import numpy as np
import pytest
from case import Case

import libflash

cupy = pytest.importorskip("cupy")
torch = pytest.importorskip("torch")  # for a kernel that only delays the stream

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

SLOW = 200_000_000  # cycles: some 100 ms, longer than any call takes on a busy machine
CASES = [case for case in cases.singles() if case.dtype in ("fp16", "fp32")]
CASES.append(dataclasses.replace(cases.by_name("size-packed-empty"), dtype="fp16"))
GRADIENTS = ("dq", "dk", "dv")


def on_gpu(x: object) -> object:
    return cupy.asarray(x) if isinstance(x, np.ndarray) else x


def randoms(*shapes: tuple[int, ...], seed: int = 0) -> list:
    rng = np.random.default_rng(seed)
    return [cupy.asarray(rng.standard_normal(shape).astype(np.float16)) for shape in shapes]


def problem(seed: int = 0) -> list:
    """dout, q, k, v."""
    return randoms((2, 150, 4, 64), (2, 150, 4, 64), (2, 200, 2, 64), (2, 200, 2, 64), seed=seed)


def everything(dout, q, k, v, **options) -> dict:
    out, lse = libflash.attention(q, k, v, return_lse=True, causal=True, **options)
    gradients = libflash.attention_backward(dout, q, k, v, out, lse, causal=True, deterministic=True, **options)
    return {"out": out, "lse": lse} | dict(zip(GRADIENTS, gradients, strict=True))


def assert_same(got: dict, wanted: dict) -> None:
    for name, x in wanted.items():
        np.testing.assert_array_equal(cupy.asnumpy(got[name]), cupy.asnumpy(x), name)


def run(case: Case) -> dict[str, np.ndarray]:
    """Forward and backward; outputs that are given contain NaN before."""
    x = case.inputs()
    q, k, v, dout, dlse = (on_gpu(array) for array in (x.q, x.k, x.v, x.dout, x.dlse))
    options = {name: on_gpu(value) for name, value in x.options.items()}
    out, lse = cupy.full(x.dout.shape, cupy.nan, x.q.dtype), cupy.full(lse_shape(case, x.q), cupy.nan, np.float32)
    returned = libflash.attention(q, k, v, out=out, lse=lse, return_lse=True, **options)
    assert returned[0] is out
    assert returned[1] is lse
    made = {f"d{name}": cupy.full_like(array, cupy.nan) for name, array in {"q": q, "k": k, "v": v}.items()}
    for name, given in {"dbias": "bias", "dsink": "learnable_sink"}.items():
        if given in options:
            made[name] = cupy.full_like(options[given], cupy.nan)
    gradients = libflash.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **made, **options)
    assert all(one is made[name] for name, one in zip(GRADIENTS, gradients, strict=True))
    return {name: cupy.asnumpy(array) for name, array in {"o": out, "lse": lse, **made}.items()}


def lse_shape(case: Case, q: np.ndarray) -> tuple[int, ...]:
    *batch, rows, heads, _ = q.shape
    return (*batch, heads, rows)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case: Case) -> None:
    case.check(**run(case))


def test_bfloat16() -> None:
    """CuPy has bfloat16 from version 14 on, as the type of ml_dtypes."""
    case = cases.by_name("only-visible-2")
    assert case.dtype == "bf16"
    try:
        cupy.asarray(case.inputs().q)
    except (TypeError, ValueError) as refusal:
        pytest.skip(f"this CuPy has no bfloat16: {refusal}")
    case.check(**run(case))


def test_results_are_cupy_arrays() -> None:
    made = everything(*problem())
    for name, x in made.items():
        assert type(x) is cupy.ndarray, name
        assert x.dtype == (np.float32 if name == "lse" else np.float16)
        assert x.flags.c_contiguous
    assert made["lse"].shape == (2, 4, 150)


def test_views() -> None:
    """Heads first in memory, every other row, and repeated rows of dout."""
    dout, q, k, v = problem()
    dout = cupy.broadcast_to(dout[:, :1], dout.shape)
    wanted = everything(*(cupy.ascontiguousarray(x) for x in (dout, q, k, v)))
    turned = [cupy.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for x in (q, k)]
    wide = cupy.zeros((2, 400, 2, 80), np.float16)
    wide[:, ::2, :, :64] = v
    assert_same(everything(dout, *turned, wide[:, ::2, :, :64]), wanted)
    layout = [x.transpose(0, 2, 1, 3) for x in (q, k, v)]
    assert_same({"out": libflash.attention(*layout, layout="bhsd", causal=True).transpose(0, 2, 1, 3)}, {"out": wanted["out"]})


# -- streams


def late(arrays: list, stream: object) -> list:
    """Copies that contain NaN until `stream` has slept."""
    made = [cupy.full_like(x, cupy.nan) for x in arrays]
    cupy.cuda.Device().synchronize()
    with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
        torch.cuda._sleep(SLOW)
    with stream:
        for x, source in zip(made, arrays, strict=True):
            x[...] = source
    return made


def test_current_stream_and_no_waiting() -> None:
    wanted = everything(*problem())
    stream = cupy.cuda.Stream(non_blocking=True)
    sources = problem()
    inputs = late(sources, stream)
    with stream:
        got = everything(*inputs)
        assert not stream.done, "the call returned only after its work was done"
    stream.synchronize()
    assert_same(got, wanted)


@pytest.mark.parametrize("kind", ["handle", "stream", "torch stream"])
def test_given_stream(kind: str) -> None:
    """Results and workspace belong to the call's stream: memory freed after the call is not reused too early."""
    wanted = [everything(*problem(seed)) for seed in range(4)]
    stream = cupy.cuda.Stream(non_blocking=True)
    given = {"handle": stream.ptr, "stream": stream, "torch stream": torch.cuda.ExternalStream(stream.ptr)}[kind]
    for seed in range(4):
        sources = problem(seed)  # kept until they are copied, because their memory belongs to another stream
        inputs = late(sources, stream)
        got = everything(*inputs, stream=given)
        junk = [cupy.full((2, 400, 4, 64), cupy.nan, np.float16) for _ in range(5)]  # on CuPy's own stream
        del junk
        stream.synchronize()
        assert_same(got, wanted[seed])


def test_two_streams_at_once() -> None:
    problems = [problem(seed) for seed in range(2)]  # kept until they are copied, because their memory belongs to another stream
    wanted = [everything(*x) for x in problems]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    inputs = [late(x, stream) for x, stream in zip(problems, streams, strict=True)]
    for _ in range(5):
        made = []
        for stream, x in zip(streams, inputs, strict=True):
            with stream:
                made.append(everything(*x))
        cupy.cuda.Device().synchronize()
        for got, right in zip(made, wanted, strict=True):
            assert_same(got, right)


def test_graph() -> None:
    """Captured on a CuPy stream, with given outputs and a workspace that the memory pool already has."""
    dout, q, k, v = problem()
    made = everything(dout, q, k, v)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        libflash.attention(q, k, v, out=made["out"], lse=made["lse"], causal=True)
        stream.synchronize()
        stream.begin_capture()
        libflash.attention(q, k, v, out=made["out"], lse=made["lse"], causal=True)
        graph = stream.end_capture()
        for seed in (1, 2):
            _, *others = problem(seed)
            cupy.cuda.Device().synchronize()
            for x, other in zip((q, k, v), others, strict=True):
                x[...] = other
            graph.launch(stream)
            stream.synchronize()
            wanted, wanted_lse = libflash.attention(*others, causal=True, return_lse=True)
            assert_same({"out": made["out"], "lse": made["lse"]}, {"out": wanted, "lse": wanted_lse})


def test_memory_is_given_back() -> None:
    inputs = problem()
    everything(*inputs)
    cupy.cuda.Device().synchronize()
    pool = cupy.get_default_memory_pool()
    before = pool.used_bytes()
    for _ in range(200):
        everything(*inputs)
        everything(*inputs, stream=cupy.cuda.get_current_stream())
    assert pool.used_bytes() == before


def test_refusals() -> None:
    _, q, k, v = problem()
    with pytest.raises(libflash.UnsupportedError, match="float64"):
        libflash.decode(*(x.astype(np.float64) for x in (q, k, v)))
    with pytest.raises(libflash.InvalidError, match="k"):
        libflash.attention(q, cupy.asnumpy(k), v)
    with pytest.raises(libflash.InvalidError, match="softcap"):
        libflash.attention(q, k, v, softcap=-1)
