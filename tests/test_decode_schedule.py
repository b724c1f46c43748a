"""libflash.decode_schedule and schedule= of decode on the CPU, where nothing is computed beforehand."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from harness import random

import libflash

LENGTHS = {"cu_seqlens_q": np.array([0, 90, 91, 91], np.int32), "cache_seqlens": np.array([100, 5, 0], np.int32)}
ANY = np.array([3, -1, 2**31 - 1], np.int32)


def call() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return random(91, 4, 16, seed=1), random(3, 128, 2, 16, seed=2), random(3, 128, 2, 8, seed=3)


def of_torch(torch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tuple(map(torch.from_numpy, call())), {name: torch.from_numpy(x) for name, x in LENGTHS.items()}


def test_there_is_none_on_the_cpu() -> None:
    assert libflash.decode_schedule(*call(), **LENGTHS) is None
    assert libflash.decode_schedule(*call()[:2], head_dim_v=8, **LENGTHS) is None
    q, k, v = call()
    news = {"k": k[:, :1], "v": v[:, :1], "cache_seqlens": LENGTHS["cache_seqlens"]}
    assert libflash.decode_schedule(q[:3, None], k, v, return_lse=True, window_size=(5, 0), **news) is None


def test_none_and_any_schedule_change_nothing() -> None:
    wanted = libflash.decode(*call(), **LENGTHS, return_lse=True)
    for schedule in (None, ANY, ANY[:0]):
        got = libflash.decode(*call(), **LENGTHS, return_lse=True, schedule=schedule)
        assert all(x.tobytes() == y.tobytes() for x, y in zip(got, wanted, strict=True))
    assert ANY.tolist() == [3, -1, 2**31 - 1]


@pytest.mark.parametrize(
    ("schedule", "refused"),
    [
        (ANY.astype(np.float32), "schedule: dtype must be int32"),
        (ANY[:, None], "schedule: must have 1 dimension"),
        (np.zeros(6, np.int32)[::2], "schedule: must be contiguous"),
    ],
)
def test_other_arrays_are_refused(schedule: np.ndarray, refused: str) -> None:
    with pytest.raises(libflash.InvalidError, match=f"^{refused}"):
        libflash.decode(*call(), **LENGTHS, schedule=schedule)


def test_wrong_calls_are_refused_as_by_decode() -> None:
    q, k, v = call()
    for arrays, options in (
        ((q, k, v[:2]), LENGTHS),
        ((q, k, v), {}),
        ((q, k), LENGTHS),
        ((q, k, v), {**LENGTHS, "num_splits": -1}),
        ((q, k, v), {**LENGTHS, "out": np.zeros((91, 4, 7), np.float32)}),
        ((q, k, v), {**LENGTHS, "k": k}),
    ):
        refused = []
        for function in (libflash.decode, libflash.decode_schedule):
            with pytest.raises(libflash.InvalidError) as error:
                function(*arrays, **options)
            refused.append(str(error.value))
        assert refused[0] == refused[1]
    for options in ({"casual": True}, {"max_logit": None}):
        with pytest.raises(TypeError, match=rf"^decode_schedule\(\) knows no option '{next(iter(options))}'$"):
            libflash.decode_schedule(q, k, v, **LENGTHS, **options)


def test_every_option_of_decode_is_taken() -> None:
    defaults = {x.name: x.default for x in inspect.signature(libflash.decode).parameters.values() if x.kind is x.KEYWORD_ONLY}
    assert libflash.decode_schedule(*call(), **{**defaults, **LENGTHS}) is None
    assert libflash.decode_schedule(*call(), **LENGTHS, schedule="of an earlier step") is None


def test_contents_of_the_lengths_are_not_read_on_the_cpu() -> None:
    """On the CPU there is nothing to compute, so only decode refuses a wrong length."""
    wrong = {**LENGTHS, "cache_seqlens": np.array([1000, 5, 0], np.int32)}
    assert libflash.decode_schedule(*call(), **wrong) is None
    with pytest.raises(libflash.InvalidError, match=r"^cache_seqlens: "):
        libflash.decode(*call(), **wrong)


def test_explain_takes_a_schedule() -> None:
    text = libflash.explain(*call(), op="decode", schedule=ANY, **LENGTHS)
    assert text == libflash.explain(*call(), op="decode", **LENGTHS)


def test_torch() -> None:
    torch = pytest.importorskip("torch")
    from torch.fx.experimental.proxy_tensor import make_fx

    arrays, lengths = of_torch(torch)
    assert libflash.decode_schedule(*arrays, **lengths) is None
    wanted = libflash.decode(*arrays, **lengths)
    assert torch.equal(libflash.decode(*arrays, **lengths, schedule=torch.from_numpy(ANY)), wanted)
    with pytest.raises(libflash.UnsupportedError, match=r"^decode_schedule cannot be traced"):
        make_fx(lambda q: libflash.decode_schedule(q, *arrays[1:], **lengths) or q)(arrays[0])


def test_torch_compile() -> None:
    """A schedule is an input of the compiled graph."""
    torch = pytest.importorskip("torch")
    import libflash.torch as adapter

    arrays, lengths = of_torch(torch)
    schedule = torch.from_numpy(ANY)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(q: Any, schedule: Any) -> Any:
        return adapter.decode(q, *arrays[1:], **lengths, schedule=schedule)

    wanted = adapter.decode(*arrays, **lengths)
    assert torch.equal(step(arrays[0], schedule), wanted)
    assert torch.equal(step(arrays[0], None), wanted)
    with pytest.raises(Exception, match="schedule: dtype must be int32"):
        step(arrays[0], schedule.float())


def test_dtensors_with_a_schedule_are_gathered() -> None:
    """It is for the shapes of the whole call."""
    torch = pytest.importorskip("torch")
    if not torch.distributed.is_available():
        pytest.skip("PyTorch without torch.distributed")
    import libflash.torch  # noqa: F401
    from libflash._torch_sharding import shard_axes

    tensor = SimpleNamespace(ndim=4, shape=(4, 128, 8, 16), mesh=SimpleNamespace(size=lambda: 2))
    assert shard_axes({"q": tensor, "k_cache": tensor, "schedule": None}) == ["b", "h"]
    assert shard_axes({"q": tensor, "k_cache": tensor, "schedule": tensor}) == []


@pytest.mark.parametrize("operator", ["decode", "decode_append", "decode_append_parts"])
def test_the_operators_take_it_last(operator: str) -> None:
    torch = pytest.importorskip("torch")
    import libflash.torch  # noqa: F401

    arguments = getattr(torch.ops.libflash, operator).default._schema.arguments
    assert (arguments[-1].name, str(arguments[-1].type)) == ("schedule", "Optional[Tensor]")


def test_jax() -> None:
    """JAX arrays on one CPU device are as NumPy arrays. Where XLA runs the call there is no schedule."""
    jax = pytest.importorskip("jax")
    import libflash.jax

    arrays = tuple(map(jax.numpy.asarray, call()))
    assert libflash.decode_schedule(*arrays, **LENGTHS) is None
    with pytest.raises(libflash.UnsupportedError, match=r"^schedule cannot be given for JAX arrays that are traced"):
        jax.jit(lambda q: libflash.decode(q, *arrays[1:], **LENGTHS, schedule=ANY))(arrays[0])
    with pytest.raises(libflash.UnsupportedError, match=r"^q is an array for XLA"):
        jax.jit(lambda q: libflash.decode_schedule(q, *arrays[1:], **LENGTHS))(arrays[0])
    with pytest.raises(TypeError, match="schedule"):
        libflash.jax.decode(*arrays, **LENGTHS, schedule=ANY)
