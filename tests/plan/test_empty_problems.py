"""Plans of backward and its tangent without sequences, query heads, queries or keys: gradients that have elements are written."""

from __future__ import annotations

import ctypes as c
from typing import Any

import abi
import pytest
from described import ADDRESS, DEVICES, explain, lines_of, tensor

TYPES = {"bf16": abi.BFLOAT16, "f16": abi.FLOAT16, "f32": abi.FLOAT32, "f64": abi.FLOAT64}
KEYS, SINK = {"dk and dv", "tangent of dk", "tangent of dv", "tangents of dk and dv"}, {"dsink", "tangent of dsink"}
# (batch, queries, query heads, keys, key heads), the launches among KEYS and SINK, and whether there are launches for queries.
NONE = {
    "sequences": ((0, 300, 4, 200, 2), SINK, False),
    "query heads": ((3, 300, 0, 200, 2), KEYS, False),
    "heads": ((3, 300, 0, 200, 0), set(), False),
    "queries": ((3, 0, 4, 200, 2), KEYS | SINK, False),
    "keys": ((3, 300, 4, 0, 2), SINK, True),
}


def launches(
    lib: c.CDLL, device: str, operation: str, arrays: tuple[abi.Tensor, ...], tangents: dict[str, abi.Tensor], **options: Any
) -> list[str]:
    lib.describe(*DEVICES[device])
    given = {} if operation == "backward" else {"tangents": dict(zip("qkv", arrays, strict=True)) | tangents}
    return [line.partition(":")[0] for line in lines_of(explain(lib, operation, arrays, **given, **options)).get("launch", [])]


@pytest.mark.parametrize("what", NONE)
@pytest.mark.parametrize("operation", ["backward", "backward_tangent"])
@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [("bf16", 64), ("f16", 128), ("bf16", 192), ("f16", 320), ("f32", 96), ("f32", 320), ("f64", 64), ("f64", 512)],
)
@pytest.mark.parametrize("device", ["A100", "H200"])
def test_what_is_launched(lib: c.CDLL, device: str, dtype: str, head_dim: int, operation: str, what: str) -> None:
    (batch, queries, heads_q, keys, heads_k), wanted, has_rows = NONE[what]

    def made(arrays: tuple[abi.Tensor, ...], heads: int, **options: Any) -> set[str]:
        sink, dsink = (tensor(heads, dtype=abi.FLOAT32, address=i * ADDRESS) for i in (2, 3))
        options |= {"learnable_sink": sink} | ({"dsink": dsink} if operation == "backward" else {})
        return set(launches(lib, device, operation, arrays, {"dsink": dsink}, **options))

    def rows(*shape: int) -> abi.Tensor:
        return tensor(*shape, head_dim, dtype=TYPES[dtype])

    everything = made((rows(3, 300, 2),) * 3, 2)
    assert everything & KEYS
    assert everything & SINK
    dense = made((rows(batch, queries, heads_q), *[rows(batch, keys, heads_k)] * 2), heads_q)
    cu = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), tensor(batch + 1, dtype=abi.INT32))
    packed = made((rows(batch * queries, heads_q), *[rows(batch * keys, heads_k)] * 2), heads_q, **cu)
    assert dense & (KEYS | SINK) == packed & (KEYS | SINK) == wanted & everything
    assert bool(dense - KEYS - SINK) == bool(packed - KEYS - SINK) == has_rows


@pytest.mark.parametrize(("batch", "heads_q"), [(0, 4), (3, 0), (0, 0)])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("device", ["A100", "H200"])
def test_bias_that_is_broadcast(lib: c.CDLL, device: str, dtype: str, batch: int, heads_q: int) -> None:
    k = tensor(batch, 200, 2 if heads_q or batch else 0, 64, dtype=TYPES[dtype])
    arrays = tensor(batch, 300, heads_q, 64, dtype=TYPES[dtype]), k, k
    for shape in ((1, 1, 300, 200), (1, heads_q, 300, 200), (batch, 1, 1, 200), (1, 1, 1, 1)):
        bias, dbias = (tensor(*shape, dtype=TYPES[dtype], address=i * ADDRESS) for i in (2, 3))
        made = launches(lib, device, "backward", arrays, {}, bias=bias, dbias=dbias)
        assert ("dbias" in made) == (0 not in shape)
        made = launches(lib, device, "backward_tangent", arrays, {"dbias": dbias}, bias=bias)
        assert ("tangent of dbias" in made) == (0 not in shape)


def test_the_first_launch_has_the_label(lib: c.CDLL) -> None:
    k = tensor(0, 200, 2, 64)
    sink, dsink = (tensor(4, dtype=abi.FLOAT32, address=i * ADDRESS) for i in (2, 3))
    lib.describe(*DEVICES["H200"])
    lines = lines_of(explain(lib, "backward", (tensor(0, 300, 4, 64), k, k), learnable_sink=sink, dsink=dsink))
    assert lines["launch"] == ["dsink: 4 thread blocks of 1400 threads, 100000 bytes of shared memory each"]
    assert lines["workspace"] == ["0 bytes"]
